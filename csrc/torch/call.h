// A call of an op: from torch's stack to a prepared call (prepare.cpp) and on to its outputs (run.cpp).
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "api.h"
#include "cache.h"
#include "op.h"

namespace ascend_moe_torch {

void UsePython(const AmTorchPython& python);
const AmTorchPython& python();

// An error that Python keeps for this thread; torch turns this into a RuntimeError of the same text.
struct Raised : std::runtime_error {
    using std::runtime_error::runtime_error;
};
// Throws Raised where a function of AmTorchPython has returned a text.
inline void Raise(const char* text) {
    if (text != nullptr) throw Raised(text);
}

// Throws Raised: the call breaks a rule, or its group cannot be opened.
std::shared_ptr<Prepared> Prepare(const Op& op, const Arguments& arguments, const Device& device,
                                  bool on_npu);

// The call as Python is told of it; the texts are those of `arguments`, and `op`'s name.
AmTorchCall Describe(const Op& op, const Arguments& arguments, const Device& device, bool on_npu);

// The device of all tensors. Throws Raised where there is more than one, or a tensor is not dense, or an int
// that no rule can be asked about.
Device OneDevice(const Op& op, const Arguments& arguments, bool on_npu);

constexpr uint64_t kMostOps = 4;

// Registers the kernels for tensors on CPU and NPU. Throws std::runtime_error.
void RegisterOp(const char* name, const char* schema);

// torch.ops.ascend_moe_binding.take_record: hands the error record of an NPU's end over. Throws as above.
void RegisterTakeRecord();

// While the sum of what was given is above 0, every call is prepared anew.
void PrepareAlways(int by);

struct Counts {
    uint64_t known, prepared;
};
Counts CallCounts();

// Monotonic nanoseconds of this thread's last call.
struct Marks {
    int64_t entered, launched, returned, left;
};
const Marks& LastMarks();

}  // namespace ascend_moe_torch
