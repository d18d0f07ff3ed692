"""Expert placement: ranges, copies of hot experts, the choice of a copy, load counters, tables of survivors."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from bad_arguments import refused
from host_reads import no_host_reads

from ascend_moe import placement
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.layer import MoEConfig, MoELayer
from ascend_moe.npu import npu_moe_update_expert
from ascend_moe.placement import (
    Balance,
    ExpertPlacement,
    LoadCounter,
    balance,
    contiguous_balance,
    eplb_table,
    logical_load,
    remap,
    shrunk,
)


def skewed(layers: int, experts: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(layers, experts, generator=generator) ** 6 * 1000).long()


def rank_loads(load: torch.Tensor, found: Balance, ranks: int) -> torch.Tensor:
    """(layers, ranks): every copy of an expert takes an equal part of its load."""
    each = load.double() / found.replica_counts
    return each.gather(1, found.physical_to_logical).unflatten(1, (ranks, -1)).sum(2)


def test_balance_is_near_the_best_and_above_the_plain_placement() -> None:
    for seed in range(20):
        load = skewed(1, 6, seed) + 1
        best = math.inf
        for half in itertools.combinations(range(6), 3):
            left = float(load[0, list(half)].sum())
            best = min(best, max(left, float(load.sum()) - left))
        found = rank_loads(load, balance(load, 6, 2), 2)
        assert float(found.max()) <= best * 7 / 6 + 1e-9  # the bound of the heaviest first, on 2 ranks
    load = skewed(8, 64)
    plain = load.reshape(8, 8, 8).sum(2).amax(1).double() / load.sum(1) * 8
    spread = rank_loads(load, balance(load, 80, 8), 8).amax(1) / load.sum(1) * 8
    assert bool((spread < plain).all()) and float(spread.max()) < 1.05


def test_every_further_copy_goes_to_the_most_load_a_copy() -> None:
    """Among equal ones it goes to the expert with fewer copies, then to the lower number."""
    for seed in range(10):
        load = skewed(1, 8, seed) // (1, 300)[seed % 2]  # coarse loads have ties
        counts = [1] * 8
        for _ in range(8):
            pairs = zip(load[0].tolist(), counts, strict=True)
            each = [(-rows / count, count, expert) for expert, (rows, count) in enumerate(pairs)]
            counts[min(place for place in each if place[1] < 4)[2]] += 1
        assert balance(load, 16, 4).replica_counts[0].tolist() == counts


def drawn_load(generator: random.Random, experts: int) -> torch.Tensor:
    """Loads that differ, are all equal, are few values, or are all of one expert."""
    kind = generator.randrange(5)
    values = [
        [generator.random() ** 8 * 1e6 for _ in range(experts)],
        [0.0] * experts,
        [1.0] * experts,
        [float(generator.randrange(4)) for _ in range(experts)],
        [1e9] + [0.0] * (experts - 1),
    ][kind]
    return torch.tensor([values])


@pytest.mark.parametrize("count", [60, pytest.param(5000, marks=pytest.mark.nightly)])
def test_every_expert_has_copies_on_different_ranks_and_the_tables_agree(count: int) -> None:
    """A group's experts stay on neighbouring ranks; groups, and the ranks of each, descend by load."""
    generator, copied = random.Random(count), 0
    for _ in range(count):
        groups = generator.choice((1, 1, 2))
        ranks, members = groups * generator.choice((1, 2, 4, 8, 16)), generator.randint(1, 40)
        experts, places, layers = groups * members, ranks // groups, generator.randrange(4)
        least = -(-members // places)
        room = generator.randint(least, min(least + 3, members))
        load = torch.cat([torch.empty(0, experts), *(drawn_load(generator, experts) for _ in range(layers))])
        found = balance(load, room * ranks, ranks, groups)
        physical, table, counts = found
        assert physical.shape == (layers, room * ranks)
        assert table.shape == (layers, experts, max(counts.flatten().tolist(), default=1))
        for layer, expert in itertools.product(range(layers), range(experts)):
            own = (physical[layer] == expert).nonzero().flatten().tolist()
            assert counts[layer, expert] == len(own) == len({place // room for place in own}) >= 1
            assert table[layer, expert].tolist() == own + [-1] * (table.shape[2] - len(own))
            assert len({place // (room * places) for place in own}) == 1
        loads = rank_loads(load, found, ranks).unflatten(1, (groups, -1))
        assert bool((loads.diff(dim=2) <= 1e-6).all()) and bool((loads[:, :, 0].diff(dim=1) <= 1e-6).all())
        again = balance(load.clone(), room * ranks, ranks, groups)
        assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
        copied += layers > 0 and room * ranks > experts
    assert copied > count // 3


def test_a_duplicate_copy_is_exchanged_where_the_larger_load_is_least() -> None:
    generator, exchanged = random.Random(0), 0
    for _ in range(60):
        load = [generator.random() ** 4 for _ in range(10)]
        ranks = [generator.sample(range(10), 4) for _ in range(3)]
        ranks[1][2] = doubled = ranks[1][0]
        least = math.inf
        for there, place in itertools.product((0, 2), range(4)):
            changed = [[*own] for own in ranks]
            changed[1][0], changed[there][place] = ranks[there][place], doubled
            if all(len(set(own)) == 4 for own in changed):
                least = min(least, max(sum(load[e] for e in changed[rank]) for rank in (1, there)))
        if least == math.inf:
            continue
        after = placement._apart([[*own] for own in ranks], load)
        moved = [sum(load[e] for e in own) for own, old in zip(after, ranks, strict=True) if own != old]
        assert len(moved) == 2 and max(moved) == pytest.approx(least)
        exchanged += 1
    assert exchanged > 30


@pytest.mark.parametrize(
    ("changed", "argument", "rule"),
    [
        ({"replicas": 10}, "replicas", "is 10; need a multiple of the 4 ranks from 8 to 32"),
        ({"replicas": 4}, "replicas", "is 4"),
        ({"replicas": 36}, "replicas", "is 36"),
        ({"ranks": 0}, "replicas", "is 8"),
        ({"groups": 3}, "groups", "is 3; it must divide the 8 experts and the 4 ranks"),
        ({"load": torch.tensor([[1.0, -1.0] * 4])}, "load", "negative"),
        ({"load": torch.tensor([[1.0, torch.inf] * 4])}, "load", "non-finite"),
        ({"load": torch.zeros(8)}, "load", "2-D"),
    ],
)
def test_balance_refuses(changed: dict[str, Any], argument: str, rule: str) -> None:
    given: dict[str, Any] = {"load": torch.ones(1, 8), "replicas": 8, "ranks": 4, **changed}
    refused(argument, balance, **given, says=rule)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("world", [1, 2, 4, 6])
def test_remap_equals_update_expert(world: int, dtype: torch.dtype) -> None:
    table = balance(skewed(1, 8), 12, 2 if world == 1 else world).logical_to_physical[0]
    for rank, tokens in itertools.product(range(world), (0, 13)):
        generator = torch.Generator().manual_seed(rank)
        ids = torch.randint(-1, 8, (tokens, 3), generator=generator, dtype=dtype)
        assert int(eplb_table(table).min()) == 0
        expected, _ = npu_moe_update_expert(ids, eplb_table(table), balance_mode=1)
        found = remap(ids, table, torch.arange(tokens))
        assert found.dtype == dtype and torch.equal(found, expected)
        expected, _ = npu_moe_update_expert(ids, eplb_table(table), local_rank_id=rank, world_size=world)
        for source in (rank, torch.full((tokens,), rank)):
            found = remap(ids, table, source_rank=source, world_size=world)
            assert found.dtype == dtype and torch.equal(found, expected)


def test_remap_leads_special_experts_past_the_copies() -> None:
    table = balance(skewed(1, 8), 12, 4).logical_to_physical[0]
    ids = torch.randint(-1, 13, (20, 6), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    found = remap(ids, table, torch.arange(20), replicas=12)
    routed = remap(ids.where(ids < 8, -1), table, torch.arange(20))
    assert torch.equal(found, torch.where(ids < 8, routed, ids + 4)) and int((ids >= 8).sum()) > 10
    refused("replicas", remap, ids, table, torch.arange(20), replicas=-1)


def test_remap_refuses() -> None:
    ids, table = torch.zeros(3, 1, dtype=torch.int64), torch.tensor([[0, 1], [2, -1]])
    for argument, given, rule in (
        ("token_index", {}, "or source_rank must be given"),
        ("token_index", {"token_index": torch.arange(3), "source_rank": 0, "world_size": 1}, "not both"),
        ("token_index", {"token_index": torch.arange(2)}, r"is \(2,\)"),
        ("world_size", {"source_rank": 0}, "is 0"),
    ):
        refused(argument, remap, ids, table, **given, says=rule)


def test_counters_and_remap_read_nothing_on_the_host() -> None:
    found = balance(skewed(2, 4), 6, 2)
    counter, ids = LoadCounter(2, 3), torch.tensor([[0, 3], [-1, 2]])
    table, memory = found.logical_to_physical[1], counter.counts.data_ptr()
    with no_host_reads():
        with pytest.raises(AssertionError, match="on the host"):
            torch.ones(1).item()
        counter.add(0, torch.tensor([1, 0, 2]))
        counter.add(1, torch.tensor([4, 4, 9], dtype=torch.int32), 0)
        counter.add(1, torch.tensor([1, 1, 1]))
        remap(ids, table, torch.arange(2))
        remap(ids, table, source_rank=torch.arange(2), world_size=2)
        whole = logical_load(torch.cat([counter.counts] * 2, 1), found.physical_to_logical, 4)
    assert counter.counts.tolist() == [[1, 0, 2], [5, 1, 6]] and counter.counts.data_ptr() == memory
    assert whole.sum(1).tolist() == [6, 24]
    counter.reset()
    assert not counter.counts.any() and counter.counts.data_ptr() == memory
    refused("layer", counter.add, 2, torch.ones(3).long())
    refused("expert_token_nums", counter.add, 0, torch.ones(2).long())


@pytest.mark.parametrize("kind", [0, 1])
def test_what_dispatch_counts_becomes_the_next_placement(kind: int, clusters: Any) -> None:
    """Counts of real dispatches over copies, back to logical experts: the router's own histogram."""
    experts, world, replicas, layers = 4, 2, 6, 2
    found = balance(torch.tensor([[9, 1, 1, 1], [1, 1, 1, 9]]), replicas, world)
    chosen = torch.randint(-1, experts, (world, layers, 7, 2), generator=torch.Generator().manual_seed(4)).int()
    chosen[1, 0] = 0

    def body(rank: int, group_ep: str) -> torch.Tensor:
        dispatcher, counter = MC2Dispatcher(group_ep, world, rank, replicas), LoadCounter(layers, replicas // world)
        for layer in range(layers):
            ids = remap(chosen[rank, layer], found.logical_to_physical[layer], torch.arange(7))
            sent = dispatcher.dispatch(torch.ones(7, 32), ids, expert_token_nums_type=kind)
            counter.add(layer, sent.expert_token_nums, kind)
            dispatcher.combine(sent.expand_x, sent, torch.ones(7, 2))
        return counter.counts

    counts = torch.cat(clusters[world].run(body), 1)
    load = logical_load(counts, found.physical_to_logical, experts)
    for layer in range(layers):
        ids = chosen[:, layer]
        assert load[layer].tolist() == torch.bincount(ids[ids >= 0].flatten(), minlength=experts).tolist()


@pytest.mark.parametrize("seed", range(3))
def test_every_copy_of_an_expert_starts_with_its_weights(seed: int) -> None:
    config = MoEConfig(32, 16, 6, 2, expert_bias=True)
    found, names = balance(skewed(1, 6, seed), 12, 3), ("w_gate_up", "w_down", "gate_up_bias", "down_bias")
    whole = MoELayer(config, MC2Dispatcher("of nobody", 1, 0, 6)).init_weights(seed)
    for rank in range(3):
        layer = MoELayer(config, MC2Dispatcher("of nobody", 3, rank, 12), placement=found).init_weights(seed)
        own = found.physical_to_logical[0, 4 * rank : 4 * rank + 4]
        for name in names:
            assert torch.equal(getattr(layer, name), getattr(whole, name)[own])


def test_contiguous_placement_names_both_numbers() -> None:
    placement = ExpertPlacement.contiguous(256, 8)
    assert [placement.range_of(rank) for rank in range(8)] == [(32 * r, 32 * r + 31) for r in range(8)]
    for rank, (first, last) in enumerate(map(placement.range_of, range(8))):
        own = [-1] * first + list(range(last - first + 1)) + [-1] * (255 - last)
        assert placement.expert_map(rank).tolist() == own
    assert placement.expert_map(0).dtype == torch.int32
    refused("num_experts", ExpertPlacement.contiguous, 10, 4, says="is 10; it must be a multiple of the 4 ranks")
    refused("rank", placement.range_of, 8, says="rank is 8")


# ---- ranks that are lost

LOAD = torch.tensor([[9.0, 1.0, 5.0, 2.0, 7.0, 3.0]])


@pytest.mark.parametrize("alive", [[0], [1, 2, 3], [0, 2], [0, 1, 2, 3]])
@pytest.mark.parametrize("replicas", [8, 12, 24])
def test_tables_name_the_survivors_slots(replicas: int, alive: list[int]) -> None:
    before, each = balance(LOAD, replicas, 4), replicas // 4
    after = shrunk(before, 4, alive)
    kept = [before.physical_to_logical[0, rank * each + slot].item() for rank in alive for slot in range(each)]
    assert after.physical_to_logical[0].tolist() == kept
    for expert in range(6):
        slots = [slot for slot, held in enumerate(kept) if held == expert]
        row = after.logical_to_physical[0, expert].tolist()
        assert row == slots + [-1] * (len(row) - len(slots)) and after.replica_counts[0, expert] == len(slots)
        found = remap(torch.tensor([[expert]]), after.logical_to_physical[0], torch.tensor([5]))
        assert found.item() == (slots[5 % len(slots)] if slots else -1)


def test_tables_refuse() -> None:
    for ranks, alive, argument in ((5, [0], "ranks"), (4, [1, 0], "alive"), (4, [], "alive"), (4, [4], "alive")):
        refused(argument, shrunk, contiguous_balance(8), ranks, alive)


def test_a_placement_of_other_experts_or_for_others_is_refused() -> None:
    config, dispatcher = MoEConfig(64, 32, 6, 3), MC2Dispatcher("of nobody", 1, 0, 6)
    refused("placement", MoELayer, config, dispatcher, placement=contiguous_balance(4))
    says = "has 6 experts, the placement 12"
    refused("dispatcher", MoELayer, config, dispatcher, placement=balance(LOAD, 12, 4), says=says)
