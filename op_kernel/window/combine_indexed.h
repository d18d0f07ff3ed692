// Combine, algorithm "window", indexed layout: expert rows return to the window of the rank whose token they are, to
// the place of the (token, k) in their source index (source rank, token, k). That rank sums the K rows of each token,
// weighted, in fp32 and in ascending k. Used for the V2 contract, except over RDMA.
//
// Source: the rank whose token a row is. A: rows of expand_x.
//
// phase | function        | which cores   | reads                             | writes                 | which cores
//       |                 |               |                                   |                        | synchronize
// ------+-----------------+---------------+-----------------------------------+------------------------+------------
// 0     | Exchange::Enter | all           | context, epoch word               | nothing                |
// 1     | RoutingTable::  | all: a share  | abort blocks, expert_ids [BS][K]  | workspace: histograms  |
//       | Count,          | of the pairs, | int32, x_active_mask,             | [cores][E] int32       |
//       | CheckSendCounts | all segments  | ep_send_counts [L*W]              |                        |
// 2     | SetWaitTp-      | all: a share  | expand_x [A][H], source indices   | the sources' ping-pong | cores of
//       | StatusAndDis-   | of the rows   | [A][3] int32                      | buffers: rows; core 0, | the rank
//       | Patch, Agree    |               |                                   | after the core         |
//       |                 |               |                                   | barrier: epoch word    |
// 3     | SetStatus       | all: a share  | nothing: the segments are in UB   | a status message to    |
//       |                 | of the peers  |                                   | every rank             |
// 4     | WaitForAll;     | all: all      | status messages; core 0: abort    | nothing: compares      | all ranks
//       | RowPlaces::     | messages;     | blocks, histograms                | their counts with the  |
//       | Find, Judge     | core 0        |                                   | totals                 |
// 5     | LocalWindowCopy | all: a share  | rows in the own ping-pong buffer, | x [BS][H]              |
//       |                 | of (token,    | expert_ids, x_active_mask,        |                        |
//       |                 | part of H)    | weights [BS][K] fp32 and other    |                        |
//       |                 |               | addends (Addends)                 |                        |
//
// Invalid ids, counts or source indices are found before the status messages leave: the messages carry the error, and
// every rank raises it. A RoutingMismatch concerns this rank only. After any failure Leave writes zeros into x, and
// core 0 writes the error record. No core barrier separates phases 4 and 5: in phase 5 each core publishes whether its
// rows have come, and reads the others' status after its sums (Exchange::ArriveBeforeSums). In split mode, send returns
// after the status messages; finish counts its ids again and continues with the wait.
#ifndef ASCEND_MOE_WINDOW_COMBINE_INDEXED_H
#define ASCEND_MOE_WINDOW_COMBINE_INDEXED_H

#include "combine.h"

namespace moe {

// Finds a pair's row in this rank's own window: at index token * K + k of the ping-pong buffer, with a tag that says
// whether it has come.
class IndexedRows : public WithoutSums {
public:
    // `pingPong`: of this epoch.
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, uint32_t rowBytes, GM_ADDR pingPong,
                                uint32_t epoch) {
        info_ = &info;
        tag_ = static_cast<uint64_t>(IndexedRowTag(epoch)) << 32 | IndexedRowTag(epoch);
        rowBytes_ = rowBytes;
        rowStep_ = RowStep(info, IndexedRowBytes(rowBytes));
        pingPong_ = pingPong;
        pipe.InitBuffer(tagBuf_, kChunkBlockBytes);
    }
    // Starts to load the tags of a chunk of pairs.
    __aicore__ inline void Load(uint32_t begin, uint32_t count) {
        GlobalTensor<int32_t> tags;
        const uint64_t first = static_cast<uint64_t>(begin) * rowStep_ + rowBytes_;
        tags.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(pingPong_ + first),
                             static_cast<uint64_t>(count) * rowStep_ / sizeof(int32_t));
        const DataCopyExtParams params{Pieces(count), kBlock, rowStep_ - kBlock, 0, 0};
        const DataCopyPadExtParams<int32_t> pad{false, 0, 0, 0};
        AscendC::DataCopyPad(tagBuf_.Get<int32_t>(), tags, params, pad);
    }
    __aicore__ inline void Place(RoutingTable&, uint32_t, uint32_t) {}
    __aicore__ inline GM_ADDR Address(RoutingTable&, int32_t id, uint32_t token, uint32_t k, uint32_t i) {
        if (tagBuf_.Get<uint64_t>().GetValue(i * (kBlock / sizeof(uint64_t))) != tag_) {
            Miss(static_cast<uint32_t>(id), token, k);
            return nullptr;
        }
        return pingPong_ + (static_cast<uint64_t>(token) * info_->topK + k) * rowStep_;
    }
    // The first pair whose row is not of this op.
    __aicore__ inline OpStatus missing() const { return missing_; }

