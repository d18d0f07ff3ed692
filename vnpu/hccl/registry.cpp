// The communicators of this process, by handle and by name.
#include <map>

#include "comm.h"
#include "vnpu_windows.h"

namespace vnpu {
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
