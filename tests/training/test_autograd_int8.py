"""Gradients of int8 rows go straight through, or are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from gloo_ranks import threads
from gradient_cases import Trip, small
from torch import Tensor

import ascend_moe
from ascend_moe.comm import LocalCluster
from ascend_moe.dispatchers import AllToAllDispatcher, Dispatcher, MC2Dispatcher
from ascend_moe.errors import ArgumentError, AscendMoeError, WindowTooSmall
from ascend_moe.reference.cases import Case

# gradcheck warns of every input that is not fp64.
pytestmark = pytest.mark.filterwarnings("ignore:Input #.*double precision")


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
    windows = cluster.run(lambda rank, group: body(MC2Dispatcher(group, world, rank, experts)))
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
        with pytest.raises(AscendMoeError, match="only dynamic_scales have a gradient"):
            dispatcher.dispatch(x, ids, quant_mode=2).dynamic_scales.sum().backward()
        with pytest.raises(AscendMoeError, match="dynamic_scales were not returned by a dispatch"):
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
