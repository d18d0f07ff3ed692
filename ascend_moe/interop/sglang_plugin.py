"""SGLang plug-in: replaces torch_npu's operators in every process if ASCEND_MOE_PATCH=1.

SGLang calls each entry point of the group ``sglang.srt.plugins`` in the server's process and in its schedulers'. The
deep_ep of sgl-kernel-npu calls torch_npu's dispatch and combine where DEEP_USE_MODE is ops; with the variable these are
this package's. Without it neither sglang nor torch_npu is imported.
"""

from __future__ import annotations

import logging
import os

from ascend_moe import settings
from ascend_moe.interop import vllm_plugin
from ascend_moe.native import log


def load() -> None:
    """Replace torch_npu's dispatch, combine and barrier by this package's if ASCEND_MOE_PATCH is 1; idempotent.

    Warns if DEEP_USE_MODE is not "ops", as deep_ep then calls other operators. Raises ArgumentError if ASCEND_MOE_PATCH
    is neither 0 nor 1, LibraryError on NPUs where CANN does not find `build.sh`'s operator package; SGLang logs both.
    """
    if not settings.PATCH.get():
        return
    replaced = vllm_plugin.replace_operators()
    log.configure()
    level = logging.WARNING if replaced else logging.INFO
    text = "%s=1: replaced %s in torch_npu; without the variable nothing is replaced"
    log.say(level, text, settings.PATCH.name, ", ".join(replaced) or "nothing")
    if os.environ.get("DEEP_USE_MODE", "").strip().lower() != "ops":
        log.say(logging.WARNING, "DEEP_USE_MODE is not ops: sgl-kernel-npu's deep_ep does not call these operators")
