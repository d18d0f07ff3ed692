#include "comm.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434  // the same on every architecture; Linux 5.3
#endif

namespace vnpu {
namespace {

constexpr char kMagic[16] = "ascend_moe vnpu";

struct Card {  // what is in HcclRootInfo
    char magic[16];
    int32_t pid;
    int32_t fd;
    char name[sizeof Front::name];
};

// How long ranks wait for each other to come: $HCCL_CONNECT_TIMEOUT, default 120, as in HCCL.
double ConnectSeconds() {
    const char* text = std::getenv("HCCL_CONNECT_TIMEOUT");
    return text && std::atof(text) > 0 ? std::atof(text) : 120.0;
}

// Whether a file is this user's: root may open other users' too.
bool Owned(int fd) {
    struct stat found{};
    if (fstat(fd, &found) == 0 && found.st_uid == geteuid()) return true;
    errno = EPERM;
    return false;
}

HcclResult Open(const Card& card, int rank, int* file) {
    char path[64], name[sizeof card.name];
    std::snprintf(path, sizeof path, "/proc/%d/fd/%d", card.pid, card.fd);
    const int fd = open(path, O_RDWR | O_CLOEXEC | O_NOCTTY);
    const bool owned = fd >= 0 && Owned(fd);
    if (owned) errno = ESTALE;
    if (owned && pread(fd, name, sizeof name, offsetof(Front, name)) == static_cast<ssize_t>(sizeof name) &&
        !std::memcmp(name, card.name, sizeof name)) {
        *file = fd;
        return kHcclSuccess;
    }
    vnpu_error(
        "HCCL rendezvous: rank %d cannot open the memory of the root, process %d (%s): it has ended, or it "
        "belongs to another machine or user; the virtual NPU joins ranks of one machine and one user",
        rank, card.pid, std::strerror(errno));
    if (fd >= 0) close(fd);
    return kHcclRemote;
}

// Takes the place of comm.rank.
HcclResult Enter(uint8_t* control, const Comm& comm) {
    RankControl* own = RankOf(control, comm.rank);
    uint32_t nobody = 0;
    if (!own->joined.compare_exchange_strong(nobody, 1)) {
        vnpu_error("HCCL rendezvous: process %d says it is rank %d of %d, which process %d is already", getpid(),
                   comm.rank, comm.world, own->pid);
        return kHcclParameter;
    }
    own->pid = getpid();
    own->world = comm.world;
    own->data_bytes = comm.data_bytes;
    own->joined.store(2, std::memory_order_release);
    return kHcclSuccess;
}

// Compares a rank that has come with this one, and watches its process.
HcclResult Check(Comm* comm, int rank) {
    const int low = std::min(rank, comm->rank), high = std::max(rank, comm->rank);
    const RankControl *first = RankOf(comm->control, low), *second = RankOf(comm->control, high);
    if (first->world != second->world) {
        vnpu_error("HCCL rendezvous: rank %d has %d ranks, rank %d has %d", low, first->world, high, second->world);
        return kHcclParameter;
    }
    if (first->data_bytes != second->data_bytes) {
        vnpu_error(
            "HCCL rendezvous: rank %d has windows of %llu MiB, rank %d of %llu MiB: HCCL_BUFFSIZE (or "
            "hccl_buffer_size of the group) must be equal on all ranks",
            low, static_cast<unsigned long long>(first->data_bytes >> 20), high,
            static_cast<unsigned long long>(second->data_bytes >> 20));
        return kHcclParameter;
    }
    if (rank == comm->rank) return kHcclSuccess;
    const RankControl* other = RankOf(comm->control, rank);
    int32_t& watch = comm->live_fds[rank];
    if (watch < 0) watch = static_cast<int32_t>(syscall(SYS_pidfd_open, other->pid, 0));  // close-on-exec
    if (watch < 0 && errno != ESRCH) {
        vnpu_error("HCCL: process %d of rank %d cannot be watched (pidfd_open: %s)", other->pid, rank,
                   std::strerror(errno));
        return kHcclSyscall;
    }
    if (watch < 0 || Gone(watch) || other->left.load(std::memory_order_acquire)) {
        vnpu_error("HCCL rendezvous: rank %d (process %d) has ended before all ranks had come", rank, other->pid);
        return kHcclRemote;
    }
    return kHcclSuccess;
}

HcclResult WaitForAll(Comm* comm) {
    using Clock = std::chrono::steady_clock;
    const auto end = Clock::now() + std::chrono::duration<double>(ConnectSeconds());
    for (;;) {
        const bool late = Clock::now() >= end;
        std::string missing;
        for (int r = 0; r < comm->world; ++r) {
            if (RankOf(comm->control, r)->joined.load(std::memory_order_acquire) != 2) {
                missing += (missing.empty() ? "" : ", ") + std::to_string(r);
            } else if (HcclResult code = Check(comm, r)) {
                return code;
            }
        }
        if (missing.empty()) return kHcclSuccess;
        if (late) {
            vnpu_error(
                "HCCL rendezvous: rank %d waited for rank(s) %s, which never came (HCCL_CONNECT_TIMEOUT sets "
                "the "
                "limit)",
                comm->rank, missing.c_str());
            return kHcclTimeout;
        }
        const timespec time{0, 1'000'000};
        nanosleep(&time, nullptr);
    }
}

}  // namespace

HcclResult MakeRootInfo(RootInfo* info) {
    Card card{};
    uint64_t random[2] = {};
    if (getrandom(random, sizeof random, 0) != static_cast<ssize_t>(sizeof random)) return kHcclSyscall;
    std::memcpy(card.magic, kMagic, sizeof card.magic);
    std::snprintf(card.name, sizeof card.name, "ascend_moe_vnpu.%08x%016llx", static_cast<uint32_t>(random[0]),
                  static_cast<unsigned long long>(random[1]));
    card.pid = getpid();
    card.fd = memfd_create("ascend_moe_vnpu_hccl", MFD_CLOEXEC);
    if (card.fd < 0 || ftruncate(card.fd, kFrontBytes) ||
        pwrite(card.fd, card.name, sizeof card.name, offsetof(Front, name)) != static_cast<ssize_t>(sizeof card.name)) {
        vnpu_error("HcclGetRootInfo: no memory for a communicator (%s)", std::strerror(errno));
        if (card.fd >= 0) close(card.fd);
        return kHcclMemory;
    }
    std::memset(info, 0, sizeof *info);
    std::memcpy(info->internal, &card, sizeof card);
    return kHcclSuccess;
}

HcclResult Rendezvous(const RootInfo& info, Comm* comm, std::string* name, int* file) {
    Card card;
    std::memcpy(&card, info.internal, sizeof card);
    if (std::memcmp(card.magic, kMagic, sizeof card.magic)) {
        vnpu_error("HcclCommInitRootInfo: the root info was not made by the virtual NPU");
        return kHcclParameter;
    }
    HcclResult code = Open(card, comm->rank, file);
    if (code) return code;
    void* control = mmap(nullptr, ControlBytes(comm->world), PROT_READ | PROT_WRITE, MAP_SHARED, *file, 0);
    if (control == MAP_FAILED) {
        vnpu_error("HCCL: the control memory cannot be mapped (%s)", std::strerror(errno));
        code = kHcclMemory;
    } else if ((code = Enter(static_cast<uint8_t*>(control), *comm))) {
        munmap(control, ControlBytes(comm->world));
    } else {
        comm->control = static_cast<uint8_t*>(control);
        comm->live_fds.assign(static_cast<size_t>(comm->world), -1);
        *name = card.name;
        code = WaitForAll(comm);
    }
    if (card.pid == getpid()) close(card.fd);  // the root's: all have opened it, or some never will
    return code;
}

}  // namespace vnpu
