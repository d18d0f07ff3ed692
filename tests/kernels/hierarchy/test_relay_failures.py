"""comm_alg "hierarchy" between servers when ranks differ, are wrong or do not come: every rank names the culprit."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import op_runs
import pytest
import torch
from bare_ends import Bare, Planned
from begin_ranks import two_launches
from failure_windows import ABORT_MAGIC, TIMEOUT, State

from ascend_moe import LocalCluster, plan
from ascend_moe.errors import ArgumentError, AscendMoeError, CommTimeout, ConfigMismatch, CorruptStatus, RoutingMismatch
from ascend_moe.native.library import lib
from ascend_moe.native.windows import CONTEXT_A2
from ascend_moe.plan import Request
from ascend_moe.reference.cases import Case, legal
from ascendc_twin.soc import SOC_OF_SERIES

PEER_LOST, CULPRIT = 16, 5  # an error code; the word of an error record
IN_OP_AT = 256  # of a window: whether its rank is in an op
CASE = legal(Case(world=4, local=2, topk=3, share=2, batches="global_bs", cores=2, seed=5))
DEADLINE = 0.5


@pytest.fixture(autouse=True)
def servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_CONTEXT", "a2")
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", "2")
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", str(DEADLINE))
    monkeypatch.setenv("ASCEND_MOE_AIV_CORES", str(CASE.cores))


def raised(call: Any, *args: Any) -> Exception:
    try:
        call(*args)
    except AscendMoeError as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(("op", "absent"), [("dispatch", 0), ("combine", 3)])
def test_a_rank_that_does_not_come_is_named_by_all(op: str, absent: int) -> None:
    """Its server waits for it, its rail peer (same local rank) for its records, and whoever relays tells the others."""

    def body(rank: int, group_ep: str) -> tuple[Exception, Exception, float] | None:
        sent = op_runs.dispatch(CASE, rank, group_ep)
        rows = op_runs.expert_rows(CASE, rank, sent)
        if rank == absent:
            time.sleep(DEADLINE + 1)
            return None
        started = time.monotonic()
        if op == "dispatch":
            first = raised(op_runs.dispatch, CASE, rank, group_ep)
        else:
            first = raised(op_runs.combine, CASE, rank, group_ep, rows, sent)
        waited = time.monotonic() - started
        return first, raised(op_runs.dispatch, CASE, rank, group_ep), waited

    with LocalCluster(CASE.world, window_mib=8) as cluster:
        for rank, found in enumerate(cluster.run(body)):
            if rank == absent:
                continue
            first, again, waited = found
            assert isinstance(first, CommTimeout) and first.details["rank"] == absent, (rank, first)
            assert isinstance(again, CommTimeout) and again.details["rank"] == absent, (rank, again)
            # Its neighbour and its rail peer miss it in the first level, and are the first to say so.
            assert (first.phase, first.level, again.level) == (op, 1, 1) and first.reporter in (absent ^ 1, absent ^ 2)
            assert "in level 1 of hierarchy, where it awaits what it forwards" in str(first)
            assert "in level 1" in Path(first.calls).read_text()
            assert waited < DEADLINE + 2


@pytest.mark.parametrize(
    ("before", "share"),
    [
        pytest.param((2, 0, 0, 0), 2, id="after ops of window"),  # an older op has left what is no damage
        pytest.param((2,), 0, id="where others differ"),  # rank 0 runs hierarchy, and waits for all before it leaves
        pytest.param((None,), 0, id="where all have differed before"),  # it has sent a hint of the op before
    ],
)
def test_a_rank_that_does_not_come_is_named_with_ops_of_window(before: tuple[int | None, ...], share: int) -> None:
    absent = 3

    def body(rank: int, group_ep: str) -> Exception | None:
        case = CASE if rank == 0 else replace(CASE, share=share)
        for each in before:
            if each is None:
                assert isinstance(raised(op_runs.dispatch, case, rank, group_ep), ConfigMismatch)
            else:
                assert isinstance(op_runs.run_rank(replace(CASE, share=each), rank, group_ep), op_runs.RankRun)
        if rank == absent:
            time.sleep(DEADLINE + 1)
            return None
        return raised(op_runs.dispatch, case, rank, group_ep)

    with LocalCluster(CASE.world, window_mib=8) as cluster:
        for rank, found in enumerate(cluster.run(body)):
            if rank != absent:
                assert isinstance(found, CommTimeout) and found.details["rank"] == absent, (rank, found)


@pytest.mark.parametrize(
    ("world", "relaying", "cores", "stores"),
    [
        pytest.param(4, {0, 1}, 6, "0", id="a server of two"),  # core 0 awaits no message
        pytest.param(8, {0, 1, 2, 3, 4, 5, 6}, 2, "0", id="all but one of eight"),
        pytest.param(4, {3}, 1, "1", marks=pytest.mark.nightly, id="one, stores"),
    ],
)
def test_ranks_that_differ_in_comm_alg_are_named_by_all(
    world: int, relaying: set[int], cores: int, stores: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a quarter of the deadline all know it, and the group works on."""
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "2")
    monkeypatch.setenv("ASCEND_MOE_INTRA_NODE_STORES", stores)
    monkeypatch.setenv("ASCEND_MOE_AIV_CORES", str(cores))
    levels = legal(replace(CASE, world=world))

    def body(rank: int, group_ep: str) -> tuple[Exception, Exception, op_runs.RankRun | AscendMoeError]:
        case = levels if rank in relaying else replace(levels, share=0)
        dispatched = raised(op_runs.dispatch, case, rank, group_ep)
        sent = op_runs.dispatch(levels, rank, group_ep)
        combined = raised(op_runs.combine, case, rank, group_ep, op_runs.expert_rows(levels, rank, sent), sent)
        return dispatched, combined, op_runs.run_rank(levels, rank, group_ep)

    with LocalCluster(world, window_mib=8) as cluster:
        found = cluster.run(body)
    op_runs.check(levels, [good for *_, good in found])
    for rank, (*errors, _) in enumerate(found):
        for op, error in zip(("dispatch", "combine"), errors, strict=True):
            assert isinstance(error, ConfigMismatch), (rank, op, error)
            assert error.field == "comm_alg" and (error.rank in relaying) != (rank in relaying)
            ours, theirs = ("hierarchy", "window") if rank in relaying else ("window", "hierarchy")
            assert (error.ours, error.theirs) == (ours, theirs)
            text = f"{op}: comm_alg is {ours} on rank {rank} and {theirs} on rank {error.rank}; it must be the same"
            assert text in str(error)


