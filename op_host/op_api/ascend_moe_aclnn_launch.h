// What both pairs of entry points share: null checks, and who serves the communicator.
#ifndef ASCEND_MOE_ACLNN_LAUNCH_H
#define ASCEND_MOE_ACLNN_LAUNCH_H

#include <cstdio>
#include <cstring>

#include "ascend_moe_aclnn_types.h"

// CANN's op base and runtime, without headers: the first has none that is public. Weak, so that an op base
// that lacks the function still loads the package (and then takes its default, the AICPU).
enum NnopbaseHcclServerType {
    NNOPBASE_HCCL_SERVER_TYPE_AICPU = 0,
    NNOPBASE_HCCL_SERVER_TYPE_MTE,
    NNOPBASE_HCCL_SERVER_TYPE_END
};
extern "C" __attribute__((weak)) void NnopbaseSetHcclServerType(void* executor, NnopbaseHcclServerType type);
extern "C" __attribute__((weak)) const char* aclrtGetSocName();

namespace ascend_moe_aclnn {

constexpr aclnnStatus kNullArgument = 161001;

inline aclnnStatus ReportNull(const char* function, const char* argument) {
    fprintf(stderr, "%s: %s is null, it is required\n", function, argument);
    return kNullArgument;
}

inline const char* TextOf(const char* text) { return text == nullptr ? "" : text; }

// A3's kernels store into their peers' windows themselves (MTE). On A2 the AICPU carries what goes to other
// servers (BatchWrite).
inline void SetServerType(aclOpExecutor* executor) {
    if (NnopbaseSetHcclServerType == nullptr) return;
    const char* soc = aclrtGetSocName == nullptr ? nullptr : aclrtGetSocName();
    const bool isA2 = soc != nullptr && strncmp(soc, "Ascend910B", 10) == 0;
    NnopbaseSetHcclServerType(executor,
                              isA2 ? NNOPBASE_HCCL_SERVER_TYPE_AICPU : NNOPBASE_HCCL_SERVER_TYPE_MTE);
}

}  // namespace ascend_moe_aclnn

#define ASCEND_MOE_REQUIRE(argument) \
    if ((argument) == nullptr) return ascend_moe_aclnn::ReportNull(__func__, #argument)

#endif  // ASCEND_MOE_ACLNN_LAUNCH_H
