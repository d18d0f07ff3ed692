// A token's sum, for all algorithms: its addends and where they lie, their loads in parts, and the sum: weighted and
// added in fp32, multiply then add, in the order of the addends, then rounded once and stored.
#ifndef ASCEND_MOE_COMMON_WEIGHTED_SUM_H
#define ASCEND_MOE_COMMON_WEIGHTED_SUM_H

#include "send.h"
#include "inputs.h"
#include "quantize.h"

namespace moe {

// The factors (a1, a2) of a const expert: its addend is a1 * ori_x[token] + a2 * v. const_expert_alpha_1 and _2 are the
// factors (C,), or vectors (C, H) whose products with the token's row give them: (a1, a2) = softmax(d1, d2).

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
    // Both products: element h is added to lane h mod kDotLanes, h ascending, so their bits do not depend on how cores
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

// A const expert has two addends, which are added to each other before they are weighted and added to the sum.
enum class AddendKind : uint32_t { kWhole, kFirst, kSecond };

struct Addend {
    GM_ADDR address;
    float weight;
    bool weighted;   // otherwise added as it is
    bool travelled;  // laid out as returned rows, otherwise like x
    AddendKind kind;
    float factor;  // of a const expert's two addends, before the weight
};

// The addends of a token's sum in their order: its rows by ascending k, then the shared expert's. Addends that never
// travelled are found here only. `Rows` finds rows of pairs: Load(begin, count) starts to load what it needs for a
// chunk of pairs, Place(routing, token, tokens) prepares it, and Address(routing, id, token, k, i) returns where the
// row of pair `i` of the chunk lies, or nullptr if it has not come.
template <typename XType, typename Rows>
class Addends {
public:
    // UB: weights of a chunk of pairs; ConstFactors if there are const experts.
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeCombineTiling& tiling,
                                const CombineArguments& arguments, Rows& rows) {
        info_ = &tiling.info;
        rows_ = &rows;
        sharedX_ = tiling.hasSharedExpertX != 0 ? arguments.sharedExpertX : nullptr;
        scales_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.expertScales), info_->batch * info_->topK);
        pipe.InitBuffer(scaleBuf_, AddendsUb(*info_, sizeof(XType)).weights);
        oriX_ = arguments.oriX;
        constV_ = arguments.constV;
        if (info_->alphaRank != 0) factors_.Init(pipe, *info_, arguments);
    }
    // Starts to load a chunk of at most ChunkTokens tokens from `token` on. The caller waits for MTE2.
    __aicore__ inline void Load(RoutingTable& routing, uint32_t token, uint32_t tokens) {
        first_ = token;
        tokens_ = tokens;
        const uint32_t begin = token * info_->topK, count = tokens * info_->topK;
        routing.pairs().Keep(begin, count);
        rows_->Load(begin, count);
        if (info_->hasWeights != 0) CopyIn(scaleBuf_.Get<float>(), scales_[begin], count);
    }
    __aicore__ inline void Place(RoutingTable& routing) { rows_->Place(routing, first_, tokens_); }
    __aicore__ inline uint32_t ChunkTokens() const { return moe::ChunkTokens(*info_); }
    __aicore__ inline uint32_t first() const { return first_; }
    __aicore__ inline uint32_t tokens() const { return tokens_; }

    // Goes to the first addend of a token of the chunk.
    __aicore__ inline void Begin(uint32_t token) {
        token_ = token;
        k_ = 0;
        active_ = second_ = false;
    }
    // Returns false if the token has no more addends.
    __aicore__ inline bool Next(RoutingTable& routing, Addend& addend) {
        if (second_) return NextSecond(addend);
        while (k_ < info_->topK) {
            const uint32_t k = k_++, i = (token_ - first_) * info_->topK + k;
            const int32_t id = routing.pairs().Id(i, token_);
            active_ = active_ || id != kInactive;
            addend.travelled = routing.pairs().Routed(id);
            if (!addend.travelled && !routing.pairs().Special(id)) continue;
            addend.kind = AddendKind::kWhole;
            addend.address = addend.travelled ? rows_->Address(routing, id, token_, k, i) : Special(id, addend);
            if (addend.address == nullptr) continue;
            addend.weighted = info_->hasWeights != 0;
            addend.weight = addend.weighted ? scaleBuf_.Get<float>().GetValue(i) : 1.0f;
            return true;
        }
        return NextLocal(addend);
    }

