// Device memory is host memory: anonymous pages, so that a kernel of the twin reads it like any other.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <memory>

#include "device.h"
#include "queue.h"
#include "graph.h"

namespace vnpu {
namespace {

// As in the public headers of ACL.
enum LocationType : int { kLocationHost = 0, kLocationDevice = 1, kLocationUnregistered = 2 };

struct Location {
    uint32_t id;
    int type;
};

struct PointerAttributes {
    Location location;
    uint32_t page_size;
    uint32_t reserved[4];
};

constexpr size_t kAlign = 2u << 20;  // the allocator above asks for 2 MiB multiples

struct Block {
    size_t bytes;
    int type;  // kLocationDevice or kLocationHost
    int device;
    bool ours;  // false: registered host memory of the caller's
};

struct Heap {
    std::map<uintptr_t, Block> blocks;
    uint64_t used[kMaxDevices] = {};
};

size_t PageUp(size_t bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return (bytes + page - 1) / page * page;
}

// 2 MiB aligned for large blocks: over-map, then give back both ends.
void* MapPages(size_t bytes) {
    const size_t align = bytes >= kAlign ? kAlign : static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* raw =
        mmap(nullptr, bytes + align, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) return nullptr;
    const auto begin = reinterpret_cast<uintptr_t>(raw);
    const uintptr_t start = (begin + align - 1) / align * align;
    if (start > begin) munmap(raw, start - begin);
    if (begin + align > start) munmap(reinterpret_cast<void*>(start + bytes), begin + align - start);
    return reinterpret_cast<void*>(start);
}

// Messages name the caller.
AclError Allocate(void** out, size_t size, int type, const char* function = __builtin_FUNCTION()) {
    if (!out || !size) {
        vnpu_error("%s: %s", function, out ? "size is 0" : "the result pointer is null");
        return kParamInvalid;
    }
    const int device = CurrentDevice();
    if (type == kLocationDevice) {
        if (AclError code = NeedDevice(function)) return code;
    }
    const size_t bytes = PageUp(size);
    const Locked<Heap> heap;
    if (type == kLocationDevice && heap->used[device] + bytes > TheSoc().memory_bytes) return kOutOfMemory;
    void* pointer = MapPages(bytes);
    if (!pointer) return kOutOfMemory;
    heap->blocks[reinterpret_cast<uintptr_t>(pointer)] = {bytes, type, device, true};
    if (type == kLocationDevice) heap->used[device] += bytes;
    *out = pointer;
    return kSuccess;
}

// As in CANN it waits for the work that may still use the block.
AclError Release(void* pointer, int type, const char* function = __builtin_FUNCTION()) {
    if (AclError code = WaitForAll(function)) return code;
    const Locked<Heap> heap;
    auto block = heap->blocks.find(reinterpret_cast<uintptr_t>(pointer));
    if (block == heap->blocks.end() || block->second.type != type || !block->second.ours) {
        vnpu_error("%s: %p is no block of the virtual NPU", function, pointer);
        return kParamInvalid;
    }
    if (type == kLocationDevice) heap->used[block->second.device] -= block->second.bytes;
    munmap(pointer, block->second.bytes);
    heap->blocks.erase(block);
    return kSuccess;
}

AclError Register(void* pointer, size_t size, const char* function = __builtin_FUNCTION()) {
    if (!pointer || !size) return kParamInvalid;
    const Locked<Heap> heap;
    if (!heap->blocks.emplace(reinterpret_cast<uintptr_t>(pointer), Block{size, kLocationHost, 0, false}).second) {
        vnpu_error("%s: %p is registered already", function, pointer);
        return kParamInvalid;
    }
    return kSuccess;
}

// kLocationDevice, kLocationHost or kLocationUnregistered; the device's number in *device.
int WhereIs(const void* pointer, int* device) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    const Locked<Heap> heap;
    auto after = heap->blocks.upper_bound(address);
    if (after == heap->blocks.begin()) return kLocationUnregistered;
    --after;
    if (address >= after->first + after->second.bytes) return kLocationUnregistered;
    if (device) *device = after->second.device;
    return after->second.type;
}

}  // namespace
}  // namespace vnpu

using namespace vnpu;

VNPU_EXPORT AclError aclrtMalloc(void** out, size_t size, int) { return Allocate(out, size, kLocationDevice); }
VNPU_EXPORT AclError aclrtMallocAlign32(void** out, size_t size, int) { return Allocate(out, size, kLocationDevice); }
VNPU_EXPORT AclError aclrtFree(void* pointer) { return Release(pointer, kLocationDevice); }

