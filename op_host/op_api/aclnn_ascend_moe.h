// The aclnn entry points of our operators, two a operator: the first checks and tiles the call, the second
// launches it on the stream. The first returns 161001 for a null argument and 561002 when tiling refuses the
// call (the log says why). An executor is for one launch.
//
// Arguments stand in the order of the op definition. Inputs that end in Optional may be null; other tensors
// may be empty (a rank without tokens), not null. groupTp and commAlg are "" where unused. windowMib 0:
// HCCL_BUFFSIZE; timeoutUs 0: the default deadline. part 0: the op; 1: the launch that sends; 2: the
// launch that waits, with the same arguments. ranksPerServer: how many ranks of groupEp share each server, alike on
// all ranks and consecutive; on an Ascend910B it has no default, on other SoCs it is not read.
#pragma once

#include <cstdint>

// The opaque types are CANN's where its headers are, else declarations of our own, so that the entry points
// also build for the virtual NPU.
#if defined(__has_include)
#if __has_include("aclnn/acl_meta.h")
#define ASCEND_MOE_HAS_ACLNN 1
#endif
#endif

#ifdef ASCEND_MOE_HAS_ACLNN
#include "aclnn/acl_meta.h"
#else
struct aclTensor;
struct aclOpExecutor;
typedef int32_t aclnnStatus;
typedef void* aclrtStream;
#endif

#define ASCEND_MOE_ACLNN_API extern "C" __attribute__((visibility("default")))

// Element types and shapes of dispatch and combine are those of npu_moe_distribute_{dispatch,combine}{,_v2}
// (contract 1, 2); errorRecord is int32[64].
ASCEND_MOE_ACLNN_API aclnnStatus aclnnAscendMoeDistributeDispatchGetWorkspaceSize(
    const aclTensor* x, const aclTensor* expertIds, const aclTensor* scalesOptional,
    const aclTensor* xActiveMaskOptional, const aclTensor* expertScalesOptional, const char* groupEp,
    int64_t epWorldSize, int64_t epRankId, int64_t moeExpertNum, const char* groupTp, int64_t tpWorldSize,
    int64_t tpRankId, int64_t expertShardType, int64_t sharedExpertNum, int64_t sharedExpertRankNum, int64_t quantMode,
    int64_t globalBs, int64_t expertTokenNumsType, const char* commAlg, int64_t zeroExpertNum, int64_t copyExpertNum,
    int64_t constExpertNum, int64_t contract, int64_t windowMib, int64_t timeoutUs, int64_t part,
    int64_t ranksPerServer, const aclTensor* expandXOut, const aclTensor* dynamicScalesOut,
    const aclTensor* expandIdxOut, const aclTensor* expertTokenNumsOut, const aclTensor* epRecvCountsOut,
    const aclTensor* tpRecvCountsOut, const aclTensor* expandScalesOut, const aclTensor* errorRecordOut,
    uint64_t* workspaceSize, aclOpExecutor** executor);
ASCEND_MOE_ACLNN_API aclnnStatus aclnnAscendMoeDistributeDispatch(void* workspace, uint64_t workspaceSize,
                                                                  aclOpExecutor* executor, aclrtStream stream);

ASCEND_MOE_ACLNN_API aclnnStatus aclnnAscendMoeDistributeCombineGetWorkspaceSize(
    const aclTensor* expandX, const aclTensor* expertIds, const aclTensor* expandIdx, const aclTensor* epSendCounts,
    const aclTensor* expertScales, const aclTensor* tpSendCountsOptional, const aclTensor* xActiveMaskOptional,
    const aclTensor* expandScalesOptional, const aclTensor* sharedExpertXOptional, const char* groupEp,
    int64_t epWorldSize, int64_t epRankId, int64_t moeExpertNum, const char* groupTp, int64_t tpWorldSize,
    int64_t tpRankId, int64_t expertShardType, int64_t sharedExpertNum, int64_t sharedExpertRankNum, int64_t globalBs,
    int64_t outDtype, int64_t commQuantMode, int64_t groupListType, const char* commAlg, int64_t zeroExpertNum,
    int64_t copyExpertNum, int64_t constExpertNum, int64_t contract, int64_t windowMib, int64_t timeoutUs, int64_t part,
    int64_t ranksPerServer, const aclTensor* xOut, const aclTensor* errorRecordOut, uint64_t* workspaceSize,
    aclOpExecutor** executor);
ASCEND_MOE_ACLNN_API aclnnStatus aclnnAscendMoeDistributeCombine(void* workspace, uint64_t workspaceSize,
                                                                 aclOpExecutor* executor, aclrtStream stream);

// The kernel of `ascend-moe validate --bringup`. A launch is collective: all ranks of groupEp, the same mode
// (ProbeMode) and nonce, which no earlier launch on the communicator had. report is int32[64, 8], a block a
// core. rounds: of the probes that repeat; cycles: to count, 0: waits take timeoutUs.
ASCEND_MOE_ACLNN_API aclnnStatus aclnnAscendMoeProbeGetWorkspaceSize(const char* groupEp, int64_t epWorldSize,
                                                                     int64_t epRankId, int64_t mode, int64_t nonce,
                                                                     int64_t rounds, int64_t cycles, int64_t windowMib,
                                                                     int64_t timeoutUs, int64_t ranksPerServer,
                                                                     const aclTensor* reportOut,
                                                                     uint64_t* workspaceSize, aclOpExecutor** executor);
ASCEND_MOE_ACLNN_API aclnnStatus aclnnAscendMoeProbe(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                                     aclrtStream stream);
