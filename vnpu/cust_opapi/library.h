// libascend_moe.so, the twin with our kernels, opened where this process's Python finds it.
#pragma once

#include <string>

#include "abi/ascend_moe.h"

namespace vnpu_moe {

// clang-format off
#define VNPU_MOE_FUNCTIONS(X)                                                                    \
    X(am_comm_create) X(am_comm_destroy) X(am_comm_use_context) X(am_comm_use_servers)           \
    X(am_spec_bytes) X(am_plan_create) X(am_plan_destroy) X(am_plan_tiling) X(am_run) X(am_probe)
// clang-format on

struct Library {
#define VNPU_MOE_FUNCTION(name) decltype(&::name) name = nullptr;
    VNPU_MOE_FUNCTIONS(VNPU_MOE_FUNCTION)
#undef VNPU_MOE_FUNCTION
    std::string path;
    std::string error;  // one line; empty when everything above is there
};

const Library& TheLibrary();

}  // namespace vnpu_moe
