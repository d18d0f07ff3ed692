"""Hierarchy in HCCL's layouts: two and four servers in A2's, one server, where it is window, in all of them."""

from __future__ import annotations

from dataclasses import replace

import op_runs
import pytest
import torch

from ascend_moe import LocalCluster
from ascend_moe.errors import ArgumentError
from ascend_moe.reference.cases import Case, legal

CASE = Case(local=2, topk=5, batch=4, units=4, cores=2, contract=2, weights=True, ids="mixed", batches="unequal")


def run(case: Case) -> list[op_runs.RankRun]:
    """Each rank's run, whose tensors are the reference's; both ops have run one algorithm."""
    with LocalCluster(case.world, window_mib=4) as cluster:
        runs = op_runs.run(cluster, case)
    op_runs.check(case, runs)
    return [one for one in runs if isinstance(one, op_runs.RankRun)]


def of_rows(one: op_runs.RankRun) -> list[torch.Tensor]:
    """What dispatch says of the rows that have come: rows, scales, triples, counts, weights."""
    rows = int(one.dispatched[4][-1])
    x, scales, assist, numbers, counts, _, weights = one.dispatched
    return [x[:rows], scales[:rows], assist[: 3 * rows], numbers, counts, weights[:rows]]


@pytest.mark.parametrize(("world", "servers"), [(4, 2), (8, 2), (8, 4), (16, 2), (16, 4)])
@pytest.mark.parametrize("quant_mode", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_dispatch_is_windows_of_every_layout(
    world: int, servers: int, quant_mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit. Combine is the reference's: two roundings between servers, one within a server."""
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "20")
    case = legal(replace(CASE, world=world, share=world // servers, quant_mode=quant_mode, seed=world + servers))
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", str(case.share))
    levels = run(case)
    assert {one.algorithms for one in levels} == {("hierarchy", "hierarchy")}
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", "0")
    monkeypatch.setenv("ASCEND_MOE_COMM_ALG", "hierarchy")
    for layout in ("table", "a3", "a2"):
        monkeypatch.setenv("ASCEND_MOE_CONTEXT", layout)
        window = run(replace(case, share=0))
        assert {one.algorithms for one in window} == {("window", "window")}
        for one, other in zip(levels, window, strict=True):
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(of_rows(one), of_rows(other), strict=True))


@pytest.mark.parametrize("layout", ["table", "a3"])
def test_servers_are_a2s_alone(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stores reach every rank there is no second level."""
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", "2")
    monkeypatch.setenv("ASCEND_MOE_CONTEXT", layout)
    why = f"ASCEND_MOE_CONTEXT={layout} with ASCEND_MOE_RANKS_PER_SERVER=2: servers need a2, .* stores reach every rank"
    with pytest.raises(ArgumentError, match=why) as raised:
        LocalCluster(4, window_mib=4)
    assert raised.value.argument == "ASCEND_MOE_CONTEXT"
