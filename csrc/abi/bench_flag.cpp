// How long a flag takes between two processes of this machine, for benchmarks: ping-pong over shared words.
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "ascend_moe.h"

namespace {

constexpr int kSpin = 0, kYield = 1, kFutex = 2;
constexpr int kSpinsBeforeYield = 200;
constexpr int kLookAtClock = 1 << 12;
constexpr uint64_t kApart = 32;  // words between the two flags: two cache lines

int64_t Now() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

inline void Pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void Sleep(std::atomic<uint32_t>* flag, uint32_t seen, int64_t ns) {
    const timespec most{ns / 1000000000, ns % 1000000000};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(flag), FUTEX_WAIT, seen, &most, nullptr, 0);
}

// False when the deadline passed.
bool Await(std::atomic<uint32_t>* flag, uint32_t value, int how, int64_t deadline) {
    for (int spins = 1;; ++spins) {
        const uint32_t seen = flag->load(std::memory_order_acquire);
        if (seen == value) return true;
        if (how == kFutex) {
            const int64_t left = deadline - Now();
            if (left <= 0) return false;
            Sleep(flag, seen, left);
            continue;
        }
        if (how == kYield && spins > kSpinsBeforeYield) {
            sched_yield();
        } else {
            Pause();
        }
        if (spins % kLookAtClock == 0 && Now() > deadline) return false;
    }
}

void Raise(std::atomic<uint32_t>* flag, uint32_t value, int how) {
    flag->store(value, std::memory_order_release);
    if (how != kFutex) return;
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(flag), FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

}  // namespace

int64_t am_bench_flag(void* cells, int side, uint32_t first, uint32_t rounds, int how, int64_t patience_us) {
    auto* ping = static_cast<std::atomic<uint32_t>*>(cells);
    std::atomic<uint32_t>* pong = ping + kApart;
    if (how < kSpin || how > kFutex || side < 0 || side > 1) return -1;
    const int64_t began = Now(), deadline = began + patience_us * 1000;
    for (uint32_t value = first; value != first + rounds; ++value) {
        if (side == 0) {
            Raise(ping, value, how);
            if (!Await(pong, value, how, deadline)) return -1;
        } else {
            if (!Await(ping, value, how, deadline)) return -1;
            Raise(pong, value, how);
        }
    }
    return Now() - began;
}
