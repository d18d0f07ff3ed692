// The one lock of a communicator: ops, compiled or Python's, and its closing take turns here.
#pragma once

#include <semaphore.h>

#include <atomic>
#include <cstdint>

namespace ascend_moe_torch {

// am_run of csrc/ops/ascend_moe.h, in whichever library Python has opened.
using Run = int (*)(void* comm, void* plan, const void* const* inputs, void* const* outputs, int32_t* record,
                    char* fault, uint64_t fault_bytes);

class Gate {
public:
    explicit Gate(void* communicator) : communicator_(communicator) { sem_init(&free_, 0, 1); }
    ~Gate() { sem_destroy(&free_); }
    Gate(const Gate&) = delete;
    Gate& operator=(const Gate&) = delete;

    void Acquire();
    // Whether it was free within so many milliseconds.
    bool AcquireFor(int milliseconds);
    void Release() { sem_post(&free_); }  // by any thread, as Python's locks

    // The native communicator, which is there as long as the gate is held; null: closed, or it has failed.
    void* communicator() const { return communicator_.load(); }
    void Close() { communicator_.store(nullptr); }

private:
    sem_t free_;
    std::atomic<void*> communicator_;
};

class Turn {
public:
    explicit Turn(Gate& gate) : gate_(gate) { gate_.Acquire(); }
    ~Turn() { gate_.Release(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

private:
    Gate& gate_;
};

}  // namespace ascend_moe_torch
