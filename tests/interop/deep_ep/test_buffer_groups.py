"""A Buffer of a process group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deep_ep_buffers import BUFFERS, Case, finish, low, low_sum, send
from gloo_ranks import run_processes
from op_runs import Clusters

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


@pytest.mark.parametrize("flavour", ["deepep", "ascend"])
def test_a_group_is_given_as_group_name_mesh_or_tuple(alone: Any, flavour: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    case = Case(world=1)
    assert type(Buffer(alone, flavour=flavour)) is BUFFERS[flavour]
    for group in (alone, alone.group_name, mesh, mesh["ep"], SimpleNamespace(device_group=alone)):
        buffer: Any = BUFFERS[flavour](group)
        assert (buffer.group_size, buffer.rank) == (1, 0)
        assert torch.equal(finish(case, 0, buffer, low(case, 0, buffer)), low_sum(case, 0))
        if flavour == "ascend":
            buffer = BUFFERS[flavour](group, normal_strategy="alltoall", low_latency_strategy="alltoall")
            assert torch.equal(finish(case, 0, buffer, low(case, 0, buffer)), low_sum(case, 0))
            assert torch.equal(buffer.combine(*send(case, 0, buffer)[0:5:4])[0], low_sum(case, 0))
    wrong: list[tuple[Any, str]] = [
        (None, "is None; pass a process group"),
        ("nobody", "of 'nobody' names no live group"),
        ("", "is an empty name; pass"),
        (init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "ep")), "is a DeviceMesh of dimensions dp, ep; pass"),
        (3, "is a int, not a live process group; pass"),
    ]
    for group, text in wrong:
        with pytest.raises(ArgumentError, match=f"^group {text}") as told:
            BUFFERS[flavour](group)
        assert "\n" not in str(told.value) and told.value.argument == "group"


def test_a_cluster_is_given_by_its_name_in_the_thread_of_a_rank(clusters: Clusters) -> None:
    case = Case(world=2)

    def run(rank: int, group_ep: str) -> None:
        for flavour in ("deepep", "ascend"):
            buffer = BUFFERS[flavour](group_ep)
            assert (buffer.group_size, buffer.rank) == (2, rank)
            assert torch.equal(finish(case, rank, buffer, low(case, rank, buffer)), low_sum(case, rank))
        by_all_to_all: Any = AscendBuffer(group_ep, normal_strategy="alltoall")
        rows, _, _, _, sent, _ = send(case, rank, by_all_to_all)
        assert torch.equal(by_all_to_all.combine(rows, sent)[0], low_sum(case, rank))

    clusters[2].run(run)
