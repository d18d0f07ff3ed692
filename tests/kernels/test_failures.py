"""Ranks that die, stop or never call, as real processes: who is named, how soon, and what is left behind."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import comm_cases
import failure_cases as cases
import pytest
from process_fixtures import fork_server, nothing_left
from rank_processes import Outcome, Ranks, values

__all__ = ["fork_server", "nothing_left"]  # fixtures
DEADLINE_S = 1.0
SOON_S = 2.0  # beyond the deadline, or for what needs none
FAR_S = 30.0  # a deadline that no test waits for
AT_ONCE_S = 0.3


class OpRanks(Ranks):
    """Ranks over the real library."""

    algorithm = "window"

    def __enter__(self) -> OpRanks:
        values(self.call(comm_cases.set_env, "ASCEND_MOE_COMM_ALG", self.algorithm))
        values(self.call(cases.use_real_library))
        return self


@pytest.fixture(autouse=True, params=["window", "direct"])
def algorithm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpRanks, "algorithm", request.param)


def others(rank: int, world: int = 3) -> list[int]:
    return [other for other in range(world) if other != rank]


def assert_named(outcome: Outcome, error: str, rank: int, *words: str) -> None:
    assert outcome.error == error, f"{outcome.error}: {outcome.text} {outcome.value}"
    assert outcome.details["rank"] == rank, outcome.text
    assert "\n" not in outcome.text
    for word in (f"rank {rank}", *words):
        assert word in outcome.text, outcome.text


def assert_stuck(ranks: OpRanks, error: str, rank: int, survivors: list[int]) -> None:
    """The same failure again, at once, in any op."""
    for op in (cases.run_combine, cases.run_dispatch, cases.run_round_trip):
        for outcome in ranks.call(op, ranks=survivors):
            assert_named(outcome, error, rank)
            assert outcome.seconds < AT_ONCE_S


def assert_fresh_windows_work(ranks: OpRanks, survivors: list[int], files: list[list[str]]) -> None:
    """Closed, nothing is left open; a new group of the survivors works."""
    values(ranks.call(comm_cases.close, ranks=survivors))
    for before, now in zip(files, values(ranks.call(comm_cases.open_files, ranks=survivors)), strict=True):
        assert not Counter(now) - Counter(before), "descriptors leak"
    names = set(values(ranks.call(cases.new_group, survivors, ranks=survivors)))
    assert len(names) == 1
    for contract in (1, 2):
        done = ranks.call(cases.run_round_trip, 2, names.copy().pop(), contract, ranks=survivors)
        assert values(done) == ["right"] * len(survivors)


def opened(ranks: OpRanks) -> list[list[str]]:
    """What each process has open before its windows; they are open afterwards."""
    files: list[list[str]] = values(ranks.call(comm_cases.open_files))
    assert values(ranks.call(cases.run_round_trip)) == ["right"] * ranks.world
    return files


# ---- killed


@pytest.mark.row("kill")
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_killed_between_ops(victim: int) -> None:
    survivors = others(victim)
    with OpRanks(3, timeout_s=FAR_S) as ranks:
        files = opened(ranks)
        assert values(ranks.call(cases.run_dispatch, 1)) == ["right"] * 3
        ranks.kill(victim)
        for outcome in ranks.call(cases.run_combine, ranks=survivors):
            assert_named(outcome, "PeerLost", victim, "has ended")
            assert outcome.seconds < SOON_S
        assert_stuck(ranks, "PeerLost", victim, survivors)
        assert_fresh_windows_work(ranks, survivors, [files[rank] for rank in survivors])


@pytest.mark.row("kill")
def test_killed_while_the_others_wait_for_it() -> None:
    with OpRanks(3, timeout_s=FAR_S) as ranks:
        opened(ranks)
        for rank in (0, 2):
            ranks.start(rank, cases.run_dispatch)
        time.sleep(0.3)
        ranks.kill(1)
        began = time.monotonic()
        for rank in (0, 2):
            assert_named(ranks.wait(rank), "PeerLost", 1, "has ended")
        assert time.monotonic() - began < SOON_S
        assert_stuck(ranks, "PeerLost", 1, [0, 2])


@pytest.mark.row("kill")
def test_killed_after_it_has_delivered() -> None:
    """Its rows are there, so the op is right; the next one is not."""
    with OpRanks(3, timeout_s=FAR_S) as ranks:
        opened(ranks)
        for rank in (0, 1):
            ranks.start(rank, cases.run_dispatch, 3)
        time.sleep(0.3)
        ranks.kill(1)
        ranks.processes[1].join()
        ranks.start(2, cases.run_dispatch, 3)
        assert values([ranks.wait(rank) for rank in (0, 2)]) == ["right"] * 2
        for outcome in ranks.call(cases.run_combine, ranks=[0, 2]):
            assert_named(outcome, "PeerLost", 1)
            assert outcome.seconds < SOON_S


@pytest.mark.row("kill")
@pytest.mark.parametrize(("victim", "point"), [(0, "map"), (2, "map"), (1, "ready")])
def test_killed_between_creating_and_mapping_windows(victim: int, point: str) -> None:
    survivors = others(victim)
    with OpRanks(3, timeout_s=FAR_S) as ranks:
        files = values(ranks.call(comm_cases.open_files, ranks=survivors))
        values(ranks.call(comm_cases.kill_at, point, ranks=[victim]))
        for rank in range(3):
            ranks.start(rank, cases.run_round_trip)
        for rank in survivors:
            outcome = ranks.wait(rank)
            assert_named(outcome, "PeerLost", victim)
            assert outcome.seconds < SOON_S
        assert_fresh_windows_work(ranks, survivors, files)


# ---- stopped, or never calling


@pytest.mark.row("stop")
@pytest.mark.parametrize("victim", [0, 2])
def test_stopped_beyond_the_deadline(victim: int) -> None:
    there = others(victim)
    with OpRanks(3, timeout_s=DEADLINE_S) as ranks:
        opened(ranks)
        ranks.stop(victim)
        for outcome in ranks.call(cases.run_dispatch, ranks=there):
            assert_named(outcome, "CommTimeout", victim, "is stopped (state T)", f"{DEADLINE_S:.1f} s")
            assert 0.8 * DEADLINE_S < outcome.seconds < DEADLINE_S + SOON_S
        assert_stuck(ranks, "CommTimeout", victim, there)
        ranks.start(victim, cases.run_dispatch)
        ranks.resume(victim)
        woken = ranks.wait(victim)
        assert_named(woken, "CommTimeout", victim, "found by rank")
        assert woken.details["reporter"] in there
        assert woken.seconds < AT_ONCE_S
        assert_stuck(ranks, "CommTimeout", victim, [0, 1, 2])
        # Nobody has died: the same ranks open fresh windows.
        values(ranks.call(comm_cases.close))
        assert values(ranks.call(cases.run_round_trip, 1)) == ["right"] * 3


@pytest.mark.row("stop")
def test_stopped_for_less_than_the_deadline() -> None:
    with OpRanks(3, timeout_s=10) as ranks:
        opened(ranks)
        for seed in range(2):
            ranks.stop(1)
            for rank in range(3):
                ranks.start(rank, cases.run_round_trip, seed)
            time.sleep(0.4)
            ranks.resume(1)
            assert values([ranks.wait(rank) for rank in range(3)]) == ["right"] * 3


@pytest.mark.row("stop")
def test_stopped_after_it_has_delivered() -> None:
    """The others go on without noticing; it finds everything there when it wakes up, deadline or not."""
    with OpRanks(3, timeout_s=DEADLINE_S) as ranks:
        opened(ranks)
        for rank in (0, 1):
            ranks.start(rank, cases.run_dispatch, 4)
        time.sleep(0.3)
        ranks.stop(1)
        ranks.start(2, cases.run_dispatch, 4)
        assert values([ranks.wait(rank) for rank in (0, 2)]) == ["right"] * 2
        time.sleep(DEADLINE_S)
        ranks.resume(1)
        assert values([ranks.wait(1)]) == ["right"]
        assert values(ranks.call(cases.run_combine)) == ["right"] * 3


@pytest.mark.parametrize("missing", [0, 1])
def test_rank_that_never_calls(missing: int) -> None:
    there = others(missing)
    with OpRanks(3, timeout_s=DEADLINE_S) as ranks:
        opened(ranks)
        assert values(ranks.call(cases.run_dispatch, 1)) == ["right"] * 3
        for outcome in ranks.call(cases.run_combine, ranks=there):
            assert_named(outcome, "CommTimeout", missing, "last seen in dispatch, epoch 3", "is running")
            assert f"missing: rank {missing} (" in outcome.text
            assert 0.8 * DEADLINE_S < outcome.seconds < DEADLINE_S + SOON_S
        assert_stuck(ranks, "CommTimeout", missing, [0, 1, 2])
        values(ranks.call(comm_cases.close))
        assert values(ranks.call(cases.run_round_trip, 1)) == ["right"] * 3


def test_several_ranks_that_never_call_are_listed() -> None:
    with OpRanks(4, timeout_s=0.5) as ranks:
        opened(ranks)
        for outcome in ranks.call(cases.run_dispatch, ranks=[0, 2]):
            assert outcome.error == "CommTimeout" and outcome.details["rank"] in (1, 3)
        for outcome in ranks.call(cases.run_dispatch, ranks=[1, 3]):
            assert outcome.error == "CommTimeout" and outcome.seconds < AT_ONCE_S


def test_argument_error_on_one_rank_then_a_correct_retry() -> None:
    with OpRanks(3, timeout_s=10) as ranks:
        for attempt in range(2):  # the first one opens the windows
            for rank in (0, 2):
                ranks.start(rank, cases.run_round_trip, attempt)
            ranks.start(1, cases.run_bad_then_right, attempt)
            assert ranks.wait(1).value == ("quant_mode", "right")
            assert values([ranks.wait(rank) for rank in (0, 2)]) == ["right"] * 2


# ---- coming to the end


@pytest.mark.parametrize("ending", [cases.finish, cases.finish_at_once])
def test_ranks_that_end_after_their_last_op_harm_nobody(ending: Any) -> None:
    """Rank 2 is stopped in the middle of things while the others may have finished already."""
    with OpRanks(3, timeout_s=FAR_S) as ranks:
        opened(ranks)
        for rank in (0, 1):
            ranks.start(rank, ending, 5)
        ranks.start(2, cases.run_round_trip, 5)
        time.sleep(0.001)
        ranks.stop(2)
        time.sleep(0.5)
        ranks.resume(2)
        assert values([ranks.wait(2)]) == ["right"]
        for rank in (0, 1):
            ranks.processes[rank].join(10)
            assert ranks.processes[rank].exitcode == 0
        assert_named(ranks.call(cases.run_dispatch, 5, ranks=[2])[0], "PeerLost", 0)
