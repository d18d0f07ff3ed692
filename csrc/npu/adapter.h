// Calls aclnn entries through torch_npu, with errors that say what is missing.
#pragma once

#include <ATen/core/Tensor.h>
#include <acl/acl_rt.h>

#include <stdexcept>
#include <string>
#include <tuple>

#include "op_plugin/utils/op_api_common.h"
#include "torch_npu/csrc/aten/common/from_blob.h"

namespace ascend_moe_npu {

struct NoOperator : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct Refused : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// torch_npu looks symbols up in libcust_opapi.so of the installed vendors, then in libopapi.so.
inline void RequireSymbol(const char* name) {
    if (GetOpApiFuncAddr(name) != nullptr) return;
    throw NoOperator(std::string(name) +
                     " is not among the operators of this CANN installation: install the ascend_moe opp package "
                     "(build.sh, then its .run file) and source its set_env.bash, so that ASCEND_CUSTOM_OPP_PATH "
                     "names the vendor");
}

// CANN's last error on this thread in one line; it may be a page.
inline std::string RecentError() {
    constexpr size_t kErrorText = 600;
    const char* text = aclGetRecentErrMsg();
    std::string line;
    for (; text != nullptr && *text != '\0' && line.size() < kErrorText; ++text) {
        if (*text != '\n' && *text != '\r') {
            line += *text;
        } else if (!line.empty() && line.back() != ' ') {
            line += ' ';
        }
    }
    return line.empty() ? "CANN gives no reason, its log may (ASCEND_SLOG_PRINT_TO_STDOUT=1)" : line;
}

// EXEC_NPU_CMD_EXT drops the status of an operator's first phase, in which tiling may refuse the call; `values` are
// then nobody's but ours. It looks `call` up by name and finds this one, more special than torch_npu's.
template <typename... Parameters, typename... Values>
int call(int (*first_phase)(Parameters...), std::tuple<Values...> values) {
    const int status = std::apply(first_phase, values);
    if (status == 0) return status;
    ReleaseConvertTypes(values);  // the launch, which would do it, does not come
    UnInitExecCommonCtx();
    throw Refused("aclnnAscendMoe*GetWorkspaceSize failed with aclnn status " + std::to_string(status) + ": " +
                  RecentError());
}

// EXEC_NPU_CMD_EXT asks for its two addresses in every call, and each question resolves the vendor's path anew.
// It keeps them between calls, so once is enough. It finds this function first, as it finds `call`.
inline void GetApiFunc(const char* launch, const char* first_phase, void*& launch_address, void*& first_address) {
    if (launch_address == nullptr || first_address == nullptr)
        ::GetApiFunc(launch, first_phase, launch_address, first_address);
}

// Once a process: what is not there when it is looked for first does not come later.
#define AM_REQUIRE(aclnn)                             \
    do {                                              \
        static const bool found = [] {                \
            RequireSymbol(#aclnn);                    \
            RequireSymbol(#aclnn "GetWorkspaceSize"); \
            return true;                              \
        }();                                          \
        (void)found;                                  \
    } while (false)

}  // namespace ascend_moe_npu
