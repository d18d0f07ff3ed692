"""DeepEP's normal mode between servers: a row goes once to a server, and a server's sum comes back rounded."""

from __future__ import annotations

import pytest
import torch
from deep_ep_buffers import Case, empty_stack, send

from ascend_moe import LocalCluster
from ascend_moe.interop.deep_ep import Buffer


def sum_of(case: Case, rank: int, rows: torch.Tensor, share: int) -> torch.Tensor:
    """Two roundings: of each server's sum of equal rows, and of the servers' sums."""
    total = torch.zeros(rows.shape)
    for server in range(case.world // share):
        hits = [sum(to // share == server for to in case.hit(rank, token)) for token in range(len(rows))]
        total += (rows.float() * torch.tensor(hits).view(-1, 1)).to(rows.dtype).float()
    return total.to(rows.dtype)


@pytest.mark.parametrize("kind", ["random", "-1", "one expert", "empty rank"])
@pytest.mark.parametrize("world, share", [(4, 2), (8, 2), (8, 4)], ids=["2 servers", "4 servers", "2 servers of 4"])
def test_rows_sums_and_handles(monkeypatch: pytest.MonkeyPatch, world: int, share: int, kind: str) -> None:
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", str(share))
    case = Case(world=world, kind=kind)

    def run(rank: int, group_ep: str) -> None:
        buffer = Buffer((group_ep, world, rank))
        x, _, weights, _, handle, _ = send(case, rank, buffer)
        copies = case.copies(rank)
        assert torch.equal(x, empty_stack([case.x(source)[token] for source, token in copies], x))
        assert handle[3].tolist() == [token for _, token in copies]
        total, summed, _ = buffer.combine(x, handle, topk_weights=weights)
        assert torch.equal(total, sum_of(case, rank, case.x(rank), share))
        used = torch.where(case.ids(rank) >= 0, case.weights(rank), 0.0)
        assert torch.equal(summed, used)  # each weight comes from one rank: no rounding
        bias = torch.full_like(case.x(rank), 0.5)
        assert buffer.combine(x, handle, bias=(bias, bias))[0].shape == bias.shape
        assert torch.equal(buffer.dispatch(-case.x(rank), handle)[0], -x)

    with LocalCluster(world, window_mib=16) as cluster:
        cluster.run(run)
