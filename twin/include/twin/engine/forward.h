// Copies from GM that the fast engine has not made yet. A row that only passes through UB on its way to GM is
// then one copy, and a row that is only cast, scaled and added is read once, where it lies. Nobody can tell:
// whoever touches such UB bytes in another way, or might change their source, makes the copy first. The UB
// ranges below never overlap each other.
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
    uint32_t looks;  // small reads that have copied their own part only
};

enum class TermType : uint8_t { kNone, kFloat, kHalf, kBf16 };
template <class T>
constexpr TermType TermTypeOf() {
    if (std::is_same_v<T, half>) return TermType::kHalf;
    if (std::is_same_v<T, bfloat16_t>) return TermType::kBf16;
    return std::is_same_v<T, float> ? TermType::kFloat : TermType::kNone;
}

// `count` float32 at `ub`: the elements at gm, widened, times weight when scaled.
struct ForwardedTerm {
    uintptr_t ub = 0;
    uint32_t count = 0;
    TermType type = TermType::kNone;  // kNone: there is no term
    bool scaled = false;
    float weight = 0;
    uintptr_t gm = 0;
};

// `count` float32 at `ub`, onto which terms are to be added, in their order; onto zeros, when `zeroed`.
struct ForwardedSum {
    static constexpr uint32_t kTerms = 8;

    uintptr_t ub = 0;
    uint32_t count = 0;
    uint32_t terms = 0;
    bool zeroed = false;
    ForwardedTerm term[kTerms];  // of one type

    bool waits() const { return terms != 0 || zeroed; }
};

struct Forward {
    static constexpr uint32_t kRows = 64;
    static constexpr uint64_t kLeastBytes = 512;  // shorter copies are cheaper than the book-keeping

    bool enabled = false;
    uint32_t count = 0;
    uint32_t next = 0;  // where a source is looked for first: rows leave as they came
    uintptr_t ub_begin = ~uintptr_t{0}, ub_end = 0;  // holds all UB ranges: empty when there is none
    uintptr_t gm_begin = ~uintptr_t{0}, gm_end = 0;  // holds their sources
    ForwardedTerm term;
    ForwardedSum sum;
    ForwardedRow rows[kRows];

    bool Any() const { return ub_end != 0; }
    bool Near(uintptr_t begin, uintptr_t end) const { return begin < ub_end && ub_begin < end; }
};

// Before UB bytes are read, before some of them are written, before all of them are.
void ForwardRead(Forward& forward, uintptr_t begin, uintptr_t end);
void ForwardWrite(Forward& forward, uintptr_t begin, uintptr_t end);
void ForwardOverwrite(Forward& forward, uintptr_t begin, uintptr_t end);
// Before GM bytes are written: copies that read from there are made.
void ForwardStore(Forward& forward, uintptr_t begin, uintptr_t end);
// Makes all copies; forgets them, where nobody can read those UB bytes any more.
void ForwardSettle(Forward& forward);
void ForwardDrop(Forward& forward);
void ForwardDrop(Forward& forward, uintptr_t begin, uintptr_t end);

// Takes a copy from GM down.
void ForwardCopy(Forward& forward, uintptr_t ub, uintptr_t gm, uint64_t bytes);
// Where the UB bytes can be read instead, or null: they are in UB.
const uint8_t* ForwardSource(Forward& forward, uintptr_t begin, uint64_t bytes);
// Cast to float32, Muls of float32, Add of float32 onto an operand: true when they are dealt with.
bool ForwardCast(Forward& forward, uintptr_t to, uintptr_t from, uint32_t count, TermType type);
bool ForwardScale(Forward& forward, uintptr_t to, uintptr_t from, uint32_t count, float weight);
bool ForwardAdd(Forward& forward, uintptr_t to, uintptr_t a, uintptr_t b, uint32_t count);
// Duplicate of float32, and Cast from float32 to `type` with rounding to nearest even.
bool ForwardFill(Forward& forward, uintptr_t to, uint32_t count, float value);
bool ForwardNarrow(Forward& forward, uintptr_t to, uintptr_t from, uint32_t count, TermType type);

}  // namespace twin
