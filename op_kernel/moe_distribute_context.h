// The two areas a rank, behind accessors. The window table is what the launch's communication context points
// at.
#ifndef ASCEND_MOE_DISTRIBUTE_CONTEXT_H
#define ASCEND_MOE_DISTRIBUTE_CONTEXT_H

#include "moe_distribute_base.h"

namespace moe {

// In GM, filled by the host side of the communicator. Addresses are those of this rank's view of the peer.
struct WindowTable {
    uint32_t magic;
    uint32_t rank;
    uint32_t world;
    uint32_t reserved;
    uint64_t dataBytes;
    uint64_t stateBytes;
    uint64_t data[kMaxWorld];
    uint64_t state[kMaxWorld];
};
constexpr uint32_t kWindowTableMagic = 0x57494E44u;

class WindowContext {
public:
    __aicore__ inline void Init(GM_ADDR context) { table_ = reinterpret_cast<__gm__ WindowTable*>(context); }
    __aicore__ inline bool Matches(const MoeDistributeInfo& info) const {
        return table_ != nullptr && table_->magic == kWindowTableMagic && table_->rank == info.rank &&
               table_->world == info.world && table_->dataBytes == info.dataBytes &&
               table_->stateBytes >= StateBytes(info.world);
    }
    __aicore__ inline uint32_t rank() const { return table_->rank; }
    __aicore__ inline uint32_t world() const { return table_->world; }
    __aicore__ inline uint64_t data_bytes() const { return table_->dataBytes; }
    __aicore__ inline uint64_t state_bytes() const { return table_->stateBytes; }
    __aicore__ inline GM_ADDR data(uint32_t rank) const {
        return reinterpret_cast<GM_ADDR>(table_->data[rank]);
    }
    __aicore__ inline GM_ADDR state(uint32_t rank) const {
        return reinterpret_cast<GM_ADDR>(table_->state[rank]);
    }

private:
    __gm__ WindowTable* table_ = nullptr;
};

// The epoch word of this rank's control block: the only scalar GM state. One cache line, cleaned by hand.
class EpochWord {
public:
    __aicore__ inline void Init(const WindowContext& context) {
        control_.SetGlobalBuffer(
            reinterpret_cast<__gm__ uint32_t*>(context.state(context.rank()) + kControlOffset), kBlockWords);
    }
    // A control block without our magic is a fresh window: its epoch is 0.
    __aicore__ inline uint32_t Read() const {
        if constexpr (!IsMutant(Mutant::kEpochReadFromCache)) Invalidate();
        return control_.GetValue(kControlMagicWord) == kControlMagic ? control_.GetValue(kControlEpochWord)
                                                                     : 0;
    }
    __aicore__ inline void Publish(uint32_t epoch) {
        control_.SetValue(kControlMagicWord, kControlMagic);
        control_.SetValue(kControlEpochWord, epoch);
        if constexpr (!IsMutant(Mutant::kEpochLeftInCache)) Invalidate();
    }

private:
    __aicore__ inline void Invalidate() const {
        AscendC::DataCacheCleanAndInvalid<uint32_t, AscendC::CacheLine::SINGLE_CACHE_LINE,
                                          AscendC::DcciDst::CACHELINE_OUT>(control_);
    }
    GlobalTensor<uint32_t> control_;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_CONTEXT_H
