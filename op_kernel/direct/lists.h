// The lists of direct dispatch, [W][capacity] int32: for each owner the numbers (token * K + k) of the pairs for its
// experts, by expert, ascending. Without roles every core makes entries of all lists (RowPlaces); with roles (listCores
// > 0) some cores make the whole lists of their experts (ExpertLists).
#ifndef ASCEND_MOE_DIRECT_LISTS_H
#define ASCEND_MOE_DIRECT_LISTS_H

#include "../common/outputs.h"
#include "../common/routing.h"

namespace moe {

// With roles: all (token, k) pairs of this rank in UB, for a core that searches for its experts' pairs.
class RankPairs {
public:
    // Starts to load the ids.
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, GM_ADDR expertIds, GM_ADDR mask) {
        info_ = &info;
        pairs_ = info.batch * info.topK;
        lanes_ = ListLanes(pairs_);
        const RankPairsUb ub(info);
        bitBytes_ = ub.bits;
        pipe.InitBuffer(idBuf_, ub.ids);
        pipe.InitBuffer(indexBuf_, ub.ids);
        pipe.InitBuffer(bitBuf_, 2 * ub.bits);
        if (info.maskRank != 0) {
            masks_ = info.maskRank == 1 ? info.batch : pairs_;
            pipe.InitBuffer(maskBuf_, ub.mask);
            pipe.InitBuffer(halfBuf_, ub.halves);
        }
        if (pairs_ != 0) Load(expertIds, mask);
    }
    __aicore__ inline uint32_t Lanes() const { return lanes_; }

    // Must be called first, after the scalar unit has waited for MTE2. Returns the first invalid id. `room`: scratch
    // for 2 * Lanes() int32.
    __aicore__ inline OpStatus Judge(const LocalTensor<int32_t>& room) {
        if (pairs_ == 0) return OpStatus();
        if (info_->maskRank != 0) LeaveOutMasked(room);
        const LocalTensor<int32_t> id = idBuf_.Get<int32_t>();
        const int32_t lanes = static_cast<int32_t>(lanes_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Maxs(room, id, kNotRouted, lanes);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mins(room, room, static_cast<int32_t>(info_->ids) - 1, lanes);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Compare(Bits(0), id, room, AscendC::CMPMODE::EQ, lanes_);
        AscendC::PipeBarrier<PIPE_V>();
        if (Select(room[lanes_], 0) == pairs_) return OpStatus();
        return FirstBad();
    }
    // After Judge, which leaves the ids in `room`: the number of pairs of experts [first, end).
    __aicore__ inline uint32_t CountBetween(uint32_t first, uint32_t end, const LocalTensor<int32_t>& room) {
        if (first == end || pairs_ == 0) return 0;
        // int32 supports only comparisons for equality, so the ids become floats.
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(room.ReinterpretCast<float>(), room, AscendC::RoundMode::CAST_RINT, lanes_);
        return CountBelow(end, room) - CountBelow(first, room);
    }
    // Compares all pairs with an expert. The parity of `turn` selects the result buffer. Waits for earlier vector
    // instructions, as Select requires.
    __aicore__ inline void Compare(int32_t expert, uint32_t turn) {
        AscendC::PipeBarrier<PIPE_V>();
        if (pairs_ == 0) return;
        AscendC::CompareScalar(Bits(turn), idBuf_.Get<int32_t>(), expert, AscendC::CMPMODE::EQ, lanes_);
    }
    // Stores the numbers of the pairs that compared equal, in order. Returns how many.
    __aicore__ inline uint32_t Select(const LocalTensor<int32_t>& to, uint32_t turn) {
        if (pairs_ == 0) return 0;
        return Gather(to, turn, pairs_);
    }

private:
    __aicore__ inline LocalTensor<uint8_t> Bits(uint32_t turn) { return bitBuf_.Get<uint8_t>()[turn % 2 * bitBytes_]; }
    __aicore__ inline uint32_t Gather(const LocalTensor<int32_t>& to, uint32_t turn, uint32_t count) {
        uint64_t found = 0;
        const AscendC::GatherMaskParams once(1, 1, 8, 8);
        AscendC::GatherMask(to, indexBuf_.Get<int32_t>(), Bits(turn).ReinterpretCast<uint32_t>(), true, count, once,
                            found);
        return static_cast<uint32_t>(found);
    }
    // Lanes after the last pair get the id "not routed".
    __aicore__ inline void Load(GM_ADDR expertIds, GM_ADDR mask) {
        GlobalTensor<int32_t> ids;
        ids.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(expertIds), pairs_);
        const LocalTensor<int32_t> id = idBuf_.Get<int32_t>();
        const uint32_t padded = PaddedInts(pairs_);
        const DataCopyExtParams params{1, static_cast<uint32_t>(pairs_ * sizeof(int32_t)), 0, 0, 0};
        const DataCopyPadExtParams<int32_t> pad{padded != pairs_, 0, Padding(padded - pairs_), kNotRouted};
        AscendC::DataCopyPad(id, ids, params, pad);
        if (masks_ != 0) {
            GlobalTensor<int8_t> masks;
            masks.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(mask), masks_);
            CopyIn(maskBuf_.Get<int8_t>(), masks, masks_);
        }
        if (padded != lanes_) AscendC::Duplicate(id[padded], kNotRouted, static_cast<int32_t>(lanes_ - padded));
        AscendC::CreateVecIndex(indexBuf_.Get<int32_t>(), static_cast<int32_t>(0), lanes_);
    }
    // Masked pairs get the id "not routed".
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
        AscendC::CompareScalar(Bits(0), room.ReinterpretCast<float>(), static_cast<float>(expert), AscendC::CMPMODE::LT,
                               lanes_);
        AscendC::PipeBarrier<PIPE_V>();
        return Select(room[lanes_], 0);
    }
    // Requires that there is one.
    __aicore__ inline OpStatus FirstBad() {
        const LocalTensor<int32_t> ids = idBuf_.Get<int32_t>();
        uint32_t i = 0;
        while (i + 1 < pairs_ && IsId(ids.GetValue(i))) ++i;
        return InvalidOf(*info_, kInvalidExpertId, i / info_->topK << 8 | i % info_->topK,
                         static_cast<uint32_t>(ids.GetValue(i)));
    }
    __aicore__ inline bool IsId(int32_t id) const { return id >= kNotRouted && id < static_cast<int32_t>(info_->ids); }

    const MoeDistributeInfo* info_ = nullptr;
    UbBuf idBuf_, indexBuf_, bitBuf_, maskBuf_, halfBuf_;
    uint32_t pairs_ = 0;
    uint32_t lanes_ = 0;
    uint32_t masks_ = 0;
    uint32_t bitBytes_ = 0;  // of a comparison
};

