// Streams: their work goes into the one queue of the process (queue.h).
#include <map>
#include <unordered_set>

#include "device.h"
#include "queue.h"
#include "graph.h"

namespace vnpu {
namespace {

std::unordered_set<Stream*>& Streams() {
    static auto* streams = new std::unordered_set<Stream*>;
    return *streams;
}

Stream* NewStream() {
    static int next_id = 0;
    Stream* stream = new Stream{next_id++, CurrentDevice()};
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

void Enqueue(Stream& stream, std::shared_ptr<Work> work) {
    if (stream.tasks) {
        stream.tasks->push_back(std::move(work));
    } else if (stream.capture) {
        stream.capture->steps.push_back(std::move(work));
    } else {
        stream.last = Put(std::move(work), &stream);
    }
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
    if (AclError code = WaitForAll(function)) return code;
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
    uint64_t last = 0;
    const auto find = [&](const Stream& stream) {
        last = stream.last;
        if (!stream.capture) return kSuccess;
        vnpu_error("%s: stream %d is being captured; a captured stream cannot be waited for", function, stream.id);
        return kCaptureNotSupported;
    };
    if (AclError code = WithStream(handle, find, function)) return code;
    if (AclError code = WaitFor(last, function)) return code;
    return TakeFault();
}

AclError SynchronizeDevice(const char* function = __builtin_FUNCTION()) {
    if (AclError code = NeedDevice(function)) return code;
    if (AclError code = RefuseInCapture(function)) return code;
    if (AclError code = WaitForAll(function)) return code;
    return TakeFault();
}

}  // namespace
}  // namespace vnpu

using namespace vnpu;

VNPU_EXPORT int vnpu_enqueue(Handle handle, std::function<void()> run, VnpuNeeds needs) {
    auto work = WorkOf(std::move(run), needs);
    return WithStream(handle, [&](Stream& stream) { return Enqueue(stream, std::move(work)), kSuccess; });
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
    uint64_t last = 0;
    const auto find = [&](const Stream& stream) { return last = stream.last, kSuccess; };
    if (AclError code = WithStream(handle, find, "aclrtStreamQuery")) return code;
    *status = HasRun(last) ? 0 : 1;  // ACL_STREAM_STATUS_COMPLETE, _NOT_READY
    return *status == 0 ? Synchronize(handle) : kSuccess;
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

// ---- values in device memory: what torch_npu's external events are made of

VNPU_EXPORT AclError aclrtValueWrite(void* address, uint64_t value, uint32_t, Handle stream) {
    if (!address) return kParamInvalid;
    return vnpu_enqueue(stream, [=] { *static_cast<volatile uint64_t*>(address) = value; });
}

VNPU_EXPORT AclError aclrtValueWait(void* address, uint64_t value, uint32_t mode, Handle handle) {
    if (!address || mode != 1) {
        vnpu_error("aclrtValueWait: need an address, and mode 1 (until equal); mode is %u", mode);
        return kParamInvalid;
    }
    auto wait = WorkOf([] {});
    wait->ready = [=] { return *static_cast<volatile uint64_t*>(address) == value; };
    return WithStream(handle, [&](Stream& stream) { return Enqueue(stream, std::move(wait)), kSuccess; });
}

VNPU_EXPORT AclError aclrtLaunchHostFunc(Handle stream, void (*fn)(void*), void* data) {
    return fn ? vnpu_enqueue(stream, [=] { fn(data); }, kNeedsPython) : kParamInvalid;
}
VNPU_EXPORT AclError aclrtLaunchCallback(void (*fn)(void*), void* data, int, Handle stream) {
    return aclrtLaunchHostFunc(stream, fn, data);
}
