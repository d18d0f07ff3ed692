// Makes the rows that travel ("wire rows"): plain, or int8 with an fp32 scale per token (quant_mode 2). Add new
// quantizations of rows here.
#ifndef ASCEND_MOE_COMMON_QUANTIZE_H
#define ASCEND_MOE_COMMON_QUANTIZE_H

#include "base.h"

namespace moe {

// rint of `count` values within -127..127, which are overwritten. Integers pass through `narrow` exactly.
__aicore__ inline void RoundToInt8(const LocalTensor<int8_t>& wire, const LocalTensor<float>& value,
                                   const LocalTensor<half>& narrow, uint32_t count) {
    LocalTensor<int32_t> code = value.ReinterpretCast<int32_t>();
    AscendC::Cast(code, value, AscendC::RoundMode::CAST_RINT, count);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::SetDeqScale(static_cast<half>(1.0f));
    AscendC::Cast(narrow, code, AscendC::RoundMode::CAST_NONE, count);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Cast(wire, narrow, AscendC::RoundMode::CAST_TRUNC, count);
}

// Per-token dynamic quantization in UB: s = 127 / max|v|, q = rint(v * s), scale = 1 / s with v = x [* smooth]. A row
// longer than `piece` elements is read twice in pieces, for the maximum and for the codes; the bits are the same.
class RowQuantizer {
public:
    // UB: three fp32 pieces at most, and the reduction's scratch.
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, GM_ADDR scales, uint32_t piece) {
        hidden_ = info.hidden;
        type_ = info.xType;
        smooth_ = info.hasScales != 0;
        piece_ = piece;
        payload_ = PayloadBytes(info.hidden, sizeof(int8_t));
        const RowQuantizerUb ub(hidden_, piece_, smooth_);
        pipe.InitBuffer(valueBuf_, ub.values);
        pipe.InitBuffer(scratchBuf_, ub.values);
        pipe.InitBuffer(reduceBuf_, ub.reduce);
        if (smooth_) {
            pipe.InitBuffer(smoothBuf_, ub.smooth);
            scales_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(scales),
                                    static_cast<uint64_t>(info.experts) * hidden_);
        }
    }

    // `wire`: payload, then the block with the scale. The caller orders MTE2 before this (row) and V, S before MTE3
    // (wire). Padding after the codes and after the scale travels and is never read.
    __aicore__ inline void Quantize(const LocalTensor<int8_t>& wire, const LocalTensor<int8_t>& row, uint32_t expert) {
        const float largest = Largest(row, expert);
        float scale = 1.0f;
        if (largest == 0.0f) {
            // An all-zero row has codes 0 and scale 1.
            AscendC::Duplicate(wire.ReinterpretCast<int16_t>(), static_cast<int16_t>(0), payload_ / sizeof(int16_t));
        } else {
            const float inverse = 127.0f / largest;
            scale = 1.0f / inverse;
            for (uint32_t at = 0; at < hidden_; at += piece_) {
                const uint32_t count = Min(piece_, hidden_ - at);
                if (piece_ < hidden_) Widen(row, expert, at, count);
                Encode(wire[at], inverse, count);
            }
        }
        wire.ReinterpretCast<float>().SetValue(static_cast<uint32_t>(payload_ / sizeof(float)), scale);
    }

