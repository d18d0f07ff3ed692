// The modelled kernels' own quantisation: what the shipped ones do may change, published times do not.
#pragma once

#include "cann_style_base.h"

namespace models {

// Per token: s = 127 / max|v|, q = rint(v * s), scale = 1 / s, behind the codes.
template <typename XType>
class Quantizer {
public:
    __aicore__ inline void Init(TPipe& pipe, uint32_t hidden) {
        hidden_ = hidden;
        payload_ = PayloadBytes(hidden, sizeof(int8_t));
        const uint32_t bytes = static_cast<uint32_t>(CeilTo(hidden * sizeof(float), kBlock));
        pipe.InitBuffer(valueBuf_, bytes);
        pipe.InitBuffer(scratchBuf_, bytes);
        pipe.InitBuffer(reduceBuf_, kBlock + static_cast<uint32_t>(
                                                 CeilTo(2 * CeilDiv(hidden, 64) * sizeof(float), kBlock)));
    }
    __aicore__ inline void Quantize(const LocalTensor<int8_t>& wire, const LocalTensor<XType>& row) {
        LocalTensor<float> value = valueBuf_.Get<float>(hidden_), magnitude = scratchBuf_.Get<float>(hidden_);
        LocalTensor<float> reduced = reduceBuf_.Get<float>(kBlockWords);
        AscendC::Cast(value, row, AscendC::RoundMode::CAST_NONE, hidden_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Abs(magnitude, value, hidden_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::ReduceMax(reduced, magnitude, reduceBuf_.Get<float>()[kBlockWords],
                           static_cast<int32_t>(hidden_), false);
        SyncFunc<HardEvent::V_S>();
        const float largest = reduced.GetValue(0), inverse = largest == 0.0f ? 1.0f : 127.0f / largest;
        SyncFunc<HardEvent::S_V>();
        AscendC::Muls(value, value, inverse, hidden_);
        AscendC::PipeBarrier<PIPE_V>();
        LocalTensor<int32_t> code = value.template ReinterpretCast<int32_t>();
        AscendC::Cast(code, value, AscendC::RoundMode::CAST_RINT, hidden_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::SetDeqScale(static_cast<half>(1.0f));
        LocalTensor<half> narrow = magnitude.template ReinterpretCast<half>();
        AscendC::Cast(narrow, code, AscendC::RoundMode::CAST_NONE, hidden_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(wire, narrow, AscendC::RoundMode::CAST_TRUNC, hidden_);
        LocalTensor<float> tail =
            wire.ReinterpretCast<float>()[static_cast<uint32_t>(payload_ / sizeof(float))];
        tail.SetValue(0, 1.0f / inverse);
        for (uint32_t i = 1; i < kBlockWords; ++i) tail.SetValue(i, 0.0f);
    }

private:
    UbBuf valueBuf_, scratchBuf_, reduceBuf_;
    uint32_t hidden_ = 0, payload_ = 0;
};

}  // namespace models