// With roles, without source indices: expand_idx of a pair is its position in its expert's list. No instruction
// scatters, so each pair takes its own store, from a table in UB whose block j holds j.
class PairPositions {
public:
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, GM_ADDR expandIdx) {
        expandIdx_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(expandIdx), info.batch * info.topK);
        const PairPositionsUb ub;
        pipe.InitBuffer(tableBuf_, ub.table);
        pipe.InitBuffer(numberBuf_, ub.numbers);
    }
    __aicore__ inline void Begin() {
        const LocalTensor<int32_t> number = numberBuf_.Get<int32_t>();
        AscendC::CreateVecIndex(number, static_cast<int32_t>(0), kPositionBlocks);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Brcb(tableBuf_.Get<int32_t>(), number, Repeats(kPositionBlocks / kBlockWords), {1, 8});
        SyncFunc<HardEvent::V_MTE3>();
    }
    // For pairs that are not routed, stores 0: entries [begin, end) of `pairs`. Call before any list.
    __aicore__ inline void StoreZeros(const LocalTensor<int32_t>& pairs, uint32_t begin, uint32_t end) {
        for (uint32_t i = begin; i < end; ++i) Put(pairs.GetValue(i), 0);
    }
    __aicore__ inline void Store(const LocalTensor<int32_t>& pairs, uint32_t count) {
        for (uint32_t i = 0; i < count; ++i) {
            if (i % kPositionBlocks == 0) Renumber(i);
            Put(pairs.GetValue(i), i % kPositionBlocks);
        }
    }

private:
    __aicore__ inline void Put(int32_t pair, uint32_t block) {
        CopyOut(expandIdx_[static_cast<uint32_t>(pair)], tableBuf_.Get<int32_t>()[block * kBlockWords], 1);
    }
    // From here on block j of the table holds first + j.
    __aicore__ inline void Renumber(uint32_t first) {
        if (first == first_) return;
        const LocalTensor<int32_t> table = tableBuf_.Get<int32_t>();
        SyncFunc<HardEvent::MTE3_V>();
        AscendC::Adds(table, table, static_cast<int32_t>(first) - static_cast<int32_t>(first_),
                      static_cast<int32_t>(kPositionBlocks * kBlockWords));
        SyncFunc<HardEvent::V_MTE3>();
        first_ = first;
    }

    GlobalTensor<int32_t> expandIdx_;
    UbBuf tableBuf_, numberBuf_;
    uint32_t first_ = 0;
};

