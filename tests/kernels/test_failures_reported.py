"""What ranks report of a failure that one of them has detected: at once, by whom, and what each stores of it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import failure_cases as cases
import pytest
import torch
from failure_cases import LOCAL, Caught, caught, opened
from failure_windows import ABORT_MAGIC, HEADER_BLOCKS, RECORD_MAGIC, WORDS, State, next_epoch, of_epoch

import ascend_moe
from ascend_moe.errors import CommTimeout, InvalidExpertId, PeerLost, RoutingOverflow
from ascend_moe.native.windows import ranks_per_server
from ascend_moe.ops import callbacks
from ascend_moe.validate.run import DevicePlace

pytestmark = [pytest.mark.asan, pytest.mark.tsan]

WORLD, IMPATIENT, ABSENT = 4, 1, 2
SOON, AT_ONCE_S = 0.1, 15.0  # the deadline of all but one is 30 s


@pytest.fixture(params=[("window", 0), ("direct", 0), ("window", 1), ("window", 2)], ids=str)
def cluster(request: pytest.FixtureRequest) -> Iterator[ascend_moe.LocalCluster]:
    algorithm, share = request.param
    with opened(WORLD, algorithm, share, timeout_s=30, cores=2) as cluster:
        yield cluster


def test_a_rank_that_gives_up_notifies_all_others(cluster: ascend_moe.LocalCluster) -> None:
    """The ranks that wait report it, and the one that comes later: each at once, long before its own deadline."""
    waited = threading.Barrier(WORLD)

    def body(rank: int, group_ep: str) -> tuple[Caught, Caught]:
        place = DevicePlace(group_ep, WORLD, rank)
        assert cases.round_trip(place, 3) == "right"
        with callbacks.deadline(int(SOON * 1e6)) if rank == IMPATIENT else contextlib.nullcontext():
            first = Caught(None, None, 0, 0) if rank == ABSENT else caught(cases.dispatch, place, 1)
            waited.wait()
            second = caught(cases.dispatch, place, 1)
        states[rank] = State.of(cluster, rank)
        waited.wait()
        if not ranks_per_server():  # else the words lie elsewhere
            aborts = [source for source in range(WORLD) if states[rank].abort(source)[0] == ABORT_MAGIC]
            assert aborts == [IMPATIENT], f"rank {rank} has abort blocks of {aborts}"
            record = states[rank].record
            assert (record[0], *record[4:]) == (RECORD_MAGIC, rank, ABSENT), record
            assert states[rank].has_failed, f"rank {rank} leaves nothing for its other cores"
        return first, second

    states: dict[int, State] = {}
    began = time.monotonic()
    for rank, both in enumerate(cluster.run(body)):
        for call in both[rank == ABSENT :]:
            assert type(call.error) is CommTimeout, f"rank {rank}: {call.error!r}"
            assert (call.error.rank, call.error.reporter) == (ABSENT, IMPATIENT), f"rank {rank}: {call.error}"
            assert call.ended - began < AT_ONCE_S


def test_no_core_writes_rows_after_a_failure() -> None:
    """Core 0 finds the own rank's abort, and the other core of direct the fail block: nobody touches the half."""

    ended = threading.Barrier(WORLD)

    def body(rank: int, group_ep: str) -> bool:
        place = DevicePlace(group_ep, WORLD, rank)
        assert cases.round_trip(place, 3) == "right"
        ended.wait()  # a rank tells the others of its failure, as of one in this op
        state = State.of(cluster, rank)
        later = next_epoch(state.epoch)
        state.forge_abort(rank, 1, state.epoch)
        state.forge_fail()
        state.poison(later)
        assert type(caught(cases.dispatch, place, 2).error) is CommTimeout
        return state.poisoned(later)

    with opened(WORLD, "direct", 0, timeout_s=30, cores=2) as cluster:
        assert cluster.run(body) == [True] * WORLD


@pytest.mark.parametrize("cluster", [("window", 0), ("direct", 0)], indirect=True, ids=str)
def test_a_failure_in_the_next_op_does_not_end_this_one(cluster: ascend_moe.LocalCluster) -> None:
    """A rank that is ahead may have failed there while others are still in this op, which it has completed."""
    forged = threading.Barrier(WORLD)

    def body(rank: int, group_ep: str) -> Caught:
        place = DevicePlace(group_ep, WORLD, rank)
        assert cases.round_trip(place, 3) == "right"
        state = State.of(cluster, rank)
        state.forge_abort(IMPATIENT, 1, next_epoch(next_epoch(state.epoch)))
        forged.wait()
        cases.check_dispatch(place, cases.dispatch(place, 1), 1)
        return caught(cases.dispatch, place, 1)

    for rank, result in enumerate(cluster.run(body)):
        assert type(result.error) is CommTimeout and result.error.rank == IMPATIENT, f"rank {rank}: {result!r}"


