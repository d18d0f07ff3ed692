// One op of one rank, ready to run: the kernel with its arguments, and the GM ranges that it may touch.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>

#include "communicator.h"
#include "rules/op_tables.h"
#include "rules/plan.h"
#include "twin/api/qualifiers.h"
#include "twin/engine/engine.h"
#include "twin/engine/launch.h"

namespace ops {

// A checked call with its tiling, which the C ABI hands out as a plan.
struct Plan {
    moe::CallSpec spec;
    moe::CallPlan call;

    bool dispatch() const { return call.op == moe::kOpDispatch; }
    // Of a launch that runs this op for several ranks (ascend_moe_one_card).
    uint64_t card_key() const { return call.tilingKey + (dispatch() ? 0 : moe::kCardCombineKeys); }
    const moe::MoeDistributeInfo& info() const { return dispatch() ? call.dispatch.info : call.combine.info; }
    const void* tiling() const { return dispatch() ? static_cast<const void*>(&call.dispatch) : &call.combine; }
    uint64_t tiling_bytes() const { return dispatch() ? sizeof(call.dispatch) : sizeof(call.combine); }
};

constexpr size_t kMostArguments = std::max<size_t>(moe::DispatchArgument::kCount, moe::CombineArgument::kCount);

// Adds memory that is no tensor and no window to what a launch may touch; returns its address for the kernel.
inline GM_ADDR AddMemory(twin::LaunchSpec& spec, const void* begin, uint64_t bytes, const char* name) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(begin);
    spec.ranges.push_back({address, address + bytes, twin::GmKind::kWorkspace, false, nullptr, name});
    return twin::GmOf(static_cast<uint8_t*>(const_cast<void*>(begin)));
}

class OpLaunch {
public:
    // The pointers must stay valid until Finish. A direct combine of rows in the registered area publishes their block
    // in place, if `registered` allows it.
    OpLaunch(Communicator& comm, const Plan& plan, const void* const* inputs, void* const* outputs, int32_t* record);

    const RegisteredArea::State& registered() const { return registered_; }
    twin::LaunchSpec& spec() { return spec_; }
    const std::function<void()>& kernel() const { return kernel_; }
    const Plan& plan() const { return plan_; }
    // By moe::DispatchArgument or CombineArgument.
    const std::array<GM_ADDR, kMostArguments>& arguments() const { return arguments_; }
    // To call after the kernel: zeroes the ends of outputs that no kernel writes, unless it has only sent.
    void Finish();
    // To call right before the kernel, after all earlier ops: takes the epoch that the kernel will use.
    void Begin() {
        epoch_ = comm_.EpochOfLaunch(plan_.info().part);
        // On an NPU each launch has another workspace.
        if (twin::kChecked) memset(scratch_, 0xA5, scratch_bytes_);
        comm_.BeginLaunch(plan_.call.op, plan_.info().algorithm, epoch_);
    }
    // After the kernel, however it ended.
    void End(bool failed) { comm_.EndLaunch(failed); }

private:
    GM_ADDR Add(const void* begin, uint64_t bytes, twin::GmKind kind, const char* name, bool rows = false);
    bool Registered(uintptr_t begin) const;
    const void* CombineTiling();
    void Prepare();
    const char* WindowRule(uintptr_t begin, uint64_t bytes, bool write) const;
    void ZeroUndefined(uint32_t index, const moe::OutputDesc* shapes, uint64_t defined);

    Communicator& comm_;
    const Plan& plan_;
    const void* const* inputs_;
    void* const* outputs_;
    twin::LaunchSpec spec_;
    std::function<void()> kernel_;
    std::array<GM_ADDR, kMostArguments> arguments_ = {};
    GM_ADDR workspace_ = nullptr;
    uint8_t* scratch_ = nullptr;  // the workspace, as the host sees it
    uint64_t scratch_bytes_ = 0;
    GM_ADDR record_ = nullptr;
    uint32_t epoch_ = 0;
    RegisteredArea::State registered_ = {};
    moe::MoeDistributeCombineTiling tiling_;  // of a combine that publishes a registered block
};

}  // namespace ops
