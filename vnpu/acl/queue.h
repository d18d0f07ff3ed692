// The work of this process's devices: one queue, which a thread of its own empties in the order of enqueue. Work that
// waits holds up the later work of its stream only.
//
// torch_npu calls us from threads that hold Python's lock (the GIL) and wait for threads that do not. Work that needs
// the GIL is therefore never run, and never waited for, on the caller's thread: a call that waits for the queue lets
// the GIL go meanwhile.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "error.h"

// What work needs of the thread that runs it.
enum VnpuNeeds : int { kNeedsNothing = 0, kNeedsPython = 1 };

// Waits until all that was enqueued before has run. Returns 0, or an ACL code with its message.
VNPU_EXPORT int vnpu_wait(void);

namespace vnpu {

struct Work {
    std::function<void()> run;
    VnpuNeeds needs = kNeedsNothing;
    uint64_t after = 0;                     // runs when work of this number has run
    std::function<bool()> ready = nullptr;  // and when this is true, by other work
};

inline std::shared_ptr<Work> WorkOf(std::function<void()> run, VnpuNeeds needs = kNeedsNothing) {
    return std::make_shared<Work>(Work{std::move(run), needs});
}

// Puts work at the end, for a stream of which nothing but its address matters. Returns its number, from 1 on.
uint64_t Put(std::shared_ptr<Work> work, const void* stream);

// Runs work, on the queue's thread.
void Run(const Work& work);

// Waits until work number `last` has run. kSuccess, or kQueueTimeout, with a message, where nothing
// ends for the time that HCCL gives a collective and a minute more, or where the handler of a signal has raised.
AclError WaitFor(uint64_t last, const char* function = __builtin_FUNCTION());

// The same for all work that was put before this call.
AclError WaitForAll(const char* function = __builtin_FUNCTION());

// Whether work number `last`, and so all that its stream had before it, has run.
bool HasRun(uint64_t last);

}  // namespace vnpu

// For all of the virtual NPU's libraries (stream.cpp, in libascendcl.so).
//
// Runs a function after all that was enqueued before, on a thread of the device; on a stream that is being captured, at
// every replay of the graph. It lives as long as it may run. Returns 0, or an ACL code when the stream is no stream. A
// null stream is the current device's default stream.
VNPU_EXPORT int vnpu_enqueue(void* stream, std::function<void()> run, VnpuNeeds needs = kNeedsNothing);
