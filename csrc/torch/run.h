// The kernels of the ops: a call from torch's stack to its outputs.
#pragma once

#include <cstdint>

#include "op.h"

namespace ascend_moe_torch {

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
