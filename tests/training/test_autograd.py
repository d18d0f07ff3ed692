"""Gradients of dispatch, combine and what is built on them, against numbers and against one process."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import threads
from rank_processes import Ranks, assert_named
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

import ascend_moe
from ascend_moe import autograd, explore
from ascend_moe.comm import LocalCluster
from ascend_moe.dispatchers import AllGatherDispatcher, AllToAllDispatcher, Dispatcher, WindowDispatcher
from ascend_moe.errors import ArgumentError, AscendMoeError, CommTimeout, WindowTooSmall
from ascend_moe.reference import cases
from ascend_moe.reference.cases import Case

# gradcheck warns of every input that is not fp64.
pytestmark = pytest.mark.filterwarnings("ignore:Input #.*double precision")


@dataclass(frozen=True)
class Trip:
    """Dispatch, experts that are linear, combine. ``inside``: the experts apply the weights, combine only adds."""

    case: Case
    comm_alg: str = ""
    inside: bool = False
    shuffled: bool = False  # combine gets its rows in another order than dispatch's, with their triples

    def leaves(self, rank: int) -> list[Tensor]:
        """The tensors of a rank that have a gradient."""
        given = self.case.inputs[rank]
        every = [given.x, given.expert_scales, given.shared_expert_x]
        # Of no rows numpy makes strides of 0, which gradcheck does not take.
        return [torch.empty(tensor.shape).copy_(tensor) for tensor in every if tensor is not None]

    def run(self, rank: int, group_ep: str, *leaves: Tensor) -> Tensor:
        *_, y = self.steps(rank, group_ep, *leaves)
        return y

    def steps(
        self, rank: int, group_ep: str, x: Tensor, weights: Tensor, shared: Tensor | None = None
    ) -> Iterator[Tensor]:
        """Of dispatch, and of combine."""
        case, given = self.case, self.case.inputs[rank]
        options: dict[str, Any] = {"x_active_mask": given.x_active_mask, "global_bs": case.global_bs}
        options |= {"comm_alg": self.comm_alg} if case.contract == 2 else {}
        place = group_ep, case.world, rank, case.experts
        version = "_v2" if case.contract == 2 else ""
        extra = {"expert_scales": weights} if self.inside else {}
        dispatch = getattr(ascend_moe, f"npu_moe_distribute_dispatch{version}")
        combine = getattr(ascend_moe, f"npu_moe_distribute_combine{version}")
        sent = dispatch(x, given.expert_ids, *place, **options, **extra)
        yield sent[0]
        rows = sent[0] * self.factors(rank, sent[4], sent[0].shape)
        if self.inside:
            rows, weights = rows * sent[6][:, None], weights.new_empty(0)
        index = sent[2]
        if self.shuffled:
            count = int(sent[4][case.experts - 1])
            order = torch.randperm(count, generator=torch.Generator().manual_seed(rank))
            rows, index = rows[order], index.view(-1)[: 3 * count].view(count, 3)[order].reshape(-1)
        options |= {"shared_expert_x": shared} if shared is not None else {}
        yield combine(rows, given.expert_ids, index, sent[4], weights, *place, **options)

    def factors(self, rank: int, counts: Tensor, shape: Sequence[int]) -> Tensor:
        """(A, H): what each row's expert multiplies each column by; NaN behind the last row."""
        case = self.case
        total, ends = int(counts[case.experts - 1]), counts[case.world - 1 : case.experts : case.world].contiguous()
        expert = torch.searchsorted(ends, torch.arange(total, dtype=ends.dtype), right=True) + rank * case.local
        made = torch.full(tuple(shape), float("nan"))
        made[:total] = 1 + (expert[:, None] * 3 + torch.arange(shape[1])) % 5 / 4
        return made


