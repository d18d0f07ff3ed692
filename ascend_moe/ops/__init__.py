"""The four ops as functions: ``torch.ops.ascend_moe.npu_moe_distribute_*`` with torch_npu's signatures.

The tensors' device selects the kernels: the twin (AscendC emulator) on the CPU, CANN on an NPU.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .registration import operator


class DispatchedV1(NamedTuple):
    """The outputs of ``npu_moe_distribute_dispatch``: torch_npu's tuple, with names."""

    expand_x: Tensor
    dynamic_scales: Tensor
    expand_idx: Tensor
    expert_token_nums: Tensor
    ep_recv_counts: Tensor
    tp_recv_counts: Tensor
    expand_scales: Tensor


class DispatchedV2(NamedTuple):
    """The outputs of ``npu_moe_distribute_dispatch_v2``: torch_npu's tuple, with names."""

    expand_x: Tensor
    dynamic_scales: Tensor
    assist_info_for_combine: Tensor
    expert_token_nums: Tensor
    ep_recv_counts: Tensor
    tp_recv_counts: Tensor
    expand_scales: Tensor


@operator
def npu_moe_distribute_dispatch(  # type: ignore[empty-body]
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    scales: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    expert_scales: Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
) -> DispatchedV1:
    """The older signature (V1) of ``npu_moe_distribute_dispatch_v2``, which documents arguments, results and errors.

    Args:
        x, expert_ids, group_ep, ep_world_size, ep_rank_id, moe_expert_num, scales, x_active_mask, expert_scales,
            group_tp, tp_world_size, tp_rank_id, expert_shard_type, shared_expert_num, shared_expert_rank_num,
            quant_mode, global_bs, expert_token_nums_type: as there.

    Returns:
        As there, but the third is expand_idx (BS*K,) int32: for each (token, k), how many earlier (token, k) of this
        rank have the same expert.

    Raises:
        As there.

    Source: torch_npu.npu_moe_distribute_dispatch.
    """


@operator
def npu_moe_distribute_dispatch_v2(  # type: ignore[empty-body]
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    scales: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    expert_scales: Tensor | None = None,
    elastic_info: Tensor | None = None,
    performance_info: Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    comm_alg: str = "",
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
    y_dtype: int | None = None,
    x_dtype: int | None = None,
    scales_dtype: int | None = None,
) -> DispatchedV2:
    """Send a row for each (token, k) to the rank that owns its expert, and return the rows received.

    BS tokens of H elements, K experts per token, W = ep_world_size ranks, E = moe_expert_num experts,
    L = E / W of them on each rank, G = global_bs or BS*W, at most A = G * min(L, K) rows.

    Args:
        x: (BS, H) bfloat16, float16 or float32; rows a multiple of 32 bytes, H <= 16384.
        expert_ids: (BS, K) int32 in 0..E-1, or -1: not routed; from E on the ids of zero, copy and const experts.
            BS <= 4096, K <= 32.
        group_ep: name of the EP group: ``ascend_moe.comm_name``, a live c10d group name, or a LocalCluster's.
        ep_world_size, ep_rank_id: W, at most 384, and this rank's index in the group.
        moe_expert_num: E, a multiple of W, at most 1024.
        scales: (E, H) float32 smoothing factors, with quant_mode 2 only.
        x_active_mask: (BS,) or (BS, K) bool; inactive rows are not sent and their ids are not checked.
        expert_scales: (BS, K) float32: expand_scales then contains the weight of every row, and ep_recv_counts is
            longer, as in CANN. Pass it on all ranks or on none.
        performance_info: (W,) int64: the op adds to element r the microseconds that this rank has waited for rank r's
            data, from the start of the wait; for a rank that never arrived, until the end of the wait. The op writes
            into this tensor without telling torch: pass a tensor that nothing else uses, and under torch.compile an
            input of the graph. May be passed on some ranks only.
        quant_mode: 0 none, 2 int8 with one scale per row.
        global_bs: 0 (every rank has the same BS) or W * the largest BS.
        expert_token_nums_type: 0 running sums, 1 counts.
        zero_expert_num, copy_expert_num, const_expert_num: experts that receive no rows, at most 1024 of each kind;
            their ids follow E-1 in this order. K may be as large as the number of all experts. Combine documents
            their results.
        comm_alg: the algorithm, equal on all ranks. 'window', and CANN's names for it 'fullmesh', 'fullmesh_v1',
            'fullmesh_v2': rows are written into the receiver's window.
            'hierarchy': the same on one server, where CANN's two-level sum rounds like this one. Between servers
            of an A2 cluster a row is sent once per server; needs expert_scales, returns other source indices, and
            rounds once per server (docs/cluster.md).
            'direct': rows stay with their sender, and receivers read them there; not between servers (RDMA), and
            combine needs rows and assist_info_for_combine in dispatch's order. 'auto': 'direct' if it is supported
            and fits, else 'window' (``ascend_moe.algorithm_of`` returns the choice). '': ASCEND_MOE_COMM_ALG, else
            'auto'. 'window' and 'direct' return the same outputs bit for bit.

    Returns:
        expand_x (A, H), dtype of x or int8, rows by (local expert, source rank, flat (token, k));
        dynamic_scales (A,) float32, with quant_mode 2 the factor that dequantizes a row;
        assist_info_for_combine (max(BS*K, A*128),) int32: the source index (rank, token, k) of row i at 3*i;
        between the servers of an A2 cluster expand_idx in its first BS*K words instead, as in CANN;
        expert_token_nums (L,) int64;
        ep_recv_counts (W*L,) int32, inclusive prefix sums over [local expert][source rank];
        tp_recv_counts (tp_world_size,) int32; expand_scales (A,) float32, the expert_scales of every row if passed.
        Rows from ep_recv_counts[W*L-1] on are undefined.

    Accepted and ignored; only CANN uses them:
    group_tp with one TP rank (tp_world_size 0 or 1, tp_rank_id 0).
    Not supported yet: tp_world_size 2, shared_expert_rank_num above 0,
    shared_expert_num above 1, expert_shard_type 1, elastic_info (`ascend_moe.agree` and `ascend_moe.shrink` handle a
    lost rank), y_dtype, x_dtype, scales_dtype.

    Collective: all ranks of group_ep call the same ops in the same order, and wait for each other for at most
    ASCEND_MOE_TIMEOUT_S seconds. Compilers keep every call, and their order.
    Differentiable with respect to x, and to expert_scales through expand_scales: docs/layers.md.

    Raises:
        ArgumentError, WindowTooSmall: this rank's arguments; nothing was sent, a corrected call works.
        InvalidExpertId, RoutingOverflow, ConfigMismatch: on every rank; the communicator stays usable.
        PeerLost, CommTimeout, CorruptStatus: the communicator must be closed and reopened,
            on an NPU by a new process group.

    Source: torch_npu.npu_moe_distribute_dispatch_v2.
    """


