// Copies and fills. Synchronous ones run at once, the others go onto their stream (and are recorded in a
// capture).
#include <cstring>

#include "graph.h"

using namespace vnpu;

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

struct Copy {
    void* destination;
    const void* source;
    size_t count;
};

struct Fill {
    void* destination;
    int value;
    size_t count;
};

AclError CopyAsync(const char* function, void* destination, size_t room, const void* source, size_t count,
                   Handle stream) {
    if (AclError code = Check(function, destination, room, source, count)) return code;
    return vnpu_enqueue(
        stream,
        [](void* arg) {
            auto* copy = static_cast<Copy*>(arg);
            std::memmove(copy->destination, copy->source, copy->count);
        },
        new Copy{destination, source, count}, [](void* arg) { delete static_cast<Copy*>(arg); });
}

AclError CopyBatch(const char* function, void** destinations, size_t* rooms, void** sources, size_t* sizes,
                   size_t batches, size_t* fail_index, Handle stream) {
    for (size_t i = 0; i < batches; ++i) {
        if (AclError code = CopyAsync(function, destinations[i], rooms[i], sources[i], sizes[i], stream)) {
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
    std::memmove(destination, source, count);
    return kSuccess;
}

VNPU_EXPORT AclError aclrtMemcpyAsync(void* destination, size_t room, const void* source, size_t count, int,
                                      Handle stream) {
    return CopyAsync("aclrtMemcpyAsync", destination, room, source, count, stream);
}

VNPU_EXPORT AclError aclrtMemcpyAsyncWithCondition(void* destination, size_t room, const void* source,
                                                   size_t count, int, Handle stream) {
    return CopyAsync("aclrtMemcpyAsyncWithCondition", destination, room, source, count, stream);
}

// Attributes say where the ends are; here every end is host memory.
VNPU_EXPORT AclError aclrtMemcpyBatch(void** destinations, size_t* rooms, void** sources, size_t* sizes,
                                      size_t batches, void*, size_t*, size_t, size_t* fail_index) {
    for (size_t i = 0; i < batches; ++i) {
        if (AclError code = aclrtMemcpy(destinations[i], rooms[i], sources[i], sizes[i], kCopyDefault)) {
            if (fail_index) *fail_index = i;
            return code;
        }
    }
    return kSuccess;
}

VNPU_EXPORT AclError aclrtMemcpyBatchAsync(void** destinations, size_t* rooms, void** sources, size_t* sizes,
                                           size_t batches, void*, size_t*, size_t, size_t* fail_index,
                                           Handle stream) {
    return CopyBatch("aclrtMemcpyBatchAsync", destinations, rooms, sources, sizes, batches, fail_index,
                     stream);
}

VNPU_EXPORT AclError aclrtMemset(void* destination, size_t room, int32_t value, size_t count) {
    if (AclError code = Check("aclrtMemset", destination, room, destination, count)) return code;
    if (AclError code = RefuseInCapture("aclrtMemset")) return code;
    std::memset(destination, value, count);
    return kSuccess;
}

VNPU_EXPORT AclError aclrtMemsetAsync(void* destination, size_t room, int32_t value, size_t count,
                                      Handle stream) {
    if (AclError code = Check("aclrtMemsetAsync", destination, room, destination, count)) return code;
    return vnpu_enqueue(
        stream,
        [](void* arg) {
            auto* fill = static_cast<Fill*>(arg);
            std::memset(fill->destination, fill->value, fill->count);
        },
        new Fill{destination, value, count}, [](void* arg) { delete static_cast<Fill*>(arg); });
}
