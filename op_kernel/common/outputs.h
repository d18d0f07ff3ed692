// Outputs of dispatch that all algorithms write in the same way: fields of rows, and counts; and the counts in
// dispatch's status messages.
#ifndef ASCEND_MOE_COMMON_OUTPUTS_H
#define ASCEND_MOE_COMMON_OUTPUTS_H

#include "exchange.h"
#include "segments.h"

namespace moe {

// The GM arguments of the entry, in order.
struct DispatchArguments {
    GM_ADDR x;
    GM_ADDR expertIds;
    GM_ADDR scales;
    GM_ADDR xActiveMask;
    GM_ADDR expertScales;
    GM_ADDR performanceInfo;
    GM_ADDR expandX;
    GM_ADDR dynamicScales;
    GM_ADDR expandIdx;
    GM_ADDR expertTokenNums;
    GM_ADDR epRecvCounts;
    GM_ADDR tpRecvCounts;
    GM_ADDR expandScales;
    GM_ADDR errorRecord;
    GM_ADDR workspace;
    GM_ADDR tiling;
    CoreGroup group;
};

// Which rows a binary of the entry sends: CANN builds one for each type of expand_x.
#ifdef DTYPE_EXPAND_X
constexpr bool kQuantized = AscendC::IsSameType<DTYPE_EXPAND_X, int8_t>::value, kPlain = !kQuantized;
#else
constexpr bool kQuantized = true, kPlain = true;
#endif
// Runs the body of a tiling key if this binary can reach it.
template <typename Op, bool kReached>
__aicore__ inline void Run(const DispatchArguments& arguments, const MoeDistributeDispatchTiling& tiling, TPipe& pipe) {
    if constexpr (kReached) {
        Op op;
        op.Init(arguments, tiling);
        op.Process(pipe);
    }
}

// Bytes of an element of a row in the window.
__aicore__ inline uint32_t WireSize(const MoeDistributeInfo& info) {
    return info.wireType == kTypeInt8 ? 1 : info.wireType == kTypeFp32 ? 4 : 2;
}

// Stores the first `bytes` of each of `count` rows in UB, `stride` apart, to consecutive places of an output.
__aicore__ inline void StoreField(GM_ADDR output, uint32_t row, const LocalTensor<int8_t>& field, uint32_t bytes,
                                  uint32_t stride, uint32_t count) {
    GlobalTensor<int8_t> target;
    target.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(output + static_cast<uint64_t>(row) * bytes),
                           static_cast<uint64_t>(count) * bytes);
    const uint32_t gap = (stride - static_cast<uint32_t>(CeilTo(bytes, kBlock))) / kBlock;
    const DataCopyExtParams params{Pieces(count), bytes, gap, 0, 0};
    AscendC::DataCopyPad(target, field, params);
}

// ep_recv_counts, expert_token_nums, tp_recv_counts: for core 0.
class DispatchCounts {
public:
    __aicore__ inline void Init(const DispatchArguments& arguments, const MoeDistributeDispatchTiling& tiling) {
        args_ = &arguments;
        tiling_ = &tiling;
        info_ = &tiling.info;
    }
    __aicore__ inline void Store(TPipe& pipe, SegmentTable& segments) {
        const uint32_t numsBytes = DispatchCountsBytes(info_->localExperts) - kBlock;
        UbBuf numsBuf;
        pipe.InitBuffer(numsBuf, DispatchCountsBytes(info_->localExperts));
        LocalTensor<int64_t> nums = numsBuf.Get<int64_t>();
        int64_t before = 0;
        for (uint32_t l = 0; l < info_->localExperts; ++l) {
            const int64_t end = segments.End((l + 1) * info_->world - 1);
            nums.SetValue(l, tiling_->tokenNumsType == 0 ? end : end - before);
            before = end;
        }
        LocalTensor<int32_t> tp = numsBuf.Get<int32_t>()[static_cast<uint32_t>(numsBytes / sizeof(int32_t))];
        tp.SetValue(0, static_cast<int32_t>(segments.Rows()));
        SyncFunc<HardEvent::S_MTE3>();
        StoreAll(segments.Ends(), nums, tp);
    }
    // After a failure core 0 writes zero counts, so that callers see no rows, and the error record.
    __aicore__ inline void Leave(Exchange& exchange) {
        if (exchange.core() != 0) return;
        exchange.NextPlan();
        StoreZeros(exchange.pipe());
        exchange.Report();
    }

private:
    __aicore__ inline void StoreZeros(TPipe& pipe) {
        UbBuf zeroBuf;
        const uint32_t slots = info_->world * info_->localExperts;
        const uint32_t words = Max(PaddedInts(slots), PaddedInts(2 * info_->localExperts));
        pipe.InitBuffer(zeroBuf, words * sizeof(int32_t));
        LocalTensor<int32_t> zero = zeroBuf.Get<int32_t>();
        AscendC::Duplicate(zero, static_cast<int32_t>(0), words);
        SyncFunc<HardEvent::V_MTE3>();
        StoreAll(zero, zero.ReinterpretCast<int64_t>(), zero);
    }
    __aicore__ inline void StoreAll(const LocalTensor<int32_t>& ends, const LocalTensor<int64_t>& nums,
                                    const LocalTensor<int32_t>& tp) {
        GlobalTensor<int32_t> recv, tpRecv;
        GlobalTensor<int64_t> tokens;
        const uint32_t slots = info_->world * info_->localExperts;
        recv.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args_->epRecvCounts), slots);
        tokens.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(args_->expertTokenNums), info_->localExperts);
        CopyOut(recv, ends, slots);
        CopyOut(tokens, nums, info_->localExperts);
        if (tiling_->tpWorldSize == 1) {
            tpRecv.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args_->tpRecvCounts), 1);
            CopyOut(tpRecv, tp, 1);
        }
    }

    const DispatchArguments* args_ = nullptr;
    const MoeDistributeDispatchTiling* tiling_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
};

