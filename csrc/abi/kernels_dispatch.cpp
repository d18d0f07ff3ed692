// The dispatch kernel for each element type, its entry renamed. The three are one translation unit, because
// most of what they instantiate (twin, waits, lists, reports) is the same for all of them and would be
// compiled three times.
#define DTYPE_X bfloat16_t
#define ascend_moe_distribute_dispatch ascend_moe_distribute_dispatch_bf16
#include "ascend_moe_distribute_dispatch.cpp"
#undef DTYPE_X
#undef ascend_moe_distribute_dispatch

#define DTYPE_X half
#define ascend_moe_distribute_dispatch ascend_moe_distribute_dispatch_fp16
#include "ascend_moe_distribute_dispatch.cpp"
#undef DTYPE_X
#undef ascend_moe_distribute_dispatch

#define DTYPE_X float
#define ascend_moe_distribute_dispatch ascend_moe_distribute_dispatch_fp32
#include "ascend_moe_distribute_dispatch.cpp"
