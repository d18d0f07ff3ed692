#include "window.h"

#include <sys/mman.h>

#include <algorithm>

#include "ascend_moe.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace ops {

namespace {

void Touch(const uint8_t* begin, uint64_t bytes) {
    const uintptr_t from = reinterpret_cast<uintptr_t>(begin) & ~uintptr_t{kHeaderBytes - 1};
    madvise(reinterpret_cast<void*>(from), reinterpret_cast<uintptr_t>(begin) + bytes - from,
            MADV_POPULATE_WRITE);  // an older system refuses: pages then come one by one
}

}  // namespace

void TouchWindow(void* base, uint64_t data_bytes, int world) {
    if (world > kMostTouchedRanks) return;
    Touch(StateOf(base), moe::StateBytes(static_cast<uint32_t>(world)));
    const uint64_t bytes = std::min(kTouchedBytes, moe::HalfBytes(data_bytes));
    for (uint32_t parity = 0; parity < 2; ++parity)
        Touch(DataOf(base) + moe::HalfOffset(data_bytes, parity), bytes);
}

}  // namespace ops

uint64_t am_window_total_bytes(uint64_t data_bytes, uint64_t lent_bytes) {
    return ops::WindowBytes(data_bytes, lent_bytes);
}

void* am_window_alloc(uint64_t total_bytes) {
    void* base = mmap(nullptr, total_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return base == MAP_FAILED ? nullptr : base;
}

void* am_window_map(int fd, uint64_t total_bytes) {
    void* base = mmap(nullptr, total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    return base == MAP_FAILED ? nullptr : base;
}

void am_window_unmap(void* base, uint64_t total_bytes) {
    if (base != nullptr) munmap(base, total_bytes);
}

void am_window_layout(int world, uint64_t* out) {
    out[0] = ops::kHeaderBytes + ops::kStateAreaBytes;
    out[1] = ops::kHeaderBytes;
    out[2] = moe::StateBytes(static_cast<uint32_t>(world));
}
