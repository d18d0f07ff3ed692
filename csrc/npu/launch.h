// The C interface of the adapter to torch_npu: what csrc/torch hands over to have an op queued on an NPU.
#pragma once

#include <stdint.h>

// A call that keeps all rules. Tensors are AtenTensorHandle of torch's stable ABI, null where there is none.
struct AmNpuLaunch {
    int32_t op;  // kOpDispatch, kOpCombine
    int32_t contract;
    void* const* inputs;        // by TensorIndex of op_host
    const int64_t* attributes;  // by AttributeIndex of op_host; kNoValue: absent
    const char *group_ep, *group_tp, *comm_alg;
    int64_t window_mib, timeout_us;
    void* const* outputs;        // in the order of the op
    void *record, *host_record;  // the error record on the device; in pinned memory, where it is copied to
};

enum AmNpuLaunchResult { kNpuQueued = 0, kNpuNoOperator = 1, kNpuRefused = 2, kNpuOther = 3 };

// Queues the op, and behind it the copy of its record, on the current stream of the tensors' device; waits
// for neither. Not kNpuQueued: `text` says why.
extern "C" __attribute__((visibility("default"))) int am_npu_launch(const struct AmNpuLaunch* launch,
                                                                    char* text, uint64_t bytes);
