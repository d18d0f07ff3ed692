"""Direct dispatch where owners have several experts: a row crosses the links once for all of them."""

from __future__ import annotations

from dataclasses import replace

import op_runs
import pytest
import torch
from op_runs import Clusters, RankRun

from ascend_moe import explore
from ascend_moe.reference.cases import BATCHES, Case, draw, legal

PART = 40  # cases a test
MANY = 8  # experts of an owner


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_COMM_ALG", "direct")


def drawn(seed: int) -> Case:
    return draw(
        seed,
        world=(1, 2, 3, 4, 8),
        local=(2, 4, MANY, 17, 32),
        topk=(1, 2, 3, 8),
        units=(1, 2, 20),
        batch=(1, 3, 6, 17, 40),
        quant=("none", "int8", "int8", "smooth"),
        batches=("equal", "equal", *BATCHES),
        ids=("distinct", "any", "minus", "hot", "mixed", "bad"),
        cores=(7, 8, 13, 24, 48),
    )


@pytest.mark.parametrize("first", range(0, 5 * PART, PART))
def test_equals_the_reference(clusters: Clusters, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_runs, "check_traffic", lambda *_: None)
    for seed in range(first, first + PART):
        case = drawn(seed)
        op_runs.check(case, op_runs.run(clusters[case.world], case))


def test_a_row_is_read_once_by_its_owner(clusters: Clusters) -> None:
    spec = Case(world=2, local=MANY, topk=8, units=64, batch=30, quant="int8", contract=2, batches="equal")
    for cores, once in ((8, True), (48, True), (7, False)):
        case = legal(replace(spec, cores=cores, ids="distinct"))
        wire = case.inputs[0].x.shape[1] + 32
        for rank, run in enumerate(op_runs.run(clusters[2], case)):
            assert isinstance(run, RankRun), run
            owners = [one.expert_ids // MANY == rank for one in case.inputs]
            pairs = sum(int(own.sum()) for own in owners)
            rows = sum(int(own.any(1).sum()) for own in owners)
            read = run.traffic[0]["read_window_data"]
            # The cores that share the rows of a source each read its list.
            readers = cores if once else 1
            assert read == (rows if once else pairs) * wire + readers * 4 * pairs, (cores, rank)
            assert rows < pairs
            index = run.dispatched[2][: 3 * pairs].reshape(-1, 3)
            assert len(torch.unique(index, dim=0)) == pairs


# ---- on the checked engine

CASES = [
    explore.parse(f"{sizes},l{MANY},u1,bf16,ids:any,equal,DC,direct,s{seed}")
    for seed, sizes in enumerate(
        (
            "w2,c8,k3,b4,v2,m2,int8,mask:none",
            "w3,c8,k2,b3,v1,m3,none,mask:token",
            "w2,c9,k4,b5,v2,m1,int8,mask:pair",
            "w1,c8,k3,b9,v2,m2,none,mask:none",
        )
    )
]


def test_no_schedule_has_a_finding() -> None:
    result = explore.campaign(CASES, schedules=80, seed=1, a_case=20)
    assert result.finding is None, result.finding.line()
    assert result.schedules == 80
