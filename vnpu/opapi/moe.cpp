// Matrix products, norms, quantisation, and the operators of MoE layers that torch_npu adds.
#include "table.h"

using namespace vnpu::types;

// Matrix products. The last int8 chooses a precision mode that means nothing here.
VNPU_OP(aclnnMatmul, T, T, T, I8)
VNPU_OP(aclnnMm, T, T, T, I8)
VNPU_OP(aclnnBatchMatMul, T, T, T, I8)
VNPU_OP(aclnnMv, T, T, T, I8)
VNPU_OP(aclnnDot, T, T, T)
VNPU_OP(aclnnAddmm, T, T, T, S, S, T, I8)
VNPU_OP(aclnnInplaceAddmm, T, T, T, S, S, I8)
VNPU_OP(aclnnAddmv, T, T, T, S, S, T, I8)
VNPU_OP(aclnnBaddbmm, T, T, T, S, S, T, I8)

// x, weight, bias, scale, offset, antiquant_scale, antiquant_offset, per_token_scale, group_list,
// activation_input, activation_quant_scale, activation_quant_offset, split_item, group_type, group_list_type,
// act_type[, tuning_config], out, activation_feature_out, dynamic_quant_scale_out
// torch_npu looks for V4 first and then calls V5.
VNPU_OP(aclnnGroupedMatmulV4, L, L, L, L, L, L, L, L, T, L, L, L, I, I, I, I, L, L, L)
VNPU_OP(aclnnGroupedMatmulV5, L, L, L, L, L, L, L, L, T, L, L, L, I, I, I, I, IA, L, L, L)
// The form of a Python list: group_list is an aclIntArray.
VNPU_OP(aclnnGroupedMatmul, L, L, L, L, L, L, L, IA, I, L)

VNPU_OP(aclnnGroupedMatmulSwigluQuantWeightNZ, T, T, T, T, T, T, T, T, T, T)
// x, weight, weight_scale, weight_assist_matrix, bias, x_scale, smooth_scale, group_list, dequant_mode,
// dequant_dtype, quant_mode, group_list_type, tuning_config, out, out_scale
VNPU_OP(aclnnGroupedMatmulSwigluQuantV2, T, L, L, L, T, T, T, T, I, I, I, I, IA, T, T)

VNPU_OP(aclnnRmsNorm, T, T, D, T, T)
VNPU_OP(aclnnAddRmsNorm, T, T, T, D, T, T, T)
VNPU_OP(aclnnLayerNorm, T, IA, T, T, D, T, T, T)

VNPU_OP(aclnnSwiGlu, T, I, T)
VNPU_OP(aclnnSwiGluGrad, T, T, I, T)
VNPU_OP(aclnnDynamicQuantV2, T, T, T, I32, T, T, T)
VNPU_OP(aclnnDynamicQuantV3, T, T, T, I32, B, C, T, T, T)
VNPU_OP(aclnnDequantSwigluQuantV2, T, T, T, T, T, T, T, B, C, I, C, I, I, D, D, D, T, T)
VNPU_OP(aclnnQuantize, T, T, T, I32, I, T)
VNPU_OP(aclnnAscendQuantV3, T, T, T, B, C, I32, I, T)

VNPU_OP(aclnnMoeGatingTopK, T, T, I, I, I, I, I, I, B, D, D, T, T, T)
VNPU_OP(aclnnMoeGatingTopKSoftmax, T, T, I, T, T, T)
VNPU_OP(aclnnMoeGatingTopKSoftmaxV2, T, T, I, I, B, T, T, T)
VNPU_OP(aclnnMoeInitRouting, T, T, T, I, T, T, T)
VNPU_OP(aclnnMoeInitRoutingV2, T, T, I, I, I, I, I, B, T, T, T, T)
VNPU_OP(aclnnMoeInitRoutingV3, T, T, T, T, I, I, I, I, I, B, I, IA, I, T, T, T, T)
VNPU_OP(aclnnMoeComputeExpertTokens, T, I, T)
VNPU_OP(aclnnMoeTokenPermute, T, T, I, B, T, T)
VNPU_OP(aclnnMoeTokenUnpermute, T, T, T, B, IA, T)
VNPU_OP(aclnnMoeFinalizeRoutingV2, T, T, T, T, T, T, T, I, T)
VNPU_OP(aclnnMoeReRouting, T, T, T, I, I, T, T, T, T)
VNPU_OP(aclnnMoeUpdateExpert, T, T, T, T, T, I, I, I, T, T)
VNPU_OP(aclnnMoeTokenPermuteGrad, T, T, I, B, T)
VNPU_OP(aclnnMoeTokenUnpermuteGrad, T, T, T, T, B, IA, T, T)
