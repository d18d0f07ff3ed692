// Host side: fills the communication contexts of one rank, in each layout.
#pragma once

#include "twin/api/hccl_context.h"

namespace twin::hccl {

// The windows of one group of ranks: arrays of `world` addresses.
struct GroupWindows {
    Layout layout;
    uint32_t world;
    uint64_t window_bytes;
    uint64_t exp_bytes;
    uint64_t workspace_bytes;
    const uint64_t* windows_in;
    const uint64_t* windows_out;
    const uint64_t* windows_exp;
    const char* name;
};

// A blob is the twin's header, the context, and what it points at. It is zero before it is filled;
// `workspace` is memory of the blob's owner.
uint64_t ContextBlobBytes(Layout layout, uint32_t world);
void FillContext(const GroupWindows& group, uint32_t rank, void* blob, uint64_t workspace);
inline void* ContextOf(void* blob) { return static_cast<Header*>(blob) + 1; }

}  // namespace twin::hccl
