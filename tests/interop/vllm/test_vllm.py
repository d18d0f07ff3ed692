"""vLLM's modular kernel: every pair against the three calls and MoELayer, its contracts; `ascend-moe vllm-pairs`."""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import commands
import gloo_ranks
import pytest
import torch
import torch.distributed as dist
from op_runs import Clusters
from routed_tokens import randn, routed

import ascend_moe
from ascend_moe import MoEConfig, MoELayer
from ascend_moe.dispatchers import WindowDispatcher
from ascend_moe.errors import ArgumentError, ConfigMismatch, RoutingOverflow
from ascend_moe.experts import grouped_mlp, npu_dynamic_quant, quantize_weight
from ascend_moe.interop import vllm
from ascend_moe.interop.fused_moe import fused_experts
from ascend_moe.interop.vllm import (
    bases,
    make_experts,
    make_prepare_finalize,
    prepare_finalize,
    trial,
    weight_and_reduce,
)
from ascend_moe.interop.vllm import experts as experts_module

FP32, BF16 = torch.float32, torch.bfloat16
E, K, H, F = 8, 3, 64, 32
KINDS = ["mc2", "alltoall", "allgather", "batched"]
each_kind = pytest.mark.parametrize("kind", KINDS)
windows = pytest.mark.parametrize("kind", ["mc2", "batched"])


