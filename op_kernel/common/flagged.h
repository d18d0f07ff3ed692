// Flagged blocks (ASCEND_MOE_RDMA_FLAGS): rows that travel between servers lie in blocks of 512 bytes, 480 of rows and
// then a flag, which is the epoch's in all its words. Rows are stored and loaded around the flags. A reader looks at
// the flag of every block of an item before it reads a row of it, so it depends on the order of bytes within a block
// alone.
//
// Rows for ranks that stores reach lie in such blocks too, so that a reader has one way, but nobody writes or reads
// their flags. Regions begin at multiples of 512 bytes of the window, and windows at multiples of more.
#ifndef ASCEND_MOE_COMMON_FLAGGED_H
#define ASCEND_MOE_COMMON_FLAGGED_H

#include "base.h"

namespace moe {

// `bytes` of rows from `place` on, in pieces that a strided copy takes: up to the next flag, whole blocks, the rest.
// Both are multiples of 32.
class FlaggedPieces {
public:
    __aicore__ inline FlaggedPieces(GM_ADDR place, uint32_t bytes)
        : next_(reinterpret_cast<uint64_t>(place)), left_(bytes) {}
    // False: there is none left.
    __aicore__ inline bool Next() {
        if (left_ == 0) return false;
        place_ = next_;
        offset_ += count_ * length_;
        const uint32_t room = kFlaggedPayload - static_cast<uint32_t>(place_ % kFlaggedBlock);
        const bool whole = room == kFlaggedPayload && left_ >= kFlaggedPayload;
        count_ = whole ? left_ / kFlaggedPayload : 1;
        length_ = whole ? kFlaggedPayload : Min(room, left_);
        left_ -= count_ * length_;
        next_ = place_ - place_ % kFlaggedBlock + static_cast<uint64_t>(count_) * kFlaggedBlock;
        return true;
    }
    __aicore__ inline uint32_t offset() const { return offset_; }  // of the piece in the rows
    __aicore__ inline GlobalTensor<int8_t> Gm() const {
        GlobalTensor<int8_t> piece;
        piece.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(place_),
                              static_cast<uint64_t>(count_ - 1) * kFlaggedBlock + length_);
        return piece;
    }
    __aicore__ inline DataCopyExtParams Loading() const { return {Pieces(count_), length_, Gap(), 0, 0}; }
    __aicore__ inline DataCopyExtParams Storing() const { return {Pieces(count_), length_, 0, Gap(), 0}; }

private:
    __aicore__ inline uint32_t Gap() const { return kFlaggedBlock - length_; }
    uint64_t place_ = 0, next_ = 0;
    uint32_t left_ = 0;
    uint32_t offset_ = 0;
    uint32_t count_ = 0, length_ = 0;  // of the piece: blocks, bytes of each
};

__aicore__ inline void LoadFlagged(const LocalTensor<int8_t>& rows, GM_ADDR place, uint32_t bytes) {
    const DataCopyPadExtParams<int8_t> pad{false, 0, 0, 0};
    for (FlaggedPieces pieces(place, bytes); pieces.Next();)
        AscendC::DataCopyPad(rows[pieces.offset()], pieces.Gm(), pieces.Loading(), pad);
}
__aicore__ inline void StoreFlagged(GM_ADDR place, const LocalTensor<int8_t>& rows, uint32_t bytes) {
    for (FlaggedPieces pieces(place, bytes); pieces.Next();)
        AscendC::DataCopyPad(pieces.Gm(), rows[pieces.offset()], pieces.Storing());
}
// The place of the byte that is `offset` bytes of rows behind `place`.
__aicore__ inline GM_ADDR FlaggedPlace(GM_ADDR place, uint64_t offset) {
    const uint64_t within = reinterpret_cast<uint64_t>(place) % kFlaggedBlock, at = within + offset;
    return place - within + at / kFlaggedPayload * kFlaggedBlock + at % kFlaggedPayload;
}

