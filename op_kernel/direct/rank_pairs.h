// All (token, k) pairs of a rank in UB, and vector instructions that tell which go to an expert: where a core
// looks for some experts among all pairs, not at some pairs for all experts.
#ifndef ASCEND_MOE_DISTRIBUTE_RANK_PAIRS_H
#define ASCEND_MOE_DISTRIBUTE_RANK_PAIRS_H

#include "../common/routing.h"

namespace moe {

class RankPairs {
public:
    // Begins to load the ids.
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, GM_ADDR expertIds, GM_ADDR mask) {
        info_ = &info;
        pairs_ = info.batch * info.topK;
        lanes_ = ListLanes(pairs_);
        pipe.InitBuffer(idBuf_, lanes_ * sizeof(int32_t));
        pipe.InitBuffer(indexBuf_, lanes_ * sizeof(int32_t));
        pipe.InitBuffer(bitBuf_, 2 * BitBytes());
        if (info.maskRank != 0) {
            masks_ = info.maskRank == 1 ? info.batch : pairs_;
            pipe.InitBuffer(maskBuf_, CeilTo(masks_, kBlock));
            pipe.InitBuffer(halfBuf_, CeilTo(masks_, kHalfLanes) * sizeof(half));
        }
        if (pairs_ != 0) Load(expertIds, mask);
    }
    __aicore__ inline uint32_t Lanes() const { return lanes_; }