class AllRanks(torch.autograd.Function):
    """The results of all ranks as a function of the leaves of all ranks; forward and backward run on W threads."""

    @staticmethod
    def forward(ctx: Any, cluster: LocalCluster, trip: Trip, *leaves: Tensor) -> Any:
        share = len(leaves) // trip.case.world

        def forward(rank: int, group_ep: str) -> tuple[list[Tensor], Tensor]:
            mine = [leaf.detach().requires_grad_() for leaf in leaves[rank * share :][:share]]
            with torch.enable_grad():
                return mine, trip.run(rank, group_ep, *mine)

        ctx.cluster, ctx.made = cluster, cluster.run(forward)
        return tuple(y.detach() for _, y in ctx.made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        def backward(rank: int, _: str) -> Any:
            mine, y = ctx.made[rank]
            return torch.autograd.grad(y, mine, grads[rank], retain_graph=True)

        found = ctx.cluster.run(backward)
        return None, None, *(grad for each in found for grad in each)


def check_numbers(cluster: LocalCluster, trip: Trip, *, fast: bool = True) -> None:
    """Every ∂y/∂leaf of all ranks, in fp32. In each leaf the trip is linear: a step of any width is exact."""
    leaves = [leaf.requires_grad_() for rank in range(trip.case.world) for leaf in trip.leaves(rank)]

    def run(*leaves: Tensor) -> Any:
        return AllRanks.apply(cluster, trip, *leaves)  # type: ignore[no-untyped-call]

    # Fast is by random projections: one backward pass, not one for every element of the results.
    assert gradcheck(run, leaves, eps=1.0, atol=2e-4, rtol=1e-4, nondet_tol=0.0, fast_mode=fast)


def small(**attributes: Any) -> Case:
    """A case of few outputs: a backward pass for each of them."""
    name = " ".join(str(value) for value in attributes.values())
    return Case(name, **{"dtype": "fp32", "contract": 2, "units": 1, "batch": 3, **attributes})


CASES = [
    *(small(world=world, shared=2, ids="distinct") for world in (1, 2, 4)),
    small(world=2, contract=1),
    small(world=4, contract=1, ids="mixed", mask="pair", batches="unequal"),
    small(world=4, ids="mixed", mask="pair", batches="unequal", shared=3),
    small(world=2, ids="minus", mask="token", shared=2, topk=3),
    small(world=4, ids="duplicates", batches="zero rank", shared=2),
    small(world=4, ids="hot", batches="zero rank", mask="prefix"),
    small(world=2, ids="popular", topk=1, local=1, batches="global_bs"),
    small(world=2, ids="none", shared=2),
    small(world=2, mask="nobody", shared=2),
    small(world=2, batches="one rank only", ids="mixed", seed=1),
    small(world=2, batches="no tokens"),
]


@pytest.mark.parametrize("inside", [False, True], ids=["", "inside"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numeric_gradients(case: Case, inside: bool, clusters: Any) -> None:
    check_numbers(clusters[case.world], Trip(case, inside=inside))


@pytest.mark.parametrize("comm_alg", ["window", "direct"])
def test_numeric_gradients_by_each_algorithm(comm_alg: str, clusters: Any) -> None:
    check_numbers(clusters[2], Trip(small(ids="mixed", batches="unequal", shared=2), comm_alg), fast=False)


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(6, 200))]
)
def test_numeric_gradients_of_cases_by_chance(seed: int, clusters: Any) -> None:
    choices: dict[str, Any] = {"dtype": ("fp32",), "quant": ("none",), "odd": (False,), "shared": (0, 2)}
    case = cases.draw(seed, **choices, batch=(1, 2, 4))
    algorithm = ("", "window", "direct")[seed % 3]
    check_numbers(clusters[case.world], Trip(case, algorithm, inside=seed % 2 == 1))


@pytest.mark.parametrize("comm_alg", ["window", "direct"])
def test_numeric_gradients_of_more_than_8_experts_a_token(comm_alg: str, clusters: Any) -> None:
    """The weights' gradients come home as columns of a row, 8 of which are the narrowest row."""
    for topk, contract in ((9, 2), (17, 2), (9, 1)):
        case = small(world=2, topk=topk, local=9, ids="distinct", contract=contract, batch=2)
        check_numbers(clusters[2], Trip(case, comm_alg if contract == 2 else "", inside=comm_alg == "direct"))


