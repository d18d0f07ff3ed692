// The kernel entries, one a dtype: the same source compiled three times under three names.
#pragma once

#include <cstdint>

#include "protocol/tiling.h"
#include "twin/api/qualifiers.h"

namespace ops {

using DispatchKernel = void (*)(GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR,
                                GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR);
using CombineKernel = void (*)(GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR,
                               GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR);

// Kernels that a launch runs instead of the shipped ones.
struct Kernels {
    DispatchKernel dispatch;
    CombineKernel combine;
    uint64_t workspace_bytes;  // at least
};

DispatchKernel DispatchKernelOf(uint32_t type);
CombineKernel CombineKernelOf(uint32_t type);

}  // namespace ops