NOTE_MAGIC, WINDOW, HIERARCHY = 0x4E4F5445, 1, 3  # of a note, in the place of an abort block; algorithms
SECOND = 3  # the epoch of a dispatch after a trip


def alone_after_a_trip(cluster: LocalCluster, others: Callable[[int], None]) -> tuple[Exception, float]:
    """Rank 0 calls dispatch, and no other rank does: what it raises, and when. ``others`` runs on each of them."""
    done = threading.Event()

    def body(rank: int, group_ep: str) -> tuple[Exception, float] | None:
        if rank == 0:
            started = time.monotonic()
            try:
                return raised(op_runs.dispatch, CASE, rank, group_ep), time.monotonic() - started
            finally:
                done.set()
        others(rank)
        assert done.wait(60)
        return None

    op_runs.check(CASE, cluster.run(lambda rank, group_ep: op_runs.run_rank(CASE, rank, group_ep)))
    outcome: tuple[Exception, float] = cluster.run(body)[0]
    return outcome


def test_a_rank_that_has_failed_in_the_next_op_has_sent_its_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranks that differ in comm_alg one is ahead: its abort block lies where its note was, and nobody waits."""
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "5")
    with LocalCluster(CASE.world, window_mib=8) as cluster:

        def tell(rank: int) -> None:
            block = [NOTE_MAGIC, SECOND, WINDOW if rank == 2 else HIERARCHY, 0, 0, 0, 0, SECOND]
            if rank == 3:
                block = [ABORT_MAGIC, SECOND + 1, TIMEOUT, 1, rank, 0, 0, ABORT_MAGIC]
            State.of(cluster, 0).abort(rank)[:] = block

        error, _ = alone_after_a_trip(cluster, tell)
    assert isinstance(error, ConfigMismatch) and (error.field, error.rank) == ("comm_alg", 2), error


def test_a_rank_that_is_asked_waits_its_time_and_hurries_whom_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a quarter of its deadline it asks whom it misses, with a turn less than it has; and again with fewer."""
    deadline, asks, misses = 6.0, 2, 1
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", str(deadline))
    with LocalCluster(CASE.world, window_mib=8) as cluster:

        def ask(rank: int) -> None:
            if rank != asks:
                return
            heard = State.of(cluster, asks).abort(0)
            for turns in (5, 2):
                State.of(cluster, 0).abort(asks)[:] = [NOTE_MAGIC, SECOND, HIERARCHY, 0 + 1, turns, 0, 0, SECOND]
                end = time.monotonic() + 20
                while list(heard[:5]) != [NOTE_MAGIC, SECOND, HIERARCHY, misses + 1, turns - 1]:
                    assert time.monotonic() < end, f"rank {asks} hears {list(heard)} after it gave {turns} turns"
                    time.sleep(0.001)

        error, waited = alone_after_a_trip(cluster, ask)
    assert isinstance(error, CommTimeout) and error.details["rank"] == misses, error
    assert deadline / 4 < waited < deadline


