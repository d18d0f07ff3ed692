"""MoE expert parallelism for Ascend: dispatch and combine as AscendC kernels, on NPUs and on a CPU emulator (twin)."""

# ruff: noqa: F403, F405  _public defines the names, for type checkers here and at run time in _load

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _autoload  # first: it decides how torch is imported
from ._text import installed_version

if TYPE_CHECKING:
    from ._public import *

__version__ = installed_version("ascend_moe") or "0+source"

__all__ = [
    "AscendMoeError",
    "LocalCluster",
    "MoEConfig",
    "MoELayer",
    "agree",
    "algorithm_of",
    "begin_combine",
    "begin_dispatch",
    "check",
    "close",
    "comm_name",
    "compare",
    "dequantize_rows",
    "exclude_experts",
    "npu_moe_distribute_combine",
    "npu_moe_distribute_combine_v2",
    "npu_moe_distribute_dispatch",
    "npu_moe_distribute_dispatch_v2",
    "patch_torch_npu",
    "set_int8_gradient",
    "shrink",
    "trace",
    "window_empty",
]


# `import ascend_moe` registers torch.ops.ascend_moe, so it imports torch and every public name. Only processes of the
# command `ascend-moe` defer that until a name is used (PEP 562): printing a plan or help needs no torch.
def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _load()
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _load() -> None:
    from . import _public

    globals().update((name, getattr(_public, name)) for name in (*__all__, "layer_ops"))


if not _autoload.in_command():
    _load()
