"""vllm-ascend's own operators, ``torch.ops._C_ascend.*``, where its compiled part is not installed.

    from ascend_moe.interop import vllm_ascend
    vllm_ascend.register()

Schemas and defaults are those of the installed release of vllm-ascend (`schemas`); the work is that of the
operators of `ascend_moe.npu`. On NPUs with a built vllm-ascend nothing is left to define: there
`ascend_moe.patch_torch_npu` is the one line.
"""

from ascend_moe.interop.vllm_ascend.operators import moe_gating_top_k, moe_gating_top_k_hash
from ascend_moe.interop.vllm_ascend.registration import NAMESPACE, OPS, register

__all__ = ["NAMESPACE", "OPS", "moe_gating_top_k", "moe_gating_top_k_hash", "register"]