// Rows that this rank sends to each peer's experts: the totals that core 0 left in the workspace.
class SendCounts {
public:
    // Starts to load the totals.
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, GM_ADDR workspace) {
        localExperts_ = info.localExperts;
        pipe.InitBuffer(buf_, SendCountsBytes(info.experts));
        GlobalTensor<int32_t> totals;
        totals.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(workspace + TotalsOffset(info.cores, info.experts)),
                               info.experts);
        CopyIn(buf_.Get<int32_t>(), totals, info.experts);
    }
    __aicore__ inline void Select(uint32_t) {
        if (!loaded_) SyncFunc<HardEvent::MTE2_S>();
        loaded_ = true;
    }
    __aicore__ inline uint32_t Rows(uint32_t peer, uint32_t localExpert) {
        return static_cast<uint32_t>(buf_.Get<int32_t>().GetValue(peer * localExperts_ + localExpert));
    }

private:
    UbBuf buf_;
    uint32_t localExperts_ = 0;
    bool loaded_ = false;
};

// Dispatch of window and hierarchy after rows and messages have arrived: the messages are stored in the workspace; the
// rows of the own window become expand_x and its fields, ordered by (local expert, source rank, flat (token, k)).

// Each core stores its sources' messages in the workspace, [W] messages, so that later every core has all counts.
class MessageKeeper {
public:
    __aicore__ inline void Init(const MoeDistributeInfo& info, GM_ADDR workspace) {
        words_ = StatusMessageBytes(info.localExperts) / static_cast<uint32_t>(sizeof(int32_t));
        messages_.SetGlobalBuffer(
            reinterpret_cast<__gm__ uint32_t*>(workspace + CountsOffset(info.cores, info.experts)),
            static_cast<uint64_t>(info.world) * words_);
    }
    __aicore__ inline OpStatus Arrived(uint32_t source, const LocalTensor<uint32_t>& message) {
        SyncFunc<HardEvent::S_MTE3>();
        AscendC::DataCopy(messages_[static_cast<uint64_t>(source) * words_], message, words_);
        return OpStatus();
    }
    __aicore__ inline const GlobalTensor<uint32_t>& messages() const { return messages_; }
    __aicore__ inline uint32_t words() const { return words_; }

private:
    GlobalTensor<uint32_t> messages_;
    uint32_t words_ = 0;
};

// The counts of all sources' messages, loaded into UB.
struct StoredCounts {
    LocalTensor<int32_t> values;
    uint32_t words;
    __aicore__ inline int32_t operator()(uint32_t source, uint32_t localExpert) const {
        return values.GetValue(source * words + StatusWriter::CountWord(localExpert));
    }
};

