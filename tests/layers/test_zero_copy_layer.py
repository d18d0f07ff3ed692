"""MoELayer over window tensors: the bits of the copying layer, and rows where they should lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ascend_moe import LocalCluster, MoEConfig, MoELayer
from ascend_moe.comm import lookup
from ascend_moe.dispatchers import AllGatherDispatcher, Dispatched, WindowDispatcher
from ascend_moe.errors import ArgumentError
from ascend_moe.ops import calls

WORLD = 2
CONFIG = MoEConfig(64, 32, 8, 3, shared_intermediate_size=16)


Step = tuple[torch.Tensor, dict[str, int]]  # the layer's output, bytes that its combine moved


def outputs(quantised: bool, rounds: int = 3, **options: Any) -> list[list[Step]]:
    def body(rank: int, group: str) -> list[Step]:
        dispatcher = WindowDispatcher(group, WORLD, rank, CONFIG.num_experts, **options)
        layer = MoELayer(CONFIG, dispatcher).init_weights(1)
        if quantised:
            layer.quantize_()
        found = []
        for step in range(rounds):
            generator = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(5 + 3 * rank, CONFIG.hidden_size, generator=generator).bfloat16()
            found.append((layer(x, global_bs=WORLD * 8), calls.traffic(lookup(group, WORLD, rank))))
        return found

    with LocalCluster(WORLD, window_mib=1) as cluster:
        return cluster.run(body)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("comm_alg", ["direct", "auto"])
def test_the_same_bits(comm_alg: str, quantised: bool) -> None:
    lent = outputs(quantised, comm_alg=comm_alg, zero_copy=True)
    for other in ({}, {"comm_alg": "window"}, {"comm_alg": comm_alg}):
        for ours, theirs in zip(lent, outputs(quantised, **other), strict=True):
            for (one, _), (two, moved) in zip(ours, theirs, strict=True):
                assert torch.equal(one, two) and one.any()
                assert moved["read_window_lent"] == 0
    row = CONFIG.hidden_size * 2
    for rank, steps in enumerate(lent):
        assert all(moved["read_window_lent"] == (5 + 3 * rank) * 3 * row for _, moved in steps)


def test_options_that_do_not_go_together() -> None:
    def refused(argument: str, **options: Any) -> None:
        with pytest.raises(ArgumentError) as raised:
            WindowDispatcher("g", 2, 0, 4, **options)
        assert raised.value.argument == argument

    refused("zero_copy", zero_copy=True)
    refused("zero_copy", zero_copy=True, comm_alg="window")
    refused("comm_alg", contract="v1", comm_alg="direct")


def test_other_dispatchers_take_any_memory() -> None:
    empty = torch.empty(0)
    sent = Dispatched(empty, empty, empty, empty, empty)
    assert AllGatherDispatcher.empty_expert_out(object(), sent, torch.float32) is None  # type: ignore[arg-type]
    assert WindowDispatcher("g", 2, 0, 4).empty_expert_out(sent, torch.float32) is None
