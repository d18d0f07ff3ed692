// V1's expand_idx from lists of pairs by expert: the position of each in its list, a store a pair, from a
// table in UB whose block j holds j. There is no instruction that scatters.
#ifndef ASCEND_MOE_DISTRIBUTE_PAIR_POSITIONS_H
#define ASCEND_MOE_DISTRIBUTE_PAIR_POSITIONS_H

#include "../common/base.h"

namespace moe {

class PairPositions {
public:
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, GM_ADDR expandIdx) {
        expandIdx_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(expandIdx), info.batch * info.topK);
        pipe.InitBuffer(tableBuf_, kPositionBlocks * kBlock);
        pipe.InitBuffer(numberBuf_, kPositionBlocks * sizeof(int32_t));
    }
    __aicore__ inline void Begin() {
        const LocalTensor<int32_t> number = numberBuf_.Get<int32_t>();
        AscendC::CreateVecIndex(number, static_cast<int32_t>(0), kPositionBlocks);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Brcb(tableBuf_.Get<int32_t>(), number, static_cast<uint8_t>(kPositionBlocks / kBlockWords),
                      {1, 8});
        SyncFunc<HardEvent::V_MTE3>();
    }
    // For pairs that go nowhere: entries [begin, end) of `pairs`. Before any list.
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
    // Block 0 holds `first` from here on.
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

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_PAIR_POSITIONS_H
