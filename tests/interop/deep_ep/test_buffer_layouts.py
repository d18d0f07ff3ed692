"""How many tokens go where: get_dispatch_layout against its definition."""

from __future__ import annotations

import pytest
import torch
from deep_ep_buffers import Case, on_all
from op_runs import Clusters

from ascend_moe import LocalCluster
from ascend_moe.comm.place import Place
from ascend_moe.interop.deep_ep import Buffer
from ascend_moe.ops.collectives import gather_rows


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("kind", ["random", "-1", "empty rank"])
def test_layouts_are_their_definitions(clusters: Clusters, world: int, kind: str) -> None:
    case = Case(world=world, kind=kind)

    def body(rank: int, buffer: Buffer) -> None:
        ids = case.ids(rank)
        per_rank, servers, per_expert, in_rank, event = buffer.get_dispatch_layout(ids, case.experts)
        hits = [case.hit(rank, token) for token in range(case.tokens(rank))]
        assert servers is None and event.event is None
        assert per_rank.tolist() == [sum(each in hit for hit in hits) for each in range(world)]
        assert per_expert.tolist() == [int((ids == expert).sum()) for expert in range(case.experts)]
        assert in_rank.tolist() == [[each in hit for each in range(world)] for hit in hits]
        assert per_rank.dtype == per_expert.dtype == torch.int32 and in_rank.dtype == torch.bool

    on_all(clusters, case, body)


@pytest.mark.parametrize("world", [1, 3, 17])
def test_gather(world: int) -> None:
    def run(rank: int, group_ep: str) -> None:
        table = gather_rows(torch.arange(5, dtype=torch.int32) - rank, Place(group_ep, world, rank))
        assert table.tolist() == [[number - each for number in range(5)] for each in range(world)]

    with LocalCluster(world) as cluster:
        cluster.run(run)