// With roles: makes the lists of a range of experts from all ids of the rank. Compares the ids with an expert and
// selects the numbers of the equal pairs: these are that expert's list, in order, and their count is its total. So no
// core needs another core's counts.
class ExpertLists {
public:
    // `lists`: [W][capacity] int32 in the own ping-pong buffer. Starts to load the ids.
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, const DispatchArguments& args,
                                GM_ADDR lists, uint32_t core, uint32_t cores) {
        info_ = &info;
        lists_ = lists;
        core_ = core;
        cores_ = cores;
        first_ = PartBegin(info.experts, core, cores);
        count_ = PartBegin(info.experts, core + 1, cores) - first_;
        totals_.SetGlobalBuffer(
            reinterpret_cast<__gm__ int32_t*>(args.workspace + TotalsOffset(info.cores, info.experts)),
            PaddedInts(info.experts));
        pairs_.Init(pipe, info, args.expertIds, args.xActiveMask);
        const ExpertListsUb ub(info, count_);
        pipe.InitBuffer(countBuf_, ub.counts);
        pipe.InitBuffer(listBuf_, ub.lists);
        if (info.sourceIndices == 0) positions_.Init(pipe, info, args.expandIdx);
    }
    // Makes and stores the lists. Returns an invalid id, or an owner over its capacity.
    __aicore__ inline OpStatus Make() {
        LocalTensor<int32_t> list = listBuf_.Get<int32_t>();
        const OpStatus bad = pairs_.Judge(list);
        if (bad.code != kOk) return bad;
        const uint32_t owner = Owner(*info_, first_);
        before_ = pairs_.CountBetween(owner * info_->localExperts, first_, list);
        const uint32_t end = Select();
        const OpStatus status = StoreLists();
        if (info_->sourceIndices == 0) StorePositions(end);
        return status;
    }

private:
    // Selects this core's lists into UB, one after the other, each from a new block. Returns their end.
    __aicore__ inline uint32_t Select() {
        LocalTensor<int32_t> count = countBuf_.Get<int32_t>(), list = listBuf_.Get<int32_t>();
        uint32_t at = 0;
        if (count_ != 0) pairs_.Compare(static_cast<int32_t>(first_), 0);
        for (uint32_t i = 0; i < count_; ++i) {
            // The next comparison is in flight while this one's result is read.
            pairs_.Compare(static_cast<int32_t>(first_ + Min(i + 1, count_ - 1)), i + 1);
            const uint32_t found = pairs_.Select(list[at], i);
            count.SetValue(i, static_cast<int32_t>(found));
            at += PaddedInts(found);
        }
        return at;
    }
    __aicore__ inline OpStatus StoreLists() {
        LocalTensor<int32_t> count = countBuf_.Get<int32_t>(), list = listBuf_.Get<int32_t>();
        OpStatus status;
        uint32_t at = 0, rows = before_;
        SyncFunc<HardEvent::V_MTE3>();
        for (uint32_t i = 0; i < count_; ++i) {
            const uint32_t found = static_cast<uint32_t>(count.GetValue(i));
            const uint32_t owner = Owner(*info_, first_ + i), local = Local(*info_, first_ + i);
            if (local == 0) rows = 0;
            // After its capacity the next owner's list begins.
            if (found != 0 && rows + found <= info_->capacity) StoreList(owner, rows, list[at], found);
            rows += found;
            at += PaddedInts(found);
            if (local + 1 == info_->localExperts && rows > info_->capacity && status.code == kOk)
                status = InvalidOf(*info_, kRoutingOverflow, owner, rows);
        }
        SyncFunc<HardEvent::S_MTE3>();
        if (count_ != 0) CopyOut(totals_[first_], count, count_);
        return status;
    }
    __aicore__ inline void StoreList(uint32_t owner, uint32_t row, const LocalTensor<int32_t>& pairs, uint32_t count) {
        GlobalTensor<int32_t> target;
        target.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(lists_ + owner * ListBytes(info_->capacity)) + row,
                               count);
        CopyOut(target, pairs, count);
    }
    // Without source indices: stores expand_idx of the pairs of this core's experts, and zeros for its share of the
    // pairs that are not routed. `end`: where the lists end in UB.
    __aicore__ inline void StorePositions(uint32_t end) {
        LocalTensor<int32_t> count = countBuf_.Get<int32_t>(), list = listBuf_.Get<int32_t>();
        pairs_.Compare(kNotRouted, 0);
        AscendC::PipeBarrier<PIPE_V>();
        const uint32_t none = pairs_.Select(list[end], 0), begin = PartBegin(none, core_, cores_);
        SyncFunc<HardEvent::V_S>();
        positions_.Begin();
        positions_.StoreZeros(list[end], begin, PartBegin(none, core_ + 1, cores_));
        uint32_t at = 0;
        for (uint32_t i = 0; i < count_; ++i) {
            const uint32_t found = static_cast<uint32_t>(count.GetValue(i));
            positions_.Store(list[at], found);
            at += PaddedInts(found);
        }
    }

    const MoeDistributeInfo* info_ = nullptr;
    GM_ADDR lists_ = nullptr;
    GlobalTensor<int32_t> totals_;
    RankPairs pairs_;
    PairPositions positions_;
    UbBuf countBuf_, listBuf_;
    uint32_t core_ = 0, cores_ = 1;
    uint32_t first_ = 0, count_ = 0;  // this core's experts
    uint32_t before_ = 0;             // rows for earlier experts of the same owner
};

}  // namespace moe

#endif  // ASCEND_MOE_DIRECT_LISTS_H
