// Events: marked by work in the queue, when everything before it has run.
#include <chrono>
#include <unordered_set>

#include "queue.h"
#include "graph.h"

using namespace vnpu;

namespace {

constexpr uint32_t kTimeLine = 8;  // ACL_EVENT_TIME_LINE: the event records a time

std::unordered_set<Event*>& Events() {
    static auto* events = new std::unordered_set<Event*>;
    return *events;
}

Event* EventOf(Handle handle, const char* function) {
    auto* event = static_cast<Event*>(handle);
    if (Events().count(event)) return event;
    vnpu_error("%s: %p is no event of the virtual NPU (destroyed already?)", function, handle);
    return nullptr;
}

// use(event) under the lock; kInvalidHandle, with a message that names the caller, for what is no event.
template <typename Use>
AclError WithEvent(Handle handle, const Use& use, const char* function = __builtin_FUNCTION()) {
    std::lock_guard<std::mutex> lock(GraphMutex());
    Event* event = EventOf(handle, function);
    return event ? use(*event) : kInvalidHandle;
}

// The number of the event's last record in the queue.
AclError FindLast(Handle handle, uint64_t* last, const char* function) {
    return WithEvent(handle, [&](const Event& event) { return *last = event.last, kSuccess; }, function);
}

AclError Create(Handle* out, uint32_t flags) {
    if (!out) return kParamInvalid;
    std::lock_guard<std::mutex> lock(GraphMutex());
    auto* event = new Event;
    event->flags = flags;
    Events().insert(event);
    *out = event;
    return kSuccess;
}

// Runs in the queue, also at every replay; the event may be gone by then.
void Mark(Event* event) {
    std::lock_guard<std::mutex> lock(GraphMutex());
    if (!Events().count(event)) return;
    event->ns = std::chrono::steady_clock::now().time_since_epoch().count();
    event->recorded = true;
}

}  // namespace

VNPU_EXPORT AclError aclrtCreateEventWithFlag(Handle* event, uint32_t flag) { return Create(event, flag); }
VNPU_EXPORT AclError aclrtCreateEventExWithFlag(Handle* event, uint32_t flag) { return Create(event, flag); }

VNPU_EXPORT AclError aclrtDestroyEvent(Handle handle) {
    return WithEvent(handle, [](Event& event) {
        Events().erase(&event);
        delete &event;
        return kSuccess;
    });
}

VNPU_EXPORT AclError aclrtRecordEvent(Handle handle, Handle stream_handle) {
    std::lock_guard<std::mutex> lock(GraphMutex());
    Event* event = EventOf(handle, "aclrtRecordEvent");
    Stream* stream = StreamOf(stream_handle, "aclrtRecordEvent");
    if (!event || !stream) return kInvalidHandle;
    event->capture = stream->capture;
    Enqueue(*stream, WorkOf([event] { Mark(event); }));
    if (!stream->capture) event->last = stream->last;
    return kSuccess;
}

VNPU_EXPORT AclError aclrtResetEvent(Handle handle, Handle) {
    return WithEvent(handle, [](Event& event) {
        event.recorded = false;
        event.capture.reset();
        return kSuccess;
    });
}

// A stream that waits for an event of a capture joins it.
VNPU_EXPORT AclError aclrtStreamWaitEvent(Handle stream_handle, Handle handle) {
    std::lock_guard<std::mutex> lock(GraphMutex());
    Event* event = EventOf(handle, "aclrtStreamWaitEvent");
    Stream* stream = StreamOf(stream_handle, "aclrtStreamWaitEvent");
    if (!event || !stream) return kInvalidHandle;
    std::shared_ptr<Graph> capture = event->capture.lock();
    if (!capture || !capture->capturing) {
        if (HasRun(event->last)) return kSuccess;
        auto wait = WorkOf([] {});
        wait->after = event->last;
        Enqueue(*stream, std::move(wait));
        return kSuccess;
    }
    if (stream->capture == capture) return kSuccess;
    if (stream->capture) {
        vnpu_error("aclrtStreamWaitEvent: stream %d is in capture %u and the event in capture %u", stream->id,
                   stream->capture->id, capture->id);
        return kStreamCaptured;
    }
    stream->capture = capture;
    return kSuccess;
}

VNPU_EXPORT AclError aclrtSynchronizeEvent(Handle handle) {
    uint64_t last = 0;
    const auto find = [&](const Event& event) {
        last = event.last;
        std::shared_ptr<Graph> capture = event.capture.lock();
        if (!capture || !capture->capturing) return kSuccess;
        vnpu_error("aclrtSynchronizeEvent: the event was recorded in capture %u, which is under way", capture->id);
        return kEventCaptured;
    };
    if (AclError code = WithEvent(handle, find)) return code;
    if (AclError code = WaitFor(last)) return code;
    return TakeFault();
}

// ACL_EVENT_RECORDED_STATUS_COMPLETE (1); an event never recorded is 0, NOT_READY.
VNPU_EXPORT AclError aclrtQueryEventStatus(Handle handle, int* status) {
    if (!status) return kParamInvalid;
    return WithEvent(handle, [&](Event& event) {
        *status = event.recorded && HasRun(event.last) ? 1 : 0;
        return kSuccess;
    });
}

// ACL_EVENT_WAIT_STATUS_COMPLETE (0): what waits for the event is behind it in the queue.
VNPU_EXPORT AclError aclrtQueryEventWaitStatus(Handle handle, int* status) {
    if (!status) return kParamInvalid;
    return WithEvent(handle, [&](Event&) { return *status = 0, kSuccess; });
}

VNPU_EXPORT AclError aclrtEventElapsedTime(float* ms, Handle start_handle, Handle end_handle) {
    uint64_t last[2] = {};
    if (AclError code = FindLast(start_handle, &last[0], "aclrtEventElapsedTime")) return code;
    if (AclError code = FindLast(end_handle, &last[1], "aclrtEventElapsedTime")) return code;
    if (AclError code = WaitFor(last[0] > last[1] ? last[0] : last[1])) return code;
    std::lock_guard<std::mutex> lock(GraphMutex());
    Event* start = EventOf(start_handle, "aclrtEventElapsedTime");
    Event* end = EventOf(end_handle, "aclrtEventElapsedTime");
    if (!ms || !start || !end) return kParamInvalid;
    for (const Event* event : {start, end}) {
        if (event->recorded && event->flags & kTimeLine) continue;
        vnpu_error("aclrtEventElapsedTime: the %s event %s", event == start ? "start" : "end",
                   event->recorded ? "has no time: create it with enable_timing=True (ACL_EVENT_TIME_LINE)"
                                   : "was never recorded");
        return kEventTimestampInvalid;
    }
    *ms = static_cast<float>(static_cast<double>(end->ns - start->ns) * 1e-6);
    return kSuccess;
}

// Microseconds of the host's monotonic clock.
VNPU_EXPORT AclError aclrtEventGetTimestamp(Handle handle, uint64_t* timestamp) {
    uint64_t last = 0;
    if (AclError code = FindLast(handle, &last, "aclrtEventGetTimestamp")) return code;
    if (AclError code = WaitFor(last)) return code;
    return WithEvent(handle, [&](Event& event) {
        if (!timestamp || !event.recorded || !(event.flags & kTimeLine)) return kEventTimestampInvalid;
        *timestamp = static_cast<uint64_t>(event.ns / 1000);
        return kSuccess;
    });
}
