// Dispatch, algorithm "direct": every rank publishes its rows, and a list of pairs for each owner, in its own ping-pong
// buffer. The owners read both there, straight into expand_x. Only status messages and aborts are written to other
// ranks.
//
// With listCores = 0 every core publishes rows and makes list entries (phases 2 to 4). Otherwise the last listCores
// cores make the lists and the others publish rows (2b instead of 2, 3 and 4); the host chooses this from 8 cores on,
// for at most kMostListPairs pairs. "sources:" applies if rows have source indices (source rank, token, k), "index:" if
// expand_idx is used instead. A: rows of expand_x.
//
// phase | function        | which      | reads                      | writes                             | which cores
//       |                 | cores      |                            |                                    | synchronize
// ------+-----------------+------------+----------------------------+------------------------------------+------------
// 0     | Exchange::Enter | all        | context, epoch word        | nothing                            |
// 1     | LookForFailure  | all        | core 0: abort blocks,      | nothing: after a failure peers may |
//       |                 |            | others: local abort flag   | still read this ping-pong buffer   |
// 2     | PublishRows     | all: a     | expert_ids, x_active_mask, | own ping-pong buffer: rows [BS],   |
//       |                 | share of   | x [BS][H], scales [E][H]   | or with smooth scales [BS*K];      |
//       |                 | the tokens | fp32, expert_scales        | expert_scales                      |
//       |                 |            | [BS][K] fp32               |                                    |
// 3     | RoutingTable::  | all: a     | expert_ids [BS][K] int32,  | workspace: histograms [cores][E]   | cores of
//       | Count,          | share of   | x_active_mask              | int32; core 0, after the core      | the rank
//       | Exchange::Agree | the tokens |                            | barrier: epoch word                |
// 4     | MakeLists,      | all: the   | histograms, ids and mask   | own ping-pong buffer: lists        | cores of
//       | BarrierAfter-   | share of   | again                      | [W][capacity] int32; index:        | the rank
//       | Send            | phase 3    |                            | expand_idx [BS*K] int32; core 0:   |
//       |                 |            |                            | totals [E] int32                   |
// 2b    | PublishRows or  | the last   | rows: as 2; lists: all ids | rows: as 2; lists: lists, index:   | cores of
//       | ExpertLists::   | listCores: | and masks of the rank      | expand_idx, totals of its experts; | the rank
//       | Make, Agree     | whole      |                            | core 0, after the core barrier:    |
//       |                 | experts;   |                            | epoch word                         |
//       |                 | others: a  |                            |                                    |
//       |                 | share of   |                            |                                    |
//       |                 | the tokens |                            |                                    |
// 5     | SetStatus       | a share of | totals                     | a status message to every rank     |
//       |                 | the peers: |                            |                                    |
//       |                 | all, from  |                            |                                    |
//       |                 | 8 cores on |                            |                                    |
//       |                 | not core 0 |                            |                                    |
// 6     | WaitForAll      | all: all   | status messages; core 0:   | core 0, when it gives up: local    | all ranks
//       |                 | sources    | abort blocks, others:      | abort flag                         |
//       |                 |            | local abort flag           |                                    |
// 7     | GatherRows:     | all: a     | lists, rows and weights in | expand_x [A][H], dynamic_scales    |
//       | DirectGather or | share of   | the sources' ping-pong     | [A] fp32, expand_scales [A] fp32,  |
//       | SharedRow-      | the rows   | buffers                    | source indices [A][3] int32; core  |
//       | Gather,         |            |                            | 0: ep_recv_counts [L*W] int32,     |
//       | WeightGather    |            |                            | expert_token_nums [L] int64,       |
//       |                 |            |                            | tp_recv_counts [1] int32           |
//
// No core barrier follows phase 6; see LocalAbortFlag (common/aborts.h). Core 0 checks the messages' hashes in phase 7,
// while its first loads are in flight. After a failure core 0 writes zero counts and the error record (Leave). In split
// mode, send returns after phase 5; finish runs phases 0, 6 and 7.
#ifndef ASCEND_MOE_DIRECT_DISPATCH_H
#define ASCEND_MOE_DIRECT_DISPATCH_H

