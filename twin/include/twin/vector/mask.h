// The vector mask register of a core: a mask of lanes for every repeat (normal mode), or the number of
// elements of the whole instruction (counter mode). Calls with isSetMask = true set it themselves; the calls
// that take a count leave normal mode and a full mask behind.
#pragma once

#include "twin/engine/engine.h"
#include "twin/vector/vector_repeat.h"

namespace AscendC {

enum class MaskMode : uint8_t { NORMAL = 0, COUNTER };

constexpr uint64_t MASK_PLACEHOLDER = 0;
constexpr uint64_t MASK_PLACEHOLDER_LIST[2] = {0, 0};

namespace detail {

inline void StoreMask(twin::LaneMask mask) {
    twin::Core& core = twin::current_core();
    core.vector_mask[0] = mask.bits[0];
    core.vector_mask[1] = mask.bits[1];
}

}  // namespace detail

inline void SetMaskCount() { twin::current_core().counter_mode = true; }
inline void SetMaskNorm() { twin::current_core().counter_mode = false; }
inline void ResetMask() { detail::StoreMask({{~uint64_t{0}, ~uint64_t{0}}}); }

// NORMAL: the bits of lanes 64.. and 0... COUNTER: maskLow is the number of elements.
template <class T, MaskMode mode = MaskMode::NORMAL>
inline void SetVectorMask(const uint64_t maskHigh, const uint64_t maskLow) {
    detail::StoreMask({{maskLow, maskHigh}});
}
// NORMAL: the first len lanes. COUNTER: len elements.
template <class T, MaskMode mode = MaskMode::NORMAL>
inline void SetVectorMask(int32_t len, twin::Loc loc = twin::Loc::Here()) {
    const int32_t most = mode == MaskMode::COUNTER ? INT32_MAX : sizeof(T) < 2 ? 128 : 256 / sizeof(T);
    if (len < 0 || len > most) {
        twin::Raise(twin::Finding::kBadArgument, loc, "SetVectorMask of %d, outside 0..%d", len, most);
    }
    const uint32_t lanes = static_cast<uint32_t>(len);
    detail::StoreMask(mode == MaskMode::COUNTER ? twin::LaneMask{{lanes, 0}} : twin::LaneMask::First(lanes));
}

}  // namespace AscendC
