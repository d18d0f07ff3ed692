"""Kernels as an Ascend engineer writes them, run unmodified: against numpy, in windows.

Many schedules of them: sound ones stay clean, one missing line is found and shown again.
"""

from __future__ import annotations

import contextlib
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from third_party_runs import HALF, Swap, engines, kernels, modes, tiling

import ascendc_twin
from ascendc_twin.arguments import Arguments
from ascendc_twin.entries import Entry, Parameter, entry_of, line_of
from ascendc_twin.errors import ArgumentError, TwinFault


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@engines
@pytest.mark.parametrize("length,cores", [(2048, 8), (1003, 5), (7, 3), (40, 48)])
def test_a_kernel_adds(mode: str, length: int, cores: int) -> None:
    x, y = (rng(length + i).standard_normal(length).astype(np.float16) for i in range(2))
    z = np.full(length, 9, np.float16)
    add = kernels("add_custom", HALF)
    add.launch("add_custom", [x, y, z], tiling(length, 128), cores, 1, workspace_bytes=0, mode=mode)
    assert np.array_equal(z, x + y)


@engines
def test_add_of_torch_tensors_in_place(mode: str) -> None:
    """A tiling key that the kernel does not have runs nothing."""
    x = torch.randn(96, generator=torch.Generator().manual_seed(3)).half()
    want, sizes = x + x, torch.tensor([96, 32], dtype=torch.int32)
    for key in (1, 1002):
        kernels("add_custom", HALF).launch("add_custom", [x, x, x, None], sizes, 2, key, mode=mode)
        assert torch.equal(x, want)


@engines
@pytest.mark.parametrize("cores", [1, 6])
def test_prefix_sum_over_soft_sync_all_and_atomic_add(mode: str, cores: int) -> None:
    x = rng(9).integers(-50, 50, cores * 24).astype(np.int32)
    args = [x, np.zeros_like(x), np.zeros(8, np.int32)]
    kernels("prefix_sum").launch("prefix_sum", args, tiling(24), cores, workspace_bytes=cores * 64, mode=mode)
    assert np.array_equal(args[1], np.cumsum(x)) and (args[2] == x.sum()).all()


# ---- windows: communication contexts as kernels read them, two groups ----

Words = NDArray[np.uint64]


def show(groups: object, worlds: tuple[int, int], a3: tuple[int, int], ranks: int) -> list[list[Words]]:
    outs = [[np.zeros(8 + 5 * world, np.uint64) for world in worlds] for _ in range(ranks)]
    kernels("show_contexts").launch("show_contexts", outs, tiling(*worlds, *a3), 1, 0, groups)
    return outs


def address(area: NDArray[np.uint8]) -> int:
    return int(area.ctypes.data)


@pytest.mark.parametrize("layout,world,table", [("a3", 5, 2984), ("a3", 3, 3320), ("a2", 2, 2984), ("a2", 33, 2984)])
def test_a_kernel_sees_its_context(layout: str, world: int, table: int) -> None:
    windows = ascendc_twin.Windows(world, data_bytes=8192, state_bytes=4096, name="ep", layout=layout, peer_table=table)
    for rank, (words, none) in enumerate(show(windows, (world, 1), (int(layout == "a3"), 1), world)):
        details = [4096, table, ord("e")] if layout == "a3" else [int(world > 32), 2, world]
        assert list(words[:8]) == [rank, world, rank, world, 8192, *details]
        third = windows.state if layout == "a3" else lambda r, own=rank: windows.data(own)
        want = [[address(f(r)) for f in (windows.data, windows.out, third)] for r in range(world)]
        assert words[8 : 8 + 3 * world].reshape(world, 3).tolist() == want
        through_hccl = words[8 + 3 * world :].reshape(world, 2).tolist()
        assert through_hccl == [row[:2] for row in want]
        assert none[0] == 2**64 - 1  # GetHcclContext<1> is null


