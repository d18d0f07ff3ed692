// The factors (a1, a2) of a const expert: its term is a1 * ori_x[token] + a2 * v. const_expert_alpha_1 and _2 are the
// factors themselves, (C,), or vectors, (C, H), whose products with the token's row decide: (a1, a2) = softmax(d1, d2).
#ifndef ASCEND_MOE_COMMON_CONST_EXPERTS_H
#define ASCEND_MOE_COMMON_CONST_EXPERTS_H

#include "inputs.h"

namespace moe {

template <typename XType>
class ConstFactors {
public:
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, const CombineArguments& arguments) {
        info_ = &info;
        oriX_ = arguments.oriX;
        alpha_[0] = arguments.constAlpha1;
        alpha_[1] = arguments.constAlpha2;
        const uint32_t bytes = ConstFactorBytes(info.alphaRank, sizeof(XType));
        pipe.InitBuffer(buf_, bytes);
        lanes_ = info.alphaRank == 2 ? kDotLanes : kBlockWords;
        const uint32_t given = static_cast<uint32_t>(CeilTo(lanes_ * sizeof(XType), kBlock));
        for (uint32_t i = 0; i < kTensors; ++i) {
            given_[i] = buf_.Get<int8_t>()[i * given].template ReinterpretCast<XType>();
            if constexpr (kFloat) {
                wide_[i] = given_[i];
            } else {
                wide_[i] = buf_.Get<int8_t>()[kTensors * given].template ReinterpretCast<float>()[i * lanes_];
            }
        }
        for (uint32_t i = 0; i < 2; ++i)
            sums_[i] =
                buf_.Get<int8_t>()[bytes - 2 * lanes_ * sizeof(float)].template ReinterpretCast<float>()[i * lanes_];
    }
    // Of const expert `expert` for `token`.
    __aicore__ inline void Find(uint32_t expert, uint32_t token, float& a1, float& a2) {
        SyncFunc<HardEvent::V_MTE2>();
        SyncFunc<HardEvent::S_MTE2>();
        SyncFunc<HardEvent::S_V>();
        if (info_->alphaRank == 1) {
            for (uint32_t i = 0; i < 2; ++i) Load(i, alpha_[i], expert, 1);
            if constexpr (kFloat) {
                SyncFunc<HardEvent::MTE2_S>();
            } else {
                SyncFunc<HardEvent::MTE2_V>();
                for (uint32_t i = 0; i < 2; ++i) Widen(i, 1);
                SyncFunc<HardEvent::V_S>();
            }
            a1 = wide_[0].GetValue(0);
            a2 = wide_[1].GetValue(0);
            return;
        }
        Multiply(expert, token);
        const float d1 = SumOf(0), d2 = SumOf(1);
        Softmax(d2 - d1, d1 - d2, a1, a2);
    }

private:
    static constexpr bool kFloat = AscendC::IsSameType<XType, float>::value;
    static constexpr uint32_t kTensors = 3;  // alpha_1, alpha_2, ori_x

    __aicore__ inline void Load(uint32_t i, GM_ADDR tensor, uint64_t first, uint32_t count) {
        GlobalTensor<XType> source;
        source.SetGlobalBuffer(reinterpret_cast<__gm__ XType*>(tensor) + first, count);
        CopyIn(given_[i], source, count);
    }
    __aicore__ inline void Widen(uint32_t i, uint32_t count) {
        if constexpr (!kFloat) AscendC::Cast(wide_[i], given_[i], AscendC::RoundMode::CAST_NONE, count);
    }
    // Both products: element h is added to lane h mod kDotLanes, h ascending. So their bits do not depend on how cores
    // share H.
    __aicore__ inline void Multiply(uint32_t expert, uint32_t token) {
        AscendC::Duplicate(sums_[0], 0.0f, static_cast<int32_t>(2 * kDotLanes));
        const uint64_t alpha = static_cast<uint64_t>(expert) * info_->hidden;
        const uint64_t row = static_cast<uint64_t>(token) * info_->hidden;
        for (uint32_t at = 0; at < info_->hidden; at += kDotLanes) {
            const uint32_t count = Min(kDotLanes, info_->hidden - at);
            if (at != 0) SyncFunc<HardEvent::V_MTE2>();
            for (uint32_t i = 0; i < 2; ++i) Load(i, alpha_[i], alpha + at, count);
            Load(2, oriX_, row + at, count);
            SyncFunc<HardEvent::MTE2_V>();
            for (uint32_t i = 0; i < kTensors; ++i) Widen(i, count);
            AscendC::PipeBarrier<PIPE_V>();
            for (uint32_t i = 0; i < 2; ++i) AscendC::Mul(wide_[i], wide_[i], wide_[2], count);
            AscendC::PipeBarrier<PIPE_V>();
            for (uint32_t i = 0; i < 2; ++i) AscendC::Add(sums_[i], sums_[i], wide_[i], count);
        }
        for (uint32_t half = kDotLanes / 2; half >= kBlockWords; half /= 2) {
            AscendC::PipeBarrier<PIPE_V>();
            for (uint32_t i = 0; i < 2; ++i) AscendC::Add(sums_[i], sums_[i], sums_[i][half], half);
        }
        SyncFunc<HardEvent::V_S>();
    }
    __aicore__ inline float SumOf(uint32_t i) const {
        float sum = sums_[i].GetValue(0);
        for (uint32_t lane = 1; lane < kBlockWords; ++lane) sum = sum + sums_[i].GetValue(lane);
        return sum;
    }
    // 1 / (1 + exp(power)) of both.
    __aicore__ inline void Softmax(float power1, float power2, float& a1, float& a2) {
        const LocalTensor<float> share = sums_[0], one = sums_[1];
        share.SetValue(0, power1);
        share.SetValue(1, power2);
        SyncFunc<HardEvent::S_V>();
        AscendC::Exp(share, share, 2);
        AscendC::Duplicate(one, 1.0f, 2);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Adds(share, share, 1.0f, 2);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Div(share, one, share, 2);
        SyncFunc<HardEvent::V_S>();
        a1 = share.GetValue(0);
        a2 = share.GetValue(1);
    }

    const MoeDistributeInfo* info_ = nullptr;
    GM_ADDR oriX_ = nullptr;
    GM_ADDR alpha_[2] = {};
    UbBuf buf_;
    LocalTensor<XType> given_[kTensors];  // as loaded
    LocalTensor<float> wide_[kTensors];   // the same in fp32
    LocalTensor<float> sums_[2];          // of the products
    uint32_t lanes_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_CONST_EXPERTS_H
