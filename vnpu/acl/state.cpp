#include "state.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>

namespace vnpu {
namespace {

constexpr uint64_t kGiB = 1ull << 30;
constexpr uint64_t kMiB = 1ull << 20;

// Cores and memory as CANN's platform configuration gives them for these SoCs; nothing computes with them
// here.
constexpr Soc kSocs[] = {
    {"Ascend910_9391", 24, 48, 192 * kMiB, 64 * kGiB}, {"Ascend910_9392", 24, 48, 192 * kMiB, 64 * kGiB},
    {"Ascend910_9381", 24, 48, 192 * kMiB, 64 * kGiB}, {"Ascend910_9382", 24, 48, 192 * kMiB, 64 * kGiB},
    {"Ascend910_9372", 20, 40, 192 * kMiB, 64 * kGiB}, {"Ascend910_9362", 20, 40, 192 * kMiB, 64 * kGiB},
    {"Ascend910B1", 24, 48, 192 * kMiB, 64 * kGiB},    {"Ascend910B2", 24, 48, 192 * kMiB, 64 * kGiB},
    {"Ascend910B3", 20, 40, 192 * kMiB, 64 * kGiB},    {"Ascend910B4", 20, 40, 96 * kMiB, 32 * kGiB},
};

thread_local int current_device = -1;
thread_local std::string last_error;
std::atomic<bool> initialised{false};

uint64_t HostMemory() {
    return static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

Soc Choose() {
    const char* name = std::getenv("ASCEND_MOE_VNPU_SOC");
    Soc soc = kSocs[0];
    if (name && *name) {
        bool known = false;
        for (const Soc& candidate : kSocs) {
            if (!std::strcmp(candidate.name, name)) {
                soc = candidate;
                known = true;
            }
        }
        if (!known) {
            vnpu_error("ASCEND_MOE_VNPU_SOC=%s is no SoC of the virtual NPU; using %s", name, soc.name);
        }
    }
    soc.memory_bytes = std::min(soc.memory_bytes, HostMemory());  // a device cannot have more than the host
    return soc;
}

}  // namespace

const Soc& TheSoc() {
    static const Soc soc = Choose();
    return soc;
}

int DeviceCount() {
    static const int count = [] {
        const char* text = std::getenv("ASCEND_MOE_VNPU_DEVICES");
        const int value = text ? std::atoi(text) : 8;
        return std::max(1, std::min(value ? value : 8, kMaxDevices));
    }();
    return count;
}

int CurrentDevice() { return current_device; }

AclError NeedDevice(const char* function) {
    if (current_device >= 0) return kSuccess;
    vnpu_error("%s: this thread has no device: call aclrtSetDevice first", function);
    return kContextNull;
}

Handle ContextOf(int device) {
    static char contexts[kMaxDevices];
    return &contexts[device];
}

void SetRecentError(const std::string& text) { last_error = text; }

AclError Unsupported(const char* function) {
    static std::mutex* mutex = new std::mutex;
    static std::set<std::string>* told = new std::set<std::string>;
    std::lock_guard<std::mutex> lock(*mutex);
    last_error = std::string(function) + ": the virtual NPU does not have this function";
    if (told->insert(function).second) std::fprintf(stderr, "ascend_moe vnpu: %s\n", last_error.c_str());
    return kNotSupported;
}

}  // namespace vnpu

using namespace vnpu;

VNPU_EXPORT void vnpu_error(const char* format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    std::vsnprintf(text, sizeof text, format, args);
    va_end(args);
    last_error = text;
    std::fprintf(stderr, "ascend_moe vnpu: %s\n", text);
}

VNPU_EXPORT const char* vnpu_soc(void) { return TheSoc().name; }

VNPU_EXPORT const char* aclGetRecentErrMsg() {
    // As in CANN the text is the calling thread's and is taken by being read.
    static thread_local std::string taken;
    taken = std::move(last_error);
    last_error.clear();
    return taken.empty() ? nullptr : taken.c_str();
}

VNPU_EXPORT AclError aclInit(const char*) {
    if (initialised.exchange(true)) return 100002;  // ACL_ERROR_REPEAT_INITIALIZE, which callers expect
    return kSuccess;
}

VNPU_EXPORT AclError aclFinalize() {
    initialised = false;
    return kSuccess;
}

VNPU_EXPORT const char* aclrtGetSocName() { return TheSoc().name; }

VNPU_EXPORT AclError aclrtSetDevice(int32_t device) {
    if (device < 0 || device >= DeviceCount()) {
        vnpu_error(
            "aclrtSetDevice: device %d is not one of the %d virtual devices (ascend-moe vnpu --devices N)",
            device, DeviceCount());
        return kInvalidDevice;
    }
    current_device = device;
    return kSuccess;
}

VNPU_EXPORT AclError aclrtResetDevice(int32_t device) {
    if (device < 0 || device >= DeviceCount()) return kInvalidDevice;
    if (device == current_device) current_device = -1;
    return kSuccess;
}

VNPU_EXPORT AclError aclrtGetDevice(int32_t* device) {
    if (!device) return kParamInvalid;
    if (current_device < 0) return kContextNull;  // asked at every start: no message
    *device = current_device;
    return kSuccess;
}

VNPU_EXPORT AclError aclrtGetDeviceCount(uint32_t* count) {
    if (!count) return kParamInvalid;
    *count = static_cast<uint32_t>(DeviceCount());
    return kSuccess;
}

VNPU_EXPORT AclError aclrtSetCurrentContext(Handle context) {
    for (int device = 0; device < DeviceCount(); ++device) {
        if (context == ContextOf(device)) {
            current_device = device;
            return kSuccess;
        }
    }
    vnpu_error("aclrtSetCurrentContext: %p is no context of the virtual NPU", context);
    return kInvalidHandle;
}

VNPU_EXPORT AclError aclrtGetCurrentContext(Handle* context) {
    if (!context) return kParamInvalid;
    if (current_device < 0) return kContextNull;
    *context = ContextOf(current_device);
    return kSuccess;
}

VNPU_EXPORT AclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active) {
    if (device < 0 || device >= DeviceCount() || !active) return kParamInvalid;
    if (flags) *flags = 0;
    *active = 1;
    return kSuccess;
}