def test_rows_of_many_slots_in_another_order(clusters: Any) -> None:
    check_numbers(clusters[2], Trip(small(world=2, topk=7, local=5, ids="distinct", batch=6), "window", shuffled=True))


def test_the_widest_rows_have_gradients_of_their_weights(clusters: Any) -> None:
    """No wider row can have the columns behind it."""
    trip = Trip(Case(world=1, topk=1, local=1, batch=1, width=16384, dtype="fp32", contract=2), inside=True)

    def run(rank: int, group_ep: str) -> None:
        x, weights = (leaf.requires_grad_() for leaf in trip.leaves(rank))
        trip.run(rank, group_ep, x, weights).sum().backward()
        factors = trip.factors(rank, torch.ones(1, dtype=torch.int32), x.shape)
        assert x.grad is not None and torch.equal(x.grad, factors * weights.detach())
        assert weights.grad is not None
        torch.testing.assert_close(weights.grad, (factors * x.detach()).sum(1, keepdim=True), rtol=1e-4, atol=1e-2)

    clusters[1].run(run)


def test_weights_that_nothing_used_have_a_gradient_of_zero(clusters: Any) -> None:
    case = small(world=2, ids="distinct")

    def run(rank: int, group_ep: str) -> None:
        given = case.inputs[rank]
        weights = given.expert_scales.clone().requires_grad_()
        x = given.x.clone().requires_grad_()
        place = group_ep, 2, rank, case.experts
        sent = ascend_moe.npu_moe_distribute_dispatch_v2(x, given.expert_ids, *place, expert_scales=weights)
        sent[0][: int(sent[4][-1])].sum().backward()
        assert weights.grad is not None and not weights.grad.any()
        assert x.grad is not None and bool((x.grad == case.topk).all())

    clusters[2].run(run)


