"""Registered buffers: blocks, what consumes them, when their memory is free again, how long a window stays mapped."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from bad_arguments import refused
from bare_ends import WHOLE, plan_of

import ascend_moe
from ascend_moe import comm
from ascend_moe.comm.communicator import GroupCommunicator
from ascend_moe.errors import (
    AscendMoeError,
    InvalidExpertId,
    PeerLost,
    RoutingMismatch,
    WindowTensorError,
    WindowTooSmall,
)
from ascend_moe.native.library import lib
from ascend_moe.native.windows import MIB, window_registered_bytes

WORLD, EXPERTS, TOPK, BATCH, HIDDEN = 2, 4, 2, 6, 64
MOST = WORLD * BATCH * TOPK  # rows of expand_x
COMBINE = ascend_moe.npu_moe_distribute_combine_v2


@pytest.fixture
def cluster() -> Iterator[comm.LocalCluster]:
    with comm.LocalCluster(WORLD, window_mib=1) as one:
        yield one


def empty(group: str, shape: Any, dtype: Any = torch.float32, rank: int = 0) -> Any:
    return ascend_moe.window_empty(shape, dtype=dtype, group_ep=group, ep_world_size=WORLD, ep_rank_id=rank)


def take(rank: int, group: str, rows: int, hidden: int = 512) -> Any:
    return empty(group, (rows, hidden), rank=rank)


def on_rank_0(cluster: comm.LocalCluster, work: Any) -> Any:
    return cluster.run(lambda rank, group: work(group) if rank == 0 else None)[0]


def test_the_setting_is_the_size_of_the_registered_area(monkeypatch: pytest.MonkeyPatch) -> None:
    assert window_registered_bytes(3 * MIB) == 3 * MIB
    monkeypatch.setenv("ASCEND_MOE_REGISTERED_MIB", "7")
    with comm.LocalCluster(1, window_mib=2) as cluster:
        ends = cluster.run(lambda rank, group: comm.lookup(group, 1, rank))
        assert (ends[0].data_bytes, ends[0].registered_bytes) == (2 * MIB, 7 * MIB)
    monkeypatch.setenv("ASCEND_MOE_REGISTERED_MIB", "0")
    with comm.LocalCluster(WORLD, window_mib=1) as cluster, pytest.raises(WindowTooSmall) as raised:
        on_rank_0(cluster, lambda group: take(0, group, 4))
    assert (raised.value.needed_mib, raised.value.variable) == (1, "ASCEND_MOE_REGISTERED_MIB")
    assert "ASCEND_MOE_REGISTERED_MIB=0 leaves no room for registered buffers" in str(raised.value)


def test_rows_must_end_inside_their_block() -> None:
    """By the C interface: a tensor never has more rows than its memory."""
    planned = plan_of("combine", 0, 2, 0, 1, algorithm="direct")
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    area, out = lib().am_registered_open(0, memory.data_ptr(), memory.nbytes), (ctypes.c_uint64 * 4)()
    record, text = (ctypes.c_int32 * lib().am_error_record_words())(), ctypes.create_string_buffer(1024)
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    registered_use = lib().am_registered_use
    registered_use.argtypes = [pointer, pointer, number, pointer, number, pointer, pointer, ctypes.c_uint64]

    def use(address: int) -> tuple[int, str]:
        text.value = b""
        return registered_use(area, planned.handle, WHOLE, address, 1, record, text, 1024), text.value.decode()

    room = 1 << 12  # more than the rows take
    assert (
        lib().am_registered_take(area, room, out) == lib().am_registered_take(area, 512, (ctypes.c_uint64 * 4)()) == 0
    )
    code, said = use(out[0] + room - 32)
    assert code == -1 and "not inside one live window tensor" in said
    assert use(out[0]) == (0, "")
    assert [lib().am_registered_release(area, generation) for generation in (1, 2)] == [0, 0]
    assert lib().am_registered_close(area) == 1


# ---- tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_window_tensors_have_the_shapes_and_types_asked_for(cluster: comm.LocalCluster, dtype: torch.dtype) -> None:
    shapes = [(3, 7), (0, 64), (5,), 9, (2, 0, 4), (2, 3, 4), torch.Size([4, 8]), ()]
    tensors = on_rank_0(cluster, lambda group: [empty(group, shape, dtype) for shape in shapes])
    for shape, made in zip(shapes, tensors, strict=True):
        want = torch.empty(shape, dtype=dtype)
        assert (made.shape, made.dtype, made.device) == (want.shape, want.dtype, want.device)
        assert made.is_contiguous() and made.data_ptr() % 512 == 0 and not made.requires_grad
        assert (made.fill_(3) == 3).all()


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("shape", {"shape": (-1, 4)}),
        ("shape", {"shape": (2, 1.5)}),
        ("shape", {"shape": (True, 4)}),
        ("dtype", {"dtype": torch.int8}),
        ("dtype", {"dtype": torch.float64}),
        ("group_ep", {"group": "nobody"}),
    ],
)
def test_wrong_arguments_are_named(cluster: comm.LocalCluster, argument: str, changes: dict[str, Any]) -> None:
    refused(argument, on_rank_0, cluster, lambda group: empty(**{"group": group, "shape": (2, 4), **changes}))


def test_memory_is_used_again_when_a_tensor_dies(cluster: comm.LocalCluster) -> None:
    def work(group: str) -> None:
        first, second, third = (take(0, group, 64) for _ in range(3))
        middle = second.data_ptr()
        view = second[3:5, :7]
        del second
        assert take(0, group, 64).data_ptr() != middle, "a view keeps its storage"
        del view
        assert take(0, group, 64).data_ptr() == middle
        assert take(0, group, 65).data_ptr() > third.data_ptr()  # does not fit between the two
        assert first.data_ptr() < middle < third.data_ptr()

    on_rank_0(cluster, work)


def test_a_registered_area_without_room_is_reported(cluster: comm.LocalCluster) -> None:
    def work(group: str) -> None:
        kept = [take(0, group, 256) for _ in range(2)]  # 512 KiB each: all of it
        with pytest.raises(WindowTooSmall, match="2 window tensors hold space") as raised:
            take(0, group, 1)
        error = raised.value
        assert (error.needed_mib, error.held, error.variable) == (2, 2, "ASCEND_MOE_REGISTERED_MIB")
        assert "export ASCEND_MOE_REGISTERED_MIB=2 on all ranks" in str(error) and "1 MiB" in str(error)
        kept.pop()
        with pytest.raises(WindowTooSmall, match="1 window tensor holds space") as raised:
            take(0, group, 1024)
        assert raised.value.needed_mib == 3
        take(0, group, 256)
        for rows in (2**40, 2**61, 2**80):
            with pytest.raises(WindowTooSmall):
                take(0, group, rows)

    on_rank_0(cluster, work)


class Rank:
    """One rank's calls, with outputs that tell whether rows were read whole."""

    def __init__(self, rank: int, group: str) -> None:
        self.rank, self.group = rank, group
        self.common = (group, WORLD, rank, EXPERTS)
        # Every token has an expert on each rank.
        self.ids = torch.tensor([[token % 2, 2 + token % 2] for token in range(BATCH)], dtype=torch.int32)
        self.weights = torch.ones(BATCH, TOPK)

    def empty(self, rows: int = MOST) -> Any:
        return take(self.rank, self.group, rows, HIDDEN)

    def filled(self, rows: int = MOST) -> Any:
        """Rows of the rank's number and end."""
        return self.empty(rows).fill_(self.rank + 1)

    def dispatch(self, x: torch.Tensor | None = None, ids: torch.Tensor | None = None, comm_alg: str = "direct") -> Any:
        x = torch.ones(BATCH, HIDDEN) if x is None else x
        ids = self.ids if ids is None else ids
        return ascend_moe.npu_moe_distribute_dispatch_v2(x, ids, *self.common, comm_alg=comm_alg)

    def combine(self, rows: torch.Tensor, sent: Any, comm_alg: str = "direct", op: Any = COMBINE, **more: Any) -> Any:
        given = (rows, more.pop("ids", self.ids), sent[2], sent[4], self.weights, *self.common)
        return op(*given, comm_alg=comm_alg, **more)