RELAY_MAGIC = 0x52454C59


def last_record(state: State) -> int:
    """Where the last record lies that the last server sent in the first op: right before the block that counts them."""
    block = ctypes.string_at(state.data, state.data_bytes).rfind(struct.pack("<2I", RELAY_MAGIC ^ 1, 1))
    assert block > 0
    return state.data + block - 128  # a block with the token; 3 ids, their rows, their weights, from a block on each


@pytest.mark.parametrize(("word", "value"), [(0, CASE.batch * 100), (16, 0), (16, -(1 << 20))])
def test_a_record_of_what_no_rank_sends_is_corrupt(word: int, value: int) -> None:
    """A token beyond every batch, or a row where no row of the source is: the forwarder stores none of it."""
    case = legal(Case(world=4, local=2, topk=3, share=2, batch=4, cores=2, seed=5, ids="distinct"))
    corrupted, barrier = 0, threading.Barrier(4)
    with LocalCluster(case.world, window_mib=8) as cluster:

        def begin_and_finish(op: str, place: Any, case: Case, arguments: dict[str, Any]) -> Any:
            started = two_launches(op, place, case, arguments)
            barrier.wait(30)
            if place.rank == corrupted:
                at = last_record(State.of(cluster, corrupted))
                (ctypes.c_int32 * 3).from_address(at + 4 * word)[:] = [value] * 3
            barrier.wait(30)
            return started.finish()

        def body(rank: int, group_ep: str) -> tuple[Exception | None, Exception]:
            place, first = op_runs.DevicePlace(group_ep, case.world, rank), None
            try:
                op_runs.validate_run.dispatch(place, case, call=begin_and_finish)
            except AscendMoeError as error:
                first = error
            return first, raised(op_runs.dispatch, case, rank, group_ep)

        found = cluster.run(body)
    assert found[0][0] is not None and found[1][0] is not None, "their server stores no row of it"
    for error in (error for errors in found for error in errors if error is not None):
        assert isinstance(error, CorruptStatus) and error.details["rank"] == 2, error
        assert error.level == 1 and error.reporter == corrupted
        assert f"holds {hex(value & 0xFFFFFFFF) if value else 0} in a record" in str(error)


