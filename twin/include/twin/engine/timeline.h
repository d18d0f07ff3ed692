// What an engine tells about an op for a picture of it: one event an instruction or a wait. Plain data, so
// that an array of them crosses the C ABI as it is (ascend_moe/timeline.py reads it; sizes are checked
// there).
#pragma once

#include <cstdint>

namespace twin {

struct TimelineEvent {
    double start_ns;  // modelled, from the common launch on; or of the machine's clock
    double end_ns;    // never before start_ns
    uint64_t bytes;   // moved by an MTE pipe; 0: none
    uint64_t flow;    // 0: none; a store of a status block and the wait that it released share a number
    int32_t rank;
    uint32_t core;
    int32_t peer;       // the rank whose window the bytes came from or went to; -1: own memory
    uint32_t pipe;      // twin::Pipe: 0 S, 1 V, 2 MTE2, 3 MTE3
    const char* name;   // of the API call, or "wait", "SyncAll", "launch"
    const char* phase;  // Core::phase: the step of the op, "" before the first
};

static_assert(sizeof(TimelineEvent) == 64, "ascend_moe/timeline.py reads this layout");

}  // namespace twin