def on_all(cluster: comm.LocalCluster, work: Callable[[Rank], Any]) -> list[Any]:
    return cluster.run(lambda rank, group: work(Rank(rank, group)))


def on_every_rank(test: Callable[[Rank], None]) -> Callable[[comm.LocalCluster], None]:
    """A test of pytest that runs ``test`` on all ranks of a cluster."""

    def run(cluster: comm.LocalCluster) -> None:
        on_all(cluster, test)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def refused_rows(call: Callable[[], Any], says: str) -> WindowTensorError:
    with pytest.raises(WindowTensorError, match=says) as raised:
        call()
    assert raised.value.argument == "expand_x" and "\n" not in str(raised.value)
    return raised.value


# ---- what consumes a tensor


@on_every_rank
def test_a_direct_combine_consumes_it(end: Rank) -> None:
    """With all views of its storage, in one launch and in two."""
    for op, generation, epoch in ((COMBINE, 1, 2), (lambda *a, **b: ascend_moe.begin_combine(*a, **b).finish(), 3, 6)):
        sent, both = end.dispatch(), end.filled(2 * MOST)
        assert (end.combine(both[:MOST], sent, op=op) == 3).all()  # 1 from rank 0, 2 from rank 1
        sent = end.dispatch()
        for rows in (both[:MOST], both[MOST:]):
            call = functools.partial(end.combine, rows, sent, op=op)
            error = refused_rows(call, f"consumed by the combine of epoch {epoch}; take a new one")
            assert (error.generation, error.epoch) == (generation, epoch) and f"(generation {generation})" in str(error)
        # Nothing has been run: the same call with a new tensor meets the other rank.
        assert (end.combine(end.filled(), sent, op=op) == 3).all()


