// Dispatch, algorithm "window": every (token, k) row is written to the window of the rank that owns its expert. Each
// rank then gathers its window into expand_x, ordered by (local expert, source rank, flat (token, k)).
//
// "sources:" applies if rows have source indices (source rank, token, k): the V2 contract if no rank is reached by
// RDMA; "index:" if expand_idx is used instead. A: rows of expand_x.
//
// phase | function         | which     | reads                  | writes                            | which cores
//       |                  | cores     |                        |                                   | synchronize
// ------+------------------+-----------+------------------------+-----------------------------------+------------
// 0     | Exchange::Enter  | all       | context, epoch word    | nothing                           |
// 1     | RoutingTable::   | all: a    | expert_ids [BS][K]     | workspace: histograms [cores][E]  | cores of
//       | Count,           | share of  | int32, x_active_mask;  | int32; core 0, after the core     | the rank
//       | Exchange::Open   | the pairs | core 0: abort blocks   | barrier: epoch word               |
// 2     | RowPlaces::Find, | all; core | histograms             | workspace: totals [E] int32       |
//       | StoreTotals      | 0 stores  |                        |                                   |
// 3     | AlltoAll-        | all: the  | ids and mask again, x  | the owners' ping-pong buffers:    | cores of
//       | Dispatch,        | share of  | [BS][H], scales [E][H] | rows, sources: with source        | the rank
//       | BarrierAfterSend | phase 1   | fp32, expert_scales    | indices; index: expand_idx [BS*K] |
//       |                  |           | [BS][K] fp32           | int32                             |
// 4     | SetStatus        | all: a    | totals                 | a status message to every rank;   | RDMA: cores
//       |                  | share of  |                        | RDMA: staged with a BatchWrite    | of the rank
//       |                  | the peers |                        | item, core 0 posts the items      |
// 5     | WaitDispatch     | all: a    | status messages; core  | workspace: messages [W] int32;    | all ranks,
//       |                  | share of  | 0: abort blocks,       | core 0, when it finds an abort:   | then cores
//       |                  | the       | others: local abort    | local abort flag                  | of the rank
//       |                  | sources   | flag                   |                                   |
// 6     | ArrivedRows::    | all: a    | counts, rows in the    | expand_x [A][H], dynamic_scales   |
//       | Copy             | share of  | own ping-pong buffer   | [A] fp32, expand_scales [A] fp32, |
//       |                  | the rows  |                        | source indices [A][3] int32; core |
//       |                  |           |                        | 0: ep_recv_counts [L*W] int32,    |
//       |                  |           |                        | expert_token_nums [L] int64,      |
//       |                  |           |                        | tp_recv_counts [1] int32          |
//
// With an invalid id (phase 1) or an owner over its capacity (phase 2) no row leaves, and the status messages of phase
// 4 carry the error, so that every rank raises it after phase 5. After any failure Leave writes zero counts and the
// error record. In split mode, send returns after phase 4; finish runs phases 0, 5 and 6.
#ifndef ASCEND_MOE_WINDOW_DISPATCH_H
#define ASCEND_MOE_WINDOW_DISPATCH_H

#include "../common/outputs.h"
#include "../common/quantize.h"
#include "../common/routing.h"

namespace moe {

template <bool kQuant>
class WindowDispatch {
public:
    __aicore__ inline void Init(const DispatchArguments& arguments, const MoeDistributeDispatchTiling& tiling) {
        args_ = arguments;
        tiling_ = &tiling;
        info_ = &tiling.info;
        counts_.Init(args_, tiling);
        sourceIndices_ = info_->sourceIndices != 0;
        weights_ = info_->hasWeights != 0;
        rowStride_ = DispatchRowStride(info_->hidden, WireSize(*info_), kQuant, TrailerBlocks(*info_));
        trailerBytes_ = TrailerBlocks(*info_) * kBlock;
        trailerOffset_ = rowStride_ - trailerBytes_;
        rowStep_ = RowStep(*info_, rowStride_);
        arrived_.Init(args_, tiling, rowStride_, trailerBytes_);
    }

    __aicore__ inline void Process(TPipe& pipe) {
        if (exchange_.Enter(pipe, *info_, kOpDispatch, args_.group, args_.workspace, args_.performanceInfo,
                            args_.errorRecord, args_.tiling, tiling_->mc2))
            Run();
        exchange_.Exit();
    }

private:
    __aicore__ inline void Run() {
        if (info_->part == kPartFinish) {
            exchange_.BarrierInit();
        } else if (!Send()) {
            counts_.Leave(exchange_);
            return;
        }
        if (exchange_.Sent()) return;
        if (!WaitDispatch()) {
            counts_.Leave(exchange_);
            return;
        }
        arrived_.Copy(exchange_, keeper_, counts_);  // UB layout 3 (phase 6)
    }
    // Returns false if the communicator is in the failed state.
    __aicore__ inline bool Send() {
        SendBuffInit();
        if (!exchange_.Open(routing_.Count())) return false;
        exchange_.Fail(places_.Find());
        routing_.StoreTotals();
        AlltoAllDispatch();
        exchange_.BarrierAfterSend(OpStatus());
        SetStatus();
        return true;
    }

