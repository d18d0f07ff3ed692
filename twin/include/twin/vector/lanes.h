// The machinery of the mask and stride forms: operands, which lanes take part, what is read and written, and
// which overlaps of destination and sources are legal.
//
// A call is one instruction where each operand's bytes are evenly spaced pieces; otherwise it is issued
// repeat by repeat, and where a mask has uneven gaps, stretch by stretch: what is declared is always exact.
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

struct Operands {
    Operand dst;
    Operand src[3];
    uint32_t sources = 0;
    bool accumulates = false;  // dst is read, too
};

// Which lanes take part in every repeat. Lanes are numbered by the widest operand.
struct Lanes {
    LaneMask mask;
    uint32_t width = 0;  // lanes of a repeat
    uint32_t repeats = 0;
};

// A stretch of lanes that is contiguous in every operand.
struct Run {
    uint32_t lane;
    uint32_t count;
};
struct Runs {
    Run run[80];  // 64 where every other lane is off, and the block ends
    uint32_t count = 0;
};

// The first lane from `lane` on whose bit is `on`, or `width`.
inline uint32_t NextLane(const LaneMask& mask, uint32_t lane, uint32_t width, bool on) {
    while (lane < width) {
        const uint64_t word = (on ? mask.bits[lane >> 6] : ~mask.bits[lane >> 6]) >> (lane & 63u);
        if (word != 0) {
            lane += static_cast<uint32_t>(__builtin_ctzll(word));
            break;
        }
        lane = (lane | 63u) + 1;
    }
    return lane < width ? lane : width;
}

inline Runs FindRuns(const Lanes& lanes, const Operands& all) {
    bool joined = all.dst.strides.block == 1;
    for (uint32_t i = 0; i < all.sources; ++i) joined = joined && all.src[i].strides.block == 1;
    const uint32_t per_block = lanes.width / 8;
    Runs runs;
    uint32_t lane = NextLane(lanes.mask, 0, lanes.width, true);
    while (lane < lanes.width) {
        uint32_t end = NextLane(lanes.mask, lane, lanes.width, false);
        if (!joined) end = std::min(end, (lane / per_block + 1) * per_block);
        runs.run[runs.count++] = {lane, end - lane};
        lane = NextLane(lanes.mask, end, lanes.width, true);
    }
    return runs;
}

// The bytes that an operand's runs cover from its begin on, in one repeat.
inline uint64_t RepeatExtent(const Operand& operand, const Runs& runs) {
    uint64_t extent = 0;
    for (uint32_t i = 0; i < runs.count; ++i) {
        const Run& run = runs.run[i];
        extent = std::max(extent, operand.Offset(run.lane) + run.count * operand.element);
    }
    return extent;
}

// The operand's bytes as evenly spaced pieces, if they are.
inline bool AccessOf(const Operand& operand, const Runs& runs, uint32_t repeats, Access* access) {
    const uint64_t first = operand.Offset(runs.run[0].lane);
    const uint64_t bytes = uint64_t{runs.run[0].count} * operand.element;
    const uint64_t gap = runs.count > 1 ? operand.Offset(runs.run[1].lane) - first : 0;
    for (uint32_t i = 1; i < runs.count; ++i) {
        if (runs.run[i].count != runs.run[0].count) return false;
        if (operand.Offset(runs.run[i].lane) != first + i * gap) return false;
    }
    uint32_t pieces = gap == 0 ? 1 : runs.count;
    uint64_t stride = gap;
    if (repeats > 1 && operand.Step() != 0) {
        if (pieces > 1 && operand.Step() != pieces * gap) return false;
        if (pieces == 1) stride = operand.Step();
        pieces *= repeats;
    }
    if (pieces > 1 && stride == bytes) {
        *access = {operand.begin + first, bytes * pieces};
    } else {
        *access = {operand.begin + first, bytes, pieces, stride};
    }
    return true;
}

struct VectorCall {
    const char* name;
    Loc loc;
    bool chains = false;  // a repeat's result may be source 1 of the next, where one of the two stands still
    mutable bool begun = false;

    // True when a part of the call has been issued before. Remembers that one has been issued now.
    bool Continues() const {
        const bool before = begun;
        begun = true;
        return before;
    }
};

// A part of a call as an instruction of the vector pipe.
inline Instruction PartOf(const VectorCall& call, uint64_t elements, const Access& write,
                          const Access& read0 = {}, const Access& read1 = {}, const Access& read2 = {},
                          const Access& clobber = {}) {
    return {call.name, Pipe::kV, call.loc,        {0, elements}, write, {read0, read1, read2},
            clobber,   false,    call.Continues()};
}

// Exact, for operands whose extents meet. Within a repeat the destination is a source or touches it nowhere;
// no repeat reads what an earlier one wrote. With `own_repeat` the first rule does not hold (reductions,
// conversions: the vector unit reads a repeat before it writes it).
void CheckOverlapExactly(const VectorCall& call, const Operands& all, const Runs& runs, uint32_t repeats,
                         bool own_repeat);

inline void CheckLaneOverlap(const VectorCall& call, const Operands& all, const Runs& runs, uint32_t repeats,
                             bool own_repeat = false) {
    const uint64_t to = all.dst.begin;
    const uint64_t to_end = to + (repeats - 1) * all.dst.Step() + RepeatExtent(all.dst, runs);
    for (uint32_t i = 0; i < all.sources; ++i) {
        const Operand& src = all.src[i];
        const uint64_t end = src.begin + (repeats - 1) * src.Step() + RepeatExtent(src, runs);
        if (to < end && src.begin < to_end) {
            CheckOverlapExactly(call, all, runs, repeats, own_repeat);
            return;
        }
    }
}

