// What the samples share: words of the communication context by their places in bytes, small helpers.
#ifndef MOE_MC2_BASE_H
#define MOE_MC2_BASE_H

#include "kernel_operator.h"
#include "kernel_tiling/kernel_tiling.h"

namespace Mc2Sample {
using namespace AscendC;

template <class T>
__aicore__ inline T At(GM_ADDR base, uint64_t offset) {
    return *(__gm__ T*)(base + offset);
}
// Both contexts begin alike.
constexpr uint64_t kRankAt = 16, kWorldAt = 20, kWindowBytesAt = 24, kOwnInAt = 32;
// A3: a table of pairs of pointers, the second to a peer's block, begins where a word says.
constexpr uint64_t kNameAt = 48, kExpBytesAt = 176, kOwnExpAt = 184, kTableStartAt = 192;
constexpr uint64_t kPeerInAt = 8, kPeerOutAt = 16, kPeerExpAt = 24;
__aicore__ inline GM_ADDR Peer(GM_ADDR context, uint32_t rank) {
    return (GM_ADDR)At<uint64_t>(context, At<uint32_t>(context, kTableStartAt) + rank * 16 + 8);
}

template <HardEvent event>
__aicore__ inline void SyncFunc() {
    int32_t eventID = static_cast<int32_t>(GetTPipePtr()->FetchEventID(event));
    SetFlag<event>(eventID);
    WaitFlag<event>(eventID);
}

template <class T>
__aicore__ inline GlobalTensor<T> Gm(GM_ADDR address) {
    GlobalTensor<T> tensor;
    tensor.SetGlobalBuffer((__gm__ T*)address);
    return tensor;
}

template <class T>
__aicore__ inline void CleanLine(const GlobalTensor<T>& line) {
    DataCacheCleanAndInvalid<T, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(line);
}

// One row from GM to GM by way of a queue.
template <class T, class Queue>
__aicore__ inline void MoveRow(Queue& queue, const GlobalTensor<T>& to, const GlobalTensor<T>& from, uint32_t count) {
    LocalTensor<T> row = queue.template AllocTensor<T>();
    DataCopy(row, from, count);
    queue.EnQue(row);
    row = queue.template DeQue<T>();
    DataCopy(to, row, count);
    queue.FreeTensor(row);
}

__aicore__ inline GM_ADDR WindowIn(GM_ADDR context, uint32_t rank) {
    const bool own = rank == At<uint32_t>(context, kRankAt);
    return (GM_ADDR)(own ? At<uint64_t>(context, kOwnInAt) : At<uint64_t>(Peer(context, rank), kPeerInAt));
}
__aicore__ inline GM_ADDR WindowExp(GM_ADDR context, uint32_t rank) {
    const bool own = rank == At<uint32_t>(context, kRankAt);
    return (GM_ADDR)(own ? At<uint64_t>(context, kOwnExpAt) : At<uint64_t>(Peer(context, rank), kPeerExpAt));
}
}  // namespace Mc2Sample
#endif