private:
    __aicore__ inline GM_ADDR RowOf(GM_ADDR rows, uint32_t row) const {
        return rows + static_cast<uint64_t>(row) * info_->hidden * sizeof(XType);
    }
    // The row of a special expert; nullptr for a zero expert.
    __aicore__ inline GM_ADDR Special(int32_t id, Addend& addend) {
        const uint32_t expert = static_cast<uint32_t>(id);
        if (expert < info_->firstCopy) return nullptr;
        if (expert >= info_->firstConst) {
            const_ = expert - info_->firstConst;
            factors_.Find(const_, token_, addend.factor, secondFactor_);
            addend.kind = AddendKind::kFirst;
            second_ = true;
        }
        return RowOf(oriX_, token_);
    }
    // The second addend of the const expert, with the first one's weight.
    __aicore__ inline bool NextSecond(Addend& addend) {
        second_ = false;
        addend.address = RowOf(constV_, const_);
        addend.kind = AddendKind::kSecond;
        addend.factor = secondFactor_;
        return true;
    }
    // This rank's local addend, for tokens with an active pair.
    __aicore__ inline bool NextLocal(Addend& addend) {
        if (k_ != info_->topK || !active_ || sharedX_ == nullptr) return false;
        ++k_;
        addend.address = RowOf(sharedX_, token_);
        addend.kind = AddendKind::kWhole;
        addend.weight = 1.0f;
        addend.weighted = addend.travelled = false;
        return true;
    }

    const MoeDistributeInfo* info_ = nullptr;
    Rows* rows_ = nullptr;
    GM_ADDR sharedX_ = nullptr;
    GlobalTensor<float> scales_;
    UbBuf scaleBuf_;
    uint32_t first_ = 0, tokens_ = 0;  // of the chunk
    uint32_t token_ = 0;
    uint32_t k_ = 0;       // of the next addend; topK: the local one
    bool active_ = false;  // whether a pair of the token is active
    ConstFactors<XType> factors_;
    GM_ADDR oriX_ = nullptr;
    GM_ADDR constV_ = nullptr;
    uint32_t const_ = 0;         // the const expert of the previous addend,
    float secondFactor_ = 0.0f;  // the factor of its second addend,
    bool second_ = false;        // and whether that is the next
};

// The parts of H that cores share while they sum. With kQuant returned rows are codes and scales: a part in UB has its
// codes first, and its scales after the codes of a whole part.
template <typename XType, bool kQuant>
class RowParts {
public:
    __aicore__ inline void Init(const MoeDistributeCombineTiling& tiling) {
        hidden_ = tiling.info.hidden;
        elements_ = tiling.partElements;
        parts_ = tiling.partsPerToken;
        flagged_ = tiling.info.rdmaFlags != 0;
        pieceBytes_ = SumPieceBytes(tiling.info, HasPlainAddends(tiling), elements_, sizeof(XType));
    }
    // Numbers the (token, part) of `batch` tokens from 0 on.
    __aicore__ inline uint32_t Items(uint32_t batch) const { return batch * parts_; }
    __aicore__ inline uint32_t Token(uint32_t item) const { return item / parts_; }
    __aicore__ inline uint32_t Part(uint32_t item) const { return item % parts_; }
    __aicore__ inline uint32_t Elements(uint32_t part) const { return Min(elements_, hidden_ - part * elements_); }
    // UB of a part of an addend.
    __aicore__ inline uint32_t PieceBytes() const { return pieceBytes_; }
    // Starts to load a part of an addend.
    __aicore__ inline void Load(const LocalTensor<int8_t>& piece, GM_ADDR addend, bool travelled, uint32_t part) const {
        if constexpr (kQuant) {
            if (travelled) {
                LoadCommQuant(piece, addend, part);
                return;
            }
        }
        const uint32_t bytes = static_cast<uint32_t>(Elements(part) * sizeof(XType));
        if (flagged_ && travelled) {
            LoadFlagged(piece, FlaggedPlace(addend, Column(part)), bytes);
            return;
        }
        GlobalTensor<int8_t> source;
        source.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(addend + Column(part)), bytes);
        AscendC::DataCopy(piece, source, bytes);
    }
    // Where the sum of a part of a token lies in `x`.
    __aicore__ inline GM_ADDR Place(GM_ADDR x, uint32_t token, uint32_t part) const {
        return x + static_cast<uint64_t>(token) * hidden_ * sizeof(XType) + Column(part);
    }

