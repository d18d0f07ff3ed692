// State of a core that outlives a call, and what a kernel can ask about its core.
#pragma once

#include "twin/api/pipe.h"

namespace AscendC {

// What DataCopyPad fills with where its own parameters name no value.
template <class T, TPosition pos = TPosition::MAX>
inline void SetPadValue(T paddingValue) {
    static_assert(pos == TPosition::VECIN || pos == TPosition::VECOUT || pos == TPosition::MAX,
                  "SetPadValue: VECIN, VECOUT or MAX");
    static_assert(sizeof(T) <= sizeof(uint64_t), "SetPadValue: elements of at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &paddingValue, sizeof(T));
    twin::current_core().pad_value = bits;
}

// Control bits: the twin computes in the default mode, in which all of them are 0.
template <int8_t startBit, int8_t endBit>
inline void SetCtrlSpr(int64_t value, twin::Loc loc = twin::Loc::Here()) {
    static_assert(startBit >= 0 && startBit <= endBit && endBit <= 63, "SetCtrlSpr: bits 0 to 63");
    if (value != 0) {
        twin::Raise(twin::Finding::kBadArgument, loc, "SetCtrlSpr<%d, %d>(%lld): only 0 is modelled",
                    startBit, endBit, static_cast<long long>(value));
    }
}
template <int8_t startBit, int8_t endBit>
inline int64_t GetCtrlSpr() {
    return 0;
}
template <int8_t startBit, int8_t endBit>
inline void ResetCtrlSpr() {}

// Registers a range for builds that check addresses: the twin's ranges are those of the launch.
template <class T>
inline void OOMCheckAddrRange(__gm__ T*, const uint64_t) {}

inline int64_t GetSubBlockNum() { return 1; }
inline int64_t GetTaskRatio() { return 1; }  // GetTaskRation in newer headers
constexpr int16_t GetDataBlockSizeInBytes() { return 32; }

}  // namespace AscendC
