// A plan together with the call it was made for.
#pragma once

#include "rules/plan.h"

namespace ops {

struct Plan {
    moe::CallSpec spec;
    moe::CallPlan call;

    bool dispatch() const { return call.op == moe::kOpDispatch; }
    const moe::MoeDistributeInfo& info() const { return dispatch() ? call.dispatch.info : call.combine.info; }
    const void* tiling() const {
        return dispatch() ? static_cast<const void*>(&call.dispatch) : &call.combine;
    }
    uint64_t tiling_bytes() const { return dispatch() ? sizeof(call.dispatch) : sizeof(call.combine); }
};

}  // namespace ops
