// The virtual devices of this process: how many there are, which of them a thread uses, the SoC that they pretend to
// be.
#pragma once

#include <cstdint>

#include "error.h"

// Seconds that a rank waits for another, or for its own device: $ASCEND_MOE_TIMEOUT_S or $HCCL_EXEC_TIMEOUT, else 120.
VNPU_EXPORT double vnpu_timeout_seconds(void);

// The SoC that this process pretends to have: $ASCEND_MOE_VNPU_SOC, by default Ascend910_9391.
VNPU_EXPORT const char* vnpu_soc(void);

namespace vnpu {

constexpr int kMaxDevices = 384;

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
// The thread has no device any more, if this was its own.
void LeaveDevice(int device);

}  // namespace vnpu
