// A communicator's memory and its peers' processes; the communicators of this process.
#include "comm.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>

#include "abi/window.h"

namespace vnpu {
namespace {

uint64_t WindowStride(uint64_t data_bytes) {
    return (ops::WindowBytes(data_bytes, 0) + kMapAlign - 1) / kMapAlign * kMapAlign;
}

HcclResult MapWindows(Comm* comm, int file) {
    const uint64_t stride = WindowStride(comm->data_bytes), begin = ControlBytes(comm->world);
    const uint64_t bytes = stride * static_cast<uint64_t>(comm->world);
    // Every rank extends the file, by the same number of bytes: nobody waits for another to do it.
    void* windows =
        ftruncate(file, static_cast<off_t>(begin + bytes))
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

HcclResult Meet(const RootInfo& info, int rank, int world, uint64_t data_bytes, const std::string& name,
                std::shared_ptr<Comm>* out) {
    if (world < 1 || world > kMaxRanks || rank < 0 || rank >= world) {
        vnpu_error("HcclCommInitRootInfo: rank %d of %d; the virtual NPU has at most %d ranks", rank, world,
                   kMaxRanks);
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
    if (file >= 0) close(file);
    if (code) return code;
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

// ---- the communicators of this process, by handle and by name ----

namespace {

struct Registry {
    std::mutex mutex;
    std::map<void*, std::shared_ptr<Comm>> comms;
};

Registry& TheRegistry() {
    static auto* registry = new Registry;
    return *registry;
}

}  // namespace

std::shared_ptr<Comm> Find(void* handle, const char* function) {
    Registry& registry = TheRegistry();
    std::lock_guard<std::mutex> lock(registry.mutex);
    auto found = registry.comms.find(handle);
    if (found != registry.comms.end()) return found->second;
    vnpu_error("%s: %p is no communicator of the virtual NPU (destroyed already?)", function, handle);
    return nullptr;
}

std::shared_ptr<Comm> FindByName(const std::string& name) {
    Registry& registry = TheRegistry();
    std::lock_guard<std::mutex> lock(registry.mutex);
    for (const auto& entry : registry.comms) {
        if (entry.second->name == name) return entry.second;
    }
    return nullptr;
}

void* Register(std::shared_ptr<Comm> comm) {
    Registry& registry = TheRegistry();
    std::lock_guard<std::mutex> lock(registry.mutex);
    void* handle = comm.get();
    registry.comms[handle] = std::move(comm);
    return handle;
}

void Forget(void* handle) {
    Registry& registry = TheRegistry();
    std::shared_ptr<Comm> last;  // destroyed outside the lock
    std::lock_guard<std::mutex> lock(registry.mutex);
    auto found = registry.comms.find(handle);
    if (found == registry.comms.end()) return;
    last = std::move(found->second);
    registry.comms.erase(found);
}

}  // namespace vnpu

int vnpu_comm_windows(const char* group_name, VnpuWindows* out) {
    if (!group_name || !out) return vnpu::kHcclPointer;
    std::shared_ptr<vnpu::Comm> comm = vnpu::FindByName(group_name);
    if (!comm) {
        vnpu_error("no HCCL communicator of this process is named %s (get_hccl_comm_name gives the name)",
                   group_name);
        return vnpu::kHcclNotFound;
    }
    comm->windows_lent = true;
    out->rank = comm->rank;
    out->world = comm->world;
    out->data_bytes = comm->data_bytes;
    out->bases = comm->bases.data();
    out->live_fds = comm->live_fds.data();
    return 0;
}

int vnpu_comm_before_unmap(const char* group_name, void (*fn)(void*), void* arg) {
    std::shared_ptr<vnpu::Comm> comm = group_name ? vnpu::FindByName(group_name) : nullptr;
    if (!comm || !fn) return vnpu::kHcclNotFound;
    comm->before_unmap = [fn, arg] { fn(arg); };
    return 0;
}
