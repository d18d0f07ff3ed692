// The built-in operators of torch_npu that the virtual NPU has, with the types of their arguments.
#include "call.h"

using namespace vnpu::types;

// ---- operators that work element by element: arithmetic, comparisons, logic, functions ----

// One input.
VNPU_OPS((T, T), Abs, Neg, Sign, Silu, Round, Trunc, Gelu, FastGelu, LogSigmoid, BitwiseNot, IsFinite, IsPosInf,
         IsNegInf, Signbit)
VNPU_BOTH((T), Exp, Exp2, Expm1, Log, Log2, Log10, Log1p, Sqrt, Rsqrt, Reciprocal, Sigmoid, Relu, Tanh, Erf, Sin, Cos,
          Floor, Ceil, LogicalNot)
VNPU_BOTH((T, I), RoundDecimals)
VNPU_OP(aclnnSoftplus, T, S, S, T)
VNPU_OP(aclnnLogSigmoidForward, T, T, T)
VNPU_BOTH((T, F, F, F), NanToNum)

// Arithmetic with a tensor, and (...s) with a number; comparisons; logic on truth values and on bits.
VNPU_BOTH((T, T), Mul, Div, FloorDivide, RemainderTensorTensor, PowTensorTensor, Atan2, ClampMinTensor, ClampMaxTensor,
          LogicalAnd, LogicalOr, BitwiseAndTensor, BitwiseXorTensor, EqTensor, NeTensor, LtTensor, LeTensor, GtTensor,
          GeTensor)
VNPU_BOTH((T, S), Muls, Divs, FloorDivides, RemainderTensorScalar, PowTensorScalar, ClampMax, BitwiseAndScalar,
          BitwiseXorScalar, EqScalar, NeScalar, LtScalar, LeScalar, GtScalar, GeScalar)
VNPU_OPS((T, T, T), FmodTensor, Maximum, Minimum, Equal, LogicalXor, BitwiseOrTensor, LeftShift, RightShift)
VNPU_OPS((T, S, T), FmodScalar, ClampMin, BitwiseOrScalar, LeftShifts)
VNPU_OPS((S, T, T), RemainderScalarTensor, PowScalarTensor)
VNPU_BOTH((T, T, S), Add, Sub, Lerps)
VNPU_BOTH((T, S, S), Adds, Subs)
VNPU_OP(aclnnRsub, T, T, S, T)
VNPU_OP(aclnnRsubs, T, S, S, T)
VNPU_BOTH((T, T, I32), DivMod)
VNPU_BOTH((T, S, I32), DivMods)
VNPU_BOTH((T, T, T, S), Addcmul, Addcdiv)
VNPU_BOTH((T, T, T), Lerp)
VNPU_OP(aclnnClamp, T, S, S, T)
VNPU_OP(aclnnClampTensor, T, T, T, T)
VNPU_OP(aclnnIsClose, T, T, D, D, B, T)

// Backward passes of the functions above.
VNPU_OPS((T, T, T), SigmoidBackward, SiluBackward, TanhBackward, GeluBackward)
VNPU_OP(aclnnThresholdBackward, T, T, S, T)
VNPU_OP(aclnnLogSigmoidBackward, T, T, T, T)

// On lists of tensors, for optimizers; ...ScalarV2 with a number for all, ...ScalarList with one for each.
VNPU_OPS((L, L), ForeachAbs, ForeachAcos, ForeachAsin, ForeachAtan, ForeachCos, ForeachCosh, ForeachErf, ForeachErfc,
         ForeachExp, ForeachExpm1, ForeachLog, ForeachLog10, ForeachLog1p, ForeachLog2, ForeachNeg, ForeachReciprocal,
         ForeachSigmoid, ForeachSign, ForeachSin, ForeachSinh, ForeachSqrt, ForeachTan, ForeachTanh, ForeachCopy)
VNPU_OPS((L, L, L), ForeachMulList, ForeachDivList, ForeachMaximumList, ForeachMinimumList, ForeachPowList)
VNPU_OPS((L, S, L), ForeachAddScalarV2, ForeachSubScalarV2, ForeachMulScalarV2, ForeachDivScalarV2,
         ForeachMaximumScalarV2, ForeachPowScalarV2)
VNPU_OPS((L, SL, L), ForeachAddScalarList, ForeachSubScalarList, ForeachMulScalarList, ForeachDivScalarList,
         ForeachMaximumScalarList, ForeachMinimumScalarList, ForeachPowScalarList)
