// The cores of a rank: all cores of its launch, or on one card (protocol/tiling.h), where a launch has several ranks,
// a group of them. SyncAll is then a barrier of the group.
#ifndef ASCEND_MOE_COMMON_CORE_GROUP_H
#define ASCEND_MOE_COMMON_CORE_GROUP_H

#include "base.h"
#include "../protocol/tiling.h"

namespace moe {

struct CoreGroup {
    GM_ADDR context;  // communication context of the rank
    uint32_t core;    // number of this core within the rank
    GM_ADDR barrier;  // one card: a block in GM for each core of the rank, zeros at the launch; else null
};
__aicore__ inline CoreGroup WholeLaunch() {
    return {AscendC::GetHcclContext<0>(), static_cast<uint32_t>(AscendC::GetBlockIdx()), nullptr};
}

// A buffer in the part of UB that plans for one card leave free (kCardUbBytes).
__aicore__ inline LocalTensor<uint32_t> CardUb(uint32_t at, uint32_t bytes) {
    AscendC::TBuffAddr address;
    address.logicPos = Narrow<uint8_t, kBlock>(static_cast<uint32_t>(TPosition::VECCALC));
    address.bufferAddr = kCardUbAt + at;
    address.dataLen = bytes;
    LocalTensor<uint32_t> tensor;
    tensor.SetAddr(address);
    return tensor;
}

// SyncAll of the cores of a rank. On one card each core counts its calls in its block of the barrier.
class RankSync {
public:
    __aicore__ inline void Init(const CoreGroup& group, uint32_t cores) {
        group_ = group;
        cores_ = cores;
    }
    __aicore__ inline bool one_card() const { return group_.barrier != nullptr; }
    // Returns when all cores of the rank have called it; their earlier stores are then visible.
    __aicore__ inline void Wait() {
        if (!one_card()) {
            AscendC::SyncAll<true>();
            return;
        }
        AscendC::PipeBarrier<PIPE_ALL>();
        ++calls_;
        LocalTensor<uint32_t> block = CardUb(kCardBlockAt, kBlock);
        for (uint32_t w = 0; w < kBlockWords; ++w) block.SetValue(w, calls_);
        SyncFunc<HardEvent::S_MTE3>();
        GlobalTensor<uint32_t> row;
        row.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(group_.barrier), cores_ * kBlockWords);
        AscendC::DataCopy(row[group_.core * kBlockWords], block, kBlockWords);
        while (!AllArrived(row)) MOE_POLL_HINT();
    }

private:
    // A core that has passed this barrier may have arrived at a later one.
    __aicore__ inline bool AllArrived(const GlobalTensor<uint32_t>& row) const {
        const LocalTensor<uint32_t> all = CardUb(kCardBarrierAt, cores_ * kBlock);
        SyncFunc<HardEvent::S_MTE2>();
        AscendC::DataCopy(all, row, cores_ * kBlockWords);
        SyncFunc<HardEvent::MTE2_S>();
        bool arrived = true;
        for (uint32_t core = 0; core < cores_; ++core) arrived = arrived && all.GetValue(core * kBlockWords) >= calls_;
        return arrived;
    }

    CoreGroup group_ = {nullptr, 0, nullptr};
    uint32_t cores_ = 1;
    uint32_t calls_ = 0;
};

// One card: copies an item of a BatchWrite list, in place of HCCL's server.
class ItemCopier {
public:
    __aicore__ inline void Copy(GM_ADDR address) const {
        const LocalTensor<uint32_t> words = CardUb(kCardBlockAt, kBlock);
        AscendC::PipeBarrier<PIPE_ALL>();
        AscendC::DataCopy(words, Words(reinterpret_cast<uint64_t>(address), kBlock), kBlockWords);
        SyncFunc<HardEvent::MTE2_S>();
        const uint64_t local = Pair(words, 0), remote = Pair(words, 2), bytes = Pair(words, 4);
        for (uint64_t at = 0; at < bytes;) {
            const uint32_t piece = PieceAt(remote + at, bytes - at);
            CopyPiece(local + at, remote + at, piece);
            at += piece;
        }
    }

private:
    static __aicore__ inline GlobalTensor<uint32_t> Words(uint64_t address, uint32_t bytes) {
        GlobalTensor<uint32_t> words;
        words.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(address), bytes / kIntBytes);
        return words;
    }
    static __aicore__ inline uint64_t Pair(const LocalTensor<uint32_t>& words, uint32_t at) {
        return words.GetValue(at) | static_cast<uint64_t>(words.GetValue(at + 1)) << 32;
    }
    // The message at the end begins a block of kFlaggedBlock bytes: all before it has then drained.
    static __aicore__ inline uint32_t PieceAt(uint64_t remote, uint64_t left) {
        if (left >= 2 * kCardPieceBytes) return kCardPieceBytes;
        return Min(kFlaggedBlock - static_cast<uint32_t>(remote % kFlaggedBlock), static_cast<uint32_t>(left));
    }
    static __aicore__ inline void CopyPiece(uint64_t local, uint64_t remote, uint32_t bytes) {
        const LocalTensor<uint32_t> piece = CardUb(0, kCardPieceBytes);
        AscendC::DataCopy(piece, Words(local, bytes), bytes / kIntBytes);
        SyncFunc<HardEvent::MTE2_MTE3>();
        AscendC::DataCopy(Words(remote, bytes), piece, bytes / kIntBytes);
        AscendC::PipeBarrier<PIPE_ALL>();
    }
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_CORE_GROUP_H
