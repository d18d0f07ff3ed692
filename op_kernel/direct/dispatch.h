// MoeDistributeDispatch, algorithm "direct": every rank publishes its rows, and a list of pairs for each
// owner, in its own half. The owners read both there, straight into expand_x. With 8 cores or more listCores
// of them make the lists (2b) while the others publish rows; with fewer every core does both (1, 2a).
//
// phase | function            | which cores  | reads                  | writes                   | who meets
// ------+---------------------+--------------+------------------------+--------------------------+----------
// 1     | PublishRows         | a share of   | x [BS][H], scales      | own half: rows [BS], or  |
//       |                     | the tokens   | [E][H] fp32            | [BS*K] with smooth       |
//       |                     |              |                        | scales                   |
// 2a    | RoutingTable::      | all: a share | expert_ids [BS][K]     | own half: lists          | cores of
//       | Count, then         | of the pairs | int32, x_active_mask,  | [W][capacity] int32;     | the rank,
//       | MakeLists           |              | histograms             | workspace: histograms    | twice
//       |                     |              |                        | [cores][E] int32, totals |
//       |                     |              |                        | [E] int32; V1:           |
//       |                     |              |                        | expand_idx [BS*K] int32  |
// 2b    | ExpertLists::Make   | listCores:   | all expert_ids and     | the same, without        | cores of
//       |                     | whole        | masks of the rank      | histograms               | the rank,
//       |                     | experts      |                        |                          | once
// 3     | SetStatus           | all: a share | totals                 | a status message to      |
//       |                     | of the peers |                        | every rank               |
// 4     | WaitForAll          | all: all     | status messages, fail  | core 0: the fail block,  | all ranks
//       |                     | sources      | block; core 0: abort   | when it gives up         |
//       |                     |              | blocks                 |                          |
// 5     | GatherRows:         | all: a share | lists and rows in the  | expand_x [A][H],         |
//       | DirectGather or     | of the rows  | sources' halves        | dynamic_scales [A] fp32, |
//       | SharedRowGather     |              |                        | V2: triples [A][3]       |
//       |                     |              |                        | int32; core 0:           |
//       |                     |              |                        | ep_recv_counts [L*W]     |
//       |                     |              |                        | int32, expert_token_nums |
//       |                     |              |                        | [L] int64                |
#ifndef ASCEND_MOE_DIRECT_DISPATCH_H
#define ASCEND_MOE_DIRECT_DISPATCH_H

#include "gather.h"
#include "shared_rows.h"
#include "../common/exchange.h"
#include "lists.h"
#include "../common/quantize.h"

namespace moe {

template <typename XType, bool kQuant, bool kSmooth>
class MoeDistributeDirectDispatch {
public:
    __aicore__ inline void Init(const DispatchArguments& arguments,
                                const MoeDistributeDispatchTiling& tiling) {
        args_ = arguments;
        tiling_ = &tiling;
        info_ = &tiling.info;
        counts_.Init(args_, tiling);
        triples_ = info_->triples != 0;
        rowStride_ = DispatchRowStride(info_->hidden, kQuant ? sizeof(int8_t) : sizeof(XType), kQuant, false);
    }

    __aicore__ inline void Process(TPipe& pipe) {
        if (!exchange_.Enter(pipe, *info_, kOpDispatch, args_.workspace, args_.errorRecord)) return;
        BuffInit();
        if (!(role_ == Role::kBoth ? FillTogether() : FillApart())) {
            Leave();
            return;
        }
        SetStatus();
        SegmentInit();
        if (!exchange_.WaitForAll(waiter_) || !GatherRows()) Leave();
    }
    // For SegmentTable: rows that this rank gets from a source for a local expert, as its message says.
    __aicore__ inline int32_t operator()(uint32_t source, uint32_t localExpert) {
        return static_cast<int32_t>(waiter_.Message(source).GetValue(StatusWriter::CountWord(localExpert)));
    }

