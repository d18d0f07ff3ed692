// What an engine tells about an op for a picture of it: one event an instruction or a wait. Plain data, so
// that an array of them crosses the C ABI as it is (ascend_moe/timeline.py reads it; sizes are checked
// there).
#pragma once

#include <cstdint>
#include <vector>

#include "twin/engine/core.h"

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

// ---- What the fast engine notes of a launch for a timeline: phases, SyncAll, waits, copies of some size,
// status stores and the waits that they released. A core without a recorder pays one look at a pointer for
// each.

constexpr uint64_t kRecordedCopyBytes = 4096;  // smaller copies are too many to be worth a line each

// Where a launch's events go.
struct Timeline {
    std::vector<TimelineEvent> events;
    uint64_t limit = 0;    // of events
    uint64_t dropped = 0;  // events that came when there were as many
};

// One copy between GM and UB, as its caller knows it.
struct RecordedCopy {
    const char* name;
    Pipe pipe;
    const GmRange& range;
    uintptr_t gm;
    const uint8_t* ub;
    uint32_t count;  // pieces
    uint64_t bytes;  // of a piece
    uint64_t gm_step;
    uint64_t ub_step;
};

// When a copy began, and that it has ended.
double RecordedNow();
void RecordCopy(const Core& core, double began, const RecordedCopy& copy);
inline double CopyBegins(const Core& core) {
    return __builtin_expect(core.recorder != nullptr, 0) ? RecordedNow() : 0;
}
inline void CopyEnds(const Core& core, double began, const RecordedCopy& copy) {
    if (__builtin_expect(core.recorder != nullptr, 0)) RecordCopy(core, began, copy);
}

}  // namespace twin
