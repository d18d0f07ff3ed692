// The end of a token's sum, for both algorithms: rows that are in UB are weighted and added in fp32, in the
// order of the calls; then the sum is rounded once and stored.
#ifndef ASCEND_MOE_COMMON_WEIGHTED_SUM_H
#define ASCEND_MOE_COMMON_WEIGHTED_SUM_H

#include "base.h"

namespace moe {

template <typename XType>
class WeightedSum {
public:
    // UB for parts of `elements`: two results (one in fp32), a weighted row, and the sum unless it is fp32 as
    // the result is.
    __aicore__ inline void Init(TPipe& pipe, uint32_t elements) {
        const uint32_t bytes = static_cast<uint32_t>(elements * sizeof(XType));
        pipe.InitBuffer(outQueue_, kFloat ? 1 : 2, bytes);
        pipe.InitBuffer(termBuf_, static_cast<uint32_t>(elements * sizeof(float)));
        if (!kFloat) pipe.InitBuffer(sumBuf_, static_cast<uint32_t>(elements * sizeof(float)));
    }
    // The next sum is zero and has so many elements.
    __aicore__ inline void Begin(uint32_t elements) {
        elements_ = elements;
        out_ = outQueue_.template AllocTensor<XType>();
        if constexpr (kFloat) {
            sum_ = out_;
        } else {
            sum_ = sumBuf_.template Get<float>();
        }
        AscendC::PipeBarrier<PIPE_V>();  // the cast of the sum before has read it
        AscendC::Duplicate(sum_, 0.0f, elements_);
    }
    // Adds a row, times `weight` when it is weighted.
    __aicore__ inline void Add(const LocalTensor<XType>& row, float weight, bool weighted) {
        LocalTensor<float> term = termBuf_.template Get<float>();
        AscendC::PipeBarrier<PIPE_V>();  // the term of the row before has been added
        if constexpr (kFloat) {
            if (weighted) {
                AscendC::Muls(term, row, weight, elements_);
            } else {
                term = row;
            }
        } else {
            AscendC::Cast(term, row, AscendC::RoundMode::CAST_NONE, elements_);
            AscendC::PipeBarrier<PIPE_V>();
            if (weighted) AscendC::Muls(term, term, weight, elements_);
        }
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Add(sum_, sum_, term, elements_);
    }
    // Rounds the sum to XType and stores it at `x`.
    __aicore__ inline void Store(GM_ADDR x) {
        const uint32_t bytes = static_cast<uint32_t>(elements_ * sizeof(XType));
        AscendC::PipeBarrier<PIPE_V>();
        if constexpr (!kFloat) AscendC::Cast(out_, sum_, AscendC::RoundMode::CAST_RINT, elements_);
        outQueue_.EnQue(out_);
        out_ = outQueue_.template DeQue<XType>();
        GlobalTensor<int8_t> target;
        target.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(x), bytes);
        AscendC::DataCopy(target, out_.template ReinterpretCast<int8_t>(), bytes);
        outQueue_.FreeTensor(out_);
    }

private:
    static constexpr bool kFloat = AscendC::IsSameType<XType, float>::value;

    AscendC::TQue<AscendC::QuePosition::VECOUT, 1> outQueue_;
    UbBuf termBuf_, sumBuf_;
    LocalTensor<XType> out_;
    LocalTensor<float> sum_;
    uint32_t elements_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_WEIGHTED_SUM_H
