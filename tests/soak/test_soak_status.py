"""Status runs spoilt at random: noticed, or overwritten by the real ones, and never taken for data."""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import Callable, Iterator

import failure_cases as cases
import pytest
import soak_rows
from failure_cases import LOCAL, caught
from failure_windows import STATUS_MAGIC, WORDS, State, next_epoch, of_epoch, set_epoch
from soak_rows import Stopwatch, Tally

import ascend_moe
from ascend_moe.errors import CommError, ConfigMismatch, CorruptStatus
from ascend_moe.reference.cases import Place

pytestmark = pytest.mark.asan

READER = 0
SHORT_S, LONG_S = 0.01, 5.0  # that the source waits before it sends the real run
FLOATS = [struct.unpack("<I", struct.pack("<f", v))[0] for v in (float("nan"), float("inf"), 0.5, 1.0, 2.0)]
# Words that say what an error is about, of which there is none; alone they change nothing.
DETAILS = {WORDS + 6, WORDS + 7}
Words = list[int]
Spoil = Callable[[random.Random, Words, int], Words]


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "10")
    monkeypatch.setenv("HCCL_BUFFSIZE", "1")
    monkeypatch.setenv("ASCEND_MOE_AIV_CORES", "2")


# ---- what lies there: made from the run that is about to come


def bits(rng: random.Random, run: Words, epoch: int) -> Words:
    """One to three bits turned."""
    made = list(run)
    for at in rng.sample([at for at in range(len(run)) if at not in DETAILS], rng.choice([1, 1, 2, 3])):
        made[at] ^= 1 << rng.randrange(32)
    return made


def words(rng: random.Random, run: Words, epoch: int) -> Words:
    """One or two words replaced: floats, as flags of another protocol would be, and anything."""
    made = list(run)
    for at in rng.sample([at for at in range(len(run)) if at not in DETAILS], rng.choice([1, 1, 2])):
        made[at] = rng.choice([*FLOATS, 0, 1, 0xFFFFFFFF, rng.randrange(2**32), run[at] + 1])
    return made


def flag_alone(rng: random.Random, run: Words, epoch: int) -> Words:
    """Only the first word, on what an earlier op has left."""
    old = of_epoch(run, epoch - 2)
    return [rng.choice([*FLOATS, 1, epoch, STATUS_MAGIC, run[0], rng.randrange(2**32)]), *old[1:]]


def other_epoch(rng: random.Random, run: Words, epoch: int) -> Words:
    """All of it from another op, past or to come."""
    away = rng.choice([-6, -5, -4, -3, -2, -1, 1, 2, 3, 4, rng.randrange(-(2**31), 2**31)])
    return of_epoch(run, (epoch + (away or 1)) % 2**32)


def torn(rng: random.Random, run: Words, epoch: int) -> Words:
    """Some of the run has arrived, cut anywhere, also within 32 bytes; the rest is older."""
    old = of_epoch(run, epoch - 2) if rng.random() < 0.7 else [0] * len(run)
    at = rng.randrange(1, len(run))
    made = run[:at] + old[at:] if rng.random() < 0.5 else old[:at] + run[at:]
    return old if made == run else made


def noise(rng: random.Random, run: Words, epoch: int) -> Words:
    """Anything, under a good first word or not."""
    made = [rng.randrange(2**32) for _ in run]
    return [run[0] if rng.random() < 0.5 else made[0], *made[1:]]


SPOILS: dict[str, Spoil] = {
    "bits turned": bits,
    "words replaced": words,
    "flag alone": flag_alone,
    "other epoch": other_epoch,
    "torn": torn,
    "noise": noise,
}


def waited_for(run: Words, made: Words, epoch: int) -> bool:
    """By the rules of the window: what lies there may also be a run that has not come yet."""
    stale = {0, *(STATUS_MAGIC ^ old for old in (0, epoch - 2))}
    blocks = range(WORDS, len(run), WORDS)
    return made[0] in stale or any(made[block] != epoch for block in blocks)


# ---- the op that finds it


class Trial:
    """One cluster for many ops; in each a reader finds something in the slot of a peer."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.cluster = ascend_moe.LocalCluster(world).__enter__()

    def run(self, seed: int) -> tuple[str, float]:
        rng = random.Random(seed)
        kind = list(SPOILS)[seed % len(SPOILS)]
        source = rng.randrange(1, self.world)
        start = rng.randrange(1, 2**32 - 8)
        found: list[str] = []
        spoilt = threading.Event()
        done = threading.Event()
        barrier = threading.Barrier(self.world)
        sent_at_once = [True]

        def spoil(state: State) -> None:
            epoch = next_epoch(state.epoch)
            state.poison(epoch)
            slot = state.run(epoch, source, LOCAL)
            assert slot[0] == STATUS_MAGIC ^ before_last(epoch), "not where the run lies"
            real = of_epoch(list(slot), epoch)
            made = [word % 2**32 for word in SPOILS[kind](rng, real, epoch)]
            if made == real:
                made[0] ^= 1
            sent_at_once[0] = waited_for(real, made, epoch)
            slot[:] = made

        def body(rank: int, group_ep: str) -> str:
            place = Place(rank, self.world, group_ep)
            set_epoch(self.cluster, rank, start)
            barrier.wait()
            for number in (3, 4):
                cases.dispatch(place, number)
            barrier.wait()
            if rank == READER:
                spoil(State.of(self.cluster, READER))
                spoilt.set()
            barrier.wait()
            if rank == source:
                done.wait(SHORT_S if sent_at_once[0] else LONG_S)
            one = caught(cases.dispatch, place, 3)
            if rank == READER:
                done.set()
            if one.error is None:
                cases.check_dispatch(place, one.value, 3)
                return "right"
            assert "\n" not in str(one.error)
            if rank == READER:
                assert one.error.rank == source, f"names rank {one.error.rank}: {one.error}"
            assert type(one.error) in (CorruptStatus, ConfigMismatch) or not isinstance(
                one.error, CommError
            ), repr(one.error)
            return type(one.error).__name__

        watch = Stopwatch()
        try:
            found = self.cluster.run(body)
        finally:
            self.cluster.close()
        assert sent_at_once[0] or found[READER] != "right", f"{kind}: not noticed"
        # Who has all runs when the reader gives up may complete; where the source has waited, nobody has.
        noticed = found[READER] == "CorruptStatus" and not sent_at_once[0]
        told = {found[READER]} if noticed else {found[READER], "right"}
        assert set(found) <= told, f"{kind}: {found}"
        return ("overwritten by the real one" if found[READER] == "right" else found[READER]), watch.seconds

    def close(self) -> None:
        self.cluster.__exit__(None, None, None)


def before_last(epoch: int) -> int:
    """The epoch two ops before."""
    return {3: 0xFFFFFFFF, 2: 0xFFFFFFFE}.get(epoch, epoch - 2)


@pytest.fixture
def trials() -> Iterator[dict[int, Trial]]:
    opened = {world: Trial(world) for world in (2, 3)}
    yield opened
    for trial in opened.values():
        trial.close()


@soak_rows.row("corrupt status", quick=120, full=10_000, chunk=1000)
def test_spoilt_status_is_never_data(trials: dict[int, Trial], numbers: range, tally: Tally) -> None:
    tally.each(numbers, lambda seed: trials[2 + seed // len(SPOILS) % 2].run(seed))
