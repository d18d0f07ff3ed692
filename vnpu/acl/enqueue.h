// Puts work onto a stream: for all of the virtual NPU's libraries (stream.cpp, in libascendcl.so).
#pragma once

#include <utility>

#include "queue.h"

// Runs fn(arg) after all that was enqueued before, on a thread of the device; on a stream that is being captured, at
// every replay of the graph. `drop` (may be null) is called once when arg is no longer needed. Returns 0, or an ACL
// code when the stream is no stream. A null stream is the current device's default stream.
VNPU_EXPORT int vnpu_enqueue(void* stream, void (*fn)(void*), void* arg, void (*drop)(void*), VnpuNeeds needs);

// The same for anything that can be called without arguments; it is kept for as long as it may run.
template <typename F>
int vnpu_enqueue_call(void* stream, F call, VnpuNeeds needs = kNeedsNothing) {
    return vnpu_enqueue(
        stream, [](void* held) { (*static_cast<F*>(held))(); }, new F(std::move(call)),
        [](void* held) { delete static_cast<F*>(held); }, needs);
}
