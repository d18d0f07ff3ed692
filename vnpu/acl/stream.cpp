// Streams: work runs at enqueue, on the calling thread, so a stream is always idle between two calls.
#include <map>
#include <unordered_set>

#include "device.h"
#include "graph.h"

namespace vnpu {
namespace {

std::unordered_set<Stream*>& Streams() {
    static auto* streams = new std::unordered_set<Stream*>;
    return *streams;
}

Stream* NewStream() {
    static int next_id = 0;
    Stream* stream = new Stream{next_id++, CurrentDevice(), 0, nullptr};
    Streams().insert(stream);
    return stream;
}

}  // namespace

std::mutex& GraphMutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
}

Stream* StreamOf(Handle handle, const char* function) {
    if (!handle) {
        static auto* defaults = new std::map<int, Stream*>;
        Stream*& stream = (*defaults)[CurrentDevice()];
        if (!stream) stream = NewStream();
        return stream;
    }
    auto* stream = static_cast<Stream*>(handle);
    if (Streams().count(stream)) return stream;
    vnpu_error("%s: %p is no stream of the virtual NPU (destroyed already?)", function, handle);
    return nullptr;
}

void LeaveCapture(const Graph& graph) {
    for (Stream* stream : Streams()) {
        if (stream->capture.get() == &graph) stream->capture.reset();  // the registry holds the graph
    }
}

int& CaptureModeOfThread() {
    static thread_local int mode = 0;
    return mode;
}

AclError RefuseInCapture(const char* function) {
    constexpr int kThreadLocal = 1, kRelaxed = 2;
    if (CaptureModeOfThread() == kRelaxed) return kSuccess;
    std::lock_guard<std::mutex> lock(GraphMutex());
    for (const Stream* stream : Streams()) {
        const Graph* graph = stream->capture.get();
        if (!graph || graph->mode == kRelaxed) continue;
        if (graph->mode == kThreadLocal && graph->thread != std::this_thread::get_id()) continue;
        vnpu_error("%s: stream %d is being captured, and this call would wait for the device", function, stream->id);
        return kCaptureNotSupported;
    }
    return kSuccess;
}

namespace {

AclError Create(Handle* out) {
    if (!out) return kParamInvalid;
    if (AclError code = NeedDevice("aclrtCreateStream")) return code;
    std::lock_guard<std::mutex> lock(GraphMutex());
    *out = NewStream();
    return kSuccess;
}

AclError Destroy(Handle handle, const char* function = __builtin_FUNCTION()) {
    if (!handle) return kParamInvalid;
    const auto destroy = [](Stream& stream) {
        Streams().erase(&stream);
        delete &stream;
        return kSuccess;
    };
    return WithStream(handle, destroy, function);
}

// A capturing stream has run nothing: waiting for it would never end on a device, so it is an error as in
// CANN.
AclError Synchronize(Handle handle, const char* function = __builtin_FUNCTION()) {
    const auto wait = [function](const Stream& stream) {
        if (!stream.capture) return TakeFault();
        vnpu_error("%s: stream %d is being captured; a captured stream cannot be waited for", function, stream.id);
        return kCaptureNotSupported;
    };
    return WithStream(handle, wait, function);
}

AclError SynchronizeDevice(const char* function = __builtin_FUNCTION()) {
    if (AclError code = NeedDevice(function)) return code;
    if (AclError code = RefuseInCapture(function)) return code;
    return TakeFault();
}

}  // namespace
}  // namespace vnpu

using namespace vnpu;

VNPU_EXPORT int vnpu_enqueue(Handle handle, void (*fn)(void*), void* arg, void (*drop)(void*)) {
    auto work = std::make_unique<Work>(fn, arg, drop);
    {
        std::lock_guard<std::mutex> lock(GraphMutex());
        Stream* stream = StreamOf(handle, "vnpu_enqueue");
        if (!stream) return kInvalidHandle;
        if (stream->capture) {
            stream->capture->steps.push_back(std::move(work));
            return kSuccess;
        }
    }
    work->Run();
    return kSuccess;
}

VNPU_EXPORT AclError aclrtCreateStream(Handle* stream) { return Create(stream); }
VNPU_EXPORT AclError aclrtCreateStreamWithConfig(Handle* stream, uint32_t, uint32_t) { return Create(stream); }
VNPU_EXPORT AclError aclrtDestroyStream(Handle stream) { return Destroy(stream); }
VNPU_EXPORT AclError aclrtDestroyStreamForce(Handle stream) { return Destroy(stream); }

VNPU_EXPORT AclError aclrtSynchronizeStream(Handle stream) { return Synchronize(stream); }
VNPU_EXPORT AclError aclrtSynchronizeStreamWithTimeout(Handle stream, int32_t) { return Synchronize(stream); }
VNPU_EXPORT AclError aclrtSynchronizeDevice() { return SynchronizeDevice(); }
VNPU_EXPORT AclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return SynchronizeDevice(); }

VNPU_EXPORT AclError aclrtStreamQuery(Handle handle, int* status) {
    if (!status) return kParamInvalid;
    *status = 0;  // ACL_STREAM_STATUS_COMPLETE
    return Synchronize(handle);
}

VNPU_EXPORT AclError aclrtStreamGetId(Handle handle, int32_t* id) {
    if (!id) return kParamInvalid;
    return WithStream(handle, [&](Stream& stream) { return *id = stream.id, kSuccess; });
}

VNPU_EXPORT AclError aclrtSetStreamOverflowSwitch(Handle handle, uint32_t flag) {
    return WithStream(handle, [&](Stream& stream) { return stream.overflow_switch = flag, kSuccess; });
}

VNPU_EXPORT AclError aclrtGetStreamOverflowSwitch(Handle handle, uint32_t* flag) {
    if (!flag) return kParamInvalid;
    return WithStream(handle, [&](Stream& stream) { return *flag = stream.overflow_switch, kSuccess; });
}

VNPU_EXPORT AclError aclrtLaunchHostFunc(Handle stream, void (*fn)(void*), void* data) {
    return fn ? vnpu_enqueue_call(stream, [=] { fn(data); }) : kParamInvalid;
}
VNPU_EXPORT AclError aclrtLaunchCallback(void (*fn)(void*), void* data, int, Handle stream) {
    return aclrtLaunchHostFunc(stream, fn, data);
}
