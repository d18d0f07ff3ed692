#include "gate.h"

#include <time.h>

#include <cerrno>

namespace ascend_moe_torch {

namespace {

constexpr int64_t kNanosAMilli = 1000000, kNanosASecond = 1000000000;

}  // namespace

void Gate::Acquire() {
    while (sem_wait(&free_) != 0) {
        // a signal: its handler ran, Python's part of it runs when the op returns
    }
}

bool Gate::AcquireFor(int milliseconds) {
    if (sem_trywait(&free_) == 0) return true;
    if (milliseconds <= 0) return false;
    timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    const int64_t nanos = until.tv_nsec + milliseconds * kNanosAMilli;
    until.tv_sec += nanos / kNanosASecond;
    until.tv_nsec = nanos % kNanosASecond;
    return sem_timedwait(&free_, &until) == 0;  // a signal ends it too: the caller asks again
}

}  // namespace ascend_moe_torch
