// Where the CANN-style models keep status and rows: the two halves of the state area that CANN's A3 operators
// describe lie at the head of the data window here, rows behind it.
#pragma once

#include <cstdint>

namespace models {

constexpr uint64_t kStatusBytes = 1024 * 1024;     // of every data window
constexpr uint64_t kHalfStatusBytes = 450 * 1024;  // of one half: a block a (local expert, source)
constexpr uint64_t kCombineFlags = 64 * 1024;      // in a half: a block a (token, k)
constexpr uint64_t kDispatchPhase = 900 * 1024;    // a cache line a core: which half is next
constexpr uint64_t kCombinePhase = 960 * 1024;

inline constexpr uint64_t AlignTo(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace models