@operator
def npu_moe_distribute_combine(  # type: ignore[empty-body]
    expand_x: Tensor,
    expert_ids: Tensor,
    expand_idx: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    activation_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    group_list: Tensor | None = None,
    expand_scales: Tensor | None = None,
    shared_expert_x: Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    out_dtype: int = 0,
    comm_quant_mode: int = 0,
    group_list_type: int = 0,
) -> Tensor:
    """The older signature (V1) of ``npu_moe_distribute_combine_v2``, which documents arguments, results and errors.

    Args:
        expand_idx: (BS*K,) int32, from npu_moe_distribute_dispatch, instead of assist_info_for_combine.
        shared_expert_x, activation_scale, weight_scale, group_list: must be None. out_dtype: must be 0.
        group_list_type: ignored.
        expand_x, expert_ids, ep_send_counts, expert_scales, group_ep, ep_world_size, ep_rank_id, moe_expert_num,
            tp_send_counts, x_active_mask, expand_scales, group_tp, tp_world_size, tp_rank_id, expert_shard_type,
            shared_expert_num, shared_expert_rank_num, global_bs, comm_quant_mode: as there.

    Returns:
        (BS, H), as there.

    Raises:
        As there; ArgumentError also if an argument that must be None or 0 is not.

    Source: torch_npu.npu_moe_distribute_combine.
    """


@operator
def npu_moe_distribute_combine_v2(  # type: ignore[empty-body]
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    expand_scales: Tensor | None = None,
    shared_expert_x: Tensor | None = None,
    elastic_info: Tensor | None = None,
    ori_x: Tensor | None = None,
    const_expert_alpha_1: Tensor | None = None,
    const_expert_alpha_2: Tensor | None = None,
    const_expert_v: Tensor | None = None,
    performance_info: Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    comm_quant_mode: int = 0,
    comm_alg: str = "",
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
) -> Tensor:
    """Send the experts' rows back to their tokens and return their sums, weighted by expert_scales.

    Sums are in fp32, multiply then add, k ascending, rounded once to the dtype of expand_x: bit-exact for any number of
    ranks or cores ('hierarchy' between servers rounds once more per server). Rows of inactive tokens are zeros.

    Args:
        expand_x: (>= rows, H) bfloat16, float16 or float32, in dispatch's row order.
        expert_ids, x_active_mask, global_bs, group_ep, ep_world_size, ep_rank_id, moe_expert_num: as passed to
            dispatch.
        assist_info_for_combine: (>= 3*rows,) int32, from dispatch.
        ep_send_counts: (>= W*L,) int32, ep_recv_counts from dispatch.
        expert_scales: (BS, K) float32 weights; if empty, the rows are only added.
        shared_expert_x: (BS, H) or (a, b, H) with a*b = BS, added last with weight 1.
        zero_expert_num, copy_expert_num, const_expert_num: as passed to dispatch. A zero expert adds nothing, a copy
            expert its weight times ori_x, a const expert its weight times alpha_1*ori_x + alpha_2*v, each at its
            position in k.
        ori_x: (BS, H), dtype of expand_x; required with copy or const experts.
        const_expert_alpha_1, const_expert_alpha_2: (C,), the factors of C const experts, or (C, H): the factors are
            the softmax of their products with ori_x. const_expert_v: (C, H). All in the dtype of expand_x.
        comm_quant_mode: 2: rows are sent as int8 with 1.25 bytes per element: for each block of 8 the codes
            rint(fp16(v / b)) with b = max|v| / 127, and b in the dtype of expand_x, bfloat16 or float16. Rows that
            stay on their rank are rounded too. Not for window tensors (``window_empty``); no gradients.
        performance_info: (W,) int64, as for dispatch.
        comm_alg: as for dispatch; 'direct' needs rows and assist_info_for_combine in dispatch's order.

    Returns:
        (BS, H), dtype of expand_x.

    tp_send_counts, expand_scales: ignored, only CANN uses them. As in dispatch: group_tp, tp_world_size, tp_rank_id,
    shared_expert_num, shared_expert_rank_num, expert_shard_type, elastic_info.

    Collective, as dispatch.
    Differentiable with respect to expand_x, expert_scales, shared_expert_x, ori_x, const_expert_alpha_1,
    const_expert_alpha_2 and const_expert_v: docs/layers.md.

    Raises:
        As dispatch; RoutingMismatch: combine's ids, mask or counts do not match dispatch's rows. With
            ASCEND_MOE_CHECK_ROUTING=1 ids permuted within equal counts raise ArgumentError.

    Source: torch_npu.npu_moe_distribute_combine_v2.
    """