VNPU_OPS((L, L, S, L), ForeachAddListV2, ForeachSubListV2, ForeachLerpScalar)
VNPU_OPS((L, L, L, S, L), ForeachAddcdivScalarV2, ForeachAddcmulScalarV2)
VNPU_OP(aclnnForeachZeroInplace, L)
VNPU_OP(aclnnForeachLerpList, L, L, L, L)
VNPU_OP(aclnnForeachPowScalarAndTensor, S, L, L)
VNPU_OP(aclnnForeachNonFiniteCheckAndUnscale, L, T, T)
VNPU_OP(aclnnAmpUpdateScale, T, T, T, D, D, I, T, T)

// ---- operators that make, move, select or reduce: filling, copying, indexing, sorting, sums ----

// Filling and copying.
VNPU_OPS((T), InplaceZero, InplaceOne)
VNPU_OPS((T, T), InplaceCopy, InplaceFillTensor)
VNPU_OP(aclnnCast, T, I32, T)
VNPU_OP(aclnnInplaceFillScalar, T, S)
VNPU_OP(aclnnInplaceFillDiagonal, T, S, B)
VNPU_OPS((S, S, S, T), Arange, Range)
VNPU_OP(aclnnLinspace, S, S, I, T)
VNPU_OP(aclnnEye, I, I, T)
VNPU_BOTH((T, I), Tril, Triu)

// Random numbers. The ...Tensor forms read seed and offset from memory, so that a captured graph draws anew.
VNPU_OP(aclnnInplaceNormal, T, F, F, I, I)
VNPU_OP(aclnnInplaceNormalTensor, T, F, F, T, T, I)
VNPU_OP(aclnnNormalFloatFloat, F, F, I, I, T)
VNPU_OP(aclnnNormalFloatTensor, F, T, I, I, T)
VNPU_OP(aclnnNormalTensorFloat, T, F, I, I, T)
VNPU_OP(aclnnNormalTensorTensor, T, T, I, I, T)
VNPU_OP(aclnnInplaceUniform, T, D, D, I, I)
VNPU_OP(aclnnInplaceUniformTensor, T, D, D, T, T, I)
VNPU_OP(aclnnInplaceRandom, T, I, I, I, I)
VNPU_OP(aclnnInplaceRandomTensor, T, I, I, T, T, I)
VNPU_OP(aclnnInplaceBernoulli, T, S, I, I)
VNPU_OP(aclnnInplaceBernoulliTensor, T, T, I, I)
VNPU_OP(aclnnRandperm, I, I, I, T)
VNPU_OP(aclnnMultinomial, T, I, B, I, I, T)
VNPU_OP(aclnnDropoutGenMaskV2, IA, D, I, I, I32, T)
VNPU_OP(aclnnDropoutGenMaskV2Tensor, IA, D, T, T, I, I32, T)
VNPU_OP(aclnnDropoutDoMask, T, T, D, T)

// Selecting and placing.
VNPU_OP(aclnnSWhere, T, T, T, T)
VNPU_OP(aclnnInplaceMaskedFillScalar, T, T, S)
VNPU_OPS((T, T, T), InplaceMaskedFillTensor, MaskedSelect, Take, ScatterNdUpdate, Embedding)
VNPU_OPS((T, T), Nonzero, NonzeroV2)
VNPU_OP(aclnnIndex, T, L, T)
VNPU_OP(aclnnIndexPutImpl, T, L, T, B, B)
VNPU_OPS((T, I, T, T), IndexSelect, InplaceIndexCopy, Gather)
VNPU_OP(aclnnIndexAdd, T, I, T, T, S, T)
VNPU_BOTH((T, I, T, S), IndexFill)
VNPU_BOTH((T, I, T, T, I), Scatter)
VNPU_BOTH((T, I, T, S, I), ScatterValue)
VNPU_OP(aclnnScatterAdd, T, I, T, T, T)
VNPU_OP(aclnnConstantPadNd, T, IA, S, T)
VNPU_OP(aclnnEmbeddingDenseBackward, T, T, I, I, B, T)
VNPU_OPS((L, I, T), Cat, Stack)
VNPU_OPS((T, IA, T), Flip, Repeat)
VNPU_OP(aclnnRoll, T, IA, IA, T)
VNPU_OPS((T, T, I, T), RepeatInterleave, Bincount)
VNPU_OP(aclnnRepeatInterleaveInt, T, I, I, T)
VNPU_OP(aclnnRepeatInterleaveWithDim, T, T, I, I, T)
VNPU_OP(aclnnRepeatInterleaveIntWithDim, T, I, I, I, T)
VNPU_OP(aclnnRepeatInterleaveTensor, T, I, T)
VNPU_OP(aclnnOneHot, T, I, T, T, I, T)
VNPU_OP(aclnnHistc, T, I, S, S, T)

