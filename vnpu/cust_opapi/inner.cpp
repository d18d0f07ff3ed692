// aclnnInnerAscendMoe*: what CANN's build generates from the operators' definition.
#include <utility>

#include "cust_opapi.h"

namespace vnpu_moe {
bool ReadTensor(const aclTensor* tensor, Tensor& out);
}

struct aclOpExecutor {
    std::shared_ptr<vnpu_moe::Call> call;
};

namespace {

using vnpu_moe::Arguments;
using vnpu_moe::Tensor;

// An argument as it is passed: a tensor, a number or a text.
struct Value {
    Value(const aclTensor* tensor) : tensor(tensor) {}
    Value(int64_t number) : number(number) {}
    Value(const char* text) : text(text != nullptr ? text : "") {}
    const aclTensor* tensor = nullptr;
    int64_t number = 0;
    std::string text;
};

// `all` has inputs, attributes and outputs in the order of the definition.
template <typename... All>
int Capture(uint32_t op, uint64_t* workspace, aclOpExecutor** executor, All... all) {
    if (workspace == nullptr || executor == nullptr) return vnpu_moe::kNullArgument;
    Arguments arguments;
    arguments.op = op;
    const moe::OpInterface known = arguments.interface();
    const Value values[] = {all...};
    for (const Value& value : values) {
        const size_t at = static_cast<size_t>(&value - values);
        if (at >= known.inputs.size && at < known.inputs.size + known.attributes.size) {
            arguments.integers.push_back(value.number);
            arguments.strings.push_back(value.text);
            continue;
        }
        std::vector<Tensor>& tensors = at < known.inputs.size ? arguments.inputs : arguments.outputs;
        tensors.emplace_back();
        if (!vnpu_moe::ReadTensor(value.tensor, tensors.back())) return vnpu_moe::kBadArgument;
    }
    std::shared_ptr<vnpu_moe::Call> call;
    const int status = vnpu_moe::Prepare(std::move(arguments), call, *workspace);
    if (status == vnpu_moe::kOk) *executor = new aclOpExecutor{std::move(call)};
    return status;
}

// As in CANN, an executor serves one launch.
int Run(aclOpExecutor* executor, void* stream) {
    if (executor == nullptr) return vnpu_moe::kNullArgument;
    const std::unique_ptr<aclOpExecutor> owned(executor);
    return vnpu_moe::Enqueue(owned->call, stream);
}

}  // namespace

VNPU_EXPORT int aclnnInnerAscendMoeDistributeDispatchGetWorkspaceSize(
    const aclTensor* x, const aclTensor* expertIds, const aclTensor* scales, const aclTensor* activeMask,
    const aclTensor* expertScales, const char* groupEp, int64_t epWorldSize, int64_t epRankId,
    int64_t moeExpertNum, const char* groupTp, int64_t tpWorldSize, int64_t tpRankId, int64_t expertShardType,
    int64_t sharedExpertNum, int64_t sharedExpertRankNum, int64_t quantMode, int64_t globalBs,
    int64_t expertTokenNumsType, const char* commAlg, int64_t zeroExpertNum, int64_t copyExpertNum,
    int64_t constExpertNum, int64_t contract, int64_t windowMib, int64_t timeoutUs, const aclTensor* expandX,
    const aclTensor* dynamicScales, const aclTensor* expandIdx, const aclTensor* expertTokenNums,
    const aclTensor* epRecvCounts, const aclTensor* tpRecvCounts, const aclTensor* expandScales,
    const aclTensor* errorRecord, uint64_t* workspaceSize, aclOpExecutor** executor) {
    return Capture(moe::kOpDispatch, workspaceSize, executor, x, expertIds, scales, activeMask, expertScales,
                   groupEp, epWorldSize, epRankId, moeExpertNum, groupTp, tpWorldSize, tpRankId,
                   expertShardType, sharedExpertNum, sharedExpertRankNum, quantMode, globalBs,
                   expertTokenNumsType, commAlg, zeroExpertNum, copyExpertNum, constExpertNum, contract,
                   windowMib, timeoutUs, expandX, dynamicScales, expandIdx, expertTokenNums, epRecvCounts,
                   tpRecvCounts, expandScales, errorRecord);
}

VNPU_EXPORT int aclnnInnerAscendMoeDistributeCombineGetWorkspaceSize(
    const aclTensor* expandX, const aclTensor* expertIds, const aclTensor* expandIdx,
    const aclTensor* epSendCounts, const aclTensor* expertScales, const aclTensor* tpSendCounts,
    const aclTensor* activeMask, const aclTensor* expandScales, const aclTensor* sharedExpertX,
    const char* groupEp, int64_t epWorldSize, int64_t epRankId, int64_t moeExpertNum, const char* groupTp,
    int64_t tpWorldSize, int64_t tpRankId, int64_t expertShardType, int64_t sharedExpertNum,
    int64_t sharedExpertRankNum, int64_t globalBs, int64_t outDtype, int64_t commQuantMode,
    int64_t groupListType, const char* commAlg, int64_t zeroExpertNum, int64_t copyExpertNum,
    int64_t constExpertNum, int64_t contract, int64_t windowMib, int64_t timeoutUs, const aclTensor* x,
    const aclTensor* errorRecord, uint64_t* workspaceSize, aclOpExecutor** executor) {
    return Capture(moe::kOpCombine, workspaceSize, executor, expandX, expertIds, expandIdx, epSendCounts,
                   expertScales, tpSendCounts, activeMask, expandScales, sharedExpertX, groupEp, epWorldSize,
                   epRankId, moeExpertNum, groupTp, tpWorldSize, tpRankId, expertShardType, sharedExpertNum,
                   sharedExpertRankNum, globalBs, outDtype, commQuantMode, groupListType, commAlg,
                   zeroExpertNum, copyExpertNum, constExpertNum, contract, windowMib, timeoutUs, x,
                   errorRecord);
}

VNPU_EXPORT int aclnnInnerAscendMoeProbeGetWorkspaceSize(const char* groupEp, int64_t epWorldSize,
                                                         int64_t epRankId, int64_t mode, int64_t nonce,
                                                         int64_t rounds, int64_t cycles, int64_t windowMib,
                                                         int64_t timeoutUs, const aclTensor* report,
                                                         uint64_t* workspaceSize, aclOpExecutor** executor) {
    return Capture(moe::kOpProbe, workspaceSize, executor, groupEp, epWorldSize, epRankId, mode, nonce,
                   rounds, cycles, windowMib, timeoutUs, report);
}

VNPU_EXPORT int aclnnInnerAscendMoeDistributeDispatch(void*, uint64_t, aclOpExecutor* executor,
                                                      void* stream) {
    return Run(executor, stream);
}
VNPU_EXPORT int aclnnInnerAscendMoeDistributeCombine(void*, uint64_t, aclOpExecutor* executor, void* stream) {
    return Run(executor, stream);
}

VNPU_EXPORT int aclnnInnerAscendMoeProbe(void*, uint64_t, aclOpExecutor* executor, void* stream) {
    return Run(executor, stream);
}

// In CANN's libnnopbase.so: who runs the communicator's tasks.
VNPU_EXPORT void NnopbaseSetHcclServerType(void*, int32_t type) { vnpu_moe::SetServerType(type); }
