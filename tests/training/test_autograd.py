"""Gradients of dispatch and combine agree with numbers, in any order of calls, and of int8 rows."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from bad_arguments import refused
from gloo_ranks import threads
from gradient_cases import Trip, check_numbers, small
from rank_processes import Ranks, assert_named
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ascend_moe
from ascend_moe.call import SpecialExperts
from ascend_moe.comm import LocalCluster
from ascend_moe.dispatchers import AllGatherDispatcher, AllToAllDispatcher, Dispatcher, MC2Dispatcher
from ascend_moe.errors import ArgumentError, AscendMoeError, WindowTooSmall
from ascend_moe.ops import autograd
from ascend_moe.reference import cases
from ascend_moe.reference.cases import Case
from ascend_moe.reference.records import active_pairs

# gradcheck warns of every input that is not fp64.
pytestmark = pytest.mark.filterwarnings("ignore:Input #.*double precision")


@pytest.mark.parametrize("weighted", [True, False])
def test_gradients_of_const_experts_that_mix_by_products(weighted: bool, clusters: Any) -> None:
    """The factors are a softmax, so steps are not exact: compared with what torch makes of the formula."""
    case = small(
        world=2, **SpecialExperts(1, 2, 3).given, alphas=2, topk=5, mask="pair", batch=6, units=5, ids="mixed", seed=1
    )
    names = ("expert_scales", "ori_x", "const_expert_alpha_1", "const_expert_alpha_2", "const_expert_v")

    def run(rank: int, group_ep: str) -> None:
        given, (zero, copies, _) = case.inputs[rank], case.special
        leaves = [getattr(given, name).clone().requires_grad_() for name in names]
        trip, grad = Trip(case), torch.linspace(-1, 1, given.x.numel()).reshape(given.x.shape)
        weights, x, alpha_1, alpha_2, v = leaves
        used = weights if weighted else torch.empty(0)
        found = torch.autograd.grad(trip.run(rank, group_ep, given.x, used, *leaves[1:]), leaves[1:], grad)
        first = case.experts + zero
        total = torch.zeros_like(x)
        for token, k, expert in active_pairs(given):
            if first <= expert < first + copies:
                term = x[token]
            elif expert >= first + copies:
                place = expert - first - copies
                share = torch.stack([alpha_1[place] @ x[token], alpha_2[place] @ x[token]]).softmax(0)
                term = share[0] * x[token] + share[1] * v[place]
            else:
                continue
            factor = weights[token, k] if weighted else 1.0
            total = total + torch.nn.functional.one_hot(torch.tensor(token), len(x))[:, None] * (factor * term)
        for name, ours, theirs in zip(names[1:], found, torch.autograd.grad(total, leaves[1:], grad), strict=True):
            assert ours.any(), name
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=name)

    clusters[2].run(run)


@pytest.mark.parametrize(
    "seed", [*range(24), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(24, 200))]
)
def test_numeric_gradients_of_cases_by_chance(seed: int, clusters: Any) -> None:
    choices: dict[str, Any] = {
        "dtype": ("fp32",),
        "quant": ("none",),
        "odd": (False,),
        "shared": (0, 2),
        "alphas": (1,),
    }
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


def test_the_widest_rows_have_gradients_of_their_weights(group_ep: str) -> None:
    """No wider row can have the columns behind it."""
    trip = Trip(Case(world=1, topk=1, local=1, batch=1, width=16384, dtype="fp32", contract=2), inside=True)
    x, weights = (leaf.requires_grad_() for leaf in trip.leaves(0))
    trip.run(0, group_ep, x, weights).sum().backward()
    factors = trip.factors(0, torch.ones(1, dtype=torch.int32), x.shape)
    assert x.grad is not None and torch.equal(x.grad, factors * weights.detach())
    assert weights.grad is not None
    torch.testing.assert_close(weights.grad, (factors * x.detach()).sum(1, keepdim=True), rtol=1e-4, atol=1e-2)


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
    comm_alg: str, group_ep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trip, find, seen = Trip(small(world=1), comm_alg, inside=True), autograd._op, []

    def spied(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            seen.append(options.get("comm_alg"))
            return find(name)(*args, **options)

        return call

    monkeypatch.setattr(autograd, "_op", spied)
    trip.run(0, group_ep, *(leaf.requires_grad_() for leaf in trip.leaves(0))).sum().backward()
    assert len(seen) >= 2 and set(seen) == {comm_alg}


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


def carried(dispatcher: Dispatcher, case: Case, by_experts: bool) -> list[Tensor]:
    """A rank's result and its gradients, the experts being linear; the weights multiply there, or in combine."""
    given = case.inputs[dispatcher.rank]
    every = (given.x, given.expert_scales, *given.local_addends.values())
    leaves = [each.detach().clone().requires_grad_() for each in every]
    options: dict[str, Any] = {"x_active_mask": given.x_active_mask, "global_bs": case.global_bs}
    options |= {"expert_scales": leaves[1]} if by_experts else {}
    sent = dispatcher.dispatch(leaves[0], given.expert_ids, **options)
    factors = Trip(case).factors(dispatcher.rank, sent.ep_recv_counts, sent.expand_x.shape)
    rows = sent.expand_x * factors
    if by_experts:
        count = int(sent.ep_recv_counts[-1])
        assert torch.equal(sent.expand_scales[:count] != 0, torch.ones(count, dtype=torch.bool))
        rows = rows * torch.nn.functional.pad(sent.expand_scales[:count], (0, len(rows) - count))[:, None]
    weights = None if by_experts else leaves[1]
    own = dict(zip(given.local_addends, leaves[2:], strict=True))
    y = dispatcher.combine(rows.to(case.torch_dtype), sent, weights, **own)
    (y.float() * (1 + torch.arange(y.numel()).view(y.shape) % 7)).sum().backward()
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "case",
    [
        small(world=2, ids="mixed", mask="pair", batches="unequal", shared=2),
        small(world=4, ids="hot", mask="token", batches="zero rank", shared=2),
        small(world=2, batches="no tokens", shared=2),
        small(
            world=2, **SpecialExperts(1, 2, 0).given, topk=3, ids="mixed", mask="pair", batches="zero rank", shared=2
        ),
        small(world=2, **SpecialExperts(1, 1, 2).given, topk=5, ids="mixed", mask="token", batches="unequal", shared=2),
        small(world=2, **SpecialExperts(0, 1, 2).given, alphas=2, topk=5, ids="mixed", shared=2, seed=1),
    ],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize("by_experts", [False, True])