private:
    __aicore__ inline void Miss(uint32_t expert, uint32_t token, uint32_t k) {
        if (missing_.code != kOk) return;
        missing_ = InvalidOf(*info_, kRoutingMismatch, kMismatchRow | expert, token);
        missing_.detail2 = k;
    }

    UbBuf tagBuf_;
    const MoeDistributeInfo* info_ = nullptr;
    GM_ADDR pingPong_ = nullptr;
    uint64_t tag_ = 0;
    OpStatus missing_;
    uint32_t rowBytes_ = 0;
    uint32_t rowStep_ = 0;
};

template <typename XType, bool kQuant>
class WindowCombineIndexed : public WindowCombineBase {
public:
    __aicore__ inline void Init(const CombineArguments& arguments, const MoeDistributeCombineTiling& tiling) {
        WindowCombineBase::Init(arguments, tiling, sizeof(XType));
        stride_ = IndexedRowBytes(rowBytes_);
        rowStep_ = RowStep(*info_, stride_);
    }
    __aicore__ inline void Process(TPipe& pipe) {
        if (Enter(pipe)) Run();
        exchange_.Exit();
    }

    // For Exchange::SetStatus: rows of a local expert that return to `peer`.
    __aicore__ inline void Select(uint32_t) {}
    __aicore__ inline uint32_t Rows(uint32_t peer, uint32_t localExpert) {
        const uint32_t slot = localExpert * info_->world + peer;
        return sendCounts_.End(slot) - sendCounts_.Start(slot);
    }
    // For TokenSum.
    __aicore__ inline void ArriveBeforeSums(const OpStatus& missing) { exchange_.ArriveBeforeSums(missing); }

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
    // Rows need no places, so they leave at once. After a core barrier each core waits for all messages, as in direct
    // (see LocalAbortFlag). Finish only counts. Returns false if the communicator is in the failed state.
    __aicore__ inline bool Send() {
        if (info_->part == kPartFinish) return exchange_.Agree(routing_.Count());
        sendCounts_.Load(args_.epSendCounts);
        OpStatus mine = exchange_.LookForAborts();
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
        if (exchange_.status().code == kRecheck) {
            exchange_.RecheckTogether();
            exchange_.Fail(places_.Find());
        }
        exchange_.SetStatus(*this, rowBytes_);
        return true;
    }
    __aicore__ inline bool Wait() {
        if (exchange_.core() == 0) places_.Find();  // the totals
        if (exchange_.WaitForAll(waiter_) && (exchange_.core() != 0 || Judge())) return true;
        exchange_.ArriveBeforeSums(OpStatus());
        return false;
    }
    __aicore__ inline bool Judge() {
        exchange_.Fail(JudgeMessages(exchange_, *info_, routing_, waiter_, match_));
        return exchange_.status().code == kOk;
    }

    // UB layout 1 (phases 1 to 4).
    __aicore__ inline void PlanInit() {
        MOE_PHASE(exchange_.timestamps(), BuffInit);
        BuffInit();
        loader_.Init(exchange_.pipe(), *tiling_, args_.expandX, stride_);
        // MayOverflow compares the pairs of a token.
        routing_.ShareTokens(PartBegin(info_->batch, exchange_.core(), info_->cores),
                             PartBegin(info_->batch, exchange_.core() + 1, info_->cores));
        sendCounts_.Init(exchange_.pipe(), *info_);
        match_.Init(exchange_.pipe(), *info_);
        assist_.Init(exchange_.pipe(), *info_, args_.expandIdx);
    }
    __aicore__ inline OpStatus CheckSendCounts() {
        SyncFunc<HardEvent::MTE2_V>();
        SyncFunc<HardEvent::MTE2_S>();
        return sendCounts_.Check();
    }

