// A communicator's memory and its peers' processes.
#include "comm.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "rendezvous.h"
#include "abi/window.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434  // the same on every architecture; Linux 5.3
#endif

namespace vnpu {
namespace {

HcclResult Map(Comm* comm, const Joined& joined) {
    const uint64_t stride = WindowStride(comm->data_bytes);
    void* control =
        mmap(nullptr, ControlBytes(comm->world), PROT_READ | PROT_WRITE, MAP_SHARED, joined.control.fd, 0);
    void* windows = mmap(nullptr, stride * static_cast<uint64_t>(comm->world), PROT_READ | PROT_WRITE,
                         MAP_SHARED, joined.windows.fd, 0);
    comm->control = control == MAP_FAILED ? nullptr : static_cast<uint8_t*>(control);
    comm->windows = windows == MAP_FAILED ? nullptr : static_cast<uint8_t*>(windows);
    if (!comm->control || !comm->windows) {
        vnpu_error("HCCL: the windows of %s cannot be mapped (%s)", comm->name.c_str(), std::strerror(errno));
        return kHcclMemory;
    }
    comm->pids = joined.pids;
    for (int r = 0; r < comm->world; ++r) {
        comm->bases.push_back(comm->windows + stride * static_cast<uint64_t>(r));
        int fd = -1;
        if (r != comm->rank) {
            fd = static_cast<int>(syscall(SYS_pidfd_open, comm->pids[r], 0));
            if (fd < 0) {
                vnpu_error("HCCL: process %d of rank %d cannot be watched (pidfd_open: %s)%s", comm->pids[r],
                           r, std::strerror(errno), errno == ESRCH ? ": it has ended already" : "");
                return errno == ESRCH ? kHcclRemote : kHcclSyscall;
            }
        }
        comm->live_fds.push_back(fd);  // pidfds are close-on-exec by themselves
    }
    return kHcclSuccess;
}

}  // namespace

uint64_t WindowStride(uint64_t data_bytes) {
    constexpr uint64_t kAlign = 64 << 10;  // the largest page size in use
    return (ops::WindowBytes(data_bytes, 0) + kAlign - 1) / kAlign * kAlign;
}

HcclResult Meet(const RootInfo& info, int rank, int world, uint64_t data_bytes, const std::string& name,
                std::shared_ptr<Comm>* out) {
    const std::string root = RootOf(info);
    if (root.empty()) {
        vnpu_error("HcclCommInitRootInfo: the root info was not made by the virtual NPU");
        return kHcclParameter;
    }
    if (world < 1 || world > kMaxRanks || rank < 0 || rank >= world) {
        vnpu_error("HcclCommInitRootInfo: rank %d of %d; the virtual NPU has at most %d ranks", rank, world,
                   kMaxRanks);
        return kHcclParameter;
    }
    auto comm = std::make_shared<Comm>();
    comm->name = name.empty() ? "127.0.0.1%" + root : name;
    comm->rank = rank;
    comm->world = world;
    comm->data_bytes = data_bytes;
    const Hello own{rank, world, static_cast<int32_t>(getpid()), 0, data_bytes};
    Joined joined;
    HcclResult code = Rendezvous(root, own, &joined);
    if (code) return code;
    if ((code = Map(comm.get(), joined))) return code;
    std::snprintf(RankOf(comm->control, rank)->call.op, sizeof(Call::op), "initialisation");
    if ((code = Barrier(*comm, "initialisation"))) return code;
    *out = comm;
    return kHcclSuccess;
}

Comm::~Comm() {
    if (before_unmap) before_unmap();
    if (control) {
        RankOf(control, rank)->left.store(1, std::memory_order_release);
        munmap(control, ControlBytes(world));
    }
    if (windows && (!windows_lent || before_unmap)) {
        munmap(windows, WindowStride(data_bytes) * static_cast<uint64_t>(world));
    }
    for (int fd : live_fds) {
        if (fd >= 0 && (!windows_lent || before_unmap)) close(fd);
    }
}

}  // namespace vnpu