#include "gather.h"
#include "shared_rows.h"
#include "../common/exchange.h"
#include "lists.h"
#include "../common/quantize.h"

namespace moe {

template <bool kQuant>
class DirectDispatch {
public:
    __aicore__ inline void Init(const DispatchArguments& arguments, const MoeDistributeDispatchTiling& tiling) {
        args_ = arguments;
        tiling_ = &tiling;
        info_ = &tiling.info;
        counts_.Init(args_, tiling);
        sourceIndices_ = info_->sourceIndices != 0;
        smooth_ = info_->hasScales != 0;
        rowStride_ = DispatchRowStride(info_->hidden, WireSize(*info_), kQuant, 0);
        rowStep_ = RowStep(*info_, rowStride_);
        weightsAt_ = PublishedWeightsOffset(*info_, rowStride_);
    }

    __aicore__ inline void Process(TPipe& pipe) {
        if (exchange_.Enter(pipe, *info_, kOpDispatch, args_.group, args_.workspace, args_.performanceInfo,
                            args_.errorRecord, args_.tiling, tiling_->mc2))
            Run();
        exchange_.Exit();
    }
    // For SegmentTable::FromCounts: rows from a source for a local expert, from its message.
    __aicore__ inline int32_t operator()(uint32_t source, uint32_t localExpert) {
        return static_cast<int32_t>(waiter_.CountsOf(source).GetValue(StatusWriter::WordOfCounts(localExpert)));
    }

private:
    __aicore__ inline void Run() {
        if (info_->part == kPartFinish) {
            exchange_.BarrierInit();
        } else if (!Send()) {
            Leave();
            return;
        }
        if (exchange_.Sent()) return;
        SegmentInit();
        if (!exchange_.WaitForAll(waiter_) || !GatherRows()) Leave();
    }
    // Returns false if the communicator is in the failed state.
    __aicore__ inline bool Send() {
        BuffInit();
        if (!(role_ == Role::kBoth ? FillTogether() : FillApart())) return false;
        SetStatus();
        return true;
    }

    // Every core publishes rows, then makes list entries; or some make lists while the others publish rows.
    enum class Role : uint8_t { kBoth, kLists, kRows };

    __aicore__ inline void TakeRole() {
        const uint32_t core = exchange_.core(), lists = tiling_->listCores;
        if (lists != 0) role_ = core + lists < info_->cores ? Role::kRows : Role::kLists;
    }

    // Without roles. A core needs the counts of the cores before it to place its list entries, so there are two core
    // barriers: after the histograms and after the lists. Returns false if the communicator is in the failed state.
    __aicore__ inline bool FillTogether() {
        KeepPairs();
        OpStatus mine = exchange_.LookForFailure();
        if (mine.code == kOk) {
            PublishRows();
            mine = routing_.Count();
        }
        if (!exchange_.Agree(mine)) return false;
        MakeLists();
        exchange_.BarrierAfterSend(OpStatus());
        return true;
    }
    // With roles. One core makes all of an expert's list, so there is one core barrier. Returns the same as
    // FillTogether.
    __aicore__ inline bool FillApart() {
        OpStatus mine = exchange_.LookForFailure();
        // LookForFailure waited for MTE2, so the ids have arrived too.
        if (mine.code == kOk && role_ == Role::kRows) PublishRows();
        if (mine.code == kOk && role_ == Role::kLists) {
            MOE_PHASE(exchange_.timestamps(), PublishLists);
            mine = expertLists_.Make();
        }
        return exchange_.Agree(mine);
    }
    // Phase 4. UB layout 2: routing tables, all histograms, expand_idx and list entries of the current chunk.
    __aicore__ inline void MakeLists() {
        MOE_PHASE(exchange_.timestamps(), PublishLists);
        exchange_.NextPlan();
        RoutingInit();
        places_.Init(exchange_.pipe(), *info_, routing_, args_.workspace, exchange_.core());
        const ListChunkUb ub(*info_);
        if (ub.index != 0) exchange_.pipe().InitBuffer(indexBuf_, ub.index);
        exchange_.pipe().InitBuffer(entryBuf_, ub.entries);
        KeepPairs();
        exchange_.Fail(places_.Find());
        routing_.StoreTotals();
        PublishLists();
    }

