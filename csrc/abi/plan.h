// A checked call with its tiling, which the C ABI hands out as a plan.
#pragma once

#include <cstdint>
#include <string>

#include "rules/plan.h"

namespace ops {

struct Plan {
    moe::CallSpec spec;
    moe::CallPlan call;

    bool dispatch() const { return call.op == moe::kOpDispatch; }
    const moe::MoeDistributeInfo& info() const { return dispatch() ? call.dispatch.info : call.combine.info; }
    const void* tiling() const { return dispatch() ? static_cast<const void*>(&call.dispatch) : &call.combine; }
    uint64_t tiling_bytes() const { return dispatch() ? sizeof(call.dispatch) : sizeof(call.combine); }
};

// Copies a text, as much as fits. Returns the bytes that all of it takes.
uint64_t GiveText(const std::string& from, char* to, uint64_t bytes);

}  // namespace ops
