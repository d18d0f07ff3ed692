"""A Buffer of a process group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deep_ep_buffers import Case, finish, low, low_sum, send
from gloo_ranks import run_processes

from ascend_moe.errors import ArgumentError, InvalidExpertId
from ascend_moe.interop.deep_ep import AscendBuffer, Buffer


def on_a_process_group(rank: int) -> None:
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    case = Case(world=group.size(), kind="-1")
    buffer = Buffer(group)
    x, _, weights, _, handle, _ = send(case, rank, buffer)
    hits = torch.tensor([len(case.hit(rank, token)) for token in range(case.tokens(rank))])
    assert torch.equal(buffer.combine(x, handle, weights)[0], (case.x(rank).float() * hits[:, None]).bfloat16())
    assert torch.equal(finish(case, rank, buffer, low(case, rank, buffer)), low_sum(case, rank))
    for strategy in ("default", "alltoall"):
        ascend: Any = AscendBuffer(group, normal_strategy=strategy, low_latency_strategy=strategy)
        wide = case.ids(rank)
        wide[1, 1] = 2**32 if rank == 0 else wide[1, 1]
        for call in (send, low_of):
            told = rank == 0 or call is send
            with pytest.raises(InvalidExpertId, match="4294967296" if told else "2147483647 or more"):
                call(case, rank, ascend, topk_idx=wide)
        rows, _, _, numbers, sent, _ = send(case, rank, ascend)
        assert numbers == [len(case.rows_of(rank * case.local + expert)) for expert in range(case.local)]
        assert torch.equal(ascend.combine(rows, sent)[0], low_sum(case, rank))
        got = low(case, rank, ascend)
        if strategy == "alltoall":
            check_blocks(case, rank, got)
        assert torch.equal(finish(case, rank, ascend, got), low_sum(case, rank))
        with pytest.raises(ArgumentError, match="topk_idx of token"):
            ascend.low_latency_combine(got[0], case.ids(rank).flip(0), case.weights(rank), got[2])


def low_of(case: Case, rank: int, buffer: Any, topk_idx: torch.Tensor) -> Any:
    return buffer.low_latency_dispatch(case.x(rank), topk_idx, case.most, case.experts, use_fp8=False)


def check_blocks(case: Case, rank: int, got: Any) -> None:
    """Each local expert has ``most`` rows of every source rank, zeros behind those that are there."""
    rows, count, handle, _, _ = got
    most = case.most + 1
    blocks = rows.view(case.local, case.world, most, -1)
    assert count.tolist() == [case.world * most] * case.local and len(handle) == 7
    for expert in range(case.local):
        for source in range(case.world):
            triples = [each for each in case.rows_of(rank * case.local + expert) if each[0] == source]
            expected = torch.zeros(most, case.hidden, dtype=rows.dtype)
            for place, (_, token, _) in enumerate(triples):
                expected[place] = case.x(source)[token]
            assert torch.equal(blocks[expert, source], expected)


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 4])
def test_a_process_group(tmp_path: Path, world: int) -> None:
    run_processes(world, on_a_process_group, tmp_path)


@pytest.fixture
def alone() -> Iterator[Any]:
    """The default group, of one rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_a_process_group_of_one(alone: Any) -> None:
    on_a_process_group(0)
