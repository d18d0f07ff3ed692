// Combine, algorithm "window", compacted layout: expert rows return to the window of the rank whose token they are,
// compacted by (local expert, position) in the region of the expert's rank. That rank finds them by expand_idx and sums
// the K rows of each token, weighted, in fp32 and in ascending k. Used for the V1 contract, and over RDMA for all rows.
//
// Source: the rank whose token a row is. A: rows of expand_x.
//
// phase | function         | which cores  | reads                     | writes                           | which cores
//       |                  |              |                           |                                  | synchronize
// ------+------------------+--------------+---------------------------+----------------------------------+------------
// 0     | Exchange::Enter  | all          | context, epoch word       | nothing                          |
// 1     | RoutingTable::   | all: a share | expert_ids [BS][K] int32, | workspace: histograms [cores][E] | cores of
//       | Count,           | of the       | x_active_mask,            | int32; core 0, after the core    | the rank
//       | LoadAllSegments, | pairs, all   | ep_send_counts [L*W];     | barrier: epoch word              |
//       | Exchange::Open   | segments     | core 0: abort blocks      |                                  |
// 2     | RowPlaces::Find, | all; core 0  | histograms                | workspace: totals [E] int32      |
//       | StoreTotals      | stores       |                           |                                  |
// 3     | SetWaitTpStatus- | all: a share | expand_x [A][H]; only to  | the sources' ping-pong buffers:  | cores of
//       | AndDisPatch,     | of the rows  | check it: expand_idx      | rows                             | the rank
//       | BarrierAfterSend |              | [BS*K] int32              |                                  |
// 4     | SetStatus        | all: a share | nothing: the segments are | a status message to every rank;  | RDMA: cores
//       |                  | of the peers | in UB                     | RDMA: staged with a BatchWrite   | of the rank
//       |                  |              |                           | item, core 0 posts the items     |
// 5     | WaitStatus,      | all: a share | status messages; core 0:  | compares their counts with its   | all ranks,
//       | Arrived          | of the       | abort blocks, others:     | totals in UB; core 0, when it    | then cores
//       |                  | owners       | local abort flag          | finds an abort: local abort flag | of the rank
// 6     | LocalWindowCopy  | all: a share | rows in the own ping-pong | x [BS][H]                        |
//       |                  | of (token,   | buffer, expert_ids,       |                                  |
//       |                  | part of H)   | x_active_mask, totals,    |                                  |
//       |                  |              | expand_idx, weights       |                                  |
//       |                  |              | [BS][K] fp32 and other    |                                  |
//       |                  |              | addends (Addends)         |                                  |
//
// Invalid ids or counts are found before the status messages leave: the messages carry the error, and every rank raises
// it. A RoutingMismatch concerns this rank only. After any failure Leave writes zeros into x, and core 0 writes the
// error record. In split mode, send returns after the status messages; finish counts its ids again and continues with
// the wait.
#ifndef ASCEND_MOE_WINDOW_COMBINE_H
#define ASCEND_MOE_WINDOW_COMBINE_H

#include "../common/weighted_sum.h"

namespace moe {

// The sums of a core's share of the items (token, part of H). Rows come through a queue of sumRing parts. `Rows`: see
// Addends; also missing(): the first row that has not come, or kOk; and FindSums(addends, token), the number of sums to
// which the addends of a token are added, and Sum(i), where they lie.
template <typename XType, bool kQuant, typename Rows>
class TokenSum {
public:
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeCombineTiling& tiling,
                                const CombineArguments& arguments, Rows& rows) {
        batch_ = tiling.info.batch;
        rows_ = &rows;
        x_ = arguments.x;
        parts_.Init(tiling);
        addends_.Init(pipe, tiling, arguments, rows);
        const TokenSumUb ub(tiling, sizeof(XType));
        pipe.InitBuffer(inQueue_, Ring(ub.ring), ub.piece);
        sum_.Init(pipe, tiling);
    }

    // The share of core `core` of `cores`. Calls owner.ArriveBeforeSums once, with the first pair of the share whose
    // row has not come, or kOk, before it stores the last sum.
    template <typename Owner>
    __aicore__ inline void Run(RoutingTable& routing, uint32_t core, uint32_t cores, Owner& owner) {
        const uint32_t items = parts_.Items(batch_), end = PartBegin(items, core + 1, cores);
        uint32_t item = PartBegin(items, core, cores);
        if (item == end) owner.ArriveBeforeSums(rows_->missing());
        while (item < end) {
            const uint32_t first = parts_.Token(item);
            LoadChunk(routing, first, Min(addends_.ChunkTokens(), parts_.Token(end - 1) + 1 - first));
            for (; item < end && parts_.Token(item) < first + addends_.tokens(); ++item) {
                const uint32_t token = parts_.Token(item), part = parts_.Part(item);
                AddAddends(routing, token, part);
                if (item + 1 == end) owner.ArriveBeforeSums(rows_->missing());
                sum_.Store(parts_.Place(x_, token, part));
            }
        }
    }

private:
    __aicore__ inline void LoadChunk(RoutingTable& routing, uint32_t token, uint32_t tokens) {
        addends_.Load(routing, token, tokens);
        SyncFunc<HardEvent::MTE2_S>();
        addends_.Place(routing);
    }
    __aicore__ inline void AddAddends(RoutingTable& routing, uint32_t token, uint32_t part) {
        sum_.Begin(parts_.Elements(part));
        const uint32_t sums = rows_->FindSums(routing, addends_.first(), token);
        for (uint32_t i = 0; i < sums; ++i)
            AddPart(inQueue_, parts_, sum_, {rows_->Sum(i), 1.0f, false, true, AddendKind::kWhole, 0.0f}, part);
        addends_.Begin(token);
        for (Addend addend; addends_.Next(routing, addend);) AddPart(inQueue_, parts_, sum_, addend, part);
    }

