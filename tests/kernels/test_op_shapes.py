"""What the ops allocate on Meta and Fake tensors: torch_npu's sizes, also symbolic, and what CPU gets."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch_calls import OPS, VARIANTS, Variant, overload, run

import ascend_moe
from ascend_moe import comm
from ascend_moe.errors import ArgumentError

BATCH, HIDDEN, TOPK, WORLD, EXPERTS = 6, 64, 4, 8, 16
BF16, FP16, FP32, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.int8
I32, I64 = torch.int32, torch.int64


def no_communicator() -> Any:
    """Within it, looking a communicator up is a failure."""
    return mock.patch.object(comm, "lookup", side_effect=AssertionError("a communicator was looked up"))


def meta(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def dispatch(
    version: str = "",
    *,
    batch: int = BATCH,
    topk: int = TOPK,
    world: int = WORLD,
    rank: int = 0,
    experts: int = EXPERTS,
    dtype: torch.dtype = BF16,
    **kwargs: Any,
) -> list[Any]:
    """Shapes of dispatch's outputs on Meta tensors, the dtype of expand_x in front."""
    for name, shape in {
        "scales": (experts, HIDDEN),
        "expert_scales": (batch, topk),
        "elastic_info": (9,),
    }.items():
        if kwargs.get(name):
            kwargs[name] = meta(*shape)
    args = meta(batch, HIDDEN, dtype=dtype), meta(batch, topk, dtype=I32), "nobody", world, rank, experts
    with no_communicator():
        outputs = overload(f"npu_moe_distribute_dispatch{version}")(*args, **kwargs)
    assert all(out.device.type == "meta" and out.is_contiguous() for out in outputs)
    assert [out.dtype for out in outputs[1:]] == [FP32, I32, I64, I32, I32, FP32]
    return [outputs[0].dtype, *(tuple(out.shape) for out in outputs)]


def sizes(
    dtype: torch.dtype, rows: int, index: int, local: int, counts: int, tp: int = 0, all_rows: int = 0
) -> list[Any]:
    """The seven shapes from their sizes; ``all_rows`` counts those of the other TP rank too."""
    both = all_rows or rows
    return [dtype, (both, HIDDEN), (both,), (index,), (local,), (counts,), (tp,), (rows,)]


