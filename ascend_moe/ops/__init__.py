"""The four ops as functions: ``torch.ops.ascend_moe.npu_moe_distribute_*`` with torch_npu's own signatures.

A tensor's device chooses the kernels: the twin on the CPU, CANN on an NPU.
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
    """As ``npu_moe_distribute_dispatch_v2``, whose help has arguments, results and errors.

    Args:
        x, expert_ids, group_ep, ep_world_size, ep_rank_id, moe_expert_num, scales, x_active_mask, expert_scales,
            group_tp, tp_world_size, tp_rank_id, expert_shard_type, shared_expert_num, shared_expert_rank_num,
            quant_mode, global_bs, expert_token_nums_type: as there.

    Returns:
        As there, but the third is expand_idx (BS*K,) int32: earlier pairs of this rank with the same expert.

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
    """Sends every (token, k) row to the rank that owns its expert, and returns the rows received.

    BS tokens of H elements, K experts a token, W = ep_world_size ranks, E = moe_expert_num experts,
    L = E / W local ones, G = global_bs or BS*W, A = G * min(L, K) rows at most.

    Args:
        x: (BS, H) bfloat16, float16 or float32; rows a multiple of 32 bytes, H <= 16384.
        expert_ids: (BS, K) int32 in 0..E-1, or -1: not routed; behind E-1 the ids of zero, copy and const experts.
            BS <= 4096, K <= 32.
        group_ep: name of the EP group: ``ascend_moe.comm_name``, a live c10d group name, or a LocalCluster's.
        ep_world_size, ep_rank_id: W, at most 384, and this rank's place in the group.
        moe_expert_num: E, a multiple of W, at most 1024.
        scales: (E, H) float32 smoothing factors, with quant_mode 2 only.
        x_active_mask: (BS,) or (BS, K) bool; masked pairs are not sent and their ids not looked at.
        expert_scales: (BS, K) float32: expand_scales then has the weight of every row, and ep_recv_counts is
            longer, as in CANN. Given on all ranks or on none.
        performance_info: (W,) int64: to element r the op adds the microseconds that this rank has waited for rank r's
            message, from the begin of its wait on; a rank that never came counts until the wait has ended. The op
            writes into this tensor, which torch is not told: give a tensor of your own, and under torch.compile an
            input of the graph. May be given on some ranks alone.
        quant_mode: 0 none, 2 int8 with one scale a token.
        global_bs: 0 (every rank has the same BS) or W * the largest BS.
        expert_token_nums_type: 0 cumulative, 1 counts.
        zero_expert_num, copy_expert_num, const_expert_num: experts that no row travels to, at most 1024 of each; their
            ids follow E-1 in this order. K may be as large as all experts together. Combine says what they add.
        comm_alg: how rows travel; the same on all ranks. 'window', and CANN's names for it 'fullmesh',
            'fullmesh_v1', 'fullmesh_v2': into the window of who gets them.
            'hierarchy': the same on one server, where CANN's two-level sum rounds as this one does. Between servers
            of an A2 cluster a row goes once to each server; needs expert_scales, and has its own triples and a
            rounding a server (docs/cluster.md).
            'direct': they stay with their sender, and who gets them reads them there; not between servers
            (RDMA), and combine takes rows and assist_info_for_combine in dispatch's order only. 'auto':
            'direct' where it can and fits, else 'window' (``ascend_moe.algorithm_of``). '':
            ASCEND_MOE_COMM_ALG, without it 'auto'. With 'window' and 'direct' every output is the same bit for bit.

    Returns:
        expand_x (A, H), dtype of x or int8, rows by (local expert, source rank, flat (token, k));
        dynamic_scales (A,) float32, with quant_mode 2 the factor that turns a row back;
        assist_info_for_combine (max(BS*K, A*128),) int32: (source rank, token, k) of row i at 3*i;
        between the servers of an A2 cluster expand_idx in its first BS*K words instead, as in CANN;
        expert_token_nums (L,) int64;
        ep_recv_counts (W*L,) int32, inclusive prefix sums over [local expert][source rank];
        tp_recv_counts (tp_world_size,) int32; expand_scales (A,) float32, the expert_scales
        of every row where given.
        Rows past ep_recv_counts[W*L-1] are undefined.

    Accepted and ignored, CANN alone uses them:
    group_tp with one TP rank (tp_world_size 0 or 1, tp_rank_id 0).
    Refused by name until they are supported: tp_world_size 2, shared_expert_rank_num above 0,
    shared_expert_num above 1, expert_shard_type 1, elastic_info (`ascend_moe.agree` and `ascend_moe.shrink` survive a
    lost rank), y_dtype, x_dtype, scales_dtype.

    Collective: all ranks of group_ep call the same ops in the same order, and wait for each other at most
    ASCEND_MOE_TIMEOUT_S seconds. Compilers keep every call, and their order.
    Differentiable for x, and for expert_scales by expand_scales: docs/layers.md.

    Raises:
        ArgumentError, WindowTooSmall: this rank's arguments; nothing was sent, a corrected call works.
        InvalidExpertId, RoutingOverflow, ConfigMismatch: on every rank; the communicator stays usable.
        PeerLost, CommTimeout, CorruptStatus: the communicator must be closed and opened afresh,
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
    """As ``npu_moe_distribute_combine_v2``, whose help has arguments, results and errors.

    Args:
        expand_idx: (BS*K,) int32, of npu_moe_distribute_dispatch, instead of assist_info_for_combine.
        shared_expert_x, activation_scale, weight_scale, group_list: must be None. out_dtype: must be 0.
        group_list_type: ignored.
        expand_x, expert_ids, ep_send_counts, expert_scales, group_ep, ep_world_size, ep_rank_id, moe_expert_num,
            tp_send_counts, x_active_mask, expand_scales, group_tp, tp_world_size, tp_rank_id, expert_shard_type,
            shared_expert_num, shared_expert_rank_num, global_bs, comm_quant_mode: as there.

    Returns:
        (BS, H), as there.

    Raises:
        As there; ArgumentError also for what must be None or 0 above.

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
    """Returns the experts' rows to their tokens and sums them, weighted by expert_scales.

    fp32, multiply then add, k ascending, one rounding to the dtype of expand_x: bit-exact whatever the
    number of ranks or cores ('hierarchy' between servers rounds once more a server). Rows of inactive tokens are zeros.

    Args:
        expand_x: (>= rows, H) bfloat16, float16 or float32, in dispatch's row order.
        expert_ids, x_active_mask, global_bs, group_ep, ep_world_size, ep_rank_id, moe_expert_num: as given to
            dispatch.
        assist_info_for_combine: (>= 3*rows,) int32, dispatch's.
        ep_send_counts: (>= W*L,) int32, dispatch's ep_recv_counts.
        expert_scales: (BS, K) float32 weights; without elements the rows are only added.
        shared_expert_x: (BS, H) or (a, b, H) with a*b = BS, added last with weight 1.
        zero_expert_num, copy_expert_num, const_expert_num: as given to dispatch. A pair of a zero expert adds nothing,
            one of a copy expert its weight times ori_x, one of a const expert its weight times
            alpha_1*ori_x + alpha_2*v, each at its place in k.
        ori_x: (BS, H), dtype of expand_x; needed with copy or const experts.
        const_expert_alpha_1, const_expert_alpha_2: (C,), the factors of C const experts, or (C, H): the factors are
            the softmax of their products with ori_x. const_expert_v: (C, H). All of the dtype of expand_x.
        comm_quant_mode: 2: rows come back as int8, which takes 1.25 bytes an element: of each block of 8 the codes
            rint(fp16(v / b)) with b = max|v| / 127, and b in the dtype of expand_x, bfloat16 or float16. Rows that
            stay on their rank are rounded too. Not for window tensors (``window_empty``); without gradients.
        performance_info: (W,) int64, as dispatch's.
        comm_alg: as dispatch's; 'direct' takes rows and assist_info_for_combine in dispatch's order only.

    Returns:
        (BS, H), dtype of expand_x.

    Accepted and ignored, CANN alone uses them:
    tp_send_counts, expand_scales, group_tp with one TP rank (tp_world_size 0 or 1, tp_rank_id 0).
    Refused by name until they are supported: tp_world_size 2, shared_expert_rank_num above 0,
    shared_expert_num above 1, expert_shard_type 1, elastic_info.

    Collective: all ranks of group_ep call the same ops in the same order, and wait for each other at most
    ASCEND_MOE_TIMEOUT_S seconds. Compilers keep every call, and their order.
    Differentiable for expand_x, expert_scales, shared_expert_x, ori_x, const_expert_alpha_1, const_expert_alpha_2 and
    const_expert_v: docs/layers.md.

    Raises:
        ArgumentError, WindowTooSmall: this rank's arguments; nothing was sent, a corrected call works.
        InvalidExpertId, RoutingOverflow, ConfigMismatch: on every rank; the communicator stays usable.
        RoutingMismatch: combine's ids, mask or counts give an expert other rows than dispatch's. Ids that give each
            expert as many are compared with ASCEND_MOE_CHECK_PAIRS=1: ArgumentError.
        PeerLost, CommTimeout, CorruptStatus: the communicator must be closed and opened afresh,
            on an NPU by a new process group.

    Source: torch_npu.npu_moe_distribute_combine_v2.
    """
