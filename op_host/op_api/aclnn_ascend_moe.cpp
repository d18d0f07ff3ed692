// Hand-written around the entry points that CANN generates from the op definition with the prefix aclnnInner:
// those know nothing of the HCCL server type.
#include "aclnn_ascend_moe.h"

#include <cstdio>
#include <cstring>
#include <initializer_list>

extern "C" decltype(aclnnAscendMoeDistributeDispatchGetWorkspaceSize)
    aclnnInnerAscendMoeDistributeDispatchGetWorkspaceSize;
extern "C" decltype(aclnnAscendMoeDistributeDispatch) aclnnInnerAscendMoeDistributeDispatch;
extern "C" decltype(aclnnAscendMoeDistributeCombineGetWorkspaceSize)
    aclnnInnerAscendMoeDistributeCombineGetWorkspaceSize;
extern "C" decltype(aclnnAscendMoeDistributeCombine) aclnnInnerAscendMoeDistributeCombine;
extern "C" decltype(aclnnAscendMoeProbeGetWorkspaceSize) aclnnInnerAscendMoeProbeGetWorkspaceSize;
extern "C" decltype(aclnnAscendMoeProbe) aclnnInnerAscendMoeProbe;

// CANN's op base and runtime, without headers: the first has none that is public. Weak, so that an op base
// that lacks the function still loads the package (and then takes its default, the AICPU).
enum NnopbaseHcclServerType {
    NNOPBASE_HCCL_SERVER_TYPE_AICPU = 0,
    NNOPBASE_HCCL_SERVER_TYPE_MTE,
    NNOPBASE_HCCL_SERVER_TYPE_END
};
extern "C" __attribute__((weak)) void NnopbaseSetHcclServerType(void* executor, NnopbaseHcclServerType type);
extern "C" __attribute__((weak)) const char* aclrtGetSocName();

namespace {

constexpr aclnnStatus kNullArgument = 161001;

// Tells the first of the arguments that is null by its name; `names` are separated by ", ".
bool AnyNull(const char* function, const char* names, std::initializer_list<const void*> arguments) {
    for (const void* argument : arguments) {
        const int length = static_cast<int>(strcspn(names, ","));
        if (argument == nullptr)
            return fprintf(stderr, "%s: %.*s is null, it is required\n", function, length, names), true;
        names += length + 2;
    }
    return false;
}

const char* TextOf(const char* text) { return text == nullptr ? "" : text; }

// A3's kernels store into their peers' windows themselves (MTE). On A2 the AICPU carries what goes to other
// servers (BatchWrite).
void SetServerType(aclOpExecutor* executor) {
    if (NnopbaseSetHcclServerType == nullptr) return;
    const char* soc = aclrtGetSocName == nullptr ? nullptr : aclrtGetSocName();
    const bool isA2 = soc != nullptr && strncmp(soc, "Ascend910B", 10) == 0;
    NnopbaseSetHcclServerType(executor, isA2 ? NNOPBASE_HCCL_SERVER_TYPE_AICPU : NNOPBASE_HCCL_SERVER_TYPE_MTE);
}

}  // namespace

