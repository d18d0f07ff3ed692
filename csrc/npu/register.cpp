// Launches as ops of a namespace of their own, below the public ops: outputs are arguments, so these are for
// ascend_moe/npu_launch.py and bringup_npu.py alone, never for a compiler's graph.
#include "adapter.h"

TORCH_LIBRARY(ascend_moe_npu, library) {
    library.def(
        "dispatch(Tensor x, Tensor expert_ids, Tensor? scales, Tensor? x_active_mask, Tensor? expert_scales, "
        "str group_ep, int ep_world_size, int ep_rank_id, int moe_expert_num, str group_tp, "
        "int tp_world_size, int tp_rank_id, int expert_shard_type, int shared_expert_num, "
        "int shared_expert_rank_num, int quant_mode, int global_bs, int expert_token_nums_type, "
        "str comm_alg, int zero_expert_num, int copy_expert_num, int const_expert_num, int contract, "
        "int window_mib, int timeout_us, Tensor(a!) expand_x, Tensor(b!) dynamic_scales, "
        "Tensor(c!) expand_idx, Tensor(d!) expert_token_nums, Tensor(e!) ep_recv_counts, "
        "Tensor(f!) tp_recv_counts, Tensor(g!) expand_scales, Tensor(h!) error_record) -> ()");
    library.def(
        "combine(Tensor expand_x, Tensor expert_ids, Tensor expand_idx, Tensor ep_send_counts, "
        "Tensor expert_scales, Tensor? tp_send_counts, Tensor? x_active_mask, Tensor? expand_scales, "
        "Tensor? shared_expert_x, str group_ep, int ep_world_size, int ep_rank_id, int moe_expert_num, "
        "str group_tp, int tp_world_size, int tp_rank_id, int expert_shard_type, int shared_expert_num, "
        "int shared_expert_rank_num, int global_bs, int out_dtype, int comm_quant_mode, "
        "int group_list_type, str comm_alg, int zero_expert_num, int copy_expert_num, int const_expert_num, "
        "int contract, int window_mib, int timeout_us, Tensor(a!) x, Tensor(b!) error_record) -> "
        "()");
    library.def(
        "probe(str group_ep, int ep_world_size, int ep_rank_id, int mode, int nonce, int rounds, int cycles, "
        "int broken, int window_mib, int timeout_us, Tensor(a!) report) -> ()");
}

TORCH_LIBRARY_IMPL(ascend_moe_npu, PrivateUse1, library) {
    library.impl("dispatch", &ascend_moe_npu::Dispatch);
    library.impl("combine", &ascend_moe_npu::Combine);
    library.impl("probe", &ascend_moe_npu::Probe);
}
