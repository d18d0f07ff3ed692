// The lists of direct dispatch by cores that do nothing else: each owns a range of experts, and reads all ids
// of the rank. A comparison of the ids with an expert and a selection of the pair numbers are that expert's
// list, in order, and the number of its pairs, so that no core has to know what another has counted.
#ifndef ASCEND_MOE_DISTRIBUTE_EXPERT_LISTS_H
#define ASCEND_MOE_DISTRIBUTE_EXPERT_LISTS_H

#include "../common/dispatch_outputs.h"
#include "pair_positions.h"
#include "rank_pairs.h"

namespace moe {

class ExpertLists {
public:
    // `lists`: of this rank's own half, an owner after the other. Begins to load the ids.
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
        pipe.InitBuffer(countBuf_, PaddedInts(count_) * sizeof(int32_t));
        pipe.InitBuffer(listBuf_, ListInts(pairs_.Lanes(), count_) * sizeof(int32_t));
        if (info.triples == 0) positions_.Init(pipe, info, args.expandIdx);
    }
    // A bad id, or an owner that gets more rows than it has room for, is the verdict.
    __aicore__ inline Verdict Make() {
        LocalTensor<int32_t> list = listBuf_.Get<int32_t>();
        const Verdict bad = pairs_.Judge(list);
        if (bad.code != kOk) return bad;
        const uint32_t owner = first_ / info_->localExperts;
        before_ = pairs_.CountBetween(owner * info_->localExperts, first_, list);
        const uint32_t end = Select();
        const Verdict verdict = StoreLists();
        if (info_->triples == 0) StorePositions(end);
        return verdict;
    }

private:
    // This core's lists, one behind the other, each from a block on. Returns where they end.
    __aicore__ inline uint32_t Select() {
        LocalTensor<int32_t> count = countBuf_.Get<int32_t>(), list = listBuf_.Get<int32_t>();
        uint32_t at = 0;
        if (count_ != 0) pairs_.Compare(static_cast<int32_t>(first_), 0);
        for (uint32_t i = 0; i < count_; ++i) {
            // The next comparison is on its way while this one's result is looked at.
            pairs_.Compare(static_cast<int32_t>(first_ + Min(i + 1, count_ - 1)), i + 1);
            const uint32_t found = pairs_.Select(list[at], i);
            count.SetValue(i, static_cast<int32_t>(found));
            at += PaddedInts(found);
        }
        return at;
    }
    __aicore__ inline Verdict StoreLists() {
        LocalTensor<int32_t> count = countBuf_.Get<int32_t>(), list = listBuf_.Get<int32_t>();
        Verdict verdict;
        uint32_t at = 0, rows = before_;
        SyncFunc<HardEvent::V_MTE3>();
        for (uint32_t i = 0; i < count_; ++i) {
            const uint32_t found = static_cast<uint32_t>(count.GetValue(i));
            const uint32_t owner = (first_ + i) / info_->localExperts;
            const uint32_t local = (first_ + i) % info_->localExperts;
            if (local == 0) rows = 0;
            // Behind its capacity lies the list of the next owner.
            if (found != 0 && rows + found <= info_->capacity) StoreList(owner, rows, list[at], found);
            rows += found;
            at += PaddedInts(found);
            if (local + 1 == info_->localExperts && rows > info_->capacity && verdict.code == kOk)
                verdict = InvalidOf(*info_, kRoutingOverflow, owner, rows);
        }
        SyncFunc<HardEvent::S_MTE3>();
        if (count_ != 0) CopyOut(totals_[first_], count, count_);
        return verdict;
    }
    __aicore__ inline void StoreList(uint32_t owner, uint32_t row, const LocalTensor<int32_t>& pairs,
                                     uint32_t count) {
        GlobalTensor<int32_t> target;
        target.SetGlobalBuffer(
            reinterpret_cast<__gm__ int32_t*>(lists_ + owner * ListBytes(info_->capacity)) + row, count);
        CopyOut(target, pairs, count);
    }
    // V1's expand_idx, of this core's experts and of its share of what goes nowhere. `end`: of the lists.
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
    uint32_t before_ = 0;             // rows that the owner of the first of them gets before those of it
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_EXPERT_LISTS_H
