// A rank's window in host memory, and the addresses inside it.
#pragma once

#include <cstdint>

#include "protocol/window.h"

namespace ops {

// The first page is the twin's: a count of sleepers and the doorbell that wakes them.
constexpr uint64_t kHeaderBytes = 4096;
constexpr uint64_t kSleepersOffset = 64;
constexpr uint64_t kDoorbellOffset = kSleepersOffset + sizeof(uint32_t);
constexpr uint64_t kStateAreaBytes = moe::kMiB;

// Header, state, data, lent area; on A2 contexts the state area comes last.
inline uint64_t WindowBytes(uint64_t data_bytes, uint64_t lent_bytes) {
    return kHeaderBytes + kStateAreaBytes + data_bytes + lent_bytes;
}
inline uint8_t* StateOf(void* base) { return static_cast<uint8_t*>(base) + kHeaderBytes; }
inline uint8_t* DataOf(void* base) { return static_cast<uint8_t*>(base) + kHeaderBytes + kStateAreaBytes; }
inline uint32_t* DoorbellOf(void* base) {
    return reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(base) + kDoorbellOffset);
}

// Has the system map, before the first op, the pages that every op touches and the first rows of both halves.
// Windows of many ranks are not mapped ahead: most of them are never filled that far.
constexpr uint64_t kTouchedBytes = uint64_t{2} << 20;
constexpr int kMostTouchedRanks = 8;
void TouchWindow(void* base, uint64_t data_bytes, int world);

}  // namespace ops
