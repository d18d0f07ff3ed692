"""Calls that torch_npu's Meta kernels and ours are both asked about: a matrix of arguments an operator.

Tensors are described, not made: the process that has torch_npu makes them, on Meta and as FakeTensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

BF16, FP16, FP32, INT8, INT32, INT64, BOOL = (
    "bfloat16", "float16", "float32", "int8", "int32", "int64", "bool"
)  # fmt: skip
H = 64


@dataclass(frozen=True)
class T:
    """A tensor to be."""

    shape: tuple[int, ...]
    dtype: str = FP32


@dataclass(frozen=True)
class Case:
    """One call, by operator with overload.

    ``known``: where torch_npu's Meta kernel differs from ours, output to probe (-1: one side raises).
    ``cpp``: why torch_npu's C++ refuses it, which we do not.
    """

    op: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    known: dict[int, str] = field(default_factory=dict)
    cpp: str = ""


def product(**choices: list[Any]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def given(**kwargs: Any) -> dict[str, Any]:
    """Without the arguments that are None: left out of the call."""
    return {name: value for name, value in kwargs.items() if value is not None}


# ---- MC2


def _dispatch_sizes() -> Iterator[dict[str, Any]]:
    yield from product(
        bs=[0, 6],
        k=[1, 4],
        world=[4, 16],
        dtype=[BF16, FP16],
        quant_mode=[0, 2],
        global_bs=[0, 96],
        tp=[0, 1, 2],
    )


def dispatch(version: str = "", known: dict[int, str] | None = None, **over: Any) -> Case:
    sizes: dict[str, Any] = {"bs": 6, "k": 4, "world": 8, "rank": 0, "experts": 16, "dtype": BF16} | over
    take = sizes.pop
    bs, k, world, rank, experts, dtype = (take(n) for n in ("bs", "k", "world", "rank", "experts", "dtype"))
    tp = sizes.pop("tp", None)
    kwargs = given(**sizes, **({"group_tp": "tp", "tp_world_size": tp} if tp else {}))
    args = (T((bs, H), dtype), T((bs, k), INT32), "nobody", world, rank, experts)
    expected = dict(known or {})
    rows = bs * world if not kwargs.get("global_bs") else kwargs["global_bs"]
    if "expert_scales" not in kwargs and rows:
        expected.setdefault(6, "a")
    return Case(f"npu_moe_distribute_dispatch{version}", args, kwargs, expected)


def _dispatches(version: str) -> Iterator[Case]:
    for sizes in _dispatch_sizes():
        yield dispatch(version, **sizes)
    scores = T((6, 4))
    for sizes in product(world=[4, 8, 16], global_bs=[0, 160], tp=[0, 1], expert_token_nums_type=[0, 1]):
        yield dispatch(version, expert_scales=scores, x_active_mask=T((6,), BOOL), **sizes)
    for sizes in product(rank=[0, 1, 2, 7], shared_expert_rank_num=[1, 2, 4], global_bs=[0, 80], bs=[5, 6]):
        yield dispatch(version, experts=24, **sizes)
    yield dispatch(version, quant_mode=2, scales=T((16, H)))
    if version:
        for sizes in product(rank=[0, 3, 5], shared_expert_num=[2], shared_expert_rank_num=[2, 4]):
            yield dispatch(version, experts=24, **sizes)
        for sizes in product(rank=[0, 5], shared_expert_rank_num=[0, 2], global_bs=[0, 80]):
            yield dispatch(version, experts=24, elastic_info=T((20,), INT32), **sizes)
        for y_dtype, comm_alg in itertools.product([1, 5, 15], ["", "fullmesh_v2"]):
            yield dispatch(version, y_dtype=y_dtype, comm_alg=comm_alg, quant_mode=2)
    else:
        for sizes in product(rank=[0, 4, 6, 7], shared_expert_rank_num=[1, 2]):
            yield dispatch(version, experts=24, expert_shard_type=1, **sizes)
        yield dispatch(version, scales=T((16, H)))


def combine(version: str = "", known: dict[int, str] | None = None, **over: Any) -> Case:
    sizes: dict[str, Any] = {"bs": 6, "k": 4, "dtype": BF16} | over
    bs, k, dtype = (sizes.pop(name) for name in ("bs", "k", "dtype"))
    tensors = (T((96, H), dtype), T((bs, k), INT32), T((96 * 128,), INT32), T((16,), INT32), T((bs, k)))
    if version == "_add_rms_norm":
        tensors = (*tensors, T((bs, 1, H), dtype), T((H,), dtype))
    args = (*tensors, "nobody", 8, 0, 16)
    cpp = "float32 rows" if dtype == FP32 else ""
    return Case(f"npu_moe_distribute_combine{version}", args, given(**sizes), known or {}, cpp)


def _combines(version: str) -> Iterator[Case]:
    for sizes in product(bs=[0, 1, 6], k=[1, 4], dtype=[BF16, FP16, FP32], global_bs=[0, 64]):
        yield combine(version, **sizes)
    for sizes in product(tp_world_size=[0, 1, 2], comm_quant_mode=[0, 2]):
        yield combine(version, tp_send_counts=T((1,), INT32), x_active_mask=T((6, 4), BOOL), **sizes)
    if version:
        for sizes in product(shared_expert_x=[None, T((6, H), BF16)], copy_expert_num=[0, 1]):
            yield combine(version, ori_x=T((6, H), BF16), **sizes)


def _family() -> Iterator[Case]:
    for x_ref in (T((3,)), T((2, 3), BF16), T((), INT64), T((0, 4), BOOL), T((4,), INT8)):
        for world in (2, 16):
            yield Case("_npu_distribute_barrier", (x_ref, "nobody", world))
            yield Case("_npu_distribute_barrier", (x_ref, "nobody", world), {"time_out": T((1,), INT32)})
    for sizes in product(bs=[0, 1, 7], k=[1, 8], dtype=[INT32, INT64], pruned=[False, True]):
        ids, table = T((sizes["bs"], sizes["k"]), sizes["dtype"]), T((16, 5), INT32)
        kwargs: dict[str, Any] = {"local_rank_id": 1, "world_size": 8, "balance_mode": sizes["k"] % 2}
        if sizes["pruned"]:
            kwargs |= {"expert_scales": T((sizes["bs"], sizes["k"])), "pruning_threshold": T((sizes["k"],))}
            kwargs |= {"active_mask": T((sizes["bs"],), BOOL)}
        yield Case("npu_moe_update_expert", (ids, table), kwargs)


# ---- experts


def _grouped_matmuls() -> Iterator[Case]:
    op, groups = "npu_grouped_matmul", T((3,), INT64)
    for sizes in product(m=[0, 1, 9], dtype=[BF16, FP16, FP32], split=[2, 3], list_type=[0, 1]):
        x, w = T((sizes["m"], 8), sizes["dtype"]), T((3, 8, 10), sizes["dtype"])
        kwargs = {"group_list": groups, "group_type": 0, "split_item": sizes["split"]}
        yield Case(op, ([x], [w]), kwargs | {"group_list_type": sizes["list_type"]})
    for out, split in itertools.product([3, 5, 6, 15], [2, 3]):
        kwargs = {"group_list": groups, "group_type": 0, "split_item": split, "output_dtype": out}
        scales = {"scale": [T((3, 10))], "per_token_scale": [T((9,))]} if out != 3 else {}
        yield Case(op, ([T((9, 8), INT8)], [T((3, 8, 10), INT8)]), kwargs | scales)
    for count, split in itertools.product([1, 2, 4], [0, 2]):
        xs = [T((index + 2, 8), BF16) for index in range(count)]
        yield Case(op, (xs, [T((8, 10), BF16)] * count), {"group_type": -1, "split_item": split})
    yield Case(op, ([T((2, 3, 8), BF16)], [T((8, 10), BF16)]), {"group_type": -1})
    for packed, split in itertools.product([INT32, INT8], [2, 3]):
        kwargs = {"group_list": groups, "group_type": 0, "split_item": split, "output_dtype": 15}
        yield Case(op, ([T((9, 8), INT8)], [T((3, 8, 2), packed)]), kwargs)
    # K-grouped: the gradient of the weights.
    one, all_, each = [T((9, 10), BF16)], [T((3, 9, 10), BF16)], [T((9, 10), BF16)] * 3
    for split, weights in ((2, one), (3, one), (0, all_), (0, each), (1, all_), (1, each)):
        kwargs = {"group_list": groups, "group_type": 2, "split_item": split}
        yield Case(op, ([T((8, 9), BF16)], weights), kwargs)
    for group_type in (1, 3, -2):
        yield Case(op, ([T((9, 8))], [T((3, 8, 10))]), {"group_list": groups, "group_type": group_type})
    listed = "npu_grouped_matmul.List"
    for split, out in itertools.product([2, 3], [None, "float32"]):
        kwargs = given(group_list=[2, 5, 9], split_item=split, output_dtype=out)
        yield Case(listed, ([T((9, 8), BF16)], [T((8, 10), BF16)] * 3), kwargs, {-1: "s"} if out else {})
    yield Case(listed, ([T((2, 8)), T((7, 8))], [T((8, 10))] * 2), {"group_type": -1})


def _experts() -> Iterator[Case]:
    yield from _grouped_matmuls()
    for shape, dim, dtype in itertools.product([(4, 6), (2, 4, 6), (0, 8), (7, 5)], [-1, 0, 1], [BF16, FP32]):
        yield Case("npu_swiglu", (T(shape, dtype), dim))
    yield Case("npu_swiglu", (T((4, 6)),))
    op = "npu_dequant_swiglu_quant"
    for shape, mode, dtype in itertools.product([(4, 6), (2, 4, 6), (0, 8)], [0, 1], [BF16, FP32, INT32]):
        kwargs: dict[str, Any] = {"weight_scale": T((1, shape[-1]))} if dtype == INT32 else {}
        for extra in ({}, {"dst_type": 1}, {"activate_dim": -1}, {"swiglu_mode": 1, "clamp_limit": 5.0}):
            yield Case(op, (T(shape, dtype),), kwargs | {"quant_mode": mode, "activate_left": True} | extra)
    yield Case(op, (T((4, 6)),), {"activate_dim": 0}, {0: "w", 1: "w"})
    for m, n in itertools.product([0, 1, 9], [2, 16]):
        tensors = (T((m, 8), INT8), T((3, 8, n), INT8), T((3,), INT64), T((3, n)), T((m,)))
        yield Case("npu_grouped_matmul_swiglu_quant", tensors)
        x, w, groups, ws, xs = tensors
        for extra in ({}, {"group_list_type": 1}, {"dequant_dtype": 15}, {"smooth_scale": T((3, n // 2))}):
            yield Case("npu_grouped_matmul_swiglu_quant_v2", (x, [w], [ws], xs, groups), extra)
    yield Case("npu_grouped_matmul_swiglu_quant_v2", (x, [w, w], [ws], xs, groups))
    yield Case("npu_grouped_matmul_swiglu_quant_v2", (x, [w], [ws, ws], xs, groups))
    for m, output_bs, w_dtype in itertools.product([1, 12], [0, 4], [INT8, INT32]):
        args = (T((m, 8), INT8), T((3, 8, 16), w_dtype), T((3,), INT64))
        kwargs = {"scale": T((3, 16)), "row_index": T((m,), INT64), "output_bs": output_bs}
        yield Case("npu_grouped_matmul_finalize_routing", args, kwargs)
        logits = {"shared_input": T((2, 16), BF16), "logit": T((m,)), "pertoken_scale": T((m,))}
        yield Case("npu_grouped_matmul_finalize_routing", args, kwargs | logits | {"dtype": "float32"})
    op = "npu_dynamic_quant"
    for shape, mode in itertools.product(
        [(4, 8), (2, 3, 16), (0, 8)], ["pertoken", "pertensor", "perchannel"]
    ):
        for dtype, extra in itertools.product(
            [BF16, FP32], [{}, {"dst_type": 1}, {"smooth_scales": T(shape[-1:])}]
        ):
            yield Case(op, (T(shape, dtype),), {"quant_mode": mode} | extra)
    yield Case(op, (T((4, 24), FP16),), {"dst_type": 16})
    yield Case(op, (T((4, 20), FP16),), {"dst_type": 16})


# ---- routing


def _gates() -> Iterator[Case]:
    for n, k, dtype in itertools.product([0, 1, 7], [1, 4], [BF16, FP16, FP32]):
        x = T((n, 16), dtype)
        for extra in ({}, {"bias": T((16,), dtype)}, {"out_flag": True, "norm_type": 1}):
            yield Case("npu_moe_gating_top_k", (x, k), extra)
        yield Case(
            "npu_moe_gating_top_k", (x, k), {"input_ids": T((n,), INT64), "tid2eid": T((99, k), INT32)}
        )
        yield Case("npu_moe_gating_top_k", (x, k), {"input_ids": T((n,), INT64)})
        for shape in ((n, 16), (2, n, 16)):
            yield Case("npu_moe_gating_top_k_softmax", (T(shape, dtype), None, k))
            yield Case("npu_moe_gating_top_k_softmax", (T(shape, dtype), T(shape[:-1], BOOL), k))
            for renorm in (0, 1):
                kwargs = {"k": k, "renorm": renorm, "finished": T(shape[:-1], BOOL)}
                yield Case("npu_moe_gating_top_k_softmax_v2", (T(shape, dtype),), kwargs)
        for renorm in (0, 1):
            kwargs = {"k": k, "renorm": renorm, "output_softmax": True}
            yield Case("npu_moe_gating_top_k_softmax_v2", (x,), kwargs)
    yield Case("npu_moe_gating_top_k", (T((2, 3, 16)), 2))
    yield Case("npu_moe_gating_top_k_softmax", (T((16,)), None, 2))


def _init_routings() -> Iterator[Case]:
    for n, k, active, dtype in itertools.product([0, 7], [1, 4], [0, 3, 99], [BF16, FP32]):
        ids = T((n, k), INT32)
        yield Case("npu_moe_init_routing", (T((n, H), dtype), ids, ids, active))
    op = "npu_moe_init_routing_v2"
    for sizes in product(
        n=[1, 7], k=[1, 4], active_num=[-1, 0, 5, 99], tokens=[None, 0, 1, 2], mode=[-1, 0, 1]
    ):
        n, k, tokens, mode = (sizes[name] for name in ("n", "k", "tokens", "mode"))
        kwargs = given(active_num=sizes["active_num"], expert_num=16, quant_mode=mode)
        kwargs |= given(expert_tokens_num_type=tokens, expert_tokens_num_flag=tokens is not None)
        scale = {-1: None, 0: T((1,)), 1: T((1, H))}[mode]
        known = ({2: "t"} if tokens is None else {}) | ({3: "u"} if mode == 0 else {})
        yield Case(op, (T((n, H), BF16), T((n, k), INT32)), kwargs, known)
        ranged = kwargs | given(active_expert_range=[2, 9], row_idx_type=1, scale=scale)
        yield Case(op, (T((n, H), FP32), T((n, k), INT32)), ranged, known)
    for mode, flag in itertools.product([-1, 0, 1], [False, True]):
        kwargs = {"drop_pad_mode": 1, "expert_num": 16, "expert_capacity": 3, "expert_tokens_num_type": 1}
        kwargs |= {"quant_mode": mode, "expert_tokens_num_flag": flag}
        known = ({} if flag else {2: "t"}) | ({3: "u"} if mode == 0 else {})
        yield Case(op, (T((7, H), FP16), T((7, 2), INT32)), kwargs, known)
    yield Case(op, (T((7, H), FP32), T((7, 2), INT32)), {"quant_mode": 13, "expert_num": 16}, {2: "t"})
    wrong: list[dict[str, Any]] = [
        {"active_expert_range": [9, 2]},
        {"drop_pad_mode": 2},
        {"quant_mode": 99},
        {"row_idx_type": 5},
    ]
    for kwargs in wrong:
        yield Case(op, (T((7, H)), T((7, 2), INT32)), {"expert_num": 16} | kwargs)
    yield Case(op, (T((6, H)), T((7, 2), INT32)), {"expert_num": 16})


def _moves() -> Iterator[Case]:
    for rows, experts in itertools.product([0, 9], [1, 16]):
        yield Case("npu_moe_compute_expert_tokens", (T((rows,), INT32), experts))
    for n, k, out, dtype in itertools.product([0, 1, 7], [0, 1, 4], [None, 0, 3, 99, -2], [BF16, FP32]):
        indices = T((n, k), INT64) if k else T((n,), INT32)
        if out == -2 and n * max(k, 1) < 2:
            continue  # a size below 0
        yield Case("npu_moe_token_permute", (T((n, H), dtype), indices), given(num_out_tokens=out))
    for n, k, dtype in itertools.product([0, 1, 7], [1, 4], [BF16, FP32]):
        rows, places = T((n * k, H), dtype), T((n * k,), INT32)
        yield Case("npu_moe_token_unpermute", (rows, places), {"probs": T((n, k))})
        yield Case("npu_moe_token_unpermute", (rows, places))
        for mode, scaled in itertools.product([0, 1, 2, 3], [False, True]):
            moved = T((4, 5, H), dtype) if mode % 2 else rows
            scales, topk = (T((n, k), dtype), 1) if scaled else (None, k)
            skip = T((n, H), dtype)
            args = (moved, skip, skip, T((16, H), dtype), scales, places, T((n, k), INT32), mode, topk)
            yield Case("npu_moe_finalize_routing", args)
            yield Case(
                "npu_moe_finalize_routing", (moved, None, None, None, scales, places, None, mode, topk)
            )
    for rows, counts, dtype in itertools.product([0, 20], [INT32, INT64], [BF16, INT8]):
        tokens, table = T((rows, H), dtype), T((4, 8), counts)
        yield Case("npu_moe_re_routing", (tokens, table))
        yield Case("npu_moe_re_routing", (tokens, table), {"per_token_scales": T((rows,))})


def matrix() -> list[Case]:
    """Every call on which torch_npu and we are compared."""
    versions = ("", "_v2")
    parts = [_family(), _experts(), _gates(), _init_routings(), _moves()]
    parts += [_dispatches(version) for version in versions]
    parts += [_combines(version) for version in (*versions, "_add_rms_norm")]
    return [case for part in parts for case in part]


# ---- where torch_npu contradicts itself: ours follows its C++


def expert_tokens(experts: int) -> Case:
    """C++ keeps the active experts of its first call."""
    kwargs = {"expert_num": experts, "expert_tokens_num_flag": True}
    return Case("npu_moe_init_routing_v2", (T((7, 8)), T((7, 2), INT32)), kwargs)


Answer = str | dict[int, list[Any]] | list[list[Any]]  # part of an error; some outputs; all of them


@dataclass(frozen=True)
class Probe:
    """A call that shows a contradiction: what its Meta kernel answers, ours, its C++ (None: as ours)."""

    why: str
    case: Case
    theirs: Answer
    ours: Answer
    cpp: Answer | None = None


_SHARED, _LIST, _ROUTED = T((6, 64), BF16), "npu_grouped_matmul.List", (T((7, 8)), T((7, 2), INT32))
_SCALES = "dispatch: Meta gives expand_scales (0,) without expert_scales, C++ (A,)"
_INT32 = "combine: Meta keeps int32, C++ returns a 16-bit float"
_RANK = "dispatch v1: Meta and C++ take a rank outside of the group"
_GROUP_TYPE = "npu_grouped_matmul: the default group_type None is refused by Meta, beside a group_list by C++"
_GROUPS = "npu_grouped_matmul, split_item 0, one x, a group list: one output an x by Meta, one a group by C++"
_QUANT = {"active_expert_range": [0, 4], "quant_mode": 0, "scale": T((1,)), "offset": T((1,))}
_TWO = ([T((4, 8))], [T((8, 10))] * 2)
_STACKED = ([T((4, 8))], [T((2, 8, 10))])

PROBES = {
    "a": Probe(_SCALES, dispatch(), {6: [FP32, 0]}, {6: [FP32, 96]}),
    "a_v2": Probe(_SCALES, dispatch("_v2"), {6: [FP32, 0]}, {6: [FP32, 96]}),
    "b": Probe(
        "combine v1: Meta lacks shared_expert_x, which the schema has",
        combine(shared_expert_x=_SHARED),
        "unexpected keyword argument 'shared_expert_x'",
        [[BF16, 6, 64]],
    ),
    "c": Probe(_INT32, combine(dtype=INT32), [[INT32, 6, 64]], [[BF16, 6, 64]]),
    "c_fp16": Probe(_INT32, combine(dtype=INT32, out_dtype=1), [[INT32, 6, 64]], [[FP16, 6, 64]]),
    "c_v2": Probe(_INT32, combine("_v2", dtype=INT32), [[INT32, 6, 64]], [[BF16, 6, 64]]),
    "d": Probe(
        "dispatch v2 with scales and quant_mode 0: Meta gives dynamic_scales (A, H), C++ (A,)",
        dispatch("_v2", scales=T((16, 64))),
        {1: [FP32, 96, 64]},
        {1: [FP32, 96]},
    ),
    "e": Probe(
        "dispatch v2 with expert_shard_type 1: Meta gives no rows and one expert, C++ the usual",
        dispatch("_v2", experts=24, expert_shard_type=1),
        {0: [BF16, 0, 64], 3: [INT64, 1], 4: [INT32, 8]},
        {0: [BF16, 6 * 8 * min(3, 4), 64], 3: [INT64, 24 // 8], 4: [INT32, 24]},
    ),
    "f": Probe(
        "dispatch v2 with expert_scales: Meta asks the device for its SoC",
        dispatch("_v2", expert_scales=T((6, 4))),
        "RuntimeError: a device was asked",
        {4: [INT32, 8 * 2 + 48 * 2 * 4 * 1]},
    ),
    "g": Probe(
        _RANK,
        dispatch(world=16, rank=99),
        {0: [BF16, 96, 64]},
        "ep_rank_id is 99, it must be in 0..15",
        {0: [BF16, 96, 64]},
    ),
    "g_v2": Probe(
        "dispatch v2 does not",
        dispatch("_v2", world=16, rank=99),
        "ep_rank_id should be in",
        "ep_rank_id is 99, it must be in 0..15",
        "ep_rank_id",
    ),
    "k": Probe(
        "dispatch v2: documents say assist_info A*128, both give max(BS*K, A*128); here A is 0",
        dispatch("_v2", experts=7),
        {0: [BF16, 0, 64], 2: [INT32, 24]},
        {0: [BF16, 0, 64], 2: [INT32, 24]},
    ),
    "n": Probe(
        _GROUP_TYPE,
        Case("npu_grouped_matmul", ([T((4, 8))], [T((8, 10))])),
        "group_type only supports -1, 0 and 2, but got None",
        [[FP32, 4, 10]],
        "Requires manual passing group_type",
    ),
    "n_tensor": Probe(
        _GROUP_TYPE,
        Case("npu_grouped_matmul", _STACKED, {"group_list": T((2,), INT64)}),
        "group_type only supports -1, 0 and 2, but got None",
        "group_type is None",
        "Requires manual passing group_type",
    ),
    "p": Probe(
        _GROUPS,
        Case(_LIST, _TWO, {"group_list": [1, 4]}),
        [[FP32, 4, 10]],
        [[FP32, 1, 10], [FP32, 3, 10]],
    ),
    "p_tensor": Probe(
        _GROUPS,
        Case("npu_grouped_matmul", _STACKED, {"group_list": T((2,), INT64), "group_type": 0}),
        [[FP32, 4, 10]],
        "sizes would depend on its values",
        {},
    ),
    "q": Probe(
        "npu_moe_gating_top_k_softmax_v2 of 3-D x: Meta gives a 2-D softmax, C++ one of x's shape",
        Case("npu_moe_gating_top_k_softmax_v2", (T((2, 3, 16), FP16),), {"output_softmax": True}),
        {2: [FP32, 2, 3]},
        {2: [FP32, 2, 3, 16]},
    ),
    "r": Probe(
        "npu_moe_init_routing_v2 with scale and quant_mode -1: the Meta kernel prints x_dtype",
        Case("npu_moe_init_routing_v2", _ROUTED, {"scale": T((7,)), "expert_num": 4}),
        {0: [FP32, 14, 8]},
        {0: [FP32, 14, 8]},
    ),
    "s": Probe(
        "npu_grouped_matmul.List: the schema's ScalarType output_dtype is refused by the Meta kernel",
        Case(_LIST, _TWO, {"group_list": [1, 4], "split_item": 3, "output_dtype": FP32}),
        "is not supported for now",
        [[FP32, 4, 10]],
    ),
    "t": Probe(
        "npu_moe_init_routing_v2 without expert_tokens_num_flag: expert tokens are () by Meta, (E,) by C++",
        Case("npu_moe_init_routing_v2", _ROUTED, {"expert_num": 4}),
        {2: [INT64]},
        {2: [INT64, 4]},
        {2: [INT64, 16]},  # the experts of its first call, see expert_tokens
    ),
    "u": Probe(
        "npu_moe_init_routing_v2 with quant_mode 0: Meta gives expanded_scale (), C++ one a row",
        Case("npu_moe_init_routing_v2", _ROUTED, _QUANT),
        {3: [FP32]},
        {3: [FP32, 14]},
    ),
    "w": Probe(
        "npu_dequant_swiglu_quant: Meta halves activate_dim, C++ the last dimension",
        Case("npu_dequant_swiglu_quant", (T((4, 6)),), {"activate_dim": 0}),
        [[INT8, 2, 6], [FP32, 2]],
        [[INT8, 4, 3], [FP32, 4]],
    ),
}
