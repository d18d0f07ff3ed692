"""Many schedules of foreign kernels: sound ones stay clean, one missing line is found and shown again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_runs import HALF, KERNELS, Case, Dispatch, kernels, tiling

from ascend_moe import twin
from ascend_moe.errors import TwinFault

CASE = Case(2, 2, (2, 3), 2, 32, 2, max_bs=3)


def mutant(name: str, old: str, new: str, folder: Path, *defines: str) -> twin.Kernels:
    """A sample kernel with one place changed."""
    text = (KERNELS / f"{name}.cpp").read_text()
    assert text.count(old) >= 1, f"{name} has no {old!r}"
    path = folder / f"{name}.cpp"
    path.write_text(text.replace(old, new, 1))
    return twin.load(path, defines=defines, includes=[KERNELS])


def test_every_schedule_begins_with_the_same_arguments() -> None:
    x = np.arange(96, dtype=np.float16)
    call = ([x, x, x, None], tiling(96, 16), 3, 1)
    found = kernels("add_custom", HALF).explore("add_custom", *call, schedules=40)
    assert found.ok and found.schedules == 40 and found.distinct > 1, found
    assert np.array_equal(x, 2 * np.arange(96))


def explore(kernel: twin.Kernels, one: Dispatch, **options: Any) -> twin.Exploration:
    call = (one.args, CASE.tilings, CASE.cores, 1000, CASE.windows())
    return kernel.explore("moe_dispatch_mc2", *call, **options)


def test_windows_kernels_are_clean_under_all_policies() -> None:
    one = Dispatch(CASE)
    for unordered in (False, True):
        options = {"schedules": 60, "check": one.check, "unordered": unordered}
        found = explore(kernels("moe_dispatch_mc2", HALF), one, **options)
        assert found.ok and found.distinct > 30, found


def test_rows_that_may_come_after_their_flag_are_found(tmp_path: Path) -> None:
    """Without the meeting of all cores before the flags go out."""
    meeting = "PipeBarrier<PIPE_ALL>();\n        SyncAll<true>();"
    broken, one = mutant("moe_dispatch_mc2", meeting, "", tmp_path, HALF), Dispatch(CASE)
    found = explore(broken, one, schedules=200, seed=7)
    assert found.finding == "race between ranks", found
    assert found.text is not None and "windowsIn of rank" in found.text
    assert found.seed is not None and found.policy is not None
    with pytest.raises(TwinFault) as caught:  # shown again by its seed and policy
        one.launch(CASE.windows(), broken, mode="checked", seed=found.seed, policy=found.policy)
    assert str(caught.value) == found.text
    assert (caught.value.seed, caught.value.policy) == (found.seed, found.policy)


@pytest.mark.nightly
def test_a_missing_soft_sync_all_is_found(tmp_path: Path) -> None:
    broken = mutant("prefix_sum", "SyncAll(syncGm, syncBuf.Get<int32_t>(), static_cast<int32_t>(cores));", "", tmp_path)
    x = np.ones(48, np.int32)
    args = [x, np.zeros_like(x), np.zeros(8, np.int32)]
    found = broken.explore("prefix_sum", args, tiling(16), 3, schedules=100, workspace_bytes=3 * 64)
    # A block of 32 bytes in a workspace may be a flag; then what it guards is wrong.
    assert found.finding in ("race between cores", "wrong result"), found
    assert found.text is not None and found.text.startswith("prefix_sum: ")


def all_to_all(exchange: twin.Kernels, schedules: int) -> twin.Exploration:
    """Two ranks of two cores swap rows by BatchWrite."""
    x = np.arange(2 * 2 * 3 * 16, dtype=np.int32).reshape(2, 2, 3, 16)
    y = np.zeros_like(x)

    def check() -> None:
        assert np.array_equal(y, x.swapaxes(0, 1)), "rows are missing"

    args, windows = [[x[rank], y[rank]] for rank in range(2)], twin.Windows(2, data_bytes=4096, layout="a2")
    call = (args, bytes(64 + 280) + tiling(3, 16, 0, 1), 2, 0, windows)
    options = {"schedules": schedules, "workspace_bytes": 64, "check": check}
    return exchange.explore("all2all_batch_write", *call, **options)


def test_batch_write_may_take_its_time() -> None:
    found = all_to_all(kernels("all2all_batch_write"), 60)
    assert found.ok and found.distinct > 40, found


@pytest.mark.nightly
def test_rows_that_are_posted_before_they_are_there_are_found(tmp_path: Path) -> None:
    broken = mutant("all2all_batch_write", "SyncAll<true>();  // all rows are there", "", tmp_path)
    found = all_to_all(broken, 150)
    assert found.finding in ("hang", "wrong result"), found  # the flag is late, or the rows are


@pytest.mark.parametrize(
    "declared,unordered,finding",
    [(True, False, None), (True, True, "wrong result"), (False, False, "race between ranks")],
)
def test_flags_inside_longer_stores(declared: bool, unordered: bool, finding: str | None) -> None:
    """Sound only where a store lands in order, and known as flags only where the windows say so."""
    x = np.random.default_rng(0).integers(1, 255, (2, 2, 2, 960)).astype(np.uint8)
    y = np.zeros_like(x)

    def check() -> None:
        assert np.array_equal(y, x.swapaxes(0, 1)), "a flag came before its data"

    args, tilings = [[x[rank], y[rank]] for rank in range(2)], [tiling(rank, 2, 2, 2) for rank in range(2)]
    windows = twin.Windows(2, data_bytes=1 << 16, flags_in_data=declared)
    options = {"schedules": 60, "unordered": unordered, "check": check}
    found = kernels("chunk_exchange", HALF).explore("chunk_exchange", args, tilings, 2, 0, windows, **options)
    assert found.finding == finding, found


def test_a_wrong_result_is_a_finding() -> None:
    x = np.ones(32, np.float16)

    def never() -> None:
        raise AssertionError("x is not what it should be")

    call = ([x, x, x, None], tiling(32, 16), 2, 1)
    found = kernels("add_custom", HALF).explore("add_custom", *call, schedules=5, seed=3, check=never)
    assert (found.finding, found.schedules, found.seed) == ("wrong result", 1, 3)
    said = "add_custom: check: x is not what it should be [mode='checked', seed=3, policy='late']"
    assert found.text == said and str(found).endswith(said)