def test_all_dispatchers_have_the_same_gradients(case: Case, dtype: str, by_experts: bool, clusters: Any) -> None:
    case = replace(case, dtype=dtype, width=16)
    world = case.world
    expected = clusters[world].run(functools.partial(gradients_by, MC2Dispatcher.from_group, case, by_experts))
    leaves = 4 + (4 if case.const_expert_num else 1 if case.special[1] else 0)
    assert all(len(found) == leaves for found in expected)
    for kind in (AllToAllDispatcher, AllGatherDispatcher):
        body = functools.partial(gradients_by, kind, case, by_experts)
        for ranks in (threads(world), clusters[world]):  # over a process group, and over a LocalCluster's windows
            for found, wanted in zip(ranks.run(body), expected, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def gradients_by(kind: Any, case: Case, by_experts: bool, rank: int, group: Any) -> list[Tensor]:
    return carried(kind(group, case.experts, **case.special.given), case, by_experts)


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


# ---- failures


def test_second_derivatives_are_refused(group_ep: str) -> None:
    trip = Trip(small(world=1, ids="distinct"))
    leaves = [leaf.requires_grad_() for leaf in trip.leaves(0)]
    (gx, gw) = torch.autograd.grad(trip.run(0, group_ep, *leaves).square().sum(), leaves, create_graph=True)
    for grad in (gx, gw):
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward(retain_graph=True)


def test_between_servers_slots_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """An A2's dispatch has no source_indices for rows of other servers."""
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


# ---- int8 rows


@pytest.fixture
def straight_through() -> Iterator[None]:
    ascend_moe.set_int8_gradient("straight_through")
    yield
    ascend_moe.set_int8_gradient("refuse")


def rows_of(dispatcher: Dispatcher, case: Case, mode: int = 2, **options: Any) -> tuple[Tensor, Any, Tensor, Tensor]:
    """x, what its dispatch returned, the rows as floats, and the factors of their experts."""
    x = case.inputs[dispatcher.rank].x.detach().clone().requires_grad_()
    sent = dispatcher.dispatch(x, case.inputs[dispatcher.rank].expert_ids, quant_mode=mode, **options)
    rows = ascend_moe.dequantize_rows(sent.expand_x, sent.dynamic_scales) if mode else sent.expand_x
    return x, sent, rows, Trip(case).factors(dispatcher.rank, sent.ep_recv_counts, rows.shape)


def quantized(dispatcher: Dispatcher, case: Case, mode: int, **options: Any) -> Tensor | None:
    x, sent, rows, factors = rows_of(dispatcher, case, mode, **options)
    dispatcher.combine(rows * factors, sent, case.inputs[dispatcher.rank].expert_scales).sum().backward()
    return x.grad


def transports(case: Case, cluster: LocalCluster, body: Callable[[Dispatcher], Any]) -> list[list[Any]]:
    """The body's results by rank, over windows and over all-to-all."""
    world, experts = case.world, case.experts
    windows = cluster.run(lambda rank, group: body(MC2Dispatcher(group, world, rank, experts)))
    return [windows, threads(world).run(lambda _, group: body(AllToAllDispatcher(group, experts)))]


def test_int8_gradients_as_if_nothing_was_rounded(straight_through: None, clusters: Any) -> None:
    case = small(world=2, ids="mixed")
    rounded, exact = (
        transports(case, clusters[2], functools.partial(quantized, case=case, mode=mode)) for mode in (2, 0)
    )
    for found, expected in zip(rounded, exact, strict=True):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other) and bool((one != 0).any())