@on_every_rank
def test_other_algorithms_copy_and_consume_nothing(end: Rank) -> None:
    wide = end.empty(2 * MOST).view(MOST, 2 * HIDDEN).fill_(end.rank + 1)
    for _ in range(2):  # rows that are not contiguous are copied before the op
        assert (end.combine(wide[:, ::2], end.dispatch()) == 3).all()
    for name in ("fullmesh_v2", "window", "fullmesh"):
        rows = end.filled()
        for algorithm in (name, name, "direct", name):  # at last read once more, by this rank alone
            assert (end.combine(rows, end.dispatch(comm_alg=algorithm), algorithm) == 3).all()


@on_every_rank
def test_no_rows_consume_nothing(end: Rank) -> None:
    """A tensor without elements holds no block."""
    nobody = torch.full((0, TOPK), -1, dtype=torch.int32)
    end.weights = torch.ones(0, TOPK)
    rows = end.empty(0)
    for _ in range(2):
        sent = end.dispatch(torch.ones(0, HIDDEN), nobody)
        assert end.combine(rows, sent, ids=nobody).shape == (0, HIDDEN)


# ---- when its memory is registered again


@on_every_rank
def test_consumed_tensors_that_live_keep_their_memory(end: Rank) -> None:
    sent = end.dispatch()
    rows = end.empty().fill_(7)
    end.combine(rows, sent)
    for _ in range(4):
        sent = end.dispatch()
        other = end.empty().fill_(8)
        assert other.data_ptr() != rows.data_ptr()
        end.combine(other, sent)
    assert (rows == 7).all()
    place = rows.data_ptr()
    del rows
    assert end.empty().data_ptr() == place  # ops enough have gone by


@on_every_rank
def test_consumed_tensors_count_as_holders(end: Rank) -> None:
    half = 512 * 1024 // (4 * HIDDEN)
    sent, rows = end.dispatch(), end.empty(half)
    end.combine(rows[:MOST].zero_(), sent)
    other = end.empty(half)
    with pytest.raises(WindowTooSmall, match="2 window tensors hold space: drop"):
        end.empty()
    del rows
    with pytest.raises(WindowTooSmall, match="1 window tensor holds space"):
        end.empty()  # dead, but peers may still read it
    sent = end.dispatch()
    end.combine(end.empty().zero_(), sent)
    del other


# ---- ops that fail


@on_every_rank
def test_local_errors_consume_nothing(end: Rank) -> None:
    sent, rows = end.dispatch(), end.filled()
    with pytest.raises(AscendMoeError, match="expert_scales"):
        ascend_moe.npu_moe_distribute_combine_v2(
            rows, end.ids, sent[2], sent[4], torch.ones(1, 1), *end.common, comm_alg="direct"
        )
    assert (end.combine(rows, sent) == 3).all()


