// The order in which direct combine sums a chunk's (token, part of H) items: token by token, and where rows
// come in stages stage by stage.
#ifndef ASCEND_MOE_DISTRIBUTE_STAGE_ORDER_H
#define ASCEND_MOE_DISTRIBUTE_STAGE_ORDER_H

#include "../common/base.h"
#include "../protocol/combine_tiling.h"

namespace moe {

// Where a core's share of the items begins. Where rows leave in stages core 0 and those that tell the peers
// have none; cores that copy come late to the sums, and get half as much as others.
__aicore__ inline uint32_t SumBegin(const MoeDistributeCombineTiling& tiling, uint32_t items, uint32_t core) {
    const uint32_t cores = tiling.info.cores, others = cores - tiling.copyCores;
    if (tiling.copyCores == 0 || cores == 1) return PartBegin(items, core, cores);
    const uint32_t idle = 1 + TellingCores(tiling);
    const uint32_t first = idle + Min(idle, others);  // what they would have
    const uint32_t before = core + Min(core, others);
    return PartBegin(items, before < first ? 0 : before - first, cores + others - first);
}

class StageOrder {
public:
    __aicore__ inline void Init(const MoeDistributeCombineTiling& tiling, bool staged) {
        parts_ = tiling.partsPerToken;
        staged_ = staged;
        for (uint32_t stage = 0; staged && stage + 1 < kStages; ++stage)
            end_[stage] = StageEnd(tiling.info.hidden, stage) / tiling.partElements;
        end_[kStages - 1] = parts_;
    }
    // Items [first, stop).
    __aicore__ inline void Begin(uint32_t first, uint32_t stop) {
        first_ = first;
        stop_ = stop;
        item_ = first;
        stage_ = 0;
        if (staged_) Settle();
    }
    __aicore__ inline bool Done() const { return item_ >= stop_; }
    __aicore__ inline void Next() {
        ++item_;
        if (staged_) Settle();
    }
    __aicore__ inline uint32_t item() const { return item_; }
    __aicore__ inline uint32_t stop() const { return stop_; }
    // That the item's part of its rows comes with.
    __aicore__ inline uint32_t stage() const { return stage_; }

private:
    // On to the next item of this stage, or to the first of the next that has one.
    __aicore__ inline void Settle() {
        bool found = false;
        while (!found) {
            const uint32_t begin = stage_ == 0 ? 0 : end_[stage_ - 1], end = end_[stage_],
                           part = item_ % parts_;
            if (part < begin) item_ += begin - part;
            if (part >= end) item_ += parts_ - part + begin;
            if (begin == end) item_ = stop_;
            found = item_ < stop_ || stage_ + 1 == kStages;
            if (!found) {
                ++stage_;
                item_ = first_;
            }
        }
    }

    uint32_t end_[kStages] = {};  // parts of a token
    uint32_t parts_ = 1;
    uint32_t first_ = 0;
    uint32_t stop_ = 0;
    uint32_t item_ = 0;
    uint32_t stage_ = 0;
    bool staged_ = false;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_STAGE_ORDER_H
