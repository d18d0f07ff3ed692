"""Puts this package's operators into every process of vLLM, by one variable: ASCEND_MOE_PATCH=1.

vLLM calls each entry point of the group ``vllm.general_plugins`` in the parent, the engine cores and the workers,
before they work. A patch in the parent alone would not reach the others. Without the variable `load` does nothing, and
neither vllm nor torch_npu is imported. With it, ``torch.ops._C_ascend`` gets the operators that it lacks, by
`ascend_moe.interop.vllm_ascend.register`, and where torch_npu is, its dispatch and combine become this package's, by
`ascend_moe.patch_torch_npu`.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from contextlib import suppress

from ascend_moe import npu, settings
from ascend_moe.errors import LibraryError
from ascend_moe.interop import vllm_ascend
from ascend_moe.native import log, opp
from ascend_moe.native.torch_npu import import_torch_npu

_COMPILED = "vllm_ascend.vllm_ascend_C"


def load() -> None:
    """Replaces torch_npu's operators where ASCEND_MOE_PATCH is 1. A second call changes nothing.

    Raises:
        LibraryError: the processes run on NPUs, and the operator package of `build.sh` is not where CANN looks.
        ArgumentError: ASCEND_MOE_PATCH is neither 0 nor 1.
    """
    if settings.PATCH.get() != "1":
        return
    replaced = replace_operators()
    with suppress(ImportError):  # a built vllm-ascend defines its own operators, which stay
        importlib.import_module(_COMPILED)
    defined = vllm_ascend.register()
    log.configure()
    text = "%s=1: replaced %s in torch_npu, defined %s in torch.ops.%s; without the variable nothing is replaced"
    words = [", ".join(names) or "nothing" for names in (replaced, defined)]
    level = logging.WARNING if replaced or defined else logging.INFO
    log.say(level, text, settings.PATCH.name, *words, vllm_ascend.NAMESPACE)


def replace_operators() -> list[str]:
    """Makes dispatch and combine of torch_npu this package's, where torch_npu is. Returns the names replaced.

    Raises:
        LibraryError: as `load`.
    """
    if importlib.util.find_spec("torch_npu") is None:
        return []
    _need_package()
    return sorted(npu.patch_torch_npu().replaced)


def _need_package() -> None:
    """Refuses NPUs on which the first op would find no kernel."""
    if settings.VNPU.is_set() or opp.ours() is not None:  # the virtual NPU brings the package along
        return
    torch_npu = import_torch_npu(f"{settings.PATCH.name}=1: torch_npu")
    if torch_npu.npu.is_available():
        raise LibraryError(
            f"{settings.PATCH.name}=1, but no operator package of ascend_moe is in ASCEND_CUSTOM_OPP_PATH or below "
            "ASCEND_OPP_PATH/vendors: run ./build.sh --soc=ascend910b,ascend910_93 and the .run file that it makes, "
            f"source its set_env.bash, or unset {settings.PATCH.name}"
        )