    // First of all, when the scalar unit has waited for the ids. The first bad one is the verdict. `room`:
    // for 2 * Lanes() numbers, as below.
    __aicore__ inline Verdict Judge(const LocalTensor<int32_t>& room) {
        if (pairs_ == 0) return Verdict();
        if (info_->maskRank != 0) LeaveOutMasked(room);
        const LocalTensor<int32_t> id = idBuf_.Get<int32_t>();
        const int32_t lanes = static_cast<int32_t>(lanes_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Maxs(room, id, kNotRouted, lanes);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mins(room, room, static_cast<int32_t>(info_->experts) - 1, lanes);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Compare(Bits(0), id, room, AscendC::CMPMODE::EQ, lanes_);
        AscendC::PipeBarrier<PIPE_V>();
        if (Select(room[lanes_], 0) == pairs_) return Verdict();
        return FirstBad();
    }
    // After Judge, which has left the ids in `room`: pairs of experts [first, end).
    __aicore__ inline uint32_t CountBetween(uint32_t first, uint32_t end, const LocalTensor<int32_t>& room) {
        if (first == end || pairs_ == 0) return 0;
        // Integers have no other comparison than that for equality.
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(room.ReinterpretCast<float>(), room, AscendC::RoundMode::CAST_RINT, lanes_);
        return CountBelow(end, room) - CountBelow(first, room);
    }
    // Compares all pairs with an expert; `turn` says which of two places for the result is taken, its parity.
    // Begins when all vector instructions before it have ended, as Select must.
    __aicore__ inline void Compare(int32_t expert, uint32_t turn) {
        AscendC::PipeBarrier<PIPE_V>();
        if (pairs_ == 0) return;
        AscendC::CompareScalar(Bits(turn), idBuf_.Get<int32_t>(), expert, AscendC::CMPMODE::EQ, lanes_);
    }
    // The numbers of the pairs for which the comparison holds, in order. Returns how many.
    __aicore__ inline uint32_t Select(const LocalTensor<int32_t>& to, uint32_t turn) {
        if (pairs_ == 0) return 0;
        return Gather(to, turn, pairs_);
    }

private:
    static constexpr uint32_t kHalfLanes = 128;  // of a repeat
    __aicore__ inline uint32_t BitBytes() const {
        return static_cast<uint32_t>(CeilTo(CeilTo(lanes_, kHalfLanes) / 8, kBlock));
    }
    __aicore__ inline LocalTensor<uint8_t> Bits(uint32_t turn) {
        return bitBuf_.Get<uint8_t>()[turn % 2 * BitBytes()];
    }
    __aicore__ inline uint32_t Gather(const LocalTensor<int32_t>& to, uint32_t turn, uint32_t count) {
        uint64_t found = 0;
        const AscendC::GatherMaskParams once(1, 1, 8, 8);
        AscendC::GatherMask(to, indexBuf_.Get<int32_t>(), Bits(turn).ReinterpretCast<uint32_t>(), true, count,
                            once, found);
        return static_cast<uint32_t>(found);
    }
    // Lanes behind the last pair go nowhere.
    __aicore__ inline void Load(GM_ADDR expertIds, GM_ADDR mask) {
        GlobalTensor<int32_t> ids;
        ids.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(expertIds), pairs_);
        const LocalTensor<int32_t> id = idBuf_.Get<int32_t>();
        const uint32_t padded = PaddedInts(pairs_);
        const DataCopyExtParams params{1, static_cast<uint32_t>(pairs_ * sizeof(int32_t)), 0, 0, 0};
        const DataCopyPadExtParams<int32_t> pad{padded != pairs_, 0, static_cast<uint8_t>(padded - pairs_),
                                                kNotRouted};
        AscendC::DataCopyPad(id, ids, params, pad);
        if (masks_ != 0) {
            GlobalTensor<int8_t> masks;
            masks.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(mask), masks_);
            CopyIn(maskBuf_.Get<int8_t>(), masks, masks_);
        }
        if (padded != lanes_)
            AscendC::Duplicate(id[padded], kNotRouted, static_cast<int32_t>(lanes_ - padded));
        AscendC::CreateVecIndex(indexBuf_.Get<int32_t>(), static_cast<int32_t>(0), lanes_);
    }
    // Pairs that are masked become pairs that go nowhere.
    __aicore__ inline void LeaveOutMasked(const LocalTensor<int32_t>& room) {
        const LocalTensor<half> value = halfBuf_.Get<half>();
        const uint32_t lanes = static_cast<uint32_t>(CeilTo(masks_, kHalfLanes));
        AscendC::Duplicate(value, static_cast<half>(0), static_cast<int32_t>(lanes));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(value, maskBuf_.Get<int8_t>(), AscendC::RoundMode::CAST_NONE, masks_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::CompareScalar(Bits(0), value, static_cast<half>(0), AscendC::CMPMODE::EQ, lanes);
        AscendC::PipeBarrier<PIPE_V>();
        const uint32_t found = Gather(room, 0, masks_), of = info_->maskRank == 1 ? info_->topK : 1;
        SyncFunc<HardEvent::V_S>();
        LocalTensor<int32_t> id = idBuf_.Get<int32_t>();
        for (uint32_t i = 0; i < found; ++i) {
            const uint32_t first = static_cast<uint32_t>(room.GetValue(i)) * of;
            for (uint32_t k = 0; k < of; ++k) id.SetValue(first + k, kNotRouted);
        }
        SyncFunc<HardEvent::S_V>();
    }
    __aicore__ inline uint32_t CountBelow(uint32_t expert, const LocalTensor<int32_t>& room) {
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::CompareScalar(Bits(0), room.ReinterpretCast<float>(), static_cast<float>(expert),
                               AscendC::CMPMODE::LT, lanes_);
        AscendC::PipeBarrier<PIPE_V>();
        return Select(room[lanes_], 0);
    }
    __aicore__ inline Verdict FirstBad() {
        const LocalTensor<int32_t> ids = idBuf_.Get<int32_t>();
        for (uint32_t i = 0; i < pairs_; ++i) {
            const int32_t id = ids.GetValue(i);
            if (id >= kNotRouted && id < static_cast<int32_t>(info_->experts)) continue;
            return InvalidOf(*info_, kInvalidExpertId, i / info_->topK << 8 | i % info_->topK,
                             static_cast<uint32_t>(id));
        }
        return Verdict();
    }

    const MoeDistributeInfo* info_ = nullptr;
    UbBuf idBuf_, indexBuf_, bitBuf_, maskBuf_, halfBuf_;
    uint32_t pairs_ = 0;
    uint32_t lanes_ = 0;
    uint32_t masks_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_RANK_PAIRS_H