    // With roles all lists have left when the cores have met: the totals come with the verdicts.
    __aicore__ inline void Met() {
        if (role_ != Role::kBoth) LoadTotals();
    }

private:
    // Every core publishes rows, then makes list entries; or some make lists while the others publish rows.
    enum class Role : uint8_t { kBoth, kLists, kRows };

    __aicore__ inline void TakeRole() {
        const uint32_t core = exchange_.core(), lists = tiling_->listCores;
        if (lists != 0) role_ = core + lists < info_->cores ? Role::kRows : Role::kLists;
    }

    // What leaves before the cores have met leaves only after a look at the abort blocks. False: they have
    // found one. Here a core has to know what the cores before it have counted: they meet over that, and
    // again over the lists.
    __aicore__ inline bool FillTogether() {
        KeepPairs();
        Verdict mine = exchange_.LookForAborts();
        if (mine.code == kOk) {
            PublishRows();
            mine = routing_.Count();
        }
        if (!exchange_.Agree(mine)) return false;
        MakeLists();
        exchange_.MeetAfterSend(Verdict());
        return true;
    }
    // Here each list is one core's: they meet once.
    __aicore__ inline bool FillApart() {
        Verdict mine = exchange_.LookForAborts();
        // That has waited for the ids too.
        if (mine.code == kOk && role_ == Role::kRows) PublishRows();
        if (mine.code == kOk && role_ == Role::kLists) {
            MOE_PHASE("PublishLists");
            mine = expertLists_.Make();
        }
        return exchange_.AgreeThen(mine, *this);
    }
    // UB plan 2: routing tables, all histograms, this chunk's expand_idx and list entries.
    __aicore__ inline void MakeLists() {
        MOE_PHASE("PublishLists");
        exchange_.NextPlan();
        RoutingInit();
        places_.Init(exchange_.pipe(), *info_, routing_, args_.workspace, exchange_.core());
        if (!triples_) exchange_.pipe().InitBuffer(indexBuf_, kChunkPairs * sizeof(int32_t));
        exchange_.pipe().InitBuffer(entryBuf_, kChunkPairs * kBlock);
        KeepPairs();
        exchange_.Fail(places_.Find());
        routing_.StoreTotals();
        PublishLists();
    }

