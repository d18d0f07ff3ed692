// Shared by the virtual NPU's libraries: puts work onto a stream, reports failures.
// The functions live in libascendcl.so; libopapi.so, libcust_opapi.so and libhccl.so link it.
#pragma once

#include <cstdint>
#include <utility>

#define VNPU_EXPORT extern "C" __attribute__((visibility("default")))

// Streams of the virtual NPU run their work at enqueue, on the calling thread: fn(arg) runs now.
// On a stream that is being captured fn(arg) does not run: it is recorded, and runs at every replay of the
// graph. `drop` (may be null) is called once when arg is no longer needed: after fn here, or with the
// recorded graph. Returns 0, or a code for the caller of the ACL function when the stream is no stream. A
// null stream is the current device's default stream.
VNPU_EXPORT int vnpu_enqueue(void* stream, void (*fn)(void*), void* arg, void (*drop)(void*));

// The same for anything that can be called without arguments; it is kept for as long as it may run.
template <typename F>
int vnpu_enqueue_call(void* stream, F call) {
    return vnpu_enqueue(
        stream, [](void* held) { (*static_cast<F*>(held))(); }, new F(std::move(call)),
        [](void* held) { delete static_cast<F*>(held); });
}

// Called by a running fn: the launch was good, the work failed on the device. The enqueue succeeds, and the
// next call that waits (a synchronize) returns 507035 (a vector core exception), with the text of this
// thread's last vnpu_error as aclGetRecentErrMsg.
VNPU_EXPORT void vnpu_fault(void);

// 1 while the stream is being captured: nothing on it runs, so nothing on it may be waited for.
VNPU_EXPORT int vnpu_capturing(void* stream);

// Sets the text of aclGetRecentErrMsg (this thread's, printf format, one line) and prints it once on stderr.
VNPU_EXPORT void vnpu_error(const char* format, ...) __attribute__((format(printf, 1, 2)));

// The SoC that this process pretends to have: $ASCEND_MOE_VNPU_SOC, by default Ascend910_9391.
VNPU_EXPORT const char* vnpu_soc(void);