// Sorting.
VNPU_OP(aclnnTopk, T, I, I, B, B, T, T)
VNPU_OP(aclnnSort, T, B, I, B, T, T)
VNPU_OP(aclnnKthvalue, T, I, I, B, T, T)
VNPU_OP(aclnnUnique2, T, B, B, B, T, T, T)
VNPU_OP(aclnnSearchSorted, T, T, B, B, T, T)

// Reducing and scanning.
VNPU_OPS((T, T), Max, Min, Median)
VNPU_OPS((T, I, B, T, T), MaxDim, MinDim, MedianDim)
VNPU_OPS((T, IA, B, T), Amax, Amin, All, Any, LogSumExp)
VNPU_OPS((T, IA, B, I32, T), ReduceSum, Mean)
VNPU_OPS((T, I, B, T), ArgMax, ArgMin)
VNPU_OPS((T, IA, I, B, T), Std, VarCorrection)
VNPU_OP(aclnnVarMean, T, IA, I, B, T, T)
VNPU_OP(aclnnAminmax, T, IA, B, T, T)
VNPU_OP(aclnnProd, T, I32, T)
VNPU_OP(aclnnProdDim, T, I, B, I32, T)
VNPU_OP(aclnnLinalgVectorNorm, T, S, IA, B, I32, T)
VNPU_OP(aclnnCumsum, T, I, I32, T)
VNPU_OP(aclnnCumprod, T, S, I32, T)
VNPU_OPS((T, I, T), Softmax, LogSoftmax)
VNPU_OPS((T, T, I, T), SoftmaxBackward, LogSoftmaxBackward, MseLoss)
VNPU_OP(aclnnMseLossBackward, T, T, T, I, T)
VNPU_OP(aclnnNLLLoss, T, T, T, I, I, T, T)
VNPU_OP(aclnnNLLLossBackward, T, T, T, T, I, I, T, T)

// ---- matrix products, norms, quantization, and the operators of MoE layers that torch_npu adds ----

// Matrix products. The last int8 chooses a precision mode that means nothing here.
VNPU_OPS((T, T, T, I8), Matmul, Mm, BatchMatMul, Mv)
VNPU_OP(aclnnDot, T, T, T)
VNPU_OP(aclnnLinalgQr, T, I, T, T)
VNPU_OPS((T, T, T, S, S, T, I8), Addmm, Addmv, Baddbmm)
VNPU_OP(aclnnInplaceAddmm, T, T, T, S, S, I8)
// x1, x2, bias, scale, three permutations, precision mode, parts of the batch, out
VNPU_OP(aclnnTransposeBatchMatMul, T, T, T, T, IA, IA, IA, I8, I, T)

// x, weight, bias, scale, offset, antiquant_scale, antiquant_offset, per_token_scale, group_list,
// activation_input, activation_quant_scale, activation_quant_offset, split_item, group_type, group_list_type,
// act_type[, tuning_config], out, activation_feature_out, dynamic_quant_scale_out
// torch_npu looks for V4 first and then calls V5.
VNPU_OP(aclnnGroupedMatmulV4, L, L, L, L, L, L, L, L, T, L, L, L, I, I, I, I, L, L, L)
VNPU_OP(aclnnGroupedMatmulV5, L, L, L, L, L, L, L, L, T, L, L, L, I, I, I, I, IA, L, L, L)
// With a number before the outputs: the size of the weights' groups.
VNPU_OP(aclnnGroupedMatmulWeightNz, L, L, L, L, L, L, L, L, T, L, L, L, I, I, I, I, IA, I, L, L, L)
// The form of a Python list: group_list is an aclIntArray.
VNPU_OP(aclnnGroupedMatmul, L, L, L, L, L, L, L, IA, I, L)

VNPU_OP(aclnnGroupedMatmulSwigluQuantWeightNZ, T, T, T, T, T, T, T, T, T, T)
// x, weight, weight_scale, weight_assist_matrix, bias, x_scale, smooth_scale, group_list, dequant_mode,
// dequant_dtype, quant_mode, group_list_type, tuning_config, out, out_scale
VNPU_OP(aclnnGroupedMatmulSwigluQuantV2, T, L, L, L, T, T, T, T, I, I, I, I, IA, T, T)

// x1, x2, x1_scale, x2_scale, y_scale, x1_offset, x2_offset, y_offset, bias, transpose_x1, transpose_x2, group_size,
// out
VNPU_OPS((T, T, T, T, T, T, T, T, T, B, B, I, T), QuantMatmulV5, QuantMatmulWeightNz)
VNPU_OP(aclnnTransQuantParamV2, T, T, T)
// x, weight, antiquant scale and offset, quant scale and offset, bias, group_size, out
VNPU_OP(aclnnWeightQuantBatchMatmulV2, T, T, T, T, T, T, T, I32, T)

