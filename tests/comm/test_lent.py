"""The lent area: blocks, their states, and how long a window stays mapped."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from window_library import install

import ascend_moe
from ascend_moe import comm
from ascend_moe.comm.communicator import MIB, window_lent_bytes
from ascend_moe.errors import ArgumentError, AscendMoeError, WindowTooSmall
from ascend_moe.native import library as _lib

WORLD = 2


@pytest.fixture
def cluster() -> Iterator[comm.LocalCluster]:
    with comm.LocalCluster(WORLD, window_mib=1) as one:
        yield one


def take(rank: int, group: str, rows: int, hidden: int = 512, dtype: torch.dtype = torch.float32) -> Any:
    return ascend_moe.window_empty(
        (rows, hidden), dtype=dtype, group_ep=group, ep_world_size=WORLD, ep_rank_id=rank
    )


def on_rank_0(cluster: comm.LocalCluster, work: Any) -> Any:
    return cluster.run(lambda rank, group: work(group) if rank == 0 else None)[0]


# ---- the setting


@pytest.mark.parametrize("bad", ["-1", "0.5", "65536", "many", "1_0", "\u0664"])
def test_the_variable_is_checked(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_LENT_MIB", bad)
    with pytest.raises(ArgumentError, match=r"ASCEND_MOE_LENT_MIB=.* whole number of MiB in 0\.\.65535"):
        window_lent_bytes(MIB)


def test_the_default_is_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    assert window_lent_bytes(3 * MIB) == 3 * MIB
    monkeypatch.setenv("ASCEND_MOE_LENT_MIB", " 7 ")
    assert window_lent_bytes(3 * MIB) == 7 * MIB
    with comm.LocalCluster(1, window_mib=2) as cluster:
        ends = cluster.run(lambda rank, group: comm.lookup(group, 1, rank))
        assert (ends[0].data_bytes, ends[0].lent_bytes) == (2 * MIB, 7 * MIB)


def test_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_LENT_MIB", "0")
    with comm.LocalCluster(WORLD, window_mib=1) as cluster, pytest.raises(WindowTooSmall) as raised:
        on_rank_0(cluster, lambda group: take(0, group, 4))
    assert (raised.value.needed_mib, raised.value.variable) == (1, "ASCEND_MOE_LENT_MIB")
    assert "ASCEND_MOE_LENT_MIB=0 leaves no lent area" in str(raised.value)


# ---- tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 7), (0, 64), (5,), 9, (2, 0, 4), (2, 3, 4), torch.Size([4, 8]), ()])
def test_shapes_and_types(cluster: comm.LocalCluster, dtype: torch.dtype, shape: Any) -> None:
    def work(group: str) -> torch.Tensor:
        return ascend_moe.window_empty(shape, dtype=dtype, group_ep=group, ep_world_size=WORLD, ep_rank_id=0)

    made = on_rank_0(cluster, work)
    want = torch.empty(shape, dtype=dtype)
    assert (made.shape, made.dtype, made.device, made.is_contiguous()) == (
        want.shape, want.dtype, want.device, True
    )  # fmt: skip
    assert made.data_ptr() % 512 == 0 and not made.requires_grad
    made.fill_(3)
    assert (made == 3).all()


@pytest.mark.parametrize(
    ("argument", "shape", "dtype"),
    [
        ("shape", (-1, 4), torch.float32),
        ("shape", (2, 1.5), torch.float32),
        ("shape", (True, 4), torch.float32),
        ("dtype", (2, 4), torch.int8),
        ("dtype", (2, 4), torch.float64),
    ],
)
def test_arguments(cluster: comm.LocalCluster, argument: str, shape: Any, dtype: torch.dtype) -> None:
    def work(group: str) -> None:
        ascend_moe.window_empty(shape, dtype=dtype, group_ep=group, ep_world_size=WORLD, ep_rank_id=0)

    with pytest.raises(ArgumentError, match="window_empty: ") as raised:
        on_rank_0(cluster, work)
    assert raised.value.argument == argument


def test_group_arguments_are_those_of_the_ops(cluster: comm.LocalCluster) -> None:
    rules = [
        ("nobody", 2, 0, "group_ep"),
        (cluster.name, 3, 0, "ep_world_size"),
        (cluster.name, 2, 1, "ep_rank_id"),
    ]

    def work(group: str) -> list[str]:
        found = []
        for name, world, rank, _ in rules:
            with pytest.raises(ArgumentError) as raised:
                ascend_moe.window_empty(
                    (1, 1), dtype=torch.float32, group_ep=name, ep_world_size=world, ep_rank_id=rank
                )
            found.append(raised.value.argument)
        return found

    assert on_rank_0(cluster, work) == [rule[3] for rule in rules]


def test_blocks_do_not_overlap_and_lie_in_the_area(cluster: comm.LocalCluster) -> None:
    def work(rank: int, group: str) -> list[tuple[int, int]]:
        tensors = [take(rank, group, rows, 33) for rows in (1, 7, 100, 3, 250)]
        for number, tensor in enumerate(tensors):
            tensor.fill_(number)
        assert [int(t.unique()) for t in tensors] == [0, 1, 2, 3, 4]
        return [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors]

    for places in cluster.run(work):
        places.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(places))
        assert places[-1][1] - places[0][0] <= MIB


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


def test_many_lives_do_not_wear_the_area_out(cluster: comm.LocalCluster) -> None:
    def work(rank: int, group: str) -> int:
        places = set()
        for number in range(2000):
            tensor = take(rank, group, 1 + number % 17)
            places.add(tensor.data_ptr())
        return max(places) - min(places)

    # The next is taken while the last is still there: two of at most 34 KiB each, and what lies between.
    assert max(cluster.run(work)) < 128 * 1024


def test_no_room(cluster: comm.LocalCluster) -> None:
    def work(group: str) -> None:
        kept = [take(0, group, 256) for _ in range(2)]  # 512 KiB each: all of it
        with pytest.raises(WindowTooSmall, match="2 window tensors hold space") as raised:
            take(0, group, 1)
        error = raised.value
        assert (error.needed_mib, error.held, error.variable) == (2, 2, "ASCEND_MOE_LENT_MIB")
        assert "export ASCEND_MOE_LENT_MIB=2 on all ranks" in str(error) and "1 MiB" in str(error)
        kept.pop()
        with pytest.raises(WindowTooSmall, match="1 window tensor holds space") as raised:
            take(0, group, 1024)
        assert raised.value.needed_mib == 3
        take(0, group, 256)

    on_rank_0(cluster, work)


def test_what_the_message_asks_for_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [700, 3, 1200, 90]

    def work(rank: int, group: str) -> list[torch.Tensor]:
        return [take(rank, group, rows) for rows in sizes]

    monkeypatch.setenv("ASCEND_MOE_LENT_MIB", "1")
    for _ in range(5):
        try:
            with comm.LocalCluster(WORLD, window_mib=1) as cluster:
                assert len(cluster.run(work)[0]) == 4
            break
        except WindowTooSmall as error:
            monkeypatch.setenv("ASCEND_MOE_LENT_MIB", str(error.needed_mib))
    assert os.environ["ASCEND_MOE_LENT_MIB"] == "4"  # 1993 rows of 2 KiB


# ---- lives of windows


def mapped(address: int) -> bool:
    with open("/proc/self/maps") as file:
        ranges = [re.split("[- ]", line, maxsplit=2)[:2] for line in file]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


def test_a_tensor_outlives_its_cluster() -> None:
    with comm.LocalCluster(WORLD, window_mib=1) as cluster:
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


def test_windows_without_tensors_go_at_once() -> None:
    with comm.LocalCluster(WORLD, window_mib=1) as cluster:
        places = cluster.run(lambda rank, group: take(rank, group, 8).data_ptr())
        assert all(map(mapped, places))
    assert not any(map(mapped, places))


def test_closed_by_its_own_rank_while_the_others_go_on(cluster: comm.LocalCluster) -> None:
    def work(rank: int, group: str) -> Any:
        tensor = take(rank, group, 8).fill_(rank)
        if rank == 0:
            comm.close(group)
        assert (tensor == rank).all()
        return tensor

    tensors = cluster.run(work)
    places = [tensor.data_ptr() for tensor in tensors]
    assert all(map(mapped, places))
    cluster.close()
    assert all(map(mapped, places))
    tensors.clear()
    assert not any(map(mapped, places))


def test_taking_from_closed_ends_raises(cluster: comm.LocalCluster) -> None:
    end = cluster.run(lambda rank, group: comm.lookup(group, WORLD, rank))[0]
    end.close()
    with pytest.raises(AscendMoeError, match="closed"):
        end.lend(32)


def test_failed_communicators_lend_nothing(cluster: comm.LocalCluster) -> None:
    def work(group: str) -> None:
        comm.lookup(group, WORLD, 0).failed = AscendMoeError("it failed")
        take(0, group, 1)

    with pytest.raises(AscendMoeError, match="it failed"):
        on_rank_0(cluster, work)


def test_accounts_of_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every window is unmapped once, and none under a communicator."""
    library = install(monkeypatch)
    kept = []
    with comm.LocalCluster(3, window_mib=1) as cluster:
        for round_number in range(3):
            kept += cluster.run(
                lambda rank, group: [
                    ascend_moe.window_empty(
                        (2, 8), dtype=torch.float32, group_ep=group, ep_world_size=3, ep_rank_id=rank
                    )
                    for _ in range(rank)
                ]
            )
            cluster.close()
            assert len(library.mapped) == 2 * (round_number + 1)  # rank 0 took none
        kept.clear()
        assert not library.mapped and not library.comms


