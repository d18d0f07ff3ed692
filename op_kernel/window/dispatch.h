// MoeDistributeDispatch, algorithm "window": every (token, k) row goes to the window of the rank that owns
// its expert. Each rank then gathers its window into expand_x, ordered by (local expert, source rank, flat
// (token, k)).
//
// "triples:" is where rows carry triples (source rank, token, k): the V2 contract where no rank is reached by RDMA.
// "index:" is where expand_idx stands for them. A: rows of expand_x.
//
// phase | function            | which cores  | reads                  | writes                   | who meets
// ------+---------------------+--------------+------------------------+--------------------------+----------
// 0     | Exchange::Enter     | all          | context, epoch word    | nothing                  |
// 1     | RoutingTable::      | all: a share | expert_ids [BS][K]     | workspace: histograms    | cores of
//       | Count,              | of the pairs | int32, x_active_mask;  | [cores][E] int32; core   | the rank
//       | Exchange::Open      |              | core 0: abort blocks   | 0, after the meeting:    |
//       |                     |              |                        | epoch word               |
// 2     | RowPlaces::Find,    | all; core 0  | histograms             | workspace: totals [E]    |
//       | StoreTotals         | stores       |                        | int32                    |
// 3     | AlltoAllDispatch,   | all: the     | ids and mask again, x  | the owners' halves:      | cores of
//       | MeetAfterSend       | share of     | [BS][H], scales [E][H] | rows, triples: with      | the rank
//       |                     | phase 1      | fp32, expert_scales    | them; index: expand_idx  |
//       |                     |              | [BS][K] fp32           | [BS*K] int32             |
// 4     | SetStatus           | all: a share | totals                 | a status message to      | RDMA:
//       |                     | of the peers |                        | every rank; RDMA: staged | cores of
//       |                     |              |                        | with a BatchWrite item,  | the rank
//       |                     |              |                        | core 0 posts the items   |
// 5     | WaitDispatch        | all: a share | status messages; core  | workspace: messages [W]  | all
//       |                     | of the       | 0: abort blocks,       | int32; core 0, when it   | ranks,
//       |                     | sources      | others: fail block     | finds an abort: fail     | then
//       |                     |              |                        | block                    | cores of
//       |                     |              |                        |                          | the rank
// 6     | ArrivedRows::Copy   | all: a share | counts, rows in the    | expand_x [A][H],         |
//       |                     | of the rows  | own half               | dynamic_scales [A] fp32, |
//       |                     |              |                        | expand_scales [A] fp32,  |
//       |                     |              |                        | triples [A][3] int32;    |
//       |                     |              |                        | core 0:                  |
//       |                     |              |                        | ep_recv_counts [L*W]     |
//       |                     |              |                        | int32, expert_token_nums |
//       |                     |              |                        | [L] int64,               |
//       |                     |              |                        | tp_recv_counts [1] int32 |
//
// A bad id ends in phase 1, an owner over its capacity in phase 2: then no row leaves, and the status
// messages of phase 4 carry the error, so that every rank raises it after phase 5. After any failure Leave
// writes zero counts and the error record. Of two launches send ends after phase 4, and finish does 0, 5 and 6.
#ifndef ASCEND_MOE_WINDOW_DISPATCH_H
#define ASCEND_MOE_WINDOW_DISPATCH_H

#include "../common/outputs.h"
#include "../common/quantize.h"
#include "../common/routing.h"

namespace moe {

template <typename XType, bool kQuant, bool kSmooth>
class MoeDistributeDispatch {
public:
    __aicore__ inline void Init(const DispatchArguments& arguments, const MoeDistributeDispatchTiling& tiling) {
        args_ = arguments;
        tiling_ = &tiling;
        info_ = &tiling.info;
        counts_.Init(args_, tiling);
        triples_ = info_->triples != 0;
        weights_ = info_->hasWeights != 0;
        wireSize_ = kQuant ? sizeof(int8_t) : sizeof(XType);
        rowStride_ = DispatchRowStride(info_->hidden, wireSize_, kQuant, TailBlocks(*info_));
        tailBytes_ = TailBlocks(*info_) * kBlock;
        tailOffset_ = rowStride_ - tailBytes_;
        rowStep_ = RowStep(*info_, rowStride_);
        arrived_.Init(args_, tiling, rowStride_, tailBytes_);
    }

