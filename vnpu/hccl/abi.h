// The part of the HCCL C ABI that the virtual NPU speaks, as in the public headers of the torch_npu wheel
// (include/third_party/hccl).
#pragma once

#include <cstdint>

#include "acl/queue.h"

namespace vnpu {

using HcclResult = int;

constexpr HcclResult kHcclSuccess = 0;
constexpr HcclResult kHcclParameter = 1;
constexpr HcclResult kHcclPointer = 2;
constexpr HcclResult kHcclMemory = 3;
constexpr HcclResult kHcclNotSupported = 5;
constexpr HcclResult kHcclNotFound = 6;
constexpr HcclResult kHcclSyscall = 8;
constexpr HcclResult kHcclTimeout = 9;
constexpr HcclResult kHcclRemote = 21;  // a peer is gone

enum class ReduceOp : int { kSum, kProd, kMax, kMin };

// HcclDataType, by number: reduce.cpp has the table.
enum class DataType : int {};

// Bytes of an element; 0 for a type that HCCL does not define.
uint32_t SizeOf(DataType type);
const char* NameOf(DataType type);
const char* NameOf(ReduceOp op);

constexpr uint32_t kRootInfoBytes = 4108;
constexpr uint32_t kNameBytes = 128;
constexpr uint32_t kDefaultWindowMib = 200;
constexpr uint32_t kNotSet = 0xffffffff;

struct RootInfo {
    char internal[kRootInfoBytes];
};

// The head of HcclCommConfig; what comes after hcclCommName is not looked at.
struct CommConfig {
    char reserved[24];
    uint32_t window_mib;
    uint32_t deterministic;
    char name[kNameBytes];
};

struct SendRecvItem {
    int kind;  // 0 send, 1 receive
    void* data;
    uint64_t count;
    DataType type;
    uint32_t peer;
};

}  // namespace vnpu

// ---- the windows of a communicator, for the operators that use them (libcust_opapi.so) ----

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
extern "C" __attribute__((visibility("default"))) int vnpu_comm_windows(const char* group_name, VnpuWindows* out);

// Whether the windows of the own server's ranks are mapped in a communicator of an A2, by the algConfig of its first
// launch. 0, or an HCCL error code.
extern "C" __attribute__((visibility("default"))) int vnpu_comm_links(const char* group_name, const char* alg_config,
                                                                      int several_servers, int* mapped);