SHARED = {"shared_expert_rank_num": 2, "experts": 12}
SHARED_REST = {"shared_expert_rank_num": 3, "experts": 15, "batch": 5}
# G = 48, L = 2, A = 96, BS*K = 24 where nothing else is said.
V1_ROWS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "plain": ({}, sizes(BF16, 96, 24, 2, 16)),
    "fp16": ({"dtype": FP16}, sizes(FP16, 96, 24, 2, 16)),
    "fp32": ({"dtype": FP32}, sizes(FP32, 96, 24, 2, 16)),
    "a dtype no kernel knows": ({"dtype": torch.float64}, sizes(torch.float64, 96, 24, 2, 16)),
    "few k": ({"topk": 1}, sizes(BF16, 48, 6, 2, 16)),
    "global_bs": ({"global_bs": 80}, sizes(BF16, 160, 24, 2, 16)),
    "no token here": ({"batch": 0, "global_bs": 80}, sizes(BF16, 160, 0, 2, 16)),
    "no token anywhere": ({"batch": 0}, sizes(BF16, 0, 0, 2, 16)),
    "fewer experts than ranks": ({"experts": 7}, sizes(BF16, 0, 24, 0, 0)),
    "int8": ({"quant_mode": 2}, sizes(INT8, 96, 24, 2, 16)),
    "scales alone make int8": ({"scales": True}, sizes(INT8, 96, 24, 2, 16)),
    "tp 1": ({"tp_world_size": 1}, sizes(BF16, 96, 24, 2, 16, tp=1)),
    "tp 2": ({"tp_world_size": 2}, sizes(BF16, 96, 24, 2, 32, tp=2, all_rows=192)),
    "expert_scales": ({"expert_scales": True}, sizes(BF16, 96, 24, 2, 16 + 2 * 48 * 4 * 1)),
    "expert_scales, global_bs": ({"expert_scales": True, "global_bs": 80}, sizes(BF16, 160, 24, 2, 656)),
    "expert_scales, 2 servers": ({"expert_scales": True, "world": 16}, sizes(BF16, 96, 24, 1, 1552)),
    "expert_scales, under a server": ({"expert_scales": True, "world": 4}, sizes(BF16, 96, 24, 4, 16)),
    "shared rank": (SHARED, sizes(BF16, 24, 24, 1, 8)),
    "beside shared ranks": ({**SHARED, "rank": 2}, sizes(BF16, 96, 24, 2, 16)),
    "shared rank with a rest": (SHARED_REST, sizes(BF16, 40 // 3, 20, 1, 8)),
    "shared rank, global_bs": ({**SHARED, "global_bs": 80}, sizes(BF16, 40, 24, 1, 8)),
    "shared at the end": ({**SHARED, "rank": 6, "expert_shard_type": 1}, sizes(BF16, 24, 24, 1, 8)),
    "before them": ({**SHARED, "rank": 5, "expert_shard_type": 1}, sizes(BF16, 96, 24, 2, 16)),
}
V2_ROWS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "plain": ({}, sizes(BF16, 96, 96 * 128, 2, 16)),
    "few k": ({"topk": 1}, sizes(BF16, 48, 48 * 128, 2, 16)),
    "global_bs": ({"global_bs": 80}, sizes(BF16, 160, 160 * 128, 2, 16)),
    "no token here": ({"batch": 0, "global_bs": 80}, sizes(BF16, 160, 160 * 128, 2, 16)),
    "fewer experts than ranks": ({"experts": 7}, sizes(BF16, 0, 24, 0, 0)),
    "int8": ({"quant_mode": 2}, sizes(INT8, 96, 96 * 128, 2, 16)),
    "int8 with scales": ({"quant_mode": 2, "scales": True}, sizes(INT8, 96, 96 * 128, 2, 16)),
    "scales alone change nothing": ({"scales": True}, sizes(BF16, 96, 96 * 128, 2, 16)),
    "tp 1": ({"tp_world_size": 1}, sizes(BF16, 96, 96 * 128, 2, 16, tp=1)),
    "tp 2": ({"tp_world_size": 2}, sizes(BF16, 96, 96 * 128, 2, 32, tp=2, all_rows=192)),
    "expert_scales": ({"expert_scales": True}, sizes(BF16, 96, 96 * 128, 2, 16 + 2 * 48 * 4 * 1)),
    "shared rank": (SHARED, sizes(BF16, 6 * 4, 24 * 128, 1, 8)),
    "two shared experts": (
        {"shared_expert_rank_num": 4, "shared_expert_num": 2, "experts": 12, "rank": 3},
        sizes(BF16, 6 * 4, 24 * 128, 1, 8),
    ),
    "shared rank with a rest": (SHARED_REST, sizes(BF16, 5 * 3, 15 * 128, 1, 8)),
    "shared rank, global_bs": ({**SHARED, "global_bs": 80}, sizes(BF16, 10 * 4, 40 * 128, 1, 8)),
    "elastic shared rank": ({**SHARED, "elastic_info": True}, sizes(BF16, 96, 96 * 128, 2, 16)),
    "elastic, shared rows prevail": (
        {"shared_expert_rank_num": 2, "experts": 3, "rank": 5, "elastic_info": True},
        sizes(BF16, 6 * 4, 24 * 128, 1, 8),
    ),
    "elastic, no shared rank": ({"elastic_info": True}, sizes(BF16, 96, 96 * 128, 2, 16)),
    # Shard type 1 is a MoE rank, though torch_npu's own Meta says otherwise.
    "first of type 1": ({**SHARED, "rank": 0, "expert_shard_type": 1}, sizes(BF16, 96, 96 * 128, 2, 16)),
    "last of type 1": ({**SHARED, "rank": 7, "expert_shard_type": 1}, sizes(BF16, 96, 96 * 128, 2, 16)),
    "y_dtype a torch.dtype": ({"y_dtype": FP16}, sizes(FP16, 96, 96 * 128, 2, 16)),
    "y_dtype torch_npu's int8": ({"quant_mode": 2, "y_dtype": 258}, sizes(INT8, 96, 96 * 128, 2, 16)),
    "y_dtype over quant_mode": ({"quant_mode": 2, "y_dtype": BF16}, sizes(BF16, 96, 96 * 128, 2, 16)),
}