private:
    __aicore__ inline uint64_t Column(uint32_t part) const {
        return part * static_cast<uint64_t>(elements_) * sizeof(XType);
    }
    __aicore__ inline void LoadCommQuant(const LocalTensor<int8_t>& piece, GM_ADDR addend, uint32_t part) const {
        GlobalTensor<int8_t> row;
        row.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(addend), CommQuantRowBytes(hidden_));
        const uint32_t first = part * elements_, count = Elements(part);
        if (flagged_) {
            const uint32_t scales = BlockScalesOffset(hidden_) + first / kCodesOfScale * kScaleBytes;
            LoadFlagged(piece, FlaggedPlace(addend, first), PayloadBytes(count, 1));
            LoadFlagged(piece[elements_], FlaggedPlace(addend, scales),
                        PayloadBytes(count / kCodesOfScale, kScaleBytes));
            return;
        }
        if (parts_ == 1) {
            CopyIn(piece, row, BlockScalesOffset(hidden_) + count / kCodesOfScale * kScaleBytes);
            return;
        }
        AscendC::DataCopy(piece, row[first], PayloadBytes(count, 1));
        CopyIn(piece[elements_], row[BlockScalesOffset(hidden_) + first / kCodesOfScale * kScaleBytes],
               count / kCodesOfScale * kScaleBytes);
    }
    uint32_t hidden_ = 0;
    uint32_t elements_ = 0;  // of a part
    uint32_t parts_ = 1;     // of a token
    uint32_t pieceBytes_ = 0;
    bool flagged_ = false;  // rows that travelled lie in flagged blocks
};

template <typename XType, bool kQuant>
class WeightedSum {
public:
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeCombineTiling& tiling) {
        const WeightedSumUb ub(tiling, sizeof(XType));
        pipe.InitBuffer(outQueue_, Ring(ub.results), ub.result);
        pipe.InitBuffer(addendBuf_, ub.addend);
        if (ub.sum != 0) pipe.InitBuffer(sumBuf_, ub.sum);
        if (ub.mix != 0) pipe.InitBuffer(mixBuf_, ub.mix);
        if constexpr (kQuant) decoder_.Init(pipe, tiling.partElements);
        scalesAt_ = tiling.partElements;
    }
    // Starts the next sum, of so many elements, with zero.
    __aicore__ inline void Begin(uint32_t elements) {
        elements_ = elements;
        out_ = outQueue_.template AllocTensor<XType>();
        if constexpr (kFloat) {
            sum_ = out_;
        } else {
            sum_ = sumBuf_.template Get<float>();
        }
        AscendC::PipeBarrier<PIPE_V>();  // the previous sum's cast has read it
        AscendC::Duplicate(sum_, 0.0f, elements_);
    }
    // Adds the part of an addend that RowParts has loaded, times its weight if it is weighted.
    __aicore__ inline void Add(const LocalTensor<int8_t>& piece, const Addend& addend) {
        const LocalTensor<float> to = addendBuf_.template Get<float>();
        LocalTensor<XType> row = piece.template ReinterpretCast<XType>();
        AscendC::PipeBarrier<PIPE_V>();  // the previous addend has been added
        if (addend.kind != AddendKind::kWhole) {
            Mix(row, addend);
            return;
        }
        if constexpr (kQuant) {
            if (addend.travelled) {
                row = decoder_.Decode(piece, piece[scalesAt_].template ReinterpretCast<XType>(), to, elements_);
                AscendC::PipeBarrier<PIPE_V>();
            }
        }
        const LocalTensor<float> value = Scaled(to, row, addend.weight, addend.weighted);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Add(sum_, sum_, value, elements_);
    }
    // The sum, rounded to XType, until Drop: instead of Store.
    __aicore__ inline LocalTensor<XType> Take() {
        AscendC::PipeBarrier<PIPE_V>();
        if constexpr (!kFloat) AscendC::Cast(out_, sum_, AscendC::RoundMode::CAST_RINT, elements_);
        return out_;
    }
    __aicore__ inline void Drop() { outQueue_.FreeTensor(out_); }
    // Rounds the sum to XType and stores it at `x`.
    __aicore__ inline void Store(GM_ADDR x) {
        const uint32_t bytes = static_cast<uint32_t>(elements_ * sizeof(XType));
        Take();
        outQueue_.EnQue(out_);
        out_ = outQueue_.template DeQue<XType>();
        GlobalTensor<int8_t> target;
        target.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(x), bytes);
        AscendC::DataCopy(target, out_.template ReinterpretCast<int8_t>(), bytes);
        outQueue_.FreeTensor(out_);
    }