inline void CheckOverlapExactly(const VectorCall& call, const Operands& all, const Runs& runs,
                                uint32_t repeats, bool own_repeat) {
    const uint64_t extent = (repeats - 1) * all.dst.Step() + RepeatExtent(all.dst, runs);
    std::vector<uint16_t> writer(extent, 0);  // the repeat that wrote a byte of dst, from 1 on
    for (uint32_t repeat = 0; repeat < repeats; ++repeat) {
        for (uint32_t i = 0; i < all.sources; ++i) {
            const Operand& src = all.src[i];
            const bool stands = src.strides.repeat == 0 || all.dst.strides.repeat == 0;
            if (call.chains && i == 1 && stands && src.begin == all.dst.begin) continue;
            for (uint32_t r = 0; r < runs.count; ++r) {
                const uint64_t from = src.At(repeat, runs.run[r].lane);
                for (uint64_t at = from; at < from + runs.run[r].count * src.element; ++at) {
                    const uint64_t offset = at - all.dst.begin;
                    if (at < all.dst.begin || offset >= extent || writer[offset] == 0) continue;
                    Raise(Finding::kBadArgument, call.loc,
                          "%s: repeat %u reads from source %u what repeat %u has written", call.name, repeat,
                          i, writer[offset] - 1u);
                }
            }
        }
        for (uint32_t r = 0; r < runs.count; ++r) {
            const uint64_t offset = all.dst.At(repeat, runs.run[r].lane) - all.dst.begin;
            for (uint64_t b = 0; b < runs.run[r].count * all.dst.element; ++b) {
                writer[offset + b] = static_cast<uint16_t>(repeat + 1);
            }
        }
        for (uint32_t i = 0; i < all.sources && !own_repeat; ++i) {
            for (uint32_t r = 0; r < runs.count; ++r) {
                const uint64_t from = all.src[i].At(repeat, runs.run[r].lane);
                if (from == all.dst.At(repeat, runs.run[r].lane) && all.src[i].element == all.dst.element)
                    continue;
                for (uint64_t at = from; at < from + runs.run[r].count * all.src[i].element; ++at) {
                    const uint64_t offset = at - all.dst.begin;
                    if (at < all.dst.begin || offset >= extent || writer[offset] != repeat + 1) continue;
                    Raise(Finding::kBadArgument, call.loc,
                          "%s: destination and source %u overlap in part; they may be the same, or apart",
                          call.name, i);
                }
            }
        }
    }
}

template <class Body>
inline void RunBody(const Body& body, uintptr_t to, const uintptr_t* from, const Run& run) {
    if constexpr (std::is_invocable_v<Body, uintptr_t, const uintptr_t*, uint32_t, uint32_t>) {
        body(to, from, run.count, run.lane);
    } else {
        body(to, from, run.count);
    }
}

// Issues body(dst, src[], count[, lane]) for every stretch of every repeat, in order. `extra`: bytes that the
// body reads besides.
template <class Body>
inline void IssueLanes(const VectorCall& call, const Operands& all, const Lanes& lanes, const Body& body,
                       const Access& extra = {}) {
    const Runs runs = FindRuns(lanes, all);
    if (runs.count == 0 || lanes.repeats == 0) return;
    Access access[4];  // dst, then the sources
    if constexpr (kChecked) {
        bool even = AccessOf(all.dst, runs, lanes.repeats, &access[0]);
        for (uint32_t i = 0; i < all.sources; ++i) {
            even = AccessOf(all.src[i], runs, lanes.repeats, &access[i + 1]) && even;
        }
        if (!even) {
            Operands part = all;
            for (uint32_t p = 0; p < (lanes.repeats > 1 ? lanes.repeats : runs.count); ++p) {
                Lanes some = lanes;
                if (lanes.repeats > 1) {
                    part.dst.begin = all.dst.At(p, 0);
                    for (uint32_t i = 0; i < all.sources; ++i) part.src[i].begin = all.src[i].At(p, 0);
                    some.repeats = 1;
                } else {
                    some.mask = LaneMask::Range(runs.run[p].lane, runs.run[p].count);
                }
                IssueLanes(call, part, some, body, extra);
            }
            return;
        }
        if (all.accumulates) access[all.sources + 1] = access[0];
        if (extra.bytes != 0) access[all.sources + 1 + all.accumulates] = extra;
    }
    uint64_t elements = 0;
    for (uint32_t i = 0; i < runs.count; ++i) elements += runs.run[i].count;
    Issue(PartOf(call, elements * lanes.repeats, access[0], access[1], access[2], access[3]), [=] {
        const Runs stretches = FindRuns(lanes, all);
        for (uint32_t repeat = 0; repeat < lanes.repeats; ++repeat) {
            for (uint32_t r = 0; r < stretches.count; ++r) {
                const Run& run = stretches.run[r];
                uintptr_t from[3] = {};
                for (uint32_t i = 0; i < all.sources; ++i) from[i] = all.src[i].At(repeat, run.lane);
                RunBody(body, all.dst.At(repeat, run.lane), from, run);
            }
        }
    });
}

}  // namespace twin
