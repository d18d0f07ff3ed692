// What a virtual device says about itself.
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "state.h"

using namespace vnpu;

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
