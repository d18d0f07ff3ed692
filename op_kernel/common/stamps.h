// When a core began each phase of its launch, by its own clock: for whoever asks where the time of an op goes on an
// NPU. Off, a phase costs the look at one word of the tiling, and no instruction of any pipe.
#ifndef ASCEND_MOE_COMMON_STAMPS_H
#define ASCEND_MOE_COMMON_STAMPS_H

#include "contexts.h"

namespace moe {

class PhaseStamps {
public:
    __aicore__ inline void Init(const MoeDistributeInfo& info) {
        info_ = &info;
        if (info.stamps == 0) return;
        count_ = 0;
        for (uint32_t w = 0; w < kStCycles - kStPhases; ++w) phases_[w] = 0;
        Begin(kInLaunch);
    }
    // What comes after the last stamp that fits is left out, but for the end.
    __aicore__ inline void Begin(Phase phase) {
        if (info_->stamps == 0 || count_ + (phase != kAtEnd ? 1 : 0) >= kMostStamps) return;
        cycles_[count_] = static_cast<uint32_t>(AscendC::GetSystemCycle());
        phases_[count_ / kStampsOfWord] |= static_cast<uint32_t>(phase) << count_ % kStampsOfWord * 8;
        ++count_;
    }
    // The end of the launch: waits for all pipes, resets UB, and stores the stamps.
    __aicore__ inline void Store(TPipe& pipe, const WindowContext& context, uint32_t op, uint32_t epoch,
                                 uint32_t core) {
        AscendC::PipeBarrier<PIPE_ALL>();
        Begin(kAtEnd);
        pipe.Reset();
        UbBuf buf;
        pipe.InitBuffer(buf, kStampWords * sizeof(uint32_t));
        LocalTensor<uint32_t> words = buf.Get<uint32_t>();
        words.SetValue(kStMark, StampMark(epoch));
        words.SetValue(kStCount, count_ | info_->algorithm << 8);
        for (uint32_t w = kStPhases; w < kStCycles; ++w) words.SetValue(w, phases_[w - kStPhases]);
        for (uint32_t i = 0; i < kMostStamps; ++i) words.SetValue(kStCycles + i, i < count_ ? cycles_[i] : 0);
        SyncFunc<HardEvent::S_MTE3>();
        GlobalTensor<uint32_t> target;
        target.SetGlobalBuffer(
            reinterpret_cast<__gm__ uint32_t*>(context.state(info_->rank) + StampsOffset(info_->world, op, core)),
            kStampWords);
        AscendC::DataCopy(target, words, kStampWords);
        AscendC::PipeBarrier<PIPE_ALL>();
    }

private:
    const MoeDistributeInfo* info_ = nullptr;
    uint32_t count_ = 0;
    uint32_t phases_[kStCycles - kStPhases];
    uint32_t cycles_[kMostStamps];
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_STAMPS_H