    // UB layout 1 (phases 1 to 3): routing tables and rows in flight; for a core that makes lists, all pairs of the
    // rank and its lists.
    __aicore__ inline void BuffInit() {
        MOE_PHASE(exchange_.timestamps(), BuffInit);
        exchange_.BarrierInit();
        TakeRole();
        lists_ = exchange_.PingPong();
        published_ = lists_ + PublishedRowsOffset(info_->world, info_->capacity);
        if (role_ == Role::kLists) {
            const uint32_t first = info_->cores - tiling_->listCores;
            expertLists_.Init(exchange_.pipe(), *info_, args_, lists_, exchange_.core() - first, tiling_->listCores);
            return;
        }
        RoutingInit();
        // Each token belongs to one core, which reads and quantizes its row once. The first cores take the remainder.
        const uint32_t cores = info_->cores - tiling_->listCores;
        firstRow_ = FirstToken(exchange_.core(), cores) * info_->topK;
        endRow_ = FirstToken(exchange_.core() + 1, cores) * info_->topK;
        if (role_ == Role::kRows && firstRow_ < endRow_)
            routing_.pairs().Keep(firstRow_, Min(ChunkPairs(), endRow_ - firstRow_));
        rows_.Init(exchange_.pipe(), *tiling_, args_.x, args_.scales);
        if (info_->hasWeights != 0) exchange_.pipe().InitBuffer(weightBuf_, kChunkIntBytes);
        expandIdx_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args_.expandIdx));
    }

    __aicore__ inline uint32_t FirstToken(uint32_t core, uint32_t cores) const {
        return core * (info_->batch / cores) + Min(core, info_->batch % cores);
    }
    // Starts to load the pairs whose list entries this core makes, if they fit in UB. The next wait for MTE2 covers
    // them; later calls of PairReader::Load find them.
    __aicore__ inline void KeepPairs() {
        const uint32_t pairs = routing_.end() - routing_.begin();
        if (pairs != 0 && pairs <= kChunkPairs) routing_.pairs().Keep(routing_.begin(), pairs);
    }
    __aicore__ inline void RoutingInit() {
        routing_.Init(exchange_.pipe(), *info_, args_.expertIds, args_.xActiveMask, args_.workspace, exchange_.core());
        routing_.ShareTokens(PartBegin(info_->batch, exchange_.core(), info_->cores),
                             PartBegin(info_->batch, exchange_.core() + 1, info_->cores));
    }

    // Stores the rows of this core's tokens into the own ping-pong buffer: one row per token, or per pair with smooth
    // scales, which depend on the expert.
    __aicore__ inline void PublishRows() {
        MOE_PHASE(exchange_.timestamps(), PublishRows);
        for (uint32_t at = firstRow_; at < endRow_; at += ChunkPairs()) {
            const uint32_t count = Min(ChunkPairs(), endRow_ - at);
            if (info_->hasWeights != 0) PublishWeights(at, count);
            routing_.pairs().Load(at, count);
            if (smooth_) {
                PublishPairs(at, count);
            } else {
                PublishTokens(at, count);
            }
        }
        rows_.Release();
    }
    __aicore__ inline void PublishWeights(uint32_t at, uint32_t count) {
        LocalTensor<float> weight = weightBuf_.Get<float>();
        GlobalTensor<float> from, to;
        from.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(args_.expertScales) + at, count);
        to.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(lists_ + weightsAt_) + at, count);
        SyncFunc<HardEvent::MTE3_MTE2>();
        CopyIn(weight, from, count);
        SyncFunc<HardEvent::MTE2_MTE3>();
        CopyOut(to, weight, count);
    }
    // Pairs of a chunk, which contains whole tokens.
    __aicore__ inline uint32_t ChunkPairs() const { return kChunkPairs / info_->topK * info_->topK; }
    __aicore__ inline void PublishPairs(uint32_t at, uint32_t count) {
        for (uint32_t i = 0; i < count; ++i) {
            const uint32_t token = (at + i) / info_->topK;
            const int32_t id = routing_.pairs().Id(i, token);
            if (routing_.pairs().Routed(id)) StoreRow(at + i, rows_.Fetch(token, static_cast<uint32_t>(id)));
        }
    }
    // Quantizes a row while the next tokens' rows load.
    __aicore__ inline void PublishTokens(uint32_t at, uint32_t count) {
        const uint32_t end = (at + count) / info_->topK;
        uint32_t ahead = at / info_->topK;
        for (uint32_t token = ahead; token < end; ++token) {
            for (; kQuant && ahead < end && rows_.started() < Min(tiling_->sendRing, kMostStarted); ++ahead) {
                if (Sends(at, ahead)) rows_.Start(ahead);
            }
            if (Sends(at, token)) StoreRow(token, rows_.Fetch(token, 0));
        }
    }
    // Whether any pair of the token is routed.
    __aicore__ inline bool Sends(uint32_t at, uint32_t token) {
        const uint32_t first = token * info_->topK - at;
        for (uint32_t k = 0; k < info_->topK; ++k) {
            if (routing_.pairs().Routed(routing_.pairs().Id(first + k, token))) return true;
        }
        return false;
    }
    __aicore__ inline void StoreRow(uint32_t row, const LocalTensor<int8_t>& bytes) {
        GlobalTensor<int8_t> target;
        target.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(published_ + static_cast<uint64_t>(row) * rowStep_),
                               rowStride_);
        CopyOut(target, bytes, rows_.WireBytes());
    }

    // Stores this core's pairs into their owners' lists, and expand_idx if there are no source indices.
    __aicore__ inline void PublishLists() {
        if (exchange_.status().code != kOk) return;  // the status message carries the reason
        for (uint32_t at = routing_.begin(); at < routing_.end(); at += kChunkPairs) {
            const uint32_t count = Min(kChunkPairs, routing_.end() - at);
            routing_.pairs().Load(at, count);
            PlaceChunk(at, count);
        }
    }
    __aicore__ inline void PlaceChunk(uint32_t at, uint32_t count) {
        LocalTensor<int32_t> entry = entryBuf_.Get<int32_t>();
        SyncFunc<HardEvent::MTE3_S>();
        for (uint32_t i = 0; i < count; ++i) {
            const int32_t id = routing_.pairs().Id(i, (at + i) / info_->topK);
            const bool routed = routing_.pairs().Routed(id);
            const uint32_t position = routed ? routing_.TakePosition(id) : 0;
            if (!sourceIndices_) indexBuf_.Get<int32_t>().SetValue(i, static_cast<int32_t>(position));
            if (!routed) continue;
            entry.SetValue(i * kBlockWords, static_cast<int32_t>(at + i));
            entry.SetValue(i * kBlockWords + 1, places_.First(id) + static_cast<int32_t>(position));
        }
        SyncFunc<HardEvent::S_MTE3>();
        for (uint32_t i = 0; i < count; ++i) {
            const int32_t id = routing_.pairs().Id(i, (at + i) / info_->topK);
            if (!routing_.pairs().Routed(id)) continue;
            const uint32_t owner = Owner(*info_, static_cast<uint32_t>(id));
            GlobalTensor<int32_t> list;
            list.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(lists_ + owner * ListBytes(info_->capacity)) +
                                     entry.GetValue(i * kBlockWords + 1),
                                 1);
            CopyOut(list, entry[i * kBlockWords], 1);
        }
        if (!sourceIndices_) CopyOut(expandIdx_[at], indexBuf_.Get<int32_t>(), count);
    }

    // UB layout 3 (phases 5 to 7).
    __aicore__ inline void SetStatus() {
        exchange_.NextPlan();
        sendCounts_.Init(exchange_.pipe(), *info_, args_.workspace);
        exchange_.SetStatus(sendCounts_, rowStride_);
    }

    // Prepares the segment tables while the messages are in flight.
    __aicore__ inline void SegmentInit() {
        exchange_.LoadPeers();
        segments_.Init(exchange_.pipe(), *info_);
        if (!SegmentScan::Suits(*info_)) return;
        const uint32_t world = info_->world, cores = info_->cores, experts = info_->localExperts;
        scan_.Init(exchange_.pipe(), *info_,
                   StoredBytes(world, cores, experts, experts) / static_cast<uint32_t>(sizeof(uint32_t)),
                   FirstStoredBlock(world, cores, experts, experts));
    }
    __aicore__ inline void FindSegments() {
        if (SegmentScan::Suits(*info_) && waiter_.alike()) {
            scan_.Run(waiter_.Counts(), segments_, false);
        } else {
            segments_.FromCounts(*this);
        }
    }
    __aicore__ inline bool GatherRows() {
        MOE_PHASE(exchange_.timestamps(), GatherRows);
        FindSegments();
        if (!smooth_ && tiling_->sharedLanes != 0) {
            SharedRowGather once;
            once.Init(exchange_, args_, *tiling_, kQuant);
            return GatherBy(once);
        }
        DirectGather gather;
        gather.Init(exchange_, args_, *tiling_, kQuant, smooth_);
        return GatherBy(gather);
    }
    template <typename Gatherer>
    __aicore__ inline bool GatherBy(Gatherer& gather) {
        gather.Begin(segments_);
        gather.Start();
        bool good = true;
        if (exchange_.core() == 0) {
            good = exchange_.CheckCountsHashes(waiter_, false);
            if (good) counts_.Store(exchange_.pipe(), segments_);
        }
        // Loads that have started must end. After a failure rows in expand_x do no harm: the counts are zero.
        gather.Finish();
        if (info_->hasWeights != 0 && good) {
            WeightGather weights;
            weights.Init(exchange_, args_, *info_, weightsAt_);
            weights.Run(segments_);
        }
        AscendC::PipeBarrier<PIPE_ALL>();
        return good;
    }

    __aicore__ inline void Leave() {
        AscendC::PipeBarrier<PIPE_ALL>();
        counts_.Leave(exchange_);
    }

    DispatchArguments args_;
    const MoeDistributeDispatchTiling* tiling_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    Exchange exchange_;
    RoutingTable routing_;
    RowPlaces places_;
    ExpertLists expertLists_;
    RowLoader<kQuant> rows_;
    DispatchCounts counts_;
    SendCounts sendCounts_;
    StatusWaiter waiter_;
    SegmentTable segments_;
    SegmentScan scan_;
    GlobalTensor<int32_t> expandIdx_;
    UbBuf indexBuf_, entryBuf_, weightBuf_;
    GM_ADDR lists_ = nullptr;
    GM_ADDR published_ = nullptr;
    uint64_t weightsAt_ = 0;  // in a ping-pong buffer
    bool sourceIndices_ = false;
    bool smooth_ = false;
    Role role_ = Role::kBoth;
    uint32_t rowStride_ = 0;              // of a row in UB,
    uint32_t rowStep_ = 0;                // and in the window
    uint32_t firstRow_ = 0, endRow_ = 0;  // pairs of the tokens whose rows this core publishes
};

}  // namespace moe

#endif  // ASCEND_MOE_DIRECT_DISPATCH_H
