// What the aclnn entry points do in addition to CANN's generated ones, which do not know the HCCL server type.
#pragma once

#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "aclnn_ascend_moe.h"

// CANN's op base and runtime without headers: the first has no public ones. Weak, so that the package loads with an op
// base that lacks the function (and takes its default, the AICPU).
enum NnopbaseHcclServerType {
    NNOPBASE_HCCL_SERVER_TYPE_AICPU = 0,
    NNOPBASE_HCCL_SERVER_TYPE_MTE,
    NNOPBASE_HCCL_SERVER_TYPE_END
};
extern "C" __attribute__((weak)) void NnopbaseSetHcclServerType(void* executor, NnopbaseHcclServerType type);
extern "C" __attribute__((weak)) const char* aclrtGetSocName();

constexpr aclnnStatus kNullArgument = 161001;

// Reports the first null argument by name; `names` are separated by ", ".
inline bool AnyNull(const char* function, const char* names, std::initializer_list<const void*> arguments) {
    for (const void* argument : arguments) {
        const int length = static_cast<int>(strcspn(names, ","));
        if (argument == nullptr)
            return fprintf(stderr, "%s: %.*s is null, it is required\n", function, length, names), true;
        names += length + 2;
    }
    return false;
}

inline const char* TextOf(const char* text) { return text == nullptr ? "" : text; }

// A3's kernels store into their peers' windows themselves (MTE). On A2 the AICPU carries data to other servers
// (BatchWrite).
inline void SetServerType(aclOpExecutor* executor) {
    if (NnopbaseSetHcclServerType == nullptr) return;
    const char* soc = aclrtGetSocName == nullptr ? nullptr : aclrtGetSocName();
    const bool isA2 = soc != nullptr && strncmp(soc, "Ascend910B", 10) == 0;
    NnopbaseSetHcclServerType(executor, isA2 ? NNOPBASE_HCCL_SERVER_TYPE_AICPU : NNOPBASE_HCCL_SERVER_TYPE_MTE);
}

#define ASCEND_MOE_REQUIRE(...) \
    if (AnyNull(__func__, #__VA_ARGS__, {__VA_ARGS__})) return kNullArgument
