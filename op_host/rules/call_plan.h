// The plan of a checked call: sizes of the launch, and the tiling that the kernels read.
#pragma once

#include "args.h"
#include "protocol/tiling.h"

namespace moe {

constexpr uint32_t kUbBytes = 196352;  // of a core: what CANN grants of 192 KiB, if unknown

struct CallPlan {
    uint32_t op;
    uint32_t tilingKey;
    uint32_t blockDim;
    uint32_t xType;
    uint64_t workspaceBytes;
    uint64_t windowBytes;  // of a region (dispatch, V1) or a ping-pong buffer (combine, V2) that this call may fill
    MoeDistributeDispatchTiling dispatch;
    MoeDistributeCombineTiling combine;

    const MoeDistributeInfo& info() const { return op == kOpDispatch ? dispatch.info : combine.info; }
};

// A row in a window, with its trailer.
inline uint32_t RowBytesWithTrailer(const MoeDistributeInfo& info) {
    return DispatchRowStride(info.hidden, TypeSize(info.wireType), info.quantMode != 0, TrailerBlocks(info));
}

// The steps of a launch that have their own UB: a kernel frees its UB between them.
enum class Step : uint32_t {
    kSend,
    kStatus,
    kCopy,
    kSum,
    kPublish,
    kLists,
    kGather,
    kReturn,
    kForward,
    kServerSum,
    kWaitSums
};
constexpr Step kWindowDispatchSteps[] = {Step::kSend, Step::kStatus, Step::kCopy},
               kWindowCombineSteps[] = {Step::kSend, Step::kSum},
               kDirectDispatchSteps[] = {Step::kPublish, Step::kLists, Step::kGather},
               kDirectCombineSteps[] = {Step::kReturn},
               kHierarchyDispatchSteps[] = {Step::kSend, Step::kStatus, Step::kForward, Step::kCopy},
               kHierarchyCombineSteps[] = {Step::kSend, Step::kServerSum, Step::kWaitSums, Step::kSum};
inline const char* StepName(Step step) {
    static constexpr const char* kNames[] = {"send",   "status", "copy",    "sum",        "publish",  "lists",
                                             "gather", "return", "forward", "server sum", "wait sums"};
    return kNames[static_cast<uint32_t>(step)];
}

struct StepList {
    const Step* first;
    const Step* last;
    const Step* begin() const { return first; }
    const Step* end() const { return last; }
};
template <size_t n>
constexpr StepList ListOf(const Step (&steps)[n]) {
    return {steps, steps + n};
}
// The steps of a plan, in order.
inline StepList StepsOf(const CallPlan& plan) {
    const bool direct = plan.info().algorithm == kAlgorithmDirect;
    if (plan.info().algorithm == kAlgorithmHierarchy)
        return plan.op == kOpDispatch ? ListOf(kHierarchyDispatchSteps) : ListOf(kHierarchyCombineSteps);
    if (plan.op == kOpDispatch) return direct ? ListOf(kDirectDispatchSteps) : ListOf(kWindowDispatchSteps);
    return direct ? ListOf(kDirectCombineSteps) : ListOf(kWindowCombineSteps);
}

}  // namespace moe