@on_every_rank
def test_errors_of_ops_consume_it_on_all_ranks(end: Rank) -> None:
    """The op has taken its epoch, and peers that found nothing wrong may be reading."""
    for wrong, error in ((EXPERTS + end.rank, InvalidExpertId), (-1, RoutingMismatch)):
        sent, rows, ids = end.dispatch(), end.filled(), end.ids.clone()
        ids[0, 0] = wrong  # -1: a row that comes back is not asked for
        if wrong == -1 and end.rank:
            end.combine(rows, sent)
        else:
            with pytest.raises(error):
                end.combine(rows, sent, ids=ids)
        refused_rows(lambda sent=sent, rows=rows: end.combine(rows, sent), "was consumed by the combine of epoch")
        sent = sent if wrong > 0 else end.dispatch()
        assert (end.combine(end.filled(), sent) == 3).all()


# ---- tensors of other windows


def test_tensors_of_closed_windows_are_refused_rows(cluster: comm.LocalCluster) -> None:
    kept = on_all(cluster, lambda end: end.filled())
    cluster.close()

    def work(end: Rank) -> None:
        sent = end.dispatch()
        error = refused_rows(lambda: end.combine(kept[end.rank], sent), "or of a group that has been closed")
        assert f"those of rank {end.rank}" in str(error)
        assert (end.combine(kept[end.rank].clone(), sent) == 3).all()
        # As memory it is as good as ever, and other algorithms copy it.
        sent = end.dispatch(kept[end.rank][:BATCH])
        assert (end.combine(torch.ones(MOST, HIDDEN), sent) == 2).all()
        assert (end.combine(kept[end.rank], end.dispatch(comm_alg="window"), "window") == 3).all()

    on_all(cluster, work)


def test_another_rank_and_another_group(cluster: comm.LocalCluster) -> None:
    with comm.LocalCluster(WORLD, window_mib=1) as second:
        others = on_all(second, lambda end: end.empty().zero_())
        own = on_all(cluster, lambda end: end.empty().zero_())

        def work(end: Rank) -> None:
            sent = end.dispatch()
            for rank, rows in ((end.rank, others[end.rank]), (1 - end.rank, own[1 - end.rank])):
                call = functools.partial(end.combine, rows, sent)
                refused_rows(call, f"other windows: those of rank {rank} of another group")
            end.combine(own[end.rank], sent)

        on_all(cluster, work)


@on_every_rank
def test_rows_that_begin_inside_a_block(end: Rank) -> None:
    sent = end.dispatch()
    flat = end.empty(MOST + 1).view(-1)[: MOST * HIDDEN + 8]
    flat.fill_(end.rank + 1)
    askew = flat[1 : 1 + MOST * HIDDEN].view(MOST, HIDDEN)
    refused_rows(lambda: end.combine(askew, sent), "begins inside a 32-byte block .* multiple of 32 bytes")
    assert (end.combine(flat[8:].view(MOST, HIDDEN), sent) == 3).all()


# ---- forks


@on_every_rank
def test_a_forked_child_gives_nothing_back(end: Rank) -> None:
    rows = end.empty().fill_(1)
    place = rows.data_ptr()
    if end.rank == 0:
        child = os.fork()
        if child == 0:
            good = bool((rows == 1).all())
            del rows
            gc.collect()
            os._exit(0 if good else 1)
        assert os.waitpid(child, 0)[1] == 0
    other = end.empty()
    assert other.data_ptr() != place and (rows == 1).all()
    sent = end.dispatch()
    end.combine(rows, sent)


# ---- lives of windows


def mapped(address: int) -> bool:
    with open("/proc/self/maps") as file:
        ranges = [re.split("[- ]", line, maxsplit=2)[:2] for line in file]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


def test_a_tensor_outlives_its_cluster() -> None:
    with comm.LocalCluster(WORLD, window_mib=1) as cluster:
        gone = cluster.run(lambda rank, group: take(rank, group, 8).data_ptr())
        assert all(map(mapped, gone))
        cluster.close()
        assert not any(map(mapped, gone)), "windows without tensors go at once"
        first, second = cluster.run(lambda rank, group: take(rank, group, 8).fill_(rank + 1))
    gc.collect()
    places = (first.data_ptr(), second.data_ptr())
    assert all(map(mapped, places)) and (first == 1).all() and (second == 2).all()
    del first
    assert not mapped(places[0]) and mapped(places[1])
    view = second[2:3].t()
    del second
    assert mapped(places[1]) and (view == 2).all()
    del view
    assert not mapped(places[1])


