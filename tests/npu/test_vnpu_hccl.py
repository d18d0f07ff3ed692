"""HCCL of the virtual NPU through torch.distributed: results, windows, errors that name ranks, no traces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from vnpu_process import HERE, Outcome, left_behind, run, traces

pytestmark = pytest.mark.npu


@pytest.fixture(autouse=True, scope="module")
def nothing_left() -> Iterator[None]:
    before = traces()
    yield
    assert not left_behind(before)


def ranks(case: str, world: int, _folder: Path | None = None, **env: str) -> Outcome:
    return run(HERE / "vnpu_hccl_ranks.py", case, world=world, env=env)


def failures(outcome: Outcome, *which: int) -> list[tuple[float, str]]:
    """Seconds and text of the error that these ranks caught."""
    found = []
    for rank in which:
        match = re.search(r"^failed (\S+) (.*)$", outcome.stdout[rank], re.MULTILINE)
        assert match and outcome.codes[rank] == 0, (rank, outcome.stdout[rank], outcome.stderr[rank][-3000:])
        found.append((float(match[1]), match[2]))
    return found


def test_every_function_gives_what_the_ranks_data_say() -> None:
    """Reductions, moves, messages, groups, graphs, data larger than the windows of 1 MiB."""
    outcome = ranks("everything", 3, HCCL_BUFFSIZE="1").must_pass()
    assert all(text.endswith("done\n") for text in outcome.stdout), outcome.stdout


def test_different_collectives_are_an_error_on_every_rank() -> None:
    for _, text in failures(ranks("mismatch", 2), 0, 1):
        assert "ranks call different collectives" in text
        assert re.search(r"rank 1 calls Broadcast\(count 8, fp32, root 0\)", text)
        assert re.search(r"rank 0 calls AllReduce\(count 8, fp32, sum\)", text)


def test_different_sizes_are_an_error(tmp_path: Path) -> None:
    for _, text in failures(ranks("sizes", 2, tmp_path), 0, 1):
        assert "rank 0 calls AllReduce(count 8, fp32, sum)" in text
        assert "rank 1 calls AllReduce(count 9, fp32, sum)" in text


def test_killed_rank_is_noticed_within_two_seconds() -> None:
    outcome = ranks("killed", 2)
    seconds, text = failures(outcome, 0)[0]
    assert outcome.codes[1] == -9 and seconds < 2
    assert re.search(r"rank 1 \(process \d+.*is gone: it exited or was killed", text), text


@pytest.mark.nightly
def test_late_rank_is_named_at_the_deadline() -> None:
    outcome = ranks("late", 2, ASCEND_MOE_TIMEOUT_S="8")
    seconds, text = failures(outcome, 0)[0]
    assert 8 <= seconds < 11 and "waited 8 s for rank 1" in text and "which is alive" in text, text


def test_rank_that_never_comes_is_named() -> None:
    seconds, text = failures(ranks("absent", 2, HCCL_CONNECT_TIMEOUT="8"), 0)[0]
    assert 8 <= seconds < 11 and "waited for rank(s) 1, which never came" in text, text


def test_unequal_windows_are_refused() -> None:
    for _, text in failures(ranks("unequal_windows", 2), 0, 1):
        assert "rank 0 has windows of 2 MiB, rank 1 of 3 MiB" in text, text