@pytest.mark.parametrize("comm_alg", ["window", "direct"])
def test_a_backward_goes_by_the_algorithm_of_its_call(
    comm_alg: str, clusters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trip, find, seen = Trip(small(world=1), comm_alg, inside=True), autograd._op, []

    def spied(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            seen.append(options.get("comm_alg"))
            return find(name)(*args, **options)

        return call

    monkeypatch.setattr(autograd, "_op", spied)

    def run(rank: int, group_ep: str) -> None:
        trip.run(rank, group_ep, *(leaf.requires_grad_() for leaf in trip.leaves(rank))).sum().backward()

    clusters[1].run(run)
    assert len(seen) >= 2 and set(seen) == {comm_alg}


def test_everything_on_one_expert(clusters: Any) -> None:
    case = small(world=4, topk=1)
    inputs = [replace(one, expert_ids=torch.full_like(one.expert_ids, 5)) for one in case.inputs]
    check_numbers(clusters[4], Trip(Case.of(inputs, case.experts, contract=2)))


def test_rows_in_another_order_than_dispatchs(clusters: Any) -> None:
    check_numbers(clusters[2], Trip(small(ids="mixed", batches="unequal"), "window", shuffled=True))


@pytest.mark.parametrize("counted", [True, False])
def test_rows_that_did_not_arrive_have_a_gradient_of_zero(
    counted: bool, clusters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the host cannot read how many rows arrived."""
    case, send = small(world=2, ids="minus"), autograd._Route.dispatch

    def with_nan(*args: Any) -> Any:
        sent = send(*args)
        sent[0][int(sent[4][case.experts - 1]) :] = float("nan")  # undefined, and often zero by chance
        return sent

    monkeypatch.setattr(autograd._Route, "dispatch", with_nan)
    if not counted:
        monkeypatch.setattr(autograd, "_used", lambda *_: None)

    def run(rank: int, group_ep: str) -> None:
        given, place = case.inputs[rank], (group_ep, 2, rank, case.experts)
        sent = ascend_moe.npu_moe_distribute_dispatch_v2(given.x, given.expert_ids, *place)
        rows, tensors = sent[0].clone().requires_grad_(), (given.expert_ids, sent[2], sent[4], given.expert_scales)
        y = ascend_moe.npu_moe_distribute_combine_v2(rows, *tensors, *place).sum()
        y.backward()
        assert rows.grad is not None
        count = int(sent[4][-1])
        assert 0 < count < len(rows) and bool((rows.grad[:count] != 0).all())
        assert bool((rows.grad[count:] == 0).all())

    clusters[2].run(run)


# ---- the dispatchers


def carried(dispatcher: Dispatcher, case: Case) -> list[Tensor]:
    """A rank's result and its gradients, the experts being linear."""
    given = case.inputs[dispatcher.rank]
    shared = given.shared_expert_x
    leaves = [each.detach().clone().requires_grad_() for each in (given.x, given.expert_scales, shared)]
    options: dict[str, Any] = {"x_active_mask": given.x_active_mask, "global_bs": case.global_bs}
    sent = dispatcher.dispatch(leaves[0], given.expert_ids, **options)
    factors = Trip(case).factors(dispatcher.rank, sent.ep_recv_counts, sent.expand_x.shape)
    rows = (sent.expand_x * factors).to(case.torch_dtype)
    y = dispatcher.combine(rows, sent, leaves[1], shared_expert_x=leaves[2])
    (y.float() * (1 + torch.arange(y.numel()).view(y.shape) % 7)).sum().backward()
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "case",
    [
        small(world=2, ids="mixed", mask="pair", batches="unequal", shared=2),
        small(world=4, ids="hot", mask="token", batches="zero rank", shared=2),
        small(world=2, batches="no tokens", shared=2),
    ],
    ids=lambda case: case.name,
)
def test_all_dispatchers_have_the_same_gradients(case: Case, dtype: str, clusters: Any) -> None:
    case = replace(case, dtype=dtype, width=16)
    world, experts = case.world, case.experts
    expected = clusters[world].run(lambda rank, group: carried(WindowDispatcher(group, world, rank, experts), case))
    assert all(len(found) == 4 for found in expected)
    for kind in (AllToAllDispatcher, AllGatherDispatcher):
        body = functools.partial(gradients_by, kind, case)
        for one, other in zip(threads(world).run(body), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def gradients_by(kind: Any, case: Case, rank: int, group: Any) -> list[Tensor]:
    return carried(kind(group, case.experts), case)


# ---- int8


@pytest.fixture
def straight_through() -> Iterator[None]:
    ascend_moe.set_int8_gradient("straight_through")
    yield
    ascend_moe.set_int8_gradient("refuse")


def quantized(dispatcher: Dispatcher, case: Case, mode: int, **options: Any) -> Tensor | None:
    given = case.inputs[dispatcher.rank]
    x = given.x.detach().clone().requires_grad_()
    sent = dispatcher.dispatch(x, given.expert_ids, quant_mode=mode, **options)
    rows = ascend_moe.dequantize_rows(sent.expand_x, sent.dynamic_scales) if mode else sent.expand_x
    y = dispatcher.combine(
        rows * Trip(case).factors(dispatcher.rank, sent.ep_recv_counts, rows.shape), sent, given.expert_scales
    )
    y.sum().backward()
    return x.grad


def carriers(case: Case, cluster: LocalCluster, body: Callable[[Dispatcher], Any]) -> list[list[Any]]:
    """The body's results by rank, over windows and over all-to-all."""
    world, experts = case.world, case.experts
    windows = cluster.run(lambda rank, group: body(WindowDispatcher(group, world, rank, experts)))
    return [windows, threads(world).run(lambda _, group: body(AllToAllDispatcher(group, experts)))]


def test_int8_gradients_as_if_nothing_was_rounded(straight_through: None, clusters: Any) -> None:
    case = small(world=2, ids="mixed")
    rounded, exact = (
        carriers(case, clusters[2], functools.partial(quantized, case=case, mode=mode)) for mode in (2, 0)
    )
    for found, expected in zip(rounded, exact, strict=True):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other) and bool((one != 0).any())


def test_int8_rows_may_be_used_twice_and_have_two_backwards(straight_through: None, clusters: Any) -> None:
    """Gradients of all uses add up; nothing of the first backward is left for the second."""
    case = small(world=2, ids="mixed")

    def body(dispatcher: Dispatcher) -> None:
        given = case.inputs[dispatcher.rank]
        x = given.x.detach().clone().requires_grad_()
        sent = dispatcher.dispatch(x, given.expert_ids, quant_mode=2)
        factors = torch.nan_to_num(Trip(case).factors(dispatcher.rank, sent.ep_recv_counts, sent.expand_x.shape))

        def gradient(*uses: float) -> Tensor:
            x.grad = None
            rows = [each * ascend_moe.dequantize_rows(sent.expand_x, sent.dynamic_scales) for each in uses]
            y = dispatcher.combine(sum(rows[1:], rows[0]) * factors, sent, given.expert_scales)
            for _ in range(2):
                x.grad = None
                y.sum().backward(retain_graph=True)
            assert x.grad is not None
            return x.grad.clone()

        once = gradient(1.0)
        assert bool(once.any())
        torch.testing.assert_close(gradient(1.0, 3.0), 4 * once)
        assert torch.equal(gradient(2.0), 2 * once)  # of the same dispatch, afterwards

    carriers(case, clusters[2], body)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_int8_rows_become_floats_in_float32_and_are_rounded_once(dtype: torch.dtype) -> None:
    codes, scales = torch.arange(-128, 128).to(torch.int8).view(4, 64), torch.tensor([0.1, 0.013, 3.7, 0.0])
    found = ascend_moe.dequantize_rows(codes, scales, dtype)
    assert torch.equal(found, (codes.float() * scales[:, None]).to(dtype))


def test_int8_gradients_of_half_tokens_are_half(straight_through: None, clusters: Any) -> None:
    """Gradients of rows come in fp32, and that of x is in its dtype."""
    case = replace(small(world=2, ids="mixed"), dtype="bf16")

    def body(dispatcher: Dispatcher) -> Tensor:
        given = case.inputs[dispatcher.rank]
        x = given.x.detach().clone().requires_grad_()
        sent = dispatcher.dispatch(x, given.expert_ids, quant_mode=2)
        rows = ascend_moe.dequantize_rows(sent.expand_x, sent.dynamic_scales)
        factors = torch.nan_to_num(Trip(case).factors(dispatcher.rank, sent.ep_recv_counts, rows.shape))
        (rows * factors / 3).sum().backward()
        assert x.grad is not None and x.grad.dtype == torch.bfloat16
        return x.grad

    windows, collectives = carriers(case, clusters[2], body)
    for one, other in zip(windows, collectives, strict=True):
        assert torch.equal(one, other) and bool(one.any())


def test_int8_gradients_that_would_be_wrong_are_refused(clusters: Any) -> None:
    case = small(world=2, ids="distinct")

    def refused(dispatcher: Dispatcher) -> None:
        with pytest.raises(
            AscendMoeError, match=r"quant_mode 2 are not differentiable: use quant_mode 0, or ascend_moe\.set"
        ):
            quantized(dispatcher, case, 2)

    carriers(case, clusters[2], refused)
    with pytest.raises(ArgumentError, match="mode is 'on'; need one of refuse, straight_through"):
        ascend_moe.set_int8_gradient("on")


def test_int8_straight_through_needs_the_rows_and_no_scales(straight_through: None, clusters: Any) -> None:
    case = small(world=2, ids="distinct")

    def alone(dispatcher: Dispatcher) -> None:
        x = case.inputs[dispatcher.rank].x.detach().clone().requires_grad_()
        ids = case.inputs[dispatcher.rank].expert_ids
        with pytest.raises(AscendMoeError, match="dynamic_scales alone have a gradient"):
            dispatcher.dispatch(x, ids, quant_mode=2).dynamic_scales.sum().backward()
        with pytest.raises(AscendMoeError, match="dynamic_scales are not those that a dispatch returned"):
            sent = dispatcher.dispatch(x, ids, quant_mode=2)
            ascend_moe.dequantize_rows(sent.expand_x, sent.dynamic_scales * 1).sum().backward()
        with pytest.raises(ArgumentError, match="scales have no gradient"):
            quantized(dispatcher, case, 2, scales=torch.ones(case.experts, case.hidden))
        with pytest.raises(ArgumentError, match="expand_x is"):
            ascend_moe.dequantize_rows(sent.expand_x.float(), sent.dynamic_scales)
        with pytest.raises(ArgumentError, match="dynamic_scales is"):
            ascend_moe.dequantize_rows(sent.expand_x, sent.dynamic_scales[1:])

    carriers(case, clusters[2], alone)


def test_windows_too_small_for_the_extra_columns_are_enough() -> None:
    """Then the weights' gradients come home by a combine of their own."""
    trip = Trip(Case(world=1, topk=1, batch=3500, width=32, dtype="fp32", contract=2, ids="distinct"), inside=True)

    def run(rank: int, group_ep: str) -> list[Tensor]:
        leaves = [leaf.requires_grad_() for leaf in trip.leaves(rank)]
        trip.run(rank, group_ep, *leaves).square().sum().backward()
        wide = torch.empty(3500, 40), trip.case.inputs[rank].expert_ids
        if window == 1:
            with pytest.raises(WindowTooSmall):
                ascend_moe.npu_moe_distribute_dispatch_v2(*wide, group_ep, 1, rank, trip.case.experts)
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    found = []
    for window in (1, 4):
        with LocalCluster(1, window_mib=window) as cluster:
            found += cluster.run(run)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


# ---- orders of calls


def micro_batches(order: str) -> Callable[[int, str], list[Tensor]]:
    """Two micro-batches; ``order`` says which of them does its next step: dispatch, combine, backward."""
    trips = [Trip(small(world=2, ids="mixed", batches="unequal", seed=seed)) for seed in (1, 2)]

    def run(rank: int, group_ep: str) -> list[Tensor]:
        leaves = [[leaf.requires_grad_() for leaf in trip.leaves(rank)] for trip in trips]

        def steps(number: int) -> Iterator[Any]:
            forward = trips[number].steps(rank, group_ep, *leaves[number])
            yield next(forward)
            y = next(forward)
            yield y
            yield y.square().sum().backward()

        running = [steps(number) for number in range(2)]
        for number in order:
            next(running[int(number)])
        return [leaf.grad for mine in leaves for leaf in mine if leaf.grad is not None]

    return run


@pytest.mark.parametrize("order", ["010101", "011010", "001011", "010011"])
def test_two_micro_batches_may_be_open_at_once(order: str, clusters: Any) -> None:
    expected = clusters[2].run(micro_batches("000111"))
    for one, other in zip(clusters[2].run(micro_batches(order)), expected, strict=True):
        assert len(one) == 4 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_have_the_same_gradients(reentrant: bool, clusters: Any) -> None:
    trip = Trip(small(world=2, ids="mixed", batches="zero rank", shared=2))

    def run(rank: int, group_ep: str, recompute: bool) -> list[Tensor]:
        leaves = [leaf.requires_grad_() for leaf in trip.leaves(rank)]
        body = functools.partial(trip.run, rank, group_ep)
        y = checkpoint(body, *leaves, use_reentrant=reentrant) if recompute else body(*leaves)
        y.square().sum().backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    expected, found = (clusters[2].run(run, recompute) for recompute in (False, True))
    for one, other in zip(found, expected, strict=True):
        assert len(one) == 3 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_forward_keeps_the_routing_only(clusters: Any) -> None:
    """Rows are kept where the weights want a gradient, and there only."""
    trip = Trip(small(world=1))

    def run(rank: int, group_ep: str, wanting: bool) -> list[tuple[int, ...]]:
        kept: list[Tensor] = []
        x, weights = trip.leaves(rank)

        def keep(tensor: Tensor) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            place = group_ep, 1, rank, trip.case.experts
            ids = trip.case.inputs[rank].expert_ids
            sent = ascend_moe.npu_moe_distribute_dispatch_v2(x.requires_grad_(), ids, *place)
            weights.requires_grad_(wanting)
            ascend_moe.npu_moe_distribute_combine_v2(sent[0], ids, sent[2], sent[4], weights, *place)
        return [tuple(tensor.shape) for tensor in kept if tensor.dim() == 2 and tensor.shape[1] == trip.case.hidden]

    (without,), (rows,) = (clusters[1].run(run, wanting) for wanting in (False, True))
    assert without == [] and len(rows) == 1


# ---- failures


def test_second_derivatives_are_refused(clusters: Any) -> None:
    trip = Trip(small(world=1, ids="distinct"))

    def run(rank: int, group_ep: str) -> None:
        leaves = [leaf.requires_grad_() for leaf in trip.leaves(rank)]
        (gx, gw) = torch.autograd.grad(trip.run(rank, group_ep, *leaves).square().sum(), leaves, create_graph=True)
        for grad in (gx, gw):
            with pytest.raises(RuntimeError, match="once_differentiable"):
                grad.sum().backward(retain_graph=True)

    clusters[1].run(run)


def test_between_servers_slots_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """An A2's dispatch has no triples for rows of other servers."""
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", "2")
    for inside in (False, True):
        with LocalCluster(4) as cluster:
            check_numbers(cluster, Trip(small(world=4, ids="mixed", mask="pair"), inside=inside))


def backward_alone(rank: int, world: int, dies: int) -> None:
    trip = Trip(small(world=world, ids="distinct"))
    leaves = [leaf.requires_grad_() for leaf in trip.leaves(rank)]
    y = trip.run(rank, ascend_moe.comm_name(), *leaves)
    if rank == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    y.sum().backward()


def test_a_rank_that_is_killed_before_its_backward_is_named() -> None:
    with Ranks(3, timeout_s=20) as ranks:
        for rank in range(3):
            ranks.start(rank, backward_alone, rank, 3, 1)
        for rank in (0, 2):
            outcome = ranks.wait(rank)
            assert_named(outcome, "PeerLost", 1)
            assert "dispatch" in outcome.text  # the backward of combine


def test_a_rank_that_runs_no_backward_is_named(clusters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "1")
    trip = Trip(small(world=2, ids="distinct"))

    def run(rank: int, group_ep: str) -> str:
        y = trip.run(rank, group_ep, *(leaf.requires_grad_() for leaf in trip.leaves(rank)))
        if rank == 1:
            time.sleep(3)
            return ""
        with pytest.raises(CommTimeout) as caught:
            y.sum().backward()
        return str(caught.value)

    with LocalCluster(2) as cluster:
        assert "rank 1" in cluster.run(run)[0]


def test_the_page_about_training_runs() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "training.md"
    code = page.read_text().partition("```python\n")[2].partition("```")[0]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    norms = [float(norm) for norm in done.stdout.strip("[]\n").split(", ")]
    assert len(norms) == 4 and max(norms) > 0


@pytest.mark.parametrize("algorithm", ["window", "direct"])
def test_no_schedule_of_a_training_step_hangs(algorithm: str) -> None:
    """Two micro-batches forward, and their backwards: dispatches with weights, combines without."""
    case = explore.Program(
        world=3,
        contract=2,
        dtype="fp32",
        ids="mixed",
        batches="zero rank",
        sequence="DDCCDCDC",
        weights=True,
        plain=True,
        algorithm=algorithm,
    )
    result = explore.explore(case, schedules=200)
    assert result.schedules == 200 and not result.finding, result.finding and result.finding.line()
