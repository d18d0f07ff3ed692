#include "kernels.h"

#define AM_DISPATCH(suffix)                                                                              \
    extern "C" void ascend_moe_distribute_dispatch_##suffix(GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, \
                                                            GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, \
                                                            GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR);
#define AM_COMBINE(suffix)                                                                              \
    extern "C" void ascend_moe_distribute_combine_##suffix(GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, \
                                                           GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, \
                                                           GM_ADDR, GM_ADDR, GM_ADDR);
AM_DISPATCH(bf16)
AM_DISPATCH(fp16)
AM_DISPATCH(fp32)
AM_COMBINE(bf16)
AM_COMBINE(fp16)
AM_COMBINE(fp32)

namespace ops {

DispatchKernel DispatchKernelOf(uint32_t type) {
    if (type == moe::kTypeBf16) return &ascend_moe_distribute_dispatch_bf16;
    return type == moe::kTypeFp16 ? &ascend_moe_distribute_dispatch_fp16
                                  : &ascend_moe_distribute_dispatch_fp32;
}
CombineKernel CombineKernelOf(uint32_t type) {
    if (type == moe::kTypeBf16) return &ascend_moe_distribute_combine_bf16;
    return type == moe::kTypeFp16 ? &ascend_moe_distribute_combine_fp16 : &ascend_moe_distribute_combine_fp32;
}

}  // namespace ops