#define ASCEND_MOE_REQUIRE(...) \
    if (AnyNull(__func__, #__VA_ARGS__, {__VA_ARGS__})) return kNullArgument

aclnnStatus aclnnAscendMoeDistributeDispatchGetWorkspaceSize(
    const aclTensor* x, const aclTensor* expertIds, const aclTensor* scalesOptional,
    const aclTensor* xActiveMaskOptional, const aclTensor* expertScalesOptional, const char* groupEp,
    int64_t epWorldSize, int64_t epRankId, int64_t moeExpertNum, const char* groupTp, int64_t tpWorldSize,
    int64_t tpRankId, int64_t expertShardType, int64_t sharedExpertNum, int64_t sharedExpertRankNum, int64_t quantMode,
    int64_t globalBs, int64_t expertTokenNumsType, const char* commAlg, int64_t zeroExpertNum, int64_t copyExpertNum,
    int64_t constExpertNum, int64_t contract, int64_t windowMib, int64_t timeoutUs, int64_t part,
    int64_t ranksPerServer, const aclTensor* expandXOut, const aclTensor* dynamicScalesOut,
    const aclTensor* expandIdxOut, const aclTensor* expertTokenNumsOut, const aclTensor* epRecvCountsOut,
    const aclTensor* tpRecvCountsOut, const aclTensor* expandScalesOut, const aclTensor* errorRecordOut,
    uint64_t* workspaceSize, aclOpExecutor** executor) {
    ASCEND_MOE_REQUIRE(x, expertIds, groupEp, expandXOut, dynamicScalesOut, expandIdxOut, expertTokenNumsOut,
                       epRecvCountsOut, tpRecvCountsOut, expandScalesOut, errorRecordOut, workspaceSize, executor);
    return aclnnInnerAscendMoeDistributeDispatchGetWorkspaceSize(
        x, expertIds, scalesOptional, xActiveMaskOptional, expertScalesOptional, groupEp, epWorldSize, epRankId,
        moeExpertNum, TextOf(groupTp), tpWorldSize, tpRankId, expertShardType, sharedExpertNum, sharedExpertRankNum,
        quantMode, globalBs, expertTokenNumsType, TextOf(commAlg), zeroExpertNum, copyExpertNum, constExpertNum,
        contract, windowMib, timeoutUs, part, ranksPerServer, expandXOut, dynamicScalesOut, expandIdxOut,
        expertTokenNumsOut, epRecvCountsOut, tpRecvCountsOut, expandScalesOut, errorRecordOut, workspaceSize, executor);
}

aclnnStatus aclnnAscendMoeDistributeCombineGetWorkspaceSize(
    const aclTensor* expandX, const aclTensor* expertIds, const aclTensor* expandIdx, const aclTensor* epSendCounts,
    const aclTensor* expertScales, const aclTensor* tpSendCountsOptional, const aclTensor* xActiveMaskOptional,
    const aclTensor* expandScalesOptional, const aclTensor* sharedExpertXOptional, const char* groupEp,
    int64_t epWorldSize, int64_t epRankId, int64_t moeExpertNum, const char* groupTp, int64_t tpWorldSize,
    int64_t tpRankId, int64_t expertShardType, int64_t sharedExpertNum, int64_t sharedExpertRankNum, int64_t globalBs,
    int64_t outDtype, int64_t commQuantMode, int64_t groupListType, const char* commAlg, int64_t zeroExpertNum,
    int64_t copyExpertNum, int64_t constExpertNum, int64_t contract, int64_t windowMib, int64_t timeoutUs, int64_t part,
    int64_t ranksPerServer, const aclTensor* xOut, const aclTensor* errorRecordOut, uint64_t* workspaceSize,
    aclOpExecutor** executor) {
    ASCEND_MOE_REQUIRE(expandX, expertIds, expandIdx, epSendCounts, expertScales, groupEp, xOut, errorRecordOut,
                       workspaceSize, executor);
    return aclnnInnerAscendMoeDistributeCombineGetWorkspaceSize(
        expandX, expertIds, expandIdx, epSendCounts, expertScales, tpSendCountsOptional, xActiveMaskOptional,
        expandScalesOptional, sharedExpertXOptional, groupEp, epWorldSize, epRankId, moeExpertNum, TextOf(groupTp),
        tpWorldSize, tpRankId, expertShardType, sharedExpertNum, sharedExpertRankNum, globalBs, outDtype, commQuantMode,
        groupListType, TextOf(commAlg), zeroExpertNum, copyExpertNum, constExpertNum, contract, windowMib, timeoutUs,
        part, ranksPerServer, xOut, errorRecordOut, workspaceSize, executor);
}

aclnnStatus aclnnAscendMoeProbeGetWorkspaceSize(const char* groupEp, int64_t epWorldSize, int64_t epRankId,
                                                int64_t mode, int64_t nonce, int64_t rounds, int64_t cycles,
                                                int64_t windowMib, int64_t timeoutUs, int64_t ranksPerServer,
                                                const aclTensor* reportOut, uint64_t* workspaceSize,
                                                aclOpExecutor** executor) {
    ASCEND_MOE_REQUIRE(groupEp, reportOut, workspaceSize, executor);
    return aclnnInnerAscendMoeProbeGetWorkspaceSize(groupEp, epWorldSize, epRankId, mode, nonce, rounds, cycles,
                                                    windowMib, timeoutUs, ranksPerServer, reportOut, workspaceSize,
                                                    executor);
}

#define ASCEND_MOE_LAUNCH(name)                                                                                     \
    aclnnStatus aclnn##name(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream) { \
        ASCEND_MOE_REQUIRE(executor);                                                                               \
        SetServerType(executor);                                                                                    \
        return aclnnInner##name(workspace, workspaceSize, executor, stream);                                        \
    }
ASCEND_MOE_LAUNCH(AscendMoeDistributeDispatch)
ASCEND_MOE_LAUNCH(AscendMoeDistributeCombine)
ASCEND_MOE_LAUNCH(AscendMoeProbe)