VNPU_EXPORT AclError aclrtMallocHost(void** out, size_t size) { return Allocate(out, size, kLocationHost); }
VNPU_EXPORT AclError aclrtMallocHostWithCfg(void** out, uint64_t size, void*) {
    return Allocate(out, size, kLocationHost);
}
VNPU_EXPORT AclError aclrtFreeHost(void* pointer) { return Release(pointer, kLocationHost); }

// A registered host block is its own device address.
VNPU_EXPORT AclError aclrtHostRegister(void* pointer, uint64_t size, int, void** device_pointer) {
    if (device_pointer) *device_pointer = pointer;
    return Register(pointer, size);
}
VNPU_EXPORT AclError aclrtHostRegisterV2(void* pointer, uint64_t size, uint32_t) { return Register(pointer, size); }
VNPU_EXPORT AclError aclrtHostUnregister(void* pointer) {
    if (AclError code = WaitForAll()) return code;
    const Locked<Heap> heap;
    auto block = heap->blocks.find(reinterpret_cast<uintptr_t>(pointer));
    if (block == heap->blocks.end() || block->second.ours) return kParamInvalid;
    heap->blocks.erase(block);
    return kSuccess;
}

VNPU_EXPORT AclError aclrtPointerGetAttributes(const void* pointer, PointerAttributes* attributes) {
    if (!attributes) return kParamInvalid;
    std::memset(attributes, 0, sizeof *attributes);
    int device = 0;
    attributes->location.type = WhereIs(pointer, &device);
    attributes->location.id = static_cast<uint32_t>(device < 0 ? 0 : device);
    attributes->page_size = static_cast<uint32_t>(sysconf(_SC_PAGESIZE));
    return kSuccess;
}

VNPU_EXPORT AclError aclrtGetMemInfo(int, size_t* free_bytes, size_t* total) {
    if (AclError code = NeedDevice("aclrtGetMemInfo")) return code;
    if (!free_bytes || !total) return kParamInvalid;
    const Locked<Heap> heap;
    *total = TheSoc().memory_bytes;
    *free_bytes = TheSoc().memory_bytes - heap->used[CurrentDevice()];
    return kSuccess;
}

// ---- address ranges with physical memory mapped into them, for the allocator's expandable segments ----

namespace {

// One handle of physical memory is one memfd: it can be mapped and unmapped without losing its bytes.
struct Physical {
    int fd;
    size_t bytes;
    int device;
};

struct Ranges {
    std::map<void*, size_t> reserved;
    std::map<void*, size_t> mapped;
};

}  // namespace

VNPU_EXPORT AclError aclrtReserveMemAddress(void** out, size_t size, size_t, void*, uint64_t) {
    if (!out || !size) return kParamInvalid;
    void* range = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return kOutOfMemory;
    const Locked<Ranges> ranges;
    ranges->reserved[range] = size;
    *out = range;
    return kSuccess;
}

VNPU_EXPORT AclError aclrtReleaseMemAddress(void* range) {
    if (AclError code = WaitForAll()) return code;
    const Locked<Ranges> ranges;
    auto reserved = ranges->reserved.find(range);
    if (reserved == ranges->reserved.end()) return kParamInvalid;
    munmap(range, reserved->second);
    ranges->reserved.erase(reserved);
    return kSuccess;
}

VNPU_EXPORT AclError aclrtMallocPhysical(Handle* handle, size_t size, const void*, uint64_t) {
    if (!handle || !size) return kParamInvalid;
    if (AclError code = NeedDevice("aclrtMallocPhysical")) return code;
    const int device = CurrentDevice();
    const Locked<Heap> heap;
    if (heap->used[device] + size > TheSoc().memory_bytes) return kOutOfMemory;
    const int fd = memfd_create("ascend_moe_vnpu_memory", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(size))) {
        if (fd >= 0) close(fd);
        return kOutOfMemory;
    }
    *handle = new Physical{fd, size, device};
    heap->used[device] += size;
    return kSuccess;
}

VNPU_EXPORT AclError aclrtFreePhysical(Handle handle) {
    const std::unique_ptr<Physical> physical(static_cast<Physical*>(handle));
    const Locked<Heap> heap;
    heap->used[physical->device] -= physical->bytes;
    close(physical->fd);
    return kSuccess;
}

