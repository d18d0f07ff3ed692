// Waiting for other ranks: bounded, and it names whom it waits for.
#include <poll.h>
#include <sched.h>
#include <time.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "comm.h"

namespace vnpu {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kLivenessEvery = std::chrono::milliseconds(50);

// Spin a little, then give the core away, then sleep 50 us to 1 ms.
void Pause(uint64_t round) {
    if (round < 64) return;
    if (round < 512) {
        sched_yield();
        return;
    }
    const long ns = round < 1024 ? 50'000 : 1'000'000;
    timespec time{0, ns};
    nanosleep(&time, nullptr);
}

std::string Describe(const Comm& comm, int rank) {
    const RankControl* control = RankOf(comm.control, rank);
    char text[160];
    std::snprintf(text, sizeof text, "rank %d (process %d, in call %llu, %.23s)", rank, control->pid,
                  static_cast<unsigned long long>(control->call.sequence), control->call.op);
    return text;
}

}  // namespace

bool Gone(int pidfd) {
    if (pidfd < 0) return false;
    pollfd poll_fd{pidfd, POLLIN, 0};
    return poll(&poll_fd, 1, 0) > 0 && (poll_fd.revents & (POLLIN | POLLHUP | POLLERR));
}

double TimeoutSeconds() {
    for (const char* name : {"ASCEND_MOE_TIMEOUT_S", "HCCL_EXEC_TIMEOUT"}) {
        const char* text = std::getenv(name);
        if (text && *text) {
            const double seconds = std::atof(text);
            if (seconds > 0) return seconds;
        }
    }
    return 120.0;
}

HcclResult Fail(Comm& comm, HcclResult code, int culprit, const std::string& text) {
    Failure* failure = FailureOf(comm.control);
    uint32_t none = 0;
    if (failure->state.compare_exchange_strong(none, 1)) {
        failure->code = code;
        failure->culprit = culprit;
        failure->reporter = comm.rank;
        std::snprintf(failure->text, sizeof failure->text, "%s", text.c_str());
        failure->state.store(2, std::memory_order_release);
    }
    vnpu_error("HCCL communicator %s, rank %d of %d: %s", comm.name.c_str(), comm.rank, comm.world,
               text.c_str());
    return code;
}

HcclResult CheckFailed(Comm& comm) {
    Failure* failure = FailureOf(comm.control);
    if (failure->state.load(std::memory_order_acquire) != 2) return kHcclSuccess;
    vnpu_error("HCCL communicator %s, rank %d of %d: has failed, as rank %d reported: %s", comm.name.c_str(),
               comm.rank, comm.world, failure->reporter, failure->text);
    return failure->code;
}

HcclResult WaitFor(Comm& comm, const std::function<bool(int)>& awaited, const std::string& what) {
    const double seconds = TimeoutSeconds();
    const auto start = Clock::now();
    auto next_look = start + kLivenessEvery;
    for (uint64_t round = 0;; ++round) {
        int missing = -1;
        for (int r = 0; r < comm.world && missing < 0; ++r) {
            if (awaited(r)) missing = r;
        }
        if (missing < 0) return kHcclSuccess;
        if (FailureOf(comm.control)->state.load(std::memory_order_acquire) == 2) return CheckFailed(comm);
        const auto now = Clock::now();
        if (round > 512 && now >= next_look) {
            next_look = now + kLivenessEvery;
            for (int r = 0; r < comm.world; ++r) {
                const bool left = RankOf(comm.control, r)->left.load(std::memory_order_acquire) != 0;
                // What it did last is visible once it is known to be gone: look again before giving it up.
                if (r == comm.rank || !(left || Gone(comm.live_fds[r])) || !awaited(r)) continue;
                return Fail(comm, kHcclRemote, r,
                            what + ": " + Describe(comm, r) +
                                (left ? " has destroyed its end of the communicator"
                                      : " is gone: it exited or was killed"));
            }
        }
        if (std::chrono::duration<double>(now - start).count() > seconds) {
            char limit[64];
            std::snprintf(limit, sizeof limit, "%g s", seconds);
            return Fail(comm, kHcclTimeout, missing,
                        what + ": waited " + limit + " for " + Describe(comm, missing) +
                            ", which is alive (ASCEND_MOE_TIMEOUT_S sets the limit)");
        }
        Pause(round);
    }
}

HcclResult Barrier(Comm& comm, const std::string& what) {
    const uint64_t mine = ++comm.arrivals;
    RankOf(comm.control, comm.rank)->arrived.store(mine, std::memory_order_release);
    return WaitFor(
        comm, [&](int r) { return RankOf(comm.control, r)->arrived.load(std::memory_order_acquire) < mine; },
        what);
}

}  // namespace vnpu
