"""Rows between servers in flagged blocks (ASCEND_MOE_RDMA_FLAGS): the same bits, in whatever order blocks come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import op_runs
import pytest
from explored_worlds import assert_nothing_found

from ascend_moe import LocalCluster, explore, plan
from ascend_moe.errors import WindowTooSmall
from ascend_moe.explore import Options, Program
from ascend_moe.plan import Request
from ascend_moe.reference.cases import Case, legal

WINDOW_MIB = 4
MATRIX = [
    Case(world=3, local=2, topk=3, units=5, batches="zero rank", ids="minus", cores=5, seed=13),
    Case(world=4, local=5, topk=2, quant_mode=2, smooth=True, mask="token", batches="unequal", tail=True, seed=16),
    Case(world=4, local=2, topk=4, ids="hot", batch=9, contract=2, shared=2, cores=3, seed=15),
    Case(world=4, local=2, topk=3, contract=2, quant_mode=2, dtype="fp16", batches="unequal", mask="pair", seed=12),
    Case(world=5, local=3, topk=4, ids="distinct", dtype="fp32", units=31, batch=6, cores=8, seed=18),
    Case(world=4, local=1, topk=2, contract=2, comm_quant_mode=2, units=65, batch=1, cores=8, ids="distinct", seed=19),
    Case(world=4, local=2, topk=3, contract=1, comm_quant_mode=2, units=12, batches="unequal", ids="mixed", seed=20),
    Case(world=4, local=2, batch=0, seed=22),
    Case(world=4, local=2, ids="bad", contract=2, seed=23),
    Case(world=3, local=1, ids="overflow", seed=24),
]


def servers(monkeypatch: pytest.MonkeyPatch, share: int, near: bool = False) -> None:
    """So many ranks on each server, and flags between them."""
    monkeypatch.setenv("ASCEND_MOE_RDMA_FLAGS", "1")
    monkeypatch.setenv("ASCEND_MOE_NEAR_STORES", str(int(near)))
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", str(share))


@pytest.mark.parametrize("share", [1, 2])
@pytest.mark.parametrize("spec", MATRIX, ids=lambda spec: f"W{spec.world}V{spec.contract}-{spec.seed}")
def test_every_mode_gives_the_reference(monkeypatch: pytest.MonkeyPatch, share: int, spec: Case) -> None:
    servers(monkeypatch, share, near=spec.seed % 2 == 0)
    case = legal(spec)
    with LocalCluster(case.world, window_mib=WINDOW_MIB) as cluster:
        for _ in range(2):  # both halves of the windows
            op_runs.check(case, op_runs.run(cluster, case))


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 100), marks=pytest.mark.nightly)])
def test_drawn_cases_equal_the_reference(monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    servers(monkeypatch, 2)
    op_runs.check_drawn(seeds, 5, WINDOW_MIB)


def test_the_least_window_has_room_for_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number that the message asks for is the least that works, and plan says the same."""
    servers(monkeypatch, 1)
    case = Case(world=2, local=1, topk=1, units=128, batch=300, dtype="fp16", batches="equal", ids="any")
    needed, _ = op_runs.refused_window(case, 2)
    asked = Request(2, 2, 1, case.hidden, case.batch, dtype="fp16", soc="Ascend910B1", ranks_per_server=1)
    flagged, usual = plan.plan(replace(asked, rdma_flags=True)), plan.plan(asked)
    assert flagged.buffsize_mib == needed > usual.buffsize_mib
    rows = case.batch * case.hidden * 2
    assert flagged.window["dispatch_flag_bytes"] == -(-rows // 480) * 512 - rows
    assert usual.window["dispatch_flag_bytes"] == 0
    with LocalCluster(2, window_mib=needed) as cluster:
        op_runs.check(case, op_runs.run(cluster, case))
    with LocalCluster(2, window_mib=needed - 1) as cluster:
        assert all(isinstance(result, WindowTooSmall) for result in op_runs.run(cluster, case))


# ---- blocks that come in any order


def drawn(first: int, flags: bool) -> Iterator[Program]:
    """Cases between servers, all with rows of more than one block."""
    for seed in range(first, first + 10_000):
        case = replace(explore.draw(seed), algorithm="window", rows="own", list_cores=0, units=5 + seed % 40)
        yield replace(case, servers=1 + seed % 2, near=seed // 2 % 2 == 1, flags=flags)


@pytest.mark.parametrize(("first", "schedules"), [(0, 150), pytest.param(20_000, 3000, marks=pytest.mark.nightly)])
def test_no_order_of_blocks_is_found_with_flags(first: int, schedules: int) -> None:
    assert_nothing_found(explore.campaign(drawn(first, True), schedules, seed=first, a_case=5))


def test_without_flags_the_same_order_of_blocks_is_found() -> None:
    """The control: rows are missing behind a message that has come."""
    options = Options(reordered=True)
    result = explore.campaign(drawn(0, False), 300, seed=0, a_case=5, options=options)
    assert result.finding is not None and result.finding.kind == "wrong result", result
    assert_nothing_found(explore.campaign(drawn(0, False), 60, seed=0, a_case=5))
