#include "device.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

uint64_t HostMemory() {
    return static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

Soc Choose() {
    const char* name = std::getenv("ASCEND_MOE_VNPU_SOC");
    Soc soc = kSocs[0];
    if (name && *name) {
        const auto known = std::find_if(std::begin(kSocs), std::end(kSocs),
                                        [&](const Soc& candidate) { return candidate.name == std::string(name); });
        if (known != std::end(kSocs)) {
            soc = *known;
        } else {
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

void LeaveDevice(int device) {
    if (device == current_device) current_device = -1;
}

}  // namespace vnpu

using namespace vnpu;

VNPU_EXPORT const char* vnpu_soc(void) { return TheSoc().name; }

VNPU_EXPORT double vnpu_timeout_seconds(void) {
    for (const char* name : {"ASCEND_MOE_TIMEOUT_S", "HCCL_EXEC_TIMEOUT"}) {
        const char* text = std::getenv(name);
        const double seconds = text != nullptr ? std::atof(text) : 0;
        if (seconds > 0) return seconds;
    }
    return 120.0;
}

VNPU_EXPORT const char* aclrtGetSocName() { return TheSoc().name; }

VNPU_EXPORT AclError aclrtSetDevice(int32_t device) {
    if (device < 0 || device >= DeviceCount()) {
        vnpu_error("aclrtSetDevice: device %d is not one of the %d virtual devices (ascend-moe vnpu --devices N)",
                   device, DeviceCount());
        return kInvalidDevice;
    }
    current_device = device;
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

// A context is a device: the address of a static per device.
static Handle ContextOf(int device) {
    static char contexts[kMaxDevices];
    return &contexts[device];
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

// ---- what a virtual device says about itself ----

namespace {

// aclDeviceInfo and aclrtDevAttr of the public headers; what is not here is refused.
AclError Capability(int info, int64_t* value) {
    switch (info) {
        case 0: *value = TheSoc().cube_cores; return kSuccess;
        case 1: *value = TheSoc().vector_cores; return kSuccess;
        case 2: *value = TheSoc().l2_bytes; return kSuccess;
        default: return Unsupported("aclGetDeviceCapability with this aclDeviceInfo");
    }
}

AclError Attribute(int attribute, int64_t* value) {
    switch (attribute) {
        case 101:
        case 102: *value = TheSoc().cube_cores; return kSuccess;
        case 201: *value = TheSoc().vector_cores; return kSuccess;
        case 204: *value = 192 << 10; return kSuccess;
        case 301: *value = static_cast<int64_t>(TheSoc().memory_bytes); return kSuccess;
        case 302: *value = TheSoc().l2_bytes; return kSuccess;
        default: return Unsupported("aclrtGetDeviceInfo with this aclrtDevAttr");
    }
}

bool Valid(int64_t device) { return device >= 0 && device < DeviceCount(); }

}  // namespace

VNPU_EXPORT AclError aclGetDeviceCapability(uint32_t device, int info, int64_t* value) {
    if (!Valid(device)) return kInvalidDevice;
    return value ? Capability(info, value) : kParamInvalid;
}

// Nobody measures: every unit is idle.
struct Utilization {
    int32_t cube, vector, aicpu, memory;
    void* reserved;
};
VNPU_EXPORT AclError aclrtGetDeviceUtilizationRate(int32_t, Utilization* utilization) {
    if (utilization == nullptr) return kParamInvalid;
    *utilization = {0, 0, 0, 0, nullptr};
    return kSuccess;
}
VNPU_EXPORT AclError aclrtGetDeviceInfo(uint32_t device, int attribute, int64_t* value) {
    if (!Valid(device)) return kInvalidDevice;
    return value ? Attribute(attribute, value) : kParamInvalid;
}

VNPU_EXPORT AclError aclGetCannAttribute(int attribute, int32_t* value) {
    if (!value || attribute < 0 || attribute > 2) return kParamInvalid;
    *value = attribute < 2 ? 1 : 0;  // INF_NAN and BF16 yes, JIT_COMPILE no
    return kSuccess;
}

VNPU_EXPORT AclError aclGetCannAttributeList(const int** list, size_t* count) {
    static const int attributes[] = {0, 1};
    if (!list || !count) return kParamInvalid;
    *list = attributes;
    *count = 2;
    return kSuccess;
}

// $ASCEND_MOE_VNPU_CANN. Without it: of CANN the last release for which torch_npu calls nothing that is not here, of
// its parts (package over 0) unknown.
VNPU_EXPORT AclError aclsysGetCANNVersion(int package, char* version) {
    const char* text = std::getenv("ASCEND_MOE_VNPU_CANN");
    if (!text && package == 0) text = "8.2.RC1";
    if (!text || !version) return kParamInvalid;
    std::memset(version, 0, 640);
    std::snprintf(version, 128, "%s", text);
    return kSuccess;
}

struct Uuid {
    char bytes[16];
};

VNPU_EXPORT AclError aclrtDeviceGetUuid(int32_t device, Uuid* uuid) {
    if (!Valid(device) || !uuid) return kParamInvalid;
    std::memset(uuid, 0, sizeof *uuid);
    std::snprintf(uuid->bytes, sizeof uuid->bytes, "vnpu-%d", device);
    return kSuccess;
}

VNPU_EXPORT AclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t device, int32_t peer) {
    if (!can || !Valid(device) || !Valid(peer)) return kParamInvalid;
    *can = device != peer;
    return kSuccess;
}

VNPU_EXPORT AclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t) {
    return Valid(peer) ? kSuccess : kInvalidDevice;
}

VNPU_EXPORT AclError aclrtDeviceGetBareTgid(int32_t* pid) {
    if (!pid) return kParamInvalid;
    *pid = getpid();
    return kSuccess;
}

VNPU_EXPORT AclError aclrtGetLogicDevIdByUserDevId(int32_t user, int32_t* logical) {
    if (!Valid(user) || !logical) return kParamInvalid;
    *logical = user;
    return kSuccess;
}

VNPU_EXPORT AclError aclrtGetPhyDevIdByLogicDevId(int32_t logical, int32_t* physical) {
    return aclrtGetLogicDevIdByUserDevId(logical, physical);
}

VNPU_EXPORT AclError aclrtGetDeviceResLimit(int32_t device, int type, uint32_t* value) {
    if (!Valid(device) || !value || type < 0 || type > 1) return kParamInvalid;
    *value = static_cast<uint32_t>(type == 0 ? TheSoc().cube_cores : TheSoc().vector_cores);
    return kSuccess;
}

VNPU_EXPORT AclError aclrtGetStreamResLimit(Handle, int type, uint32_t* value) {
    return aclrtGetDeviceResLimit(0, type, value);
}
VNPU_EXPORT AclError aclrtGetResInCurrentThread(int type, uint32_t* value) {
    return aclrtGetDeviceResLimit(0, type, value);
}
