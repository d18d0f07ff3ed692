// A communicator's memory and its peers' processes; the communicators of this process; waiting for other
// ranks, which is bounded and names whom it waits for.
#include "comm.h"

#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "abi/window.h"
#include "acl/device.h"

namespace vnpu {
namespace {

uint64_t WindowStride(uint64_t data_bytes) {
    return (ops::WindowBytes(data_bytes, 0) + kMapAlign - 1) / kMapAlign * kMapAlign;
}

HcclResult MapWindows(Comm* comm, int file) {
    const uint64_t stride = WindowStride(comm->data_bytes), begin = ControlBytes(comm->world);
    const uint64_t bytes = stride * static_cast<uint64_t>(comm->world);
    // Every rank extends the file, by the same number of bytes: nobody waits for another to do it.
    void* windows = ftruncate(file, static_cast<off_t>(begin + bytes))
                        ? MAP_FAILED
                        : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, static_cast<off_t>(begin));
    if (windows == MAP_FAILED) {
        vnpu_error("HCCL: the windows of %s cannot be mapped (%s)", comm->name.c_str(), std::strerror(errno));
        return kHcclMemory;
    }
    comm->windows = static_cast<uint8_t*>(windows);
    for (int r = 0; r < comm->world; ++r) {
        comm->bases.push_back(comm->windows + stride * static_cast<uint64_t>(r));
    }
    return kHcclSuccess;
}

}  // namespace

HcclResult ConnectRanks(const RootInfo& info, int rank, int world, uint64_t data_bytes, const std::string& name,
                        std::shared_ptr<Comm>* out) {
    if (world < 1 || world > kMaxRanks || rank < 0 || rank >= world) {
        vnpu_error("HcclCommInitRootInfo: rank %d of %d; the virtual NPU has at most %d ranks", rank, world, kMaxRanks);
        return kHcclParameter;
    }
    auto comm = std::make_shared<Comm>();
    comm->rank = rank;
    comm->world = world;
    comm->data_bytes = data_bytes;
    std::string root;
    int file = -1;
    HcclResult code = Rendezvous(info, comm.get(), &root, &file);
    comm->name = name.empty() ? "127.0.0.1%" + root : name;
    if (!code) code = MapWindows(comm.get(), file);
    comm->file = file;
    if (code) return code;
    std::snprintf(RankOf(comm->control, rank)->call.op, sizeof(Call::op), "initialisation");
    if ((code = Barrier(*comm, "initialisation"))) return code;
    *out = comm;
    return kHcclSuccess;
}

Comm::~Comm() {
    if (control) {
        RankOf(control, rank)->left.store(1, std::memory_order_release);
        munmap(control, ControlBytes(world));
    }
    if (file >= 0) close(file);
    if (windows_registered) return;
    if (windows) munmap(windows, WindowStride(data_bytes) * static_cast<uint64_t>(world));
    for (int fd : live_fds) {
        if (fd >= 0) close(fd);
    }
}

// ---- the communicators of this process, by handle and by name ----

namespace {

using Registry = std::map<void*, std::shared_ptr<Comm>>;

}  // namespace

std::shared_ptr<Comm> Find(void* handle, const char* function) {
    const Locked<Registry> comms;
    auto found = comms->find(handle);
    if (found != comms->end()) return found->second;
    vnpu_error("%s: %p is no communicator of the virtual NPU (destroyed already?)", function, handle);
    return nullptr;
}

std::shared_ptr<Comm> FindByName(const std::string& name) {
    const Locked<Registry> comms;
    for (const auto& entry : *comms) {
        if (entry.second->name == name) return entry.second;
    }
    return nullptr;
}

void* Register(std::shared_ptr<Comm> comm) {
    const Locked<Registry> comms;
    void* handle = comm.get();
    (*comms)[handle] = std::move(comm);
    return handle;
}

void Forget(void* handle) {
    std::shared_ptr<Comm> last;  // destroyed outside the lock
    const Locked<Registry> comms;
    auto found = comms->find(handle);
    if (found == comms->end()) return;
    last = std::move(found->second);
    comms->erase(found);
}

// ---- waiting ----

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kLivenessEvery = std::chrono::milliseconds(50);

// Spin a little, then give the core away, then sleep 50 us to 1 ms.
void Pause(uint64_t round) {
    if (round < 64) return;
    if (round < 512) {
        sched_yield();
        return;
    }
    const long ns = round < 1024 ? 50'000 : 1'000'000;
    timespec time{0, ns};
    nanosleep(&time, nullptr);
}

std::string Describe(const Comm& comm, int rank) {
    const RankControl* control = RankOf(comm.control, rank);
    char text[160];
    std::snprintf(text, sizeof text, "rank %d (process %d, in call %llu, %.23s)", rank, control->pid,
                  static_cast<unsigned long long>(control->call.sequence), control->call.op);
    return text;
}

}  // namespace

bool Gone(int pidfd) {
    if (pidfd < 0) return false;
    pollfd poll_fd{pidfd, POLLIN, 0};
    return poll(&poll_fd, 1, 0) > 0 && (poll_fd.revents & (POLLIN | POLLHUP | POLLERR));
}

HcclResult Fail(Comm& comm, HcclResult code, int culprit, const std::string& text) {
    Failure* failure = FailureOf(comm.control);
    uint32_t none = 0;
    if (failure->state.compare_exchange_strong(none, 1)) {
        failure->code = code;
        failure->culprit = culprit;
        failure->reporter = comm.rank;
        std::snprintf(failure->text, sizeof failure->text, "%s", text.c_str());
        failure->state.store(2, std::memory_order_release);
    }
    vnpu_error("HCCL communicator %s, rank %d of %d: %s", comm.name.c_str(), comm.rank, comm.world, text.c_str());
    return code;
}