def test_threads_take_and_drop_at_once(cluster: comm.LocalCluster) -> None:
    """The ends of tensors come from any thread."""

    def churn(rank: int, group: str, seed: int, wrong: list[str]) -> None:
        generator = torch.Generator().manual_seed(seed)
        mine: list[torch.Tensor] = []
        for _ in range(300):
            rows = int(torch.randint(1, 12, (1,), generator=generator))
            mine.append(take(rank, group, rows).fill_(seed))
            if len(mine) > 4:
                tensor = mine.pop(int(torch.randint(0, len(mine), (1,), generator=generator)))
                if not (tensor == seed).all():
                    wrong.append("overwritten")

    def work(rank: int, group: str) -> list[str]:
        wrong: list[str] = []
        comm.lookup(group, WORLD, rank)
        threads = [threading.Thread(target=churn, args=(rank, group, seed, wrong)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return wrong

    assert cluster.run(work) == [[], []]


# ---- the native allocator


class Area:
    """The lent area of a communicator without any Python around it."""

    def __init__(self, lent: int = MIB) -> None:
        library = _lib.lib()
        self.total = library.am_window_total_bytes(MIB, lent)
        self.base = library.am_window_alloc(self.total)
        table = (ctypes.c_void_p * 1)(self.base)
        self.comm = library.am_comm_create(0, 1, table, MIB, lent, None)
        self.handle = library.am_comm_lent(self.comm)

    def take(self, size: int) -> tuple[int, int] | None:
        out = (ctypes.c_uint64 * 4)()
        code = _lib.lib().am_lent_take(self.handle, size, out)
        return None if code else (out[0], out[1])


def test_generations_and_ends() -> None:
    library, area = _lib.lib(), Area()
    first, second = area.take(100), area.take(100)
    assert first and second and second[1] == first[1] + 1 and second[0] == first[0] + 512
    assert library.am_comm_lent(area.comm) != area.handle  # a handle of its own
    assert library.am_lent_release(area.handle, first[1]) == 0
    assert library.am_lent_release(area.handle, first[1]) == 0  # again: nothing is there
    third = area.take(1)
    assert third == (first[0], second[1] + 1)
    library.am_comm_destroy(area.comm)
    assert library.am_lent_close(area.handle) == 0
    assert library.am_lent_release(area.handle, third[1]) == 0
    assert library.am_lent_release(area.handle, second[1]) == 1
    library.am_window_unmap(area.base, area.total)


def test_shapes_beyond_any_memory(cluster: comm.LocalCluster) -> None:
    for rows in (2**40, 2**61, 2**80):
        with pytest.raises(WindowTooSmall):
            on_rank_0(cluster, lambda group, rows=rows: take(0, group, rows))


@pytest.mark.parametrize("size", [2**64 - 1, 2**63, MIB + 1])
def test_sizes_beyond_any_area(size: int) -> None:
    library, area = _lib.lib(), Area()
    assert area.take(size) is None and area.take(MIB) is not None
    library.am_comm_destroy(area.comm)
    library.am_window_unmap(area.base, area.total)


def test_an_area_of_nothing() -> None:
    area = Area(lent=0)
    assert not area.handle
    _lib.lib().am_comm_destroy(area.comm)
    _lib.lib().am_window_unmap(area.base, area.total)
