// HCCL's functions about communicators.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "abi/window.h"
#include "comm.h"

using namespace vnpu;

namespace {

// $HCCL_BUFFSIZE, MiB; the group's own size, when it has one, goes first.
HcclResult WindowMib(const CommConfig* config, uint64_t* mib) {
    *mib = kDefaultWindowMib;
    const char* text = std::getenv("HCCL_BUFFSIZE");
    if (text && *text) {
        char* end = nullptr;
        const long value = std::strtol(text, &end, 10);
        if (*end || value < 1 || value > (1 << 20)) {
            vnpu_error("HCCL_BUFFSIZE=%s must be a number of MiB from 1 to %d", text, 1 << 20);
            return kHcclParameter;
        }
        *mib = static_cast<uint64_t>(value);
    }
    if (config && config->window_mib != kNotSet && config->window_mib != 0) *mib = config->window_mib;
    return kHcclSuccess;
}

HcclResult Init(const RootInfo* info, uint32_t world, uint32_t rank, const CommConfig* config, void** out) {
    if (!info || !out) return kHcclPointer;
    uint64_t mib = 0;
    if (HcclResult code = WindowMib(config, &mib)) return code;
    const std::string name =
        config && config->name[0] ? std::string(config->name, strnlen(config->name, kNameBytes)) : "";
    std::shared_ptr<Comm> comm;
    if (HcclResult code =
            Meet(*info, static_cast<int>(rank), static_cast<int>(world), mib << 20, name, &comm)) {
        return code;
    }
    *out = Register(std::move(comm));
    return kHcclSuccess;
}

}  // namespace

VNPU_EXPORT HcclResult HcclGetRootInfo(RootInfo* info) { return info ? MakeRootInfo(info) : kHcclPointer; }

VNPU_EXPORT HcclResult HcclCommInitRootInfo(uint32_t world, const RootInfo* info, uint32_t rank,
                                            void** comm) {
    return Init(info, world, rank, nullptr, comm);
}

VNPU_EXPORT HcclResult HcclCommInitRootInfoConfig(uint32_t world, const RootInfo* info, uint32_t rank,
                                                  const CommConfig* config, void** comm) {
    return Init(info, world, rank, config, comm);
}

// The fields of HcclCommConfig up to hcclBufferName may be given: those that mean nothing here are ignored.
VNPU_EXPORT uint32_t HcclGetCommConfigCapability() { return 12; }

VNPU_EXPORT HcclResult HcclGetCommName(void* handle, char* name) {
    std::shared_ptr<Comm> comm = Find(handle, "HcclGetCommName");
    if (!comm || !name) return kHcclPointer;
    std::snprintf(name, kNameBytes, "%s", comm->name.c_str());
    return kHcclSuccess;
}

VNPU_EXPORT HcclResult HcomGetCommHandleByGroup(const char* group, void** handle) {
    if (!group || !handle) return kHcclPointer;
    std::shared_ptr<Comm> comm = FindByName(group);
    if (!comm) {
        vnpu_error("HcomGetCommHandleByGroup: no communicator of this process is named %s", group);
        return kHcclNotFound;
    }
    *handle = comm.get();
    return kHcclSuccess;
}

VNPU_EXPORT HcclResult HcclGetRankSize(void* handle, uint32_t* size) {
    std::shared_ptr<Comm> comm = Find(handle, "HcclGetRankSize");
    if (!comm || !size) return kHcclPointer;
    *size = static_cast<uint32_t>(comm->world);
    return kHcclSuccess;
}

VNPU_EXPORT HcclResult HcclGetRankId(void* handle, uint32_t* rank) {
    std::shared_ptr<Comm> comm = Find(handle, "HcclGetRankId");
    if (!comm || !rank) return kHcclPointer;
    *rank = static_cast<uint32_t>(comm->rank);
    return kHcclSuccess;
}

// This rank's own window.
VNPU_EXPORT HcclResult HcclGetHcclBuffer(void* handle, void** window, uint64_t* bytes) {
    std::shared_ptr<Comm> comm = Find(handle, "HcclGetHcclBuffer");
    if (!comm || !window || !bytes) return kHcclPointer;
    *window = ops::DataOf(comm->bases[comm->rank]);
    *bytes = comm->data_bytes;
    return kHcclSuccess;
}

VNPU_EXPORT HcclResult HcclCommDestroy(void* handle) {
    std::shared_ptr<Comm> comm = Find(handle, "HcclCommDestroy");
    if (!comm) return kHcclNotFound;
    // Messages that were sent are delivered first. If that fails, stderr has the error and the end goes on.
    WaitFor(*comm, [&](int r) { return OnItsWay(*comm, r); }, "CommDestroy, a message on its way");
    RankOf(comm->control, comm->rank)->left.store(1, std::memory_order_release);
    Forget(handle);
    return kHcclSuccess;
}

// Never an error: every failure is returned by the call that meets it. torch_npu's watchdog ends the process
// on an error seen here, even one that is just being raised as an exception with the failed rank's name.
VNPU_EXPORT HcclResult HcclGetCommAsyncError(void* handle, HcclResult* code) {
    if (!code || !Find(handle, "HcclGetCommAsyncError")) return kHcclPointer;
    *code = kHcclSuccess;
    return kHcclSuccess;
}

VNPU_EXPORT const char* HcclGetErrorString(HcclResult code) {
    switch (code) {
        case kHcclSuccess: return "no error";
        case kHcclParameter: return "parameter error";
        case kHcclPointer: return "empty pointer";
        case kHcclMemory: return "memory error";
        case kHcclNotSupported: return "not supported";
        case kHcclNotFound: return "not found";
        case kHcclSyscall: return "system call failed";
        case kHcclTimeout: return "timeout";
        case kHcclRemote: return "a peer is gone";
        default: return "internal error";
    }
}

// Settings of algorithms and determinism: the virtual NPU has one algorithm, and it is deterministic.
VNPU_EXPORT HcclResult HcclSetConfig(int, int32_t) { return kHcclSuccess; }
// Nothing is ever suspended: a call either runs or has failed.
VNPU_EXPORT HcclResult HcclCommResume(void* handle) {
    return Find(handle, "HcclCommResume") ? kHcclSuccess : kHcclNotFound;
}
