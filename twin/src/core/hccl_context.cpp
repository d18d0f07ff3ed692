#include "twin/api/hccl_context.h"

#include <cstring>

namespace twin::hccl {

namespace {

// Streams, notifies and topology lie before the table, what only the host reads behind it.
constexpr uint64_t kA3Bytes = kA3PeerTables[1] + sizeof(A3Pointer) * kA3MaxRanks + 65536;

uint64_t AddressOf(const void* p) { return reinterpret_cast<uintptr_t>(p); }

// Every rank is reachable through remoteRes, the own one too.
void FillA3(const GroupWindows& group, uint32_t rank, uint64_t workspace, A3Context* context) {
    context->workspace = workspace;
    context->workspace_bytes = group.workspace_bytes;
    context->rank = rank;
    context->world = group.world;
    context->window_bytes = group.window_bytes;
    context->windows_in = group.windows_in[rank];
    context->windows_out = group.windows_out[rank];
    strncpy(context->name, group.name, sizeof(context->name) - 1);
    context->exp_bytes = group.exp_bytes;
    context->windows_exp = group.windows_exp[rank];
    context->remote_start = static_cast<uint32_t>(group.peer_table);
    context->remote_step = sizeof(A3Pointer);
    A3Pointer* table = reinterpret_cast<A3Pointer*>(reinterpret_cast<uint8_t*>(context) + group.peer_table);
    A3Remote* peers = reinterpret_cast<A3Remote*>(reinterpret_cast<uint8_t*>(context) + kA3Bytes);
    for (uint32_t peer = 0; peer < group.world; ++peer) {
        peers[peer] = {peer,        peer, group.windows_in[peer], group.windows_out[peer], group.windows_exp[peer],
                       {0, 0, 0, 0}};
        table[peer] = {AddressOf(&peers[peer]), AddressOf(&peers[peer])};
    }
}

void FillA2(const GroupWindows& group, uint32_t rank, uint64_t workspace, A2Context* context) {
    context->workspace = workspace;
    context->workspace_bytes = group.workspace_bytes;
    context->rank = rank;
    context->world = group.world;
    context->window_bytes = group.window_bytes;
    context->exp_bytes = group.exp_bytes;
    context->multi_flag = group.multi_server != 0 || group.world > kA2Ranks ? 1 : 0;
    uint64_t* capability = reinterpret_cast<uint64_t*>(context + 1);
    *capability = kA2DataPlaneAicpu;
    context->capability = AddressOf(capability);
    context->capability_bytes = sizeof(*capability);
    A2Remote* peers = reinterpret_cast<A2Remote*>(capability + 1);
    context->data = AddressOf(peers);
    context->data_bytes = group.world * sizeof(A2Remote);
    for (uint32_t peer = 0; peer < group.world; ++peer) {
        const A2Memory in = {group.window_bytes, group.windows_in[peer], 0};
        const A2Memory out = {group.window_bytes, group.windows_out[peer], 0};
        const A2Memory own_in = {group.window_bytes, group.windows_in[rank], 0};
        const A2Memory own_out = {group.window_bytes, group.windows_out[rank], 0};
        peers[peer] = {in, out, own_in, own_out, {}};
        if (peer >= kA2Ranks || group.multi_server != 0) continue;
        context->windows_in[peer] = group.windows_in[peer];
        context->windows_out[peer] = group.windows_out[peer];
        context->windows_exp[peer] = group.windows_exp[peer];
    }
}

}  // namespace

uint64_t ContextBlobBytes(Layout layout, uint32_t world) {
    return sizeof(Header) + (layout == Layout::kA3 ? kA3Bytes + world * sizeof(A3Remote)
                                                   : sizeof(A2Context) + sizeof(uint64_t) + world * sizeof(A2Remote));
}

void FillContext(const GroupWindows& group, uint32_t rank, void* blob, uint64_t workspace) {
    Header* header = static_cast<Header*>(blob);
    *header = {kHeaderMagic, group.layout, rank, group.world, 0, nullptr, {0, 0, 0, 0}};
    if (group.layout == Layout::kA3) {
        FillA3(group, rank, workspace, reinterpret_cast<A3Context*>(header + 1));
    } else {
        FillA2(group, rank, workspace, reinterpret_cast<A2Context*>(header + 1));
    }
}

}  // namespace twin::hccl
