"""Holds the cases whose gradients are checked, and the trip that carries them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import gradcheck

import ascend_moe
from ascend_moe.comm import LocalCluster
from ascend_moe.reference.cases import Case


@dataclass(frozen=True)
class Trip:
    """Dispatch, experts that are linear, combine. ``inside``: the experts apply the weights, combine only adds."""

    case: Case
    comm_alg: str = ""
    inside: bool = False
    shuffled: bool = False  # combine gets its rows in another order than dispatch's, with their source indices

    def leaves(self, rank: int) -> list[Tensor]:
        """The tensors of a rank that have a gradient."""
        given = self.case.inputs[rank]
        every = [given.x, given.expert_scales, *given.local_addends.values()]
        # Of no rows numpy makes strides of 0, which gradcheck does not take.
        return [torch.empty(tensor.shape).copy_(tensor) for tensor in every if tensor is not None]

    def run(self, rank: int, group_ep: str, *leaves: Tensor) -> Tensor:
        *_, y = self.steps(rank, group_ep, *leaves)
        return y

    def steps(self, rank: int, group_ep: str, x: Tensor, weights: Tensor, *own: Tensor) -> Iterator[Tensor]:
        """Returns the steps of dispatch, and of combine."""
        case, given = self.case, self.case.inputs[rank]
        options: dict[str, Any] = {"x_active_mask": given.x_active_mask, "global_bs": case.global_bs}
        options |= {"comm_alg": self.comm_alg} if case.contract == 2 else {}
        options |= case.special.given
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
        options |= dict(zip(given.local_addends, own, strict=True))
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


def check_numbers(cluster: LocalCluster, trip: Trip) -> None:
    """Every ∂y/∂leaf of all ranks, in fp32. In each leaf the trip is linear: a step of any width is exact."""
    leaves = [leaf.requires_grad_() for rank in range(trip.case.world) for leaf in trip.leaves(rank)]

    def run(*leaves: Tensor) -> Any:
        return AllRanks.apply(cluster, trip, *leaves)  # type: ignore[no-untyped-call]

    # Fast is by random projections: one backward pass, not one for every element of the results.
    assert gradcheck(run, leaves, eps=1.0, atol=2e-4, rtol=1e-4, nondet_tol=0.0, fast_mode=True)


def small(**attributes: Any) -> Case:
    """A case of few outputs: a backward pass for each of them."""
    name = " ".join(str(value) for value in attributes.values())
    return Case(name, **{"dtype": "fp32", "contract": 2, "units": 1, "batch": 3, **attributes})
