"""torch_npu's names for the operators of this package, to write NPU code that also runs on a CPU.

    from ascend_moe import npu as torch_npu

Signatures and results are torch_npu's. CPU tensors run here: dispatch and combine as AscendC kernels on the
twin, the others as plain torch. The only other line of a caller that changes is the one that asks for the
group's name: ``group_ep = ascend_moe.comm_name(process_group)``.
"""

from __future__ import annotations

from .experts import npu_dequant_swiglu_quant, npu_dynamic_quant, npu_grouped_matmul, npu_swiglu
from .ops import (
    npu_moe_distribute_combine,
    npu_moe_distribute_combine_v2,
    npu_moe_distribute_dispatch,
    npu_moe_distribute_dispatch_v2,
)
from .routing import npu_moe_gating_top_k, npu_moe_gating_top_k_softmax, npu_moe_gating_top_k_softmax_v2
from .vendor.add_norm import npu_moe_distribute_combine_add_rms_norm
from .vendor.balance import npu_moe_update_expert
from .vendor.barrier import _npu_distribute_barrier
from .vendor.fused import (
    npu_grouped_matmul_finalize_routing,
    npu_grouped_matmul_swiglu_quant,
    npu_grouped_matmul_swiglu_quant_v2,
)
from .vendor.permute import (
    npu_moe_finalize_routing,
    npu_moe_re_routing,
    npu_moe_token_permute,
    npu_moe_token_unpermute,
)
from .vendor.routing import npu_moe_compute_expert_tokens, npu_moe_init_routing, npu_moe_init_routing_v2

__all__ = [
    "_npu_distribute_barrier",
    "npu_dequant_swiglu_quant",
    "npu_dynamic_quant",
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
]
