"""Status words that no rank has written: reported or overwritten by the real ones, never taken for data."""

from __future__ import annotations

import contextlib
import random
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import failure_cases as cases
import pytest
import torch
from failure_cases import LOCAL, MAX_BS, TOPK, Caught, caught
from failure_windows import COUNTS_PER_BLOCK, HEADER_BLOCKS, STATUS_MAGIC, WORDS, State, next_epoch, of_epoch, set_epoch
from soak_rows import Tally

import ascend_moe
from ascend_moe.errors import CommTimeout, ConfigMismatch, CorruptStatus, InvalidExpertId, RoutingOverflow
from ascend_moe.ops import callbacks
from ascend_moe.validate.run import DevicePlace

pytestmark = [pytest.mark.asan, pytest.mark.tsan]

SOURCE, READER = 1, 0
SOON = 0.02  # seconds to the deadline of a reader for whom nothing more comes
EPOCH = 100  # of the corrupted op; no bit of its own away from the one two ops before
Corrupt = Callable[[list[int], int], list[int]]  # (the run that is about to come, its epoch) -> what lies there


SETTINGS = {"ASCEND_MOE_TIMEOUT_S": "5", "HCCL_BUFFSIZE": "1"}
SETTINGS |= {"ASCEND_MOE_AIV_CORES": "2", "ASCEND_MOE_COMM_ALG": "direct"}
both = pytest.mark.parametrize("algorithm", ["window", "direct"])


# ---- what is written


def replaced(at: int, value: int) -> Corrupt:
    return lambda run, epoch: [value if i == at else word for i, word in enumerate(run)]


def flipped(at: int, bit: int) -> Corrupt:
    return lambda run, epoch: replaced(at, run[at] ^ (1 << bit))(run, epoch)


def older(begin: int, end: int, back: int) -> Corrupt:
    """Words of the run as they were some ops ago, of another error if any; ``back`` of 0: as nobody wrote them."""

    def corrupt(run: list[int], epoch: int) -> list[int]:
        before = of_epoch(run, max(epoch - back, 0))
        before[WORDS + 4] = before[WORDS + 4] & ~0xFF | 3
        return [*run[:begin], *(before[begin:end] if back else [0] * (end - begin)), *run[end:]]

    return corrupt


def error_code(code: int) -> Corrupt:
    return lambda run, epoch: replaced(WORDS + 4, run[WORDS + 4] & ~0xFF | code)(run, epoch)


def patterns() -> Iterator[tuple[str, Corrupt, str]]:
    """(label, what lies in the slot, what becomes of it).

    That is 'corrupt', 'mismatch', 'noticed' (one of both), 'right' once overwritten, or 'any' but accepted.
    """
    floats = {
        name: struct.unpack("<I", struct.pack("<f", float(name)))[0]
        for name in ("nan", "inf", "-inf", "0.5", "1.0", "2.0", "-0.0", "1e-40")
    }
    quiet = {"payload NaN": 0x7FC00001, "signalling NaN": 0x7F800001, "all ones": 0xFFFFFFFF, "one": 1}
    for name, value in {**floats, **quiet, "no magic's epoch": 0x4D4F}.items():
        yield name, lambda run, epoch, v=value: [v], "corrupt"  # on top of what an earlier op has left
    for away in (-4, -3, -1, 1, 2, 3, 1 << 16, 1 << 31):
        # Another epoch than this one and the one two ops ago, for which the reader waits on.
        yield f"epoch {away:+}", lambda run, epoch, a=away: of_epoch(run, (epoch + a) % 2**32), "corrupt"
    yield "two ops ago", lambda run, epoch: of_epoch(run, epoch - 2), "right"
    yield "fresh", lambda run, epoch: [0] * len(run), "right"
    yield "wrong magic", lambda run, epoch: [epoch, *run[1:]], "corrupt"
    for source in (0, 2, 63, 2**31, 2**32 - 1):
        yield f"from rank {source}", replaced(2, source), "corrupt"
    for op in (0, 3, 255):
        yield (f"op {op}", lambda run, epoch, o=op: replaced(1, o << 24 | run[1] & 0xFFFFFF)(run, epoch), "corrupt")
    for code in (5, 6, 7, 15, 16, 17, 18, 99, 255):
        yield f"error code {code}", error_code(code), "corrupt"
    for count in (MAX_BS * TOPK + 1, 2**16, 2**31, 2**32 - 1):
        yield f"count {count}", replaced(2 * WORDS + 2, count), "corrupt"
    yield "counts beyond the capacity", lambda run, epoch: [*run[:18], *[MAX_BS] * 4, *run[22:]], "corrupt"
    for block in range(3):  # torn: some blocks, or halves of them, have arrived, others are as they were
        for begin, end in ((0, 8), (0, 4), (4, 8)):
            for back in (0, 2, 4, 1000):
                corrupt = older(block * WORDS + begin, block * WORDS + end, back)
                yield f"words {begin} to {end} of block {block} of {back} ops ago", corrupt, "right"
    yield from flips()


