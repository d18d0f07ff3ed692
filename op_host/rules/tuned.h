// What a tuning table says of a call: how it travels, and what of it the rules here let through.
#ifndef ASCEND_MOE_DISTRIBUTE_TUNED_H
#define ASCEND_MOE_DISTRIBUTE_TUNED_H

#include <algorithm>
#include <cstring>

#include "args.h"

namespace moe {

// One integer, so that it can be an attribute of the op and CANN's cache of tilings tells calls apart by it:
// hash of the table (24 bits) | algorithm (4) | cores (8) | ring (8) | rows (11) | list cores (8).
constexpr uint32_t kTableHashBits = 24, kTunedAlgorithmBits = 4, kTunedCoresBits = 8, kTunedRingBits = 8,
                   kTunedRowsBits = 11, kTunedListCoresBits = 8;
constexpr int64_t kNoTuning = 0;

// -1: no such name. Empty: the table leaves it to the op.
inline int32_t TunedAlgorithmOf(const char* name) {
    if (name[0] == '\0') return 0;
    if (strcmp(name, "window") == 0) return static_cast<int32_t>(kAlgorithmWindow);
    if (strcmp(name, "direct") == 0) return static_cast<int32_t>(kAlgorithmDirect);
    return -1;
}

// -1: a value is out of range; 0 stands for "not said".
inline int64_t PackTuning(uint32_t hash, int32_t algorithm, int32_t cores, int32_t ring, int32_t rows,
                          int32_t listCores) {
    const auto fits = [](int64_t value, uint32_t bits) { return value >= 0 && value >> bits == 0; };
    if (!fits(hash, kTableHashBits) || !fits(algorithm, kTunedAlgorithmBits) ||
        !fits(cores, kTunedCoresBits) || !fits(ring, kTunedRingBits) || !fits(rows, kTunedRowsBits) ||
        !fits(listCores, kTunedListCoresBits))
        return -1;
    int64_t packed = hash;
    packed = packed << kTunedAlgorithmBits | algorithm;
    packed = packed << kTunedCoresBits | cores;
    packed = packed << kTunedRingBits | ring;
    packed = packed << kTunedRowsBits | rows;
    return packed << kTunedListCoresBits | listCores;
}

inline void UnpackTuning(int64_t packed, CallSpec& call) {
    const auto take = [&packed](uint32_t bits) {
        const int64_t value = packed & ((int64_t{1} << bits) - 1);
        packed >>= bits;
        return static_cast<int32_t>(value);
    };
    call.tuned_list_cores = take(kTunedListCoresBits);
    call.tuned_rows = take(kTunedRowsBits);
    call.tuned_ring = take(kTunedRingBits);
    call.tuned_cores = take(kTunedCoresBits);
    call.tuned_algorithm = take(kTunedAlgorithmBits);
    call.table_hash = static_cast<uint32_t>(take(kTableHashBits));
}

// A table may ask for less than what fits, never for more.
inline uint32_t TunedOr(int32_t asked, uint32_t most) {
    return asked > 0 ? std::min(static_cast<uint32_t>(asked), most) : most;
}

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_TUNED_H
