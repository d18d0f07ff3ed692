// MoeDistributeCombine, algorithm "window", slots: expert rows go back to the window of the rank whose token they are,
// each into the slot of the (token, k) that its triple (source rank, token, k) names. That rank sums the K rows of each
// token, weighted, in fp32 and in ascending k. So go rows that have triples: of the V2 contract, but over RDMA.
//
// "Source" is the rank whose token a row is. A: rows of expand_x.
//
// phase | function            | which cores  | reads                  | writes                   | who meets
// ------+---------------------+--------------+------------------------+--------------------------+----------
// 0     | Exchange::Enter     | all          | context, epoch word    | nothing                  |
// 1     | RoutingTable::      | all: a share | abort blocks,          | workspace: histograms    |
//       | Count,              | of the       | expert_ids [BS][K]     | [cores][E] int32         |
//       | CheckSendCounts     | pairs, all   | int32, x_active_mask,  |                          |
//       |                     | segments     | ep_send_counts [L*W]   |                          |
// 2     | SetWaitTp-          | all: a share | expand_x [A][H],       | the sources' halves:     | cores of
//       | StatusAndDisPatch,  | of the rows  | triples [A][3] int32   | rows; core 0, after the  | the rank
//       | Agree               |              |                        | meeting: epoch word      |
// 3     | SetStatus           | all: a share | nothing: the segments  | a status message to      |
//       |                     | of the peers | are in UB              | every rank               |
// 4     | WaitForAll;         | all: all     | status messages; core  | nothing: compares their  | all ranks
//       | RowPlaces::Find,    | messages;    | 0: abort blocks,       | counts with the totals   |
//       | Judge               | core 0       | histograms             |                          |
// 5     | LocalWindowCopy     | all: a share | rows in the own half,  | x [BS][H]                |
//       |                     | of (token,   | expert_ids,            |                          |
//       |                     | part of H)   | x_active_mask, weights |                          |
//       |                     |              | [BS][K] fp32 and other |                          |
//       |                     |              | terms (Terms)          |                          |
//
// Wrong ids, counts or triples are known before the status messages leave: these then carry the error, and every
// rank raises it. A RoutingMismatch is this rank's alone. After any failure Leave writes zeros into x, and core 0
// the error record. No core waits for the others between phases 4 and 5: each tells them in phase 5 whether its rows
// have come, and hears them after its sums (Exchange::Tell).
//
// Of two launches send ends with the status messages; finish counts its ids anew, and goes on from the wait.
#ifndef ASCEND_MOE_WINDOW_SLOTS_H
#define ASCEND_MOE_WINDOW_SLOTS_H

#include "combine.h"

namespace moe {

// Where a pair's row lies in this rank's own window: in slot token * K + k of the half, with a mark that says whether
// it has come.
class SlotRows {
public:
    // `half`: of this epoch.
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, uint32_t rowBytes, GM_ADDR half,
                                uint32_t epoch) {
        info_ = &info;
        mark_ = static_cast<uint64_t>(SlotMark(epoch)) << 32 | SlotMark(epoch);
        rowBytes_ = rowBytes;
        slotStep_ = RowStep(info, SlotBytes(rowBytes));
        half_ = half;
        pipe.InitBuffer(markBuf_, kChunkBlockBytes);
    }
    // Begins to load the marks of a chunk of pairs.
    __aicore__ inline void Load(uint32_t begin, uint32_t count) {
        GlobalTensor<int32_t> marks;
        const uint64_t first = static_cast<uint64_t>(begin) * slotStep_ + rowBytes_;
        marks.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(half_ + first),
                              static_cast<uint64_t>(count) * slotStep_ / sizeof(int32_t));
        const DataCopyExtParams params{Pieces(count), kBlock, slotStep_ - kBlock, 0, 0};
        const DataCopyPadExtParams<int32_t> pad{false, 0, 0, 0};
        AscendC::DataCopyPad(markBuf_.Get<int32_t>(), marks, params, pad);
    }
    __aicore__ inline void Place(RoutingTable&, uint32_t, uint32_t) {}
    __aicore__ inline GM_ADDR Address(RoutingTable&, int32_t id, uint32_t token, uint32_t k, uint32_t i) {
        if (markBuf_.Get<uint64_t>().GetValue(i * (kBlock / sizeof(uint64_t))) != mark_) {
            Miss(static_cast<uint32_t>(id), token, k);
            return nullptr;
        }
        return half_ + (static_cast<uint64_t>(token) * info_->topK + k) * slotStep_;
    }
    // The first pair whose row is not of this op.
    __aicore__ inline Verdict missing() const { return missing_; }

