// Streams, events and captured graphs. Work goes into the queue; on a capturing stream it is recorded instead.
//
// A graph is one list, in the order of enqueue over all streams that take part in the capture: that order
// respects every event wait, so a replay runs the list from front to back, on one stream.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "error.h"
#include "queue.h"

namespace vnpu {

using Works = std::vector<std::shared_ptr<Work>>;

// Work of a graph that can be exchanged between replays; it is one of the graph's steps. Its handle is its address.
struct TaskGroup {
    size_t count;
    Works tasks;  // after the capture only the queue uses it
};

struct Graph {
    uint32_t id;
    Handle origin;  // the stream that began the capture
    int mode;       // of aclmdlRICaptureBegin: 0 global, 1 thread local, 2 relaxed
    std::thread::id thread;
    bool capturing = true;
    Works steps = {};
    std::vector<std::shared_ptr<TaskGroup>> groups = {};
};

struct Stream {
    int id;
    int device;
    uint32_t overflow_switch = 0;
    std::shared_ptr<Graph> capture = nullptr;
    uint64_t last = 0;                       // the number of its last work in the queue
    std::shared_ptr<Works> tasks = nullptr;  // of a group that is captured or updated on it
    std::shared_ptr<TaskGroup> updated = nullptr;
};

struct Event {
    uint32_t flags;
    uint64_t last = 0;  // the number of its last record in the queue; 0: never recorded, or by a graph only
    bool recorded = false;
    int64_t ns = 0;
    std::weak_ptr<Graph> capture;  // recorded inside this capture: a stream that waits for it joins
};

// The stream behind a handle (null: the current device's default stream); null with a message when it is
// none.
Stream* StreamOf(Handle handle, const char* function);

// Enqueues work on a stream, or records it, under GraphMutex.
void Enqueue(Stream& stream, std::shared_ptr<Work> work);

// The capture has ended: every stream that took part is an ordinary stream again. Under GraphMutex.
void LeaveCapture(const Graph& graph);

// kSuccess, or kCaptureNotSupported: the function acts at once, so it cannot be recorded, and a capture is
// under way that forbids such calls (its mode, and that of this thread). Takes GraphMutex.
AclError RefuseInCapture(const char* function);
// aclmdlRICaptureThreadExchangeMode.
int& CaptureModeOfThread();

// Guards every Stream, Event and Graph; never held while work runs.
std::mutex& GraphMutex();

// use(stream) under the lock; kInvalidHandle, with a message that names the caller, for what is no stream.
template <typename Use>
AclError WithStream(Handle handle, const Use& use, const char* function = __builtin_FUNCTION()) {
    std::lock_guard<std::mutex> lock(GraphMutex());
    Stream* stream = StreamOf(handle, function);
    return stream ? use(*stream) : kInvalidHandle;
}

}  // namespace vnpu
