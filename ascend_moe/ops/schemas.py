"""Schemas of the custom ops, torch_npu's own word for word so that call sites move over; their docstrings."""

from __future__ import annotations

NAMESPACE = "ascend_moe"

_DISPATCH_HEAD = (
    "Tensor x, Tensor expert_ids, str group_ep, int ep_world_size, int ep_rank_id, int moe_expert_num, *, "
    "Tensor? scales=None, Tensor? x_active_mask=None, Tensor? expert_scales=None, "
)
_DISPATCH_TAIL = (
    'str group_tp="", int tp_world_size=0, int tp_rank_id=0, int expert_shard_type=0, '
    "int shared_expert_num=1, int shared_expert_rank_num=0, "
    "int quant_mode=0, int global_bs=0, int expert_token_nums_type=1"
)
_SEVEN = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"

SCHEMAS: dict[str, str] = {
    "npu_moe_distribute_dispatch": f"({_DISPATCH_HEAD}{_DISPATCH_TAIL}) -> {_SEVEN}",
    "npu_moe_distribute_dispatch_v2": (
        f"({_DISPATCH_HEAD}Tensor? elastic_info=None, Tensor? performance_info=None, {_DISPATCH_TAIL}, "
        'str comm_alg="", int zero_expert_num=0, int copy_expert_num=0, int const_expert_num=0, '
        f"int? y_dtype=None, int? x_dtype=None, int? scales_dtype=None) -> {_SEVEN}"
    ),
    "npu_moe_distribute_combine": (
        "(Tensor expand_x, Tensor expert_ids, Tensor expand_idx, Tensor ep_send_counts, "
        "Tensor expert_scales, str group_ep, int ep_world_size, int ep_rank_id, int moe_expert_num, *, "
        "Tensor? tp_send_counts=None, "
        "Tensor? x_active_mask=None, Tensor? activation_scale=None, Tensor? weight_scale=None, "
        "Tensor? group_list=None, Tensor? expand_scales=None, Tensor? shared_expert_x=None, "
        'str group_tp="", int tp_world_size=0, int tp_rank_id=0, int expert_shard_type=0, '
        "int shared_expert_num=1, int shared_expert_rank_num=0, int global_bs=0, int out_dtype=0, "
        "int comm_quant_mode=0, int group_list_type=0) -> Tensor"
    ),
    "npu_moe_distribute_combine_v2": (
        "(Tensor expand_x, Tensor expert_ids, Tensor assist_info_for_combine, Tensor ep_send_counts, "
        "Tensor expert_scales, str group_ep, int ep_world_size, int ep_rank_id, int moe_expert_num, *, "
        "Tensor? tp_send_counts=None, Tensor? x_active_mask=None, Tensor? expand_scales=None, "
        "Tensor? shared_expert_x=None, Tensor? elastic_info=None, Tensor? ori_x=None, "
        "Tensor? const_expert_alpha_1=None, Tensor? const_expert_alpha_2=None, Tensor? const_expert_v=None, "
        'Tensor? performance_info=None, str group_tp="", int tp_world_size=0, int tp_rank_id=0, '
        "int expert_shard_type=0, int shared_expert_num=1, int shared_expert_rank_num=0, int global_bs=0, "
        'int comm_quant_mode=0, str comm_alg="", int zero_expert_num=0, int copy_expert_num=0, '
        "int const_expert_num=0) -> Tensor"
    ),
}

_COMMON = """
    Accepted and ignored, CANN alone uses them:
    {ignored}.
    Refused by name until they are supported: tp_world_size 2, shared_expert_rank_num above 0,
    shared_expert_num above 1, expert_shard_type 1{refused}.

    Collective: all ranks of group_ep call the same ops in the same order, and wait for each other at most
    ASCEND_MOE_TIMEOUT_S seconds. Compilers keep every call, and their order. Not differentiable yet.

    Raises:
        ArgumentError, WindowTooSmall: this rank's arguments; nothing was sent, a corrected call works.
        InvalidExpertId, RoutingOverflow, ConfigMismatch: on every rank; the communicator stays usable.
        {mismatch}PeerLost, CommTimeout, CorruptStatus: the communicator must be closed and opened afresh,
            on an NPU by a new process group.

    Source: torch_npu.{name}.
"""

