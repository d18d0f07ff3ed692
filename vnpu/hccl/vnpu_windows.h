// The windows of an HCCL communicator of the virtual NPU, for the operators that use them (libcust_opapi.so).
#pragma once

#include <cstdint>

// bases[r] is this process's mapping of rank r's window in the layout of csrc/abi/window.h: header page, 1
// MiB of state, data_bytes of data. live_fds[r] becomes readable when rank r's process is gone (-1 for
// oneself). Both arrays live as long as the communicator.
struct VnpuWindows {
    int32_t rank;
    int32_t world;
    uint64_t data_bytes;
    void* const* bases;
    const int32_t* live_fds;
};

// In libhccl.so. 0, or an HCCL error code when no communicator of this process has that name.
extern "C" __attribute__((visibility("default"))) int vnpu_comm_windows(const char* group_name,
                                                                        VnpuWindows* out);

// Has fn(arg) called once, when the communicator is destroyed, before its windows are unmapped. Without it
// windows that vnpu_comm_windows has handed out stay mapped until the process ends. A second call replaces
// the first.
extern "C" __attribute__((visibility("default"))) int vnpu_comm_before_unmap(const char* group_name,
                                                                             void (*fn)(void*), void* arg);