@pytest.mark.parametrize("word", [3, 4, 7])
def test_a_corrupt_block_of_sums_names_the_rank_that_summed(word: int) -> None:
    """Number of sums, hash, epoch: rank 0 waits for its neighbour while the sums of rank 2 lie in its window."""
    reader, summed, neighbour, op_combine = 0, 2, 1, 2

    def corrupt(cluster: LocalCluster) -> None:
        state = State.of(cluster, reader)
        head = struct.pack("<3I", RELAY_MAGIC ^ 2, op_combine, summed)
        deadline = time.monotonic() + 30
        while (block := ctypes.string_at(state.data, state.data_bytes).rfind(head)) < 0:
            assert time.monotonic() < deadline, "no block of sums has come"
        ctypes.c_uint32.from_address(state.data + block + 4 * word).value ^= 0x40

    def body(rank: int, group_ep: str) -> tuple[Exception | None, Exception]:
        sent, first = op_runs.dispatch(CASE, rank, group_ep), None
        rows = op_runs.expert_rows(CASE, rank, sent)
        if rank == neighbour:
            corrupt(cluster)
        try:
            op_runs.combine(CASE, rank, group_ep, rows, sent)
        except AscendMoeError as error:
            first = error
        return first, raised(op_runs.dispatch, CASE, rank, group_ep)

    with pytest.MonkeyPatch.context() as patch, LocalCluster(CASE.world, window_mib=8) as cluster:
        patch.setenv("ASCEND_MOE_TIMEOUT_S", "30")
        found = cluster.run(body)
    assert isinstance(found[reader][0], CorruptStatus)
    for error in (error for errors in found for error in errors if error is not None):
        assert isinstance(error, CorruptStatus) and error.details["rank"] == summed, error
        assert (error.level, error.reporter) == (2, reader)


@pytest.mark.parametrize("other", [0, 3])
def test_another_configuration_is_named_by_all(other: int) -> None:
    """It stops rows on both levels, and no message; the group works on."""

    def body(rank: int, group_ep: str) -> tuple[Exception, Exception, op_runs.RankRun | AscendMoeError]:
        wide = replace(CASE, units=4) if rank == other else CASE
        first = raised(op_runs.dispatch, wide, rank, group_ep)
        more = replace(CASE, topk=2) if rank == other else CASE
        return first, raised(op_runs.dispatch, more, rank, group_ep), op_runs.run_rank(CASE, rank, group_ep)

    with LocalCluster(CASE.world, window_mib=8) as cluster:
        found = cluster.run(body)
    for first, second, _ in found:
        assert isinstance(first, ConfigMismatch) and first.details["field"] == "H"
        assert isinstance(second, ConfigMismatch) and second.details["field"] == "K"
    op_runs.check(CASE, [good for _, _, good in found])


def test_the_same_counts_of_other_tokens_are_this_ranks_error_alone() -> None:
    """Every expert has as many rows as in dispatch, but more tokens go to each server."""
    case, odd = legal(Case(world=4, local=2, topk=2, share=2, batch=2)), 1
    ids = ([[0, 1], [4, 5]], [[0, 4], [1, 5]])

    def body(rank: int, group_ep: str) -> torch.Tensor | Exception:
        place = op_runs.DevicePlace(group_ep, case.world, rank)
        first, second = ({"expert_ids": torch.tensor(given, dtype=torch.int32)} if rank == odd else {} for given in ids)
        sent = op_runs.validate_run.dispatch(place, case, **first)
        rows = op_runs.expert_rows(case, rank, sent)
        if rank == odd:
            return raised(lambda: op_runs.validate_run.combine(place, case, rows, sent, **second))
        return op_runs.combine(case, rank, group_ep, rows, sent)

    with LocalCluster(case.world, window_mib=8) as cluster:
        found = cluster.run(body)
        op_runs.check(case, cluster.run(lambda rank, group_ep: op_runs.run_rank(case, rank, group_ep)))
    assert isinstance(found[odd], RoutingMismatch) and found[odd].details["rank"] == odd
    assert all(isinstance(found[rank], torch.Tensor) for rank in range(case.world) if rank != odd)
    assert "server 0 returns sums of 1 tokens to rank 1, whose expert_ids and mask send 2 to it" in str(found[odd])


