"""Communication contexts as kernels read them, two groups, BatchWrite beside the cores, undeclared polls."""

from __future__ import annotations

import numpy as np
import pytest
from foreign_runs import HALF, kernels, modes, tiling
from numpy.typing import NDArray

from ascend_moe import twin
from ascend_moe.errors import ArgumentError, TwinFault

Words = NDArray[np.uint64]


def show(groups: object, worlds: tuple[int, int], a3: tuple[int, int], ranks: int) -> list[list[Words]]:
    outs = [[np.zeros(8 + 5 * world, np.uint64) for world in worlds] for _ in range(ranks)]
    kernels("show_contexts", HALF).launch("show_contexts", outs, tiling(*worlds, *a3), 1, 0, groups)
    return outs


def address(area: NDArray[np.uint8]) -> int:
    return int(area.ctypes.data)


@pytest.mark.parametrize("layout,world", [("a3", 5), ("a2", 2), ("a2", 33)])
def test_context(layout: str, world: int) -> None:
    windows = twin.Windows(world, data_bytes=8192, state_bytes=4096, name="ep", layout=layout)
    for rank, (words, none) in enumerate(show(windows, (world, 1), (int(layout == "a3"), 1), world)):
        details = [4096, 1, ord("e")] if layout == "a3" else [int(world > 32), 2, world]
        assert list(words[:8]) == [rank, world, rank, world, 8192, *details]
        third = windows.state if layout == "a3" else lambda r, own=rank: windows.data(own)
        want = [[address(f(r)) for f in (windows.data, windows.out, third)] for r in range(world)]
        assert words[8 : 8 + 3 * world].reshape(world, 3).tolist() == want
        through_hccl = words[8 + 3 * world :].reshape(world, 2).tolist()
        assert through_hccl == [row[:2] for row in want]
        assert none[0] == 2**64 - 1  # GetHcclContext<1> is null


def test_two_groups_of_four_ranks() -> None:
    """Ranks 0..3 are one EP group of 4 and two TP groups of 2."""
    ep = twin.Windows(4, data_bytes=4096)
    tp = [twin.Windows(2, data_bytes=4096, layout="a2") for _ in range(2)]
    groups = [(ep.member(r), tp[r // 2].member(r % 2)) for r in range(4)]
    for rank, (first, second) in enumerate(show(groups, (4, 2), (1, 0), 4)):
        assert list(first[:2]) == [rank, 4]
        assert list(second[:2]) == [rank % 2, 2]
        assert second[8] == address(tp[rank // 2].data(0))


def test_both_groups_at_once_by_a_pair() -> None:
    pair = (twin.Windows(2, data_bytes=4096), twin.Windows(2, data_bytes=4096))
    for rank, (first, second) in enumerate(show(pair, (2, 2), (1, 1), 2)):
        assert first[0] == second[0] == rank
        assert first[8] == address(pair[0].data(0)) and second[8] == address(pair[1].data(0))


# ---- BatchWrite ----


def exchange(
    mode: str, world: int, rows: int, cores: int, *defines: str, window: int = 1 << 16, finalize: int = 1
) -> None:
    windows = twin.Windows(world, data_bytes=window, layout="a2")
    for step in range(4):
        x = np.arange(world * world * rows * 16, dtype=np.int32).reshape(world, world, rows, 16) + step
        y = np.full_like(x, -1)
        args = [[x[rank], y[rank]] for rank in range(world)]
        call = (args, bytes(64 + 280) + tiling(rows, 16, step % 2, finalize), cores, 0, windows)
        kernel = kernels("all2all_batch_write", *defines)
        kernel.launch("all2all_batch_write", *call, workspace_bytes=world * 32, mode=mode, timeout_s=20)
        assert np.array_equal(y, x.swapaxes(0, 1))
        assert not any((windows.data(r)[-64:]).any() for r in range(world))


@modes
@pytest.mark.parametrize("world,rows,cores", [(2, 3, 2), (4, 5, 3), (1, 2, 1)])
def test_batch_write(mode: str, world: int, rows: int, cores: int) -> None:
    exchange(mode, world, rows, cores)


def test_batch_write_without_finalize_is_delivered() -> None:
    exchange("fast", 2, 20, 2, finalize=0)


@pytest.mark.nightly
def test_batch_write_past_the_window_is_found() -> None:
    said = r"BatchWrite item 0: 732 bytes that do not lie in windowsIn of rank 0"
    with pytest.raises(TwinFault, match=said):
        exchange("fast", 2, 3, 1, "MORE_BYTES=508", window=512)


# ---- flags inside the data ----


@modes
@pytest.mark.parametrize("world,rows,chunks,cores", [(2, 3, 3, 4), (4, 2, 1, 3)])
def test_chunks_that_carry_their_flag(mode: str, world: int, rows: int, chunks: int, cores: int) -> None:
    windows = twin.Windows(world, data_bytes=1 << 16, flags_in_data=True)
    for step in range(3):
        rng = np.random.default_rng(step)
        x = rng.integers(1, 255, (world, world, rows, chunks * 480)).astype(np.uint8)
        y = np.zeros_like(x)
        args = [[x[rank], y[rank]] for rank in range(world)]
        tilings = [tiling(rank, world, rows, chunks) for rank in range(world)]
        call = (args, tilings, cores, 0, windows)
        kernels("chunk_exchange", HALF).launch("chunk_exchange", *call, mode=mode, timeout_s=20)
        assert np.array_equal(y, x.swapaxes(0, 1))


# ---- polls that nobody declared ----


@modes
@pytest.mark.parametrize("key", range(4), ids=["one flag", "many flags", "scalar word", "heartbeat"])
def test_waits_within_a_rank(mode: str, key: int) -> None:
    cores = 4
    workspace, seen = np.zeros((cores, 16 * 8 + 16), np.int32), np.zeros((cores, 8), np.int32)
    kernels("poll_flags").launch("poll_flags", [seen, workspace], None, cores, key, mode=mode, timeout_s=20)
    flags, words = np.split(workspace.ravel(), [cores * 16 * 8])
    assert (flags == 1).all() and (words[::16] == 1).all()
    assert (seen[:-1, 0] > 0).all() == (key == 3)


@modes
@pytest.mark.parametrize("key", [0, 1, 2])
def test_a_wait_for_nobody_is_a_hang(mode: str, key: int) -> None:
    """Every core waits for the next, and none tells first."""
    seen = np.zeros((3, 8), np.int32)
    call = ([seen], None, 3, key + 10)
    with pytest.raises(TwinFault, match="hang") as caught:
        kernels("poll_flags").launch("poll_flags", *call, mode=mode, timeout_s=0.5, workspace_bytes=1728)
    assert caught.value.finding == "hang"


# ---- what does not fit ----


def test_wrong_windows_are_refused() -> None:
    with pytest.raises(ArgumentError, match="layout is a3 or a2"):
        twin.Windows(2, layout="a5")
    with pytest.raises(ArgumentError, match="at least 1 rank"):
        twin.Windows(0)
    with pytest.raises(ArgumentError, match="rank 2 of windows of 2 ranks"):
        twin.Windows(2).member(2)


def test_windows_are_cleared_and_restored() -> None:
    windows = twin.Windows(2, data_bytes=10_000)
    windows.data(1)[9_999] = 5
    windows.state(0)[0] = 6
    saved = windows.snapshot()
    windows.clear()
    assert not windows.data(1).any() and not windows.state(0).any()
    windows.restore(saved)
    assert windows.data(1)[9_999] == 5 and windows.state(0)[0] == 6
