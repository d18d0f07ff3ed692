"""vLLM plug-in: replaces torch_npu's operators in every process if ASCEND_MOE_PATCH=1.

vLLM calls each entry point of the group ``vllm.general_plugins`` in the parent, the engine cores and the workers,
at their start; a patch in the parent alone would not reach the others. Without the variable neither vllm nor torch_npu
is imported. With it, `ascend_moe.interop.vllm_ascend.register` adds missing operators to ``torch.ops._C_ascend``, and
`ascend_moe.patch_torch_npu` replaces dispatch and combine of torch_npu where it is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from contextlib import suppress

from ascend_moe import npu, settings
from ascend_moe.errors import LibraryError
from ascend_moe.interop import vllm_ascend
from ascend_moe.native import library, log
from ascend_moe.native.torch_npu import import_torch_npu

_COMPILED = "vllm_ascend.vllm_ascend_C"


def load() -> None:
    """Replace torch_npu's and define vllm-ascend's missing operators if ASCEND_MOE_PATCH is 1; idempotent.

    Runs `replace_operators` and `ascend_moe.interop.vllm_ascend.register`. Raises LibraryError on NPUs where CANN does
    not find `build.sh`'s operator package, ArgumentError if ASCEND_MOE_PATCH is neither 0 nor 1.
    """
    if not settings.PATCH.get():
        return
    replaced = replace_operators()
    with suppress(ImportError):  # a built vllm-ascend defines its own operators first
        importlib.import_module(_COMPILED)
    defined = vllm_ascend.register()
    log.configure()
    text = "%s=1: replaced %s in torch_npu, defined %s in torch.ops.%s; without the variable nothing is replaced"
    words = [", ".join(names) or "nothing" for names in (replaced, defined)]
    level = logging.WARNING if replaced or defined else logging.INFO
    log.say(level, text, settings.PATCH.name, *words, vllm_ascend.NAMESPACE)


def replace_operators() -> list[str]:
    """Replace torch_npu's dispatch, combine and barrier by this package's; return the names that this call replaced.

    The list is empty without torch_npu, or if an earlier call has replaced them. Raises LibraryError if torch_npu
    cannot be imported, or on NPUs where CANN does not find `build.sh`'s operator package.
    """
    if importlib.util.find_spec("torch_npu") is None:
        return []
    _need_package()
    return sorted(npu.patch_torch_npu().replaced)


def _need_package() -> None:
    """Raise LibraryError on NPUs without the operator package."""
    if settings.VNPU.is_set() or library.own_operator_library() is not None:  # the virtual NPU includes the package
        return
    torch_npu = import_torch_npu(f"{settings.PATCH.name}=1: torch_npu")
    if torch_npu.npu.is_available():
        raise LibraryError(
            f"{settings.PATCH.name}=1, but no operator package of ascend_moe is in ASCEND_CUSTOM_OPP_PATH or below "
            "ASCEND_OPP_PATH/vendors: run ./build.sh --soc=ascend910b,ascend910_93 and the .run file that it builds, "
            f"source its set_env.bash, or unset {settings.PATCH.name}"
        )