def test_two_groups_of_four_ranks() -> None:
    """Ranks 0..3 are one EP group of 4 and two TP groups of 2, and a pair of groups."""
    ep = ascendc_twin.Windows(4, data_bytes=4096)
    tp = [ascendc_twin.Windows(2, data_bytes=4096, layout="a2") for _ in range(2)]
    groups = [(ep.member(r), tp[r // 2].member(r % 2)) for r in range(4)]
    for rank, (first, second) in enumerate(show(groups, (4, 2), (1, 0), 4)):
        assert list(first[:2]) == [rank, 4]
        assert list(second[:2]) == [rank % 2, 2]
        assert second[8] == address(tp[rank // 2].data(0))
    pair = (ascendc_twin.Windows(2, data_bytes=4096), ascendc_twin.Windows(2, data_bytes=4096))
    for rank, (first, second) in enumerate(show(pair, (2, 2), (1, 1), 2)):
        assert first[0] == second[0] == rank
        assert first[8] == address(pair[0].data(0)) and second[8] == address(pair[1].data(0))


# ---- BatchWrite ----


def exchange(
    mode: str,
    world: int,
    rows: int,
    cores: int,
    *defines: str,
    window: int = 1 << 16,
    finalize: int = 1,
    wait_s: float = 20,
    times: int = 1,
    **servers: Any,
) -> None:
    windows = ascendc_twin.Windows(world, data_bytes=window, layout="a2", **servers)
    for step in range(4):
        swap = Swap(world, rows, 16, np.int32, step)
        call = (swap.args, bytes(64 + 280) + tiling(rows, 16, step % 2, finalize), cores, 0, windows)
        kernel = kernels("all2all_batch_write", *defines, f"TIMES={times}")
        kernel.launch("all2all_batch_write", *call, workspace_bytes=world * times * 32, mode=mode, timeout_s=wait_s)
        swap.check()
        assert not any((windows.data(r)[-64:]).any() for r in range(world))


@engines
@pytest.mark.parametrize("world,rows,cores", [(2, 3, 2), (4, 5, 3), (1, 2, 1)])
def test_batch_write_delivers_rows(mode: str, world: int, rows: int, cores: int) -> None:
    exchange(mode, world, rows, cores)


def test_batch_write_without_finalize_is_delivered() -> None:
    exchange("fast", 2, 20, 2, finalize=0)


def test_a_list_that_nobody_commits_does_not_leave() -> None:
    with pytest.raises(TwinFault, match=r"hang: nothing has moved for 1.0 s: rank \d core 0 polls"):
        exchange("fast", 2, 3, 1, "COMMIT=false", wait_s=1)


@pytest.mark.nightly
def test_batch_write_past_the_window_is_found() -> None:
    said = r"BatchWrite item 0: 732 bytes that do not lie in windowsIn of rank 0"
    with pytest.raises(TwinFault, match=said):
        exchange("fast", 2, 3, 1, "MORE_BYTES=508", window=512)


RDMA = r"load or store of 32 bytes in the \"windowsIn of rank \d\" of rank \d: HCCL has linked that rank by RDMA"
MEMORY = r"BatchWrite to the \"windowsIn of rank \d\" of rank \d: HCCL has linked that rank by memory"


@engines
@pytest.mark.parametrize(
    ("links", "share", "stores", "finding"),
    [
        ("rdma", 2, False, ""),
        ("stores", 1, False, ""),
        ("stores", 4, True, ""),  # one server: both reach every rank
        ("stores", 2, True, MEMORY),
        ("rdma", 2, True, RDMA),
        ("stores", 1, True, RDMA),
    ],
)
def test_servers_are_linked_as_hccl_links_them(mode: str, links: str, share: int, stores: bool, finding: str) -> None:
    """Items to all ranks, and a store to a neighbour."""
    with pytest.raises(TwinFault, match=finding) if finding else contextlib.nullcontext():
        exchange(mode, 4, 2, 2, *(["STORES=1"] if stores else []), ranks_per_server=share, links=links)


def test_batch_write_of_more_than_255_items_is_found() -> None:
    """HCCL's server counts those for other ranks in 8 bits, on A2."""
    with pytest.raises(TwinFault, match="BatchWrite of 256 items to other ranks: HCCL's server counts them in 8 bits"):
        exchange("fast", 2, 1, 1, times=256)


# ---- flags inside the data ----


@engines
@pytest.mark.parametrize("world,rows,chunks,cores", [(2, 3, 3, 4), (4, 2, 1, 3), (4, 30, 2, 48)])
def test_chunks_that_carry_their_flag(mode: str, world: int, rows: int, chunks: int, cores: int) -> None:
    windows = ascendc_twin.Windows(world, data_bytes=1 << 17, flags_in_data=True)
    for step in range(3):
        swap = Swap(world, rows, chunks * 480, np.uint8, step)
        call = (swap.args, swap.chunk_tilings(step + 1), cores, 0, windows)
        kernels("chunk_exchange").launch("chunk_exchange", *call, mode=mode, timeout_s=20)
        swap.check()


@modes
def test_ranks_launched_by_threads_of_the_caller(mode: str) -> None:
    swap, windows = Swap(2, 3, 960, np.uint8), ascendc_twin.Windows(2, data_bytes=1 << 16, flags_in_data=True)
    exchange = kernels("chunk_exchange")

    def launch(rank: int) -> None:
        call = (swap.args[rank], swap.chunk_tilings()[rank], 2, 0, windows)
        exchange.launch("chunk_exchange", *call, rank=rank, mode=mode, timeout_s=20)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(launch, range(2)))
    swap.check()


@modes
def test_a_rank_that_is_never_launched_is_waited_for_no_longer_than_the_deadline(mode: str) -> None:
    swap, windows = Swap(2, 3, 960, np.uint8), ascendc_twin.Windows(2, data_bytes=1 << 16, flags_in_data=True)
    exchange = kernels("chunk_exchange")
    exchange.launch("chunk_exchange", swap.args, swap.chunk_tilings(), 2, 0, windows, mode=mode, timeout_s=20)
    call, began = (swap.args[1], swap.chunk_tilings(2)[1], 2, 0, windows), time.monotonic()
    with pytest.raises(TwinFault, match=r"hang: .*rank 1 core 0 polls"):
        exchange.launch("chunk_exchange", *call, rank=1, mode=mode, timeout_s=0.3)
    assert time.monotonic() - began < 30


# ---- polls that nobody declared ----


@engines
@pytest.mark.parametrize("key", range(3), ids=["flag", "scalar word", "heartbeat"])
def test_waits_within_a_rank(mode: str, key: int) -> None:
    cores = 4
    workspace, seen = np.zeros((cores, 8 + 16), np.int32), np.zeros((cores, 8), np.int32)
    kernels("poll_flags").launch("poll_flags", [seen, workspace], None, cores, key, mode=mode, timeout_s=20)
    flags, words = np.split(workspace.ravel(), [cores * 8])
    assert (flags == 1).all() and (words[::16] == 1).all()
    assert (seen[:-1, 0] > 0).all() == (key == 2)


@engines
@pytest.mark.parametrize("key", range(3), ids=["flag", "scalar word", "heartbeat"])
def test_a_wait_for_nobody_is_a_hang(mode: str, key: int) -> None:
    """Every core waits for the next, and none tells first."""
    seen = np.zeros((3, 8), np.int32)
    call = ([seen], None, 3, key + 10)
    with pytest.raises(TwinFault, match="hang") as caught:
        kernels("poll_flags").launch("poll_flags", *call, mode=mode, timeout_s=0.5, workspace_bytes=288)
    assert caught.value.finding == "hang"


# ---- rules that kernels in use break, pointers of their own ----

X = np.arange(48, dtype=np.float32)
# By tiling key: what the twin says, of which kind, and what y begins with when the launch only lists it. Of rules that
# rule_kernels.cpp breaks, one of each kind of call.
HABITS: dict[int, tuple[str, str, list[float]]] = {
    0: ("DataCopy GM->UB of 0 bytes", "illegal argument", []),
    2: ("Sum: destination and source overlap", "illegal argument", [X[:24].sum(), X[24:].sum()]),
    3: (
        "Sum: inner 12 must be a multiple of 32 bytes",
        "illegal argument",
        [X[12 * r : 12 * r + 12].sum() for r in range(4)],
    ),
    4: ("Duplicate needs 96 bytes, the UB view holds 64", "out of bounds", []),
    6: ("InitBuffer of 0 bytes: a core without a share makes no buffer", "illegal argument", []),
    20: (r"LocalTensor\[17\] starts past its 16 elements", "out of bounds", []),
    22: (r"DataCopy GM->UB of 64 bytes, the GlobalTensor of .arg 0 \(x\). holds 32", "out of bounds", list(X[32:])),
    23: ("1 queue tensors were never freed", "queue discipline", []),
    24: ("mask 0 is outside 1..64: the call does nothing", "illegal argument", []),
}


ALLOWED = (0, 6, 23, 24)  # no document forbids them: warnings in any case


@engines
@pytest.mark.parametrize("key", HABITS)
def test_habits_are_findings_or_warnings(mode: str, key: int) -> None:
    text, finding, want = HABITS[key]
    x, y = X.copy(), np.zeros(48, np.float32)
    if key in ALLOWED:
        strict = kernels("habits").launch("habits", [x, y], None, 2, key, mode=mode)
        assert len(strict.warnings) == 1 and re.match(f"{finding}: {text}", strict.warnings[0]), strict.warnings
    else:
        with pytest.raises(TwinFault, match=rf"{text}.*, at \S+:\d+ \[.+\.md: ") as caught:
            kernels("habits").launch("habits", [x, y], None, 1, key, mode=mode)
        assert caught.value.finding == finding
    done = kernels("habits").launch("habits", [x, y], None, 2, key, mode=mode, warn=True)
    assert len(done.warnings) == 1 and re.match(f"{finding}: {text}", done.warnings[0]), done.warnings
    assert y[: len(want)].tolist() == want


def test_an_atomic_store_only_reads_its_source() -> None:
    """So the vector unit may read that row at the same time."""
    found = kernels("habits").explore("habits", [X.copy(), np.ones(48, np.float32)], None, 1, 7, schedules=20)
    assert found.ok, found.text


@engines
@pytest.mark.parametrize("seed", range(24))
def test_drawn_overlaps_are_made_repeat_by_repeat(mode: str, seed: int) -> None:
    """A count form, a comparison, a mask form, and a count form whose destination lies before its source."""
    draw = rng(seed)
    call, apart = seed % 4, 8 * int(draw.integers(0, 24))
    count = (
        int(draw.integers(1, 256 - apart + 1))
        if call in (0, 3)
        else 64 * int(draw.integers(0, (256 - apart) // 64 + 1))
    )
    x, y = draw.standard_normal(256).astype(np.float32), np.zeros(256, np.float32)
    want = x.copy()
    for begin in range(0, count, 64):
        part = slice(begin, min(begin + 64, count))
        shifted = slice(part.start + apart, part.stop + apart)
        if call == 1:
            bits = np.packbits(want[part] > 0, bitorder="little")
            want.view(np.uint8)[4 * apart + begin // 8 :][: bits.size] = bits
        else:
            to, source = (part, shifted) if call == 3 else (shifted, part)
            want[to] = want[source].copy() + 1
    key = 1 << 32 | call << 24 | apart // 8 << 12 | count
    done = kernels("habits").launch("habits", [x, y], None, 1, key, mode=mode, warn=True)
    assert np.array_equal(y, want, equal_nan=True)
    assert (len(done.warnings) > 0) == (0 < apart < count), done.warnings
    forbidden = bool(done.warnings) and call != 1  # no document forbids it of a comparison over a count
    with pytest.raises(TwinFault, match=r"overlap in part|has written") if forbidden else contextlib.nullcontext():
        kernels("habits").launch("habits", [x, y], None, 1, key, mode=mode)


def test_warnings_of_all_ranks_and_schedules_are_listed() -> None:
    args = [[np.zeros(48, np.float32), np.zeros(48, np.float32)] for _ in range(3)]
    call = (args, None, 1, 4, ascendc_twin.Windows(3, data_bytes=4096))
    done = kernels("habits").launch("habits", *call, warn=True)
    result = kernels("habits").explore("habits", *call, schedules=5, warn=True)
    assert result.ok and done.warnings == result.warnings and len(done.warnings) == 1


@engines
@pytest.mark.parametrize("key,address", [(10, "0x10"), (12, "no address")])
@pytest.mark.parametrize("world", [1, 2])
def test_a_pointer_into_nowhere_is_a_finding(mode: str, key: int, address: str, world: int) -> None:
    args = [[np.zeros(48, np.float32), np.zeros(48, np.float32)] for _ in range(world)]
    call = (args, None, 3, key, ascendc_twin.Windows(2, data_bytes=4096)) if world == 2 else (args[0], None, 3, key)
    for _ in range(2):  # the process and the library live on
        with pytest.raises(TwinFault, match=f"a pointer of the kernel leads to {address}") as caught:
            kernels("habits").launch("habits", *call, mode=mode)
        assert caught.value.finding == "out of bounds" and "at habits.cpp:" in str(caught.value)
    kernels("habits").launch("habits", args[0], None, 1, 99, mode=mode)


# ---- what does not fit ----


def test_wrong_windows_are_refused() -> None:
    with pytest.raises(ArgumentError, match="layout is a3 or a2"):
        ascendc_twin.Windows(2, layout="a5")
    with pytest.raises(ArgumentError, match="peer_table is 2984 or 3320, not 2992"):
        ascendc_twin.Windows(2, peer_table=2992)
    with pytest.raises(ArgumentError, match="at least 1 rank"):
        ascendc_twin.Windows(0)
    with pytest.raises(ArgumentError, match="rank is 2; the windows have 2 ranks"):
        ascendc_twin.Windows(2).member(2)


@pytest.mark.parametrize(("mangled", "bits"), [("j", 32), ("i", 32), ("h", 8), ("s", 16), ("l", 64), ("", 64)])
def test_an_integer_that_a_parameter_does_not_hold_is_refused(mangled: str, bits: int) -> None:
    def word(value: int) -> int:
        entry = entry_of(line_of(Entry("k", "", (Parameter("n", "integer", mangled),))))
        return Arguments("k", entry.parameters, [value], None, None, rank=0, stage=False).words[0]

    assert [word(7), word(2**bits - 1), word(-1)] == [7, 2**bits - 1, 2**64 - 1]
    for value in (2**bits, 2**bits + 3, -(2 ** (bits - 1)) - 1):
        with pytest.raises(ArgumentError, match="does not fit"):
            word(value)


def test_windows_are_cleared_and_restored() -> None:
    windows = ascendc_twin.Windows(2, data_bytes=10_000)
    data, out, state = views = windows.data(1), windows.out(0), windows.state(0)
    data[9_999], out[0], state[0] = 5, 7, 6
    for _ in range(2):  # the views stay those of the windows
        saved = windows.snapshot()
        windows.clear()
        assert not any(view.any() for view in views)
        windows.restore(saved)
        assert (data[9_999], out[0], state[0]) == (5, 7, 6)
    windows.clear()
    out[3] = 8
    windows.restore(windows.snapshot())
    assert windows.out(0)[3] == 8


# ---- many schedules ----


def test_every_schedule_begins_with_the_same_arguments() -> None:
    x = np.arange(96, dtype=np.float16)
    call = ([x, x, x, None], tiling(96, 16), 3, 1)
    found = kernels("add_custom", HALF).explore("add_custom", *call, schedules=40)
    assert found.ok and found.schedules == 40 and found.distinct > 1, found
    assert np.array_equal(x, 2 * np.arange(96))


def test_batch_write_may_take_its_time() -> None:
    """Two ranks of two cores swap rows."""
    swap, windows = Swap(2, 3, 16, np.int32), ascendc_twin.Windows(2, data_bytes=4096, layout="a2")
    call = (swap.args, bytes(64 + 280) + tiling(3, 16, 0, 1), 2, 0, windows)
    exchange = kernels("all2all_batch_write")
    options = {"schedules": 60, "workspace_bytes": 64, "check": swap.check}
    found = exchange.explore("all2all_batch_write", *call, **options)
    assert found.ok and found.distinct > 40, found


@pytest.mark.parametrize(
    "declared,unordered,finding",
    [(True, False, None), (True, True, "wrong result"), (False, False, "race between ranks")],
)
def test_flags_inside_longer_stores(declared: bool, unordered: bool, finding: str | None) -> None:
    """Sound only where a store lands in order, and known as flags only where the windows say so."""
    swap = Swap(2, 2, 960, np.uint8)
    windows = ascendc_twin.Windows(2, data_bytes=1 << 16, flags_in_data=declared)
    call = ("chunk_exchange", swap.args, swap.chunk_tilings(), 2, 0, windows)
    exchange = kernels("chunk_exchange")
    found = exchange.explore(*call, schedules=60, unordered=unordered, check=swap.check)
    assert found.finding == finding, found
    if not declared:
        assert found.text is not None and found.seed is not None and found.policy is not None
        with pytest.raises(TwinFault) as caught:  # shown again by its seed and policy
            exchange.launch(*call, mode="checked", seed=found.seed, policy=found.policy)
        assert str(caught.value) == found.text
        assert (caught.value.seed, caught.value.policy) == (found.seed, found.policy)


def test_a_wrong_result_is_a_finding() -> None:
    x = np.ones(32, np.float16)

    def never() -> None:
        raise AssertionError("x is not what it should be")

    call = ([x, x, x, None], tiling(32, 16), 2, 1)
    found = kernels("add_custom", HALF).explore("add_custom", *call, schedules=5, seed=3, check=never)
    assert (found.finding, found.schedules, found.seed) == ("wrong result", 1, 3)
    said = "add_custom: check: x is not what it should be [mode='checked', seed=3, policy='late']"
    assert found.text == said and str(found).endswith(said)


@engines
def test_queues_may_be_passed_by_value(mode: str) -> None:
    """As helper functions of kernels in use take them; their buffers are the same for each copy."""
    draw = random.Random(5)
    for _ in range(60):
        rows, buffers, by_value = draw.randrange(1, 24), draw.choices(range(1, 5), k=2), draw.randrange(4)
        x = np.arange(64 * rows, dtype=np.float32)
        y = np.zeros_like(x)
        kernels("habits").launch("queues_by_value", [x, y], tiling(rows, *buffers, by_value), mode=mode)
        assert np.array_equal(y, x + 1), (rows, buffers, by_value)
    # A copy begins its rotation where the queue stands: it frees one of 10 buffers and takes that one again.
    x, y = np.arange(64 * 12, dtype=np.float32), np.zeros(64 * 12, np.float32)
    for by_value in (1, 4):
        kernels("habits").launch("queues_by_value", [x, y], tiling(12, 10, 1, by_value), mode=mode)
    with pytest.raises(TwinFault, match="queues hold 9 event ids of V_MTE2, they may hold 8 of its 8"):
        kernels("habits").launch("queues_by_value", [x, y], tiling(12, 10, 1, 0), mode=mode)


@modes
def test_queues_of_depth_0_work_in_place(mode: str) -> None:
    """Each buffer has its event ids from InitBuffer on, and any tensor that is in the queue may be taken out."""
    x, y = np.arange(512, dtype=np.float32), np.zeros(512, np.float32)
    kernels("habits").launch("queues_in_place", [x, y], None, 1, 0, mode=mode)
    assert np.array_equal(y, x + 1)
    for key, said in [(1, "not in the queue: an NPU would hang"), (2, "queues hold 9 event ids of MTE2_V")]:
        with pytest.raises(TwinFault, match=said):
            kernels("habits").launch("queues_in_place", [x, y], None, 1, key, mode=mode)


def explored_block(met: bool, **options: Any) -> ascendc_twin.Exploration:
    x, y = np.arange(1, 9, dtype=np.float32), np.zeros(8, np.float32)
    call = ("left_block", [x, y], None, 2, int(met))
    return kernels("habits").explore(*call, schedules=60, workspace_bytes=32, **options)


def test_a_race_on_a_single_block_is_reported_with_both_lines() -> None:
    """Such a block counts as a flag, so the race shows as a wrong result; ``data`` makes it a finding of its own."""
    store, load = (
        r"MTE3 store at habits\.cpp:\d+ .*of (rank 0 )?core 0",
        r"MTE2 load at habits\.cpp:\d+ .*of (rank 0 )?core 1",
    )
    found = explored_block(False)
    assert found.finding == "wrong result" and found.text is not None
    assert re.search(r"arg 1 \(y\) of rank 0 differs from seed 0's, first at byte \d+; ", found.text)
    assert re.search(store, found.text) and re.search(load, found.text)
    assert 'are in no order; they touch the 32-byte block at byte 0 of "workspace"' in found.text
    assert "single 32-byte blocks into windows and workspaces count as flags" in found.text
    assert "data=['workspace']" in found.text
    as_data = explored_block(False, data=["workspace"])
    assert as_data.finding == "race between cores" and as_data.text is not None
    assert re.search(store, as_data.text) and re.search(load, as_data.text)
    assert explored_block(True).ok and explored_block(True, data="workspace").ok


def test_a_flag_that_cores_wait_for_is_not_reported_as_data() -> None:
    """Flags are accesses in no order too; a place that has looked in vain is a poll."""

    def never() -> None:
        raise AssertionError("no")

    x = rng(9).integers(-50, 50, 72).astype(np.int32)
    args = [x, np.zeros_like(x), np.zeros(8, np.int32)]
    call = ("prefix_sum", args, tiling(24), 3)
    polled = kernels("prefix_sum").explore(*call, schedules=1, workspace_bytes=192, check=never)
    assert polled.text is not None and "check: no" in polled.text and "flags" not in polled.text
    for names, there in ((["y"], "workspace"), (["windowsIn"], "workspace")):
        with pytest.raises(
            ArgumentError, match=f"data names '{names[0]}'; windows and workspaces .*: {there}"
        ) as caught:
            explored_block(True, data=names)
        assert caught.value.argument == "data"
