"""Rows between servers in flagged blocks (ASCEND_MOE_RDMA_FLAGS): the same bits, in whatever order blocks come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import op_runs
import pytest
from explored_programs import assert_nothing_found

from ascend_moe import explore
from ascend_moe.explore import Options, Program

WINDOW_MIB = 4


def servers(monkeypatch: pytest.MonkeyPatch, share: int, stores: bool = False) -> None:
    """So many ranks on each server, and flags between them."""
    monkeypatch.setenv("ASCEND_MOE_RDMA_FLAGS", "1")
    monkeypatch.setenv("ASCEND_MOE_INTRA_NODE_STORES", str(int(stores)))
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", str(share))


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 100), marks=pytest.mark.nightly)])
def test_drawn_cases_equal_the_reference(monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    servers(monkeypatch, 2)
    op_runs.check_drawn(seeds, 5, WINDOW_MIB)


# ---- blocks that come in any order


def drawn() -> Iterator[Program]:
    """Cases between servers, all with rows of more than one block."""
    for seed in range(10_000):
        case = replace(explore.draw(seed), algorithm="window", rows="own", list_cores=0, units=5 + seed % 40)
        yield replace(case, servers=1 + seed % 2, stores=seed // 2 % 2 == 1)


def test_without_flags_the_same_order_of_blocks_is_found() -> None:
    """The control: rows are missing behind a message that has come."""
    options = Options(reordered=True)
    result = explore.campaign(drawn(), 300, seed=0, a_case=5, options=options)
    assert result.finding is not None and result.finding.kind == "wrong result", result
    assert_nothing_found(explore.campaign(drawn(), 60, seed=0, a_case=5))