private:
    // max|v| of the row. For a row in one piece the values stay for Encode.
    __aicore__ inline float Largest(const LocalTensor<int8_t>& row, uint32_t expert) {
        LocalTensor<float> value = valueBuf_.Get<float>(), magnitude = scratchBuf_.Get<float>();
        // The maximum, the maxima of pieces, scratch.
        LocalTensor<float> reduced = reduceBuf_.Get<float>();
        LocalTensor<float> ofPiece = reduced[kBlockWords];
        LocalTensor<float> scratch = ofPiece[QuantMaximaWords(hidden_, piece_)];
        uint32_t pieces = 0;
        for (uint32_t at = 0; at < hidden_; at += piece_, ++pieces) {
            const uint32_t count = Min(piece_, hidden_ - at);
            Widen(row, expert, at, count);
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Abs(magnitude, value, count);
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::ReduceMax(ofPiece[pieces], magnitude, scratch, static_cast<int32_t>(count), false);
        }
        if (pieces > 1) {
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::ReduceMax(reduced, ofPiece, scratch, static_cast<int32_t>(pieces), false);
        }
        SyncFunc<HardEvent::V_S>();
        const float largest = (pieces > 1 ? reduced : ofPiece).GetValue(0);
        SyncFunc<HardEvent::S_V>();  // the next row's maximum goes to the same place
        return largest;
    }
    __aicore__ inline void Encode(const LocalTensor<int8_t>& wire, float inverse, uint32_t count) {
        LocalTensor<float> value = valueBuf_.Get<float>();
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Muls(value, value, inverse, count);
        AscendC::PipeBarrier<PIPE_V>();
        RoundToInt8(wire, value, scratchBuf_.Get<half>(), count);
    }
    // Computes v for `count` elements from `at` on.
    __aicore__ inline void Widen(const LocalTensor<int8_t>& row, uint32_t expert, uint32_t at, uint32_t count) {
        LocalTensor<float> value = valueBuf_.Get<float>();
        if (smooth_) {
            SyncFunc<HardEvent::V_MTE2>();
            CopyIn(smoothBuf_.Get<float>(), scales_[static_cast<uint64_t>(expert) * hidden_ + at], count);
            SyncFunc<HardEvent::MTE2_V>();
        }
        AscendC::PipeBarrier<PIPE_V>();  // the previous piece has been read
        if (type_ == kTypeFp32) {
            const LocalTensor<float> from = row.ReinterpretCast<float>()[at];
            if (smooth_) {
                AscendC::Mul(value, from, smoothBuf_.Get<float>(), count);
            } else {
                AscendC::DataCopy(value, from, static_cast<uint32_t>(CeilTo(count, kBlockWords)));
            }
            return;
        }
        if (type_ == kTypeFp16) {
            AscendC::Cast(value, row.ReinterpretCast<half>()[at], AscendC::RoundMode::CAST_NONE, count);
        } else {
            AscendC::Cast(value, row.ReinterpretCast<bfloat16_t>()[at], AscendC::RoundMode::CAST_NONE, count);
        }
        if (smooth_) {
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Mul(value, value, smoothBuf_.Get<float>(), count);
        }
    }

    GlobalTensor<float> scales_;
    UbBuf valueBuf_, scratchBuf_, smoothBuf_, reduceBuf_;
    uint32_t hidden_ = 0;
    uint32_t type_ = 0;  // of x; not a template's: one body serves all types and both kinds of scales
    bool smooth_ = false;
    uint32_t piece_ = 0;
    uint32_t payload_ = 0;
};

constexpr uint32_t kMostStarted = 4;  // rows whose loads may start before the first is fetched

// Provides wire rows of tokens. Reads and quantizes a token once for consecutive pairs with equal wire rows.
template <bool kQuant>
class RowLoader {
public:
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeDispatchTiling& tiling, GM_ADDR x, GM_ADDR scales) {
        const MoeDistributeInfo& info = tiling.info;
        const uint32_t size = ElementBytes(info);
        const RowLoaderUb ub(tiling, size);
        const uint8_t ring = Ring(ub.ring);
        hidden_ = info.hidden;
        smooth_ = info.hasScales != 0;
        rowBytes_ = hidden_ * size;
        x_.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(x), static_cast<uint64_t>(info.batch) * rowBytes_);
        if constexpr (kQuant) {
            pipe.InitBuffer(inQueue_, ring, ub.row);
            pipe.InitBuffer(outQueue_, ring, ub.wire);
            quantizer_.Init(pipe, info, scales, tiling.quantPiece);
        } else {
            pipe.InitBuffer(copyQueue_, ring, ub.row);
        }
    }
    __aicore__ inline LocalTensor<int8_t> Fetch(uint32_t token, uint32_t expert) {
        if (held_ && token == token_ && (!smooth_ || expert == expert_)) return row_;
        Release();
        token_ = token;
        expert_ = expert;
        held_ = true;
        const GlobalTensor<int8_t> source = RowOf(token);
        if constexpr (kQuant) {
            if (started_ == 0) {
                Load(source);
            } else {
                --started_;
            }
            LocalTensor<int8_t> in = inQueue_.template DeQue<int8_t>();
            LocalTensor<int8_t> out = outQueue_.template AllocTensor<int8_t>();
            // The queue makes V wait for the last store from this tensor; S writes the scale after V's maximum.
            quantizer_.Quantize(out, in, expert);
            inQueue_.FreeTensor(in);
            outQueue_.EnQue(out);
            row_ = outQueue_.template DeQue<int8_t>();
            SyncFunc<HardEvent::S_MTE3>();
        } else {
            LocalTensor<int8_t> row = copyQueue_.template AllocTensor<int8_t>();
            AscendC::DataCopy(row, source, rowBytes_);
            copyQueue_.EnQue(row);
            row_ = copyQueue_.template DeQue<int8_t>();
        }
        return row_;
    }
    // Starts to load a row. Rows must be fetched in the order of Start, with fewer in flight than the ring holds.
    __aicore__ inline void Start(uint32_t token) {
        Load(RowOf(token));
        ++started_;
    }
    // Rows started and not yet fetched.
    __aicore__ inline uint32_t started() const { return started_; }
    __aicore__ inline void Release() {
        if (!held_) return;
        held_ = false;
        if constexpr (kQuant) {
            outQueue_.FreeTensor(row_);
        } else {
            copyQueue_.FreeTensor(row_);
        }
    }
    // Payload, and the scale block when quantized.
    __aicore__ inline uint32_t WireBytes() const {
        return kQuant ? PayloadBytes(hidden_, sizeof(int8_t)) + kBlock : rowBytes_;
    }

