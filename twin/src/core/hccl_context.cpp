#include "twin/api/hccl_context.h"

#include <cstring>

namespace twin::hccl {

namespace {

// Streams, notifies and topology lie before the table, what only the host reads behind it.
constexpr uint64_t kA3Bytes = kA3PeerTables[1] + sizeof(A3Pointer) * kA3MaxRanks + 65536;

// What both layouts have under one name.
template <class Context>
void FillCommon(const GroupWindows& group, uint32_t rank, uint64_t workspace, Context* context) {
    context->workSpace = workspace;
    context->workSpaceSize = group.workspace_bytes;
    context->rankId = rank;
    context->rankNum = group.world;
    context->winSize = group.window_bytes;
    context->winExpSize = group.exp_bytes;
}

// Every rank is reachable through remoteRes, the own one too.
void FillA3(const GroupWindows& group, uint32_t rank, A3Context* context) {
    context->localWindowsIn = group.windows_in[rank];
    context->localWindowsOut = group.windows_out[rank];
    strncpy(context->hcomId, group.name, sizeof(context->hcomId) - 1);
    context->localWindowsExp = group.windows_exp[rank];
    context->rWinStart = static_cast<uint32_t>(group.peer_table);
    context->rWinOffset = sizeof(A3Pointer);
    A3Pointer* table = reinterpret_cast<A3Pointer*>(reinterpret_cast<uint8_t*>(context) + group.peer_table);
    A3Remote* peers = reinterpret_cast<A3Remote*>(reinterpret_cast<uint8_t*>(context) + kA3Bytes);
    for (uint32_t peer = 0; peer < group.world; ++peer) {
        peers[peer] = {peer, peer, group.windows_in[peer], group.windows_out[peer], group.windows_exp[peer], {}};
        table[peer] = {&peers[peer], &peers[peer]};
    }
}

void FillA2(const GroupWindows& group, uint32_t rank, A2Context* context) {
    context->multiFlag = group.multi_server != 0 || group.world > kA2Ranks ? 1 : 0;
    uint64_t* capability = reinterpret_cast<uint64_t*>(context + 1);
    *capability = kA2DataPlaneAicpu;
    context->capability = reinterpret_cast<uintptr_t>(capability);
    context->capabilitySize = sizeof(*capability);
    context->data = reinterpret_cast<A2Remote*>(capability + 1);
    context->dataSize = group.world * sizeof(A2Remote);
    for (uint32_t peer = 0; peer < group.world; ++peer) {
        const A2Memory in = {group.window_bytes, group.windows_in[peer], 0};
        const A2Memory out = {group.window_bytes, group.windows_out[peer], 0};
        const A2Memory own_in = {group.window_bytes, group.windows_in[rank], 0};
        const A2Memory own_out = {group.window_bytes, group.windows_out[rank], 0};
        context->data[peer] = {in, out, own_in, own_out, {}};
        if (peer >= kA2Ranks || group.multi_server != 0) continue;
        context->windowsIn[peer] = group.windows_in[peer];
        context->windowsOut[peer] = group.windows_out[peer];
        context->windowsExp[peer] = group.windows_exp[peer];
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
        A3Context* const context = reinterpret_cast<A3Context*>(header + 1);
        FillCommon(group, rank, workspace, context);
        FillA3(group, rank, context);
    } else {
        A2Context* const context = reinterpret_cast<A2Context*>(header + 1);
        FillCommon(group, rank, workspace, context);
        FillA2(group, rank, context);
    }
}

}  // namespace twin::hccl
