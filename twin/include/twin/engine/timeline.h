// Events of an op for a timeline: one for each instruction or wait. Plain data, so that an array of them
// crosses the C ABI as it is (ascendc_twin/timeline reads it).
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
    int32_t peer;       // the rank whose window the bytes came from or went to; -1: own; of an arrival: its sender
    uint32_t pipe;      // twin::Pipe: 0 S, 1 V, 2 MTE2, 3 MTE3
    const char* name;   // of the API call, or "wait", "SyncAll", "launch"
    const char* phase;  // Core::phase: the step of the op, "" before the first
};

static_assert(sizeof(TimelineEvent) == 64, "ascendc_twin/timeline reads this layout");

// ---- what the fast engine records of a launch for a timeline: phases, SyncAll, waits, larger copies, status
// stores and the waits that they ended. Without a recorder each costs a core one test of a pointer ----

constexpr uint64_t kRecordedCopyBytes = 4096;  // smaller copies are too many to be worth a line each

// Where a launch's events go.
struct Timeline {
    std::vector<TimelineEvent> events;
    uint64_t limit = 0;    // of events
    uint64_t dropped = 0;  // events that came when there were as many
    // Who sent a status block, by its first 32 bytes; null: nobody knows here.
    int32_t (*sender)(const uint8_t* block) = nullptr;
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

// The time at which a copy begins; records a copy that has ended.
double RecordedNow();
void RecordCopy(const Core& core, double began, const RecordedCopy& copy);
inline double CopyBegins(const Core& core) { return __builtin_expect(core.recorder != nullptr, 0) ? RecordedNow() : 0; }
inline void CopyEnds(const Core& core, double began, const RecordedCopy& copy) {
    if (__builtin_expect(core.recorder != nullptr, 0)) RecordCopy(core, began, copy);
}

}  // namespace twin