@pytest.mark.parametrize("left", ["an abort of the next op", "the headers of its message"])
@pytest.mark.parametrize("cluster", [("window", 0), ("direct", 0)], indirect=True, ids=str)
def test_a_rank_that_ends_is_missed_whatever_lies_in_the_window(cluster: ascend_moe.LocalCluster, left: str) -> None:
    """The host of each rank reports it at once, also between two blocks of its message."""
    forged = threading.Barrier(WORLD)

    def body(rank: int, group_ep: str) -> None:
        place = DevicePlace(group_ep, WORLD, rank)
        assert cases.round_trip(place, 3) == "right"
        state = State.of(cluster, rank)
        later, headers = next_epoch(state.epoch), slice(HEADER_BLOCKS * WORDS)
        if left == "an abort of the next op":
            state.forge_abort(IMPATIENT, 1, next_epoch(later))
        else:
            message = state.run(later, ABSENT, LOCAL)  # of the dispatch before
            message[headers] = of_epoch(list(message), later)[headers]
        forged.wait()
        if rank == ABSENT:
            raise KeyError("its own mistake")
        error = caught(cases.dispatch, place, 3).error
        assert type(error) is PeerLost and error.rank == ABSENT, f"rank {rank}: {error!r}"

    with pytest.raises(KeyError) as raised:
        cluster.run(body)
    assert raised.value.others == {}  # type: ignore[attr-defined]


@pytest.mark.parametrize("cluster", [("window", 0)], indirect=True, ids=str)
def test_of_two_failures_at_once_the_rank_that_is_missing_counts(cluster: ascend_moe.LocalCluster) -> None:
    """A core finds words that nobody has sent, another finds none, at the same deadline: the worse of both is said."""
    waited = threading.Barrier(WORLD)

    def body(rank: int, group_ep: str) -> Caught | None:
        place = DevicePlace(group_ep, WORLD, rank)
        assert cases.round_trip(place, 3) == "right"
        waited.wait()
        if rank == IMPATIENT:
            state = State.of(cluster, rank)
            state.run(next_epoch(state.epoch), 0, LOCAL)[0] = 1
        waited.wait()
        late = rank in (0, ABSENT)
        with callbacks.deadline(int(SOON * 1e6)) if rank == IMPATIENT else contextlib.nullcontext():
            first = None if late else caught(cases.dispatch, place, 1)
        waited.wait()
        return first or caught(cases.dispatch, place, 1)

    for result in cluster.run(body):
        assert type(result.error) is CommTimeout and result.error.rank == ABSENT, repr(result)


@pytest.mark.parametrize("wrong", ["dispatch", "combine"])
@pytest.mark.parametrize("cluster", [("window", 0)], indirect=True, ids=str)
def test_no_row_leaves_a_rank_with_an_error(cluster: ascend_moe.LocalCluster, wrong: str) -> None:
    """Rows beyond the capacity would lie where others' are, and those of an op that fails are for nobody."""
    here, sender, experts = 0, 3, 2 * WORLD
    together = threading.Barrier(WORLD)

    def body(rank: int, group_ep: str) -> bool:
        place = DevicePlace(group_ep, WORLD, rank)
        cases.round_trip(place, 3)
        ids = torch.full((4, 3), -1, dtype=torch.int32)
        if rank == sender and wrong == "dispatch":
            ids[:] = torch.tensor([0, 1, 0])  # 12 rows for one owner, who has room for 8
        if rank == here and wrong == "combine":
            ids[:, 0] = experts - 1  # an expert of the sender
        x = torch.ones(4, 48, dtype=torch.bfloat16)
        common = {"group_ep": group_ep, "ep_world_size": WORLD, "ep_rank_id": rank, "moe_expert_num": experts}
        sent = None
        if wrong == "combine":
            sent = ascend_moe.npu_moe_distribute_dispatch(x, ids, **common)
            ids[0, 0] = experts if rank == sender else ids[0, 0]
        together.wait()
        state = State.of(cluster, rank)
        epoch = next_epoch(state.epoch)
        state.poison(epoch)
        together.wait()
        with pytest.raises(RoutingOverflow if sent is None else InvalidExpertId):
            if sent is None:
                ascend_moe.npu_moe_distribute_dispatch(x, ids, **common)
            else:
                ascend_moe.npu_moe_distribute_combine(sent[0], ids, sent[2], sent[4], torch.ones(4, 3), **common)
        return state.poisoned(epoch)

    assert cluster.run(body)[here], f"rank {sender} has sent rows to rank {here}"