class Part(NamedTuple):
    """One rank's tokens and experts."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    w1: torch.Tensor  # (L, 2F, H)
    w2: torch.Tensor
    config: Any  # quantization

    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.w1, self.w2, self.weights, self.ids


def part_of(
    rank: int,
    world: int,
    tokens: int,
    ids: str = "random",
    dtype: torch.dtype = BF16,
    w8a8: bool = False,
    topk: int = K,
) -> Part:
    w1, w2 = randn(E, 2 * F, H, seed=3) / H**0.5, randn(E, H, F, seed=4) / F**0.5
    own = slice(rank * E // world, (rank + 1) * E // world)
    w1, w2, config = w1[own].to(dtype), w2[own].to(dtype), None
    if w8a8:
        (w1, s1), (w2, s2) = (quantize_weight(weight.transpose(1, 2)) for weight in (w1, w2))
        w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
        config = vllm.int8_w8a8_moe_quant_config(s1.unsqueeze(2), s2)
    x, weights = randn(tokens, H, seed=20 + rank).to(dtype), randn(tokens, topk, seed=40 + rank).softmax(1)
    return Part(x, routed(tokens, E, topk, ids), weights, w1, w2, config)


def three_calls(part: Part, rank: int, world: int, group: str, most: int) -> torch.Tensor:
    """The layer by dispatch, grouped_mlp and combine."""
    dispatcher = WindowDispatcher(group, world, rank, E)
    scales = {} if part.config is None else {"quant_mode": 2}
    sent = dispatcher.dispatch(part.x, part.ids, global_bs=world * max(1, most), **scales)
    given: dict[str, Any] = {}
    if part.config is not None:
        given = {"dynamic_scales": sent.dynamic_scales, "output_dtype": part.x.dtype}
        given |= {"w_gate_up_scale": part.config.w1_scale.squeeze(-1), "w_down_scale": part.config.w2_scale}
    mlp = (part.w1.transpose(1, 2), part.w2.transpose(1, 2), sent.expert_token_nums)
    return dispatcher.combine(grouped_mlp(sent.expand_x, *mlp, **given), sent, part.weights)


def pair(kind: str, rank: int, world: int, group: str, config: Any = None, **more: Any) -> tuple[Any, Any]:
    """Both parts, with few places so that batched rows stay small."""
    way = make_prepare_finalize(None, None, group, rank, world, E, kind, **{"max_num_tokens": 16} | more)
    return way, make_experts(None, None, None, config, E // world, "batched" if kind == "batched" else "standard")


def expert_map(rank: int, world: int) -> torch.Tensor:
    made, local = torch.full((E,), -1, dtype=torch.int32), E // world
    made[rank * local : (rank + 1) * local] = torch.arange(local, dtype=torch.int32)
    return made


# ---- every pair


@each_kind
@pytest.mark.parametrize("dtype, w8a8", [(BF16, False), (BF16, True), (FP32, False)], ids=["bf16", "w8a8", "fp32"])
@pytest.mark.parametrize(
    "counts, ids",
    [
        *(([5], ids) for ids in ("random", "one expert", "-1")),
        ([5, 0], "random"),
        ([3, 7], "an expert without tokens"),
        ([3, 0, 5, 1], "random"),
        ([3, 0, 5, 1], "one expert"),
        ([0, 0], "random"),
    ],
    ids=str,
)
def test_a_pair_equals_the_three_calls(
    clusters: Clusters, counts: list[int], ids: str, dtype: torch.dtype, w8a8: bool, kind: str
) -> None:
    world = len(counts)

    def run(rank: int, group: str) -> None:
        part = part_of(rank, world, counts[rank], ids, dtype, w8a8, topk=1 if ids == "one expert" else K)
        expected = three_calls(part, rank, world, group, max(counts))
        kernel = vllm.FusedMoEModularKernel(*pair(kind, rank, world, group, part.config))
        assert torch.equal(kernel(*part.inputs()), expected)
        wide, x = part.ids.long(), part.x.clone()
        given = {"global_num_experts": E, "expert_map": expert_map(rank, world), "inplace": True}
        assert kernel(x, part.w1, part.w2, part.weights, wide, **given) is x and torch.equal(x, expected)

    clusters[world].run(run)


@each_kind
def test_a_pair_equals_the_layer(clusters: Clusters, kind: str) -> None:
    config = MoEConfig(hidden_size=H, moe_intermediate_size=F, num_experts=E, top_k=K)

    def run(rank: int, group: str) -> None:
        layer = MoELayer(config, WindowDispatcher(group, 2, rank, E)).init_weights()
        x = randn(6, H, seed=rank).bfloat16()
        way, experts = pair(kind, rank, 2, group)
        weights, ids = layer.route(x)
        kernel = vllm.FusedMoEModularKernel(way, experts)
        found = kernel(x, layer.w_gate_up.transpose(1, 2), layer.w_down.transpose(1, 2), weights, ids)
        assert torch.equal(found, layer(x)) and kernel.output_is_reduced()

    clusters[2].run(run)


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 4])
def test_over_process_groups(world: int, tmp_path: Path) -> None:
    assert all(gloo_ranks.run_processes(world, _process, tmp_path))


def _process(rank: int) -> bool:
    world, counts = dist.get_world_size(), [5, 0, 3, 1]
    group, part = ascend_moe.comm_name(), part_of(rank, world, counts[rank])
    expected = three_calls(part, rank, world, group, 5)
    made = (vllm.FusedMoEModularKernel(*pair(kind, rank, world, group))(*part.inputs()) for kind in KINDS)
    return all(torch.equal(each, expected) for each in made)


def test_shared_experts_and_weights_on_the_input(clusters: Clusters) -> None:
    def run(rank: int, group: str) -> None:
        part = part_of(rank, 2, 4, dtype=FP32, topk=1)
        part = part._replace(weights=part.weights * torch.tensor([[0.5], [1.5], [2.0], [-1.0]]))
        shared = torch.nn.Linear(H, H)
        for kind in KINDS:
            kernel = vllm.FusedMoEModularKernel(*pair(kind, rank, 2, group), shared)
            both = kernel(*part.inputs(), inplace=True, apply_router_weight_on_input=True)
            assert torch.equal(both[0], shared(part.x))
            weighted = part._replace(x=part.x * part.weights, weights=torch.ones(4, 1))
            assert torch.equal(both[1], three_calls(weighted, rank, 2, group, 4))

    clusters[2].run(run)


# ---- the state of calls


def prepared(way: Any, part: Part, name: str = "prepare") -> Any:
    return getattr(way, name)(part.x, part.weights, part.ids, E, None, False, part.config)


def computed(experts: Any, part: Part, came: Any) -> torch.Tensor:
    rows, scales, meta, ids, weights = came
    *shapes, dtype = experts.workspace_shapes(
        part.x, rows, rows.shape[-2], 2 * F, H, ids.shape[1], E, len(part.w1), meta
    )
    made = torch.full(shapes[2], float("nan"), dtype=dtype)
    first, second = (torch.full(shape, float("nan"), dtype=dtype) for shape in shapes[:2])
    experts.apply(made, rows, part.w1, part.w2, weights, ids, "silu", E, None, scales, None, first, second, meta, False)
    return made


def finished(way: Any, experts: Any, part: Part, came: Any, name: str = "finalize") -> Any:
    output = torch.full_like(part.x, float("nan"))
    impl = experts.finalize_weight_and_reduce_impl()
    receiver = getattr(way, name)(output, computed(experts, part, came), came[4], came[3], False, impl)
    return output if name == "finalize" else (receiver, output)


@each_kind
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_micro_batches_are_open_at_once(clusters: Clusters, kind: str, order: tuple[int, int]) -> None:
    def run(rank: int, group: str) -> None:
        first = part_of(rank, 2, 5, w8a8=True)
        way, experts = pair(kind, rank, 2, group, first.config)
        parts = [first, first._replace(x=-2 * first.x, weights=first.weights.flip(1))]  # with the same ids
        expected = [three_calls(part, rank, 2, group, 5) for part in parts]
        came = [prepared(way, part) for part in parts]
        kept = [each[0].clone() for each in came]
        for index in order:
            assert torch.equal(finished(way, experts, parts[index], came[index]), expected[index])
        assert all(torch.equal(each[0], before) for each, before in zip(came, kept, strict=True))
        receivers = [prepared(way, part, "prepare_no_receive") for part in parts]
        came = [receivers[0](), receivers[1]()]
        ends = [finished(way, experts, parts[index], came[index], "finalize_async") for index in order]
        for (receiver, output), index in zip(reversed(ends), reversed(order), strict=True):
            assert receiver() is None and torch.equal(output, expected[index])

    clusters[2].run(run)


@windows
def test_a_matmul_between_sending_and_receiving(clusters: Clusters, kind: str) -> None:
    """Rank 0 sends, computes and receives; rank 1 does all at once."""

    def run(rank: int, group: str) -> None:
        way, experts = pair(kind, rank, 2, group)
        assert way.supports_async() and way.has_prepare_no_receive()
        part, square = part_of(rank, 2, 4 + rank), randn(32, 32)
        expected = three_calls(part, rank, 2, group, 5)
        receiver = prepared(way, part, "prepare" if rank else "prepare_async")
        if rank == 0:
            assert torch.equal(square @ square, square.mm(square))
        came = receiver if rank else receiver()
        made = finished(way, experts, part, came, "finalize" if rank else "finalize_async")
        if rank == 0:
            assert torch.equal(square @ square, square.mm(square)) and bool(made[1].isnan().all())
            made[0]()
        assert torch.equal(made if rank else made[1], expected)

    clusters[2].run(run)


def test_an_operator_that_is_not_ours_is_called_whole(clusters: Clusters) -> None:
    """A namespace without begin: nothing is async, and its operators run, once each."""
    called: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        def op(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return getattr(ascend_moe, name)(*args, **kwargs)

        return op

    names = ("npu_moe_distribute_dispatch_v2", "npu_moe_distribute_combine_v2")
    ops = SimpleNamespace(**{name: counted(name) for name in names})

    def run(rank: int, group: str) -> None:
        part = part_of(0, 1, 3)
        way = make_prepare_finalize(None, ops, group, 0, 1, E)
        experts = make_experts(None, None, ops, None, E)
        assert not way.supports_async() and not way.has_prepare_no_receive()
        expected = three_calls(part, 0, 1, group, 3)
        assert torch.equal(vllm.FusedMoEModularKernel(way, experts)(*part.inputs()), expected)
        came = prepared(way, part, "prepare_async")()
        receiver, output = finished(way, experts, part, came, "finalize_async")
        receiver()
        assert torch.equal(output, expected)

    clusters[1].run(run)
    assert called == [*names, *names]
    with pytest.raises(ArgumentError, match=r"ops has no npu_moe_distribute_combine_v2"):
        make_prepare_finalize(None, SimpleNamespace(npu_moe_distribute_dispatch_v2=None), "g", 0, 1, E)


def test_ids_stand_for_calls(clusters: Clusters) -> None:
    def run(rank: int, group: str) -> None:
        way, experts = pair("mc2", 0, 1, group)
        part = part_of(0, 1, 3)
        came = prepared(way, part)
        rows, made = computed(experts, part, came), torch.empty_like(part.x)
        impl = vllm.TopKWeightAndReduceDelegate()
        with pytest.raises(ArgumentError, match="topk_ids of finalize belong to 0 open calls"):
            way.finalize(made, rows, part.weights, part.ids.clone(), False, impl)
        way.finalize(made, rows, part.weights, part.ids, False, impl)  # the caller's own, while one call has them
        assert torch.equal(made, three_calls(part, 0, 1, group, 3))
        with pytest.raises(ArgumentError, match="0 open calls"):
            way.finalize(made, rows, came[4], came[3], False, impl)
        both = [prepared(way, part), prepared(way, part)]
        with pytest.raises(ArgumentError, match="2 open calls"):
            way.finalize(made, rows, part.weights, part.ids, False, impl)
        assert len(way._calls) == 2
        del both, came
        assert len(way._calls) == 0  # a call that nobody finishes goes with its ids

    clusters[1].run(run)


# ---- what prepare gives, what the experts work on


@pytest.mark.parametrize("w8a8", [False, True])
def test_rows_of_the_standard_format(clusters: Clusters, w8a8: bool) -> None:
    def run(rank: int, group: str) -> None:
        part = part_of(rank, 2, 5 - rank, w8a8=w8a8)
        way, _ = pair("mc2", rank, 2, group)
        sent = ascend_moe.npu_moe_distribute_dispatch_v2(
            part.x, part.ids, group, 2, rank, E, quant_mode=2 * w8a8, global_bs=32
        )
        for first, given in ((0, None), (4 * rank, expert_map(rank, 2))):
            came = way.prepare(part.x, part.weights, part.ids, E, given, False, part.config)
            rows, scales, meta, ids, weights = came
            counts, arrived = sent.expert_token_nums, int(sent.ep_recv_counts[-1])
            assert rows.shape == sent.expand_x.shape == (32 * 3, H)
            assert torch.equal(rows[:arrived], sent.expand_x[:arrived])
            assert (scales is None) != w8a8 and (scales is None or scales.shape == (96, 1))
            assert meta.expert_num_tokens.tolist() == counts.tolist() and meta.expert_num_tokens_cpu is None
            expected = (torch.arange(4) + first).repeat_interleave(counts).tolist() + [-1] * (96 - arrived)
            assert ids.dtype == way.topk_indices_dtype() == torch.int32 and ids.shape == (96, 1)
            assert ids.flatten().tolist() == expected
            assert weights.dtype == FP32 and torch.equal(weights, torch.ones(96, 1))
            way.finalize(part.x.clone(), torch.zeros(96, H, dtype=BF16), weights, ids, False, None)
        deferred = way.prepare(part.x, part.weights, part.ids, E, None, False, part.config, defer_input_quant=True)
        assert deferred[0].dtype == BF16 and deferred[1] is None

    clusters[2].run(run)


@pytest.mark.parametrize("w8a8", [False, True])
def test_rows_of_the_batched_format(clusters: Clusters, w8a8: bool) -> None:
    def run(rank: int, group: str) -> None:
        part = part_of(rank, 2, 5 - rank, w8a8=w8a8)
        way, _ = pair("batched", rank, 2, group)
        sent = ascend_moe.npu_moe_distribute_dispatch_v2(
            part.x, part.ids, group, 2, rank, E, quant_mode=2 * w8a8, global_bs=32
        )
        rows, scales, meta, ids, weights = prepared(way, part)
        assert rows.shape == (4, 32, H) and torch.equal(ids, part.ids) and torch.equal(weights, part.weights)
        start = 0
        for expert, count in enumerate(sent.expert_token_nums.tolist()):
            assert torch.equal(rows[expert, :count], sent.expand_x[start : start + count])
            assert not rows[expert, count:].any()
            if scales is not None:
                assert torch.equal(scales[expert, :count, 0], sent.dynamic_scales[start : start + count])
            start += count
        assert (scales is None) != w8a8 and meta.expert_num_tokens.dtype == torch.int32
        way.finalize(part.x.clone(), torch.zeros(4, 32, H, dtype=BF16), weights, ids, False, impl_of("Delegate"))

    clusters[2].run(run)


@windows
@pytest.mark.parametrize("w8a8", [False, True])
def test_work_follows_the_rows_that_arrived(clusters: Clusters, kind: str, w8a8: bool) -> None:
    seen: list[tuple[int, int]] = []

    def multiply(x: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((rank_of.rank, len(x[0])))
        return ascend_moe.npu.npu_grouped_matmul(x, *args, **kwargs)

    names = ("npu_swiglu", "npu_dequant_swiglu_quant")
    ops = SimpleNamespace(npu_grouped_matmul=multiply, **{name: getattr(ascend_moe.npu, name) for name in names})
    rank_of = threading.local()

    def run(rank: int, group: str) -> int:
        rank_of.rank = rank
        part = part_of(rank, 2, 3, w8a8=w8a8)
        way, _ = pair(kind, rank, 2, group)
        experts = make_experts(None, None, ops, part.config, E // 2, "batched" if kind == "batched" else "standard")
        came = prepared(way, part)
        assert len(came[0].reshape(-1, H)) > 90
        assert torch.equal(finished(way, experts, part, came), three_calls(part, rank, 2, group, 3))
        return int(came[2].expert_num_tokens.sum())

    arrived = clusters[2].run(run)
    assert sum(arrived) == 2 * 3 * K
    assert sorted(seen) == sorted([(rank, count) for rank, count in enumerate(arrived) for _ in range(2)])


def test_places_behind_the_rows_are_not_touched(clusters: Clusters) -> None:
    def run(rank: int, group: str) -> None:
        part = part_of(0, 1, 3)
        for kind in ("mc2", "batched"):
            way, experts = pair(kind, 0, 1, group)
            came = prepared(way, part)
            made = computed(experts, part, came).reshape(-1, H)
            assert int((~made.isnan()).all(1).sum()) == 3 * K and int(made.isnan().all(1).sum()) == len(made) - 3 * K
            assert made.data_ptr() != came[0].data_ptr()

    clusters[1].run(run)


def test_windows_read_nothing_on_the_host(clusters: Clusters, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph can hold prepare and finalize of standard rows; the map is looked at once."""

    def run(rank: int, group: str) -> None:
        part, given = part_of(0, 1, 3), expert_map(0, 1)
        way, experts = pair("mc2", 0, 1, group)

        def prepare() -> Any:
            return way.prepare(part.x, part.weights, part.ids, E, given, False, None)

        def finalize(came: Any, rows: torch.Tensor) -> torch.Tensor:
            made = torch.empty_like(part.x)
            way.finalize(made, rows, came[4], came[3], False, experts.finalize_weight_and_reduce_impl())
            return made

        came = prepare()
        rows = computed(experts, part, came)
        first = finalize(came, rows)
        with monkeypatch.context() as patch:
            for name in ("item", "cpu", "tolist", "numpy", "__bool__", "__int__", "__index__"):
                patch.setattr(torch.Tensor, name, property())
            second = finalize(prepare(), rows)
        assert torch.equal(first, second)

    clusters[1].run(run)