private:
    __aicore__ inline GlobalTensor<int8_t> RowOf(uint32_t token) const {
        return x_[static_cast<uint64_t>(token) * rowBytes_];
    }
    __aicore__ inline void Load(const GlobalTensor<int8_t>& source) {
        const LocalTensor<int8_t> in = inQueue_.template AllocTensor<int8_t>();
        AscendC::DataCopy(in, source, rowBytes_);
        inQueue_.EnQue(in);
    }

    GlobalTensor<int8_t> x_;
    AscendC::TQue<AscendC::QuePosition::VECIN, kMostStarted> inQueue_;
    AscendC::TQue<AscendC::QuePosition::VECOUT, 1> outQueue_;
    AscendC::TQueBind<AscendC::QuePosition::VECIN, AscendC::QuePosition::VECOUT, 1> copyQueue_;
    RowQuantizer quantizer_;
    LocalTensor<int8_t> row_;
    uint32_t hidden_ = 0;
    uint32_t rowBytes_ = 0;
    uint32_t token_ = 0;
    uint32_t expert_ = 0;
    uint32_t started_ = 0;  // rows in flight, fetched next
    bool smooth_ = false;   // rows differ by expert
    bool held_ = false;
};

// ---- comm_quant_mode 2: rows on the return path ----

// Quantizes a row by blocks of kCodesOfScale elements: b = max|v| * (1/127), q = rint(fp16(v / b)); b travels rounded
// to the type of rows. A block of zeros has codes 0 and scale 0.
template <typename XType>
class CommQuantizer {
public:
    // UB: two tables of fp32 values of a piece, and their scales.
    __aicore__ inline void Init(TPipe& pipe, uint32_t hidden, uint32_t piece) {
        hidden_ = hidden;
        piece_ = piece;
        const uint32_t lanes = CommQuantLanes(piece);
        const CommQuantizerUb ub(piece);
        pipe.InitBuffer(valueBuf_, ub.values);
        pipe.InitBuffer(scratchBuf_, ub.values);
        pipe.InitBuffer(scaleBuf_, ub.scales);
        // Blocks after a piece, up to a whole repeat, have maxima too, which are never read.
        AscendC::Duplicate(scratchBuf_.Get<float>(), 0.0f, static_cast<int32_t>(lanes));
    }
    // Quantizes the piece of a row of x that begins at element `at` into its places in `wire`. The caller orders MTE2
    // before this (row), and V before MTE3 (wire). Padding after the codes and after the scales travels and is never
    // read.
    __aicore__ inline void Quantize(const LocalTensor<int8_t>& wire, const LocalTensor<XType>& row, uint32_t at) {
        const LocalTensor<int8_t> scales = wire[BlockScalesOffset(hidden_) + at / kCodesOfScale * kScaleBytes];
        QuantizePiece(wire[at], scales.template ReinterpretCast<XType>(), row, Elements(at));
    }
    __aicore__ inline uint32_t Elements(uint32_t at) const { return Min(piece_, hidden_ - at); }

private:
    // Replaces a scale of 0, because 0 / 0 is no code. Every other scale, also of the least bf16, is at least 2^-140
    // and stays: kInstead - scale * kHuge is less. No number here is subnormal; if a unit flushes such scales to 0,
    // their rows have codes 0.
    static constexpr float kInstead = 0x1p-20f, kHuge = 0x1p127f;

