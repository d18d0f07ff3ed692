"""vLLM's modular kernel over this package's operators: subclasses of vLLM's bases, or of `bases` without vLLM.

    from vllm.model_executor.layers.fused_moe import modular_kernel as mk, topk_weight_and_reduce as war
    first = make_prepare_finalize(mk, ascend_moe, group_name, rank, world, num_experts)
    kernel = mk.FusedMoEModularKernel(first, make_experts(mk, war, ascend_moe, quant_config, num_experts // world))

`make_prepare_finalize` makes dispatch and combine, `make_experts` the experts, `FusedMoEModularKernel` joins them, and
`select`, in vLLM `init_prepare_finalize`, does all three. With mk, war and ops None they need no vLLM.
"""

from __future__ import annotations

from ascend_moe.interop.vllm.all2all import All2AllHandle, All2AllManager, FaultTolerance, rank_mapping
from ascend_moe.interop.vllm.bases import (
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    FusedMoEExpertsModular,
    FusedMoEPermuteExpertsUnpermute,
    FusedMoEPrepareAndFinalize,
    FusedMoEPrepareAndFinalizeModular,
    TopKWeightAndReduce,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNaiveBatched,
    TopKWeightAndReduceNoOP,
)
from ascend_moe.interop.vllm.experts import FusedMoEQuantConfig, int8_w8a8_moe_quant_config
from ascend_moe.interop.vllm.kernel import (
    FusedMoEModularKernel,
    MoEKernelConfig,
    init_prepare_finalize,
    make_experts,
    make_prepare_finalize,
    maybe_make_prepare_finalize,
    select,
    select_gemm_impl,
)

__all__ = [
    "All2AllHandle",
    "All2AllManager",
    "ExpertTokensMetadata",
    "FaultTolerance",
    "FusedMoEActivationFormat",
    "FusedMoEExpertsModular",
    "FusedMoEModularKernel",
    "FusedMoEPermuteExpertsUnpermute",
    "FusedMoEPrepareAndFinalize",
    "FusedMoEPrepareAndFinalizeModular",
    "FusedMoEQuantConfig",
    "MoEKernelConfig",
    "TopKWeightAndReduce",
    "TopKWeightAndReduceContiguous",
    "TopKWeightAndReduceDelegate",
    "TopKWeightAndReduceNaiveBatched",
    "TopKWeightAndReduceNoOP",
    "init_prepare_finalize",
    "int8_w8a8_moe_quant_config",
    "make_experts",
    "make_prepare_finalize",
    "maybe_make_prepare_finalize",
    "rank_mapping",
    "select",
    "select_gemm_impl",
]
