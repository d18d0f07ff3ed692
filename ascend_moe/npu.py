"""torch_npu's names for the operators of this package, for NPU code that also runs on a CPU.

    from ascend_moe import npu as torch_npu

Signatures and results are torch_npu's. With CPU tensors, dispatch and combine run as AscendC kernels on the twin
(AscendC emulator), the other operators as plain torch. Apart from the import, only the group name changes:
``group_ep = ascend_moe.comm_name(process_group)``.

`patch_torch_npu` serves callers that cannot be edited: it replaces these functions in the module torch_npu.
"""

from __future__ import annotations

from typing import Any

from .experts import npu_clipped_swiglu, npu_dequant_swiglu_quant, npu_dynamic_quant, npu_grouped_matmul, npu_swiglu
from .native.torch_npu import import_torch_npu
from .ops import (
    npu_moe_distribute_combine,
    npu_moe_distribute_combine_v2,
    npu_moe_distribute_dispatch,
    npu_moe_distribute_dispatch_v2,
)
from .routers import npu_moe_gating_top_k, npu_moe_gating_top_k_softmax, npu_moe_gating_top_k_softmax_v2
from .torch_npu_ops.alltoallv import npu_alltoallv_gmm, npu_gmm_alltoallv
from .torch_npu_ops.collectives import _npu_distribute_barrier, npu_moe_distribute_combine_add_rms_norm
from .torch_npu_ops.init_routing import (
    npu_moe_compute_expert_tokens,
    npu_moe_init_routing,
    npu_moe_init_routing_v2,
    npu_moe_update_expert,
)
from .torch_npu_ops.matmul_epilogues import (
    npu_grouped_matmul_finalize_routing,
    npu_grouped_matmul_swiglu_quant,
    npu_grouped_matmul_swiglu_quant_v2,
)
from .torch_npu_ops.permute import (
    npu_moe_finalize_routing,
    npu_moe_re_routing,
    npu_moe_token_permute,
    npu_moe_token_unpermute,
)

__all__ = [
    "_npu_distribute_barrier",
    "npu_alltoallv_gmm",
    "npu_clipped_swiglu",
    "npu_dequant_swiglu_quant",
    "npu_dynamic_quant",
    "npu_gmm_alltoallv",
    "npu_grouped_matmul",
    "npu_grouped_matmul_finalize_routing",
    "npu_grouped_matmul_swiglu_quant",
    "npu_grouped_matmul_swiglu_quant_v2",
    "npu_moe_compute_expert_tokens",
    "npu_moe_distribute_combine",
    "npu_moe_distribute_combine_add_rms_norm",
    "npu_moe_distribute_combine_v2",
    "npu_moe_distribute_dispatch",
    "npu_moe_distribute_dispatch_v2",
    "npu_moe_finalize_routing",
    "npu_moe_gating_top_k",
    "npu_moe_gating_top_k_softmax",
    "npu_moe_gating_top_k_softmax_v2",
    "npu_moe_init_routing",
    "npu_moe_init_routing_v2",
    "npu_moe_re_routing",
    "npu_moe_token_permute",
    "npu_moe_token_unpermute",
    "npu_moe_update_expert",
    "npu_swiglu",
    "patch_torch_npu",
]


# The operators that use a group's windows. They are replaced together: CANN's operators and this package's in one
# group would overwrite each other's windows.
WINDOW_OPERATORS = (
    "npu_moe_distribute_dispatch",
    "npu_moe_distribute_dispatch_v2",
    "npu_moe_distribute_combine",
    "npu_moe_distribute_combine_v2",
    "npu_moe_distribute_combine_add_rms_norm",
    "_npu_distribute_barrier",
)
_MISSING: Any = object()


class TorchNpuPatch:
    """The functions replaced by a call of `patch_torch_npu`; ``undo``, or the end of a with block, restores them."""

    def __init__(self) -> None:
        self._module: Any = import_torch_npu("patch_torch_npu: torch_npu")
        self._originals: dict[str, Any] = {}
        for name in WINDOW_OPERATORS:
            before = getattr(self._module, name, _MISSING)
            if before is not globals()[name]:  # else an earlier patch replaced it, and its undo restores it
                self._originals[name] = before
                setattr(self._module, name, globals()[name])

    @property
    def replaced(self) -> tuple[str, ...]:
        """Names in torch_npu that this patch currently replaces."""
        return tuple(self._originals)

    def undo(self) -> None:
        """Restore torch_npu's functions, except those that were replaced again since. Idempotent."""
        while self._originals:
            name, before = self._originals.popitem()
            if getattr(self._module, name, _MISSING) is not globals()[name]:
                continue
            if before is _MISSING:
                delattr(self._module, name)
            else:
                setattr(self._module, name, before)

    def __enter__(self) -> TorchNpuPatch:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def patch_torch_npu() -> TorchNpuPatch:
    """Replace ``torch_npu.npu_moe_distribute_{dispatch,combine}{,_v2}`` by this package's ops; return the patch.

    For code that calls ``torch_npu.npu_moe_...`` itself, as vllm-ascend does. The operators that use the same
    windows, ``npu_moe_distribute_combine_add_rms_norm`` and ``_npu_distribute_barrier``, are replaced too.
    Only attributes of the module torch_npu change; ``torch.ops.npu`` keeps CANN's operators. A second call
    while the first is in force changes nothing.

        with ascend_moe.patch_torch_npu():
            ...
        patch = ascend_moe.patch_torch_npu()
        patch.undo()

    Raises:
        LibraryError: torch_npu cannot be imported.
    """
    return TorchNpuPatch()
