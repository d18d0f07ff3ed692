// Deferred copies from GM to UB, of the fast engine: the first page of src/fast/forward.cpp says which
// accesses may be deferred, what forces them, and why no kernel can detect it. The UB ranges of a core's deferred
// copies never overlap each other.
#pragma once

#include <cstdint>

#include "twin/engine/host_cpu.h"
#include "twin/math/numeric.h"

namespace twin {

struct Core;

// [ub, ub + bytes) holds what lies at gm.
struct ForwardedRow {
    uintptr_t ub;
    uint64_t bytes;
    uintptr_t gm;
    uint32_t looks;  // small reads so far: each copied its own part only
};

enum class AddendType : uint8_t { kNone, kFloat, kHalf, kBf16 };
template <class T>
constexpr AddendType AddendTypeOf() {
    if (std::is_same_v<T, half>) return AddendType::kHalf;
    if (std::is_same_v<T, bfloat16_t>) return AddendType::kBf16;
    return std::is_same_v<T, float> ? AddendType::kFloat : AddendType::kNone;
}

// `count` float32 at `ub`: the elements at gm, widened, times weight. Times 1, unless scaled, keeps every
// bit.
struct ForwardedAddend {
    uintptr_t ub = 0;
    uint32_t count = 0;
    AddendType type = AddendType::kNone;  // kNone: there is no addend
    bool scaled = false;
    float weight = 1;
    uintptr_t gm = 0;
};

// `count` float32 at `ub`, to which the addends will be added in their order; if `zeroed`, to zeros.
struct ForwardedSum {
    static constexpr uint32_t kAddends = 8;

    uintptr_t ub = 0;
    uint32_t count = 0;
    uint32_t addends = 0;
    bool zeroed = false;
    ForwardedAddend addend[kAddends];  // all of one element type

    bool waits() const { return addends != 0 || zeroed; }
};

struct Forward {
    static constexpr uint32_t kRows = 64;
    static constexpr uint64_t kLeastBytes = 512;  // shorter copies are cheaper than the book-keeping

    bool enabled = false;
    uint32_t count = 0;
    uint32_t next = 0;  // index at which the search for a source begins: rows leave in the order they came
    uintptr_t ub_begin = ~uintptr_t{0},
              ub_end = 0;  // hull of all deferred UB ranges; empty when nothing is deferred
    uintptr_t rows_begin = ~uintptr_t{0},
              rows_end = 0;  // hull of the rows among them: addends and sums mostly lie elsewhere
    uintptr_t gm_begin = ~uintptr_t{0}, gm_end = 0;  // hull of all sources
    ForwardedAddend addend;
    ForwardedSum sum;
    ForwardedRow rows[kRows];

    bool Any() const { return ub_end != 0; }
    bool MayOverlap(uintptr_t begin, uintptr_t end) const { return begin < ub_end && ub_begin < end; }
    bool MayOverlapRows(uintptr_t begin, uintptr_t end) const { return begin < rows_end && rows_begin < end; }
};

// To call before UB bytes are read, before some of them are written, before all of them are written.
void ForwardRead(Forward& forward, uintptr_t begin, uintptr_t end);
void ForwardWrite(Forward& forward, uintptr_t begin, uintptr_t end);
void ForwardOverwrite(Forward& forward, uintptr_t begin, uintptr_t end);
// To call before GM bytes are written: makes the copies that read from there.
void ForwardStore(Forward& forward, uintptr_t begin, uintptr_t end);
// Makes all copies; drops copies into UB bytes that nobody can read any more.
void ForwardComplete(Forward& forward);
void ForwardDrop(Forward& forward);
void ForwardDrop(Forward& forward, uintptr_t begin, uintptr_t end);

// Defers a copy from GM.
void ForwardCopy(Forward& forward, uintptr_t ub, uintptr_t gm, uint64_t bytes);
// The GM address at which these UB bytes can be read, or null when they are in UB.
const uint8_t* ForwardSource(Forward& forward, uintptr_t begin, uint64_t bytes);
// Cast to float32, Muls of float32, in-place Add of float32. True when the call was deferred.
bool ForwardCast(Forward& forward, uintptr_t to, uintptr_t from, uint32_t count, AddendType type);
bool ForwardScale(Forward& forward, uintptr_t to, uintptr_t from, uint32_t count, float weight);
bool ForwardAdd(Forward& forward, uintptr_t to, uintptr_t a, uintptr_t b, uint32_t count);
// Cast of float32 to half or bfloat16_t with CAST_RINT. True when it was made.
bool ForwardRound(Forward& forward, uintptr_t to, uintptr_t from, uint32_t count, AddendType type);
// Duplicate of float32. True when nothing is left to do.
bool ForwardFill(Forward& forward, uintptr_t to, uint32_t count, float value);

}  // namespace twin
