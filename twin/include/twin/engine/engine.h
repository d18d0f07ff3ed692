// Every instruction of the API passes through Issue: its pipe, what it reads and writes, and its effect. API
// headers build Instructions and know no engine; the engine decides when the effect happens. This file
// selects the engine at compile time.
#pragma once

#include <cstdint>

#include "twin/engine/core.h"
#include "twin/math/lane_mask.h"

namespace twin {

// `count` pieces of `bytes` each, `stride` bytes apart. Where `width` is not 0, a piece is a repeat instead:
// of so many lanes in 8 blocks, `block` bytes apart, those in the mask, `bytes` in all.
struct Access {
    uintptr_t begin = 0;
    uint64_t bytes = 0;
    uint32_t count = 1;
    uint64_t stride = 0;
    bool gm = false;
    uint32_t width = 0;
    uint32_t element = 0;
    uint64_t block = 0;
    LaneMask mask = {};
};

// Calls visit(begin, bytes) for every contiguous part of an access.
template <class Visit>
inline void ForEachPiece(const Access& access, Visit&& visit) {
    if (access.bytes == 0) return;
    Runs runs;
    if (access.width != 0) runs = FindRuns(access.mask, access.width, access.block == kBlockBytes);
    const uint32_t per_block = access.element == 0 ? 1 : kBlockBytes / access.element;
    for (uint32_t i = 0; i < access.count; ++i) {
        const uintptr_t begin = access.begin + i * access.stride;
        if (access.width == 0) visit(begin, access.bytes);
        for (uint32_t r = 0; r < runs.count; ++r) {
            const Run& run = runs.run[r];
            visit(begin + run.lane / per_block * access.block + run.lane % per_block * access.element,
                  uint64_t{run.count} * access.element);
        }
    }
}

struct Instruction {
    const char* name;
    Pipe pipe;
    Loc loc;
    Access write;
    Access reads[4];
    Access clobber = {};   // UB whose bytes are undefined afterwards
    bool atomic = false;   // read-modify-write of GM
    uint32_t repeats = 0;  // of a vector call with a mask; 0: of one with a count
};

}  // namespace twin

#if defined(TWIN_CHECKED)
#include "twin/engine/checked.h"
#elif defined(TWIN_TIMED)
#include "twin/engine/timed.h"
#else
#include "twin/engine/fast.h"
#endif

#ifndef TWIN_FORWARDS  // this engine defers no copies
namespace twin {

// `flag` is an index into the core's flags: hard events by event and id, then the hand-overs of queues.
void FlagSet(uint32_t flag, Pipe from, const Loc& loc);
void FlagWait(uint32_t flag, Pipe to, const Loc& loc);
void Barrier(Pipe pipe, const Loc& loc);
// The scalar side waits until a pipe has run everything it was given, because it is about to read a result.
void CompletePipe(Pipe pipe);

template <class Effect>
inline void IssueExact(const Instruction& instruction, Effect&& effect) {
    Issue(instruction, static_cast<Effect&&>(effect));
}
template <class Effect>
inline void IssueWithin(const Instruction& instruction, Effect&& effect) {
    Issue(instruction, static_cast<Effect&&>(effect));
}
template <class Effect>
inline void IssueSourced(const Instruction& instruction, Effect&& effect) {
    Issue(instruction, static_cast<Effect&&>(effect));
}
inline void UbFreed(uint32_t, uint32_t) {}

}  // namespace twin
#endif