VNPU_OP(aclnnRmsNorm, T, T, D, T, T)
VNPU_OP(aclnnRmsNormGrad, T, T, T, T, T, T)
VNPU_OP(aclnnAddRmsNorm, T, T, T, D, T, T, T)
// x1, x2, gamma, two smooth scales, beta, epsilon, outputs wanted, two of codes, x, two of scales
VNPU_OP(aclnnAddRmsNormDynamicQuantV2, T, T, T, T, T, T, D, IA, T, T, T, T, T)
VNPU_OP(aclnnLayerNorm, T, IA, T, T, D, T, T, T)
VNPU_OP(aclnnLayerNormBackward, T, T, IA, T, T, T, T, IA, T, T, T)

// query, key, value, real_shift, drop_mask, padding_mask, atten_mask, prefix, scale, keep_prob, pre_tokens,
// next_tokens, head_num, layout, inner_precise, sparse_mode, softmax_max, softmax_sum, softmax, out
VNPU_OP(aclnnFlashAttentionScore, T, T, T, T, T, T, T, IA, D, D, I, I, I, C, I, I, T, T, T, T)
// query, key, value, dy, shift, drop_mask, padding_mask, atten_mask, softmax_max, softmax_sum, softmax, out, prefix, as
// above, dq, dk, dv, dshift
VNPU_OP(aclnnFlashAttentionScoreGrad, T, T, T, T, T, T, T, T, T, T, T, T, IA, D, D, I, I, I, C, I, I, T, T, T, T)
// query, key, value, pse_shift, atten_mask, both lengths, ten scales and offsets with the block table, both paddings,
// four antiquant tensors, the shared prefix and its length, rope of query and key, its scale[, scale of the query,
// sink]; heads, scale, pre_tokens, next_tokens, layout, kv_heads, sparse_mode, inner_precise, block_size,
// antiquant_mode, lse wanted, key and value antiquant_mode[, mode of the query]; out, lse
VNPU_SIZED(aclnnFusedInferAttentionScoreV3, T, L, L, T, T, IA, IA, T, T, T, T, T, T, T, T, T, T, T, T, T, T, T, T, IA,
           T, T, T, I, D, I, I, C, I, I, I, I, I, B, I, I, T, T)
VNPU_SIZED(aclnnFusedInferAttentionScoreV4, T, L, L, T, T, IA, IA, T, T, T, T, T, T, T, T, T, T, T, T, T, T, T, T, IA,
           T, T, T, T, T, I, D, I, I, C, I, I, I, I, I, B, I, I, I, T, T)

// Multi-head latent attention.
VNPU_OP(aclnnInterleaveRope, T, T, T, T)
// kv, gamma, cos, sin, slots, rotary cache, latent cache, two scales, two offsets, epsilon, cache mode, outputs wanted,
// rotary keys, latent keys
VNPU_OP(aclnnKvRmsNormRopeCache, T, T, T, T, T, T, T, T, T, T, T, D, C, B, T, T)
VNPU_OP(aclnnAttentionUpdate, L, L, I, T, T)

// key, its cache, slots, value, its cache, three tensors of compression, cache mode, scatter mode, strides, offsets
VNPU_OP(aclnnScatterPaKvCache, T, T, T, T, T, T, T, T, C, C, IA, IA)
// key_cache, value_cache, block_tables, seq_lens, key, value, seq_offset, cache mode, lengths are sums
VNPU_OP(aclnnGatherPaKvCache, T, T, T, T, T, T, T, C, B)

VNPU_OP(aclnnSwiGlu, T, I, T)
VNPU_OP(aclnnSwiGluGrad, T, T, I, T)
VNPU_OP(aclnnClippedSwiglu, T, T, I, D, D, D, B, T)
VNPU_OP(aclnnDynamicQuantV2, T, T, T, I32, T, T, T)
VNPU_OP(aclnnDynamicQuantV3, T, T, T, I32, B, C, T, T, T)
VNPU_OP(aclnnFlatQuant, T, T, T, D, T, T)
VNPU_OP(aclnnDequantSwigluQuantV2, T, T, T, T, T, T, T, B, C, I, C, I, I, D, D, D, T, T)
VNPU_OP(aclnnQuantize, T, T, T, I32, I, T)
VNPU_OP(aclnnAscendQuantV3, T, T, T, B, C, I32, I, T)

VNPU_OP(aclnnMoeGatingTopK, T, T, I, I, I, I, I, I, B, D, D, T, T, T)
// x, bias, input_ids, tid2eid, then as without a table
VNPU_OP(aclnnMoeGatingTopKV2, T, T, T, T, I, I, I, I, I, I, B, D, D, T, T, T)
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
