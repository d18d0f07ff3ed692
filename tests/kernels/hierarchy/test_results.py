"""comm_alg "hierarchy" between servers: dispatch gives window's tensors, combine the reference's two roundings."""

from __future__ import annotations

from typing import Any

import op_runs
import pytest

from ascend_moe import LocalCluster
from ascend_moe.reference.cases import Case, legal

WINDOW_MIB = 8


@pytest.fixture(autouse=True)
def servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_CONTEXT", "a2")
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", op_runs.CROWDED_S)


MATRIX = [
    Case(world=8, local=2, topk=8, share=4, ids="hot", batch=9, shared=2, odd=True, seed=5),
    Case(world=16, local=1, topk=4, share=8, batch=3, units=5, comm_quant_mode=2, cores=2, seed=8),
    Case(world=16, local=2, topk=6, share=4, batch=64, quant_mode=2, comm_quant_mode=2, ids="mixed", cores=1, seed=9),
    Case(world=4, local=2, topk=2, share=2, batch=70, width=2048, comm_quant_mode=2, cores=4, seed=15),
    Case(world=4, local=2, topk=8, share=2, batch=2, width=4096, comm_quant_mode=2, cores=48, seed=16),
    Case(world=4, local=8, topk=32, share=2, batch=5, cores=48, ids="any", seed=17),
    # Above 32 ranks an A2 context leads to its peers by another table.
    Case(world=40, local=1, topk=4, share=8, batch=3, cores=1, seed=18),
    Case(world=64, local=4, topk=8, share=8, batch=2, cores=2, quant_mode=2, seed=19),
    pytest.param(
        Case(world=256, topk=8, share=8, batch=1, cores=1, comm_quant_mode=2, seed=20), marks=pytest.mark.nightly
    ),
]


@pytest.mark.parametrize("spec", MATRIX, ids=lambda case: f"W{case.world}R{case.share}-{case.seed}")
def test_both_ops_give_the_reference(monkeypatch: pytest.MonkeyPatch, spec: Case) -> None:
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", str(spec.share))
    case = legal(spec)
    with LocalCluster(case.world, window_mib=WINDOW_MIB) as cluster:
        runs = op_runs.run(cluster, case)
    op_runs.check(case, runs)
    if case.fault() is None:
        assert {run.algorithms for run in runs} == {("hierarchy", "hierarchy")}


@pytest.mark.parametrize(("world", "share"), [(4, 2), (6, 3), (6, 2)])
@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 80), marks=pytest.mark.nightly)])
def test_drawn_cases_equal_the_reference(monkeypatch: pytest.MonkeyPatch, world: int, share: int, seeds: range) -> None:
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", str(share))
    op_runs.check_drawn(seeds, world, WINDOW_MIB, share=(share,))


@pytest.mark.parametrize("stores", ["0", "1"])
def test_ops_of_all_algorithms_follow_each_other(monkeypatch: pytest.MonkeyPatch, stores: str) -> None:
    """Half by half window and hierarchy write other regions of the same memory."""
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", "2")
    monkeypatch.setenv("ASCEND_MOE_INTRA_NODE_STORES", stores)
    shape = {"world": 4, "local": 2, "topk": 3, "contract": 2, "weights": True, "batches": "unequal", "cores": 3}
    cases = [Case(**shape, share=share, seed=seed) for seed, share in enumerate((2, 0, 2, 2, 0, 0, 2))]
    with LocalCluster(4, window_mib=WINDOW_MIB) as cluster:

        def body(rank: int, group_ep: str) -> list[op_runs.RankRun | Any]:
            sent = [op_runs.dispatch(case, rank, group_ep) for case in cases]
            order = [4, 0, 6, 5, 1, 3, 2]
            results: dict[int, op_runs.RankRun] = {}
            for at in order:
                rows = op_runs.expert_rows(cases[at], rank, sent[at])
                results[at] = op_runs.RankRun(
                    sent[at], rows, op_runs.combine(cases[at], rank, group_ep, rows, sent[at]), []
                )
            return [results[at] for at in range(len(cases))]

        with op_runs.cores(3):
            runs = cluster.run(body)
    for at, case in enumerate(cases):
        op_runs.check(case, [of_rank[at] for of_rank in runs])
