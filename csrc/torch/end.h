// One rank's end of a communicator: the lock that ops and its closing share, and what calls are planned for.
#pragma once

#include <semaphore.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "api.h"
#include "tensors.h"

namespace ascend_moe_torch {

class End {
public:
    explicit End(const AmTorchEnd& facts);
    ~End();
    End(const End&) = delete;
    End& operator=(const End&) = delete;

    const AmTorchEnd& facts() const { return facts_; }

    void Acquire();
    // Whether it was free within so many milliseconds.
    bool AcquireFor(int milliseconds);
    void Release() { sem_post(&free_); }  // by any thread, as Python's locks

    // Closed, or failed: for good.
    void Shut() { open_.store(false); }
    bool open() const { return open_.load(); }

    // NPU, while the lock is held: the error record, and a copy of it in pinned memory.
    void TakeRecord(Tensor record, Tensor host);
    AtenTensorHandle record() const { return record_.get(); }
    AtenTensorHandle host_record() const { return host_.get(); }
    bool ErrorSeen() const;
    bool launched() const { return algorithm_.load() != 0; }
    uint32_t algorithm() const { return algorithm_.load(); }
    void Launched(uint32_t algorithm) { algorithm_.store(algorithm); }

private:
    AmTorchEnd facts_;
    sem_t free_;
    std::atomic<bool> open_{true};
    std::atomic<uint32_t> algorithm_{0};
    Tensor record_, host_;
    const int32_t* seen_ = nullptr;
};

// Holds the lock of an end.
class Turn {
public:
    explicit Turn(End& end) : end_(end) { end_.Acquire(); }
    ~Turn() { end_.Release(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

private:
    End& end_;
};

}  // namespace ascend_moe_torch