    // UB layout 1 (phases 1 to 3): routing tables and rows in flight; for the current chunk of pairs expand_idx, row
    // numbers, and trailers.
    __aicore__ inline void SendBuffInit() {
        MOE_PHASE(exchange_.timestamps(), SendBuffInit);
        exchange_.BarrierInit();
        exchange_.LoadPeers();
        routing_.Init(exchange_.pipe(), *info_, args_.expertIds, args_.xActiveMask, args_.workspace, exchange_.core());
        places_.Init(exchange_.pipe(), *info_, routing_, args_.workspace, exchange_.core());
        rows_.Init(exchange_.pipe(), *tiling_, args_.x, args_.scales);
        const SendChunkUb ub(*tiling_, rowStride_);
        exchange_.pipe().InitBuffer(indexBuf_, ub.index);
        exchange_.pipe().InitBuffer(rowBuf_, ub.rows);
        if (ub.trailers != 0) exchange_.pipe().InitBuffer(trailerBuf_, ub.trailers);
        if (ub.ring != 0) exchange_.pipe().InitBuffer(trailerQueue_, Ring(ub.ring), ub.row);
        if (ub.weights != 0) exchange_.pipe().InitBuffer(weightBuf_, ub.weights);
        expandIdx_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args_.expandIdx));
    }

    // Gives each pair of this core's share its place, and sends its row to the owner's window.
    __aicore__ inline void AlltoAllDispatch() {
        MOE_PHASE(exchange_.timestamps(), AlltoAllDispatch);
        if (exchange_.status().code != kOk) return;  // the status message carries the reason, no row leaves
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
                SetTrailer(i, token, k);
            }
            index.SetValue(i, static_cast<int32_t>(position));
            if (++k == info_->topK) {
                k = 0;
                ++token;
            }
        }
        SyncFunc<HardEvent::S_MTE3>();
        SyncFunc<HardEvent::S_V>();
        if (!sourceIndices_) CopyOut(expandIdx_[at], index, count);
    }
    // The source index, if rows have them, and the weight, if given; one block each.
    __aicore__ inline void SetTrailer(uint32_t i, uint32_t token, uint32_t k) {
        if (trailerBytes_ == 0) return;
        const uint32_t words = trailerBytes_ / static_cast<uint32_t>(sizeof(int32_t));
        LocalTensor<int32_t> trailer = trailerBuf_.Get<int32_t>()[i * words];
        for (uint32_t w = 0; w < words; ++w) trailer.SetValue(w, 0);
        if (sourceIndices_) {
            trailer.SetValue(0, static_cast<int32_t>(info_->rank));
            trailer.SetValue(1, static_cast<int32_t>(token));
            trailer.SetValue(2, static_cast<int32_t>(k));
        }
        if (weights_) trailer.SetValue(words - kBlockWords, weightBuf_.Get<int32_t>().GetValue(i));
    }

    __aicore__ inline LocalTensor<int8_t> Trailer(uint32_t i) { return trailerBuf_.Get<int8_t>()[i * trailerBytes_]; }
    // A token's row has a different trailer for each k: each gets a copy, which leaves as one store.
    template <bool kRdma>
    __aicore__ inline void SendWithTrailer(uint32_t owner, uint64_t offset, const LocalTensor<int8_t>& row,
                                           uint32_t i) {
        LocalTensor<int8_t> whole = trailerQueue_.template AllocTensor<int8_t>();
        if constexpr (kQuant) {
            SyncFunc<HardEvent::S_V>();  // the scale
            AscendC::PipeBarrier<PIPE_V>();
        } else {
            SyncFunc<HardEvent::MTE2_V>();
        }
        AscendC::DataCopy(whole, row, trailerOffset_);
        AscendC::DataCopy(whole[trailerOffset_], Trailer(i), trailerBytes_);
        trailerQueue_.EnQue(whole);
        whole = trailerQueue_.template DeQue<int8_t>();
        exchange_.sender().template PutRows<kRdma>(owner, offset, whole, rowStride_);
        trailerQueue_.FreeTensor(whole);
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
                if (trailerBytes_ != 0 && tiling_->trailerRing != 0) {
                    SendWithTrailer<kRdma>(owner, offset, row, i);
                } else {
                    exchange_.sender().template PutRows<kRdma>(owner, offset, row, rows_.WireBytes());
                    if (trailerBytes_ != 0)
                        exchange_.sender().template PutRows<kRdma>(owner, offset + trailerOffset_, Trailer(i),
                                                                   trailerBytes_);
                }
            }
            if (++k == info_->topK) {
                k = 0;
                ++token;
            }
        }
    }

    // UB layout 2 (phases 4 and 5): one message, then the messages of this core's sources.
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
    RowLoader<kQuant> rows_;
    DispatchCounts counts_;
    MessageKeeper keeper_;
    ArrivedRows<kQuant> arrived_;
    AscendC::TQue<AscendC::QuePosition::VECOUT, 1> trailerQueue_;
    GlobalTensor<int32_t> expandIdx_;
    UbBuf indexBuf_, rowBuf_, trailerBuf_, weightBuf_;
    bool sourceIndices_ = false;
    bool weights_ = false;
    uint32_t rowStride_ = 0;  // of a row in UB,
    uint32_t rowStep_ = 0;    // and in the window
    uint32_t trailerOffset_ = 0;
    uint32_t trailerBytes_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_WINDOW_DISPATCH_H