_DISPATCH_DOC = """Sends every (token, k) row to the rank that owns its expert, and returns the rows received.

    BS tokens of H elements, K experts a token, W = ep_world_size ranks, E = moe_expert_num experts,
    L = E / W local ones, G = global_bs or BS*W, A = G * min(L, K) rows at most.

    Args:
        x: (BS, H) bfloat16, float16 or float32; rows a multiple of 32 bytes, H <= 8192.
        expert_ids: (BS, K) int32 in 0..E-1, or -1: not routed. BS <= 4096, K <= 16.
        group_ep: name of the EP group: ``ascend_moe.comm_name``, a live c10d group name, or a LocalCluster's.
        ep_world_size, ep_rank_id: W, at most 64, and this rank's place in the group.
        moe_expert_num: E, a multiple of W, at most 1024.
        scales: (E, H) float32 smoothing factors, with quant_mode 2 only.
        x_active_mask: (BS,) or (BS, K) bool; masked pairs are not sent and their ids not looked at.
        expert_scales: (BS, K) float32; only lengthens ep_recv_counts, as in CANN.
        quant_mode: 0 none, 2 int8 with one scale a token.
        global_bs: 0 (every rank has the same BS) or W * the largest BS.
        expert_token_nums_type: 0 cumulative, 1 counts.{more}

    Returns:
        expand_x (A, H), dtype of x or int8, rows by (local expert, source rank, flat (token, k));
        dynamic_scales (A,) float32, with quant_mode 2 the factor that turns a row back;
        {third};
        expert_token_nums (L,) int64;
        ep_recv_counts (W*L,) int32, inclusive prefix sums over [local expert][source rank];
        tp_recv_counts (tp_world_size,) int32; expand_scales (A,) float32, without meaning here.
        Rows past ep_recv_counts[W*L-1] are undefined.
"""

_COMBINE_DOC = """Returns the experts' rows to their tokens and sums them, weighted by expert_scales.

    fp32, multiply then add, k ascending, one rounding to the dtype of expand_x: bit-exact whatever the
    number of ranks or cores. Rows of inactive tokens are zeros.

    Args:
        expand_x: (>= rows, H) bfloat16, float16 or float32, in dispatch's row order.
        expert_ids, x_active_mask, global_bs, group_ep, ep_world_size, ep_rank_id, moe_expert_num: as given to
            dispatch.
        {third}
        ep_send_counts: (>= W*L,) int32, dispatch's ep_recv_counts.
        expert_scales: (BS, K) float32 weights.
        {shared}

    Returns:
        (BS, H), dtype of expand_x.
"""

_ALGORITHMS = """
        comm_alg: how rows travel; the same on all ranks, every output the same bit for bit. 'window', and
            CANN's names for it 'fullmesh', 'fullmesh_v1', 'fullmesh_v2': into the window of who gets them.
            'direct': they stay with their sender, and who gets them reads them there; not between servers
            (RDMA), and combine takes rows and assist_info_for_combine in dispatch's order only. 'auto':
            'direct' where it can and fits (``ascend_moe.algorithm_of``). '':
            ASCEND_MOE_COMM_ALG, without it 'window'."""
_IGNORED = "group_tp with one TP rank (tp_world_size 0 or 1, tp_rank_id 0)"
_IGNORED_COMBINE = f"tp_send_counts, expand_scales, {_IGNORED}"
_SPECIAL = ",\n    zero_expert_num, copy_expert_num, const_expert_num, elastic_info, performance_info"
_MISMATCH = "RoutingMismatch: combine's ids, mask or counts are not dispatch's.\n        "

DOCS: dict[str, str] = {
    "npu_moe_distribute_dispatch": _DISPATCH_DOC.format(
        third="expand_idx (BS*K,) int32: earlier pairs of this rank with the same expert", more=""
    )
    + _COMMON.format(ignored=_IGNORED, refused="", mismatch="", name="npu_moe_distribute_dispatch"),
    "npu_moe_distribute_dispatch_v2": _DISPATCH_DOC.format(
        third="assist_info_for_combine (max(BS*K, A*128),) int32: (source rank, token, k) of row i at 3*i;\n"
        "        between the servers of an A2 cluster expand_idx in its first BS*K words instead, as in CANN",
        more=_ALGORITHMS,
    )
    + _COMMON.format(
        ignored=_IGNORED,
        refused=_SPECIAL + ", y_dtype,\n    x_dtype, scales_dtype",
        mismatch="",
        name="npu_moe_distribute_dispatch_v2",
    ),
    "npu_moe_distribute_combine": _COMBINE_DOC.format(
        third="expand_idx: (BS*K,) int32, dispatch's.",
        shared="shared_expert_x: must be None, the v2 op adds it.",
    )
    + _COMMON.format(
        ignored=_IGNORED_COMBINE + ",\n    group_list_type",
        refused=", comm_quant_mode,\n    activation_scale, weight_scale, group_list, out_dtype other than 0",
        mismatch=_MISMATCH,
        name="npu_moe_distribute_combine",
    ),
    "npu_moe_distribute_combine_v2": _COMBINE_DOC.format(
        third="assist_info_for_combine: (>= 3*rows,) int32, dispatch's.",
        shared="shared_expert_x: (BS, H) or (a, b, H) with a*b = BS, added last with weight 1." + _ALGORITHMS,
    )
    + _COMMON.format(
        ignored=_IGNORED_COMBINE,
        refused=_SPECIAL
        + ",\n    comm_quant_mode, ori_x, const_expert_alpha_1, const_expert_alpha_2, const_expert_v",
        mismatch=_MISMATCH,
        name="npu_moe_distribute_combine_v2",
    ),
}
