// What ascend_moe/compiled.py calls, by ctypes. No C++ types, no exceptions cross it.
#pragma once

#include <stdint.h>

#define AM_TORCH_API extern "C" __attribute__((visibility("default")))

// Of this interface; the package that loads the library expects the same.
AM_TORCH_API int am_torch_interface(void);

// Environment variables whose values are part of every call, separated by blanks; before the first call.
AM_TORCH_API void am_torch_watch(const char* names);

// Registers the kernels of an op of torch.ops.ascend_moe. 0, or 1: `text` says why not.
AM_TORCH_API int am_torch_register(uint64_t number, const char* name, char* text, uint64_t bytes);

// The gate of a communicator, that ops and its closing pass one at a time. Acquiring sets `held`, or gives up
// after so many milliseconds or at a signal. Once closed, for good, calls pass to Python.
AM_TORCH_API void* am_torch_gate_create(void* communicator);
AM_TORCH_API void am_torch_gate_destroy(void* gate);
AM_TORCH_API void am_torch_gate_acquire(void* gate, int milliseconds, int* held);
AM_TORCH_API void am_torch_gate_release(void* gate);
AM_TORCH_API void am_torch_gate_close(void* gate);

// A plan with several owners: the native one is destroyed with the last of them.
AM_TORCH_API void* am_torch_plan_create(void* plan, void (*destroy)(void*));
AM_TORCH_API void am_torch_plan_drop(void* shared);

// What Python found out about the call that it was handed on this thread; later equal calls do not get to
// Python.
struct AmTorchCall {
    void* plan;  // of am_torch_plan_create
    void* gate;
    uint64_t communicator_id;
    void* run;                 // am_run of the library that made them
    const char* group;         // c10d's name of the process group; null: none
    const int16_t* positions;  // by argument: its place among the inputs of am_run, -1: no tensor
    uint64_t arguments, inputs;
    const int64_t* outputs;  // torch's number of the dtype, count of sizes, two sizes; four words an output
    uint64_t output_count;
};
// 1: remembered.
AM_TORCH_API int am_torch_remember(const AmTorchCall* call);
// All of them; also what other threads are finding out now.
AM_TORCH_API void am_torch_forget(void);

// The number of what is remembered now, which forgetting changes; read before finding out.
AM_TORCH_API uint64_t am_torch_generation(void);

// Who lends window tensors (csrc/torch/lend.h) to equal calls, if nothing was forgotten since `generation`.
struct AmTorchLender {
    const char* group_ep;
    int64_t world, rank;
    const char* group;  // c10d's name of the process group; null: none
    void* gate;
    void *area, *take, *release;  // am_lent_take, am_lent_release of the library that made the area
    void (*unused)(void);
};
AM_TORCH_API void am_torch_remember_lender(uint64_t generation, const AmTorchLender* lender);
// Before Python ends: window tensors that die later tell nobody.
AM_TORCH_API void am_torch_end_lending(void);

AM_TORCH_API void am_torch_set_place(uint64_t place);
AM_TORCH_API void am_torch_pause(int by);
// Three: calls without Python, those handed to it, and of the first those that torch did not see either.
AM_TORCH_API void am_torch_counts(uint64_t* out);
// For measurements: nanoseconds when this thread's last call without Python entered the kernel, entered and
// left am_run, left the kernel; as long as clocks are on.
AM_TORCH_API void am_torch_clocks(int on);
AM_TORCH_API void am_torch_marks(int64_t* out);