@pytest.mark.parametrize("wrong", ["number", "row"])
def test_records_that_are_not_dispatchs_are_refused(wrong: str) -> None:
    """They lie behind the source_indices: a number of tokens a server, then for each token ids, rows and weights."""
    odd, rail_peer = 3, 1

    def body(rank: int, group_ep: str) -> torch.Tensor | Exception:
        sent = list(op_runs.dispatch(CASE, rank, group_ep))
        rows = op_runs.expert_rows(CASE, rank, sent)
        if rank == odd:
            sent[2] = sent[2].clone()
            numbers = -(-3 * len(sent[0]) // 8) * 8
            assert 0 < sent[2][numbers] <= CASE.batch
            if wrong == "number":
                sent[2][numbers] = CASE.batch + 1
            else:  # of a token of its rail peer, one beyond the rows that its owner has handed over
                record = sent[2][numbers + 2 * 8 :]
                k, owner = next((k, int(record[8 + k]) // CASE.local) for k in range(CASE.topk) if record[8 + k] >= 4)
                handed = int((CASE.inputs[rail_peer].expert_ids // CASE.local == owner).sum())
                assert -handed <= record[16 + k] < 0
                record[16 + k] = -handed - 1
        try:
            return op_runs.combine(CASE, rank, group_ep, rows, sent)
        except AscendMoeError as error:
            return error

    with LocalCluster(CASE.world, window_mib=8) as cluster:
        found = cluster.run(body)
    assert isinstance(found[odd], ArgumentError) and "behind its source indices" in str(found[odd])
    for rank in {0, 1, 2}:
        if wrong == "number":  # known before messages leave
            assert isinstance(found[rank], ArgumentError) and found[rank].details == found[odd].details
        else:  # its rail peer gets no sums
            assert isinstance(found[rank], RoutingMismatch if rank == rail_peer else torch.Tensor), found[rank]


# ---- a rank that is gone, of which nothing is awaited but what others forward


@pytest.mark.parametrize("op", ["dispatch", "combine"])
@pytest.mark.parametrize(("epoch", "in_op", "lost"), [(7, 0, True), (8, 1, True), (8, 0, False), (9, 1, False)])
def test_a_lost_rank_has_done_its_part_where_its_window_says_so(op: str, epoch: int, in_op: int, lost: bool) -> None:
    """Rank 3 of two servers, as rank 0 sees it in the op of epoch 8: it has begun it, ended it, or begun the next."""
    end = Bare(4, 0, CONTEXT_A2, fill=0)
    assert lib().am_comm_use_servers(end.handle, 2, 1) == 0
    lib().am_comm_set_epoch(end.handle, 7)
    end.words(3, 0, 2)[:] = end.words(0, 0, 1)[0], epoch
    ctypes.c_uint32.from_address(end.bases[3] + IN_OP_AT).value = in_op
    lib().am_comm_mark_lost(end.handle, 3)
    request = Request(
        ranks=4, experts=4, topk=1, hidden=32, batch=1, ranks_per_server=2, weights=True, soc=SOC_OF_SERIES["A2"]
    )
    spec = plan.describe(op, request, "hierarchy")
    spec.intra_node_stores, spec.window_mib, spec.deadline_micros = 1, 1, 300_000
    record = (ctypes.c_int32 * lib().am_error_record_words())()
    code, fault = end.run(Planned(op, spec), record)
    end.close()
    assert (code, fault) == (PEER_LOST if lost else TIMEOUT, "")
    assert (record[CULPRIT] == 3) == lost
