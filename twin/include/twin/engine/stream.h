// Copies that go past the caches: for bytes that nobody reads before more has been written than caches hold.
#pragma once

#include <cstdint>

namespace twin {

// Bytes that a core's own cache holds: what a launch writes beyond them is out of it again when it is read.
extern const uint64_t g_cache_bytes;

// As memcpy. Other threads see the bytes after StreamFence.
void StreamCopy(void* to, const void* from, uint64_t bytes);
void StreamFence();

}  // namespace twin
