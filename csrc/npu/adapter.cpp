// The last step of our ops on an NPU: hands tensors and attributes to aclnnAscendMoe*, through torch_npu's
// task queue. Arguments are checked and outputs allocated by the caller (csrc/torch).
#include "adapter.h"

#include <c10/core/DeviceGuard.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include <cstring>

#include "launch.h"
#include "rules/args.h"

namespace ascend_moe_npu {

namespace {

// A launch as the macros of torch_npu want its parts.
class Parts {
public:
    explicit Parts(const AmNpuLaunch& launch)
        : launch_(launch),
          group_ep_(launch.group_ep),
          group_tp_(launch.group_tp),
          comm_alg_(launch.comm_alg) {}

    static const at::Tensor& Of(void* handle) {
        return *torch::aot_inductor::tensor_handle_to_tensor_pointer(static_cast<AtenTensorHandle>(handle));
    }
    const at::Tensor& input(moe::TensorIndex index) const { return Of(launch_.inputs[index]); }
    c10::optional<at::Tensor> optional(moe::TensorIndex index) const {
        return launch_.inputs[index] == nullptr ? c10::optional<at::Tensor>() : input(index);
    }
    const at::Tensor& output(int index) const { return Of(launch_.outputs[index]); }
    // 0 for those that one contract has and the other has not.
    int64_t attribute(moe::AttributeIndex index) const {
        return launch_.attributes[index] == moe::kNoValue ? 0 : launch_.attributes[index];
    }
    // The aclnn entries take char*.
    char* group_ep() { return group_ep_.data(); }
    char* group_tp() { return group_tp_.data(); }
    char* comm_alg() { return comm_alg_.data(); }

private:
    const AmNpuLaunch& launch_;
    std::string group_ep_, group_tp_, comm_alg_;
};

#define AM_INPUT(name) const at::Tensor& name = parts.input(moe::kTensor_##name)
#define AM_OPTIONAL(name) const c10::optional<at::Tensor> name = parts.optional(moe::kTensor_##name)
#define AM_ATTRIBUTE(name) int64_t name = parts.attribute(moe::kAttribute_##name)

void Dispatch(const AmNpuLaunch& launch) {
    Parts parts(launch);
    AM_INPUT(x);
    AM_INPUT(expert_ids);
    AM_OPTIONAL(scales);
    AM_OPTIONAL(x_active_mask);
    AM_OPTIONAL(expert_scales);
    char *group_ep = parts.group_ep(), *group_tp = parts.group_tp(), *comm_alg = parts.comm_alg();
    AM_ATTRIBUTE(ep_world_size);
    AM_ATTRIBUTE(ep_rank_id);
    AM_ATTRIBUTE(moe_expert_num);
    AM_ATTRIBUTE(tp_world_size);
    AM_ATTRIBUTE(tp_rank_id);
    AM_ATTRIBUTE(expert_shard_type);
    AM_ATTRIBUTE(shared_expert_num);
    AM_ATTRIBUTE(shared_expert_rank_num);
    AM_ATTRIBUTE(quant_mode);
    AM_ATTRIBUTE(global_bs);
    AM_ATTRIBUTE(expert_token_nums_type);
    AM_ATTRIBUTE(zero_expert_num);
    AM_ATTRIBUTE(copy_expert_num);
    AM_ATTRIBUTE(const_expert_num);
    int64_t contract = launch.contract, window_mib = launch.window_mib, timeout_us = launch.timeout_us;
    const at::Tensor &expand_x = parts.output(0), &dynamic_scales = parts.output(1),
                     &expand_idx = parts.output(2), &expert_token_nums = parts.output(3),
                     &ep_recv_counts = parts.output(4), &tp_recv_counts = parts.output(5),
                     &expand_scales = parts.output(6), &error_record = Parts::Of(launch.record);
    const c10::OptionalDeviceGuard guard(x.device());  // the stream is that of the current device
    AM_REQUIRE(aclnnAscendMoeDistributeDispatch);
    EXEC_NPU_CMD_EXT(aclnnAscendMoeDistributeDispatch, x, expert_ids, scales, x_active_mask, expert_scales,
                     group_ep, ep_world_size, ep_rank_id, moe_expert_num, group_tp, tp_world_size, tp_rank_id,
                     expert_shard_type, shared_expert_num, shared_expert_rank_num, quant_mode, global_bs,
                     expert_token_nums_type, comm_alg, zero_expert_num, copy_expert_num, const_expert_num,
                     contract, window_mib, timeout_us, expand_x, dynamic_scales, expand_idx,
                     expert_token_nums, ep_recv_counts, tp_recv_counts, expand_scales, error_record);
    Parts::Of(launch.host_record).copy_(error_record, true);
}

void Combine(const AmNpuLaunch& launch) {
    Parts parts(launch);
    AM_INPUT(expand_x);
    AM_INPUT(expert_ids);
    AM_INPUT(expand_idx);
    AM_INPUT(ep_send_counts);
    AM_INPUT(expert_scales);
    AM_OPTIONAL(tp_send_counts);
    AM_OPTIONAL(x_active_mask);
    AM_OPTIONAL(expand_scales);
    AM_OPTIONAL(shared_expert_x);
    char *group_ep = parts.group_ep(), *group_tp = parts.group_tp(), *comm_alg = parts.comm_alg();
    AM_ATTRIBUTE(ep_world_size);
    AM_ATTRIBUTE(ep_rank_id);
    AM_ATTRIBUTE(moe_expert_num);
    AM_ATTRIBUTE(tp_world_size);
    AM_ATTRIBUTE(tp_rank_id);
    AM_ATTRIBUTE(expert_shard_type);
    AM_ATTRIBUTE(shared_expert_num);
    AM_ATTRIBUTE(shared_expert_rank_num);
    AM_ATTRIBUTE(global_bs);
    AM_ATTRIBUTE(out_dtype);
    AM_ATTRIBUTE(comm_quant_mode);
    AM_ATTRIBUTE(group_list_type);
    AM_ATTRIBUTE(zero_expert_num);
    AM_ATTRIBUTE(copy_expert_num);
    AM_ATTRIBUTE(const_expert_num);
    int64_t contract = launch.contract, window_mib = launch.window_mib, timeout_us = launch.timeout_us;
    const at::Tensor &x = parts.output(0), &error_record = Parts::Of(launch.record);
    const c10::OptionalDeviceGuard guard(expand_x.device());
    AM_REQUIRE(aclnnAscendMoeDistributeCombine);
    EXEC_NPU_CMD_EXT(aclnnAscendMoeDistributeCombine, expand_x, expert_ids, expand_idx, ep_send_counts,
                     expert_scales, tp_send_counts, x_active_mask, expand_scales, shared_expert_x, group_ep,
                     ep_world_size, ep_rank_id, moe_expert_num, group_tp, tp_world_size, tp_rank_id,
                     expert_shard_type, shared_expert_num, shared_expert_rank_num, global_bs, out_dtype,
                     comm_quant_mode, group_list_type, comm_alg, zero_expert_num, copy_expert_num,
                     const_expert_num, contract, window_mib, timeout_us, x, error_record);
    Parts::Of(launch.host_record).copy_(error_record, true);
}

// torch.ops.ascend_moe_npu.probe: the bring-up's probe kernel. Its output is an argument, so it is never for
// a compiler's graph.
void Probe(c10::string_view group_ep, int64_t ep_world_size, int64_t ep_rank_id, int64_t mode, int64_t nonce,
           int64_t rounds, int64_t cycles, int64_t window_mib, int64_t timeout_us, const at::Tensor& report) {
    const c10::OptionalDeviceGuard guard(report.device());
    AM_REQUIRE(aclnnAscendMoeProbe);
    std::string groupEp(group_ep);  // a view need not end in NUL
    char* group_ep_text = groupEp.data();
    EXEC_NPU_CMD_EXT(aclnnAscendMoeProbe, group_ep_text, ep_world_size, ep_rank_id, mode, nonce, rounds,
                     cycles, window_mib, timeout_us, report);
}

int Told(int result, const char* text, char* out, uint64_t bytes) {
    strncpy(out, text, bytes - 1);
    out[bytes - 1] = '\0';
    return result;
}

}  // namespace

}  // namespace ascend_moe_npu

int am_npu_launch(const AmNpuLaunch* launch, char* text, uint64_t bytes) {
    using namespace ascend_moe_npu;
    try {
        if (launch->op == static_cast<int32_t>(moe::kOpDispatch)) {
            Dispatch(*launch);
        } else {
            Combine(*launch);
        }
        return kNpuQueued;
    } catch (const NoOperator& error) {
        return Told(kNpuNoOperator, error.what(), text, bytes);
    } catch (const Refused& error) {
        return Told(kNpuRefused, error.what(), text, bytes);
    } catch (const c10::Error& error) {
        return Told(kNpuOther, error.what_without_backtrace(), text, bytes);
    } catch (const std::exception& error) {
        return Told(kNpuOther, error.what(), text, bytes);
    }
}

TORCH_LIBRARY(ascend_moe_npu, library) {
    library.def(
        "probe(str group_ep, int ep_world_size, int ep_rank_id, int mode, int nonce, int rounds, int cycles, "
        "int window_mib, int timeout_us, Tensor(a!) report) -> ()");
}

TORCH_LIBRARY_IMPL(ascend_moe_npu, PrivateUse1, library) { library.impl("probe", &ascend_moe_npu::Probe); }
