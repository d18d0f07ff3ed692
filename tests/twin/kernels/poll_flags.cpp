// Waits in the ways that kernels wait, each for the core behind it: many flags in a row by one copy each, a
// scalar word cleaned before every look, a flag beside a heartbeat that is stored at every look.
#include "kernel_operator.h"

using namespace AscendC;

constexpr uint32_t kFlags = 16;
constexpr uint32_t kBlock = 8;

class KernelPoll {
public:
    __aicore__ inline void Init(GM_ADDR flags, GM_ADDR words, GM_ADDR seen) {
        core_ = GetBlockIdx();
        next_ = (core_ + 1) % GetBlockNum();
        flagGm_.SetGlobalBuffer((__gm__ int32_t*)flags);
        wordGm_.SetGlobalBuffer((__gm__ int32_t*)words);
        seenGm_.SetGlobalBuffer((__gm__ int32_t*)seen);
        pipe_.InitBuffer(flagBuf_, kFlags * 32);
        pipe_.InitBuffer(outBuf_, 32);
        pipe_.InitBuffer(beatBuf_, 32);
    }
    // Cores but the last wait first, so that none may be run to its end before the others. `all`: the last
    // too, and nobody ever moves.
    __aicore__ inline void Process(bool many, bool scalar, bool heartbeat, bool all) {
        if (all || core_ != GetBlockNum() - 1) {
            Wait(many, scalar, heartbeat);
        }
        Tell();
    }

private:
    template <HardEvent event>
    __aicore__ inline void Sync() {
        const int32_t id = pipe_.FetchEventID(event);
        SetFlag<event>(id);
        WaitFlag<event>(id);
    }
    __aicore__ inline void Wait(bool many, bool scalar, bool heartbeat) {
        LocalTensor<int32_t> flags = flagBuf_.Get<int32_t>();
        LocalTensor<int32_t> beat = beatBuf_.Get<int32_t>();
        const uint32_t count = many ? kFlags : 1;
        int32_t looks = 0, up = 0;
        while (up != static_cast<int32_t>(count)) {
            up = 0;
            for (uint32_t i = 0; i < count; ++i) {
                DataCopy(flags[i * kBlock], flagGm_[(next_ * kFlags + i) * kBlock], kBlock);
            }
            Sync<HardEvent::MTE2_S>();
            for (uint32_t i = 0; i < count; ++i) {
                up += flags.GetValue(i * kBlock) == 1 ? 1 : 0;
            }
            Sync<HardEvent::S_MTE2>();
            if (heartbeat) {
                beat.SetValue(0, ++looks);
                Sync<HardEvent::S_MTE3>();
                DataCopy(seenGm_[core_ * kBlock], beat, kBlock);
                Sync<HardEvent::MTE3_S>();
            }
        }
        while (scalar) {
            GlobalTensor<int32_t> word = wordGm_[next_ * 16];
            DataCacheCleanAndInvalid<int32_t, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(word);
            if (word.GetValue(0) == 1) {
                break;
            }
        }
    }
    __aicore__ inline void Tell() {
        LocalTensor<int32_t> out = outBuf_.Get<int32_t>();
        Duplicate(out, 1, kBlock);
        Sync<HardEvent::V_MTE3>();
        for (uint32_t i = 0; i < kFlags; ++i) {
            DataCopy(flagGm_[(core_ * kFlags + i) * kBlock], out, kBlock);
        }
        wordGm_.SetValue(core_ * 16, 1);
        DataCacheCleanAndInvalid<int32_t, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(
            wordGm_[core_ * 16]);
    }

    TPipe pipe_;
    TBuf<> flagBuf_, outBuf_, beatBuf_;
    GlobalTensor<int32_t> flagGm_, wordGm_, seenGm_;
    uint32_t core_, next_;
};

extern "C" __global__ __aicore__ void poll_flags(GM_ADDR seen, GM_ADDR workspace) {
    KernelPoll op;
    op.Init(workspace, workspace + GetBlockNum() * kFlags * kBlock * sizeof(int32_t), seen);
#define WAY(key) \
    if (TILING_KEY_IS(key)) op.Process(key % 10 == 1, key % 10 == 2, key == 3, key >= 10)
    WAY(0);
    WAY(1);
    WAY(2);
    WAY(3);
    WAY(10);
    WAY(11);
    WAY(12);
}
