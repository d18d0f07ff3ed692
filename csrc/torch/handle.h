// One rank's communicator handle: the lock that ops and its closing share, what calls are planned for, and its last
// calls, without their tensors, for reports when a rank does not come. Every call is recorded, so it costs a few words.
#pragma once

#include <semaphore.h>
#include <time.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "api.h"
#include "op.h"

namespace ascend_moe_torch {

constexpr char kFieldEnd = '\x1f', kCallEnd = '\x1e';  // in texts of calls

// The fields that equal calls share: op, group, comm_alg, tensors with dtypes and shapes.
using CallText = std::shared_ptr<const std::string>;

inline int64_t NanosOf(clockid_t clock) {
    constexpr int64_t kNanosPerSecond = 1000000000;
    timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * kNanosPerSecond + now.tv_nsec;
}

struct RecordedCall {
    CallText text;
    uint64_t number = 0;  // among the calls of its handle, from 1 on
    int64_t began = 0;    // nanoseconds since 1970
    int64_t took = -1;    // nanoseconds; -1: it has not returned
    uint64_t epoch = 0;   // 0: not looked at
    std::string outcome;  // of a call that has failed
};

class LastCalls {
public:
    // Returns the call's number. Forgets the call kRemembered before it.
    uint64_t Begin(const CallText& text) {
        const std::lock_guard<std::mutex> lock(mutex_);
        RecordedCall& call = calls_[++number_ % kRemembered];
        call = {text, number_, NanosOf(CLOCK_REALTIME), -1, 0, {}};
        return number_;
    }
    void Returned(uint64_t number, int64_t took) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (calls_[number % kRemembered].number == number) calls_[number % kRemembered].took = took;
    }
    void Failed(uint64_t number, int64_t took, uint64_t epoch, const char* outcome) {
        const std::lock_guard<std::mutex> lock(mutex_);
        RecordedCall& call = calls_[number % kRemembered];
        if (call.number != number) return;
        call.took = took;
        call.epoch = epoch;
        call.outcome = outcome;
    }
    // All, the oldest first: number, began, took, epoch, outcome, and the fields of `text`.
    std::string Text() const {
        const std::lock_guard<std::mutex> lock(mutex_);
        std::string text;
        for (uint64_t i = 1; i <= kRemembered; ++i) {
            const RecordedCall& call = calls_[(number_ + i) % kRemembered];
            if (call.number == 0) continue;
            for (int64_t word :
                 {static_cast<int64_t>(call.number), call.began, call.took, static_cast<int64_t>(call.epoch)})
                text += std::to_string(word) + kFieldEnd;
            text += call.outcome + kFieldEnd + *call.text + kCallEnd;
        }
        return text;
    }

private:
    static constexpr uint64_t kRemembered = 200;
    mutable std::mutex mutex_;
    uint64_t number_ = 0;
    std::array<RecordedCall, kRemembered> calls_;
};

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
