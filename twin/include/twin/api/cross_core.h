// Flags between the cores of one launch.
#pragma once

#include "twin/api/sync.h"

namespace AscendC {

// Set when the earlier work of `pipe` is done. Mode 0: all cores set, then all may pass; mode 1: the two
// vector cores of a block; mode 2, between cube and vector cores, is refused when the kernel runs.
template <uint8_t modeId, pipe_t pipe>
inline void CrossCoreSetFlag(uint16_t flagId, twin::Loc loc = twin::Loc::Here()) {
    static_assert(modeId <= 2, "CrossCoreSetFlag: modes 0, 1 and 2");
    static_assert(
        pipe == PIPE_S || pipe == PIPE_V || pipe == PIPE_MTE2 || pipe == PIPE_MTE3 || pipe == PIPE_ALL,
        "CrossCoreSetFlag: a vector core has no such pipe");
    constexpr twin::Pipe kPipe = pipe == PIPE_S      ? twin::Pipe::kS
                                 : pipe == PIPE_V    ? twin::Pipe::kV
                                 : pipe == PIPE_MTE2 ? twin::Pipe::kMte2
                                 : pipe == PIPE_MTE3 ? twin::Pipe::kMte3
                                                     : twin::Pipe::kAll;
    twin::CrossCoreSet(modeId, kPipe, flagId, loc);
}
template <uint8_t modeId = 0, pipe_t pipe = PIPE_S>
inline void CrossCoreWaitFlag(uint16_t flagId, twin::Loc loc = twin::Loc::Here()) {
    static_assert(modeId <= 2, "CrossCoreWaitFlag: modes 0, 1 and 2");
    twin::CrossCoreWait(flagId, loc);
}

}  // namespace AscendC
