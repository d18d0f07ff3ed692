"""A layer that loses a rank: tables of the ranks that are left, and outputs that stay where experts have copies."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import ascend_moe
from ascend_moe import npu
from ascend_moe.comm.place import Place
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.errors import ArgumentError
from ascend_moe.layer import MoEConfig, MoELayer
from ascend_moe.placement import Balance, balance, contiguous_balance, remap, shrunk

CONFIG = MoEConfig(64, 32, 6, 3)
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
        with pytest.raises(ArgumentError) as caught:
            shrunk(contiguous_balance(8), ranks, alive)
        assert caught.value.argument == argument


def test_terms_of_experts_without_a_copy_are_left_out() -> None:
    """Experts 2 and 3 of 8 were on rank 1: the sums of the others are those of a layer in which they give nothing."""
    config = MoEConfig(64, 32, 8, 3)

    def work(rank: int, group_ep: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        layer = MoELayer(config, MC2Dispatcher(group_ep, 4, rank, 8), dtype=torch.float32).init_weights(3)
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(rank))
        silent = MoELayer(config, layer.dispatcher, dtype=torch.float32).init_weights(3)
        if rank == 1:
            torch.nn.init.zeros_(silent.w_down)
        want = silent(x)
        if rank == 1:
            return None
        alive = ascend_moe.agree(group_ep)
        layer.shrink(ascend_moe.shrink(group_ep, alive), alive)
        return want, layer(x)

    with ascend_moe.LocalCluster(4, window_mib=2) as cluster:
        for result in filter(None, cluster.run(work)):
            torch.testing.assert_close(result[1], result[0], rtol=1e-5, atol=1e-6)


def test_other_dispatchers_and_placements_are_refused() -> None:
    def work(rank: int, group_ep: str) -> None:
        with pytest.raises(ArgumentError, match="placement"):
            MoELayer(CONFIG, MC2Dispatcher(group_ep, 1, 0, 6), placement=contiguous_balance(4))
        with pytest.raises(ArgumentError, match="has 6 experts, the placement 12"):
            MoELayer(CONFIG, MC2Dispatcher(group_ep, 1, 0, 6), placement=balance(LOAD, 12, 4))

    with ascend_moe.LocalCluster(1, window_mib=2) as cluster:
        cluster.run(work)


def test_special_experts_lie_behind_the_copies() -> None:
    """A layer with copies of experts gives what the layer without them gives, zero and copy experts among the ids."""
    config = MoEConfig(64, 32, 6, 3, zero_expert_num=1, copy_expert_num=2)

    def work(rank: int, group_ep: str, placement: Balance | None, physical: int) -> torch.Tensor:
        transport = MC2Dispatcher(group_ep, 2, rank, physical, **config.special.given)
        layer = MoELayer(config, transport, dtype=torch.float32, placement=placement).init_weights(3)
        x = torch.randn(9, 64, generator=torch.Generator().manual_seed(rank))
        assert (layer.route(x)[1] >= config.num_experts).any()
        return layer(x)

    with ascend_moe.LocalCluster(2, window_mib=2) as cluster:
        plain = cluster.run(lambda rank, group: work(rank, group, None, 6))
        copied = cluster.run(lambda rank, group: work(rank, group, balance(LOAD, 10, 2), 10))
    for found, expected in zip(copied, plain, strict=True):  # products of other shapes: the last bits may differ
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(60))
def test_no_option_is_lost_when_a_dispatcher_moves(seed: int) -> None:
    """A dispatcher that has moved has every attribute of one that is made for the new place."""
    draw = random.Random(seed)
    given: dict[str, Any] = {"contract": draw.choice(["v1", "v2"]), "ops": draw.choice([None, npu])}
    given["comm_quant_mode"] = draw.choice([0, 2])
    if given["contract"] == "v2":
        given["comm_alg"] = draw.choice(["", "auto", "direct", "window", "hierarchy"])
        names = [f"{kind}_expert_num" for kind in ("zero", "copy", "const")]
        given |= {name: draw.randrange(3) for name in draw.sample(names, draw.randrange(4))}
        may_lend = given["comm_alg"] in ("", "auto", "direct") and not given["comm_quant_mode"]
        given["zero_copy"] = may_lend and draw.random() < 0.5
    local, before, after = draw.randrange(1, 5), draw.randrange(2, 9), draw.randrange(1, 9)
    source = MC2Dispatcher("one", before, draw.randrange(before), local * before, **given)
    kept, rank = dict(vars(source)), draw.randrange(after)
    expected = MC2Dispatcher("another", after, rank, local * after, **given)
    assert vars(source.moved(Place("another", after, rank))) == vars(expected) and vars(source) == kept
