"""``patch_torch_npu``: callers of torch_npu's dispatch and combine get this package's, until it is undone."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from . import npu
from ._torch_npu import import_torch_npu

# Every one that uses the windows of a group: ours and CANN's in one group would spoil each other's.
NAMES = (
    "npu_moe_distribute_dispatch",
    "npu_moe_distribute_dispatch_v2",
    "npu_moe_distribute_combine",
    "npu_moe_distribute_combine_v2",
    "npu_moe_distribute_combine_add_rms_norm",
    "_npu_distribute_barrier",
)
_MISSING: Any = object()


class TorchNpuPatch:
    """What one call of ``patch_torch_npu`` has swapped. A context manager, which undoes it at the end."""

    def __init__(self) -> None:
        self._module: Any = import_torch_npu("patch_torch_npu: torch_npu")
        self._originals: dict[str, Any] = {}
        for name in NAMES:
            before = getattr(self._module, name, _MISSING)
            if before is not getattr(npu, name):  # else an earlier patch is in place, and is the one to undo
                self._originals[name] = before
                setattr(self._module, name, getattr(npu, name))

    def undo(self) -> None:
        """Puts torch_npu's own functions back, but for those that others have replaced since. Idempotent."""
        while self._originals:
            name, before = self._originals.popitem()
            if getattr(self._module, name, _MISSING) is not getattr(npu, name):
                continue
            if before is _MISSING:
                delattr(self._module, name)
            else:
                setattr(self._module, name, before)

    def __enter__(self) -> TorchNpuPatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def patch_torch_npu() -> TorchNpuPatch:
    """Makes ``torch_npu.npu_moe_distribute_{dispatch,combine}{,_v2}`` this package's ops.

    For code that calls torch_npu's own, vllm-ascend's for one. Those that use the same windows go with them:
    ``npu_moe_distribute_combine_add_rms_norm`` and ``_npu_distribute_barrier``. Only attributes of the module
    torch_npu are swapped; ``torch.ops.npu`` keeps CANN's operators. A second call while the first holds swaps
    nothing.

        with ascend_moe.patch_torch_npu():
            ...
        patch = ascend_moe.patch_torch_npu()
        patch.undo()

    Raises:
        LibraryError: torch_npu cannot be imported.
    """
    return TorchNpuPatch()