    Addends<XType, Rows> addends_;
    RowParts<XType, kQuant> parts_;
    AscendC::TQue<AscendC::QuePosition::VECIN, 1> inQueue_;
    WeightedSum<XType, kQuant> sum_;
    Rows* rows_ = nullptr;
    GM_ADDR x_ = nullptr;
    uint32_t batch_ = 0;
};

// What rows of pairs share that come without sums.
struct WithoutSums {
    __aicore__ inline uint32_t FindSums(RoutingTable&, uint32_t, uint32_t) { return 0; }
    __aicore__ inline GM_ADDR Sum(uint32_t) const { return nullptr; }
};

class WindowCombineBase {
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
        return exchange_.Enter(pipe, *info_, kOpCombine, args_.group, args_.workspace, args_.performanceInfo,
                               args_.errorRecord, args_.tiling, tiling_->mc2);
    }
    // For UB layouts that count ids or sums.
    __aicore__ inline void RoutingInit() {
        routing_.Init(exchange_.pipe(), *info_, args_.expertIds, args_.xActiveMask, args_.workspace, exchange_.core());
    }
    // UB layout 1: routing tables.
    __aicore__ inline void BuffInit() {
        exchange_.BarrierInit();
        exchange_.LoadPeers();
        RoutingInit();
        places_.Init(exchange_.pipe(), *info_, routing_, args_.workspace, exchange_.core());
    }
    // After a failure each core writes zeros into its share of x, and core 0 writes the error record.
    __aicore__ inline void Leave() { LeaveCombine(exchange_, *tiling_, args_.x, sumBytes_); }

    CombineArguments args_;
    const MoeDistributeCombineTiling* tiling_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    Exchange exchange_;
    RoutingTable routing_;
    RowPlaces places_;
    uint32_t sumBytes_ = 0;  // of a row of x
    uint32_t rowBytes_ = 0;  // of a row in flight
};

// Finds a pair's row in this rank's own window: in the region of the expert's rank, at the rank's earlier rows for that
// owner plus expand_idx.
class CompactedRows : public WithoutSums {
public:
    // `pingPong`: of this epoch, at row 0 of its first region; `regionBytes`: of one source rank in it.
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, GM_ADDR expandIdx, uint32_t rowBytes,
                                GM_ADDR pingPong, uint64_t regionBytes) {
        info_ = &info;
        rowStep_ = RowStep(info, rowBytes);
        pingPong_ = pingPong;
        regionBytes_ = regionBytes;
        index_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(expandIdx), info.batch * info.topK);
        pipe.InitBuffer(indexBuf_, kChunkIntBytes);
    }
    __aicore__ inline void Load(uint32_t begin, uint32_t count) {
        CopyIn(indexBuf_.Get<int32_t>(), index_[begin], count);
    }
    __aicore__ inline void Place(RoutingTable&, uint32_t, uint32_t) {}
    __aicore__ inline GM_ADDR Address(RoutingTable& routing, int32_t id, uint32_t, uint32_t, uint32_t i) {
        const uint32_t owner = Owner(*info_, static_cast<uint32_t>(id));
        const int32_t row = routing.Prefix(id) + indexBuf_.Get<int32_t>().GetValue(i);
        return pingPong_ + owner * regionBytes_ + RowPlace(row, rowStep_, info_->rdmaFlags != 0);
    }
    // Counts and expand_idx have shown that all rows have come.
    __aicore__ inline OpStatus missing() const { return OpStatus(); }

private:
    GlobalTensor<int32_t> index_;
    UbBuf indexBuf_;
    const MoeDistributeInfo* info_ = nullptr;
    GM_ADDR pingPong_ = nullptr;
    uint64_t regionBytes_ = 0;
    uint32_t rowStep_ = 0;
};

template <typename XType, bool kQuant>
class WindowCombineCompacted : public WindowCombineBase {
public:
    __aicore__ inline void Init(const CombineArguments& arguments, const MoeDistributeCombineTiling& tiling) {
        WindowCombineBase::Init(arguments, tiling, sizeof(XType));
    }
    __aicore__ inline void Process(TPipe& pipe) {
        if (Enter(pipe)) Run();
        exchange_.Exit();
    }