private:
    __aicore__ inline void Miss(uint32_t expert, uint32_t token, uint32_t k) {
        if (missing_.code != kOk) return;
        missing_ = InvalidOf(*info_, kRoutingMismatch, kMismatchRow | expert, token);
        missing_.detail2 = k;
    }

    UbBuf markBuf_;
    const MoeDistributeInfo* info_ = nullptr;
    GM_ADDR half_ = nullptr;
    uint64_t mark_ = 0;
    Verdict missing_;
    uint32_t rowBytes_ = 0;
    uint32_t slotStep_ = 0;
};

template <typename XType, bool kQuant>
class SlotCombine : public WindowCombine {
public:
    __aicore__ inline void Init(const CombineArguments& arguments, const MoeDistributeCombineTiling& tiling) {
        WindowCombine::Init(arguments, tiling, sizeof(XType));
        stride_ = SlotBytes(rowBytes_);
        slotStep_ = RowStep(*info_, stride_);
    }
    __aicore__ inline void Process(TPipe& pipe) {
        if (Enter(pipe)) Run();
        exchange_.Exit();
    }

    // Exchange::SetStatus calls Select and Rows: rows of a local expert that go back to `peer`.
    __aicore__ inline void Select(uint32_t) {}
    __aicore__ inline uint32_t Rows(uint32_t peer, uint32_t localExpert) {
        const uint32_t slot = localExpert * info_->world + peer;
        return sendCounts_.End(slot) - sendCounts_.Start(slot);
    }
    // TokenSum calls this.
    __aicore__ inline void Tell(const Verdict& missing) { exchange_.Tell(missing); }

private:
    __aicore__ inline void Run() {
        PlanInit();
        if (!Send()) {
            Leave();
            return;
        }
        if (exchange_.Sent()) return;
        if (!Wait() || !LocalWindowCopy()) Leave();
    }
    // Rows need no places, so they leave at once. The cores meet when they have left, and then each waits for all
    // messages, as in direct (see FailWatch). Finish counts alone. False: the communicator has failed before.
    __aicore__ inline bool Send() {
        if (info_->part == kPartFinish) return exchange_.Agree(routing_.Count());
        sendCounts_.Load(args_.epSendCounts);
        Verdict mine = exchange_.LookForAborts();
        if (mine.code == kOk) {
            mine = routing_.Count();
            Worsen(mine, CheckSendCounts());
            if (mine.code == kOk) {
                const uint32_t rows = sendCounts_.Rows(), begin = PartBegin(rows, exchange_.core(), info_->cores);
                const uint32_t end = PartBegin(rows, exchange_.core() + 1, info_->cores);
                assist_.Begin(begin, end);
                mine = SetWaitTpStatusAndDisPatch(begin, end);
            }
            if (mine.code == kOk && routing_.MayOverflow()) mine.code = kRecheck;
        }
        exchange_.sender().Flush();
        if (!exchange_.Agree(mine)) return false;
        if (exchange_.verdict().code == kRecheck) {
            exchange_.RecheckTogether();
            exchange_.Fail(places_.Find());
        }
        exchange_.SetStatus(*this, rowBytes_);
        return true;
    }
    __aicore__ inline bool Wait() {
        if (exchange_.core() == 0) places_.Find();  // the totals
        if (exchange_.WaitForAll(waiter_) && (exchange_.core() != 0 || Judge())) return true;
        exchange_.Tell(Verdict());
        return false;
    }
    __aicore__ inline bool Judge() {
        exchange_.Fail(JudgeMessages(exchange_, *info_, routing_, waiter_, match_));
        return exchange_.verdict().code == kOk;
    }

