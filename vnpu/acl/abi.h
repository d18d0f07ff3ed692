// The part of the ACL C ABI that the virtual NPU speaks: codes and structures, as in the public headers that
// the torch_npu wheel ships (include/third_party/acl). Handles are opaque there and so they are here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vnpu_stream.h"

namespace vnpu {

using AclError = int;
using Handle = void*;

constexpr AclError kSuccess = 0;
constexpr AclError kParamInvalid = 107000;
constexpr AclError kInvalidDevice = 107001;
constexpr AclError kContextNull = 107002;
constexpr AclError kEventTimestampInvalid = 107006;
constexpr AclError kInvalidHandle = 107017;
constexpr AclError kWaitTimeout = 107019;
constexpr AclError kModelCaptured = 107026;
constexpr AclError kStreamCaptured = 107027;
constexpr AclError kEventCaptured = 107028;
constexpr AclError kStreamNotCaptured = 107029;
constexpr AclError kCaptureUnmatched = 107036;
constexpr AclError kTaskGroupStatus = 107033;
constexpr AclError kCaptureNotSupported = 107030;
constexpr AclError kNotSupported = 207000;
constexpr AclError kOutOfMemory = 207001;
constexpr AclError kInternal = 507000;

enum CopyKind : int { kHostToHost, kHostToDevice, kDeviceToHost, kDeviceToDevice, kCopyDefault };
enum LocationType : int { kLocationHost = 0, kLocationDevice = 1, kLocationUnregistered = 2 };

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

}  // namespace vnpu
