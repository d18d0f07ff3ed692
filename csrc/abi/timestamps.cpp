// The timestamps that cores leave of a launch's phases (op_kernel/common/exchange.h): from a window, and as text.
#include <algorithm>
#include <cstring>
#include <string>

#include "ascend_moe.h"
#include "communicator.h"
#include "plan.h"

namespace {

#define AM_NAME(name) #name,
constexpr const char* kPhaseNames[] = {"launch", ASCEND_MOE_PHASES(AM_NAME) "end"};
#undef AM_NAME

const uint32_t* TimestampsOf(const uint32_t* words, uint32_t core) { return words + core * moe::kTimestampWords; }

// Cores whose timestamps are of the same launch as core 0's; 0: there are none.
uint32_t CoresOf(const uint32_t* words) {
    uint32_t cores = 0;
    if (words[moe::kStTag] == 0) return 0;
    while (cores < moe::kMaxCores && TimestampsOf(words, cores)[moe::kStTag] == words[moe::kStTag]) ++cores;
    return cores;
}

}  // namespace

uint64_t am_timestamp_words(void) { return moe::kTimestampWords; }

void am_comm_timestamps(void* comm, int op, uint32_t* words) {
    const ops::Communicator& communicator = *static_cast<ops::Communicator*>(comm);
    const uint32_t world = static_cast<uint32_t>(communicator.world());
    memcpy(words, communicator.state(communicator.rank()) + moe::TimestampsOffset(world, static_cast<uint32_t>(op), 0),
           moe::kMaxCores * moe::kTimestampWords * sizeof(uint32_t));
}

uint64_t am_timestamps_text(const uint32_t* words, char* text, uint64_t bytes) {
    const uint32_t cores = CoresOf(words);
    uint32_t first = words[moe::kStCycles];  // they wrap around: the least is that from which the others are near
    for (uint32_t core = 0; core < cores; ++core) {
        const uint32_t launched = TimestampsOf(words, core)[moe::kStCycles];
        if (static_cast<int32_t>(launched - first) < 0) first = launched;
    }
    std::string lines;
    for (uint32_t core = 0; core < cores; ++core) {
        const uint32_t* timestamps = TimestampsOf(words, core);
        const uint32_t count = std::min(timestamps[moe::kStCount] & 0xFF, moe::kMostTimestamps);
        for (uint32_t i = 0; i < count; ++i) {
            const uint32_t shift = i % moe::kTimestampsOfWord * 8;
            const uint32_t phase = timestamps[moe::kStPhases + i / moe::kTimestampsOfWord] >> shift & 0xFF;
            lines += std::to_string(core) + "\t" + kPhaseNames[std::min<uint32_t>(phase, moe::kAtEnd)] + "\t" +
                     std::to_string(timestamps[moe::kStCycles + i] - first) + "\n";
        }
    }
    return ops::GiveText(lines, text, bytes);
}
