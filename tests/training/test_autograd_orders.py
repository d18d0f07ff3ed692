"""Gradients are right with micro-batches in flight and recomputation; lost ranks are named; no schedule hangs."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gradient_cases import Trip, check_numbers, small
from rank_processes import Ranks, assert_named
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ascend_moe
from ascend_moe.comm import LocalCluster

# gradcheck warns of every input that is not fp64.
pytestmark = pytest.mark.filterwarnings("ignore:Input #.*double precision")


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
