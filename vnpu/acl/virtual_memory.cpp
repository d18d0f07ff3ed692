// Reserved address ranges with physical memory mapped into them: what the allocator's expandable segments
// use.
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <unordered_set>

#include "state.h"

using namespace vnpu;

namespace {

// One handle of physical memory is one memfd: it can be mapped and unmapped without losing its bytes.
struct Physical {
    int fd;
    size_t bytes;
};

struct Ranges {
    std::mutex mutex;
    std::map<void*, size_t> reserved;
    std::map<void*, size_t> mapped;
    std::unordered_set<Physical*> physical;
};

Ranges& TheRanges() {
    static auto* ranges = new Ranges;
    return *ranges;
}

}  // namespace

VNPU_EXPORT AclError aclrtReserveMemAddress(void** out, size_t size, size_t, void*, uint64_t) {
    if (!out || !size) return kParamInvalid;
    void* range = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return kOutOfMemory;
    Ranges& ranges = TheRanges();
    std::lock_guard<std::mutex> lock(ranges.mutex);
    ranges.reserved[range] = size;
    *out = range;
    return kSuccess;
}

VNPU_EXPORT AclError aclrtReleaseMemAddress(void* range) {
    Ranges& ranges = TheRanges();
    std::lock_guard<std::mutex> lock(ranges.mutex);
    auto found = ranges.reserved.find(range);
    if (found == ranges.reserved.end()) {
        vnpu_error("aclrtReleaseMemAddress: %p was not reserved", range);
        return kParamInvalid;
    }
    munmap(range, found->second);
    ranges.reserved.erase(found);
    return kSuccess;
}

VNPU_EXPORT AclError aclrtMallocPhysical(Handle* handle, size_t size, const void*, uint64_t) {
    if (!handle || !size) return kParamInvalid;
    const int fd = memfd_create("ascend_moe_vnpu_memory", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(size))) {
        if (fd >= 0) close(fd);
        return kOutOfMemory;
    }
    Ranges& ranges = TheRanges();
    std::lock_guard<std::mutex> lock(ranges.mutex);
    auto* physical = new Physical{fd, size};
    ranges.physical.insert(physical);
    *handle = physical;
    return kSuccess;
}

VNPU_EXPORT AclError aclrtFreePhysical(Handle handle) {
    Ranges& ranges = TheRanges();
    std::lock_guard<std::mutex> lock(ranges.mutex);
    auto* physical = static_cast<Physical*>(handle);
    if (!ranges.physical.erase(physical)) {
        vnpu_error("aclrtFreePhysical: %p is no physical memory of the virtual NPU", handle);
        return kInvalidHandle;
    }
    close(physical->fd);
    delete physical;
    return kSuccess;
}

VNPU_EXPORT AclError aclrtMapMem(void* address, size_t size, size_t offset, Handle handle, uint64_t) {
    Ranges& ranges = TheRanges();
    std::lock_guard<std::mutex> lock(ranges.mutex);
    auto* physical = static_cast<Physical*>(handle);
    if (!ranges.physical.count(physical) || offset + size > physical->bytes) {
        vnpu_error("aclrtMapMem: %zu bytes at offset %zu of %p are not physical memory", size, offset,
                   handle);
        return kParamInvalid;
    }
    if (mmap(address, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, physical->fd,
             static_cast<off_t>(offset)) == MAP_FAILED) {
        return kOutOfMemory;
    }
    ranges.mapped[address] = size;
    return kSuccess;
}

VNPU_EXPORT AclError aclrtUnmapMem(void* address) {
    Ranges& ranges = TheRanges();
    std::lock_guard<std::mutex> lock(ranges.mutex);
    auto found = ranges.mapped.find(address);
    if (found == ranges.mapped.end()) {
        vnpu_error("aclrtUnmapMem: nothing is mapped at %p", address);
        return kParamInvalid;
    }
    mmap(address, found->second, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    ranges.mapped.erase(found);
    return kSuccess;
}
