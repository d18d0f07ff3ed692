// The machinery of the mask and stride forms: operands, which lanes take part, what is read and written, and
// which overlaps of destination and sources are legal.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "twin/engine/engine.h"
#include "twin/math/lane_mask.h"

namespace twin {

struct Operand {
    uintptr_t begin = 0;
    uint32_t element = 1;  // bytes
    Strides strides = {1, 8};

    uint64_t Offset(uint32_t lane) const {
        const uint32_t per_block = kVectorBlockBytes / element;
        return uint64_t{lane / per_block} * strides.block * kVectorBlockBytes + lane % per_block * element;
    }
    uint64_t Step() const { return uint64_t{strides.repeat} * kVectorBlockBytes; }
    uintptr_t At(uint32_t repeat, uint32_t lane) const { return begin + repeat * Step() + Offset(lane); }
};

constexpr uint32_t kMostSources = 3;
struct Operands {
    Operand dst;
    Operand src[kMostSources];
    uint32_t sources = 0;
    bool accumulates = false;  // dst is read, too
};

// Which lanes take part in every repeat. Lanes are numbered by the widest operand.
struct Lanes {
    LaneMask mask;
    uint32_t width = 0;  // lanes of a repeat
    uint32_t repeats = 0;
};

inline Runs FindRuns(const Lanes& lanes, const Operands& all) {
    bool joined = all.dst.strides.block == 1;
    for (uint32_t i = 0; i < std::min(all.sources, kMostSources); ++i)  // gcc looks behind the last one else, and warns
        joined = joined && all.src[i].strides.block == 1;
    return FindRuns(lanes.mask, lanes.width, joined);
}

// The bytes from an operand's begin to the end of the last that takes part.
inline uint64_t Extent(const Operand& operand, const Runs& runs, uint32_t repeats) {
    uint64_t extent = 0;
    for (uint32_t i = 0; i < runs.count; ++i) {
        const Run& run = runs.run[i];
        extent = std::max(extent, operand.Offset(run.lane) + run.count * operand.element);
    }
    return (repeats - 1) * operand.Step() + extent;
}

// The bytes of the operand that take part: evenly spaced pieces, if they are.
inline Access AccessOf(const Operand& operand, const Lanes& lanes) {
    const Runs runs = FindRuns(lanes.mask, lanes.width, operand.strides.block == 1);
    if (runs.count == 0 || lanes.repeats == 0) return {};
    const uint64_t first = operand.Offset(runs.run[0].lane);
    const uint64_t bytes = uint64_t{runs.run[0].count} * operand.element;
    const uint64_t gap = runs.count > 1 ? operand.Offset(runs.run[1].lane) - first : 0;
    const uint32_t repeats = operand.Step() == 0 ? 1 : lanes.repeats, pieces = gap == 0 ? 1 : runs.count;
    bool even = pieces == 1 || repeats == 1 || operand.Step() == pieces * gap;
    uint64_t all = 0;
    for (uint32_t i = 0; i < runs.count; ++i) {
        const Run& run = runs.run[i];
        even = even && run.count == runs.run[0].count && operand.Offset(run.lane) == first + i * gap;
        all += uint64_t{run.count} * operand.element;
    }
    if (!even) {
        return {operand.begin, all,         repeats,         operand.Step(),
                false,         lanes.width, operand.element, uint64_t{operand.strides.block} * kVectorBlockBytes,
                lanes.mask};
    }
    const uint64_t stride = pieces == 1 && repeats > 1 ? operand.Step() : gap;
    const uint32_t count = pieces * repeats;
    if (count > 1 && stride == bytes) return {operand.begin + first, bytes * count};
    return {operand.begin + first, bytes, count, stride};
}

struct VectorCall {
    const char* name;
    Loc loc;
    bool chains = false;  // a repeat's result may be source 1 of the next, where one of the two stands still
};

// A call as an instruction of the vector pipe.
inline Instruction PartOf(const VectorCall& call, const Access& write, const Access& read0 = {},
                          const Access& read1 = {}, const Access& read2 = {}, const Access& clobber = {}) {
    return {call.name, Pipe::kV, call.loc, write, {read0, read1, read2, {}}, clobber};
}

// Within a repeat the destination is a source or touches it nowhere; no repeat reads what an earlier one
// wrote. With `own_repeat` the first rule does not hold (reductions, conversions: the vector unit reads a
// repeat before it writes it). Whether a listed call breaks the first rule.
inline bool CheckLaneOverlap(const VectorCall& call, const Operands& all, const Runs& runs, uint32_t repeats,
                             bool own_repeat) {
    const Operand& dst = all.dst;
    const uint64_t extent = Extent(dst, runs, repeats);
    bool apart = true;
    for (uint32_t i = 0; i < all.sources; ++i) {
        const Operand& src = all.src[i];
        apart = apart && (dst.begin >= src.begin + Extent(src, runs, repeats) || src.begin >= dst.begin + extent);
    }
    if (apart) return false;
    bool overlaps = false;
    std::vector<uint16_t> writer(extent, 0);  // the repeat that wrote a byte of dst, from 1 on
    // Calls found(writer) for each byte of a source's run that a repeat has written.
    const auto look = [&](const Operand& src, uint32_t repeat, const Run& run, auto&& found) {
        const uint64_t from = src.At(repeat, run.lane);
        for (uint64_t at = from; at < from + run.count * src.element; ++at) {
            if (at >= dst.begin && at < dst.begin + extent) found(writer[at - dst.begin]);
        }
    };
    for (uint32_t repeat = 0; repeat < repeats; ++repeat) {
        for (uint32_t i = 0; i < all.sources; ++i) {
            const Operand& src = all.src[i];
            const bool stands = src.strides.repeat == 0 || dst.strides.repeat == 0;
            if (call.chains && i == 1 && stands && src.begin == dst.begin) continue;
            for (uint32_t r = 0; r < runs.count; ++r) {
                look(src, repeat, runs.run[r], [&](uint32_t by) {
                    TWIN_RULE_IF(by != 0, kRepeatReads, kBadArgument, call.loc,
                                 "%s: repeat %u reads from source %u what repeat %u has written", call.name, repeat, i,
                                 by - 1u);
                });
            }
        }
        for (uint32_t r = 0; r < runs.count; ++r) {
            const Run& run = runs.run[r];
            std::fill_n(writer.begin() + static_cast<std::ptrdiff_t>(dst.At(repeat, run.lane) - dst.begin),
                        run.count * dst.element, static_cast<uint16_t>(repeat + 1));
        }
        for (uint32_t n = 0; n < all.sources * runs.count && !own_repeat; ++n) {
            const uint32_t i = n / runs.count;
            const Operand& src = all.src[i];
            const Run& run = runs.run[n % runs.count];
            if (src.At(repeat, run.lane) == dst.At(repeat, run.lane) && src.element == dst.element) continue;
            look(src, repeat, run, [&](uint32_t by) {
                TWIN_RULE_IF(by == repeat + 1, kOverlap, kBadArgument, call.loc,
                             "%s: destination and source %u overlap in part; they may be the same, or apart", call.name,
                             i);
                overlaps |= by == repeat + 1;
            });
        }
    }
    return overlaps;
}

// The sources of one repeat, copied.
class Taken {
public:
    void Read(const Operands& all, const Runs& runs, uint32_t repeat) {
        for (uint32_t i = 0; i < all.sources; ++i) {
            const Operand& src = all.src[i];
            for (uint32_t r = 0; r < runs.count; ++r) {
                const Run& run = runs.run[r];
                memcpy(reinterpret_cast<void*>(At(src, i, run.lane)),
                       reinterpret_cast<const void*>(src.At(repeat, run.lane)), run.count * src.element);
            }
        }
    }
    uintptr_t At(const Operand& src, uint32_t source, uint32_t lane) const {
        return reinterpret_cast<uintptr_t>(bytes_[source]) + uint64_t{lane} * src.element;
    }

private:
    alignas(64) uint8_t bytes_[3][kRepeatBytes];
};

// Calls body(dst, src[], count[, lane, repeat]) for every stretch of every repeat, in order, as one
// instruction. `extra`: bytes that the body reads besides. `overlaps`: every repeat is read before it is written.
template <class Body>
inline void IssueLanes(const VectorCall& call, const Operands& all, const Lanes& lanes, const Body& body,
                       const Access& extra, bool overlaps = false) {
    Access access[4];  // dst, then the sources
    if constexpr (kChecked) {
        access[0] = AccessOf(all.dst, lanes);
        for (uint32_t i = 0; i < all.sources; ++i) access[i + 1] = AccessOf(all.src[i], lanes);
        if (all.accumulates) access[all.sources + 1] = access[0];
        if (extra.bytes != 0) access[all.sources + 1] = extra;
    }
    Instruction instruction = PartOf(call, access[0], access[1], access[2], access[3]);
    instruction.repeats = lanes.repeats;
    Issue(instruction, [=] {
        const Runs runs = FindRuns(lanes, all);
        Taken taken;
        for (uint32_t repeat = 0; repeat < lanes.repeats; ++repeat) {
            if (__builtin_expect(overlaps, 0)) taken.Read(all, runs, repeat);
            for (uint32_t r = 0; r < runs.count; ++r) {
                const Run& run = runs.run[r];
                const uintptr_t to = all.dst.At(repeat, run.lane);
                uintptr_t from[3] = {};
                for (uint32_t i = 0; i < all.sources; ++i)
                    from[i] = overlaps ? taken.At(all.src[i], i, run.lane) : all.src[i].At(repeat, run.lane);
                if constexpr (std::is_invocable_v<Body, uintptr_t, const uintptr_t*, uint32_t>) {
                    body(to, from, run.count);
                } else {
                    body(to, from, run.count, run.lane, repeat);
                }
            }
        }
    });
}

}  // namespace twin
