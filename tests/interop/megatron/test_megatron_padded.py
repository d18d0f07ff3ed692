"""Megatron-LM's padding to capacity has static shapes and changes no result and no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron_layers import (
    KINDS,
    Case,
    E,
    H,
    K,
    close,
    dispatcher,
    experts_of,
    grads_of,
    loss_of,
    mlp,
    on_ranks,
    six_phases,
)
from torch import Tensor

from ascend_moe.dispatchers import Dispatcher, MC2Dispatcher
from ascend_moe.interop.megatron import (
    apply_router_token_dropping,
    get_capacity,
    permute,
    topk_routing_with_score_function,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world, etp", [(1, 1), (2, 1), (4, 2)])
@pytest.mark.parametrize("factor", [0.5, 6.0])
def test_padding_to_capacity_changes_no_result(kind: str, world: int, etp: int, factor: float, clusters: Any) -> None:
    case = Case(world, [6] * world)

    def run(rank: int, group: Any) -> list[Tensor]:
        found = []
        for pad in (False, True):
            carrier = dispatcher(kind, case, etp, rank, group, capacity_factor=factor, pad_to_capacity=pad)
            experts = experts_of(case, carrier)
            x, logits = (every[rank].clone().requires_grad_() for every in (case.x, case.logits))
            probs, chosen = topk_routing_with_score_function(logits, K)
            probs, chosen = apply_router_token_dropping(probs, chosen, K, factor, pad_to_capacity=pad)
            y = list(six_phases(carrier, experts, x, chosen, probs))[1]
            loss_of(y).backward()
            found.append([y.detach(), x.grad, logits.grad, *grads_of(experts)])
        for one, other in zip(*found, strict=True):
            close(one, other)
        return found[0][0]

    every = on_ranks(kind, world, clusters, run)
    assert all(bool(y.isfinite().all()) for y in every)


@pytest.mark.parametrize("kind, most_rows", [*((kind, None) for kind in KINDS), ("mc2", 16), ("alltoall", 3)])
@pytest.mark.parametrize(
    "world, etp, factor, on", [(1, 1, 1.0, "experts"), (2, 1, 1.5, "combine"), (4, 2, 0.5, "experts")]
)
def test_padding_is_rows_of_tokens_whose_probability_has_a_gradient(
    kind: str, most_rows: int | None, world: int, etp: int, factor: float, on: str, clusters: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As in Megatron-LM's permute with drop_and_pad, the gradient is the row's result times its token's gradient.

    Also where one call cannot take all rows; the last rank's tokens 0 and 3 are inactive.
    """
    if most_rows is not None:
        for way in (Dispatcher, MC2Dispatcher):
            monkeypatch.setattr(way, "max_batch", most_rows)
    case = Case(world, [6] * world)
    capacity = get_capacity(6 * K, E, factor)

    def run(rank: int, group: Any, kind: str = kind) -> list[Tensor]:
        options = {"capacity_factor": factor, "pad_to_capacity": True, "probs_on": on}
        carrier = dispatcher(kind, case, etp, rank, group, **options)
        experts = experts_of(case, carrier)
        mask = torch.ones(6, dtype=torch.bool)
        mask[[0, 3] if rank == world - 1 else []] = False
        x, chosen = case.x[rank].clone().requires_grad_(), topk_routing_with_score_function(case.logits[rank], K)
        probs, final = apply_router_token_dropping(*chosen, K, factor, pad_to_capacity=True, mask=mask)
        probs.requires_grad_()
        assert bool(((probs == 0) & final).any()) and not final[~mask].any()
        assert (final.sum(0) == min(capacity, int(mask.sum()))).all()
        tokens, slots, handle = carrier.dispatch_preprocess(x, final, probs, mask)
        rows, counts, row_probs = carrier.dispatch_postprocess(*carrier.token_dispatch(tokens, slots, handle), handle)
        assert counts.tolist() == [capacity * world] * carrier.local_experts and handle.splits is not None
        rows_each, ranks = capacity * carrier.local_experts, world // etp  # sizes do not depend on the routing
        assert handle.splits.input_splits.tolist() == handle.splits.output_splits.tolist() == [rows_each] * ranks
        assert int(handle.splits.num_out_tokens) == E * capacity
        out, _ = experts(rows, counts, row_probs if on == "experts" else None)
        y = carrier.combine_postprocess(carrier.token_combine(carrier.combine_preprocess(out, handle), handle), handle)
        loss_of(y).backward()
        own, leaf = case.x[rank].clone().requires_grad_(), probs.detach().clone().requires_grad_()
        dense = torch.stack([mlp(own, case.w1[e], case.w2[e]) for e in range(E)], 1)  # (T, E, H)
        expected = (dense * torch.where(final, leaf, 0).unsqueeze(-1)).sum(1)
        loss_of(expected).backward()
        assert leaf.grad is not None and probs.grad is not None and x.grad is not None and own.grad is not None
        close(y, expected, atol=1e-5)
        close(x.grad, own.grad, atol=1e-4)
        close(probs.grad, leaf.grad, atol=1e-4)
        assert bool((probs.grad[final & (probs == 0)] != 0).all())
        first = carrier.ep_rank * carrier.local_experts
        sources = permute(own, final, num_out_tokens=E * capacity, drop_and_pad=True)[2].view(E, capacity)[first]
        mine = rows.view(carrier.local_experts, world, capacity, H)[0, rank]
        assert torch.equal(mine, torch.where(final[sources, first, None], own[sources], 0))
        return [y.detach(), x.grad, probs.grad]

    found = on_ranks(kind, world, clusters, run)
    monkeypatch.undo()
    for one, other in zip(found, clusters[world].run(lambda rank, group: run(rank, group, "mc2")), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