def flips() -> Iterator[tuple[str, Corrupt, str]]:
    """Every word of the run that is not a detail of an error, three bits turned one at a time."""
    rng = random.Random(5)
    # Configuration words name their field; of the types' bits some belong to none.
    config = dict.fromkeys((3, 4, 5, 6, WORDS + 3), "mismatch") | {WORDS + 2: "noticed"}
    # The op and the number of blocks; the algorithm, and small error codes, which are errors of their own.
    config |= dict.fromkeys((1, WORDS + 4), "any")
    for at in range(3 * WORDS):
        if at not in (WORDS + 5, WORDS + 6):
            for bit in rng.sample(range(32), 3):
                yield f"bit {bit} of word {at}", flipped(at, bit), config.get(at, "corrupt")
    for at in range(2 * WORDS + 2, 2 * WORDS + 6):  # counts that could be true
        for bit in range(2):
            yield f"count bit {bit} of word {at}", flipped(at, bit), "corrupt"


# ---- what becomes of it


def registered(place: DevicePlace, sent: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Dispatch's outputs, the rows in a window tensor."""
    where = {"group_ep": place.group_ep, "ep_world_size": place.world, "ep_rank_id": place.rank}
    rows = ascend_moe.window_empty(tuple(sent[0].shape), dtype=sent[0].dtype, **where)
    return rows.copy_(sent[0]), *sent[1:]


@dataclass(frozen=True)
class Trial:
    """An op whose ``reader`` finds something in the slot of a peer, the ``source``.

    ``wait_s``: seconds that the peer leaves the reader to find it. ``combine``: the contract of the combine that is
    corrupted; 0: a dispatch is. ``deadline``: seconds of the reader's own in that op, for which no other rank gives
    up so soon; 0: as all ranks. ``registered``: combine's rows lie in window tensors. ``poison``: what lies in the
    windows of both before. ``other_source``: a rank whose counts lie there instead of the peer's; 0: none.
    """

    world: int
    wait_s: float
    combine: int = 0
    deadline: float = 0
    poison: int = 0xFF
    reader: int = READER
    source: int = SOURCE
    registered: bool = False
    other_source: int = 0


def trial(world: int, wait_s: float, corrupt: Corrupt, combine: int = 0, **more: Any) -> list[str]:
    """By rank, what became of it; again with more time if a busy machine let others come too late."""
    of = Trial(world, wait_s, combine, **more)
    try:
        return one_trial(of, corrupt)
    except TooSoon:
        return one_trial(replace(of, deadline=1), corrupt)


class TooSoon(Exception):
    """The reader's deadline was over before the messages of others than the source, or its own, had come."""


def one_trial(of: Trial, corrupt: Corrupt) -> list[str]:
    world, wait_s, combine = of.world, of.wait_s, of.combine
    barrier, reader_done = threading.Barrier(world), threading.Event()
    texts: list[str] = []  # of what is corrupt

    def run_combine(place: DevicePlace) -> Callable[[], str]:
        sent = cases.dispatch(place, 3, combine)
        sent = registered(place, sent) if of.registered else sent
        return lambda: compared(cases.check_combine, place, cases.combine(place, sent, 3, combine), 3)

    def last_op(place: DevicePlace) -> Callable[[], str]:
        """The op to come, after two others, or another combine and the dispatches of both."""
        if combine:
            assert run_combine(place)() == "right"
            return run_combine(place)
        for seed in (3, 4):
            cases.check_dispatch(place, cases.dispatch(place, seed), seed)
        return lambda: compared(cases.check_dispatch, place, cases.dispatch(place, 3), 3)

    def body(rank: int, name: str) -> str:
        place = DevicePlace(name, world, rank)
        set_epoch(cluster, rank, EPOCH - (4 if combine else 3))
        barrier.wait()
        op = last_op(place)
        barrier.wait()
        if rank == of.reader:
            write(cluster, corrupt, of)
        barrier.wait()
        if rank == of.source:
            reader_done.wait(wait_s)
        hasty = of.deadline if rank == of.reader else 0
        with callbacks.deadline(int(hasty * 1e6)) if hasty else contextlib.nullcontext():
            one = caught(op)
        if rank == of.reader:
            reader_done.set()
            if of.deadline == SOON and type(one.error) is CommTimeout and one.error.rank != of.source:
                raise TooSoon
        texts.extend(str(one.error).split(": ", 1)[1:] if type(one.error) is CorruptStatus else [])
        return outcome(one, of.source if rank == of.reader else None)

    with ascend_moe.LocalCluster(world) as cluster:
        found: list[str] = cluster.run(body)
    assert len({text.partition(" [rank")[0] for text in texts}) <= 1, "all ranks say the same of it"
    return found


def write(cluster: ascend_moe.LocalCluster, corrupt: Corrupt, of: Trial) -> None:
    """Two ops ago the same rows were counted: that run, a later epoch in it, is what is about to come.

    But the rows are poisoned until they come: whoever takes the forged run for the real one shows it.
    """
    state = State.of(cluster, of.reader)
    epoch = next_epoch(state.epoch)
    assert epoch == EPOCH
    for rank in (of.reader, of.source):
        State.of(cluster, rank).poison(epoch, of.poison)
    counts = 2 * LOCAL if of.combine else LOCAL  # direct combine tells where rows begin
    slot = state.run(epoch, of.source, counts)
    assert slot[0] == STATUS_MAGIC ^ (epoch - 2), "not where the run lies"
    headers, run = HEADER_BLOCKS * WORDS, list(slot)
    run[headers:] = state.run(epoch, of.other_source or of.source, counts)[headers:]
    for i, word in enumerate(corrupt(of_epoch(run, epoch), epoch)):
        slot[i] = word % 2**32


def compared(check: Callable[..., None], *args: Any) -> str:
    """'right', or 'accepted': as data, which it is not."""
    try:
        check(*args)
    except AssertionError:
        return "accepted"
    return "right"


def outcome(result: Caught, source: int | None) -> str:
    """'right', 'accepted', or the error in a word, of ``source`` where that is known."""
    if result.error is None:
        return str(result.value)
    names: dict[type, str] = {CorruptStatus: "corrupt", ConfigMismatch: "mismatch", CommTimeout: "timeout"}
    names |= dict.fromkeys((InvalidExpertId, RoutingOverflow), "an error of its own")
    text = str(result.error)
    if source is not None:
        assert result.error.rank == source and "\n" not in text, text
    if type(result.error) is CorruptStatus:
        assert "which no rank of epoch" in text
    return names[type(result.error)]


@pytest.mark.row("corrupt status")
@both
@pytest.mark.parametrize(("world", "every"), [(2, 3), pytest.param(3, 1, marks=pytest.mark.nightly)])
def test_corrupted_status_is_reported_or_overwritten(world: int, every: int, tally: Tally) -> None:
    """The reader looks before the real run comes. What is corrupt is so when the time is over."""
    found, wrong = Counter[tuple[str, str]](), []
    for label, corrupt, expected in list(patterns())[::every]:
        comes = expected in ("right", "any")
        at_deadline = not comes and expected != "mismatch"
        by_rank = trial(world, 0.02 if comes else 5, corrupt, deadline=SOON if at_deadline else 0)
        found[expected, by_rank[READER]] += 1
        legal = {"any": {by_rank[READER]}, "noticed": {"corrupt", "mismatch"}}.get(expected, {expected})
        # A corrupt word is fatal and all ranks hear of it; a configuration is looked at by each rank itself.
        others = set(by_rank[1:]) - ({"right"} if by_rank[READER] != "corrupt" else {"corrupt"})
        if by_rank[READER] not in legal or "accepted" in by_rank or others - {by_rank[READER]}:
            wrong.append(f"{label}: {by_rank}, not {expected}")
    assert not wrong, "\n".join(wrong)
    assert sum(found.values()) * every >= 100
    assert found["corrupt", "corrupt"] * every >= 60 and found["right", "right"] * every >= 30
    names = {"corrupt": "CorruptStatus", "mismatch": "ConfigMismatch", "right": "overwritten by the real one"}
    for (_, got), count in found.items():
        tally.count(names.get(got, got), cases=count)


@pytest.mark.parametrize("cores", [1, 3])
@pytest.mark.parametrize("contract", [1, 2])
def test_wrong_counts_of_direct_combine_are_named(contract: int) -> None:
    """Core 0 checks the hashes while the other cores already read rows by what the runs say."""
    for count in range(2 * LOCAL):  # rows of each local expert, then where they begin
        block, at = divmod(count, COUNTS_PER_BLOCK)
        word = (HEADER_BLOCKS + block) * WORDS + 2 + at
        for bit in (0, 2, 20, 31):
            found = trial(2, 5, flipped(word, bit), contract, deadline=SOON)  # a single core looks till then
            assert found[READER] == "corrupt", f"count {count}, bit {bit}: {found}"


@pytest.mark.parametrize("contract", [0, 1, 2])
@pytest.mark.parametrize(("reader", "source"), [(0, 2), (1, 0), (2, 1)])
def test_the_hash_of_every_message_is_checked(contract: int, reader: int, source: int) -> None:
    """The first, the last, and one between are corrupted."""
    found = trial(3, 5, flipped(HEADER_BLOCKS * WORDS + 2, 0), contract, reader=reader, source=source)
    assert found[reader] == "corrupt", found


@pytest.mark.parametrize("contract", [1, 2])
def test_the_place_of_registered_rows_is_checked(contract: int) -> None:
    """Where they lie, and which memory that was, must be what their owner has said."""
    assert trial(2, 5, lambda run, epoch: run, contract, registered=True)[READER] in ("accepted", "right")
    for word in (WORDS + 5, WORDS + 6):
        for bit in (0, 13, 31):
            found = trial(2, 5, flipped(word, bit), contract, registered=True)
            assert found[READER] == "corrupt", f"word {word}, bit {bit}: {found}"


@pytest.mark.parametrize("contract", [0, 1, 2])
@both
def test_another_alignment_of_rows_is_a_mismatch(contract: int) -> None:
    found = trial(2, 5, flipped(WORDS + 2, 26), contract)
    assert found[READER] == "mismatch", found


def counted(rows: int) -> Corrupt:
    """So many rows of the first expert, and the hash that belongs to them."""
    at, prime = HEADER_BLOCKS * WORDS, 16777619

    def corrupt(run: list[int], epoch: int) -> list[int]:
        hashed, counts = run[at + 6], [rows, 0, 0, 0]
        for count in reversed(run[at + 2 : at + 6]):
            hashed = hashed * pow(prime, -1, 2**32) % 2**32 ^ count
        for count in counts:
            hashed = (hashed ^ count) * prime % 2**32
        return [*run[: at + 2], *counts, hashed, *run[at + 7 :]]

    return corrupt


@pytest.mark.parametrize("contract", [0, 1, 2])
@both
def test_counts_of_another_source_are_not_taken(contract: int) -> None:
    """Blocks that another rank has sent with the same configuration."""
    found = trial(3, 5, lambda run, epoch: run, contract, deadline=SOON, other_source=2)
    known = contract == 2 and ascend_moe.settings.COMM_ALG.get() == "window"  # its reader knows the counts
    assert found[READER] == ("right" if known else "corrupt"), found


@pytest.mark.parametrize("cores", [1, 3])
@both
def test_counts_of_a_whole_message_up_to_the_capacity() -> None:
    """Nothing else is wrong with it: as many rows as a rank may send are taken for what it sends."""
    assert trial(2, 5, counted(MAX_BS * TOPK))[READER] == "accepted"
    assert trial(2, 5, counted(MAX_BS * TOPK + 1), deadline=SOON)[READER] == "corrupt"  # a single core looks till then


@pytest.mark.parametrize("cores", [2, 8])  # of 8 each reads a row once for all experts
@pytest.mark.parametrize("poison", [0x7F, 0xFF])
def test_a_list_of_anything_names_no_place_outside(poison: int) -> None:
    assert trial(2, 5, counted(MAX_BS * TOPK), poison=poison)[READER] == "accepted"


@pytest.mark.parametrize("word, value", [(2, 0), (2, 1), (2, 6), (2, 15), (2, 21), (2, 2**31), (3, 2), (4, 99)])
@both
def test_abort_block_that_nobody_can_have_written(word: int, value: int) -> None:
    """An abort says that no more comes: the op must not go on with what is there, whatever else it says."""

    def body(rank: int, group_ep: str) -> None:
        place = DevicePlace(group_ep, 2, rank)
        assert cases.round_trip(place, 3) == "right"
        barrier.wait()
        if rank == READER:
            State.of(cluster, READER).forge_abort(SOURCE, word, value)
        barrier.wait()
        if rank == SOURCE:
            done.wait(5)
        error = caught(cases.dispatch, place, 5).error
        done.set()
        assert type(error) is CorruptStatus and error.rank == SOURCE, repr(error)
        assert "abort block of rank 1" in str(error) and "\n" not in str(error)
        again = caught(cases.round_trip, place, 3, 2)
        assert type(again.error) is CorruptStatus and again.error.rank == SOURCE
        assert again.seconds < 10  # of a deadline of 20

    barrier, done = threading.Barrier(2), threading.Event()
    with ascend_moe.LocalCluster(2) as cluster:
        cluster.run(body)
        cluster.close()
        cluster.run(lambda rank, name: cases.round_trip(DevicePlace(name, 2, rank), 5))


@pytest.mark.parametrize("missing", [0, 7])
@both
def test_half_an_abort_block_is_no_abort(missing: int) -> None:
    """Until both marks are there, its other half may still come: the op waits, and is right where its rows come."""

    def body(rank: int, group_ep: str) -> str:
        place = DevicePlace(group_ep, 2, rank)
        assert cases.round_trip(place, 3) == "right"
        barrier.wait()
        if rank == READER:
            State.of(cluster, READER).forge_abort(SOURCE, missing, 0)
        barrier.wait()
        if rank == SOURCE:
            time.sleep(SOON)  # the reader looks more than once
        return cases.round_trip(place, 5)

    barrier = threading.Barrier(2)
    with ascend_moe.LocalCluster(2) as cluster:
        assert cluster.run(body) == ["right"] * 2
