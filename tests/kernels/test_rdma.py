"""Ranks of other servers, reached by a copy agent instead of stores: the same bits."""

from __future__ import annotations

import op_runs
import pytest

from ascend_moe import LocalCluster
from ascend_moe.errors import AscendMoeError, WindowTooSmall
from ascend_moe.reference.cases import Case, draw, legal

WINDOW_MIB = 4


@pytest.fixture(autouse=True)
def _contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_MOE_CONTEXT", raising=False)


def servers(monkeypatch: pytest.MonkeyPatch, share: int) -> None:
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", str(share))


# ---- against the reference


MATRIX = [
    Case(world=2, local=2, topk=2, seed=11),
    Case(world=2, local=4, topk=3, contract=2, quant="int8", dtype="fp16", batches="unequal", seed=12),
    Case(world=3, local=2, topk=3, units=5, batches="zero rank", ids="minus", cores=5, seed=13),
    Case(world=3, local=1, topk=2, contract=2, mask="pair", dtype="fp32", batches="global_bs", seed=14),
    Case(world=4, local=2, topk=4, ids="hot", batch=9, contract=2, shared=2, cores=3, seed=15),
    Case(world=4, local=5, topk=2, quant="smooth", mask="token", batches="unequal", tail=True, seed=16),
    Case(world=5, local=1, topk=3, contract=2, quant="smooth", batches="unequal", cores=1, seed=17),
    Case(world=6, local=3, topk=4, ids="distinct", dtype="fp32", nums_type=0, tp=1, cores=13, seed=18),
    Case(world=7, local=2, topk=5, contract=2, ids="any", batches="zero rank", cores=4, seed=19),
    Case(world=8, local=1, topk=8, units=9, quant="int8", ids="distinct", cores=2, seed=20),
    Case(world=8, local=2, topk=2, contract=2, ids="hot", mask="prefix", odd=True, seed=21),
    Case(world=4, local=2, batch=0, seed=22),
    Case(world=4, local=2, ids="bad", contract=2, seed=23),
    Case(world=3, local=1, ids="overflow", seed=24),
]


@pytest.mark.parametrize("share", [1, 2, 4])
@pytest.mark.parametrize("spec", MATRIX, ids=lambda s: f"W{s.world}V{s.contract}-{s.seed}")
def test_every_case_is_the_reference(monkeypatch: pytest.MonkeyPatch, spec: Case, share: int) -> None:
    servers(monkeypatch, share)
    case = legal(spec)
    with LocalCluster(case.world, window_mib=WINDOW_MIB) as cluster:
        op_runs.check(case, op_runs.run(cluster, case))


@pytest.mark.parametrize("share", [2, 3])
@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 60), marks=pytest.mark.nightly)])
def test_drawn_cases(monkeypatch: pytest.MonkeyPatch, share: int, seeds: range) -> None:
    servers(monkeypatch, share)
    with LocalCluster(5, window_mib=WINDOW_MIB) as cluster:
        for seed in seeds:
            case = draw(
                seed,
                world=(5,),
                local=(1, 2, 3),
                topk=(1, 2, 3, 4),
                batch=range(7),
                cores=(1, 2, 8),
                ids=("distinct", "any", "minus", "hot", "mixed", "overflow", "bad"),
            )
            if case.world == 5:
                op_runs.check(case, op_runs.run(cluster, case))


# ---- arguments


def test_a_window_too_small_for_rows_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run takes its place in the region: the number that the message asks for is the least that works."""
    servers(monkeypatch, 1)
    case = Case(world=2, local=1, topk=1, units=64, batch=256, dtype="fp16", batches="equal", ids="any")
    with LocalCluster(2, window_mib=2) as cluster:
        errors = op_runs.run(cluster, case)
    assert all(isinstance(one, WindowTooSmall) for one in errors), errors
    needed = errors[0].needed_mib  # type: ignore[union-attr]
    assert f"HCCL_BUFFSIZE={needed}" in str(errors[0])
    with LocalCluster(2, window_mib=needed) as cluster:
        op_runs.check(case, op_runs.run(cluster, case))
    if needed > 2:
        with LocalCluster(2, window_mib=needed - 1) as cluster:
            assert all(isinstance(one, WindowTooSmall) for one in op_runs.run(cluster, case))


def test_assist_info_must_hold_expand_idx(monkeypatch: pytest.MonkeyPatch) -> None:
    servers(monkeypatch, 1)
    case = Case(world=2, local=2, topk=4, contract=2, batch=8, seed=3, ids="distinct")

    def short(rank: int, group: str) -> str:
        sent = list(op_runs.dispatch(case, rank, group))
        rows = op_runs.expert_rows(case, rank, sent)[:0]
        sent[2] = sent[2][:31]
        with pytest.raises(
            AscendMoeError, match=r"at least BS\*K = 32: pass dispatch's own tensor"
        ) as caught:
            op_runs.combine(case, rank, group, rows, sent)
        return str(caught.value)

    with LocalCluster(2, window_mib=WINDOW_MIB) as cluster:
        assert all("31 elements" in text for text in cluster.run(short))
