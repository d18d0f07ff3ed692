"""The checked engine: every missing edge is found under every schedule and named; its near miss never is."""

from __future__ import annotations

import ctypes
import functools
import subprocess
from pathlib import Path

import pytest
from test_twin_rules import FAULTS, GOOD, WITHOUT_LINE
from twin_oracle import COMMON, NATIVE, SCRATCH, compiler, runtime_sources

LATE, RANDOM, LAZY, PCT = 0, 1, 2, 3
SYNC = "missing pipe synchronisation"
# Kernel -> the finding, and what its text says: both accesses, and the edge.
FINDINGS = {
    **{
        f"{first}_{second}_missing".lower(): (
            SYNC,
            f"is not ordered before {second} ",
            f"needs {first}_{second} or PipeBarrier<PIPE_ALL>",
        )
        for first, second in [
            ("MTE2", "V"),
            ("V", "MTE2"),
            ("V", "MTE3"),
            ("MTE3", "V"),
            ("MTE3", "MTE2"),
            ("MTE2", "MTE3"),
            ("S", "V"),
            ("V", "S"),
            ("S", "MTE2"),
            ("MTE2", "S"),
            ("S", "MTE3"),
            ("MTE3", "S"),
        ]
    },
    "wrong_event": (SYNC, "MTE2 load", "needs MTE2_V"),
    "queues_missing": (SYNC, "MTE3 store", "needs MTE3_V"),
    "v_v_missing": ("same-pipe hazard", "V write", "needs PipeBarrier<PIPE_V>"),
    "mte2_mte2_missing": ("same-pipe hazard", "MTE2 ", "needs PipeBarrier<PIPE_MTE2>"),
    "mte3_mte3_missing": ("same-pipe hazard", "MTE3 store", "needs PipeBarrier<PIPE_MTE3>"),
    "fresh_missing": ("uninitialised UB read", "GetValue", "never been written"),
    "padding_missing": ("uninitialised UB read", "GetValue", "dummy bytes"),
    "freed_missing": ("uninitialised UB read", "Adds", "freed"),
    "stale_missing": ("stale scalar read", "GetValue", "needs DataCacheCleanAndInvalid before the read"),
    "unflushed_missing": ("unflushed scalar write", "when the kernel ends", "after the write"),
    "unflushed_copy_missing": ("unflushed scalar write", "misses what SetValue", "after the write"),
    "unflushed_sync_missing": ("unflushed scalar write", "misses what SetValue", "core 0"),
    "shared_line_missing": ("cache line shared by two writers", "64-byte line", "lines of their own"),
    "cores_missing": ("race between cores", "of core ", "needs PipeBarrier<PIPE_ALL> and SyncAll"),
    "two_writers_missing": ("race between cores", "MTE3 store", "SyncAll"),
    "adders_missing": ("race between cores", "MTE3 store", "SyncAll"),
    "adders_reader": ("race between cores", "MTE2 load", "SyncAll"),
    "cross_flags_missing": ("race between cores", "MTE2 load", "SyncAll"),
    "diverge": ("SyncAll divergence", "core 0 waits", "cores 1 have left"),
    "ranks_flag_first": ("race between ranks", "MTE3 store", "needs a status block"),
    "ranks_no_wait": ("race between ranks", " load at ", "needs a status block"),
    "ranks_reuse": ("race between ranks", "MTE3 store", "needs a status block"),
    "half_missing": ("wrong part of a window", "data window", "other half"),
    "never_comes": ("hang", "polls at", "nothing can move"),
    "ranks_no_flag": ("hang", "rank 0 core 0 polls", "rank 1 core 0 polls"),
}
# Stores of one core to one rank in order make up for a missing drain; in any order they do not.
ONLY_UNORDERED = {"ranks_no_drain", "foreign_missing"}
GOOD_KERNELS = {
    "mte2_v", "v_mte2", "v_mte3", "mte3_v", "mte3_mte2", "mte2_mte3", "s_v", "v_s", "s_mte2", "mte2_s",
    "s_mte3", "mte3_s", "other_bytes", "through_scalar", "queues", "v_v", "v_v_compiler", "mte2_mte2",
    "mte3_mte3", "fresh", "padding", "freed", "stale", "unflushed", "unflushed_copy", "shared_line",
    "unflushed_sync", "cores", "two_writers", "adders", "cross_flags", "ranks", "foreign", "half",
}  # fmt: skip
SCHEDULES = [(LATE, 0), *((policy, seed) for policy in (RANDOM, LAZY, PCT) for seed in range(8))]


@functools.cache
def library(name: str) -> ctypes.CDLL:
    target = Path(SCRATCH.name) / f"{name}-checked.so"
    sources = [
        NATIVE / f"{name}.cpp",
        *runtime_sources("checked"),
    ]
    flags = [*COMMON, "-DTWIN_CHECKED", "-O1", "-shared", "-fPIC"]
    command = [compiler(), *flags, *map(str, sources), "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return ctypes.CDLL(str(target))


def says(name: str, policy: int, seed: int, unordered: bool) -> str:
    run = library("checked_kernels").run_checked
    run.restype = ctypes.c_char_p
    return run(name.encode(), policy, ctypes.c_uint64(seed), int(unordered)).decode()


def test_every_kernel_is_expected_to_do_something() -> None:
    names = library("checked_kernels").checked_names
    names.restype = ctypes.c_char_p
    assert sorted(names().decode().split()) == sorted([*FINDINGS, *ONLY_UNORDERED, *GOOD_KERNELS])


@pytest.mark.parametrize("name", FINDINGS)
def test_a_missing_edge_is_found_under_every_schedule(name: str) -> None:
    finding, *details = FINDINGS[name]
    for policy, seed in SCHEDULES:
        text = says(name, policy, seed, unordered=seed % 2 == 1)
        assert text.startswith(f"{finding}: "), (policy, seed, text)
        assert "\n" not in text and "checked_kernels.cpp:" in text
        if finding in (SYNC, "same-pipe hazard"):
            assert text.count("checked_kernels.cpp:") >= 3  # both accesses, and the place of the second
        if policy == LATE:
            assert all(detail in text for detail in details), text


@pytest.mark.parametrize("name", sorted(GOOD_KERNELS))
def test_a_near_miss_is_never_found(name: str) -> None:
    for policy, seed in SCHEDULES:
        for unordered in (False, True):
            assert says(name, policy, seed, unordered) == "", (policy, seed)


@pytest.mark.parametrize("name", sorted(ONLY_UNORDERED))
def test_a_flag_may_overtake_its_row_where_stores_have_no_order(name: str) -> None:
    for policy, seed in SCHEDULES:
        assert says(name, policy, seed, False) == ""
        assert says(name, policy, seed, True).startswith("race between ranks: ")


# ---- the rules that both engines watch


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_rule_is_named_by_the_checked_engine_too(name: str) -> None:
    run = library("rule_kernels").run_rule
    run.restype = ctypes.c_char_p
    text = run(name.encode()).decode()
    finding, detail = FAULTS[name]
    assert text.startswith(f"{finding}: ") and detail in text
    assert name in WITHOUT_LINE or "rule_kernels.cpp:" in text


@pytest.mark.parametrize("name", GOOD)
def test_a_rule_kept_passes_the_checked_engine_too(name: str) -> None:
    run = library("rule_kernels").run_rule
    run.restype = ctypes.c_char_p
    assert run(name.encode()).decode() == ""
