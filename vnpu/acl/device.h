// The virtual devices of this process, and the part of the ACL C ABI that they speak, as in the public
// headers that the torch_npu wheel ships (include/third_party/acl).
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>

// ---- shared by the virtual NPU's libraries: puts work onto a stream, reports failures. The functions live
// in libascendcl.so; libopapi.so, libcust_opapi.so and libhccl.so link it ----

#define VNPU_EXPORT extern "C" __attribute__((visibility("default")))

// What work needs of the thread that runs it.
enum VnpuNeeds : int { kNeedsNothing = 0, kNeedsPython = 1 };

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

// Waits until all that was enqueued before has run. Returns 0, or an ACL code with its message.
VNPU_EXPORT int vnpu_wait(void);

// Seconds that a rank waits for another, or for its own device: $ASCEND_MOE_TIMEOUT_S or $HCCL_EXEC_TIMEOUT, else 120.
VNPU_EXPORT double vnpu_timeout_seconds(void);

// Called by a running fn whose work has failed on the device: the next call that waits returns 507035 (a
// vector core exception), with the text of this thread's last vnpu_error.
VNPU_EXPORT void vnpu_fault(void);

// Sets the text of aclGetRecentErrMsg (this thread's, printf format, one line) and prints it once on stderr.
VNPU_EXPORT void vnpu_error(const char* format, ...) __attribute__((format(printf, 1, 2)));

// The SoC that this process pretends to have: $ASCEND_MOE_VNPU_SOC, by default Ascend910_9391.
VNPU_EXPORT const char* vnpu_soc(void);

namespace vnpu {

using AclError = int;
using Handle = void*;

constexpr AclError kSuccess = 0;
constexpr AclError kParamInvalid = 107000;
constexpr AclError kInvalidDevice = 107001;
constexpr AclError kContextNull = 107002;
constexpr AclError kEventTimestampInvalid = 107006;
constexpr AclError kInvalidHandle = 107017;
constexpr AclError kModelCaptured = 107026;
constexpr AclError kStreamCaptured = 107027;
constexpr AclError kEventCaptured = 107028;
constexpr AclError kStreamNotCaptured = 107029;
constexpr AclError kCaptureUnmatched = 107036;
constexpr AclError kCaptureNotSupported = 107030;
constexpr AclError kNotSupported = 207000;
constexpr AclError kOutOfMemory = 207001;
constexpr AclError kQueueTimeout = 507046;  // ACL_ERROR_RT_STREAM_SYNC_TIMEOUT

enum LocationType : int { kLocationHost = 0, kLocationDevice = 1, kLocationUnregistered = 2 };

// What this process has one of, used by one thread at a time: locked while this lives. Never destroyed:
// threads may outlive main().
template <typename T>
class Locked {
public:
    T& operator*() const { return the().value; }
    T* operator->() const { return &the().value; }

private:
    struct Guarded {
        std::mutex mutex;
        T value = {};
    };
    static Guarded& the() {
        static auto* guarded = new Guarded;
        return *guarded;
    }
    std::lock_guard<std::mutex> lock_{the().mutex};
};

struct Location {
    uint32_t id;
    int type;
};

struct PointerAttributes {
    Location location;
    uint32_t page_size;
    uint32_t reserved[4];
};

struct Uuid {
    char bytes[16];
};

// ---- the virtual devices of this process: how many, which of them the thread uses, the SoC that they
// pretend to be ----

constexpr int kMaxDevices = 64;

struct Soc {
    const char* name;
    int64_t cube_cores;
    int64_t vector_cores;
    int64_t l2_bytes;
    uint64_t memory_bytes;
};

const Soc& TheSoc();
int DeviceCount();

// This thread's device; -1 before aclrtSetDevice.
int CurrentDevice();
// kSuccess, or kContextNull with its message when the thread has no device.
AclError NeedDevice(const char* function);

// The error of work that has failed on the device, returned once and with its text, or kSuccess; see
// vnpu_fault.
AclError TakeFault();
// Sets the text of aclGetRecentErrMsg without printing it again.
void SetRecentError(const std::string& text);

// A context is a device: the address of a static per device.
Handle ContextOf(int device);

// Prints one line on stderr for each missing function, once; returns kNotSupported.
AclError Unsupported(const char* function);

// ---- device memory is host memory: a kernel of the twin reads it like any other ----

// kLocationDevice, kLocationHost or kLocationUnregistered; the device's number in *device.
int WhereIs(const void* pointer, int* device);

}  // namespace vnpu