    __aicore__ inline void Process(TPipe& pipe) {
        if (exchange_.Enter(pipe, *info_, kOpDispatch, args_.workspace, args_.performanceInfo, args_.errorRecord,
                            args_.tiling, tiling_->mc2))
            Run();
        exchange_.Exit();
    }

private:
    __aicore__ inline void Run() {
        if (info_->part == kPartFinish) {
            exchange_.BoardInit();
        } else if (!Send()) {
            counts_.Leave(exchange_);
            return;
        }
        if (exchange_.Sent()) return;
        if (!WaitDispatch()) {
            counts_.Leave(exchange_);
            return;
        }
        arrived_.Copy(exchange_, keeper_, counts_);  // UB plan 3 (phase 6)
    }
    // False: the communicator has failed before.
    __aicore__ inline bool Send() {
        SendBuffInit();
        if (!exchange_.Open(routing_.Count())) return false;
        exchange_.Fail(places_.Find());
        routing_.StoreTotals();
        AlltoAllDispatch();
        exchange_.MeetAfterSend(Verdict());
        SetStatus();
        return true;
    }

    // UB plan 1 (phases 1 to 3): routing tables, rows in flight, and of the current chunk of pairs
    // expand_idx, row numbers, and the tails of rows.
    __aicore__ inline void SendBuffInit() {
        MOE_PHASE(exchange_.stamps(), SendBuffInit);
        exchange_.BoardInit();
        exchange_.LoadPeers();
        routing_.Init(exchange_.pipe(), *info_, args_.expertIds, args_.xActiveMask, args_.workspace, exchange_.core());
        places_.Init(exchange_.pipe(), *info_, routing_, args_.workspace, exchange_.core());
        rows_.Init(exchange_.pipe(), *tiling_, args_.x, args_.scales);
        const SendChunkUb ub(*tiling_, rowStride_);
        exchange_.pipe().InitBuffer(indexBuf_, ub.index);
        exchange_.pipe().InitBuffer(rowBuf_, ub.rows);
        if (ub.tails != 0) exchange_.pipe().InitBuffer(tailBuf_, ub.tails);
        if (ub.ring != 0) exchange_.pipe().InitBuffer(tailQueue_, Ring(ub.ring), ub.row);
        if (ub.weights != 0) exchange_.pipe().InitBuffer(weightBuf_, ub.weights);
        expandIdx_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args_.expandIdx));
    }

    // Gives each pair of this core's share its place, and sends its row to the owner's window.
    __aicore__ inline void AlltoAllDispatch() {
        MOE_PHASE(exchange_.stamps(), AlltoAllDispatch);
        if (exchange_.verdict().code != kOk) return;  // the status message carries the reason, no row leaves
        for (uint32_t at = routing_.begin(); at < routing_.end(); at += kChunkPairs) {
            const uint32_t count = Min(kChunkPairs, routing_.end() - at);
            routing_.pairs().Load(at, count);
            if (weights_) LoadWeights(at, count);
            PlaceChunk(at, count);
            if (info_->transport == kTransportRdma) {
                SendChunk<true>(at, count);
            } else {
                SendChunk<false>(at, count);
            }
        }
        rows_.Release();
    }

    __aicore__ inline void LoadWeights(uint32_t at, uint32_t count) {
        GlobalTensor<float> weights;
        weights.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(args_.expertScales) + at, count);
        CopyIn(weightBuf_.Get<float>(), weights, count);
        SyncFunc<HardEvent::MTE2_S>();
    }
    __aicore__ inline void PlaceChunk(uint32_t at, uint32_t count) {
        LocalTensor<int32_t> index = indexBuf_.Get<int32_t>();
        LocalTensor<int32_t> row = rowBuf_.Get<int32_t>();
        SyncFunc<HardEvent::MTE3_S>();
        uint32_t token = at / info_->topK, k = at % info_->topK;
        for (uint32_t i = 0; i < count; ++i) {
            const int32_t id = routing_.pairs().Id(i, token);
            uint32_t position = 0;
            if (routing_.pairs().Routed(id)) {
                position = routing_.TakePosition(id);
                row.SetValue(i, places_.First(id) + static_cast<int32_t>(position));
                SetTail(i, token, k);
            }
            index.SetValue(i, static_cast<int32_t>(position));
            if (++k == info_->topK) {
                k = 0;
                ++token;
            }
        }
        SyncFunc<HardEvent::S_MTE3>();
        SyncFunc<HardEvent::S_V>();
        if (!triples_) CopyOut(expandIdx_[at], index, count);
    }
    // The triple, if rows have them, and the weight, if given; each begins a block.
    __aicore__ inline void SetTail(uint32_t i, uint32_t token, uint32_t k) {
        if (tailBytes_ == 0) return;
        const uint32_t words = tailBytes_ / static_cast<uint32_t>(sizeof(int32_t));
        LocalTensor<int32_t> tail = tailBuf_.Get<int32_t>()[i * words];
        for (uint32_t w = 0; w < words; ++w) tail.SetValue(w, 0);
        if (triples_) {
            tail.SetValue(0, static_cast<int32_t>(info_->rank));
            tail.SetValue(1, static_cast<int32_t>(token));
            tail.SetValue(2, static_cast<int32_t>(k));
        }
        if (weights_) tail.SetValue(words - kBlockWords, weightBuf_.Get<int32_t>().GetValue(i));
    }

    __aicore__ inline LocalTensor<int8_t> Tail(uint32_t i) { return tailBuf_.Get<int8_t>()[i * tailBytes_]; }
    // A token's row has another tail for each k: each gets a copy, which leaves as a single store.
    template <bool kRdma>
    __aicore__ inline void SendWithTail(uint32_t owner, uint64_t offset, const LocalTensor<int8_t>& row, uint32_t i) {
        LocalTensor<int8_t> whole = tailQueue_.template AllocTensor<int8_t>();
        if constexpr (kQuant) {
            SyncFunc<HardEvent::S_V>();  // the scale
            AscendC::PipeBarrier<PIPE_V>();
        } else {
            SyncFunc<HardEvent::MTE2_V>();
        }
        AscendC::DataCopy(whole, row, tailOffset_);
        AscendC::DataCopy(whole[tailOffset_], Tail(i), tailBytes_);
        tailQueue_.EnQue(whole);
        whole = tailQueue_.template DeQue<int8_t>();
        exchange_.sender().template PutRows<kRdma>(owner, offset, whole, rowStride_);
        tailQueue_.FreeTensor(whole);
    }

    template <bool kRdma>
    __aicore__ inline void SendChunk(uint32_t at, uint32_t count) {
        LocalTensor<int32_t> row = rowBuf_.Get<int32_t>();
        const uint64_t base = kRdma ? exchange_.sender().rows_at() : 0;
        uint32_t token = at / info_->topK, k = at % info_->topK;
        for (uint32_t i = 0; i < count; ++i) {
            const int32_t id = routing_.pairs().Id(i, token);
            if (routing_.pairs().Routed(id)) {
                const uint32_t owner = Owner(*info_, static_cast<uint32_t>(id));
                const uint64_t offset = base + RowOffsetBytes(row.GetValue(i), rowStep_);
                const LocalTensor<int8_t> row = rows_.Fetch(token, static_cast<uint32_t>(id));
                if (tailBytes_ != 0 && tiling_->tailRing != 0) {
                    SendWithTail<kRdma>(owner, offset, row, i);
                } else {
                    exchange_.sender().template PutRows<kRdma>(owner, offset, row, rows_.WireBytes());
                    if (tailBytes_ != 0)
                        exchange_.sender().template PutRows<kRdma>(owner, offset + tailOffset_, Tail(i), tailBytes_);
                }
            }
            if (++k == info_->topK) {
                k = 0;
                ++token;
            }
        }
    }

    // UB plan 2 (phases 4 and 5): one message, then the messages of this core's sources.
    __aicore__ inline void SetStatus() {
        exchange_.NextPlan();
        SendCounts counts;
        counts.Init(exchange_.pipe(), *info_, args_.workspace);
        exchange_.SetStatus(counts, rowStride_);
    }

    __aicore__ inline bool WaitDispatch() {
        keeper_.Init(*info_, args_.workspace);
        return exchange_.WaitStatus(keeper_, rowStride_);
    }

    DispatchArguments args_;
    const MoeDistributeDispatchTiling* tiling_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    Exchange exchange_;
    RoutingTable routing_;
    RowPlaces places_;
    RowLoader<XType, kQuant, kSmooth> rows_;
    DispatchCounts counts_;
    MessageKeeper keeper_;
    ArrivedRows<kQuant> arrived_;
    AscendC::TQue<AscendC::QuePosition::VECOUT, 1> tailQueue_;
    GlobalTensor<int32_t> expandIdx_;
    UbBuf indexBuf_, rowBuf_, tailBuf_, weightBuf_;
    bool triples_ = false;
    bool weights_ = false;
    uint32_t wireSize_ = 1;
    uint32_t rowStride_ = 0;  // of a row in UB,
    uint32_t rowStep_ = 0;    // and in the window
    uint32_t tailOffset_ = 0;
    uint32_t tailBytes_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_WINDOW_DISPATCH_H
