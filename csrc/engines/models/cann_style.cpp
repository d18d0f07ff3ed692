// Models of kernels that are never shipped: they have the structure of the kernels whose times were
// published.
#include "cann_style_base.h"

#include "kernel_operator.h"

#include "cann_style_dispatch.h"

namespace models {

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

template <typename XType>
class CannStyleCombine {
public:
    __aicore__ inline void Init(const CombineTensors& tensors, const MoeDistributeCombineTiling& tiling) {
        gm_ = tensors;
        info_ = &tiling.info;
        core_ = static_cast<uint32_t>(AscendC::GetBlockIdx());
        context_.Init(AscendC::GetHcclContext<0>(), *info_);
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
    __aicore__ inline GlobalTensor<int8_t> Bytes(GM_ADDR at) const {
        GlobalTensor<int8_t> view;
        view.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(at), rowBytes_);
        return view;
    }
    __aicore__ inline GlobalTensor<float> Flags(uint32_t rank, uint64_t slot, uint32_t blocks) const {
        GlobalTensor<float> view;
        view.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(context_.data(rank) + half_ * kHalfStatusBytes +
                                                             kCombineFlags + slot * kBlock),
                             blocks * kBlockWords);
        return view;
    }

    __aicore__ inline void Send() {
        MOE_PHASE("SetWaitTpStatusAndDisPatch");
        const uint32_t slots = info_->world * info_->localExperts;
        pipe_->InitBuffer(totalBuf_, kBlock);
        GlobalTensor<int32_t> counts;
        counts.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(gm_.sendCounts), slots);
        CopyIn(totalBuf_.Get<int32_t>(), counts[slots - 1], 1);
        SyncFunc<HardEvent::MTE2_S>();
        const uint32_t total = static_cast<uint32_t>(totalBuf_.Get<int32_t>().GetValue(0));
        const uint32_t begin = PartBegin(total, core_, info_->cores);
        const uint32_t rows = PartBegin(total, core_ + 1, info_->cores) - begin;
        if (rows == 0) return;
        pipe_->InitBuffer(tripleBuf_, PaddedInts(rows * kTripleWords) * sizeof(int32_t));
        pipe_->InitBuffer(flagBuf_, kBlock);
        pipe_->InitBuffer(copyQueue_, 2, static_cast<uint32_t>(CeilTo(rowBytes_, kBlock)));
        GlobalTensor<int32_t> triples;
        triples.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(gm_.triples) + begin * kTripleWords,
                                rows * kTripleWords);
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
        LocalTensor<int8_t> row = copyQueue_.template AllocTensor<int8_t>();
        CopyIn(row, Bytes(gm_.expandX + static_cast<uint64_t>(begin + i) * rowBytes_), rowBytes_);
        copyQueue_.EnQue(row);
        row = copyQueue_.template DeQue<int8_t>();
        CopyOut(Bytes(context_.data(target) + rowsAt_ + slot * slotBytes_), row, rowBytes_);
        copyQueue_.FreeTensor(row);
        AscendC::PipeBarrier<PIPE_MTE3>();
        AscendC::DataCopy(Flags(target, slot, 1), flagBuf_.Get<float>(), kBlockWords);
    }

    __aicore__ inline void LocalWindowCopy() {
        MOE_PHASE("LocalWindowCopy");
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
        GlobalTensor<float> scales;
        scales.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(gm_.scales), info_->batch * info_->topK);
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
            LocalTensor<int8_t> row = inQueue_.template AllocTensor<int8_t>();
            CopyIn(row, Bytes(context_.data(info_->rank) + rowsAt_ + slot * slotBytes_), rowBytes_);
            inQueue_.EnQue(row);
            row = inQueue_.template DeQue<int8_t>();
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Cast(term, row.template ReinterpretCast<XType>(), AscendC::RoundMode::CAST_NONE,
                          info_->hidden);
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Muls(term, term, scaleBuf_.Get<float>().GetValue(mine * info_->topK + k), info_->hidden);
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Add(sum, sum, term, info_->hidden);
            inQueue_.FreeTensor(row);
        }
        AscendC::PipeBarrier<PIPE_V>();
        LocalTensor<XType> out = outQueue_.template AllocTensor<XType>();
        AscendC::Cast(out, sum, AscendC::RoundMode::CAST_RINT, info_->hidden);
        outQueue_.EnQue(out);
        out = outQueue_.template DeQue<XType>();
        CopyOut(Bytes(gm_.x + static_cast<uint64_t>(token) * rowBytes_),
                out.template ReinterpretCast<int8_t>(), rowBytes_);
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

extern "C" void model_cann_style_dispatch(GM_ADDR x, GM_ADDR expertIds, GM_ADDR, GM_ADDR, GM_ADDR,
                                          GM_ADDR expandX, GM_ADDR dynamicScales, GM_ADDR triples,
                                          GM_ADDR tokenNums, GM_ADDR recvCounts, GM_ADDR, GM_ADDR, GM_ADDR,
                                          GM_ADDR workspace, GM_ADDR tilingGM) {
    GET_TILING_DATA_WITH_STRUCT(moe::MoeDistributeDispatchTiling, tiling, tilingGM);
    const models::DispatchTensors tensors = {x,       expertIds, expandX,    dynamicScales,
                                             triples, tokenNums, recvCounts, workspace};
    AscendC::TPipe pipe;
    if (tiling.info.quantMode != 0) {
        models::CannStyleDispatch<bfloat16_t, true> op;
        op.Init(tensors, tiling);
        op.Process(pipe);
    } else {
        models::CannStyleDispatch<bfloat16_t, false> op;
        op.Init(tensors, tiling);
        op.Process(pipe);
    }
}

extern "C" void model_cann_style_combine(GM_ADDR expandX, GM_ADDR, GM_ADDR triples, GM_ADDR sendCounts,
                                         GM_ADDR scales, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR x,
                                         GM_ADDR, GM_ADDR, GM_ADDR tilingGM) {
    GET_TILING_DATA_WITH_STRUCT(moe::MoeDistributeCombineTiling, tiling, tilingGM);
    models::CannStyleCombine<bfloat16_t> op;
    op.Init({expandX, triples, sendCounts, scales, x}, tiling);
    AscendC::TPipe pipe;
    op.Process(pipe);
}