    // UB plan 1 (phases 1 to 4).
    __aicore__ inline void PlanInit() {
        MOE_PHASE(exchange_.stamps(), BuffInit);
        BuffInit();
        loader_.Init(exchange_.pipe(), *tiling_, args_.expandX, stride_);
        // MayOverflow compares the pairs of a token.
        routing_.ShareTokens(PartBegin(info_->batch, exchange_.core(), info_->cores),
                             PartBegin(info_->batch, exchange_.core() + 1, info_->cores));
        sendCounts_.Init(exchange_.pipe(), *info_);
        match_.Init(exchange_.pipe(), *info_);
        assist_.Init(exchange_.pipe(), *info_, args_.expandIdx);
    }
    __aicore__ inline Verdict CheckSendCounts() {
        SyncFunc<HardEvent::MTE2_V>();
        SyncFunc<HardEvent::MTE2_S>();
        return sendCounts_.Check();
    }

    // Sends each row of the share [begin, end) to the slot (token, k) of the source that its triple names. All triples
    // of a chunk are checked before its first store, while the first rows come.
    __aicore__ inline Verdict SetWaitTpStatusAndDisPatch(uint32_t begin, uint32_t end) {
        MOE_PHASE(exchange_.stamps(), SetWaitTpStatusAndDisPatch);
        Verdict verdict;
        if (begin == end) return verdict;
        uint32_t row = begin, count = BeginRows(row, begin, end);
        while (assist_.Next(sendCounts_, verdict)) {
            while (row < assist_.stop()) {
                const LocalTensor<int8_t> chunk = loader_.Take();
                MarkRows(chunk, count);
                for (uint32_t i = 0; i < count; ++i, ++row) SendSlot(row, chunk[i * stride_]);
                loader_.Free(chunk);
                if (row < end) count = BeginRows(row, begin, end);
            }
        }
        if (row < end) loader_.Free(loader_.Take());
        return verdict;
    }
    // The epoch's mark behind each row. The chunk is there, so what was stored from its memory before has left.
    __aicore__ inline void MarkRows(const LocalTensor<int8_t>& chunk, uint32_t count) {
        const LocalTensor<int32_t> words = chunk.template ReinterpretCast<int32_t>();
        if constexpr (!kQuant) SyncFunc<HardEvent::MTE2_V>();
        for (uint32_t i = 0; i < count; ++i) {
            AscendC::Duplicate(words[(i * stride_ + rowBytes_) / static_cast<uint32_t>(sizeof(int32_t))],
                               static_cast<int32_t>(SlotMark(exchange_.epoch())), kBlockWords);
        }
        SyncFunc<HardEvent::V_MTE3>();
    }
    __aicore__ inline void SendSlot(uint32_t row, const LocalTensor<int8_t>& bytes) {
        const uint64_t slot = static_cast<uint64_t>(assist_.Word(row, 1)) * info_->topK + assist_.Word(row, 2);
        exchange_.sender().PutSlot(assist_.Word(row, 0), slot * slotStep_, bytes, stride_);
    }
    // Begins to load rows of the share from `row` on, of one chunk of triples. Returns how many.
    __aicore__ inline uint32_t BeginRows(uint32_t row, uint32_t begin, uint32_t end) {
        const uint32_t count = Min(tiling_->sendRows, Min(end - row, kTripleRows - (row - begin) % kTripleRows));
        loader_.Load(row, count);
        return count;
    }

    // UB plan 2 (phase 5): the ids again, and the sums of this core's share.
    __aicore__ inline bool LocalWindowCopy() {
        MOE_PHASE(exchange_.stamps(), LocalWindowCopy);
        exchange_.NextPlan();
        RoutingInit();
        SlotRows rows;
        rows.Init(exchange_.pipe(), *info_, rowBytes_, exchange_.Half(), exchange_.epoch());
        TokenSum<XType, kQuant, SlotRows> sum;
        sum.Init(exchange_.pipe(), *tiling_, args_, rows);
        sum.Run(routing_, exchange_.core(), info_->cores, *this);
        const bool good = exchange_.Hear();
        AscendC::PipeBarrier<PIPE_ALL>();
        return good;
    }

    ReturnLoader<XType, kQuant> loader_;
    ReturnCounts sendCounts_;
    TripleReader assist_;
    StatusWaiter waiter_;
    CountsMatch match_;
    uint32_t stride_ = 0;    // of rows with their marks in UB,
    uint32_t slotStep_ = 0;  // and of the slots
};

}  // namespace moe

#endif  // ASCEND_MOE_WINDOW_SLOTS_H