@windows
def test_shapes_stay_as_on_an_npu(clusters: Clusters, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Where rows in use are not counted on the host, the same bits."""
    for module in (prepare_finalize, experts_module):
        monkeypatch.setattr(module, "on_npu", lambda tensor: True)

    def run(rank: int, group: str) -> None:
        part = part_of(rank, 2, 5 * rank)
        kernel = vllm.FusedMoEModularKernel(*pair(kind, rank, 2, group))
        assert torch.equal(kernel(*part.inputs()), three_calls(part, rank, 2, group, 5))

    clusters[2].run(run)


@pytest.mark.parametrize("local", [[0, 1, 2, 3, 4, 5, 6, 7], [5, 1, 7]])
@pytest.mark.parametrize("ids", ["random", "-1", "one expert"])
@pytest.mark.parametrize("tokens", [0, 7])
def test_rows_of_another_prepare_are_sorted(tokens: int, ids: str, local: list[int]) -> None:
    """Tokens as they are, K ids each, with a map of any order: as the aligned blocks do it."""
    part = part_of(0, 1, tokens, ids, FP32)
    chosen, numbers = torch.full((E,), -1), torch.tensor(local)
    chosen[numbers] = torch.arange(len(local))
    w1, w2 = part.w1[numbers], part.w2[numbers]
    experts = make_experts(None, None, None, None, len(local))
    shapes = experts.workspace_shapes(tokens, 2 * F, H, K, E, len(local), None, "silu")
    made = torch.full(shapes[2], float("nan"))
    experts.apply(made, part.x, w1, w2, part.weights, part.ids, "silu", E, chosen, None, None, None, None, None, False)
    found = vllm.TopKWeightAndReduceContiguous().apply(None, made, part.weights, part.ids, False)
    expected = fused_experts(
        part.x, w1, w2, part.weights, part.ids, expert_map=chosen.int(), global_num_experts=E, block_size=4
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_int8_rows_of_another_prepare_keep_their_scales() -> None:
    """Tokens in int8, a scale each, with K experts each: every pair has its token's."""
    part = part_of(0, 1, 7, "-1", FP32, w8a8=True)
    codes, scales = npu_dynamic_quant(part.x * torch.logspace(-2, 2, 7)[:, None])
    experts = make_experts(None, None, None, part.config, E)
    made = torch.full((7 * K, H), float("nan"))
    experts.apply(
        made, codes, part.w1, part.w2, part.weights, part.ids, "silu", E, None, scales[:, None], None, None, None, None,
        False,
    )  # fmt: skip
    mlp = (part.w1.transpose(1, 2), part.w2.transpose(1, 2))
    of_weights = {"w_gate_up_scale": part.config.w1_scale.squeeze(-1), "w_down_scale": part.config.w2_scale}
    for pair, expert in enumerate(part.ids.flatten().tolist()):
        if expert < 0:
            assert not made[pair].any()
            continue
        count = torch.zeros(E, dtype=torch.int64)
        count[expert], token = 1, slice(pair // K, pair // K + 1)
        own = grouped_mlp(codes[token], *mlp, count, dynamic_scales=scales[token], **of_weights, output_dtype=FP32)
        assert torch.equal(made[pair], own[0])


@pytest.mark.parametrize("kind", ["standard", "batched"])
def test_workspaces_in_both_forms(kind: str) -> None:
    experts = make_experts(None, None, None, None, 4, kind)
    rows = (4, 30) if kind == "batched" else (30,)
    expected = ((*rows, H), (*rows, F), (*rows, H))
    x, arrived = torch.zeros(5, H, dtype=BF16), torch.zeros(*rows, H, dtype=torch.int8)
    sizes = {"M": 30, "N": 2 * F, "K": H, "topk": 1, "global_num_experts": E, "local_num_experts": 4}
    assert experts.workspace_shapes(x, arrived, *sizes.values(), None) == (*expected, BF16)
    assert experts.workspace_shapes(a=x, aq=arrived, **sizes, expert_tokens_meta=None) == (*expected, BF16)
    assert experts.workspace_shapes(*sizes.values(), None, "silu") == expected
    assert experts.workspace_shapes(**sizes, expert_tokens_meta=None, activation="silu") == expected
    assert experts.workspace_dtype(BF16) == BF16
    if kind == "standard":
        assert experts.workspace_shapes(30, 5 * H, H, 2, E, 4, None, "silu")[0] == (60, 5 * H)
        assert experts.workspace_shapes(30, 8, H, 2, E, 4, None, "silu") == ((60, H), (60, 4), (60, H))


# ---- the caller's bases


def stand_in(*, newest: bool) -> Any:
    """A module of abstract classes with the names of one of vLLM's releases."""

    def abstract(*names: str) -> type:
        return type("Base", (ABC,), {name: abstractmethod(lambda self: None) for name in names})

    way = (
        "prepare",
        "finalize",
        "activation_format",
        "topk_indices_dtype",
        "max_num_tokens_per_rank",
        "num_dispatchers",
    )
    experts = ("workspace_shapes", "apply", "finalize_weight_and_reduce_impl")
    own = {"FusedMoEActivationFormat": bases.FusedMoEActivationFormat, "ExpertTokensMetadata": SimpleNamespace}
    if not newest:
        old = ("activation_formats", "supports_chunking", "supports_expert_map")
        own |= {"FusedMoEPrepareAndFinalize": abstract(*way)}
        own |= {"FusedMoEPermuteExpertsUnpermute": abstract(*experts, *old)}
        own |= {"FusedMoEModularKernel": vllm.FusedMoEModularKernel}
        return SimpleNamespace(**own)
    asked = ("current_device", "no_act_and_mul", "quant_scheme", "activation", "parallel_config")
    own |= {"FusedMoEPrepareAndFinalize": abstract(*way)}
    own |= {"FusedMoEPrepareAndFinalizeModular": abstract(*way, "output_is_reduced")}
    own |= {"FusedMoEExpertsModular": abstract(*experts, "activation_format", *(f"_supports_{name}" for name in asked))}
    own |= {"FusedMoEKernel": lambda way, experts: (way, experts)}
    return SimpleNamespace(**own)


@pytest.mark.parametrize("newest", [False, True])
def test_classes_are_of_the_callers_bases(clusters: Clusters, newest: bool) -> None:
    mk, war = stand_in(newest=newest), SimpleNamespace(TopKWeightAndReduceDelegate=lambda: "theirs")
    names = ("FusedMoEPrepareAndFinalizeModular", "FusedMoEExpertsModular")
    old = ("FusedMoEPrepareAndFinalize", "FusedMoEPermuteExpertsUnpermute")

    def run(rank: int, group: str) -> None:
        for kind in KINDS:
            config = {"group_name": group, "rank": 0, "world": 1, "num_experts": E, "kind": kind, "mk": mk, "war": war}
            way = vllm.maybe_make_prepare_finalize(config)
            experts = vllm.select_gemm_impl(config, way)
            for made, name in zip((way, experts), names if newest else old, strict=True):
                assert isinstance(made, getattr(mk, name))
            assert experts.finalize_weight_and_reduce_impl() == "theirs"
            assert way.activation_format == experts.activation_format() == experts.activation_formats[0]
            assert (way.num_dispatchers(), way.output_is_reduced()) == (1, True)
            assert way.max_num_tokens_per_rank() == (512 if kind in ("mc2", "batched") else None)
            assert not experts.supports_chunking() and experts.supports_expert_map() and experts.a2_scale is None
            assert experts._supports_activation(SimpleNamespace(value="silu")) and not experts._supports_activation(
                "gelu"
            )
            int8 = SimpleNamespace(dtype=torch.int8)
            assert experts._supports_quant_scheme(None, None) and experts._supports_quant_scheme(int8, int8)
            assert not experts._supports_quant_scheme(int8, None)
        kernel = vllm.select(config)
        assert kernel[0].handle.max_tokens == 512 if newest else isinstance(kernel, vllm.FusedMoEModularKernel)

    clusters[1].run(run)
    with pytest.raises(ArgumentError, match="mk has none of FusedMoEPrepareAndFinalizeModular"):
        make_prepare_finalize(torch, None, "g", 0, 1, E)


def test_ours_have_the_same_names() -> None:
    way, experts = pair("mc2", 0, 1, "a group that is not opened yet")
    assert isinstance(way, vllm.FusedMoEPrepareAndFinalize) and isinstance(way, vllm.FusedMoEPrepareAndFinalizeModular)
    assert isinstance(experts, vllm.FusedMoEPermuteExpertsUnpermute) and isinstance(
        experts, vllm.FusedMoEExpertsModular
    )
    assert all(hasattr(vllm, name) for name in vllm.__all__)
    meta = vllm.ExpertTokensMetadata.make_from_list([1, 0, 4], "cpu")
    assert meta.expert_num_tokens.tolist() == [1, 0, 4] and meta.expert_num_tokens_cpu.dtype == torch.int32


def test_selection_and_handles(clusters: Clusters) -> None:
    def run(rank: int, group: str) -> None:
        manager = vllm.All2AllManager(group, rank, 2)
        handle = manager.get_handle({"num_experts": E})
        assert handle is manager.get_handle({"kind": "batched", "num_experts": E, "max_num_tokens": 512})
        assert handle is not manager.get_handle({"num_experts": E, "max_num_tokens": 16})
        others = [manager.get_handle({"kind": kind, "num_experts": E}) for kind in ("alltoall", "allgather")]
        assert len({id(each) for each in (handle, *others)}) == 3
        assert others[0] is manager.get_handle({"kind": "alltoall", "num_experts": E, "max_num_tokens": 16})
        kernel = vllm.select(vllm.MoEKernelConfig(group, rank, 2, E, manager=manager))
        assert kernel.prepare_finalize.handle is handle
        part = part_of(rank, 2, 4)
        assert torch.equal(kernel(*part.inputs()), three_calls(part, rank, 2, group, 4))
        own = vllm.init_prepare_finalize({"group_name": group, "rank": rank, "world": 2, "num_experts": E})
        assert type(own) is type(kernel) and torch.equal(own(*part.inputs()), kernel(*part.inputs()))
        big = vllm.select(SimpleNamespace(group_name=group, rank=rank, world=2, num_experts=E, max_num_tokens=9000))
        assert big.prepare_finalize.max_num_tokens_per_rank() is None
        assert torch.equal(big(*part.inputs()), kernel(*part.inputs()))
        manager.destroy()
        assert handle is not manager.get_handle({"num_experts": E})
        for wrong, rule in (({"kinds": "mc2"}, "kwargs is 'kinds'"), ({"kind": "pplx", "num_experts": E}, "'pplx'")):
            with pytest.raises(ArgumentError, match=rule):
                manager.get_handle(wrong)
        for config, rule in (({"group_name": group}, "config has no rank, which"), ({"ranks": 2}, "config is 'ranks'")):
            with pytest.raises(ArgumentError, match=rule):
                vllm.select(config)

    clusters[2].run(run)


# ---- weight and reduce


def impl_of(name: str, *args: Any) -> Any:
    return getattr(weight_and_reduce, f"TopKWeightAndReduce{name}")(*args)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("tokens", [0, 5])
def test_weights_and_sums(tokens: int, on_input: bool, dtype: torch.dtype) -> None:
    ids, weights = routed(tokens, E, K), randn(tokens, K, seed=1)
    rows = randn(tokens, K, H).to(dtype)
    expected, whole = torch.zeros(tokens, H), torch.ones(tokens, K) if on_input else weights
    for k in range(K):
        expected = expected + rows[:, k].float() * whole[:, k, None]
    contiguous = impl_of("Contiguous")
    for shape in ((tokens, K, H), (tokens * K, H)):
        assert torch.equal(contiguous.apply(None, rows.reshape(shape), weights, ids, on_input), expected.to(dtype))
    output = torch.empty(tokens, H, dtype=dtype)
    assert contiguous.apply(output, rows, weights, ids, on_input) is output and torch.equal(output, expected.to(dtype))
    parts = []
    for rank in range(2):
        batched = torch.full((E // 2, 9, H), float("nan"), dtype=dtype)
        used = [0] * E
        for token in range(tokens):
            for k, expert in enumerate(ids[token].tolist()):
                if expert // (E // 2) == rank:
                    batched[expert % (E // 2), used[expert]] = rows[token, k]
                    used[expert] += 1
        parts.append(impl_of("NaiveBatched", rank).apply(None, batched.nan_to_num(7.0), weights, ids, on_input))
    torch.testing.assert_close(parts[0] + parts[1], expected.to(dtype), rtol=1e-2, atol=1e-2)
    no_op = impl_of("NoOP")
    assert no_op.apply(None, rows, weights, ids, on_input) is rows
    copy = torch.empty_like(rows)
    assert no_op.apply(copy, rows, weights, ids, on_input) is copy and torch.equal(copy, rows)


def test_delegate_leaves_the_choice_and_classes_compare() -> None:
    delegate = impl_of("Delegate")
    with pytest.raises(ArgumentError, match="leaves the choice to finalize"):
        delegate.apply(None, torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), False)
    assert delegate == impl_of("Delegate") != impl_of("NoOP")
    assert impl_of("NaiveBatched", 1) == impl_of("NaiveBatched", 1) != impl_of("NaiveBatched", 2)
    assert len({delegate, impl_of("Delegate"), impl_of("Contiguous")}) == 2


@pytest.mark.parametrize("name", ["NoOP", "Contiguous"])
def test_standard_rows_take_any_of_them(clusters: Clusters, name: str) -> None:
    """A row is a token of one expert with weight 1 there."""

    def run(rank: int, group: str) -> None:
        part = part_of(0, 1, 4)
        way, experts = pair("mc2", 0, 1, group)
        came, made = prepared(way, part), torch.empty_like(part.x)
        way.finalize(made, computed(experts, part, came), came[4], came[3], False, impl_of(name))
        assert torch.equal(made, three_calls(part, 0, 1, group, 4))

    clusters[1].run(run)


# ---- what is refused


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"topk_ids": torch.zeros(3, K, dtype=torch.int32)}, r"topk_ids is \(3, 3\) for 5 tokens"),
        ({"topk_weights": torch.zeros(5, 1)}, r"topk_weights is \(5, 1\)"),
        ({"a1": torch.zeros(5, 4, H)}, r"a1 is \(5, 4, 64\); it must be 2-D"),
        ({"num_experts": 7}, r"num_experts is 7; it must be 8"),
        ({"expert_map": torch.arange(E).flip(0)}, r"expert_map does not give rank 0 experts 0 to 7"),
        ({"expert_map": torch.arange(4)}, r"expert_map is \(4,\)"),
        ({"apply_router_weight_on_input": True}, r"needs K = 1; topk_ids has K = 3"),
        ({"quant_config": bases.FusedMoEQuantConfig(torch.int8)}, r"without per_act_token_quant"),
        ({"quant_config": bases.FusedMoEQuantConfig(torch.float8_e4m3fn, True)}, r"has quant_dtype torch.float8"),
        ({"a1": torch.zeros(17, H), "topk_ids": torch.zeros(17, 1, dtype=torch.int32),
          "topk_weights": torch.zeros(17, 1)}, r"a1 has 17 tokens, max_num_tokens is 16"),
    ],
)  # fmt: skip
def test_prepare_refuses(clusters: Clusters, changed: dict[str, Any], rule: str) -> None:
    part = part_of(0, 1, 5)
    given = {"a1": part.x, "topk_weights": part.weights, "topk_ids": part.ids, "num_experts": E, "expert_map": None}
    given |= {"apply_router_weight_on_input": False, "quant_config": None, **changed}

    def run(rank: int, group: str) -> None:
        way, experts = pair("mc2", 0, 1, group)
        with pytest.raises(ArgumentError, match=rule):
            way.prepare(**given)
        assert torch.equal(finished(way, experts, part, prepared(way, part)), three_calls(part, 0, 1, group, 5))

    clusters[1].run(run)


@each_kind
def test_weights_of_tokens_may_be_half(clusters: Clusters, kind: str) -> None:
    """As the router of a half-precision model gives them; the sum is in fp32."""

    def run(rank: int, group: str) -> None:
        way, experts = pair(kind, rank, 2, group)
        part = part_of(rank, 2, 5)
        half = part._replace(weights=part.weights.to(BF16))
        expected = three_calls(part._replace(weights=half.weights.float()), rank, 2, group, 5)
        assert torch.equal(finished(way, experts, half, prepared(way, half)), expected)

    clusters[2].run(run)


def test_a_map_that_fits_says_nothing_of_another(clusters: Clusters) -> None:
    def run(rank: int, group: str) -> None:
        way, experts = pair("mc2", rank, 2, group)
        part, own = part_of(rank, 2, 5), expert_map(rank, 2)
        for _ in range(2):
            came = way.prepare(part.x, part.weights, part.ids, E, own, False, part.config)
            assert torch.equal(finished(way, experts, part, came), three_calls(part, rank, 2, group, 5))
            with pytest.raises(ArgumentError, match=f"expert_map does not give rank {rank} experts"):
                way.prepare(part.x, part.weights, part.ids, E, own.flip(0), False, part.config)

    clusters[2].run(run)


def test_experts_refuse() -> None:
    part, quantized = part_of(0, 1, 5), part_of(0, 1, 5, w8a8=True)
    experts = make_experts(None, None, None, None, E)

    def apply(made: Any = experts, **changed: Any) -> None:
        given = {"output": part.x.new_empty(5 * K, H), "hidden_states": part.x, "w1": part.w1, "w2": part.w2}
        given |= {"topk_weights": part.weights, "topk_ids": part.ids, "activation": "silu", "global_num_experts": E}
        given |= dict.fromkeys(("expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2"))
        made.apply(**given | {"expert_tokens_meta": None, "apply_router_weight_on_input": False} | changed)

    for changed, rule in (
        ({"activation": "gelu"}, "activation is 'gelu'; need one of silu"),
        ({"w1": part.w1[:4]}, r"w1 is \(4, 64, 64\); it must be \(8, 64, 64\)"),
        ({"w2": part.w2.float()}, "w2 is torch.float32"),
        ({"output": torch.empty(5, H)}, r"output is \(5, 64\)"),
        ({"hidden_states": part.x.to(torch.int8)}, "with this quant_config it must be bf16"),
        ({"a1q_scale": torch.ones(5)}, "a1q_scale comes with int8 rows"),
        ({"hidden_states": part.x.view(1, 5, H)}, r"hidden_states is \(1, 5, 64\); it must be \(M, H\)"),
    ):
        with pytest.raises(ArgumentError, match=rule):
            apply(**changed)
    batched = make_experts(None, None, None, None, E, "batched")
    with pytest.raises(ArgumentError, match="batched rows need the rows of each expert"):
        apply(batched, hidden_states=part.x.new_zeros(E, 2, H), output=part.x.new_zeros(E, 2, H))
    for config, rule in (
        (bases.FusedMoEQuantConfig(torch.int8, True), "needs w1_scale and w2_scale"),
        (bases.FusedMoEQuantConfig(w1_scale=torch.ones(1)), "has scales of weights but unquantized rows"),
        (bases.FusedMoEQuantConfig(w1_bias=torch.ones(1)), "has w1_bias"),
        (SimpleNamespace(quant_dtype="mxfp4"), "has quant_dtype mxfp4"),
        (SimpleNamespace(gemm1_clamp_limit=7.0), "quant_config has gemm1_clamp_limit 7.0; the experts' activation is"),
        (SimpleNamespace(gemm1_alpha=1.702), "has gemm1_alpha 1.702"),
        (bases.FusedMoEQuantConfig.make(block_shape=[128, 128]), "has block_shape"),
        (
            bases.int8_w8a8_moe_quant_config(*[torch.ones(1)] * 2, None, None, per_act_token_quant=False),
            "without per_act",
        ),
    ):
        with pytest.raises(ArgumentError, match=rule):
            make_experts(None, None, None, config, E)
    with pytest.raises(ArgumentError, match="moe_config has swiglu_limit 10"):
        make_experts(None, None, None, None, E, moe_config=SimpleNamespace(swiglu_limit=10.0, swiglu_alpha=None))
    neutral = SimpleNamespace(gemm1_clamp_limit=None, gemm1_alpha=1.0, gemm1_beta=0.0)
    make_experts(None, None, None, neutral, E, moe_config=SimpleNamespace(swiglu_limit=None))
    scales = bases.int8_w8a8_moe_quant_config(quantized.config.w1_scale[:, :3], quantized.config.w2_scale)
    with pytest.raises(ArgumentError, match=r"w1_scale is \(8, 3, 1\); it must be \(8, 64\) or \(8, 64, 1\) or"):
        apply(
            make_experts(None, None, None, scales, E), hidden_states=part.x.to(torch.int8), a1q_scale=torch.ones(5, 1),
            w1=quantized.w1, w2=quantized.w2,
        )  # fmt: skip


def test_what_does_not_fit_is_not_joined(clusters: Clusters) -> None:
    def run(rank: int, group: str) -> None:
        for kind in KINDS:
            way, _ = pair(kind, 0, 1, group)
            wrong = "standard" if kind == "batched" else "batched"
            with pytest.raises(ArgumentError, match=r"fused_experts do not fit: Ascend.* rows; make both"):
                vllm.FusedMoEModularKernel(way, make_experts(None, None, None, None, E, wrong))
            config = vllm.MoEKernelConfig(group, 0, 1, E, kind=kind, experts_kind=wrong)
            with pytest.raises(ArgumentError, match="do not fit"):
                vllm.select(config)

    clusters[1].run(run)
    for rank, world, kind, rule in (
        (0, 3, "mc2", "num_experts is 8; need a multiple of the 3 ranks"),
        (2, 2, "mc2", "rank is 2; need 0..1"),
        (0, 1, "pplx", "kind is 'pplx'; need one of mc2, alltoall, allgather, batched"),
        (0, 1, "alltoall", "group_name 'nobody' names no live group"),
    ):
        with pytest.raises(ArgumentError, match=rule):
            make_prepare_finalize(None, None, "nobody", rank, world, E, kind)
    with pytest.raises(ArgumentError, match=r"max_num_tokens is 5000; need 1\.\.4096"):
        make_prepare_finalize(None, None, "nobody", 0, 1, E, max_num_tokens=5000)


def test_batched_rows_overflow_and_take_delegate_alone(clusters: Clusters) -> None:
    def run(rank: int, group: str) -> None:
        part = part_of(0, 1, 16, "one expert")
        way, experts = pair("batched", 0, 1, group)
        with pytest.raises(RoutingOverflow, match="48 rows came for one expert, batched rows have places for 16"):
            prepared(way, part)
        one_more = part._replace(ids=part.ids.where(torch.arange(48).view(16, K) < 17, -1))
        with pytest.raises(RoutingOverflow, match="17 rows came for one expert"):
            prepared(way, one_more)
        fits = one_more._replace(ids=part.ids.where(torch.arange(48).view(16, K) < 16, -1))
        assert torch.equal(finished(way, experts, fits, prepared(way, fits)), three_calls(fits, 0, 1, group, 16))
        part = part_of(0, 1, 4)
        came = prepared(way, part)
        rows = computed(experts, part, came)
        with pytest.raises(ArgumentError, match="batched rows take TopKWeightAndReduceDelegate"):
            way.finalize(part.x.clone(), rows, came[4], came[3], False, impl_of("NaiveBatched", 0))
        assert torch.equal(finished(way, experts, part, came), three_calls(part, 0, 1, group, 4))  # still open

    clusters[1].run(run)


def test_ranks_with_other_limits_are_told_apart(clusters: Clusters) -> None:
    def run(rank: int, group: str) -> None:
        way, _ = pair("mc2", rank, 2, group, max_num_tokens=16 + rank)
        with pytest.raises(ConfigMismatch, match="global_bs is"):
            prepared(way, part_of(rank, 2, 3))

    clusters[2].run(run)


# ---- the command


def test_the_matrix() -> None:
    fits = {(way, "batched" if way == "batched" else "standard") for way in KINDS}
    made = vllm.compatibility()
    assert {(each.prepare_finalize, each.experts) for each in made if not each.reason} == fits and len(made) == 8
    said = commands.said("vllm-pairs")
    assert said.code == 0 and said.out.count("fits") == 4 and all(kind in said.out for kind in KINDS)
    found = json.loads(commands.said("vllm-pairs", "--json").out)
    assert {(each["prepare_finalize"], each["experts"]) for each in found if each["fits"]} == fits
    assert "mc2 gives standard rows" in next(each["reason"] for each in found if each["reason"])


@each_kind
def test_the_command_tries_a_pair(kind: str, tmp_path: Path) -> None:
    experts = "batched" if kind == "batched" else "standard"
    words = ["vllm-pairs", "--pf-type", kind, "--experts-type", experts, "--batch", "6,0", "--ranks", "2"]
    trace = tmp_path / "trace.json"
    said = commands.said(*words, "--profile", str(trace))
    assert said.code == 0 and said.out.count("ok ") == 2 and "PASS" in said.out, said
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "aten::mm" in names or "aten::addmm" in names or "aten::matmul" in names
    assert list(tmp_path.iterdir()) == [trace]
    found = json.loads(commands.said(*words, "--quant", "int8", "--json").out)
    assert found["ok"] and found["equal"] and found["quantized"] and 0 < found["difference"] < found["tolerance"]


def test_the_command_says_why_a_pair_does_not_fit() -> None:
    words = ("vllm-pairs", "--pf-type", "mc2", "--experts-type", "batched")
    said = commands.said(*words)
    assert said.code == 1 and "do not fit: mc2 gives standard rows, batched experts take batched rows" in said.out
    said = commands.said(*words, "--json")
    assert said.code == 1 and json.loads(said.out)["reason"]


@pytest.mark.parametrize("wrong", ["bits", "values"])
def test_the_command_sees_a_wrong_pair(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    name = "_three_calls" if wrong == "bits" else "_dense"
    right = getattr(trial, name)
    monkeypatch.setattr(trial, name, lambda *args: right(*args) * 1.0625)
    said = commands.said("vllm-pairs", "--pf-type", "mc2", "--experts-type", "standard", "--batch", "4")
    assert said.code == 1 and said.out.count("FAIL") == 2 and said.out.count("ok ") == 1, said