    // For Exchange::WaitStatus, for each message of this core's share.
    __aicore__ inline OpStatus Arrived(uint32_t source, const LocalTensor<uint32_t>& message) {
        return CompareCounts(*info_, routing_, source, message);
    }
    // For TokenSum; after a core barrier there is nothing to publish.
    __aicore__ inline void ArriveBeforeSums(const OpStatus&) {}

private:
    __aicore__ inline void Run() {
        PlanInit();
        if (!Send()) {
            Leave();
            return;
        }
        if (exchange_.Sent()) return;
        if (exchange_.WaitStatus(*this, rowBytes_)) {
            LocalWindowCopy();
        } else {
            Leave();
        }
    }
    // Finish counts alone. Returns false if the communicator is in the failed state.
    __aicore__ inline bool Send() {
        const bool sends = info_->part != kPartFinish, rdma = info_->transport == kTransportRdma;
        OpStatus mine = routing_.Count();
        if (sends) Worsen(mine, LoadAllSegments());
        if (sends ? !exchange_.Open(mine) : !exchange_.Agree(mine)) return false;
        exchange_.Fail(places_.Find());
        routing_.StoreTotals();
        if (sends) {
            exchange_.BarrierAfterSend(rdma ? SetWaitTpStatusAndDisPatch<true>() : SetWaitTpStatusAndDisPatch<false>());
            exchange_.SetStatus(segments_, rowBytes_);
        } else {
            exchange_.BarrierAfterSend(CheckOwnIndex());
        }
        return true;
    }
    __aicore__ inline OpStatus CheckOwnIndex() {
        if (exchange_.status().code != kOk) return OpStatus();
        return CheckIndex(*info_, args_.expandIdx, routing_, routing_.begin(), routing_.end(),
                          indexBuf_.Get<int32_t>());
    }

    // UB layout 1 (phases 1 to 5).
    __aicore__ inline void PlanInit() {
        MOE_PHASE(exchange_.timestamps(), BuffInit);
        BuffInit();
        loader_.Init(exchange_.pipe(), *tiling_, args_.expandX, rowBytes_);
        segments_.Init(exchange_.pipe(), *info_);
        const CompactedCombineUb ub(*info_);
        exchange_.pipe().InitBuffer(indexBuf_, ub.index);
        exchange_.pipe().InitBuffer(prefixBuf_, ub.counts);
    }
    __aicore__ inline OpStatus LoadAllSegments() {
        const OpStatus status = LoadSegments(*info_, args_.epSendCounts, prefixBuf_.Get<int32_t>(), segments_);
        if (status.code == kOk && info_->transport == kTransportRdma) segments_.AlignEnd();
        return status;
    }

    // Returns this core's share of the rows to their sources, after checking its share of expand_idx.
    template <bool kRdma>
    __aicore__ inline OpStatus SetWaitTpStatusAndDisPatch() {
        MOE_PHASE(exchange_.timestamps(), SetWaitTpStatusAndDisPatch);
        const OpStatus status = CheckOwnIndex();
        if (exchange_.status().code != kOk) return status;
        const uint32_t begin = PartBegin(segments_.Rows(), exchange_.core(), info_->cores);
        const uint32_t end = PartBegin(segments_.Rows(), exchange_.core() + 1, info_->cores);
        if (begin == end) return status;
        const uint64_t base = kRdma ? exchange_.sender().rows_at() : 0;
        const uint32_t step = RowStep(*info_, rowBytes_);
        uint32_t slot = segments_.Seek(begin);
        for (uint32_t row = begin; row < end;) {
            while (segments_.End(slot) <= row) ++slot;
            const uint32_t count = Min(tiling_->sendRows, Min(end, segments_.End(slot)) - row);
            loader_.Load(row, count);
            const LocalTensor<int8_t> chunk = loader_.Take();
            const int32_t at = segments_.Offset(slot) + static_cast<int32_t>(row - segments_.Start(slot));
            exchange_.sender().template PutChunk<kRdma>(slot % info_->world, base + RowOffsetBytes(at, step), chunk,
                                                        rowBytes_, count);
            loader_.Free(chunk);
            row += count;
        }
        return status;
    }

    // UB layout 2 (phase 6): the routing tables again, and the sums of this core's share.
    __aicore__ inline void LocalWindowCopy() {
        MOE_PHASE(exchange_.timestamps(), LocalWindowCopy);
        exchange_.NextPlan();
        RoutingInit();
        routing_.LoadTotals();
        routing_.Place();
        CompactedRows rows;
        rows.Init(exchange_.pipe(), *info_, args_.expandIdx, rowBytes_,
                  exchange_.PingPong() + exchange_.sender().rows_at(),
                  RegionBytes(exchange_.context().data_bytes(), info_->regions));
        TokenSum<XType, kQuant, CompactedRows> sum;
        sum.Init(exchange_.pipe(), *tiling_, args_, rows);
        sum.Run(routing_, exchange_.core(), info_->cores, *this);
        AscendC::PipeBarrier<PIPE_ALL>();
    }

    ReturnLoader<XType, kQuant> loader_;
    SegmentTable segments_;
    UbBuf indexBuf_, prefixBuf_;
};

}  // namespace moe

#endif  // ASCEND_MOE_WINDOW_COMBINE_H
