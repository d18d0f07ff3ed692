// Hand-written around the entry points that CANN generates from the op definition with the prefix aclnnInner:
// those know nothing of the HCCL server type.
#include "aclnn_ascend_moe_distribute_combine.h"

#include "ascend_moe_aclnn_launch.h"

extern "C" aclnnStatus aclnnInnerAscendMoeDistributeCombineGetWorkspaceSize(
    const aclTensor* expandX, const aclTensor* expertIds, const aclTensor* expandIdx,
    const aclTensor* epSendCounts, const aclTensor* expertScales, const aclTensor* tpSendCountsOptional,
    const aclTensor* xActiveMaskOptional, const aclTensor* expandScalesOptional,
    const aclTensor* sharedExpertXOptional, const char* groupEp, int64_t epWorldSize, int64_t epRankId,
    int64_t moeExpertNum, const char* groupTp, int64_t tpWorldSize, int64_t tpRankId, int64_t expertShardType,
    int64_t sharedExpertNum, int64_t sharedExpertRankNum, int64_t globalBs, int64_t outDtype,
    int64_t commQuantMode, int64_t groupListType, const char* commAlg, int64_t zeroExpertNum,
    int64_t copyExpertNum, int64_t constExpertNum, int64_t contract, int64_t windowMib, int64_t timeoutUs,
    const aclTensor* xOut, const aclTensor* errorRecordOut, uint64_t* workspaceSize,
    aclOpExecutor** executor);
extern "C" aclnnStatus aclnnInnerAscendMoeDistributeCombine(void* workspace, uint64_t workspaceSize,
                                                            aclOpExecutor* executor, aclrtStream stream);

aclnnStatus aclnnAscendMoeDistributeCombineGetWorkspaceSize(
    const aclTensor* expandX, const aclTensor* expertIds, const aclTensor* expandIdx,
    const aclTensor* epSendCounts, const aclTensor* expertScales, const aclTensor* tpSendCountsOptional,
    const aclTensor* xActiveMaskOptional, const aclTensor* expandScalesOptional,
    const aclTensor* sharedExpertXOptional, const char* groupEp, int64_t epWorldSize, int64_t epRankId,
    int64_t moeExpertNum, const char* groupTp, int64_t tpWorldSize, int64_t tpRankId, int64_t expertShardType,
    int64_t sharedExpertNum, int64_t sharedExpertRankNum, int64_t globalBs, int64_t outDtype,
    int64_t commQuantMode, int64_t groupListType, const char* commAlg, int64_t zeroExpertNum,
    int64_t copyExpertNum, int64_t constExpertNum, int64_t contract, int64_t windowMib, int64_t timeoutUs,
    const aclTensor* xOut, const aclTensor* errorRecordOut, uint64_t* workspaceSize,
    aclOpExecutor** executor) {
    ASCEND_MOE_REQUIRE(expandX);
    ASCEND_MOE_REQUIRE(expertIds);
    ASCEND_MOE_REQUIRE(expandIdx);
    ASCEND_MOE_REQUIRE(epSendCounts);
    ASCEND_MOE_REQUIRE(expertScales);
    ASCEND_MOE_REQUIRE(groupEp);
    ASCEND_MOE_REQUIRE(xOut);
    ASCEND_MOE_REQUIRE(errorRecordOut);
    ASCEND_MOE_REQUIRE(workspaceSize);
    ASCEND_MOE_REQUIRE(executor);
    return aclnnInnerAscendMoeDistributeCombineGetWorkspaceSize(
        expandX, expertIds, expandIdx, epSendCounts, expertScales, tpSendCountsOptional, xActiveMaskOptional,
        expandScalesOptional, sharedExpertXOptional, groupEp, epWorldSize, epRankId, moeExpertNum,
        ascend_moe_aclnn::TextOf(groupTp), tpWorldSize, tpRankId, expertShardType, sharedExpertNum,
        sharedExpertRankNum, globalBs, outDtype, commQuantMode, groupListType,
        ascend_moe_aclnn::TextOf(commAlg), zeroExpertNum, copyExpertNum, constExpertNum, contract, windowMib,
        timeoutUs, xOut, errorRecordOut, workspaceSize, executor);
}

aclnnStatus aclnnAscendMoeDistributeCombine(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                            aclrtStream stream) {
    ASCEND_MOE_REQUIRE(executor);
    ascend_moe_aclnn::SetServerType(executor);
    return aclnnInnerAscendMoeDistributeCombine(workspace, workspaceSize, executor, stream);
}
