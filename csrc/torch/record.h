// The last calls of one rank's communicator handle, without their tensors, for reports when a rank does not come. Every
// call is recorded, so it costs only a few words.
#pragma once

#include <time.h>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

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

}  // namespace ascend_moe_torch
