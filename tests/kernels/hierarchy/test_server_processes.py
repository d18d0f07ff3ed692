"""comm_alg "hierarchy" between real processes on two simulated servers, and when one of them is killed."""

from __future__ import annotations

import ctypes
import random
import signal
import time

import comm_cases
import op_runs
import pytest
from failure_cases import here
from rank_processes import Ranks, assert_named, fork_server, nothing_left, values

from ascend_moe import comm
from ascend_moe.errors import AscendMoeError
from ascend_moe.reference.cases import Case, legal

__all__ = ["fork_server", "nothing_left"]  # fixtures
SOON_S = 15.0  # half of the deadline
LEVELS = {"dispatch": ("level 2", "what others forward to it"), "combine": ("level 1", "what it forwards")}
CASE = legal(
    Case(world=4, local=2, topk=3, share=2, batches="unequal", cores=2, quant_mode=2, comm_quant_mode=2, seed=21)
)
_sums = CASE.combined(CASE.rows_of(CASE.dispatched()), CASE.dispatched())


def layers(count: int) -> str:
    """Runs so many round trips, up to the first error."""
    place = here()
    for _ in range(count):
        outcome = op_runs.run_rank(CASE, place.rank, place.group_ep)
        if isinstance(outcome, AscendMoeError):
            raise outcome
        assert outcome.algorithms == ("hierarchy", "hierarchy")
        op_runs.check_combine(place.rank, outcome.result, _sums[place.rank])
    return "right"


PAGE = 4096
_sent: list[object] = []


def dispatch() -> str:
    """Runs a dispatch alone; combine() goes on from it."""
    place = here()
    _sent[:] = op_runs.dispatch(CASE, place.rank, place.group_ep)
    return "right"


def combine() -> str:
    place = here()
    rows = op_runs.expert_rows(CASE, place.rank, _sent)  # type: ignore[arg-type]
    result = op_runs.combine(CASE, place.rank, place.group_ep, rows, _sent)  # type: ignore[arg-type]
    op_runs.check_combine(place.rank, result, _sums[place.rank])
    return "right"


def halt_before_passing_on(op: str) -> None:
    """This process stands still for good at the first store by which it would pass on what level 1 has brought.

    In dispatch that of a message from its rail peer to the other rank of its server; in combine that of a row to that
    rank, after the sums for others. Their pages may be read only, and the thread that stores there waits.
    """
    place = here()
    end = comm.lookup(place.group_ep, CASE.world, place.rank)
    data, world = end.vote._bases[place.rank ^ 1] + PAGE, CASE.world  # of the other rank
    if op == "dispatch":
        rail_peer = (place.rank + 2) % world
        state = data + end.data_bytes + end.registered_bytes  # on A2 it comes last
        runs = -(-(1024 + 32 * world) // 512) * 512
        stride = 32 * (2 + 2048 // world // 4)
        pages = [((state + runs + stride * (parity * world + rail_peer)) // PAGE * PAGE, PAGE) for parity in (0, 1)]
    else:  # the region of its own rows
        half = end.data_bytes // 2 // 512 * 512
        region = half // (world + world // 2) // 512 * 512
        begins = [data + parity * half + place.rank * region for parity in (0, 1)]
        pages = [(at := -(-begin // PAGE) * PAGE, (begin + region) // PAGE * PAGE - at) for begin in begins]
    library = ctypes.CDLL(None, use_errno=True)
    library.signal(signal.SIGSEGV, ctypes.cast(library.pause, ctypes.c_void_p))
    for begin, size in pages:
        assert library.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(size), 1) == 0, ctypes.get_errno()


def opened(ranks: Ranks) -> None:
    for name, value in (("ASCEND_MOE_RANKS_PER_SERVER", "2"), ("ASCEND_MOE_AIV_CORES", "2")):
        values(ranks.call(comm_cases.set_env, name, value))
    assert values(ranks.call(layers, 2)) == ["right"] * 4


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 6))])
def test_a_rank_killed_at_any_time_is_named_by_all(seed: int) -> None:
    """Others are in the same op then, in its first level or its second."""
    drawn = random.Random(seed)
    victim = drawn.randrange(4)
    with Ranks(4, timeout_s=30.0) as ranks:
        opened(ranks)
        for rank in range(4):
            ranks.start(rank, layers, 100000)
        time.sleep(drawn.uniform(0.2, 0.5))
        ranks.kill(victim)
        killed = time.monotonic()
        for rank in range(4):
            if rank != victim:
                assert_named(ranks.wait(rank), "PeerLost", victim)
        assert time.monotonic() - killed < SOON_S


def halted_between_the_levels(ranks: Ranks, op: str) -> tuple[int, int]:
    """Starts ``op`` on four ranks, one of which halts before it passes rows on; returns it and the rank that waits."""
    victim, waits = 2, 3
    call = {"dispatch": dispatch, "combine": combine}[op]
    opened(ranks)
    if op == "combine":
        assert values(ranks.call(dispatch)) == ["right"] * 4
    values(ranks.call(halt_before_passing_on, op, ranks=[victim]))
    for rank in range(4):
        ranks.start(rank, call)
    return victim, waits


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_a_rank_killed_between_the_levels_is_named_by_all(op: str) -> None:
    """It has had what it forwards, and stands at a store before it passes that on.

    Who waits for that store says so, and of which level; the others have all of this op, and hear of it in the next.
    """
    with Ranks(4, timeout_s=30.0) as ranks:
        victim, waits = halted_between_the_levels(ranks, op)
        others = [rank for rank in range(4) if rank not in (victim, waits)]
        assert values([ranks.wait(rank) for rank in others]) == ["right"] * 2
        ranks.kill(victim)
        killed = time.monotonic()
        outcome = ranks.wait(waits)
        assert_named(outcome, "PeerLost", victim, *LEVELS[op])
        found = {name: outcome.details[name] for name in ("reporter", "phase", "level")}
        assert found == {"reporter": waits, "phase": op, "level": int(LEVELS[op][0][-1])}
        for rank in others:
            assert_named(ranks.call(layers, 1, ranks=[rank])[0], "PeerLost", victim)
        assert time.monotonic() - killed < SOON_S


@pytest.mark.parametrize("op", ["dispatch", pytest.param("combine", marks=pytest.mark.nightly)])
def test_a_rank_that_stands_still_between_the_levels_is_named_by_all(op: str) -> None:
    """It lives, so only the end of the second wait tells; and who waits names it, not whose rows it forwards.

    The others go on at once. One of them misses, in its next op, the rank that waits, and is the first whose time is
    over: asked whom it misses itself, that rank answers.
    """
    with Ranks(4, timeout_s=2.0) as ranks:
        victim, waits = halted_between_the_levels(ranks, op)
        others = [rank for rank in range(4) if rank not in (victim, waits)]
        assert values([ranks.wait(rank) for rank in others]) == ["right"] * 2
        patient = [rank for rank in others if rank // 2 == victim // 2 or rank % 2 == victim % 2]  # misses the victim
        values(ranks.call(comm_cases.set_env, "ASCEND_MOE_TIMEOUT_S", "5.0", ranks=patient))
        for rank in others:
            ranks.start(rank, layers, 1)
        for rank in (*others, waits):
            outcome = ranks.wait(rank)
            assert_named(outcome, "CommTimeout", victim, LEVELS[op][0])
            assert (outcome.details["reporter"], outcome.details["level"]) == (waits, int(LEVELS[op][0][-1]))