    // Sends each row of the share [begin, end) to the place (token, k) at the source in its source index. All source
    // indices of a chunk are checked before its first store, while the first rows load.
    __aicore__ inline OpStatus SetWaitTpStatusAndDisPatch(uint32_t begin, uint32_t end) {
        MOE_PHASE(exchange_.timestamps(), SetWaitTpStatusAndDisPatch);
        OpStatus status;
        if (begin == end) return status;
        uint32_t row = begin, count = BeginRows(row, begin, end);
        while (assist_.Next(sendCounts_, status)) {
            while (row < assist_.stop()) {
                const LocalTensor<int8_t> chunk = loader_.Take();
                TagRows(chunk, count);
                for (uint32_t i = 0; i < count; ++i, ++row) SendIndexed(row, chunk[i * stride_]);
                loader_.Free(chunk);
                if (row < end) count = BeginRows(row, begin, end);
            }
        }
        if (row < end) loader_.Free(loader_.Take());
        return status;
    }
    // The epoch's tag after each row. The chunk has been loaded, so earlier stores from its memory are done.
    __aicore__ inline void TagRows(const LocalTensor<int8_t>& chunk, uint32_t count) {
        const LocalTensor<int32_t> words = chunk.template ReinterpretCast<int32_t>();
        if constexpr (!kQuant) SyncFunc<HardEvent::MTE2_V>();
        for (uint32_t i = 0; i < count; ++i) {
            AscendC::Duplicate(words[(i * stride_ + rowBytes_) / static_cast<uint32_t>(sizeof(int32_t))],
                               static_cast<int32_t>(IndexedRowTag(exchange_.epoch())), kBlockWords);
        }
        SyncFunc<HardEvent::V_MTE3>();
    }
    __aicore__ inline void SendIndexed(uint32_t row, const LocalTensor<int8_t>& bytes) {
        const uint64_t slot = static_cast<uint64_t>(assist_.Word(row, 1)) * info_->topK + assist_.Word(row, 2);
        exchange_.sender().PutIndexed(assist_.Word(row, 0), slot * rowStep_, bytes, stride_);
    }
    // Starts to load rows of the share from `row` on, of one chunk of source indices. Returns how many.
    __aicore__ inline uint32_t BeginRows(uint32_t row, uint32_t begin, uint32_t end) {
        const uint32_t count =
            Min(tiling_->sendRows, Min(end - row, kSourceIndexRows - (row - begin) % kSourceIndexRows));
        loader_.Load(row, count);
        return count;
    }

    // UB layout 2 (phase 5): the ids again, and the sums of this core's share.
    __aicore__ inline bool LocalWindowCopy() {
        MOE_PHASE(exchange_.timestamps(), LocalWindowCopy);
        exchange_.NextPlan();
        RoutingInit();
        IndexedRows rows;
        rows.Init(exchange_.pipe(), *info_, rowBytes_, exchange_.PingPong(), exchange_.epoch());
        TokenSum<XType, kQuant, IndexedRows> sum;
        sum.Init(exchange_.pipe(), *tiling_, args_, rows);
        sum.Run(routing_, exchange_.core(), info_->cores, *this);
        const bool good = exchange_.WaitAfterSums();
        AscendC::PipeBarrier<PIPE_ALL>();
        return good;
    }

    ReturnLoader<XType, kQuant> loader_;
    ReturnCounts sendCounts_;
    SourceIndexReader assist_;
    StatusWaiter waiter_;
    CountsMatch match_;
    uint32_t stride_ = 0;   // of rows with their tags in UB,
    uint32_t rowStep_ = 0;  // and in the ping-pong buffer
};

}  // namespace moe

#endif  // ASCEND_MOE_WINDOW_COMBINE_INDEXED_H
