"""vLLM's PrepareAndFinalize and its modular kernel against the three calls, and how the parts are made and chosen."""

from __future__ import annotations

import inspect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_reads import no_host_reads
from op_runs import Clusters
from vllm_parts import (
    BF16,
    FP32,
    KINDS,
    E,
    H,
    K,
    computed,
    each_kind,
    expert_map,
    finished,
    impl_of,
    pair,
    part_of,
    prepared,
    three_calls,
    windows,
)

import ascend_moe
from ascend_moe.errors import ArgumentError, RoutingOverflow
from ascend_moe.interop import vllm
from ascend_moe.interop.vllm import bases, make_experts, make_prepare_finalize, prepare_finalize
from ascend_moe.interop.vllm import experts as experts_module


@each_kind
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_micro_batches_are_open_at_once(clusters: Clusters, kind: str, order: tuple[int, int]) -> None:
    def run(rank: int, group: str) -> None:
        first = part_of(rank, 2, 5, w8a8=True)
        way, experts = pair(kind, rank, 2, group, first.config)
        assert way.has_prepare_no_receive() == way.supports_async()
        half = first.weights.flip(1).to(BF16)  # as the router of a half-precision model gives them
        parts = [first, first._replace(x=-2 * first.x, weights=half.float())]  # with the same ids
        expected = [three_calls(part, rank, 2, group, 5) for part in parts]
        parts[1] = parts[1]._replace(weights=half)
        came = [prepared(way, part) for part in parts]
        kept = [each[0].clone() for each in came]
        for index in order:
            assert torch.equal(finished(way, experts, parts[index], came[index]), expected[index])
        assert all(torch.equal(each[0], before) for each, before in zip(came, kept, strict=True))
        calls = ("prepare_no_receive", "prepare_async")
        receivers = [prepared(way, part, call) for part, call in zip(parts, calls, strict=True)]
        came = [receivers[0](), receivers[1]()]
        ends = [finished(way, experts, parts[index], came[index], "finalize_async") for index in order]
        for (receiver, output), index in zip(reversed(ends), reversed(order), strict=True):
            assert receiver() is None and torch.equal(output, expected[index])

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
        smallest = lambda x, rows, *_: ((0,), (0,), rows.shape, x.dtype)  # noqa: E731 - as other experts may say
        for shapes in (experts.workspace_shapes, smallest):
            experts.workspace_shapes = shapes
            assert torch.equal(vllm.FusedMoEModularKernel(way, experts)(*part.inputs()), expected)
        came = prepared(way, part, "prepare_async")()
        receiver, output = finished(way, experts, part, came, "finalize_async")
        receiver()
        assert torch.equal(output, expected)

    clusters[1].run(run)
    assert called == [*names] * 3
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


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"topk_ids": torch.zeros(3, K, dtype=torch.int32)}, r"topk_ids is \(3, 3\) for 5 tokens"),
        ({"topk_weights": torch.zeros(5, 1)}, r"topk_weights is \(5, 1\)"),
        ({"a1": torch.zeros(5, 4, H)}, r"a1 is \(5, 4, 64\); it must be 2-D"),
        ({"num_experts": 7}, r"num_experts is 7; it must be 8"),
        ({"expert_map": torch.arange(E).flip(0)}, r"expert_map is not the placement .* which has experts 0 to 7"),
        ({"expert_map": torch.arange(4)}, r"expert_map is \(4,\)"),
        ({"apply_router_weight_on_input": True}, r"needs K = 1; topk_ids has K = 3"),
        ({"quant_config": vllm.FusedMoEQuantConfig(torch.int8)}, r"without per_act_token_quant"),
        ({"quant_config": vllm.FusedMoEQuantConfig(torch.float8_e4m3fn, True)}, r"has quant_dtype torch.float8"),
        ({"a1": torch.zeros(17, H), "topk_ids": torch.zeros(17, 1, dtype=torch.int32),
          "topk_weights": torch.zeros(17, 1)}, r"a1 has 17 tokens, more than max_num_tokens 16"),
    ],
)  # fmt: skip
def test_prepare_refuses(clusters: Clusters, changed: dict[str, Any], rule: str) -> None:
    part = part_of(0, 1, 5)
    sound = {"a1": part.x, "topk_weights": part.weights, "topk_ids": part.ids, "num_experts": E, "expert_map": None}
    sound |= {"apply_router_weight_on_input": False, "quant_config": None}

    def run(rank: int, group: str) -> None:
        way, experts = pair("mc2", 0, 1, group)
        way.prepare(**sound | {"expert_map": expert_map(0, 1)})  # a map that fits says nothing of another
        with pytest.raises(ArgumentError, match=rule):
            way.prepare(**sound | changed)
        assert torch.equal(finished(way, experts, part, prepared(way, part)), three_calls(part, 0, 1, group, 5))

    clusters[1].run(run)