private:
    static constexpr bool kFloat = AscendC::IsSameType<XType, float>::value;

    // `row` in fp32, in `to` or in place, times `weight` if it is weighted.
    __aicore__ inline LocalTensor<float> Scaled(const LocalTensor<float>& to, const LocalTensor<XType>& row,
                                                float weight, bool weighted) {
        if constexpr (kFloat) {
            if (!weighted) return row;
            AscendC::Muls(to, row, weight, elements_);
        } else {
            AscendC::Cast(to, row, AscendC::RoundMode::CAST_NONE, elements_);
            AscendC::PipeBarrier<PIPE_V>();
            if (weighted) AscendC::Muls(to, to, weight, elements_);
        }
        return to;
    }
    // The first addend of a const expert waits for the second; they are added and then act as one.
    __aicore__ inline void Mix(const LocalTensor<XType>& row, const Addend& addend) {
        const LocalTensor<float> mixed = mixBuf_.template Get<float>(), second = addendBuf_.template Get<float>();
        const bool first = addend.kind == AddendKind::kFirst;
        Scaled(first ? mixed : second, row, addend.factor, true);
        if (first) return;
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Add(mixed, mixed, second, elements_);
        AscendC::PipeBarrier<PIPE_V>();
        if (addend.weighted) {
            AscendC::Muls(mixed, mixed, addend.weight, elements_);
            AscendC::PipeBarrier<PIPE_V>();
        }
        AscendC::Add(sum_, sum_, mixed, elements_);
    }

    AscendC::TQue<AscendC::QuePosition::VECOUT, 1> outQueue_;
    CommDecoder<XType> decoder_;
    UbBuf addendBuf_, sumBuf_, mixBuf_;
    LocalTensor<XType> out_;
    LocalTensor<float> sum_;
    uint32_t elements_ = 0;
    uint32_t scalesAt_ = 0;  // bytes of a part's codes
};

// Adds the part of an addend; it is loaded through the queue.
template <typename Queue, typename Parts, typename Sum>
__aicore__ inline void AddPart(Queue& queue, const Parts& parts, Sum& sum, const Addend& addend, uint32_t part) {
    LocalTensor<int8_t> piece = queue.template AllocTensor<int8_t>();
    parts.Load(piece, addend.address, addend.travelled, part);
    queue.EnQue(piece);
    piece = queue.template DeQue<int8_t>();
    sum.Add(piece, addend);
    queue.FreeTensor(piece);
}

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_WEIGHTED_SUM_H
