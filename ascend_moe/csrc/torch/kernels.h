// The boxed kernels of the four ops, and how a call that they do not know goes to Python.
#pragma once

#include <atomic>
#include <cstdint>

#include "cache.h"

namespace ascend_moe_torch {

// Registers the kernels of one op of ascend_moe for CPU and Autograd; Python's own are those of the op of the
// same name in ascend_moe_python.
void RegisterOp(uint64_t number, const char* name);

// The call that this thread has handed to Python, for Python to say what it found; null: none, or one without
// a key.
struct Pending {
    const Key* key;
    uint64_t generation;
};
const Pending* PendingCall();

struct Counts {
    std::atomic<uint64_t> compiled{0};  // launched without Python
    std::atomic<uint64_t> python{0};    // handed to Python
};
Counts& counts();

// Monotonic nanoseconds of this thread's last call without Python, while clocks are on.
struct Marks {
    int64_t entered, launched, returned, left;  // the CPU kernel, am_run, am_run, the CPU kernel
};
const Marks& LastMarks();
void SetClocks(bool on);

// Whether a launch has room for so many.
bool Fits(uint64_t inputs, uint64_t outputs);

// Tests and tools: every call goes to Python while the sum of what was given here is above 0.
void Pause(int by);
bool Paused();

}  // namespace ascend_moe_torch
