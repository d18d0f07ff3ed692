// One rank's communicator handle: the lock that ops and its closing share, and what calls are planned for.
#pragma once

#include <semaphore.h>
#include <time.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "api.h"
#include "op.h"
#include "record.h"

namespace ascend_moe_torch {

struct OpenCall;  // run.cpp

class CommHandle {
public:
    explicit CommHandle(const AmTorchHandle& facts) : facts_(facts) { sem_init(&free_, 0, 1); }
    ~CommHandle() { sem_destroy(&free_); }
    CommHandle(const CommHandle&) = delete;
    CommHandle& operator=(const CommHandle&) = delete;

    const AmTorchHandle& facts() const { return facts_; }

    // As of a mutex. After a signal the wait goes on: Python runs its handler once the op has returned.
    void lock() {
        while (sem_wait(&free_) != 0) {
        }
    }
    // Whether it was free within so many milliseconds. A signal ends the wait too: the caller asks again.
    bool AcquireFor(int milliseconds) {
        constexpr int64_t kNanosPerMilli = 1000000, kNanosPerSecond = 1000000000;
        if (sem_trywait(&free_) == 0) return true;
        if (milliseconds <= 0) return false;
        timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        const int64_t nanos = until.tv_nsec + milliseconds * kNanosPerMilli;
        until.tv_sec += nanos / kNanosPerSecond;
        until.tv_nsec = nanos % kNanosPerSecond;
        return sem_timedwait(&free_, &until) == 0;
    }
    void unlock() { sem_post(&free_); }  // by any thread, as Python's locks

    // Closed, or failed: for good.
    void Shut() {
        open_.store(false);
        SetOpened(nullptr);
    }
    bool open() const { return open_.load(); }

    // The op in flight: the only one that an op of this handle may finish.
    std::shared_ptr<OpenCall> opened() const {
        const std::lock_guard<std::mutex> lock(opened_mutex_);
        return opened_;
    }
    void SetOpened(std::shared_ptr<OpenCall> call) {
        const std::lock_guard<std::mutex> lock(opened_mutex_);
        opened_.swap(call);  // the last one's tensors go after the lock
    }

    // NPU, while the lock is held: the error record, and a copy of it in pinned memory.
    void TakeRecord(Tensor record, Tensor host) {
        seen_ = static_cast<const int32_t*>(DataOf(host.get()));
        record_ = std::move(record);
        host_ = std::move(host);
    }
    AtenTensorHandle record() const { return record_.get(); }
    // Where the record is copied to behind the launch that comes now; null: not behind this one. The first launch finds
    // what is wrong with a group, later copies only say sooner what `check` says.
    AtenTensorHandle host_record() const { return launches_ % kLaunchesACopy == 0 ? host_.get() : nullptr; }
    // NPU, while the lock is held: the registered area of the own window (am_registered_open), once there is one.
    void TakeRegisteredArea(void* area) { registered_ = area; }
    void* registered_area() const { return registered_; }
    uint32_t launches() const { return launches_; }
    // The device writes the copy whenever it gets there.
    bool ErrorSeen() const { return seen_ != nullptr && __atomic_load_n(seen_, __ATOMIC_ACQUIRE) != 0; }
    LastCalls& last_calls() { return last_calls_; }
    bool launched() const { return algorithm_.load() != 0; }
    uint32_t algorithm() const { return algorithm_.load(); }
    void Launched(uint32_t algorithm) {
        algorithm_.store(algorithm);
        ++launches_;
    }

private:
    static constexpr uint32_t kLaunchesACopy = 16;
    AmTorchHandle facts_;
    LastCalls last_calls_;
    sem_t free_;
    std::atomic<bool> open_{true};
    std::atomic<uint32_t> algorithm_{0};
    uint32_t launches_ = 0;  // NPU
    mutable std::mutex opened_mutex_;
    std::shared_ptr<OpenCall> opened_;
    Tensor record_, host_;
    const int32_t* seen_ = nullptr;
    void* registered_ = nullptr;
};

}  // namespace ascend_moe_torch