def test_batched_rows_overflow_and_take_delegate_alone(clusters: Clusters) -> None:
    def run(rank: int, group: str) -> None:
        part = part_of(0, 1, 16, "one expert")
        way, experts = pair("batched", 0, 1, group)
        with pytest.raises(
            RoutingOverflow, match="48 rows arrived for one expert, but batched rows have places for 16"
        ):
            prepared(way, part)
        one_more = part._replace(ids=part.ids.where(torch.arange(48).view(16, K) < 17, -1))
        with pytest.raises(RoutingOverflow, match="17 rows arrived for one expert"):
            prepared(way, one_more)
        fits = one_more._replace(ids=part.ids.where(torch.arange(48).view(16, K) < 16, -1))
        assert torch.equal(finished(way, experts, fits, prepared(way, fits)), three_calls(fits, 0, 1, group, 16))
        part = part_of(0, 1, 4)
        came = prepared(way, part)
        rows = computed(experts, part, came)
        with pytest.raises(ArgumentError, match="batched rows need TopKWeightAndReduceDelegate"):
            way.finalize(part.x.clone(), rows, came[4], came[3], False, impl_of("NaiveBatched", 0))
        assert torch.equal(finished(way, experts, part, came), three_calls(part, 0, 1, group, 4))  # still open

    clusters[1].run(run)


# ---- the modular kernel gives what the three calls give


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


def test_shared_experts_and_weights_on_the_input(clusters: Clusters) -> None:
    def run(rank: int, group: str) -> None:
        for kind, dtype in itertools.product(KINDS, (FP32, BF16)):
            part = part_of(rank, 2, 4, dtype=dtype, topk=1)
            part = part._replace(weights=part.weights * torch.tensor([[0.3], [1.7], [2.1], [-1.0]]))  # not in bf16
            shared = torch.nn.Linear(H, H, dtype=dtype)
            kernel = vllm.FusedMoEModularKernel(*pair(kind, rank, 2, group), shared)
            both = kernel(*part.inputs(), inplace=True, apply_router_weight_on_input=True)
            assert torch.equal(both[0], shared(part.x))
            weighted = part._replace(x=(part.x.float() * part.weights).to(dtype), weights=torch.ones(4, 1))
            assert torch.equal(both[1], three_calls(weighted, rank, 2, group, 4))

    clusters[2].run(run)


def test_windows_read_nothing_on_the_host(clusters: Clusters) -> None:
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
        with no_host_reads():
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


def mock_mk(*, newest: bool) -> Any:
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
    mk, war = mock_mk(newest=newest), SimpleNamespace(TopKWeightAndReduceDelegate=lambda: "theirs")
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
            assert experts._supports_activation(SimpleNamespace(value="silu"))
            assert not experts._supports_activation("silu_no_mul")
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
    base = vllm.FusedMoEPrepareAndFinalize
    assert way.has_prepare_no_receive() and not base.has_prepare_no_receive(way)
    assert inspect.signature(base.prepare_no_receive) == inspect.signature(type(way).prepare_no_receive).replace(
        return_annotation="ReceiverType"
    )
    with pytest.raises(NotImplementedError, match="has no prepare_no_receive; call prepare"):
        base.prepare_no_receive(way, *[None] * 7)
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
        (0, 3, "mc2", "num_experts is 8, not a positive multiple of the 3 ranks"),
        (2, 2, "mc2", "rank is 2; it must be 0..1, one of the 2 ranks"),
        (0, 1, "pplx", "kind is 'pplx'; need one of mc2, alltoall, allgather, batched"),
        (0, 1, "alltoall", "group_ep is 'nobody', which names no open group"),
    ):
        with pytest.raises(ArgumentError, match=rule):
            make_prepare_finalize(None, None, "nobody", rank, world, E, kind)
    with pytest.raises(ArgumentError, match=r"max_num_tokens is 5000; need 1\.\.4096"):
        make_prepare_finalize(None, None, "nobody", 0, 1, E, max_num_tokens=5000)
