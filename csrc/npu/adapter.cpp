// The last step of our ops on an NPU: hands tensors and attributes to aclnnAscendMoe*, through
// torch_npu's task queue. Arguments are checked and outputs allocated by the caller
// (ascend_moe/npu_launch.py).
#include "adapter.h"

#include <acl/acl_rt.h>
#include <c10/core/DeviceGuard.h>

#include <tuple>

#include "op_plugin/utils/op_api_common.h"

namespace ascend_moe_npu {

namespace {

constexpr size_t kErrorText = 600;

// torch_npu looks symbols up in libcust_opapi.so of the installed vendors, then in libopapi.so.
void RequireSymbol(const char* name) {
    TORCH_CHECK(GetOpApiFuncAddr(name) != nullptr, name,
                " is not among the operators of this CANN installation: install the ascend_moe opp package "
                "(build.sh, then its .run file) and source its set_env.bash, so that ASCEND_CUSTOM_OPP_PATH "
                "names the vendor");
}

// CANN's last error on this thread in one line; it may be a page.
std::string RecentError() {
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

// EXEC_NPU_CMD_EXT drops the status of an operator's first phase, in which tiling may refuse the call. It
// looks `call` up by name and finds this one, more special than torch_npu's.
template <typename... Parameters, typename... Values>
int call(int (*first_phase)(Parameters...), std::tuple<Values...> values) {
    const int status = std::apply(first_phase, values);
    if (status != 0) UnInitExecCommonCtx();
    TORCH_CHECK(status == 0, "aclnnAscendMoe*GetWorkspaceSize failed with aclnn status ", status, ": ",
                RecentError());
    return status;
}

#define AM_REQUIRE(aclnn)                         \
    do {                                          \
        RequireSymbol(#aclnn);                    \
        RequireSymbol(#aclnn "GetWorkspaceSize"); \
    } while (false)

}  // namespace

void Dispatch(AM_DISPATCH_ARGUMENTS) {
    const c10::OptionalDeviceGuard guard(x.device());  // the stream is that of the current device
    AM_REQUIRE(aclnnAscendMoeDistributeDispatch);
    // The aclnn entries take char*; a view need not end in NUL.
    std::string groupEp(group_ep), groupTp(group_tp), commAlg(comm_alg);
    char *group_ep_text = groupEp.data(), *group_tp_text = groupTp.data(), *comm_alg_text = commAlg.data();
    EXEC_NPU_CMD_EXT(aclnnAscendMoeDistributeDispatch, x, expert_ids, scales, x_active_mask, expert_scales,
                     group_ep_text, ep_world_size, ep_rank_id, moe_expert_num, group_tp_text, tp_world_size,
                     tp_rank_id, expert_shard_type, shared_expert_num, shared_expert_rank_num, quant_mode,
                     global_bs, expert_token_nums_type, comm_alg_text, zero_expert_num, copy_expert_num,
                     const_expert_num, contract, window_mib, timeout_us, expand_x, dynamic_scales, expand_idx,
                     expert_token_nums, ep_recv_counts, tp_recv_counts, expand_scales, error_record);
}

void Combine(AM_COMBINE_ARGUMENTS) {
    const c10::OptionalDeviceGuard guard(expand_x.device());
    AM_REQUIRE(aclnnAscendMoeDistributeCombine);
    std::string groupEp(group_ep), groupTp(group_tp), commAlg(comm_alg);
    char *group_ep_text = groupEp.data(), *group_tp_text = groupTp.data(), *comm_alg_text = commAlg.data();
    EXEC_NPU_CMD_EXT(aclnnAscendMoeDistributeCombine, expand_x, expert_ids, expand_idx, ep_send_counts,
                     expert_scales, tp_send_counts, x_active_mask, expand_scales, shared_expert_x,
                     group_ep_text, ep_world_size, ep_rank_id, moe_expert_num, group_tp_text, tp_world_size,
                     tp_rank_id, expert_shard_type, shared_expert_num, shared_expert_rank_num, global_bs,
                     out_dtype, comm_quant_mode, group_list_type, comm_alg_text, zero_expert_num,
                     copy_expert_num, const_expert_num, contract, window_mib, timeout_us, x, error_record);
}

void Probe(AM_PROBE_ARGUMENTS) {
    const c10::OptionalDeviceGuard guard(report.device());
    AM_REQUIRE(aclnnAscendMoeProbe);
    std::string groupEp(group_ep);
    char* group_ep_text = groupEp.data();
    EXEC_NPU_CMD_EXT(aclnnAscendMoeProbe, group_ep_text, ep_world_size, ep_rank_id, mode, nonce, rounds,
                     cycles, broken, window_mib, timeout_us, report);
}

}  // namespace ascend_moe_npu
