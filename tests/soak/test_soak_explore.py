"""Ranks killed, stalled or slow, status blocks spoilt in flight: on the checked engine, in many schedules.

All ranks and cores are fibers of one thread: a fault comes at a step of the schedule, and a case repeats it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import soak_rows
from error_codes import CONFIG_MISMATCH, CORRUPT, PEER_LOST, TIMEOUT
from soak_rows import Tally

from ascend_moe import explore
from ascend_moe.explore import Faults, Options, Program, World

OK, OTHER_TABLE = 0, 19  # the second has no exception of its own
UNFINISHED, MIB = -1, 1 << 20
ANY_ERROR = 0xFFFFFFFF

NEVER = 1 << 60


Worlds = Callable[[int], World]


@pytest.fixture
def worlds() -> Iterator[Worlds]:
    """One world a size, kept between cases."""
    with contextlib.ExitStack() as opened:
        yield functools.cache(lambda size: opened.enter_context(World(size)))


@dataclasses.dataclass
class Seen:
    """One schedule: by rank, the error codes of its ops and their messages; -1 for one that did not end."""

    codes: list[list[int]]
    texts: list[list[str]]
    steps: int
    blocks: int
    time_passed: bool


def bits(*codes: int) -> int:
    return sum(1 << code for code in codes)


def seen(world: World, seed: int, options: Options) -> Seen:
    """Runs one schedule. No races, no hang, no wrong result, no error that is not accepted."""
    run = world.run(seed, 1, options)
    assert not run.failed, f"{run.kind.decode()}: {run.message.decode()}\n{options}"
    program = world.program
    assert program is not None
    codes: list[list[int]] = [[] for _ in range(world.size)]
    texts: list[list[str]] = [[] for _ in range(world.size)]
    for call, (code, text) in zip(program.calls, world.errors(), strict=True):
        codes[call.rank].append(code)
        texts[call.rank].append(text)
    return Seen(codes, texts, run.steps, run.status_blocks, bool(run.time_passed))


def faulty(options: Options, **faults: object) -> Options:
    return dataclasses.replace(options, faults=Faults(**faults))  # type: ignore[arg-type]


def options_of(rng: random.Random, policies: Sequence[str] = ("random", "lazy", "pct")) -> Options:
    """``hang_is_finding`` False: time passes when nothing can move, and waits end at their deadline."""
    return Options(policy=rng.choice(policies), hang_is_finding=False)


Check = Callable[[Seen], str]


def cases(
    worlds: Worlds, seed: int, accepted: int, fault: Callable[..., tuple[dict[str, object], Check]]
) -> str:
    """A drawn case without a fault, then the same schedule with one; what became of it."""
    rng = random.Random(seed)
    case = explore.draw(seed)
    world = worlds(case.world)
    world.load(case, accepted=accepted)
    # Priorities leave no choice that a slow one could be kept out of.
    options = options_of(rng, ("random", "lazy")) if fault is slow else options_of(rng)
    plain = seen(world, seed, faulty(options, corrupt_block=NEVER))
    assert all(code == OK for codes in plain.codes for code in codes), plain.texts
    faults, check = fault(rng, case, plain)
    return check(seen(world, seed, faulty(options, **faults)))


# ---- killed


def killed(rng: random.Random, case: Program, plain: Seen) -> tuple[dict[str, object], Check]:
    victim = rng.randrange(case.world)
    faults = {"kill_rank": victim, "kill_step": rng.randrange(plain.steps + 1)}
    return faults, lambda found: survived(case, victim, found)


def survived(case: Program, victim: int, found: Seen) -> str:
    """All ops of the others have ended: right until they heard of it, PeerLost afterwards."""
    first = set()
    for rank in set(range(case.world)) - {victim}:
        codes = found.codes[rank]
        assert UNFINISHED not in codes, f"rank {rank} has not come to its end: {codes}"
        failed = codes.index(PEER_LOST) if PEER_LOST in codes else len(codes)
        assert codes == [OK] * failed + [PEER_LOST] * (len(codes) - failed), f"rank {rank}: {codes}"
        for text in found.texts[rank][failed:]:
            assert f"rank {victim}" in text, text
        first.add(failed)
    assert max(first) - min(first) <= 1, f"survivors fail more than one op apart: {sorted(first)}"
    dead = found.codes[victim]
    if UNFINISHED not in dead:
        return "killed after its last op"
    return "killed, PeerLost" if min(first) < len(dead) else "killed after it had delivered"


@pytest.mark.nightly
@soak_rows.row("kill, explored", quick=100, full=3000, chunk=750)
def test_killed_at_any_step(worlds: Worlds, numbers: range, tally: Tally) -> None:
    """Every survivor raises PeerLost with the rank, in this op or the next, and none stands still."""
    tally.each(numbers, lambda seed: cases(worlds, seed, bits(OK, PEER_LOST), killed))


@soak_rows.row("kill, explored", quick=2, full=10)
def test_killed_at_every_step(worlds: Worlds, numbers: range, tally: Tally) -> None:
    """Also between two blocks of a status run, of which the first is there by then."""
    for seed in numbers:
        case, world = Program(sequence="DC", seed=seed), worlds(2)
        world.load(case, accepted=bits(OK, PEER_LOST))
        options = Options(policy="random", hang_is_finding=False)
        plain = seen(world, seed, options)
        for step in range(plain.steps + 1):
            for victim in range(2):
                found = seen(world, seed, faulty(options, kill_rank=victim, kill_step=step))
                tally.count(survived(case, victim, found))


# ---- stalled, slow


def stalled(rng: random.Random, case: Program, plain: Seen) -> tuple[dict[str, object], Check]:
    """Until nobody else can move."""
    faults = {"stall_rank": rng.randrange(case.world), "stall_step": rng.randrange(plain.steps + 1)}
    return faults, all_right("until nobody else could move, right")


def all_right(kind: str) -> Check:
    def check(found: Seen) -> str:
        assert all(code == OK for codes in found.codes for code in codes), found.texts
        assert not found.time_passed, "a wait has run out"
        return kind

    return check


def slow(rng: random.Random, case: Program, plain: Seen) -> tuple[dict[str, object], Check]:
    kind = rng.choice(["rank", "core", "link"])
    which = rng.randrange(case.cores if kind == "core" else case.world)
    return {f"slow_{kind}": which}, all_right(f"slow {kind}")


@pytest.mark.nightly
@soak_rows.row("stop, explored", quick=100, full=3000, chunk=750)
def test_stalled_at_any_step(worlds: Worlds, numbers: range, tally: Tally) -> None:
    """The results are right, and no wait has run out."""
    tally.each(numbers, lambda seed: cases(worlds, seed, bits(OK), stalled))


def absent(worlds: Worlds, seed: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """A rank makes only its first calls, as one that is stopped beyond the deadline: all others name it."""
    rng = random.Random(seed)
    case = explore.draw(seed)
    victim, world = rng.randrange(case.world), worlds(case.world)
    made = rng.randrange(len(case.sequence))
    program = explore.engine.PlannedProgram(case, world.library)
    every, kept = program.calls, [0] * case.world
    program.calls = []
    for call in every:
        if call.rank != victim or kept[victim] < made:
            program.calls.append(call)
            kept[call.rank] += 1
    monkeypatch.setattr(explore.engine, "PlannedProgram", lambda *args: program)
    world.load(case, accepted=bits(OK, TIMEOUT))
    found = seen(world, seed, options_of(rng))
    program.calls = every
    for rank in set(range(case.world)) - {victim}:
        wanted = [OK] * made + [TIMEOUT] * (len(case.sequence) - made)
        assert found.codes[rank] == wanted, f"rank {rank}: {found.codes[rank]}, {made} calls were made"
        assert all(f"rank {victim} did not arrive" in text for text in found.texts[rank][made:])
    assert found.codes[victim] == [OK] * made and found.time_passed
    return "longer than the deadline, named"


@soak_rows.row("stop, explored", quick=50, full=1500, chunk=375)
def test_rank_that_calls_no_more(
    worlds: Worlds, numbers: range, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    tally.each(numbers, lambda seed: absent(worlds, seed, monkeypatch))


@soak_rows.row("slow, explored", quick=60, full=1500, chunk=375)
def test_slow_rank_core_or_link(worlds: Worlds, numbers: range, tally: Tally) -> None:
    """A hundred times less often chosen: the results are right, and no wait has run out."""
    tally.each(numbers, lambda seed: cases(worlds, seed, bits(OK), slow))


# ---- status blocks


def spoilt(rng: random.Random, case: Program, plain: Seen) -> tuple[dict[str, object], Check]:
    how = rng.choice(["xor", "xor", "xor", "stale", "torn"])
    word = rng.randrange(8)
    faults: dict[str, object] = {"corrupt_block": rng.randrange(1, plain.blocks + 1), "corrupt_how": how}
    faults |= {
        "corrupt_word": word,
        "corrupt_xor": rng.choice([1 << rng.randrange(32), rng.randrange(1, 2**32)]),
    }

    def check(found: Seen) -> str:
        for rank, codes in enumerate(found.codes):
            assert UNFINISHED not in codes, f"rank {rank} has not come to its end: {codes}"
        errors = {code for codes in found.codes for code in codes if code != OK}
        name = "bits turned" if how == "xor" else how
        if not errors:
            # Words that say what an error is about when there is none; a block that was like that before.
            assert how != "xor" or word in (6, 7), "not noticed"
            return f"{name}, harmless"
        for codes, texts in zip(found.codes, found.texts, strict=True):
            for code, text in zip(codes, texts, strict=True):
                assert code == OK or "\n" not in text
        fatal = {PEER_LOST, TIMEOUT, CORRUPT} & errors
        kind = {CORRUPT: "CorruptStatus", TIMEOUT: "CommTimeout", PEER_LOST: "PeerLost"}
        return f"{name}, {kind[max(fatal)] if fatal else 'another error'}"

    return faults, check


@pytest.mark.nightly
@soak_rows.row("corrupt status, explored", quick=200, full=10_000, chunk=2500)
def test_spoilt_block_in_flight(worlds: Worlds, numbers: range, tally: Tally) -> None:
    """Noticed, or waited for in vain; never taken for data, and nobody stands still."""
    tally.each(numbers, lambda seed: cases(worlds, seed, ANY_ERROR, spoilt))


# ---- windows, configurations


def short(seed: int) -> str:
    """Windows some bytes smaller than the call was planned for: every rank refuses, nothing is touched."""
    rng = random.Random(seed)
    case = explore.draw(seed)
    missing = rng.choice([1, 1, 2, 32, 512, rng.randrange(1, MIB)])
    with World(case.world) as world:
        world.library.am_explore_destroy(world._handle)
        world._handle = world.library.am_explore_create(case.world, MIB - missing, MIB)
        world.load(case, accepted=bits(OTHER_TABLE))
        found = seen(world, seed, options_of(rng))
    for rank, (codes, texts) in enumerate(zip(found.codes, found.texts, strict=True)):
        assert set(codes) == {OTHER_TABLE}, codes
        sizes = f"2048 KiB in this call of rank {rank} and {(2 * MIB - missing) // 1024} KiB in the "
        assert all(sizes in text for text in texts), texts
    return "a byte short" if missing == 1 else "several bytes short"


@soak_rows.row("window size, explored", quick=20, full=500, chunk=250)
def test_window_that_is_too_short(numbers: range, tally: Tally) -> None:
    tally.each(numbers, short)


def other(rng: random.Random, case: Program) -> tuple[str, Program]:
    """The same program but for one field, with the name of that field."""
    choices: dict[str, dict[str, object]] = {
        "H": {"units": case.units + rng.randrange(1, 4)},
        "E": {"local": case.local + rng.randrange(1, 3)},
        "K": {"topk": case.topk + 1 if case.topk < case.experts else case.topk - 1},
        "dtype": {"dtype": {"bf16": "fp16", "fp16": "bf16"}.get(case.dtype)},
        "quant_mode": {"quant": "none" if case.quant != "none" else "int8"},
        "contract": {"contract": 3 - case.contract},
        "global_bs": {"batch": case.batch + rng.randrange(1, 4), "batches": "unequal"},
        "maxBS": {"batch": case.batch + rng.randrange(1, 4), "batches": "equal"},
    }
    if case.dtype == "fp32":  # units are bytes: H would differ
        del choices["dtype"]
    del choices["maxBS" if case.batches != "equal" else "global_bs"]
    field = rng.choice(list(choices))
    return field, dataclasses.replace(case, **choices[field])  # type: ignore[arg-type]


def differing(worlds: Worlds, seed: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """One rank's first dispatch differs in a field: all ranks name it, in any schedule."""
    rng = random.Random(seed)
    case = dataclasses.replace(explore.draw(seed), sequence="D", ids="distinct")
    field, odd = other(rng, case)
    guilty, world = rng.randrange(case.world), worlds(case.world)
    programs = [explore.engine.PlannedProgram(one, world.library) for one in (case, odd)]
    mixed, rest = programs
    for at, call in enumerate(mixed.calls):
        if call.rank == guilty:
            mixed.calls[at], rest.calls[at] = rest.calls[at], call
    monkeypatch.setattr(explore.engine, "PlannedProgram", lambda *args: mixed)
    world.load(case, accepted=bits(CONFIG_MISMATCH))
    found = seen(world, seed, options_of(rng))
    rest.close()
    for rank, (codes, texts) in enumerate(zip(found.codes, found.texts, strict=True)):
        assert codes == [CONFIG_MISMATCH], f"rank {rank}: {codes} {texts}"
        peer = f"rank {guilty}" if rank != guilty else "rank"
        assert field in texts[0] and peer in texts[0], f"not {field} of {peer}: {texts[0]}"
    assert not found.time_passed
    return field


@soak_rows.row("configuration mismatch, explored", quick=50, full=1000, chunk=500)
def test_ranks_that_differ(
    worlds: Worlds, numbers: range, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    tally.each(numbers, lambda seed: differing(worlds, seed, monkeypatch))
