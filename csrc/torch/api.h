// The C interface between Python (ascend_moe/native/binding.py) and the library of the torch ops. No C++
// types and no exceptions cross it.
#pragma once

#include <stdint.h>

#define AM_TORCH_API extern "C" __attribute__((visibility("default")))

// A call that has to be prepared: no equal call was prepared before.
struct AmTorchCall {
    const char* op;        // name in torch.ops.ascend_moe
    const char* group_ep;  // UTF-8 of group_ep_bytes bytes, which may hold NUL
    uint64_t group_ep_bytes;
    const char* comm_alg;  // as given, of comm_alg_bytes bytes; empty where the op has none
    uint64_t comm_alg_bytes;
    int64_t world, rank;  // ep_world_size, ep_rank_id
    int32_t on_npu;
    int32_t device_index;
};

// What the environment and the group say of it.
struct AmTorchSettings {
    int64_t world, rank;      // of the group of that name; -1: not known yet
    int64_t most_window_mib;  // that any window can have
    int64_t cores;
    int64_t core_barrier;                            // kBarrierByBlocks or kBarrierBySyncAll
    int64_t timestamps;                              // 1: cores leave timestamps of their phases
    int64_t deadline_micros, first_deadline_micros;  // of an op, of a communicator's first op
    char comm_alg[64];                               // what is in force; one that is longer is unknown
};

// One rank's communicator handle.
struct AmTorchHandle {
    uint64_t number;     // by which Python knows it
    void* communicator;  // of am_comm_create; on an NPU null
    int64_t world, rank;
    int64_t window_mib, registered_mib;
    int32_t context_kind, ranks_per_server, intra_node_stores;
    int32_t auto_is_window;  // NPU: no bring-up has shown that direct's loads of other ranks' rows are right
    int64_t buffer_mib;      // NPU: HCCL_BUFFSIZE of the group
    int64_t core_barrier;    // NPU: 1 + the faster kind by the probe results (CORE_BARRIERS of settings); 0: unknown
    int32_t on_npu;
    int32_t of_process_group;  // `alive` is asked in each call
    int32_t rdma_flags;        // rows between servers lie in flagged blocks
};

// Python's callbacks. A returned text is the message of an error that Python stores for the calling thread and the op
// raises. Null: success.
struct AmTorchPython {
    const char* (*settings)(const struct AmTorchCall*, struct AmTorchSettings*);
    const char* (*open)(const struct AmTorchCall*, void** handle);  // of am_torch_handle_create
    int (*alive)(uint64_t number);             // is the process group still the one that it was opened for?
    const char* (*unusable)(uint64_t number);  // closed, failed, or an earlier op on the NPU has found something
    const char* (*failed)(uint64_t number, int code, const int32_t* record, const char* fault);
    // A broken rule of op_host: its argument, the window that it needs (0: another rule), and the argument's dtype if
    // it is a tensor.
    const char* (*rule_broken)(const struct AmTorchCall*, const char* rule, const char* argument, int64_t needed_mib,
                               const char* dtype);
    // An error of this kind (a class of ascend_moe.errors); the argument may be empty.
    const char* (*refused)(const struct AmTorchCall*, const char* kind, const char* text, const char* argument);
};

// Version of this interface; the package that loads the library expects the same.
AM_TORCH_API int am_torch_interface(void);
// Before the first call. `variables`: names of the environment variables that settings are made from. 0, or
// 1: `text` says why not.
AM_TORCH_API int am_torch_python(const struct AmTorchPython* python, const char* variables, char* text, uint64_t bytes);
// Registers the kernels of an op of torch.ops.ascend_moe, by its schema. As above.
AM_TORCH_API int am_torch_register(const char* name, const char* schema, char* text, uint64_t bytes);
// The libraries whose C functions plan and launch: an engine (csrc/abi), the NPU adapter (csrc/npu). As above.
AM_TORCH_API int am_torch_use_engine(const char* path, char* text, uint64_t bytes);
AM_TORCH_API int am_torch_use_adapter(const char* path, char* text, uint64_t bytes);