    __aicore__ inline void QuantizePiece(const LocalTensor<int8_t>& codes, const LocalTensor<XType>& scales,
                                         const LocalTensor<XType>& row, uint32_t count) {
        LocalTensor<float> value = valueBuf_.Get<float>(), scratch = scratchBuf_.Get<float>();
        LocalTensor<float> scale = scaleBuf_.Get<float>();
        const int32_t repeats = static_cast<int32_t>(CommQuantLanes(count) / kRepeatWords);
        const uint32_t blocks = count / kCodesOfScale;
        AscendC::PipeBarrier<PIPE_V>();  // the previous piece has been read
        AscendC::Cast(value, row, AscendC::RoundMode::CAST_NONE, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Abs(scratch, value, static_cast<int32_t>(count));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::BlockReduceMax(scale, scratch, repeats, static_cast<int32_t>(kRepeatWords), 1, 1, kBlockWords);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Muls(scale, scale, 1.0f / 127.0f, static_cast<int32_t>(blocks));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(scales, scale, AscendC::RoundMode::CAST_RINT, blocks);
        AscendC::Muls(scratch, scale, -kHuge, static_cast<int32_t>(blocks));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Adds(scratch, scratch, kInstead, static_cast<int32_t>(blocks));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Max(scale, scale, scratch, static_cast<int32_t>(blocks));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Brcb(scratch, scale, Repeats(CommQuantLanes(count) / kRepeatWords), {1, kBlockWords});
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Div(value, value, scratch, static_cast<int32_t>(count));
        AscendC::PipeBarrier<PIPE_V>();
        const LocalTensor<half> narrow = scratch.ReinterpretCast<half>();  // CANN rounds twice: to fp16, then to int8
        AscendC::Cast(narrow, value, AscendC::RoundMode::CAST_RINT, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(codes, narrow, AscendC::RoundMode::CAST_RINT, count);
    }

    UbBuf valueBuf_, scratchBuf_, scaleBuf_;
    uint32_t hidden_ = 0;
    uint32_t piece_ = 0;
};

// Decodes rows of CommQuantizer: code times scale, rounded to the type of rows.
template <typename XType>
class CommDecoder {
public:
    // UB for `elements`: two tables, of the type of rows and in fp32, and the scales.
    __aicore__ inline void Init(TPipe& pipe, uint32_t elements) {
        const uint32_t lanes = CommQuantLanes(elements);
        const CommDecoderUb ub(elements, sizeof(XType));
        pipe.InitBuffer(rowBuf_, ub.row);
        pipe.InitBuffer(wideBuf_, ub.wide);
        pipe.InitBuffer(scaleBuf_, ub.scales);
        // Scales after those of a part, up to a whole repeat, are unused.
        AscendC::Duplicate(scaleBuf_.Get<float>(), 0.0f, static_cast<int32_t>(lanes / kCodesOfScale));
    }
    // The decoded row, valid until the next call. `value`: fp32 scratch. The caller waits for V's earlier work.
    __aicore__ inline LocalTensor<XType> Decode(const LocalTensor<int8_t>& codes, const LocalTensor<XType>& scales,
                                                const LocalTensor<float>& value, uint32_t count) {
        LocalTensor<half> narrow = rowBuf_.Get<half>();
        LocalTensor<float> scale = scaleBuf_.Get<float>(), wide = wideBuf_.Get<float>();
        AscendC::Cast(narrow, codes, AscendC::RoundMode::CAST_NONE, count);
        AscendC::Cast(scale, scales, AscendC::RoundMode::CAST_NONE, count / kCodesOfScale);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(value, narrow, AscendC::RoundMode::CAST_NONE, count);
        AscendC::Brcb(wide, scale, Repeats(CommQuantLanes(count) / kRepeatWords), {1, kBlockWords});
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mul(value, value, wide, static_cast<int32_t>(count));
        AscendC::PipeBarrier<PIPE_V>();
        LocalTensor<XType> row = rowBuf_.Get<XType>();
        AscendC::Cast(row, value, AscendC::RoundMode::CAST_RINT, count);
        return row;
    }

private:
    UbBuf rowBuf_, wideBuf_, scaleBuf_;
};

// Chunks of rows of expand_x as they return: plain, or as codes. A row of a chunk begins every `stride` bytes.
template <typename XType, bool kQuant>
class ReturnLoader {
public:
    // UB: returnRing chunks of sendRows rows; with codes also the rows of expand_x, or pieces of a row longer than a
    // piece, and the quantizer's buffers.
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeCombineTiling& tiling, GM_ADDR expandX,
                                uint32_t stride) {
        const ReturnLoaderUb ub(tiling, stride, sizeof(XType));
        const uint8_t ring = Ring(ub.ring);
        rowBytes_ = static_cast<uint32_t>(tiling.info.hidden * sizeof(XType));
        stride_ = stride;
        rows_ = expandX;
        if constexpr (kQuant) {
            piece_ = tiling.quantPiece;
            pipe.InitBuffer(inQueue_, ring, ub.elements);
            pipe.InitBuffer(outQueue_, ring, ub.chunk);
            quantizer_.Init(pipe, tiling.info.hidden, tiling.quantPiece);
        } else {
            pipe.InitBuffer(copyQueue_, ring, ub.chunk);
        }
    }
    // Starts to load rows [row, row + count), at most sendRows.
    __aicore__ inline void Load(uint32_t row, uint32_t count) {
        row_ = row;
        count_ = count;
        if constexpr (kQuant) {
            LoadElements(0, Whole() ? count * rowBytes_ : PieceBytes(0));
        } else {
            const DataCopyExtParams params{Pieces(count), rowBytes_, 0, (stride_ - rowBytes_) / kBlock, 0};
            const DataCopyPadExtParams<int8_t> pad{false, 0, 0, 0};
            LocalTensor<int8_t> chunk = copyQueue_.template AllocTensor<int8_t>();
            AscendC::DataCopyPad(chunk, Source(0, count * rowBytes_), params, pad);
            copyQueue_.EnQue(chunk);
        }
    }
    // The rows of the last Load, ready for MTE3; earlier stores from their memory are done.
    __aicore__ inline LocalTensor<int8_t> Take() {
        if constexpr (kQuant) {
            LocalTensor<int8_t> out = outQueue_.template AllocTensor<int8_t>();
            if (Whole()) {
                QuantizeRows(out);
            } else {
                QuantizePieces(out);
            }
            outQueue_.EnQue(out);
            return outQueue_.template DeQue<int8_t>();
        } else {
            return copyQueue_.template DeQue<int8_t>();
        }
    }
    __aicore__ inline void Free(const LocalTensor<int8_t>& chunk) {
        LocalTensor<int8_t> mine = chunk;
        if constexpr (kQuant) {
            outQueue_.FreeTensor(mine);
        } else {
            copyQueue_.FreeTensor(mine);
        }
    }

private:
    // Whether rows are quantized whole, a chunk at a time.
    __aicore__ inline bool Whole() const { return piece_ * sizeof(XType) >= rowBytes_; }
    __aicore__ inline uint32_t PieceBytes(uint32_t at) const {
        return static_cast<uint32_t>(quantizer_.Elements(at) * sizeof(XType));
    }
    // Source bytes at `offset` from the start of the chunk.
    __aicore__ inline GlobalTensor<int8_t> Source(uint64_t offset, uint32_t bytes) const {
        GlobalTensor<int8_t> source;
        source.SetGlobalBuffer(
            reinterpret_cast<__gm__ int8_t*>(rows_ + static_cast<uint64_t>(row_) * rowBytes_ + offset), bytes);
        return source;
    }
    __aicore__ inline void LoadElements(uint64_t offset, uint32_t bytes) {
        LocalTensor<int8_t> in = inQueue_.template AllocTensor<int8_t>();
        AscendC::DataCopy(in, Source(offset, bytes), bytes);
        inQueue_.EnQue(in);
    }
    __aicore__ inline void QuantizeRows(const LocalTensor<int8_t>& out) {
        LocalTensor<int8_t> in = inQueue_.template DeQue<int8_t>();
        for (uint32_t i = 0; i < count_; ++i)
            quantizer_.Quantize(out[i * stride_], in[i * rowBytes_].template ReinterpretCast<XType>(), 0);
        inQueue_.FreeTensor(in);
    }
    // The first piece is in flight.
    __aicore__ inline void QuantizePieces(const LocalTensor<int8_t>& out) {
        const uint32_t hidden = static_cast<uint32_t>(rowBytes_ / sizeof(XType));
        for (uint32_t i = 0; i < count_; ++i) {
            for (uint32_t at = 0; at < hidden; at += piece_) {
                if (i + at != 0)
                    LoadElements(static_cast<uint64_t>(i) * rowBytes_ + at * sizeof(XType), PieceBytes(at));
                LocalTensor<int8_t> in = inQueue_.template DeQue<int8_t>();
                quantizer_.Quantize(out[i * stride_], in.template ReinterpretCast<XType>(), at);
                inQueue_.FreeTensor(in);
            }
        }
    }

    AscendC::TQue<AscendC::QuePosition::VECIN, 1> inQueue_;
    AscendC::TQue<AscendC::QuePosition::VECOUT, 1> outQueue_;
    AscendC::TQueBind<AscendC::QuePosition::VECIN, AscendC::QuePosition::VECOUT, 1> copyQueue_;
    CommQuantizer<XType> quantizer_;
    uint32_t piece_ = 0;
    uint32_t row_ = 0;
    GM_ADDR rows_ = nullptr;
    uint32_t rowBytes_ = 0;
    uint32_t stride_ = 0;
    uint32_t count_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_QUANTIZE_H