// The flags of blocks that end at `end`. Block 0 is the last.
class BlockFlags {
public:
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, uint32_t epoch) {
        word_ = static_cast<int32_t>(FlagWord(epoch));
        pipe.InitBuffer(flagBuf_, BlockFlagsUb(info).flags);
        AscendC::Duplicate(flagBuf_.Get<int32_t>(), word_, kLanes);
    }
    // UB of a reader besides.
    __aicore__ inline void InitBits(TPipe& pipe, const MoeDistributeInfo& info) {
        pipe.InitBuffer(bitBuf_, BlockFlagsUb(info).bits);
    }
    // Stores this epoch's flag into each of `blocks` blocks.
    __aicore__ inline void Put(GM_ADDR end, uint64_t blocks) {
        SyncFunc<HardEvent::V_MTE3>();
        for (uint64_t first = 0; first < blocks; first += kFlagsAtOnce) {
            const uint32_t count = AtOnce(blocks - first);
            const DataCopyExtParams params{Pieces(count), kBlock, 0, kFlaggedPayload, 0};
            AscendC::DataCopyPad(Flags(end, first, count), flagBuf_.Get<int32_t>(), params);
        }
    }
    // Whether all `blocks` blocks have come. What has come stays: the next call for the same blocks goes on from there.
    __aicore__ inline bool Come(GM_ADDR end, uint64_t blocks) {
        while (seen_ < blocks) {
            const uint32_t count = AtOnce(blocks - seen_);
            if (!Look(end, seen_, count)) return false;
            seen_ += count;
        }
        seen_ = 0;
        return true;
    }

private:
    static constexpr uint32_t kLanes = kFlagsAtOnce * kBlockWords;
    static constexpr uint32_t kFlagsOfWord = sizeof(uint64_t);  // a flag has eight words, and a bit for each

    __aicore__ inline uint32_t AtOnce(uint64_t left) const {
        return left < kFlagsAtOnce ? static_cast<uint32_t>(left) : kFlagsAtOnce;
    }
    __aicore__ inline GlobalTensor<int32_t> Flags(GM_ADDR end, uint64_t first, uint32_t count) const {
        GlobalTensor<int32_t> flags;
        flags.SetGlobalBuffer(
            reinterpret_cast<__gm__ int32_t*>(end - (first + count) * kFlaggedBlock + kFlaggedPayload),
            ((count - 1) * kFlaggedBlock + kBlock) / sizeof(int32_t));
        return flags;
    }
    __aicore__ inline bool Look(GM_ADDR end, uint64_t first, uint32_t count) {
        const LocalTensor<int32_t> flags = flagBuf_.Get<int32_t>();
        const DataCopyExtParams params{Pieces(count), kBlock, kFlaggedPayload, 0, 0};
        const DataCopyPadExtParams<int32_t> pad{false, 0, 0, 0};
        SyncFunc<HardEvent::V_MTE2>();
        AscendC::DataCopyPad(flags, Flags(end, first, count), params, pad);
        SyncFunc<HardEvent::MTE2_V>();
        SyncFunc<HardEvent::S_V>();
        AscendC::CompareScalar(bitBuf_.Get<uint8_t>(), flags, word_, AscendC::CMPMODE::EQ, kLanes);
        SyncFunc<HardEvent::V_S>();
        const LocalTensor<uint64_t> bits = bitBuf_.Get<uint64_t>();
        for (uint32_t at = 0; at < count; at += kFlagsOfWord) {
            const uint64_t all = ~uint64_t{0}, left = count - at;
            const uint64_t wanted = left < kFlagsOfWord ? ~(all << (left * kBlockWords)) : all;
            if ((bits.GetValue(at / kFlagsOfWord) & wanted) != wanted) return false;
        }
        return true;
    }

    UbBuf flagBuf_, bitBuf_;
    uint64_t seen_ = 0;
    int32_t word_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_FLAGGED_H
