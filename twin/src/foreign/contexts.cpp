// Contexts across the C ABI of kernel libraries.
#include "foreign.h"
#include "twin/engine/contexts.h"

using namespace twin::hccl;

uint64_t twin_context_offset() { return sizeof(Header); }

uint64_t twin_context_bytes(uint32_t layout, uint32_t world) {
    return ContextBlobBytes(static_cast<Layout>(layout), world);
}

void twin_context_fill(const TwinGroup* group, uint32_t rank, void* blob, uint64_t workspace) {
    FillContext(
        {static_cast<Layout>(group->layout), group->world, group->window_bytes, group->exp_bytes,
         group->workspace_bytes, group->windows_in, group->windows_out, group->windows_exp, group->name},
        rank, blob, workspace);
}
