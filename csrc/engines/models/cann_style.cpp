// Models of kernels that are never shipped: they have the structure of the kernels whose times were
// published. Their entries have those arguments of the shipped ones that they use; bf16 and the V2 contract only.
#include <cstdint>

#include "kernel_operator.h"

#include "common/contexts.h"
#include "protocol/tiling.h"

namespace models {

// The two halves of the state area that CANN's A3 operators describe lie at the head of the data window here,
// rows behind it.
constexpr uint64_t kStatusBytes = 1024 * 1024;     // of every data window
constexpr uint64_t kHalfStatusBytes = 450 * 1024;  // of one half: a block a (local expert, source)
constexpr uint64_t kCombineFlags = 64 * 1024;      // in a half: a block a (token, k)
constexpr uint64_t kDispatchPhase = 900 * 1024;    // a cache line a core: which half is next
constexpr uint64_t kCombinePhase = 960 * 1024;

inline constexpr uint64_t AlignTo(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

using namespace moe;  // the kernels' own vocabulary
using XType = bfloat16_t;

// Which half this op uses: a word a core, toggled in every op.
__aicore__ inline uint32_t TakeHalf(const WindowContext& context, uint64_t phase, uint32_t core) {
    GlobalTensor<uint32_t> word;
    word.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(context.data(context.rank()) + phase + core * 64), 8);
    AscendC::DataCacheCleanAndInvalid<uint32_t, AscendC::CacheLine::SINGLE_CACHE_LINE, AscendC::DcciDst::CACHELINE_OUT>(
        word);
    const uint32_t half = word.GetValue(0) & 1;
    word.SetValue(0, half ^ 1);
    AscendC::DataCacheCleanAndInvalid<uint32_t, AscendC::CacheLine::SINGLE_CACHE_LINE, AscendC::DcciDst::CACHELINE_OUT>(
        word);
    return half;
}

// How many of the first `count` ids are `id`: differences made 0 or 1, then summed as the bits of tiny
// floats.
class EqualCount {
public:
    __aicore__ inline void Init(TPipe& pipe, uint32_t most) {
        const uint32_t bytes = static_cast<uint32_t>(CeilTo(most * sizeof(int32_t), 256));
        pipe.InitBuffer(otherBuf_, bytes);
        pipe.InitBuffer(scratchBuf_, bytes);
        pipe.InitBuffer(sumBuf_, kBlock);
    }
    __aicore__ inline uint32_t Of(const LocalTensor<int32_t>& ids, uint32_t count, int32_t id) {
        if (count == 0) return 0;
        LocalTensor<int32_t> other = otherBuf_.Get<int32_t>();
        LocalTensor<float> bits = other.ReinterpretCast<float>();
        SyncFunc<HardEvent::S_V>();
        AscendC::Duplicate(other, id, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Sub(other, ids, other, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Abs(bits, bits, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mins(other, other, static_cast<int32_t>(1), count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::ReduceSum(sumBuf_.Get<float>(), bits, scratchBuf_.Get<float>(), static_cast<int32_t>(count));
        SyncFunc<HardEvent::V_S>();
        return count - static_cast<uint32_t>(sumBuf_.Get<int32_t>().GetValue(0));
    }

private:
    UbBuf otherBuf_, scratchBuf_, sumBuf_;
};

// Polls `blocks` blocks of flags until the sum of all their floats is `want`, then clears them.
class FlagWait {
public:
    __aicore__ inline void Init(TPipe& pipe, uint32_t blocks) {
        blocks = Max(blocks, 1);
        pipe.InitBuffer(buf_, blocks * kBlock);
        pipe.InitBuffer(scratchBuf_, blocks * kBlock);
        pipe.InitBuffer(sumBuf_, kBlock);
    }
    // The blocks as last read; each has so many words of 1.
    __aicore__ inline LocalTensor<float> Wait(const GlobalTensor<float>& flags, uint32_t blocks, uint32_t ones) {
        LocalTensor<float> read = buf_.Get<float>();
        const float want = static_cast<float>(blocks * ones);
        for (float sum = -1.0f; sum != want;) {
            SyncFunc<HardEvent::S_MTE2>();
            AscendC::DataCopy(read, flags, blocks * kBlockWords);
            SyncFunc<HardEvent::MTE2_V>();
            sum = Sum(read, blocks);
            if (sum != want) {
#ifdef TWIN_POLL_HINT
                TWIN_POLL_HINT();
#endif
            }
        }
        return read;
    }
    __aicore__ inline void Clear(const GlobalTensor<float>& flags, uint32_t blocks) {
        LocalTensor<float> zero = scratchBuf_.Get<float>();
        SyncFunc<HardEvent::MTE3_V>();
        AscendC::Duplicate(zero, 0.0f, blocks * kBlockWords);
        SyncFunc<HardEvent::V_MTE3>();
        AscendC::DataCopy(flags, zero, blocks * kBlockWords);
    }

private:
    // Counts beside the flags are integers: as floats they are too small to change the sum.
    __aicore__ inline float Sum(const LocalTensor<float>& read, uint32_t blocks) {
        LocalTensor<float> sum = sumBuf_.Get<float>();
        AscendC::ReduceSum(sum, read, scratchBuf_.Get<float>(), static_cast<int32_t>(blocks * kBlockWords));
        SyncFunc<HardEvent::V_S>();
        return sum.GetValue(0);
    }
    UbBuf buf_, scratchBuf_, sumBuf_;
};

template <typename T>
__aicore__ inline GlobalTensor<T> View(GM_ADDR at, uint64_t count) {
    GlobalTensor<T> view;
    view.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(at), count);
    return view;
}

// Dispatch in the style of CANN's A3 operator, from its public description: every (token, k) pair reads and
// quantizes its row again, all cores meet before 32-byte status stores, one an expert, all cores poll their
// share of them and meet again, then copy rows out of the window with three stores a row and meet once more
// before the token numbers.
//
// The modelled kernels quantize by their own code: the shipped kernels may change, the published times do
// not. Per token: s = 127 / max|v|, q = rint(v * s), scale = 1 / s, behind the codes.
class Quantizer {
public:
    __aicore__ inline void Init(TPipe& pipe, uint32_t hidden) {
        hidden_ = hidden;
        payload_ = PayloadBytes(hidden, sizeof(int8_t));
        const uint32_t bytes = static_cast<uint32_t>(CeilTo(hidden * sizeof(float), kBlock));
        pipe.InitBuffer(valueBuf_, bytes);
        pipe.InitBuffer(scratchBuf_, bytes);
        pipe.InitBuffer(reduceBuf_,
                        kBlock + static_cast<uint32_t>(CeilTo(2 * CeilDiv(hidden, 64) * sizeof(float), kBlock)));
    }
    __aicore__ inline void Quantize(const LocalTensor<int8_t>& wire, const LocalTensor<XType>& row) {
        LocalTensor<float> value = valueBuf_.Get<float>(hidden_), magnitude = scratchBuf_.Get<float>(hidden_);
        LocalTensor<float> reduced = reduceBuf_.Get<float>(kBlockWords);
        AscendC::Cast(value, row, AscendC::RoundMode::CAST_NONE, hidden_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Abs(magnitude, value, hidden_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::ReduceMax(reduced, magnitude, reduceBuf_.Get<float>()[kBlockWords], static_cast<int32_t>(hidden_),
                           false);
        SyncFunc<HardEvent::V_S>();
        const float largest = reduced.GetValue(0), inverse = largest == 0.0f ? 1.0f : 127.0f / largest;
        SyncFunc<HardEvent::S_V>();
        AscendC::Muls(value, value, inverse, hidden_);
        AscendC::PipeBarrier<PIPE_V>();
        LocalTensor<int32_t> code = value.ReinterpretCast<int32_t>();
        AscendC::Cast(code, value, AscendC::RoundMode::CAST_RINT, hidden_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::SetDeqScale(static_cast<half>(1.0f));
        LocalTensor<half> narrow = magnitude.ReinterpretCast<half>();
        AscendC::Cast(narrow, code, AscendC::RoundMode::CAST_NONE, hidden_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(wire, narrow, AscendC::RoundMode::CAST_TRUNC, hidden_);
        LocalTensor<float> tail = wire.ReinterpretCast<float>()[static_cast<uint32_t>(payload_ / sizeof(float))];
        tail.SetValue(0, 1.0f / inverse);
        for (uint32_t i = 1; i < kBlockWords; ++i) tail.SetValue(i, 0.0f);
    }

private:
    UbBuf valueBuf_, scratchBuf_, reduceBuf_;
    uint32_t hidden_ = 0, payload_ = 0;
};

struct DispatchTensors {
    GM_ADDR x;
    GM_ADDR expertIds;
    GM_ADDR expandX;
    GM_ADDR dynamicScales;
    GM_ADDR triples;
    GM_ADDR tokenNums;
    GM_ADDR recvCounts;
    GM_ADDR workspace;
};

class CannStyleDispatch {
public:
    __aicore__ inline void Init(const DispatchTensors& tensors, const MoeDistributeDispatchTiling& tiling) {
        gm_ = tensors;
        info_ = &tiling.info;
        quant_ = info_->quantMode != 0;
        numsType_ = tiling.tokenNumsType;
        core_ = static_cast<uint32_t>(AscendC::GetBlockIdx());
        context_.Init(AscendC::GetHcclContext<0>(), *info_);
        context_.Check();
        wire_ = PayloadBytes(info_->hidden, quant_ ? sizeof(int8_t) : sizeof(XType));
        unit_ = static_cast<uint32_t>(AlignTo(wire_ + 2 * kBlock, 512));
        slotBytes_ = static_cast<uint64_t>(info_->maxBatch) * unit_;
        const uint64_t combine =
            static_cast<uint64_t>(info_->maxBatch) * info_->topK * AlignTo(info_->hidden * sizeof(XType), 512);
        half_ = TakeHalf(context_, kDispatchPhase, core_);
        rowsAt_ = kStatusBytes + half_ * ((info_->dataBytes - kStatusBytes) / 2 / 512 * 512) + combine;
        slots_ = info_->world * info_->localExperts;
        first_ = PartBegin(slots_, core_, info_->cores);
        mine_ = PartBegin(slots_, core_ + 1, info_->cores) - first_;
    }
    __aicore__ inline void Process(TPipe& pipe) {
        pipe_ = &pipe;
        Send();
        SetStatus();
        WaitStatus();
        LocalWindowCopy();
    }

private:
    __aicore__ inline GlobalTensor<int8_t> Bytes(GM_ADDR at, uint64_t bytes) const { return View<int8_t>(at, bytes); }
    __aicore__ inline GlobalTensor<float> Status(uint32_t rank, uint32_t slot, uint32_t blocks) const {
        return View<float>(context_.data(rank) + half_ * kHalfStatusBytes + static_cast<uint64_t>(slot) * kBlock,
                           blocks * kBlockWords);
    }
    __aicore__ inline void LoadIds() {
        const uint32_t pairs = info_->batch * info_->topK;
        pipe_->InitBuffer(idBuf_, static_cast<uint32_t>(CeilTo(pairs * sizeof(int32_t), 256)));
        count_.Init(*pipe_, pairs);
        GlobalTensor<int32_t> ids = View<int32_t>(gm_.expertIds, pairs);
        CopyIn(idBuf_.Get<int32_t>(), ids, pairs);
        SyncFunc<HardEvent::MTE2_S>();
        SyncFunc<HardEvent::MTE2_V>();
    }

    __aicore__ inline void Send() {
        MOE_MARK(AlltoAllDispatch);
        LoadIds();
        pipe_->InitBuffer(inQueue_, 2, static_cast<uint32_t>(CeilTo(info_->hidden * sizeof(XType), kBlock)));
        pipe_->InitBuffer(outQueue_, 2, unit_);
        if (quant_) quantizer_.Init(*pipe_, info_->hidden);
        const uint32_t pairs = info_->batch * info_->topK;
        const uint32_t end = PartBegin(pairs, core_ + 1, info_->cores);
        for (uint32_t i = PartBegin(pairs, core_, info_->cores); i < end; ++i) {
            const int32_t id = idBuf_.Get<int32_t>().GetValue(i);
            const uint32_t position = count_.Of(idBuf_.Get<int32_t>(), i, id);
            SendPair(i, static_cast<uint32_t>(id), position);
        }
    }
    __aicore__ inline void SendPair(uint32_t pair, uint32_t id, uint32_t position) {
        const uint32_t token = pair / info_->topK;
        const uint32_t rowBytes = static_cast<uint32_t>(info_->hidden * sizeof(XType));
        LocalTensor<int8_t> in = inQueue_.AllocTensor<int8_t>();
        CopyIn(in, Bytes(gm_.x + static_cast<uint64_t>(token) * rowBytes, rowBytes), rowBytes);
        inQueue_.EnQue(in);
        in = inQueue_.DeQue<int8_t>();
        LocalTensor<int8_t> out = outQueue_.AllocTensor<int8_t>();
        SyncFunc<HardEvent::MTE3_S>();
        if (quant_) {
            quantizer_.Quantize(out, in.ReinterpretCast<XType>());
        } else {
            AscendC::DataCopy(out, in, static_cast<uint32_t>(CeilTo(rowBytes, kBlock)));
        }
        inQueue_.FreeTensor(in);
        LocalTensor<int32_t> triple = out[wire_ + kBlock].ReinterpretCast<int32_t>();
        triple.SetValue(0, static_cast<int32_t>(info_->rank));
        triple.SetValue(1, static_cast<int32_t>(token));
        triple.SetValue(2, static_cast<int32_t>(pair % info_->topK));
        SyncFunc<HardEvent::S_MTE3>();
        outQueue_.EnQue(out);
        out = outQueue_.DeQue<int8_t>();
        const uint32_t owner = id / info_->localExperts, local = id % info_->localExperts;
        const uint32_t bytes = wire_ + kBlock + kTripleWords * static_cast<uint32_t>(sizeof(int32_t));
        CopyOut(Bytes(Row(context_.data(owner), info_->rank, local, position), bytes), out, bytes);
        outQueue_.FreeTensor(out);
    }
    __aicore__ inline GM_ADDR Row(GM_ADDR window, uint32_t source, uint32_t local, uint32_t position) const {
        const uint64_t slot = static_cast<uint64_t>(source) * info_->localExperts + local;
        return window + rowsAt_ + slot * slotBytes_ + static_cast<uint64_t>(position) * unit_;
    }

    // Each core counts for its share of the experts; flags leave when the slowest core's last row has.
    __aicore__ inline void SetStatus() {
        MOE_MARK(SetStatus);
        const uint32_t begin = PartBegin(info_->experts, core_, info_->cores);
        const uint32_t end = PartBegin(info_->experts, core_ + 1, info_->cores);
        pipe_->InitBuffer(statusBuf_, Max(end - begin, 1) * kBlock);
        LocalTensor<int32_t> status = statusBuf_.Get<int32_t>();
        AscendC::Duplicate(status, static_cast<int32_t>(0), Max(end - begin, 1) * kBlockWords);
        SyncFunc<HardEvent::V_S>();
        for (uint32_t e = begin; e < end; ++e) {
            const uint32_t rows = count_.Of(idBuf_.Get<int32_t>(), info_->batch * info_->topK, static_cast<int32_t>(e));
            status.ReinterpretCast<float>().SetValue((e - begin) * kBlockWords, 1.0f);
            status.SetValue((e - begin) * kBlockWords + 1, static_cast<int32_t>(rows));
        }
        SyncFunc<HardEvent::S_MTE3>();
        AscendC::PipeBarrier<PIPE_ALL>();
        AscendC::SyncAll<true>();
        for (uint32_t e = begin; e < end; ++e) {
            const uint32_t slot = e % info_->localExperts * info_->world + info_->rank;
            AscendC::DataCopy(Status(e / info_->localExperts, slot, 1),
                              status.ReinterpretCast<float>()[(e - begin) * kBlockWords], kBlockWords);
        }
        AscendC::PipeBarrier<PIPE_ALL>();
    }

    // The share's flags; its counts; and the sum of its counts to all cores, by way of the workspace.
    __aicore__ inline void WaitStatus() {
        MOE_MARK(WaitStatus);
        pipe_->Reset();
        wait_.Init(*pipe_, mine_);
        pipe_->InitBuffer(countBuf_, PaddedInts(Max(mine_, 1)) * sizeof(int32_t));
        pipe_->InitBuffer(statusBuf_, info_->cores * kBlock);
        LocalTensor<int32_t> counts = countBuf_.Get<int32_t>(), shared = statusBuf_.Get<int32_t>();
        int32_t sum = 0;
        if (mine_ > 0) {
            const LocalTensor<float> read = wait_.Wait(Status(info_->rank, first_, mine_), mine_, 1);
            for (uint32_t i = 0; i < mine_; ++i) {
                const int32_t rows = read.ReinterpretCast<int32_t>().GetValue(i * kBlockWords + 1);
                counts.SetValue(i, rows);
                sum += rows;
            }
            wait_.Clear(Status(info_->rank, first_, mine_), mine_);
        }
        SyncFunc<HardEvent::S_V>();
        AscendC::Duplicate(shared, sum, info_->cores * kBlockWords);
        SyncFunc<HardEvent::V_MTE3>();
        // A column: the block of this core in the row of every core.
        const AscendC::DataCopyParams column(static_cast<uint16_t>(info_->cores), 1, 0,
                                             static_cast<uint16_t>(info_->cores - 1));
        AscendC::DataCopy(Sums(core_, info_->cores * info_->cores - core_), shared, column);
        AscendC::PipeBarrier<PIPE_ALL>();
        AscendC::SyncAll<true>();
        AscendC::DataCopy(shared, Sums(core_ * info_->cores, info_->cores), info_->cores * kBlockWords);
        SyncFunc<HardEvent::MTE2_S>();
        before_ = 0;
        for (uint32_t c = 0; c < core_; ++c) before_ += static_cast<uint32_t>(shared.GetValue(c * kBlockWords));
    }
    __aicore__ inline GlobalTensor<int32_t> Sums(uint32_t block, uint32_t blocks) const {
        return View<int32_t>(gm_.workspace + (block * kBlockWords) * sizeof(int32_t), blocks * kBlockWords);
    }

    // Window rows of this core's slots to the outputs: payload, scale and triple of every row by themselves.
    __aicore__ inline void LocalWindowCopy() {
        MOE_MARK(LocalWindowCopy);
        pipe_->InitBuffer(copyQueue_, 2, unit_);
        pipe_->InitBuffer(endBuf_, PaddedInts(Max(mine_, 1)) * sizeof(int32_t));
        uint32_t row = before_;
        for (uint32_t i = 0; i < mine_; ++i) {
            const uint32_t slot = first_ + i, count = static_cast<uint32_t>(countBuf_.Get<int32_t>().GetValue(i));
            for (uint32_t position = 0; position < count; ++position, ++row)
                CopyRow(Row(context_.data(info_->rank), slot % info_->world, slot / info_->world, position), row);
            endBuf_.Get<int32_t>().SetValue(i, static_cast<int32_t>(row));
        }
        SyncFunc<HardEvent::S_MTE3>();
        GlobalTensor<int32_t> counts = View<int32_t>(gm_.recvCounts, slots_);
        if (mine_ > 0) CopyOut(counts[first_], endBuf_.Get<int32_t>(), mine_);
        AscendC::PipeBarrier<PIPE_ALL>();
        if (info_->localExperts > 1) AscendC::SyncAll<true>();
        if (core_ + 1 == info_->cores) TokenNums(counts);
        AscendC::PipeBarrier<PIPE_ALL>();
    }
    __aicore__ inline void CopyRow(GM_ADDR from, uint32_t row) {
        const uint32_t rowBytes = info_->hidden * (quant_ ? sizeof(int8_t) : sizeof(XType));
        LocalTensor<int8_t> chunk = copyQueue_.AllocTensor<int8_t>();
        AscendC::DataCopy(chunk, Bytes(from, wire_ + 2 * kBlock), wire_ + 2 * kBlock);
        copyQueue_.EnQue(chunk);
        chunk = copyQueue_.DeQue<int8_t>();
        CopyOut(Bytes(gm_.expandX + static_cast<uint64_t>(row) * rowBytes, rowBytes), chunk, rowBytes);
        if (quant_) {
            CopyOut(Bytes(gm_.dynamicScales + static_cast<uint64_t>(row) * sizeof(float), sizeof(float)), chunk[wire_],
                    sizeof(float));
        }
        const uint32_t triple = kTripleWords * sizeof(int32_t);
        CopyOut(Bytes(gm_.triples + static_cast<uint64_t>(row) * triple, triple), chunk[wire_ + kBlock], triple);
        copyQueue_.FreeTensor(chunk);
    }
    __aicore__ inline void TokenNums(const GlobalTensor<int32_t>& counts) {
        pipe_->Reset();
        pipe_->InitBuffer(countBuf_, PaddedInts(slots_) * sizeof(int32_t));
        pipe_->InitBuffer(endBuf_, info_->localExperts * sizeof(int64_t) + kBlock);
        CopyIn(countBuf_.Get<int32_t>(), counts, slots_);
        SyncFunc<HardEvent::MTE2_S>();
        LocalTensor<int64_t> nums = endBuf_.Get<int64_t>();
        int32_t before = 0;
        for (uint32_t l = 0; l < info_->localExperts; ++l) {
            const int32_t end = countBuf_.Get<int32_t>().GetValue((l + 1) * info_->world - 1);
            nums.SetValue(l, numsType_ == 0 ? end : end - before);
            before = end;
        }
        SyncFunc<HardEvent::S_MTE3>();
        GlobalTensor<int64_t> out = View<int64_t>(gm_.tokenNums, info_->localExperts);
        CopyOut(out, nums, info_->localExperts);
    }

    DispatchTensors gm_;
    const MoeDistributeInfo* info_ = nullptr;
    TPipe* pipe_ = nullptr;
    WindowContext context_;
    EqualCount count_;
    FlagWait wait_;
    Quantizer quantizer_;
    AscendC::TQue<AscendC::QuePosition::VECIN, 1> inQueue_;
    AscendC::TQue<AscendC::QuePosition::VECOUT, 1> outQueue_;
    AscendC::TQueBind<AscendC::QuePosition::VECIN, AscendC::QuePosition::VECOUT, 1> copyQueue_;
    UbBuf idBuf_, statusBuf_, countBuf_, endBuf_;
    bool quant_ = false;
    uint32_t numsType_ = 1, core_ = 0, half_ = 0, wire_ = 0, unit_ = 0, slots_ = 0, first_ = 0, mine_ = 0, before_ = 0;
    uint64_t slotBytes_ = 0, rowsAt_ = 0;
};

// Combine in the style of CANN's A3 operator, from its public description: each row is pushed to the slot of
// its (token, k), followed by a 32-byte flag; the cores that own a token poll its K flags, clear them and
// sum. No SyncAll.
struct CombineTensors {
    GM_ADDR expandX;
    GM_ADDR triples;
    GM_ADDR sendCounts;
    GM_ADDR scales;
    GM_ADDR x;
};

class CannStyleCombine {
public:
    __aicore__ inline void Init(const CombineTensors& tensors, const MoeDistributeCombineTiling& tiling) {
        gm_ = tensors;
        info_ = &tiling.info;
        core_ = static_cast<uint32_t>(AscendC::GetBlockIdx());
        context_.Init(AscendC::GetHcclContext<0>(), *info_);
        context_.Check();
        rowBytes_ = static_cast<uint32_t>(info_->hidden * sizeof(XType));
        slotBytes_ = AlignTo(rowBytes_, 512);
        half_ = TakeHalf(context_, kCombinePhase, core_);
        rowsAt_ = kStatusBytes + half_ * ((info_->dataBytes - kStatusBytes) / 2 / 512 * 512);
    }
    __aicore__ inline void Process(TPipe& pipe) {
        pipe_ = &pipe;
        Send();
        LocalWindowCopy();
    }

private:
    __aicore__ inline GlobalTensor<int8_t> Bytes(GM_ADDR at) const { return View<int8_t>(at, rowBytes_); }
    __aicore__ inline GlobalTensor<float> Flags(uint32_t rank, uint64_t slot, uint32_t blocks) const {
        return View<float>(context_.data(rank) + half_ * kHalfStatusBytes + kCombineFlags + slot * kBlock,
                           blocks * kBlockWords);
    }

    __aicore__ inline void Send() {
        MOE_MARK(SetWaitTpStatusAndDisPatch);
        const uint32_t slots = info_->world * info_->localExperts;
        pipe_->InitBuffer(totalBuf_, kBlock);
        GlobalTensor<int32_t> counts = View<int32_t>(gm_.sendCounts, slots);
        CopyIn(totalBuf_.Get<int32_t>(), counts[slots - 1], 1);
        SyncFunc<HardEvent::MTE2_S>();
        const uint32_t total = static_cast<uint32_t>(totalBuf_.Get<int32_t>().GetValue(0));
        const uint32_t begin = PartBegin(total, core_, info_->cores);
        const uint32_t rows = PartBegin(total, core_ + 1, info_->cores) - begin;
        if (rows == 0) return;
        pipe_->InitBuffer(tripleBuf_, PaddedInts(rows * kTripleWords) * sizeof(int32_t));
        pipe_->InitBuffer(flagBuf_, kBlock);
        pipe_->InitBuffer(copyQueue_, 2, static_cast<uint32_t>(CeilTo(rowBytes_, kBlock)));
        GlobalTensor<int32_t> triples =
            View<int32_t>(gm_.triples + (begin * kTripleWords) * sizeof(int32_t), rows * kTripleWords);
        CopyIn(tripleBuf_.Get<int32_t>(), triples, rows * kTripleWords);
        AscendC::Duplicate(flagBuf_.Get<float>(), 1.0f, kBlockWords);
        SyncFunc<HardEvent::V_MTE3>();
        SyncFunc<HardEvent::MTE2_S>();
        // Ranks begin at different rows, so that not all of them fall on one target first.
        const uint32_t turn = info_->rank % rows;
        for (uint32_t i = 0; i < rows; ++i) SendRow(begin, i + turn < rows ? i + turn : i + turn - rows);
        AscendC::PipeBarrier<PIPE_ALL>();
    }
    __aicore__ inline void SendRow(uint32_t begin, uint32_t i) {
        LocalTensor<int32_t> triple = tripleBuf_.Get<int32_t>();
        const uint32_t at = i * kTripleWords, target = static_cast<uint32_t>(triple.GetValue(at));
        const uint64_t slot = static_cast<uint64_t>(triple.GetValue(at + 1)) * info_->topK +
                              static_cast<uint32_t>(triple.GetValue(at + 2));
        LocalTensor<int8_t> row = copyQueue_.AllocTensor<int8_t>();
        CopyIn(row, Bytes(gm_.expandX + static_cast<uint64_t>(begin + i) * rowBytes_), rowBytes_);
        copyQueue_.EnQue(row);
        row = copyQueue_.DeQue<int8_t>();
        CopyOut(Bytes(context_.data(target) + rowsAt_ + slot * slotBytes_), row, rowBytes_);
        copyQueue_.FreeTensor(row);
        AscendC::PipeBarrier<PIPE_MTE3>();
        AscendC::DataCopy(Flags(target, slot, 1), flagBuf_.Get<float>(), kBlockWords);
    }

    __aicore__ inline void LocalWindowCopy() {
        MOE_MARK(LocalWindowCopy);
        pipe_->Reset();
        const uint32_t end = PartBegin(info_->batch, core_ + 1, info_->cores);
        const uint32_t begin = PartBegin(info_->batch, core_, info_->cores);
        if (begin == end) return;
        wait_.Init(*pipe_, info_->topK);
        pipe_->InitBuffer(scaleBuf_, PaddedInts((end - begin) * info_->topK) * sizeof(float));
        const uint32_t bytes = static_cast<uint32_t>(CeilTo(rowBytes_, kBlock));
        pipe_->InitBuffer(inQueue_, 2, bytes);
        pipe_->InitBuffer(outQueue_, 1, bytes);
        pipe_->InitBuffer(termBuf_, static_cast<uint32_t>(info_->hidden * sizeof(float)));
        pipe_->InitBuffer(sumBuf_, static_cast<uint32_t>(info_->hidden * sizeof(float)));
        GlobalTensor<float> scales = View<float>(gm_.scales, info_->batch * info_->topK);
        CopyIn(scaleBuf_.Get<float>(), scales[begin * info_->topK], (end - begin) * info_->topK);
        SyncFunc<HardEvent::MTE2_S>();
        for (uint32_t token = begin; token < end; ++token) {
            const uint64_t slot = static_cast<uint64_t>(token) * info_->topK;
            wait_.Wait(Flags(info_->rank, slot, info_->topK), info_->topK, kBlockWords);
            wait_.Clear(Flags(info_->rank, slot, info_->topK), info_->topK);
            SumToken(token, token - begin);
        }
        AscendC::PipeBarrier<PIPE_ALL>();
    }
    __aicore__ inline void SumToken(uint32_t token, uint32_t mine) {
        LocalTensor<float> sum = sumBuf_.Get<float>(), term = termBuf_.Get<float>();
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Duplicate(sum, 0.0f, info_->hidden);
        for (uint32_t k = 0; k < info_->topK; ++k) {
            const uint64_t slot = static_cast<uint64_t>(token) * info_->topK + k;
            LocalTensor<int8_t> row = inQueue_.AllocTensor<int8_t>();
            CopyIn(row, Bytes(context_.data(info_->rank) + rowsAt_ + slot * slotBytes_), rowBytes_);
            inQueue_.EnQue(row);
            row = inQueue_.DeQue<int8_t>();
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Cast(term, row.ReinterpretCast<XType>(), AscendC::RoundMode::CAST_NONE, info_->hidden);
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Muls(term, term, scaleBuf_.Get<float>().GetValue(mine * info_->topK + k), info_->hidden);
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Add(sum, sum, term, info_->hidden);
            inQueue_.FreeTensor(row);
        }
        AscendC::PipeBarrier<PIPE_V>();
        LocalTensor<XType> out = outQueue_.AllocTensor<XType>();
        AscendC::Cast(out, sum, AscendC::RoundMode::CAST_RINT, info_->hidden);
        outQueue_.EnQue(out);
        out = outQueue_.DeQue<XType>();
        CopyOut(Bytes(gm_.x + static_cast<uint64_t>(token) * rowBytes_), out.ReinterpretCast<int8_t>(), rowBytes_);
        outQueue_.FreeTensor(out);
    }

    CombineTensors gm_;
    const MoeDistributeInfo* info_ = nullptr;
    TPipe* pipe_ = nullptr;
    WindowContext context_;
    FlagWait wait_;
    AscendC::TQueBind<AscendC::QuePosition::VECIN, AscendC::QuePosition::VECOUT, 1> copyQueue_;
    AscendC::TQue<AscendC::QuePosition::VECIN, 1> inQueue_;
    AscendC::TQue<AscendC::QuePosition::VECOUT, 1> outQueue_;
    UbBuf totalBuf_, tripleBuf_, flagBuf_, scaleBuf_, termBuf_, sumBuf_;
    uint32_t core_ = 0, half_ = 0, rowBytes_ = 0;
    uint64_t slotBytes_ = 0, rowsAt_ = 0;
};

}  // namespace models

extern "C" void model_cann_style_dispatch(GM_ADDR x, GM_ADDR expertIds, GM_ADDR expandX, GM_ADDR dynamicScales,
                                          GM_ADDR triples, GM_ADDR tokenNums, GM_ADDR recvCounts, GM_ADDR workspace,
                                          GM_ADDR tilingGM) {
    GET_TILING_DATA_WITH_STRUCT(moe::MoeDistributeDispatchTiling, tiling, tilingGM);
    models::CannStyleDispatch op;
    op.Init({x, expertIds, expandX, dynamicScales, triples, tokenNums, recvCounts, workspace}, tiling);
    AscendC::TPipe pipe;
    op.Process(pipe);
}

extern "C" void model_cann_style_combine(GM_ADDR expandX, GM_ADDR triples, GM_ADDR sendCounts, GM_ADDR scales,
                                         GM_ADDR x, GM_ADDR tilingGM) {
    GET_TILING_DATA_WITH_STRUCT(moe::MoeDistributeCombineTiling, tiling, tilingGM);
    models::CannStyleCombine op;
    op.Init({expandX, triples, sendCounts, scales, x}, tiling);
    AscendC::TPipe pipe;
    op.Process(pipe);
}

// Of every data window, from its head.
extern "C" uint64_t model_cann_style_status_bytes() { return models::kStatusBytes; }