HcclResult CheckFailed(Comm& comm) {
    Failure* failure = FailureOf(comm.control);
    if (failure->state.load(std::memory_order_acquire) != 2) return kHcclSuccess;
    vnpu_error("HCCL communicator %s, rank %d of %d: has failed, as rank %d reported: %s", comm.name.c_str(), comm.rank,
               comm.world, failure->reporter, failure->text);
    return failure->code;
}

HcclResult WaitFor(Comm& comm, const std::function<bool(int)>& awaited, const std::string& what) {
    const double seconds = vnpu_timeout_seconds();
    const auto start = Clock::now();
    auto next_look = start + kLivenessEvery;
    for (uint64_t round = 0;; ++round) {
        int missing = -1;
        for (int r = 0; r < comm.world && missing < 0; ++r) {
            if (awaited(r)) missing = r;
        }
        if (missing < 0) return kHcclSuccess;
        if (FailureOf(comm.control)->state.load(std::memory_order_acquire) == 2) return CheckFailed(comm);
        const auto now = Clock::now();
        if (round > 512 && now >= next_look) {
            next_look = now + kLivenessEvery;
            for (int r = 0; r < comm.world; ++r) {
                const bool left = RankOf(comm.control, r)->left.load(std::memory_order_acquire) != 0;
                // What it did last is visible once it is known to be gone: look again before giving it up.
                if (r == comm.rank || !(left || Gone(comm.live_fds[r])) || !awaited(r)) continue;
                return Fail(
                    comm, kHcclRemote, r,
                    what + ": " + Describe(comm, r) +
                        (left ? " has destroyed its end of the communicator" : " is gone: it exited or was killed"));
            }
        }
        if (std::chrono::duration<double>(now - start).count() > seconds) {
            char limit[64];
            std::snprintf(limit, sizeof limit, "%g s", seconds);
            return Fail(comm, kHcclTimeout, missing,
                        what + ": waited " + limit + " for " + Describe(comm, missing) +
                            ", which is alive (ASCEND_MOE_TIMEOUT_S sets the limit)");
        }
        Pause(round);
    }
}

HcclResult Barrier(Comm& comm, const std::string& what) {
    const uint64_t mine = ++comm.arrivals;
    RankOf(comm.control, comm.rank)->arrived.store(mine, std::memory_order_release);
    return WaitFor(
        comm, [&](int r) { return RankOf(comm.control, r)->arrived.load(std::memory_order_acquire) < mine; }, what);
}

}  // namespace vnpu

int vnpu_comm_windows(const char* group_name, VnpuWindows* out) {
    if (!group_name || !out) return vnpu::kHcclPointer;
    std::shared_ptr<vnpu::Comm> comm = vnpu::FindByName(group_name);
    if (!comm) {
        vnpu_error("no HCCL communicator of this process is named %s (get_hccl_comm_name gives the name)", group_name);
        return vnpu::kHcclNotFound;
    }
    comm->windows_registered = true;
    out->rank = comm->rank;
    out->world = comm->world;
    out->data_bytes = comm->data_bytes;
    out->bases = comm->bases.data();
    out->live_fds = comm->live_fds.data();
    return 0;
}

// ---- HCCL's functions about communicators ----

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
            ConnectRanks(*info, static_cast<int>(rank), static_cast<int>(world), mib << 20, name, &comm)) {
        return code;
    }
    *out = Register(std::move(comm));
    return kHcclSuccess;
}

}  // namespace

VNPU_EXPORT HcclResult HcclGetRootInfo(RootInfo* info) { return info ? MakeRootInfo(info) : kHcclPointer; }

VNPU_EXPORT HcclResult HcclCommInitRootInfo(uint32_t world, const RootInfo* info, uint32_t rank, void** comm) {
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

VNPU_EXPORT HcclResult HcclCommDestroy(void* handle) {
    vnpu_wait();  // as below, if it fails
    std::shared_ptr<Comm> comm = Find(handle, "HcclCommDestroy");
    if (!comm) return kHcclNotFound;
    // Messages that were sent are delivered first. If that fails, stderr has the error and the end goes on.
    WaitFor(*comm, [&](int r) { return InFlight(*comm, r); }, "CommDestroy, a message in flight");
    RankOf(comm->control, comm->rank)->left.store(1, std::memory_order_release);
    Forget(handle);
    return kHcclSuccess;
}

// Never an error: every failure is returned by the call that it affects. torch_npu's watchdog ends the process
// on an error seen here, even one that is just being raised as an exception with the failed rank's name.
VNPU_EXPORT HcclResult HcclGetCommAsyncError(void* handle, HcclResult* code) {
    if (!code || !Find(handle, "HcclGetCommAsyncError")) return kHcclPointer;
    *code = kHcclSuccess;
    return kHcclSuccess;
}

// Settings of algorithms and determinism: the virtual NPU has one algorithm, and it is deterministic.
VNPU_EXPORT HcclResult HcclSetConfig(int, int32_t) { return kHcclSuccess; }
// Nothing is ever suspended: a call either runs or has failed.
VNPU_EXPORT HcclResult HcclCommResume(void* handle) {
    return Find(handle, "HcclCommResume") ? kHcclSuccess : kHcclNotFound;
}

// The calls of a group run one by one: none waits for a later call of its own rank.
VNPU_EXPORT HcclResult HcclGroupStart() { return kHcclSuccess; }
VNPU_EXPORT HcclResult HcclGroupEnd() { return kHcclSuccess; }
