"""Ranks that die, stop or never call, as real processes: who is named, how soon, and what is left behind."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import comm_cases
import failure_cases as cases
import pytest
import soak_rows
from rank_processes import CallResult, Ranks, assert_named, fork_server, nothing_left, values
from soak_rows import Tally

from ascend_moe import LocalCluster, comm, settings
from ascend_moe.reference.cases import Case, legal
from ascend_moe.validate.run import DevicePlace

__all__ = ["fork_server", "nothing_left"]  # fixtures
DEADLINE_S = 1.0
FAR_S = 30.0  # a deadline that no test waits for
SOON_S = FAR_S / 2  # for what waits for no deadline, or beyond a short one, on a busy machine


class OpRanks(Ranks):
    """Ranks whose ops take a setting."""

    def use(self, algorithm: str) -> None:
        """``servers``: window, every rank in a server of its own."""
        share = "1" if algorithm == "servers" else "0"
        values(self.call(comm_cases.set_env, "ASCEND_MOE_RANKS_PER_SERVER", share))
        name = algorithm.replace("servers", "window")
        values(self.call(comm_cases.set_env, "ASCEND_MOE_COMM_ALG", name))

    def wait_at_most(self, seconds: float, ranks: Sequence[int] | None = None) -> None:
        values(self.call(comm_cases.set_env, "ASCEND_MOE_TIMEOUT_S", str(seconds), ranks=ranks))


@pytest.fixture
def mortal(algorithm: str) -> Iterator[OpRanks]:
    """Three processes that have run an op, of which the test kills some."""
    with OpRanks(3, timeout_s=FAR_S) as ranks:
        ranks.use(algorithm)
        yield ranks


@pytest.fixture(scope="module")
def lasting() -> Iterator[OpRanks]:
    with OpRanks(3, timeout_s=FAR_S) as ranks:
        yield ranks


@pytest.fixture
def three(lasting: OpRanks, algorithm: str) -> Iterator[OpRanks]:
    """Three processes for tests after which all of them live."""
    lasting.use(algorithm)
    lasting.wait_at_most(FAR_S)
    opened(lasting)
    yield lasting
    values(lasting.call(comm.close, "0"))


def others(rank: int, world: int = 3) -> list[int]:
    return [other for other in range(world) if other != rank]


def assert_stuck(ranks: OpRanks, error: str, rank: int, survivors: list[int]) -> None:
    """The same failure again, at once, in any op."""
    ranks.wait_at_most(FAR_S, survivors)
    for op in (cases.run_combine, cases.run_dispatch, cases.run_round_trip):
        for outcome in ranks.call(op, ranks=survivors):
            assert_named(outcome, error, rank)
            assert outcome.seconds < SOON_S


def assert_new_windows_work(ranks: OpRanks, survivors: list[int], files: list[list[str]]) -> None:
    """Closed, nothing is left open; a new group of the survivors works."""
    values(ranks.call(comm.close, "0", ranks=survivors))
    for before, now in zip(files, values(ranks.call(comm_cases.open_files, ranks=survivors)), strict=True):
        assert not Counter(now) - Counter(before), "descriptors leak"
    names = set(values(ranks.call(comm_cases.new_group, survivors, ranks=survivors)))
    assert len(names) == 1
    for contract in (1, 2):
        done = ranks.call(cases.run_round_trip, 2, names.copy().pop(), contract, ranks=survivors)
        assert values(done) == ["right"] * len(survivors)


def opened(ranks: OpRanks) -> list[list[str]]:
    """Returns what each process has open before its windows; they are open afterwards."""
    files: list[list[str]] = values(ranks.call(comm_cases.open_files))
    assert values(ranks.call(cases.run_round_trip)) == ["right"] * ranks.world
    return files


# ---- killed


@pytest.mark.row("kill")
@pytest.mark.parametrize(("victim", "algorithm"), [(0, "window"), (2, "direct")])
def test_a_rank_killed_between_ops_is_named_and_new_windows_work(victim: int, mortal: OpRanks) -> None:
    survivors = others(victim)
    files = opened(mortal)
    assert values(mortal.call(cases.run_dispatch, 1)) == ["right"] * 3
    mortal.kill(victim)
    for outcome in mortal.call(cases.run_combine, ranks=survivors):
        assert_named(outcome, "PeerLost", victim, "has ended")
        assert outcome.seconds < SOON_S
    assert_stuck(mortal, "PeerLost", victim, survivors)
    assert_new_windows_work(mortal, survivors, [files[rank] for rank in survivors])


@pytest.mark.row("kill")
@pytest.mark.parametrize("algorithm", [pytest.param("window", marks=pytest.mark.nightly), "direct", "servers"])
def test_killed_while_the_others_wait_for_it(mortal: OpRanks) -> None:
    opened(mortal)
    for rank in (0, 2):
        mortal.start(rank, cases.run_dispatch)
    time.sleep(0.3)
    mortal.kill(1)
    began = time.monotonic()
    for rank in (0, 2):
        assert_named(mortal.wait(rank), "PeerLost", 1, "has ended")
    assert time.monotonic() - began < SOON_S
    assert_stuck(mortal, "PeerLost", 1, [0, 2])


@pytest.mark.parametrize(("ending", "algorithm"), [(cases.finish, "window"), (cases.finish_at_once, "direct")])
def test_ranks_that_end_after_their_last_op_harm_nobody(ending: Any, mortal: OpRanks) -> None:
    """Rank 2 is stopped in the middle of things while the others may have finished already."""
    opened(mortal)
    for rank in (0, 1):
        mortal.start(rank, ending, 5)
    mortal.start(2, cases.run_round_trip, 5)
    time.sleep(0.001)
    mortal.stop(2)
    time.sleep(0.3)
    mortal.resume(2)
    assert values([mortal.wait(2)]) == ["right"]
    for rank in (0, 1):
        mortal.processes[rank].join(10)
        assert mortal.processes[rank].exitcode == 0
    assert_named(mortal.call(cases.run_dispatch, 5, ranks=[2])[0], "PeerLost", 0)


MANY, GONE, PATIENCE_S = 96, 41, 4 * settings.DEFAULT_TIMEOUT_S  # they take turns on a machine with two cores


class PatientRanks(OpRanks):
    """Ranks that are waited for as long as a busy machine needs."""

    def wait(self, rank: int, seconds: float = PATIENCE_S) -> CallResult:
        return super().wait(rank, max(seconds, PATIENCE_S))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("algorithm", ["window", "direct"])
def test_of_many_processes_an_overflow_then_a_killed_one_are_named_by_all(algorithm: str) -> None:
    case = legal(Case(world=MANY, local=1, topk=2, ids="overflow", cores=2, units=1, seed=8))
    fault = replace(case).fault()  # of another object: tensors that it keeps would travel with it
    assert fault is not None and fault.kind == "RoutingOverflow"
    with PatientRanks(MANY, timeout_s=PATIENCE_S) as ranks:
        ranks.use(algorithm)
        values(ranks.call(comm_cases.set_env, "ASCEND_MOE_AIV_CORES", "2"))
        opened(ranks)
        for outcome in ranks.call(cases.run_faulty, case):
            assert_named(outcome, "RoutingOverflow", fault.rank)
        assert values(ranks.call(cases.run_dispatch, 1)) == ["right"] * MANY  # the group has stayed usable
        ranks.kill(GONE)
        for outcome in ranks.call(cases.run_combine, ranks=others(GONE, MANY)):
            assert_named(outcome, "PeerLost", GONE, "has ended")
            assert outcome.seconds < PATIENCE_S / 4  # it is not waited for until the deadline


# ---- stopped, or never calling


@pytest.mark.row("stop")
@pytest.mark.parametrize(("victim", "algorithm"), [(0, "window"), (2, "direct")])
def test_stopped_beyond_the_deadline(victim: int, three: OpRanks) -> None:
    there = others(victim)
    three.wait_at_most(DEADLINE_S, there)
    three.stop(victim)
    outcomes = three.call(cases.run_dispatch, ranks=there)
    for outcome in outcomes:
        assert_named(outcome, "CommTimeout", victim, "is stopped (state T)", f"{DEADLINE_S:.1f} s")
    assert 0.8 * DEADLINE_S < max(outcome.seconds for outcome in outcomes) < DEADLINE_S + SOON_S
    assert_stuck(three, "CommTimeout", victim, there)
    three.start(victim, cases.run_dispatch)
    three.resume(victim)
    woken = three.wait(victim)
    assert_named(woken, "CommTimeout", victim, "found by rank")
    assert woken.details["reporter"] in there
    assert woken.seconds < SOON_S
    assert_stuck(three, "CommTimeout", victim, [0, 1, 2])
    # Nobody has died: the same ranks open fresh windows.
    three.wait_at_most(FAR_S)
    values(three.call(comm.close, "0"))
    assert values(three.call(cases.run_round_trip, 1)) == ["right"] * 3


@pytest.mark.parametrize(("missing", "algorithm"), [(0, "direct"), (1, "window"), (2, "servers")])
def test_rank_that_never_calls(missing: int, three: OpRanks) -> None:
    there = others(missing)
    assert values(three.call(cases.run_dispatch, 1)) == ["right"] * 3
    three.wait_at_most(DEADLINE_S)
    outcomes = three.call(cases.run_combine, ranks=there)
    for outcome in outcomes:
        assert_named(outcome, "CommTimeout", missing, "last seen in dispatch, epoch 3", "is running")
        assert f"missing: rank {missing} (" in outcome.text
    assert 0.8 * DEADLINE_S < max(outcome.seconds for outcome in outcomes) < DEADLINE_S + SOON_S
    assert_stuck(three, "CommTimeout", missing, [0, 1, 2])


# ---- at any moment, and many times


def killed_in_a_stream(seed: int) -> None:
    rng = random.Random(seed)
    world = rng.choice([2, 3, 3, 4])
    victim = rng.randrange(world)
    survivors = others(victim, world)
    with OpRanks(world, timeout_s=FAR_S) as ranks:
        ranks.use(rng.choice(["window", "direct"]))
        files = opened(ranks)
        for rank in range(world):
            ranks.start(rank, cases.stream, 100_000, seed)
        time.sleep(0.01 + rng.random() / 20)
        ranks.kill(victim)
        began = time.monotonic()
        for rank in survivors:
            assert_named(ranks.wait(rank), "PeerLost", victim)
        assert time.monotonic() - began < SOON_S
        assert_stuck(ranks, "PeerLost", victim, survivors)
        assert_new_windows_work(ranks, survivors, [files[rank] for rank in survivors])


@pytest.mark.nightly
@soak_rows.row("kill", quick=8, full=300, chunk=25)
def test_killed_at_any_moment(numbers: range, tally: Tally) -> None:
    tally.each(numbers, killed_in_a_stream)


def stopped_in_a_stream(seed: int) -> str:
    rng, deadline = random.Random(seed), 2.0
    world = rng.choice([2, 3])
    victim, longer = rng.randrange(world), seed % 2 == 1
    stop_s = rng.uniform(0.1, 0.6 * deadline)
    with OpRanks(world, timeout_s=deadline) as ranks:
        opened(ranks)
        for rank in range(world):
            ranks.start(rank, cases.stream, 400, seed)
        time.sleep(0.01 + rng.random() / 20)
        ranks.stop(victim)
        time.sleep(0.0 if longer else stop_s)
        there = others(victim, world) if longer else []
        for rank in there:
            assert_named(ranks.wait(rank, deadline + SOON_S), "CommTimeout", victim)
        ranks.resume(victim)
        if not longer:
            values([ranks.wait(rank) for rank in range(world)])
            return "shorter than the deadline, right"
        assert_named(ranks.wait(victim), "CommTimeout", victim)
        values(ranks.call(comm.close, "0"))
        values(ranks.call(cases.stream, 20, seed))
        return "longer, named, fresh windows right"


@pytest.mark.nightly
@soak_rows.row("stop", quick=2, full=100, chunk=10)
def test_stopped_at_any_moment(numbers: range, tally: Tally) -> None:
    tally.each(numbers, stopped_in_a_stream)


def assert_nothing_grows(warm: dict[str, int], end: dict[str, int]) -> None:
    assert end["bytes"] - warm["bytes"] < 1 << 20 and end["files"] == warm["files"], (warm, end)


@soak_rows.row("back to back", quick=400, full=1_000_000)
def test_round_trips_of_threads(numbers: range, tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits again and again, in the same memory."""
    monkeypatch.setenv("ASCEND_MOE_AIV_CORES", "1")
    after = []
    with LocalCluster(4) as cluster:
        for rounds in (300, len(numbers)):
            cluster.run(lambda rank, name, n=rounds: cases.repeat(DevicePlace(name, 4, rank), n))
            after.append(cases.resources())
    assert_nothing_grows(*after)
    tally.count(cases=len(numbers))


@pytest.mark.nightly
@soak_rows.row("back to back", quick=500, full=100_000)
def test_round_trips_of_processes(numbers: range, tally: Tally) -> None:
    with OpRanks(4, timeout_s=120) as ranks:
        values(ranks.call(comm_cases.set_env, "ASCEND_MOE_AIV_CORES", "1"))
        after = []
        for rounds in (300, len(numbers)):
            for rank in range(4):
                ranks.start(rank, cases.run_repeat, rounds)
            after.append(values([ranks.wait(rank, 3000) for rank in range(4)]))
        for warm, end in zip(*after, strict=True):
            assert_nothing_grows(warm, end)
    tally.count(cases=len(numbers))