// Copies the rows of the own window, in phase LocalWindowCopy. A row has `stride` bytes; the last `trailerBytes` are
// its trailer.
template <bool kQuant>
class ArrivedRows {
public:
    __aicore__ inline void Init(const DispatchArguments& arguments, const MoeDistributeDispatchTiling& tiling,
                                uint32_t stride, uint32_t trailerBytes) {
        args_ = &arguments;
        tiling_ = &tiling;
        info_ = &tiling.info;
        stride_ = stride;
        trailerOffset_ = stride - trailerBytes;
    }
    // UB: the segment table, all counts, and copyRing chunks of window rows. `counts`: stored by core 0.
    __aicore__ inline void Copy(Exchange& exchange, const MessageKeeper& keeper, DispatchCounts& counts) {
        MOE_PHASE(exchange.timestamps(), LocalWindowCopy);
        exchange.NextPlan();
        SegmentTable segments;
        segments.Init(exchange.pipe(), *info_);
        const CopyOutUb ub(*tiling_, stride_);
        UbBuf messagesBuf;
        exchange.pipe().InitBuffer(messagesBuf, ub.messages);
        StoredCounts stored = {messagesBuf.Get<int32_t>(), keeper.words()};
        AscendC::DataCopy(messagesBuf.Get<uint32_t>(), keeper.messages(), info_->world * keeper.words());
        const bool rdma = info_->transport == kTransportRdma;
        if (SegmentScan::Suits(*info_)) {
            SegmentScan scan;
            scan.Init(exchange.pipe(), *info_, keeper.words(), 0);
            SyncFunc<HardEvent::MTE2_V>();
            scan.Run(stored.values, segments, rdma);
        } else {
            SyncFunc<HardEvent::MTE2_S>();
            segments.FromCounts(stored);
            if (rdma) segments.AlignEnd();
        }
        exchange.pipe().InitBuffer(copyQueue_, Ring(ub.ring), ub.chunk);
        CopyRows(exchange, segments);
        if (exchange.core() == 0) counts.Store(exchange.pipe(), segments);
        AscendC::PipeBarrier<PIPE_ALL>();
    }

private:
    // This core's share of expand_x is contiguous. A chunk ends at its segment (local expert, source), because the next
    // segment lies in another region of the window.
    __aicore__ inline void CopyRows(Exchange& exchange, SegmentTable& segments) {
        const uint32_t begin = PartBegin(segments.Rows(), exchange.core(), info_->cores);
        const uint32_t end = PartBegin(segments.Rows(), exchange.core() + 1, info_->cores);
        if (begin == end) return;
        uint32_t slot = segments.Seek(begin);
        for (uint32_t row = begin; row < end;) {
            while (segments.End(slot) <= row) ++slot;
            const uint32_t count = Min(tiling_->copyRows, Min(end, segments.End(slot)) - row);
            const int32_t at = segments.Offset(slot) + static_cast<int32_t>(row - segments.Start(slot));
            CopyChunk(exchange, slot % info_->world, at, row, count);
            row += count;
        }
    }
    __aicore__ inline void CopyChunk(Exchange& exchange, uint32_t source, int32_t windowRow, uint32_t row,
                                     uint32_t count) {
        LocalTensor<int8_t> chunk = copyQueue_.template AllocTensor<int8_t>();
        exchange.LoadRows(chunk, source, windowRow, stride_, count);
        copyQueue_.EnQue(chunk);
        chunk = copyQueue_.template DeQue<int8_t>();
        const uint32_t size = WireSize(*info_), rowBytes = info_->hidden * size;
        StoreField(args_->expandX, row, chunk, rowBytes, stride_, count);
        if (kQuant)
            StoreField(args_->dynamicScales, row, chunk[PayloadBytes(info_->hidden, size)], sizeof(float), stride_,
                       count);
        if (info_->sourceIndices != 0)
            StoreField(args_->expandIdx, row, chunk[trailerOffset_], kSourceIndexWords * sizeof(int32_t), stride_,
                       count);
        if (info_->hasWeights != 0)
            StoreField(args_->expandScales, row, chunk[stride_ - kBlock], sizeof(float), stride_, count);
        copyQueue_.FreeTensor(chunk);
    }

    const DispatchArguments* args_ = nullptr;
    const MoeDistributeDispatchTiling* tiling_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    AscendC::TQueBind<AscendC::QuePosition::VECIN, AscendC::QuePosition::VECOUT, 1> copyQueue_;
    uint32_t stride_ = 0;
    uint32_t trailerOffset_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_OUTPUTS_H
