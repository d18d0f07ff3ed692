// aclnn entry points of AscendMoeDistributeDispatch: arguments in the order of the op definition; inputs that
// end in Optional may be null, groupTp and commAlg are "" where unused. Element types and shapes as
// npu_moe_distribute_dispatch{,_v2} (contract 1, 2) has them; errorRecord is int32[64]. windowMib 0:
// HCCL_BUFFSIZE; timeoutUs 0: the default deadline. Tensors may
// be empty (a rank without tokens), not null.
#ifndef ACLNN_ASCEND_MOE_DISTRIBUTE_DISPATCH_H
#define ACLNN_ASCEND_MOE_DISTRIBUTE_DISPATCH_H

#include "ascend_moe_aclnn_types.h"

// Phase one: checks and tiles the call. 161001 for a null argument, 561002 when tiling refuses it (the log
// says why); the executor is for one launch.
ASCEND_MOE_ACLNN_API aclnnStatus aclnnAscendMoeDistributeDispatchGetWorkspaceSize(
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

// Phase two: launches on the stream.
ASCEND_MOE_ACLNN_API aclnnStatus aclnnAscendMoeDistributeDispatch(void* workspace, uint64_t workspaceSize,
                                                                  aclOpExecutor* executor,
                                                                  aclrtStream stream);

#endif  // ACLNN_ASCEND_MOE_DISTRIBUTE_DISPATCH_H
