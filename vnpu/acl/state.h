// The virtual devices of this process: how many, which one the thread uses, what the SoC claims to be.
#pragma once

#include <cstdint>
#include <string>

#include "abi.h"

namespace vnpu {

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

// The error of work that has failed on the device, told once and with its text, or kSuccess; see vnpu_fault.
AclError TakeFault();
// Sets the text of aclGetRecentErrMsg without printing it again.
void SetRecentError(const std::string& text);

// A context is a device: the address of a static per device.
Handle ContextOf(int device);

// One line on stderr naming what is not there, once a name; returns kNotSupported.
AclError Unsupported(const char* function);

}  // namespace vnpu