    // UB plan 1: routing tables, rows in flight; or all pairs, and lists.
    __aicore__ inline void BuffInit() {
        MOE_PHASE("BuffInit");
        exchange_.BoardInit();
        TakeRole();
        lists_ = exchange_.Half();
        published_ = lists_ + PublishedRowsOffset(info_->world, info_->capacity);
        if (role_ == Role::kLists) {
            const uint32_t first = info_->cores - tiling_->listCores;
            expertLists_.Init(exchange_.pipe(), *info_, args_, lists_, exchange_.core() - first,
                              tiling_->listCores);
            return;
        }
        RoutingInit();
        // A token belongs to one core: its row is read, and quantised, once. Cores that start first have
        // more.
        const uint32_t cores = info_->cores - tiling_->listCores;
        firstRow_ = FirstToken(exchange_.core(), cores) * info_->topK;
        endRow_ = FirstToken(exchange_.core() + 1, cores) * info_->topK;
        if (role_ == Role::kRows && firstRow_ < endRow_)
            routing_.pairs().Keep(firstRow_, Min(ChunkPairs(), endRow_ - firstRow_));
        rows_.Init(exchange_.pipe(), *info_, args_.x, args_.scales, tiling_->sendRing);
        expandIdx_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args_.expandIdx));
    }

    __aicore__ inline uint32_t FirstToken(uint32_t core, uint32_t cores) const {
        return core * (info_->batch / cores) + Min(core, info_->batch % cores);
    }
    // The pairs whose list entries this core makes are loaded once where they fit, with what is loaded next.
    __aicore__ inline void KeepPairs() {
        const uint32_t pairs = routing_.end() - routing_.begin();
        if (pairs != 0 && pairs <= kChunkPairs) routing_.pairs().Keep(routing_.begin(), pairs);
    }
    __aicore__ inline void RoutingInit() {
        routing_.Init(exchange_.pipe(), *info_, args_.expertIds, args_.xActiveMask, args_.workspace,
                      exchange_.core());
        routing_.ShareTokens(PartBegin(info_->batch, exchange_.core(), info_->cores),
                             PartBegin(info_->batch, exchange_.core() + 1, info_->cores));
    }

    // This core's tokens into the own half: a row a token, or a row a pair when smooth scales tell pairs
    // apart.
    __aicore__ inline void PublishRows() {
        MOE_PHASE("PublishRows");
        for (uint32_t at = firstRow_; at < endRow_; at += ChunkPairs()) {
            const uint32_t count = Min(ChunkPairs(), endRow_ - at);
            routing_.pairs().Load(at, count);
            if constexpr (kSmooth) {
                PublishPairs(at, count);
            } else {
                PublishTokens(at, count);
            }
        }
        rows_.Release();
    }
    // Whole tokens.
    __aicore__ inline uint32_t ChunkPairs() const { return kChunkPairs / info_->topK * info_->topK; }
    __aicore__ inline void PublishPairs(uint32_t at, uint32_t count) {
        for (uint32_t i = 0; i < count; ++i) {
            const uint32_t token = (at + i) / info_->topK;
            const int32_t id = routing_.pairs().Id(i, token);
            if (routing_.pairs().Routed(id)) StoreRow(at + i, rows_.Fetch(token, static_cast<uint32_t>(id)));
        }
    }
    // The rows of the next tokens are on their way while one is quantised.
    __aicore__ inline void PublishTokens(uint32_t at, uint32_t count) {
        const uint32_t end = (at + count) / info_->topK;
        uint32_t ahead = at / info_->topK, flying = 0;
        for (uint32_t token = ahead; token < end; ++token) {
            for (; kQuant && ahead < end && flying < Min(tiling_->sendRing, kMostStarted); ++ahead) {
                if (!Sends(at, ahead)) continue;
                rows_.Start(ahead);
                ++flying;
            }
            if (!Sends(at, token)) continue;
            StoreRow(token, rows_.Fetch(token, 0));
            --flying;
        }
    }
    __aicore__ inline bool Sends(uint32_t at, uint32_t token) {
        const uint32_t first = token * info_->topK - at;
        for (uint32_t k = 0; k < info_->topK; ++k) {
            if (routing_.pairs().Routed(routing_.pairs().Id(first + k, token))) return true;
        }
        return false;
    }
    __aicore__ inline void StoreRow(uint32_t row, const LocalTensor<int8_t>& bytes) {
        GlobalTensor<int8_t> target;
        target.SetGlobalBuffer(
            reinterpret_cast<__gm__ int8_t*>(published_ + static_cast<uint64_t>(row) * rowStride_),
            rowStride_);
        CopyOut(target, bytes, rows_.WireBytes());
    }

    // This core's pairs into the lists of their owners, each at its place; and expand_idx.
    __aicore__ inline void PublishLists() {
        if (exchange_.verdict().code != kOk) return;  // the status message carries the reason
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
            if (!triples_) indexBuf_.Get<int32_t>().SetValue(i, static_cast<int32_t>(position));
            if (!routed) continue;
            entry.SetValue(i * kBlockWords, static_cast<int32_t>(at + i));
            entry.SetValue(i * kBlockWords + 1, places_.First(id) + static_cast<int32_t>(position));
        }
        SyncFunc<HardEvent::S_MTE3>();
        for (uint32_t i = 0; i < count; ++i) {
            const int32_t id = routing_.pairs().Id(i, (at + i) / info_->topK);
            if (!routing_.pairs().Routed(id)) continue;
            uint32_t owner = static_cast<uint32_t>(id) / info_->localExperts;
            GlobalTensor<int32_t> list;
            list.SetGlobalBuffer(
                reinterpret_cast<__gm__ int32_t*>(lists_ + owner * ListBytes(info_->capacity)) +
                    entry.GetValue(i * kBlockWords + 1),
                1);
            CopyOut(list, entry[i * kBlockWords], 1);
        }
        if (!triples_) CopyOut(expandIdx_[at], indexBuf_.Get<int32_t>(), count);
    }

    // UB plan 3, from here to the end.
    __aicore__ inline void SetStatus() {
        if (role_ == Role::kBoth) LoadTotals();
        exchange_.SetStatus(sendCounts_, rowStride_);
    }
    __aicore__ inline void LoadTotals() {
        exchange_.NextPlan();
        sendCounts_.Init(exchange_.pipe(), *info_, args_.workspace);
    }

    // What segments take, while the messages are under way.
    __aicore__ inline void SegmentInit() {
        segments_.Init(exchange_.pipe(), *info_);
        if (!SegmentScan::Suits(*info_)) return;
        scan_.Init(exchange_.pipe(), *info_,
                   StatusMessageBytes(info_->localExperts) / static_cast<uint32_t>(sizeof(uint32_t)));
    }
    __aicore__ inline void FindSegments() {
        if (SegmentScan::Suits(*info_) && waiter_.alike()) {
            scan_.Run(waiter_.match().Counts(), segments_);
        } else {
            segments_.FromCounts(*this);
        }
    }
    __aicore__ inline bool GatherRows() {
        MOE_PHASE("GatherRows");
        FindSegments();
        if constexpr (!kSmooth) {
            if (SharesRows(*info_)) {
                SharedRowGather once;
                once.Init(exchange_, args_, *tiling_, kQuant);
                return GatherBy(once);
            }
        }
        DirectGather gather;
        gather.Init(exchange_, args_, *tiling_, kQuant, kSmooth);
        return GatherBy(gather);
    }
    template <typename Gatherer>
    __aicore__ inline bool GatherBy(Gatherer& gather) {
        gather.Begin(segments_);
        gather.Start();
        bool good = true;
        if (exchange_.core() == 0) {
            good = exchange_.CheckCountsHashes(waiter_);
            if (good) counts_.Store(exchange_.pipe(), segments_);
        }
        // What has begun is finished: after a failure, too, it is as harmless as on the other cores.
        gather.Finish();
        AscendC::PipeBarrier<PIPE_ALL>();
        return good;
    }

    // After a failure: no rows for whoever reads the counts, and the record.
    __aicore__ inline void Leave() {
        AscendC::PipeBarrier<PIPE_ALL>();
        if (exchange_.core() != 0) return;
        exchange_.NextPlan();
        counts_.StoreZeros(exchange_.pipe());
        exchange_.Report();
    }

    DispatchArguments args_;
    const MoeDistributeDispatchTiling* tiling_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    Exchange exchange_;
    RoutingTable routing_;
    ListPlaces places_;
    ExpertLists expertLists_;
    RowLoader<XType, kQuant, kSmooth> rows_;
    DispatchCounts counts_;
    AllSendCounts sendCounts_;
    StatusWaiter waiter_;
    SegmentTable segments_;
    SegmentScan scan_;
    GlobalTensor<int32_t> expandIdx_;
    UbBuf indexBuf_, entryBuf_;
    GM_ADDR lists_ = nullptr;
    GM_ADDR published_ = nullptr;
    bool triples_ = false;
    Role role_ = Role::kBoth;
    uint32_t rowStride_ = 0;
    uint32_t firstRow_ = 0, endRow_ = 0;  // pairs of the tokens whose rows this core publishes
};

}  // namespace moe

#endif  // ASCEND_MOE_DIRECT_DISPATCH_H
