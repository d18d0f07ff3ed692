// A plan together with the call it was made for.
#pragma once

#include "moe_distribute_plan.h"

namespace ops {

struct Plan {
    moe::CallSpec spec;
    moe::CallPlan call;
};

}  // namespace ops
