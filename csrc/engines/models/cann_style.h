// The CANN-style models: their entries, and where they keep status and rows.
#pragma once

#include <cstdint>

#include "twin/api/qualifiers.h"

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

}  // namespace models