def test_closed_and_failed_communicators_have_no_buffers(cluster: comm.LocalCluster) -> None:
    ends = cluster.run(lambda rank, group: comm.lookup(group, WORLD, rank))
    ends[0].failed = AscendMoeError("it failed")
    with pytest.raises(AscendMoeError, match="it failed"):
        on_rank_0(cluster, lambda group: take(0, group, 1))
    ends[1].close()
    with pytest.raises(AscendMoeError, match="closed"):
        ends[1].register(32)


def test_threads_take_and_drop_at_once(cluster: comm.LocalCluster) -> None:
    """The ends of tensors come from any thread."""

    def churn(rank: int, group: str, seed: int) -> bool:
        dice = random.Random(seed)
        mine: list[torch.Tensor] = []
        sound = True
        for _ in range(300):
            mine.append(take(rank, group, dice.randrange(1, 12)).fill_(seed))
            if len(mine) > 4:
                sound &= bool((mine.pop(dice.randrange(len(mine))) == seed).all())
        return sound

    def work(rank: int, group: str) -> list[bool]:
        comm.lookup(group, WORLD, rank)
        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(lambda seed: churn(rank, group, seed), range(3)))

    assert cluster.run(work) == [[True] * 3] * 2


# ---- fatal errors, whose tracebacks have the calls' variables


def has_ones(address: int) -> bool:
    """Whether the rows that a window had there are mapped; other memory of the process may have their address."""
    with open("/proc/self/mem", "rb", buffering=0) as memory, contextlib.suppress(OSError):
        memory.seek(address)
        return memory.read(16) == torch.ones(4).numpy().tobytes()
    return False


def lose_a_rank(rank: int, group: str, seed: int, held: list[BaseException], places: list[int]) -> None:
    """Rank 0 keeps the error of a call that sends from its window, and nothing else; rank 1 ends."""
    dice = random.Random(seed)
    place = {"group_ep": group, "ep_world_size": WORLD, "ep_rank_id": rank, "moe_expert_num": 2}
    ids = torch.tensor([[0, 1]] * 3, dtype=torch.int32)
    sent = ascend_moe.npu_moe_distribute_dispatch_v2(torch.ones(3, 64), ids, **place)
    if rank == 1:
        return comm.close(group)
    depth, again, started = dice.randrange(3), dice.randrange(3), dice.random() < 0.3

    spare = [empty(group, (6, 64)).fill_(1) for _ in range((1 + again) * (1 + depth))]  # none is made after the loss
    places += [each.data_ptr() for each in spare]

    def call(left: int) -> None:
        own = spare.pop()  # of a frame that has ended, too
        if left:
            return call(left - 1)
        arguments = (own, ids, sent[2], sent[4], torch.ones(3, 2))
        if started:
            return ascend_moe.begin_combine(*arguments, **place, comm_alg="direct").finish()
        return ascend_moe.npu_moe_distribute_combine_v2(*arguments, **place, comm_alg="direct")

    for _ in range(1 + again):
        try:
            call(depth)
        except PeerLost as error:
            held.append(error)
    assert len(held) == 1 + again and all(map(has_ones, places))


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 600), marks=pytest.mark.nightly)])
def test_a_held_error_keeps_no_window_that_was_closed(seeds: range) -> None:
    gc.disable()  # nothing may wait for it
    try:
        for seed in seeds:
            held: list[BaseException] = []
            places: list[int] = []
            with comm.LocalCluster(WORLD, window_mib=1) as cluster:
                cluster.run(lose_a_rank, seed, held, places)
            assert places and not any(map(has_ones, places)), seed
            assert all(error.__traceback__ is not None and "is lost" in str(error) for error in held), seed
    finally:
        gc.enable()


def test_a_generator_that_has_caught_the_error_goes_on() -> None:
    end = GroupCommunicator()

    def steps() -> Iterator[str]:
        try:
            raise PeerLost("rank 1 is lost")
        except PeerLost as error:
            end._failed = error
        yield "caught"
        yield "went on"

    made = steps()
    assert next(made) == "caught"
    end.clear_tracebacks()
    assert next(made) == "went on"
