// The combine kernel for each element type: one translation unit, as kernels_dispatch.cpp says.
#define DTYPE_X bfloat16_t
#define ascend_moe_distribute_combine ascend_moe_distribute_combine_bf16
#include "ascend_moe_distribute_combine.cpp"
#undef DTYPE_X
#undef ascend_moe_distribute_combine

#define DTYPE_X half
#define ascend_moe_distribute_combine ascend_moe_distribute_combine_fp16
#include "ascend_moe_distribute_combine.cpp"
#undef DTYPE_X
#undef ascend_moe_distribute_combine

#define DTYPE_X float
#define ascend_moe_distribute_combine ascend_moe_distribute_combine_fp32
#include "ascend_moe_distribute_combine.cpp"
