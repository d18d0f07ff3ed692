// The CANN-style models: their entries, their part of the windows, and counting by vector instructions.
#pragma once

#include <cstdint>

#include "common/contexts.h"
#include "protocol/tiling.h"

// Entries of the modelled kernels, with the arguments of the shipped ones. bf16 and the V2 contract only.
extern "C" void model_cann_style_dispatch(GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR,
                                          GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR,
                                          GM_ADDR);
extern "C" void model_cann_style_combine(GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR,
                                         GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR);

// The two halves of the state area that CANN's A3 operators describe lie at the head of the data window here,
// rows behind it.
namespace models {

constexpr uint64_t kStatusBytes = 1024 * 1024;     // of every data window
constexpr uint64_t kHalfStatusBytes = 450 * 1024;  // of one half: a block a (local expert, source)
constexpr uint64_t kCombineFlags = 64 * 1024;      // in a half: a block a (token, k)
constexpr uint64_t kDispatchPhase = 900 * 1024;    // a cache line a core: which half is next
constexpr uint64_t kCombinePhase = 960 * 1024;

inline constexpr uint64_t AlignTo(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

using namespace moe;  // the kernels' own vocabulary

// Which half this op uses: a word a core, toggled in every op.
__aicore__ inline uint32_t TakeHalf(const WindowContext& context, uint64_t phase, uint32_t core) {
    GlobalTensor<uint32_t> word;
    word.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(context.data(context.rank()) + phase + core * 64),
                         8);
    AscendC::DataCacheCleanAndInvalid<uint32_t, AscendC::CacheLine::SINGLE_CACHE_LINE,
                                      AscendC::DcciDst::CACHELINE_OUT>(word);
    const uint32_t half = word.GetValue(0) & 1;
    word.SetValue(0, half ^ 1);
    AscendC::DataCacheCleanAndInvalid<uint32_t, AscendC::CacheLine::SINGLE_CACHE_LINE,
                                      AscendC::DcciDst::CACHELINE_OUT>(word);
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
    __aicore__ inline LocalTensor<float> Wait(const GlobalTensor<float>& flags, uint32_t blocks,
                                              uint32_t ones) {
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

}  // namespace models
