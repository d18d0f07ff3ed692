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
from ascend_moe.reference.cases import Case

WINDOW_MIB = 4


def servers(monkeypatch: pytest.MonkeyPatch, share: int, near: bool = False) -> None:
    """So many ranks on each server, and flags between them."""
    monkeypatch.setenv("ASCEND_MOE_RDMA_FLAGS", "1")
    monkeypatch.setenv("ASCEND_MOE_INTRA_NODE_STORES", str(int(near)))
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", str(share))


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 100), marks=pytest.mark.nightly)])
def test_drawn_cases_equal_the_reference(monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    servers(monkeypatch, 2)
    op_runs.check_drawn(seeds, 5, WINDOW_MIB)


@pytest.mark.parametrize("flags", [False, True])
def test_the_least_window_between_servers_is_the_one_that_the_error_and_plan_name(
    monkeypatch: pytest.MonkeyPatch, flags: bool
) -> None:
    """It has room for rows, counts and flags; a MiB less is refused."""
    servers(monkeypatch, 1)
    monkeypatch.setenv("ASCEND_MOE_RDMA_FLAGS", str(int(flags)))
    case = Case(world=2, local=1, topk=1, units=128, batch=300, dtype="fp16", batches="equal", ids="any")
    needed, text = op_runs.refused_window(case, 2)
    asked = Request(2, 2, 1, case.hidden, case.batch, dtype="fp16", soc="Ascend910B1", ranks_per_server=1)
    planned = plan.plan(replace(asked, rdma_flags=flags))
    assert planned.buffsize_mib == needed and f"HCCL_BUFFSIZE={needed}" in text
    rows = case.batch * case.hidden * 2
    assert planned.window["dispatch_flag_bytes"] == (-(-rows // 480) * 512 - rows) * flags
    for mib in (needed, needed - 1):
        with LocalCluster(case.world, window_mib=mib) as cluster:
            runs = op_runs.run(cluster, case)
        if mib == needed:
            op_runs.check(case, runs)
        else:
            assert all(isinstance(result, WindowTooSmall) for result in runs)


# ---- blocks that come in any order


def drawn() -> Iterator[Program]:
    """Cases between servers, all with rows of more than one block."""
    for seed in range(10_000):
        case = replace(explore.draw(seed), algorithm="window", rows="own", list_cores=0, units=5 + seed % 40)
        yield replace(case, servers=1 + seed % 2, near=seed // 2 % 2 == 1)


def test_without_flags_the_same_order_of_blocks_is_found() -> None:
    """The control: rows are missing behind a message that has come."""
    options = Options(reordered=True)
    result = explore.campaign(drawn(), 300, seed=0, a_case=5, options=options)
    assert result.finding is not None and result.finding.kind == "wrong result", result
    assert_nothing_found(explore.campaign(drawn(), 60, seed=0, a_case=5))
