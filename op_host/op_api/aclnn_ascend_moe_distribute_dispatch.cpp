// Hand-written around the entry points that CANN generates from the op definition with the prefix aclnnInner:
// those know nothing of the HCCL server type.
#include "aclnn_ascend_moe_distribute_dispatch.h"

#include "ascend_moe_aclnn_launch.h"

extern "C" aclnnStatus aclnnInnerAscendMoeDistributeDispatchGetWorkspaceSize(
    const aclTensor* x, const aclTensor* expertIds, const aclTensor* scalesOptional,
    const aclTensor* xActiveMaskOptional, const aclTensor* expertScalesOptional, const char* groupEp,
    int64_t epWorldSize, int64_t epRankId, int64_t moeExpertNum, const char* groupTp, int64_t tpWorldSize,
    int64_t tpRankId, int64_t expertShardType, int64_t sharedExpertNum, int64_t sharedExpertRankNum,
    int64_t quantMode, int64_t globalBs, int64_t expertTokenNumsType, const char* commAlg,
    int64_t zeroExpertNum, int64_t copyExpertNum, int64_t constExpertNum, int64_t contract, int64_t windowMib,
    int64_t timeoutUs, const aclTensor* expandXOut, const aclTensor* dynamicScalesOut,
    const aclTensor* expandIdxOut, const aclTensor* expertTokenNumsOut, const aclTensor* epRecvCountsOut,
    const aclTensor* tpRecvCountsOut, const aclTensor* expandScalesOut, const aclTensor* errorRecordOut,
    uint64_t* workspaceSize, aclOpExecutor** executor);
extern "C" aclnnStatus aclnnInnerAscendMoeDistributeDispatch(void* workspace, uint64_t workspaceSize,
                                                             aclOpExecutor* executor, aclrtStream stream);

aclnnStatus aclnnAscendMoeDistributeDispatchGetWorkspaceSize(
    const aclTensor* x, const aclTensor* expertIds, const aclTensor* scalesOptional,
    const aclTensor* xActiveMaskOptional, const aclTensor* expertScalesOptional, const char* groupEp,
    int64_t epWorldSize, int64_t epRankId, int64_t moeExpertNum, const char* groupTp, int64_t tpWorldSize,
    int64_t tpRankId, int64_t expertShardType, int64_t sharedExpertNum, int64_t sharedExpertRankNum,
    int64_t quantMode, int64_t globalBs, int64_t expertTokenNumsType, const char* commAlg,
    int64_t zeroExpertNum, int64_t copyExpertNum, int64_t constExpertNum, int64_t contract, int64_t windowMib,
    int64_t timeoutUs, const aclTensor* expandXOut, const aclTensor* dynamicScalesOut,
    const aclTensor* expandIdxOut, const aclTensor* expertTokenNumsOut, const aclTensor* epRecvCountsOut,
    const aclTensor* tpRecvCountsOut, const aclTensor* expandScalesOut, const aclTensor* errorRecordOut,
    uint64_t* workspaceSize, aclOpExecutor** executor) {
    ASCEND_MOE_REQUIRE(x);
    ASCEND_MOE_REQUIRE(expertIds);
    ASCEND_MOE_REQUIRE(groupEp);
    ASCEND_MOE_REQUIRE(expandXOut);
    ASCEND_MOE_REQUIRE(dynamicScalesOut);
    ASCEND_MOE_REQUIRE(expandIdxOut);
    ASCEND_MOE_REQUIRE(expertTokenNumsOut);
    ASCEND_MOE_REQUIRE(epRecvCountsOut);
    ASCEND_MOE_REQUIRE(tpRecvCountsOut);
    ASCEND_MOE_REQUIRE(expandScalesOut);
    ASCEND_MOE_REQUIRE(errorRecordOut);
    ASCEND_MOE_REQUIRE(workspaceSize);
    ASCEND_MOE_REQUIRE(executor);
    return aclnnInnerAscendMoeDistributeDispatchGetWorkspaceSize(
        x, expertIds, scalesOptional, xActiveMaskOptional, expertScalesOptional, groupEp, epWorldSize,
        epRankId, moeExpertNum, ascend_moe_aclnn::TextOf(groupTp), tpWorldSize, tpRankId, expertShardType,
        sharedExpertNum, sharedExpertRankNum, quantMode, globalBs, expertTokenNumsType,
        ascend_moe_aclnn::TextOf(commAlg), zeroExpertNum, copyExpertNum, constExpertNum, contract, windowMib,
        timeoutUs, expandXOut, dynamicScalesOut, expandIdxOut, expertTokenNumsOut, epRecvCountsOut,
        tpRecvCountsOut, expandScalesOut, errorRecordOut, workspaceSize, executor);
}

aclnnStatus aclnnAscendMoeDistributeDispatch(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                             aclrtStream stream) {
    ASCEND_MOE_REQUIRE(executor);
    ascend_moe_aclnn::SetServerType(executor);
    return aclnnInnerAscendMoeDistributeDispatch(workspace, workspaceSize, executor, stream);
}
