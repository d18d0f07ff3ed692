// The seam to the transport. Here a store by MTE3 to the peer's memory; an RDMA transport stages the same
// calls in windowsOut and writes one contiguous item a peer, the status run last.
#ifndef ASCEND_MOE_DISTRIBUTE_SEND_H
#define ASCEND_MOE_DISTRIBUTE_SEND_H

#include "moe_distribute_context.h"

namespace moe {

class WindowSender {
public:
    __aicore__ inline void Init(const WindowContext& context, uint32_t epoch) {
        context_ = &context;
        parity_ = Parity(epoch);
    }
    // Bytes into this rank's region of the peer's half.
    __aicore__ inline void PutRows(uint32_t peer, uint64_t offset, const LocalTensor<int8_t>& rows,
                                   uint32_t bytes) {
        Store(peer,
              RegionOffset(context_->data_bytes(), context_->world(), RowHalf(parity_), context_->rank()) +
                  offset,
              rows, bytes);
    }
    // Bytes into a slot of the peer's half, whoever the source: the return path of the V2 contract.
    __aicore__ inline void PutSlot(uint32_t peer, uint64_t offset, const LocalTensor<int8_t>& rows,
                                   uint32_t bytes) {
        Store(peer, HalfOffset(context_->data_bytes(), RowHalf(parity_)) + offset, rows, bytes);
    }
    // All rows of this core have left. Other cores' rows need a SyncAll on top.
    __aicore__ inline void Flush() { AscendC::PipeBarrier<PIPE_ALL>(); }

    // This rank's status run, after everybody's Flush.
    __aicore__ inline void PutStatus(uint32_t peer, const LocalTensor<uint32_t>& run, uint32_t bytes) {
        StoreState(peer, StatusOffset(context_->world(), StatusHalf(parity_), context_->rank()), run, bytes);
    }
    __aicore__ inline void PutAbort(uint32_t peer, const LocalTensor<uint32_t>& block) {
        StoreState(peer, AbortOffset(context_->rank()), block, kBlock);
    }

private:
    __aicore__ inline void Store(uint32_t peer, uint64_t offset, const LocalTensor<int8_t>& rows,
                                 uint32_t bytes) {
        GlobalTensor<int8_t> window;
        window.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(context_->data(peer) + offset), bytes);
        CopyOut(window, rows, bytes);
    }
    __aicore__ inline void StoreState(uint32_t peer, uint64_t offset, const LocalTensor<uint32_t>& words,
                                      uint32_t bytes) {
        GlobalTensor<uint32_t> window;
        window.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(context_->state(peer) + offset),
                               bytes / sizeof(uint32_t));
        AscendC::DataCopy(window, words, bytes / sizeof(uint32_t));
    }
    const WindowContext* context_ = nullptr;
    uint32_t parity_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_SEND_H