VNPU_EXPORT AclError aclrtMapMem(void* address, size_t size, size_t offset, Handle handle, uint64_t) {
    const Locked<Ranges> ranges;
    auto* physical = static_cast<Physical*>(handle);
    if (offset + size > physical->bytes) return kParamInvalid;
    if (mmap(address, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, physical->fd, static_cast<off_t>(offset)) ==
        MAP_FAILED) {
        return kOutOfMemory;
    }
    ranges->mapped[address] = size;
    return kSuccess;
}

VNPU_EXPORT AclError aclrtUnmapMem(void* address) {
    if (AclError code = WaitForAll()) return code;
    const Locked<Ranges> ranges;
    auto range = ranges->mapped.find(address);
    if (range == ranges->mapped.end()) return kParamInvalid;
    mmap(address, range->second, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    ranges->mapped.erase(range);
    return kSuccess;
}

// ---- copies and fills: synchronous ones wait for all streams, the others go onto their own ----

namespace {

AclError Check(const char* function, const void* destination, size_t room, const void* source, size_t count) {
    if (count > room) {
        vnpu_error("%s: %zu bytes do not fit into a destination of %zu", function, count, room);
        return kParamInvalid;
    }
    if (count && (!destination || !source)) {
        vnpu_error("%s: the %s is null", function, destination ? "source" : "destination");
        return kParamInvalid;
    }
    return kSuccess;
}

AclError CopyAsync(const char* function, void* destination, size_t room, const void* source, size_t count,
                   Handle stream) {
    if (AclError code = Check(function, destination, room, source, count)) return code;
    return vnpu_enqueue(stream, [=] { std::memmove(destination, source, count); });
}

// Calls copy(i) for every copy of a batch, until one fails.
template <typename Copy>
AclError CopyBatch(size_t batches, size_t* fail_index, const Copy& copy) {
    for (size_t i = 0; i < batches; ++i) {
        if (AclError code = copy(i)) {
            if (fail_index) *fail_index = i;
            return code;
        }
    }
    return kSuccess;
}

}  // namespace

VNPU_EXPORT AclError aclrtMemcpy(void* destination, size_t room, const void* source, size_t count, int) {
    if (AclError code = Check("aclrtMemcpy", destination, room, source, count)) return code;
    if (AclError code = RefuseInCapture("aclrtMemcpy")) return code;
    if (AclError code = WaitForAll("aclrtMemcpy")) return code;
    std::memmove(destination, source, count);
    return kSuccess;
}

VNPU_EXPORT AclError aclrtMemcpyAsync(void* destination, size_t room, const void* source, size_t count, int,
                                      Handle stream) {
    return CopyAsync("aclrtMemcpyAsync", destination, room, source, count, stream);
}

VNPU_EXPORT AclError aclrtMemcpyAsyncWithCondition(void* destination, size_t room, const void* source, size_t count,
                                                   int, Handle stream) {
    return CopyAsync("aclrtMemcpyAsyncWithCondition", destination, room, source, count, stream);
}

// Attributes say where the ends are; here every end is host memory.
VNPU_EXPORT AclError aclrtMemcpyBatch(void** destinations, size_t* rooms, void** sources, size_t* sizes, size_t batches,
                                      void*, size_t*, size_t, size_t* fail_index) {
    return CopyBatch(batches, fail_index,
                     [=](size_t i) { return aclrtMemcpy(destinations[i], rooms[i], sources[i], sizes[i], 0); });
}

VNPU_EXPORT AclError aclrtMemcpyBatchAsync(void** destinations, size_t* rooms, void** sources, size_t* sizes,
                                           size_t batches, void*, size_t*, size_t, size_t* fail_index, Handle stream) {
    return CopyBatch(batches, fail_index, [=](size_t i) {
        return CopyAsync("aclrtMemcpyBatchAsync", destinations[i], rooms[i], sources[i], sizes[i], stream);
    });
}

VNPU_EXPORT AclError aclrtMemset(void* destination, size_t room, int32_t value, size_t count) {
    if (AclError code = Check("aclrtMemset", destination, room, destination, count)) return code;
    if (AclError code = RefuseInCapture("aclrtMemset")) return code;
    if (AclError code = WaitForAll("aclrtMemset")) return code;
    std::memset(destination, value, count);
    return kSuccess;
}

VNPU_EXPORT AclError aclrtMemsetAsync(void* destination, size_t room, int32_t value, size_t count, Handle stream) {
    if (AclError code = Check("aclrtMemsetAsync", destination, room, destination, count)) return code;
    return vnpu_enqueue(stream, [=] { std::memset(destination, value, count); });
}
