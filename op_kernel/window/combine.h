// What both layouts of window combine share (packed.h, slots.h): the plan of the op, and the sums of this rank's
// tokens.
#ifndef ASCEND_MOE_WINDOW_COMBINE_H
#define ASCEND_MOE_WINDOW_COMBINE_H

#include "../common/weighted_sum.h"

namespace moe {

// The sums of a core's share of the items (token, part of H). Rows come through a queue of sumRing parts. `Rows`: see
// Terms; besides, missing() says which row has not come, or kOk.
template <typename XType, bool kQuant, typename Rows>
class TokenSum {
public:
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeCombineTiling& tiling,
                                const CombineArguments& arguments, Rows& rows) {
        batch_ = tiling.info.batch;
        rows_ = &rows;
        x_ = arguments.x;
        parts_.Init(tiling);
        terms_.Init(pipe, tiling, arguments, rows);
        const TokenSumUb ub(tiling, sizeof(XType));
        pipe.InitBuffer(inQueue_, Ring(ub.ring), ub.piece);
        sum_.Init(pipe, tiling);
    }

    // The share of core `core` of `cores`. Calls told.Tell once, with the first pair of the share whose row has not
    // come, or kOk: before it stores the last sum, so that the others hear of it soon.
    template <typename Told>
    __aicore__ inline void Run(RoutingTable& routing, uint32_t core, uint32_t cores, Told& told) {
        const uint32_t items = parts_.Items(batch_), end = PartBegin(items, core + 1, cores);
        uint32_t item = PartBegin(items, core, cores);
        if (item == end) told.Tell(rows_->missing());
        while (item < end) {
            const uint32_t first = parts_.Token(item);
            LoadChunk(routing, first, Min(terms_.ChunkTokens(), parts_.Token(end - 1) + 1 - first));
            for (; item < end && parts_.Token(item) < first + terms_.tokens(); ++item) {
                const uint32_t token = parts_.Token(item), part = parts_.Part(item);
                AddTerms(routing, token, part);
                if (item + 1 == end) told.Tell(rows_->missing());
                sum_.Store(parts_.Place(x_, token, part));
            }
        }
    }

private:
    __aicore__ inline void LoadChunk(RoutingTable& routing, uint32_t token, uint32_t tokens) {
        terms_.Load(routing, token, tokens);
        SyncFunc<HardEvent::MTE2_S>();
        terms_.Place(routing);
    }
    __aicore__ inline void AddTerms(RoutingTable& routing, uint32_t token, uint32_t part) {
        sum_.Begin(parts_.Elements(part));
        terms_.Begin(token);
        for (Term term; terms_.Next(routing, term);) {
            LocalTensor<int8_t> piece = inQueue_.template AllocTensor<int8_t>();
            parts_.Load(piece, term.address, term.travelled, part);
            inQueue_.EnQue(piece);
            piece = inQueue_.template DeQue<int8_t>();
            sum_.Add(piece, term);
            inQueue_.FreeTensor(piece);
        }
    }

    Terms<XType, Rows> terms_;
    RowParts<XType, kQuant> parts_;
    AscendC::TQue<AscendC::QuePosition::VECIN, 1> inQueue_;
    WeightedSum<XType, kQuant> sum_;
    Rows* rows_ = nullptr;
    GM_ADDR x_ = nullptr;
    uint32_t batch_ = 0;
};

class WindowCombine {
protected:
    // `size`: of an element of x.
    __aicore__ inline void Init(const CombineArguments& arguments, const MoeDistributeCombineTiling& tiling,
                                uint32_t size) {
        args_ = arguments;
        tiling_ = &tiling;
        info_ = &tiling.info;
        sumBytes_ = info_->hidden * size;
        rowBytes_ = ReturnedRowBytes(*info_, size);
    }
    __aicore__ inline bool Enter(TPipe& pipe) {
        return exchange_.Enter(pipe, *info_, kOpCombine, args_.workspace, args_.performanceInfo, args_.errorRecord,
                               args_.tiling, tiling_->mc2);
    }
    // Of a plan of UB that counts ids or sums.
    __aicore__ inline void RoutingInit() {
        routing_.Init(exchange_.pipe(), *info_, args_.expertIds, args_.xActiveMask, args_.workspace, exchange_.core());
    }
    // UB plan 1: routing tables.
    __aicore__ inline void BuffInit() {
        exchange_.BoardInit();
        exchange_.LoadPeers();
        RoutingInit();
        places_.Init(exchange_.pipe(), *info_, routing_, args_.workspace, exchange_.core());
    }
    // After a failure each core writes zeros into its share of x, and core 0 the error record.
    __aicore__ inline void Leave() { LeaveCombine(exchange_, *tiling_, args_.x, sumBytes_); }

    CombineArguments args_;
    const MoeDistributeCombineTiling* tiling_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    Exchange exchange_;
    RoutingTable routing_;
    RowPlaces places_;
    uint32_t sumBytes_ = 0;  // of a row of x
    uint32_t rowBytes_ = 0;  // of a row on its way
};

}  // namespace moe

#endif  // ASCEND_MOE_WINDOW_COMBINE_H