@pytest.mark.parametrize("row", [("", row) for row in V1_ROWS] + [("_v2", row) for row in V2_ROWS], ids=str)
def test_dispatch_allocates_as_torch_npu(row: tuple[str, str]) -> None:
    """Where torch_npu's own Meta and its C++ disagree, ours follows the C++; no device is asked."""
    version, name = row
    kwargs, expected = (V2_ROWS if version else V1_ROWS)[name]
    assert dispatch(version, **kwargs) == expected
    assert "torch_npu" not in sys.modules


def combine(version: str = "", *, dtype: torch.dtype = BF16, **kwargs: Any) -> tuple[Any, ...]:
    index = {"": 24, "_v2": 96 * 128}[version]
    tensors = meta(96, HIDDEN, dtype=dtype), meta(BATCH, TOPK, dtype=I32), meta(index, dtype=I32)
    args = *tensors, meta(16, dtype=I32), meta(BATCH, TOPK), "nobody", WORLD, 0, EXPERTS
    with no_communicator():
        out = overload(f"npu_moe_distribute_combine{version}")(*args, **kwargs)
    assert out.device.type == "meta"
    return out.dtype, *out.shape


@pytest.mark.parametrize("version", ["", "_v2"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_combine_allocates_as_torch_npu(version: str, dtype: torch.dtype) -> None:
    assert combine(version, dtype=dtype) == (dtype, BATCH, HIDDEN)
    shared = meta(BATCH, HIDDEN, dtype=dtype)
    assert combine(version, dtype=dtype, shared_expert_x=shared, tp_world_size=2) == (dtype, BATCH, HIDDEN)


def test_combine_v1_refuses_to_drop_shared_expert_x() -> None:
    with ascend_moe.LocalCluster(1) as cluster:

        def with_shared(rank: int, group_ep: str, variant: Variant) -> torch.Tensor:
            args, kwargs = variant.dispatch(rank, 1, group_ep)
            dispatched = overload(variant.dispatch_name)(*args, **kwargs)
            args, kwargs = variant.combine(rank, 1, group_ep, dispatched)
            plain = overload(variant.combine_name)(*args, **kwargs)
            shared = torch.full_like(plain, 0.5)
            return overload(variant.combine_name)(*args, **kwargs, shared_expert_x=shared) - plain

        v1, v2 = Variant("v1", dtype=FP32), Variant("v2", "_v2", dtype=FP32)
        with pytest.raises(ArgumentError, match="shared_expert_x is not added by npu_moe_distribute_combine"):
            cluster.run(lambda rank, group_ep: with_shared(rank, group_ep, v1))
        added = cluster.run(lambda rank, group_ep: with_shared(rank, group_ep, v2))[0]
        torch.testing.assert_close(added, torch.full_like(added, 0.5))


def test_combine_of_int32_gives_a_float_type() -> None:
    assert combine(dtype=I32)[0] == BF16
    assert combine(dtype=I32, out_dtype=1)[0] == FP16
    assert combine("_v2", dtype=I32)[0] == BF16
    assert combine(dtype=BF16, out_dtype=1)[0] == BF16


# ---- what has no size


@pytest.mark.parametrize(
    ("arguments", "argument", "text"),
    [
        ({"world": 0}, "ep_world_size", ""),
        ({"world": -3}, "ep_world_size", ""),
        ({"rank": -1}, "ep_rank_id", ""),
        ({"world": 16, "rank": 99}, "ep_rank_id", r"ep_rank_id is 99, it must be in 0\.\.15"),
        ({"version": "_v2", "world": 16, "rank": 99}, "ep_rank_id", "ep_rank_id is 99"),
        ({"shared_expert_rank_num": 8}, "shared_expert_rank_num", ""),
        ({"shared_expert_rank_num": -1}, "shared_expert_rank_num", ""),
        ({"version": "_v2", "y_dtype": 290}, "y_dtype", "y_dtype is the number 290"),
    ],
)
def test_meta_names_what_has_no_size(arguments: dict[str, Any], argument: str, text: str) -> None:
    with pytest.raises(ArgumentError, match=text) as caught:
        dispatch(**arguments)
    assert caught.value.argument == argument
    assert dispatch() == V1_ROWS["plain"][1]


def test_meta_names_wrong_dimensions() -> None:
    flat, ids = meta(6), meta(6, 4, dtype=I32)
    with pytest.raises(ArgumentError, match="x has 1 dimensions, it must have 2"):
        OPS.npu_moe_distribute_dispatch(flat, ids, "nobody", 8, 0, 16)
    with pytest.raises(ArgumentError, match="expert_ids has 1 dimensions, it must have 2"):
        OPS.npu_moe_distribute_dispatch_v2(meta(6, 64), meta(6, dtype=I32), "nobody", 8, 0, 16)
    with pytest.raises(ArgumentError, match="expand_x has 1 dimensions, it must have 2"):
        OPS.npu_moe_distribute_combine(flat, ids, flat, flat, flat, "nobody", 8, 0, 16)


# ---- the same as what the kernels get


def described(outputs: Any) -> list[Any]:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [(out.dtype, tuple(out.shape), out.stride()) for out in outputs]


MATRIX = [
    *VARIANTS,
    *(replace(VARIANTS[0], name=f"{dtype} tp 1", dtype=dtype, tp=1) for dtype in (FP16, FP32)),
    *(
        replace(VARIANTS[1], name=f"{dtype} v2", dtype=dtype, mask="1-D", extras=True)
        for dtype in (FP16, FP32)
    ),
    Variant("int8", quant_mode=2),
    Variant("int8 fp32 v2", "_v2", dtype=FP32, quant_mode=2, scales=True),
]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("variant", MATRIX, ids=lambda variant: variant.name)
def test_cpu_outputs_are_what_meta_says(variant: Variant, world: int) -> None:
    if variant.unequal and world == 1:
        variant = replace(variant, unequal=False)

    def on_meta(value: Any) -> Any:
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    def each(rank: int, group_ep: str) -> None:
        dispatched, combined = run(variant, rank, world, group_ep)
        calls = [
            (variant.dispatch_name, variant.dispatch(rank, world, "nobody"), dispatched),
            (variant.combine_name, variant.combine(rank, world, "nobody", dispatched), combined),
        ]
        for name, (args, kwargs), real in calls:
            moved = {key: on_meta(value) for key, value in kwargs.items()}
            assert described(overload(name)(*map(on_meta, args), **moved)) == described(real)
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fake_args = [mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for v in args]
                fake = overload(name)(*fake_args, **kwargs)
            assert described(fake) == described(real)

    with ascend_moe.LocalCluster(world) as cluster:
        cluster.run(each)


# ---- symbolic sizes


@dataclass
class Trace:
    """A function of (x, expert_ids) with one op, traced with symbolic sizes."""

    outputs: list[torch.Tensor]
    sizes: tuple[Any, Any]  # expressions of BS and H
    guarded: set[Any]  # symbols that the trace rests on

    def shapes(self, batch: int, hidden: int) -> list[tuple[int, ...]]:
        values = dict(zip(self.sizes, (batch, hidden), strict=True))
        return [
            tuple(n if isinstance(n, int) else int(n.node.expr.subs(values)) for n in out.shape)
            for out in self.outputs
        ]


def trace(fn: Callable[[torch.Tensor, torch.Tensor], Any]) -> Trace:
    x, ids = torch.zeros(5, 48), torch.zeros(5, 3, dtype=I32)
    with no_communicator():
        graph = make_fx(fn, tracing_mode="symbolic")(x, ids)
    placeholder = next(node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder")
    batch, hidden = (size.node.expr for size in placeholder.shape)
    op = next(n for n in graph.graph.nodes if n.op == "call_function" and "npu_moe" in str(n.target))
    value = op.meta["val"]
    guarded = {symbol for guard in graph.shape_env.guards for symbol in guard.expr.free_symbols}
    return Trace(list(value) if isinstance(value, tuple) else [value], (batch, hidden), guarded)


@pytest.mark.parametrize("version", ["", "_v2"])
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"quant_mode": 2},
        {"global_bs": 8 * 64},
        {"tp_world_size": 2},
        {"shared_expert_rank_num": 2},
        {"shared_expert_rank_num": 2, "ep_rank_id": 5},
    ],
    ids=str,
)
def test_symbolic_batch_and_hidden_stay_symbolic(version: str, kwargs: dict[str, Any]) -> None:
    op = overload(f"npu_moe_distribute_dispatch{version}")
    kwargs = {"group_ep": "nobody", "ep_world_size": 8, "ep_rank_id": 0, "moe_expert_num": 24, **kwargs}
    traced = trace(lambda x, ids: op(x, ids, expert_scales=ids.float(), **kwargs))
    assert not traced.guarded & set(traced.sizes)
    for bs, hidden in [(0, 16), (1, 64), (5, 48), (11, 8), (64, 7168)]:
        concrete = op(meta(bs, hidden), meta(bs, 3, dtype=I32), expert_scales=meta(bs, 3), **kwargs)
        assert traced.shapes(bs, hidden) == [tuple(out.shape) for out in concrete]


