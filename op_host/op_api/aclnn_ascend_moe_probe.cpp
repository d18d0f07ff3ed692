// Hand-written around the entry points that CANN generates from the op definition with the prefix aclnnInner:
// those know nothing of the HCCL server type.
#include "aclnn_ascend_moe_probe.h"

#include "ascend_moe_aclnn_launch.h"

extern "C" aclnnStatus aclnnInnerAscendMoeProbeGetWorkspaceSize(
    const char* groupEp, int64_t epWorldSize, int64_t epRankId, int64_t mode, int64_t nonce, int64_t rounds,
    int64_t cycles, int64_t broken, int64_t windowMib, int64_t timeoutUs, const aclTensor* reportOut,
    uint64_t* workspaceSize, aclOpExecutor** executor);
extern "C" aclnnStatus aclnnInnerAscendMoeProbe(void* workspace, uint64_t workspaceSize,
                                                aclOpExecutor* executor, aclrtStream stream);

aclnnStatus aclnnAscendMoeProbeGetWorkspaceSize(const char* groupEp, int64_t epWorldSize, int64_t epRankId,
                                                int64_t mode, int64_t nonce, int64_t rounds, int64_t cycles,
                                                int64_t broken, int64_t windowMib, int64_t timeoutUs,
                                                const aclTensor* reportOut, uint64_t* workspaceSize,
                                                aclOpExecutor** executor) {
    ASCEND_MOE_REQUIRE(groupEp);
    ASCEND_MOE_REQUIRE(reportOut);
    ASCEND_MOE_REQUIRE(workspaceSize);
    ASCEND_MOE_REQUIRE(executor);
    return aclnnInnerAscendMoeProbeGetWorkspaceSize(groupEp, epWorldSize, epRankId, mode, nonce, rounds,
                                                    cycles, broken, windowMib, timeoutUs, reportOut,
                                                    workspaceSize, executor);
}

aclnnStatus aclnnAscendMoeProbe(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                aclrtStream stream) {
    ASCEND_MOE_REQUIRE(executor);
    ascend_moe_aclnn::SetServerType(executor);
    return aclnnInnerAscendMoeProbe(workspace, workspaceSize, executor, stream);
}
