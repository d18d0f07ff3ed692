#include "end.h"

#include <time.h>

#include <cerrno>

namespace ascend_moe_torch {

namespace {

constexpr int64_t kNanosPerMilli = 1000000, kNanosPerSecond = 1000000000;

}  // namespace

End::End(const AmTorchEnd& facts) : facts_(facts) { sem_init(&free_, 0, 1); }
End::~End() { sem_destroy(&free_); }

void End::Acquire() {
    while (sem_wait(&free_) != 0) {
        // A signal ended the wait. Python runs its handler once the op has returned.
    }
}

bool End::AcquireFor(int milliseconds) {
    if (sem_trywait(&free_) == 0) return true;
    if (milliseconds <= 0) return false;
    timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    const int64_t nanos = until.tv_nsec + milliseconds * kNanosPerMilli;
    until.tv_sec += nanos / kNanosPerSecond;
    until.tv_nsec = nanos % kNanosPerSecond;
    return sem_timedwait(&free_, &until) == 0;  // a signal ends it too: the caller asks again
}

void End::TakeRecord(Tensor record, Tensor host) {
    seen_ = static_cast<const int32_t*>(DataOf(host.get()));
    record_ = std::move(record);
    host_ = std::move(host);
}

// The device writes the copy whenever it gets there.
bool End::ErrorSeen() const { return seen_ != nullptr && __atomic_load_n(seen_, __ATOMIC_ACQUIRE) != 0; }

}  // namespace ascend_moe_torch
