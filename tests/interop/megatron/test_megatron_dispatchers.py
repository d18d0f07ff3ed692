"""Megatron-LM's token dispatchers give on 1 to 8 ranks what one process gives."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_layers import (
    FP64,
    KINDS,
    LAYOUTS,
    ROUTINGS,
    Case,
    E,
    F,
    H,
    K,
    close,
    dispatcher,
    experts_of,
    grads_of,
    logits_of,
    loss_of,
    mlp,
    on_ranks,
    six_phases,
    trained,
)
from torch import Tensor

from ascend_moe.dispatchers import Dispatcher, MC2Dispatcher
from ascend_moe.interop.megatron import (
    Handle,
    MC2Manager,
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
    TokenDispatcher,
    apply_router_token_dropping,
    get_capacity,
    permute,
    topk_routing_with_score_function,
)


@pytest.mark.parametrize("world, etp", LAYOUTS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_dispatchers_give_the_result_of_one_process(world: int, etp: int, routing: str, clusters: Any) -> None:
    """All kinds, uneven T with a rank without tokens: results and gradients; the kinds have the same bits.

    Also if combine weights the rows, not the experts.
    """
    case = Case(world, [5, 0, 3, 7][:world], routing)
    y, gx, glogits, g1, g2 = case.expected()
    every = {
        k: on_ranks(k, world, clusters, lambda rank, group, k=k: trained(k, case, etp, rank, group)) for k in KINDS
    }
    weighted = clusters[world].run(lambda rank, group: trained("mc2", case, etp, rank, group, probs_on="combine"))
    local, part = E // (world // etp), F // etp
    for rank in range(world):
        ep_rank, place = divmod(rank, etp)
        mine, columns = slice(ep_rank * local, (ep_rank + 1) * local), slice(place * part, (place + 1) * part)
        weights = [torch.cat([each[:, :, columns] for each in g1[mine].chunk(2, 2)], 2), g2[mine, columns]]
        for found, expected in zip(every["mc2"][rank], (y[rank], gx[rank], glogits[rank], *weights), strict=True):
            close(found.double(), expected, atol=1e-4 if expected.dim() == 3 else 1e-5)
        for kind in KINDS[1:]:
            assert all(torch.equal(a, b) for a, b in zip(every["mc2"][rank], every[kind][rank], strict=True)), kind
        for found, expected in zip(weighted[rank], every["mc2"][rank], strict=True):
            close(found, expected, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_two_micro_batches_may_be_open_at_once_and_inactive_tokens_get_zeros(kind: str, clusters: Any) -> None:
    """Dispatch, dispatch, combine, combine through one dispatcher; inactive tokens give and get zeros."""
    case = Case(2)

    def run(rank: int, group: Any) -> None:
        transport = dispatcher(kind, case, 1, rank, group)
        experts = experts_of(case, transport)
        mask = torch.arange(5) != 2

        def steps(number: int, active: Tensor | None) -> Iterator[Any]:
            x = (case.x[rank] * (number + 1)).requires_grad_()
            probs, chosen = topk_routing_with_score_function(logits_of(5, 70 + rank + number), K)
            forward = six_phases(transport, experts, x, chosen, probs, active)
            yield next(forward)
            y = next(forward)
            y.square().sum().backward()
            yield y.detach(), x.grad

        expected = [list(steps(0, None))[1], list(steps(1, mask))[1]]
        first, second = steps(0, None), steps(1, mask)
        handles = next(first), next(second)
        assert all(isinstance(handle, Handle) for handle in handles)
        for found, wanted in zip((next(first), next(second)), expected, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        assert not any(each[2].any() for each in expected[1]) and all(each[~mask].numel() for each in expected[1])
        assert bool(expected[0][0][2].any())

    on_ranks(kind, 2, clusters, run)


def test_wrong_calls_of_dispatchers_are_refused(clusters: Any) -> None:
    case = Case(1)

    def run(rank: int, group: str) -> None:
        transport = dispatcher("mc2", case, 1, rank, group)
        probs, chosen = topk_routing_with_score_function(case.logits[0], K)
        _, _, handle = transport.dispatch_preprocess(case.x[0], chosen, probs)
        with pytest.raises(ValueError, match="handle has no rows yet: call token_dispatch before token_combine"):
            transport.token_combine(case.x[0], handle)
        with pytest.raises(ValueError, match="more than 3 experts"):
            transport.dispatch_preprocess(case.x[0], torch.ones_like(chosen), probs)
        with pytest.raises(ValueError, match=r"routing_map is \(5, 4\)"):
            transport.dispatch_preprocess(case.x[0], chosen[:, :4], probs)
        alone = {"world_size": 1, "rank": 0}
        for kind, wrong, message in (
            ("mc2", alone | {"etp_size": 2}, "etp_size is 2; it must divide the 1 ranks"),
            ("mc2", alone | {"probs_on": "router"}, "probs_on is 'router'"),
            ("mc2", alone | {"pad_to_capacity": True}, "pass a capacity_factor"),
            (
                "mc2",
                alone | {"pad_to_capacity": True, "capacity_factor": 1.0, "max_tokens": 4},
                "needs the same T on all ranks",
            ),
            ("flex", alone, "kind is 'flex'"),
            ("alltoall", alone | {"comm_alg": "direct"}, "comm_alg is 'direct', not supported by kind 'alltoall'"),
            ("mc2", {}, "is a name: pass world_size and rank too"),
        ):
            with pytest.raises(ValueError, match=message):
                TokenDispatcher(kind, group, E, K, **wrong)
        with pytest.raises(ValueError, match="call setup_metadata first"):
            MC2Manager(group, E, K, E, world_size=1, rank=0).dispatch(case.x[0])
        with pytest.raises(ValueError, match="moe_router_padding_for_quantization is set"):
            config = SimpleNamespace(moe_router_padding_for_quantization=True)
            MC2Manager(group, E, K, E, config, world_size=1, rank=0)

    clusters[1].run(run)


NAMED = {
    "mc2": MoEFlexTokenDispatcher,
    "alltoall": MoEAlltoAllTokenDispatcher,
    "allgather": MoEAllGatherTokenDispatcher,
}


@pytest.mark.parametrize("world, etp", [(1, 1), (2, 1), (4, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_dispatchers_by_megatrons_names_give_the_bits_of_the_six_phases(
    kind: str, world: int, etp: int, clusters: Any
) -> None:
    """Experts that take exactly the rows that came; groups by the names of both releases; one open call."""
    case = Case(world, [5, 0, 3, 7][:world])
    config = SimpleNamespace(num_moe_experts=E, moe_router_topk=K)

    def run(rank: int, group: Any) -> list[Tensor]:
        place = {"world_size": world, "rank": rank} if isinstance(group, str) else {}
        end = "_group" if rank % 2 else ""
        groups = SimpleNamespace(**{f"tp_ep{end}": group, f"expt_tp{end}": SimpleNamespace(size=lambda: etp)})
        local = E // (world // etp)
        own = list(range(rank // etp * local, (rank // etp + 1) * local))
        transport = NAMED[kind](local, own, config, groups, max_tokens=7, **place)
        experts = experts_of(case, transport.phases)
        x, logits = (every[rank].clone().requires_grad_() for every in (case.x, case.logits))
        probs, chosen = topk_routing_with_score_function(logits, K)
        with pytest.raises(ValueError, match="handle is None: call dispatch_preprocess first"):
            transport.token_combine(x)
        sent = transport.token_dispatch(*transport.dispatch_preprocess(x, chosen, probs))
        rows, counts, row_probs = transport.dispatch_postprocess(*sent)
        assert len(rows) == len(row_probs) == int(counts.sum())
        out, _ = experts(rows, counts, row_probs)
        y = transport.combine_postprocess(transport.token_combine(transport.combine_preprocess(out)))
        assert transport.handle is None and (transport.tp_size, transport.ep_size) == (etp, world // etp)
        loss_of(y).backward()
        for wrong, message in (
            ((local + 1, own, config), f"num_local_experts is {local + 1}; num_experts 8 on {world // etp} EP ranks"),
            ((local, own[::-1], config), "local_expert_indices is .*; EP rank"),
            ((local, own, SimpleNamespace(**vars(config), moe_router_padding_for_fp8=True)), "padding_for_fp8 is set"),
        ):
            with pytest.raises(ValueError, match=message):
                NAMED[kind](*wrong, groups, **place)
        return [y.detach(), x.grad, logits.grad, *grads_of(experts)]  # type: ignore[list-item]

    found = on_ranks(kind, world, clusters, run)
    expected = on_ranks(kind, world, clusters, lambda rank, group: trained(kind, case, etp, rank, group))
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("world, etp", LAYOUTS)
@pytest.mark.parametrize("static, overlapped", [(False, False), (True, False), (False, True)])
def test_manager_of_the_flex_dispatcher_gives_the_bits_of_the_six_phases(
    world: int, etp: int, static: bool, overlapped: bool, clusters: Any
) -> None:
    """The calls of Megatron-LM's MoEFlexTokenDispatcher: the bits of the six phases."""
    case = Case(world, [5, 0, 3, 7][:world])

    def run(rank: int, group: str) -> list[Tensor]:
        place, local = {"world_size": world, "rank": rank}, E // (world // etp)
        manager = MC2Manager(group, local, K * etp, E * etp, **place, max_tokens=7, static=static)
        experts = experts_of(case, dispatcher("mc2", case, etp, rank, group))
        x, logits = (every[rank].clone().requires_grad_() for every in (case.x, case.logits))
        probs, chosen = topk_routing_with_score_function(logits, K)
        tokens = len(x)
        spread = [
            each.reshape(tokens, world // etp, 1, local).expand(-1, -1, etp, -1).reshape(tokens, world, local)
            for each in (chosen, probs)
        ]
        manager.setup_metadata(*spread)
        assert manager.token_probs.shape == (tokens, K * etp)
        assert torch.equal(manager.token_indices >= 0, manager.token_probs > 0)
        before: list[tuple[Tensor, Tensor]] = []  # what was cut off, and the leaf in its place

        def cut(tensor: Tensor) -> Tensor:
            """The overlapped schedule runs the backward of each phase by itself."""
            before.append((tensor, tensor.detach().requires_grad_() if overlapped else tensor))
            return before[-1][1]

        manager.token_probs = cut(manager.token_probs)
        rows = cut(manager.dispatch(x, True, True))
        manager.dispatched_probs = cut(manager.dispatched_probs)
        rows, row_probs = manager.get_permuted_hidden_states_by_experts(rows)
        counts = manager.get_number_of_tokens_per_expert()
        assert len(rows) == len(row_probs) and (static or len(rows) == int(counts.sum()))
        out, _ = experts(rows, counts, row_probs)
        y = manager.combine(manager.get_restored_hidden_states_by_experts(out), True, True)
        assert manager.handle is None
        loss_of(y).backward()
        for cuts in (before[1:], before[:1]) if overlapped else ():
            torch.autograd.backward([whole for whole, _ in cuts], [leaf.grad for _, leaf in cuts])
        return [y.detach(), x.grad, logits.grad, *grads_of(experts)]  # type: ignore[list-item]

    expected = clusters[world].run(lambda rank, group: trained("mc2", case, etp, rank, group))
    for found, wanted in zip(clusters[world].run(run), expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_float64_probabilities_arrive_and_slots_without_weight_are_not_sent(clusters: Any) -> None:
    """Probabilities come in the router's fp64; with a capacity the manager sends no slot of probability 0."""
    case = Case(1)

    def run(rank: int, group: str) -> None:
        probs, chosen = topk_routing_with_score_function(case.logits[0].double(), K)
        probs = torch.where(torch.arange(E) == 2, 0, probs)
        transport = dispatcher("mc2", case, 1, rank, group)
        tokens, slots, handle = transport.dispatch_preprocess(case.x[0], chosen, probs)
        _, _, found = transport.dispatch_postprocess(*transport.token_dispatch(tokens, slots, handle), handle)
        assert found.dtype == FP64
        for factor in (None, 1.0):
            config = SimpleNamespace(moe_expert_capacity_factor=factor)
            manager = MC2Manager(group, E, K, E, config, world_size=1, rank=0)
            manager.setup_metadata(chosen, probs)
            rows = manager.dispatch(case.x[0])
            sent = chosen & (probs != 0) if factor else chosen
            assert manager.get_number_of_tokens_per_expert().tolist() == sent.sum(0).tolist()
            assert manager.get_permuted_hidden_states_by_experts(rows)[1].dtype == FP64
            manager.combine(rows)

    clusters[1].run(run)


def maps_of(case: Case) -> list[Tensor]:
    return [topk_routing_with_score_function(logits, case.topk)[1] for logits in case.logits]


def arrived(transport: TokenDispatcher, x: Tensor, chosen: Tensor) -> tuple[Handle, Tensor, Tensor]:
    """The handle, rows and probabilities of a dispatch with equal weights."""
    tokens, slots, handle = transport.dispatch_preprocess(x, chosen, chosen / K)
    return handle, *transport.token_dispatch(tokens, slots, handle)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world, etp", LAYOUTS)
def test_splits_count_the_rows_of_all_ranks(kind: str, world: int, etp: int, clusters: Any) -> None:
    case = Case(world, [5, 0, 3, 7][:world])
    maps, ep = maps_of(case), world // etp
    local = E // ep

    def run(rank: int, group: Any) -> None:
        transport = dispatcher(kind, case, etp, rank, group)
        handle, rows, _ = arrived(transport, case.x[rank], maps[rank])
        splits = handle.splits
        assert splits is not None
        ep_rank, etp_rank = divmod(rank, etp)
        first = ep_rank * local

        def rows_from(e: int, t: int, expert: int) -> int:
            return int(maps[e * etp + t][:, expert].sum())

        mine = range(first, first + local)
        sent = [sum(int(maps[rank][:, e * local + each].sum()) for each in range(local)) for e in range(ep)]
        assert splits.input_splits.tolist() == sent and int(splits.num_out_tokens) == sum(sent)
        came = [sum(rows_from(e, etp_rank, expert) for expert in mine) for e in range(ep)]
        assert splits.output_splits.tolist() == came
        by_place = [sum(rows_from(e, t, expert) for e in range(ep) for expert in mine) for t in range(etp)]
        assert splits.output_splits_tp.tolist() == by_place
        table = [[rows_from(e, t, expert) for expert in mine] for t in range(etp) for e in range(ep)]
        assert splits.num_global_tokens_per_local_expert.tolist() == table
        assert splits.tokens_per_expert.tolist() == [sum(column) for column in zip(*table, strict=True)]
        transport.combine_postprocess(transport.token_combine(rows, handle), handle)

    on_ranks(kind, world, clusters, run)


# ---- padding to capacity: static shapes, no other result or gradient


@pytest.mark.parametrize("kind, most_rows", [*((kind, None) for kind in KINDS), ("mc2", 16), ("alltoall", 3)])
@pytest.mark.parametrize(
    "world, etp, factor, on",
    [(1, 1, 1.0, "experts"), (2, 1, 1.5, "combine"), (4, 2, 0.5, "experts"), (2, 1, 6.0, "experts")],
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
    capacity = min(get_capacity(6 * K, E, factor), 6)

    def run(rank: int, group: Any, kind: str = kind) -> list[Tensor]:
        options = {"capacity_factor": factor, "pad_to_capacity": True, "probs_on": on}
        transport = dispatcher(kind, case, etp, rank, group, **options)
        experts = experts_of(case, transport)
        mask = torch.ones(6, dtype=torch.bool)
        mask[[0, 3] if rank == world - 1 else []] = False
        x, chosen = case.x[rank].clone().requires_grad_(), topk_routing_with_score_function(case.logits[rank], K)
        probs, final = apply_router_token_dropping(*chosen, K, factor, pad_to_capacity=True, mask=mask)
        probs.requires_grad_()
        assert bool(((probs == 0) & final).any()) and not final[~mask].any()
        assert (final.sum(0) == min(capacity, int(mask.sum()))).all()
        tokens, slots, handle = transport.dispatch_preprocess(x, final, probs, mask)
        rows, counts, row_probs = transport.dispatch_postprocess(
            *transport.token_dispatch(tokens, slots, handle), handle
        )
        assert counts.tolist() == [capacity * world] * transport.local_experts and handle.splits is not None
        rows_each, ranks = capacity * transport.local_experts, world // etp  # sizes do not depend on the routing
        assert handle.splits.input_splits.tolist() == handle.splits.output_splits.tolist() == [rows_each] * ranks
        assert int(handle.splits.num_out_tokens) == E * capacity
        out, _ = experts(rows, counts, row_probs if on == "experts" else None)
        y = transport.combine_postprocess(
            transport.token_combine(transport.combine_preprocess(out, handle), handle), handle
        )
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
        first = transport.ep_rank * transport.local_experts
        sources = permute(own, final, num_out_tokens=E * capacity, drop_and_pad=True)[2].view(E, capacity)[first]
        mine = rows.view(transport.local_experts, world, capacity, H)[0, rank]
        assert torch.equal(mine, torch.where(final[sources, first, None], own[sources], 0))
        return [y.detach(), x.grad, probs.grad]

    found = on_ranks(kind, world, clusters, run)
    monkeypatch.undo()
    for one, other in zip(found, clusters[world].run(lambda rank, group: run(rank, group, "mc2")), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