// Handles: destroyed when Python and the last prepared call release them. The lock is held by one op, or by closing.
// Acquiring sets `held`, or gives up after so many milliseconds or at a signal. Once a handle is shut, calls ask Python
// for another.
AM_TORCH_API void* am_torch_handle_create(const struct AmTorchHandle* handle);
AM_TORCH_API void am_torch_handle_destroy(void* handle);
AM_TORCH_API void am_torch_handle_acquire(void* handle, int milliseconds, int* held);
AM_TORCH_API void am_torch_handle_release(void* handle);
AM_TORCH_API void am_torch_handle_shut(void* handle);
// NPU: code of the algorithm of the last launch; 0: there was none.
AM_TORCH_API uint32_t am_torch_handle_algorithm(void* handle);
// NPU, while the lock is held: this rank's registered area, of am_registered_open; null: it has none any more.
AM_TORCH_API void am_torch_handle_register(void* handle, void* area);

// This thread's last call: a number that changes with each call, the number of its handle and its own there (0: refused
// earlier), its rank, its nanoseconds. `text`: op, group, comm_alg, tensors, separated by 0x1f. Returns the bytes of
// the text; 0: no call.
AM_TORCH_API uint64_t am_torch_last_call(int64_t* out, char* text, uint64_t bytes);
// failed: records that call `number` failed. calls: all last calls, oldest first, each terminated by 0x1e: number,
// start in nanoseconds since 1970, duration (-1: did not return), epoch, error, and the text as above, separated by
// 0x1f; returns the bytes of the text.
AM_TORCH_API void am_torch_handle_failed(void* handle, uint64_t number, int64_t took, uint64_t epoch,
                                         const char* outcome);
AM_TORCH_API uint64_t am_torch_handle_calls(void* handle, char* text, uint64_t bytes);

// Forgets all prepared calls, also those that other threads are preparing now.
AM_TORCH_API void am_torch_forget(void);
// Which rank of which LocalCluster the calling thread is; 0: none.
AM_TORCH_API void am_torch_set_place(uint64_t place);
// While the sum of what was given is above 0, every call is prepared anew.
AM_TORCH_API void am_torch_prepare_always(int by);
// Sets whether this thread's next op only sends. take_open: the op in flight, for the caller to own, or null.
// The op ascend_moe_binding.finish completes it.
AM_TORCH_API void am_torch_send_only(int next);
AM_TORCH_API void* am_torch_take_open(void);
AM_TORCH_API void am_torch_drop_open(void* open);
// Calls so far: launched as prepared before, and prepared.
AM_TORCH_API void am_torch_counts(uint64_t* out);
// For measurements: monotonic nanoseconds when this thread's last call entered the op, entered and left the kernel (or
// the launch), left the op.
AM_TORCH_API void am_torch_call_times(int64_t* out);

// ---- of the adapter to torch_npu (csrc/npu): what is handed over to have an op queued on an NPU ----

// A call that keeps all rules. Tensors are AtenTensorHandle of torch's stable ABI, null where there is none.
struct AmNpuLaunch {
    int32_t op;  // kOpDispatch, kOpCombine
    int32_t contract;
    void* const* inputs;        // by TensorIndex of op_host
    const int64_t* attributes;  // by AttributeIndex of op_host; kNoValue: absent
    const char *group_ep, *group_tp, *comm_alg;
    int64_t window_mib, timeout_us, part, ranks_per_server;
    int64_t core_barrier;  // as AmTorchHandle has it
    void* const* outputs;  // in the order of the op
    void* record;          // the error record on the device
    void* host_record;     // pinned memory, where it is copied to; null: not this time
};

enum AmNpuLaunchResult { kNpuQueued = 0, kNpuNoOperator = 1, kNpuRefused = 2, kNpuOther = 3 };

// Queues the op and, if requested, the copy of its record on the current stream of the tensors' device, without
// waiting. Unless it returns kNpuQueued, `text` contains the reason.
AM_TORCH_API int am_npu_launch(const struct AmNpuLaunch* launch, char* text, uint64_t bytes);
