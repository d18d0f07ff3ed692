// What the fast engine notes of a launch for a timeline: phases, SyncAll, waits, copies of some size, status
// stores and the waits that they released. A core without a recorder pays one look at a pointer for each.
#pragma once

#include <vector>

#include "twin/engine/core.h"
#include "twin/engine/timeline.h"

namespace twin {

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