def test_batch_is_specialised_where_the_rows_have_a_rest() -> None:
    def shared(ranks: int) -> Trace:
        op = OPS.npu_moe_distribute_dispatch
        return trace(lambda x, ids: op(x, ids, "nobody", 8, 0, 40, shared_expert_rank_num=ranks))

    affine, rest = shared(4), shared(3)
    assert affine.sizes[0] not in affine.guarded
    assert rest.sizes[0] == 5  # a constant of this trace: another BS is traced again
    assert affine.shapes(5, 48)[0] == (10, 48)
    assert rest.shapes(5, 48)[0] == (40 // 3, 48)


@pytest.mark.parametrize("version", ["", "_v2"])
def test_combine_stays_symbolic(version: str) -> None:
    op = overload(f"npu_moe_distribute_combine{version}")

    def call(x: torch.Tensor, ids: torch.Tensor) -> Any:
        index = ids.flatten()
        return op(x, ids, index, index, ids.float(), "nobody", 8, 0, 24)

    traced = trace(call)
    assert not traced.guarded & set(traced.sizes)
    assert traced.shapes(9, 16) == [(9, 16)]


def test_one_compiled_graph_serves_every_batch_and_hidden() -> None:
    counter = torch._dynamo.testing.CompileCounter()

    def each(rank: int, group_ep: str) -> None:
        place = (group_ep, 1, rank, 4)

        def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            rows = ascend_moe.npu_moe_distribute_dispatch_v2(x, ids, *place, quant_mode=0)
            sent = rows[0] * 2, ids, rows[2], rows[4], weights
            return ascend_moe.npu_moe_distribute_combine_v2(*sent, *place, shared_expert_x=x)

        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
        for bs, hidden in [(5, 48), (3, 48), (9, 64), (2, 16)]:
            ids = torch.arange(bs * 2, dtype=I32).reshape(bs, 2) % 4
            args = torch.randn(bs, hidden), ids, torch.rand(bs, 2)
            assert torch.equal(compiled(*args), layer(*args))

    torch._dynamo.reset()
    with ascend_moe.LocalCluster(1) as cluster:
        cluster.run(each)
    assert counter.frame_count == 1