def test_int8_rows_may_be_used_twice_and_have_two_backwards(straight_through: None, clusters: Any) -> None:
    """Gradients of all uses add up; nothing of the first backward is left for the second."""
    case = small(world=2, ids="mixed")

    def body(dispatcher: Dispatcher) -> None:
        x, sent, _, factors = rows_of(dispatcher, case)
        weights = case.inputs[dispatcher.rank].expert_scales

        def gradient(*uses: float) -> Tensor:
            x.grad = None
            rows = [each * ascend_moe.dequantize_rows(sent.expand_x, sent.dynamic_scales) for each in uses]
            y = dispatcher.combine(sum(rows[1:], rows[0]) * torch.nan_to_num(factors), sent, weights)
            for _ in range(2):
                x.grad = None
                y.sum().backward(retain_graph=True)
            assert x.grad is not None
            return x.grad.clone()

        once = gradient(1.0)
        assert bool(once.any())
        torch.testing.assert_close(gradient(1.0, 3.0), 4 * once)
        assert torch.equal(gradient(2.0), 2 * once)  # of the same dispatch, afterwards

    transports(case, clusters[2], body)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_int8_rows_become_floats_in_float32_and_are_rounded_once(dtype: torch.dtype) -> None:
    codes, scales = torch.arange(-128, 128).to(torch.int8).view(4, 64), torch.tensor([0.1, 0.013, 3.7, 0.0])
    found = ascend_moe.dequantize_rows(codes, scales, dtype)
    assert torch.equal(found, (codes.float() * scales[:, None]).to(dtype))


def test_int8_gradients_of_half_tokens_are_half(straight_through: None, clusters: Any) -> None:
    """Gradients of rows come in fp32, and that of x is in its dtype."""
    case = replace(small(world=2, ids="mixed"), dtype="bf16")

    def body(dispatcher: Dispatcher) -> Tensor:
        x, _, rows, factors = rows_of(dispatcher, case)
        (rows * torch.nan_to_num(factors) / 3).sum().backward()
        assert x.grad is not None and x.grad.dtype == torch.bfloat16
        return x.grad

    windows, collectives = transports(case, clusters[2], body)
    for one, other in zip(windows, collectives, strict=True):
        assert torch.equal(one, other) and bool(one.any())


def test_int8_gradients_that_would_be_wrong_are_refused(clusters: Any) -> None:
    case = small(world=2, ids="distinct")

    def backward(dispatcher: Dispatcher) -> None:
        with pytest.raises(AscendMoeError, match=r"are not differentiable: use quant_mode 0, or ascend_moe\.set"):
            quantized(dispatcher, case, 2)

    transports(case, clusters[2], backward)
    refused("mode", ascend_moe.set_int8_gradient, "on", says="mode is 'on'; need one of refuse, straight_through")


def test_int8_straight_through_needs_the_rows_and_no_scales(straight_through: None, clusters: Any) -> None:
    case = small(world=2, ids="distinct")

    def alone(dispatcher: Dispatcher) -> None:
        with pytest.raises(AscendMoeError, match="only dynamic_scales have a gradient"):
            rows_of(dispatcher, case)[1].dynamic_scales.sum().backward()
        sent = rows_of(dispatcher, case)[1]
        with pytest.raises(AscendMoeError, match="dynamic_scales were not returned by a dispatch"):
            ascend_moe.dequantize_rows(sent.expand_x, sent.dynamic_scales * 1).sum().backward()
        with pytest.raises(ArgumentError, match="scales have no gradient"):
            quantized(dispatcher, case, 2, scales=torch.ones(case.experts, case.hidden))
        refused("expand_x", ascend_moe.dequantize_rows, sent.expand_x.float(), sent.dynamic_scales, says="expand_x is")
        with pytest.raises(ArgumentError, match="dynamic_scales is"):
            ascend_moe.dequantize_rows(sent.expand_x, sent.dynamic_scales[1:])

    transports(case, clusters[2], alone)


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
