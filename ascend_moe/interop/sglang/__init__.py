"""SGLang's EPMoE by SGLang's names: whole experts on every rank, replicated tokens, partial sums.

The steps of its forward are functions of `steps`, the product of `grouped_gemm`. `EPMoE` is the layer: it returns its
rank's part of the sum, or the sum itself, by an all-reduce or by dispatch and combine.
"""

from ascend_moe.interop.sglang.layer import EPMoE
from ascend_moe.interop.sglang.steps import (
    GroupedGemmRunner,
    dynamic_scale,
    post_reorder,
    pre_reorder,
    run_moe_ep_preproess,
    select_experts,
    silu_and_mul,
)
from ascend_moe.interop.sglang.weights import (
    Fp8Config,
    Fp8EPMoEMethod,
    UnquantizedEPMoEMethod,
    make_expert_params_mapping,
)
from ascend_moe.placement import ExpertPlacement

__all__ = [
    "EPMoE",
    "ExpertPlacement",
    "Fp8Config",
    "Fp8EPMoEMethod",
    "GroupedGemmRunner",
    "UnquantizedEPMoEMethod",
    "dynamic_scale",
    "make_expert_params_mapping",
    "post_reorder",
    "pre_reorder",
    "run_moe_ep_preproess",
    "select_experts",
    "silu_and_mul",
]
