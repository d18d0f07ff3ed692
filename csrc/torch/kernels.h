// The boxed kernels of the four ops, and how a call that they do not know goes to Python.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "cache.h"

namespace ascend_moe_torch {

// Registers the kernels of one op of ascend_moe for CPU and Autograd; Python's own are those of the op of the
// same name in ascend_moe_python.
void RegisterOp(uint64_t number, const char* name);

// A call that equals one that Python has planned; `made` is what it returns. False: there was none, or its
// communicator is closed or has failed, and nothing was done.
constexpr size_t kMostOutputs = 8;
using Made = std::array<at::Tensor, kMostOutputs>;
ASCEND_MOE_TORCH_SHARED bool RunKnown(const Key& key, const Argument* arguments, Made& made, size_t& count);

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
    std::atomic<uint64_t> straight{0};  // of the compiled ones those that torch's dispatcher did not see
};
ASCEND_MOE_TORCH_SHARED Counts& counts();

// Monotonic nanoseconds of this thread's last call without Python, while clocks are on.
struct Marks {
    int64_t entered, launched, returned, left;  // the kernel, am_run, am_run, the kernel
};
ASCEND_MOE_TORCH_SHARED void MarkEntered();
ASCEND_MOE_TORCH_SHARED void MarkLeft();
const Marks& LastMarks();
void SetClocks(bool on);

// Whether a launch has room for so many.
bool Fits(uint64_t inputs, uint64_t outputs);

// Tests and tools: every call goes to Python while the sum of what was given here is above 0.
void Pause(int by);
ASCEND_MOE_TORCH_SHARED bool Paused();

}  // namespace ascend_moe_torch
