"""Rules of the hardware: each fires and is named, on both engines; its near miss never does.

The checked engine finds every missing edge under every schedule.
"""

from __future__ import annotations

import ctypes
import functools

import pytest
from twin_oracle import native_library

# Rule kernel -> the finding and a piece of what is said.
FAULTS = {
    "ub_over": ("UB overflow", "196576 of the UB's 196608"),
    "buffers_65": ("UB overflow", "more than 64 buffers"),
    "two_pipes": ("queue discipline", "two TPipes"),
    "buf_view_over": ("out of bounds", "TBuf holds 256 bytes"),
    "buf_view_unaligned": ("misaligned address", "offset 16"),
    "copy_rounded": ("copy length rounded down", "48 bytes: the last 16 would be dropped"),
    "copy_rounded_half": ("copy length rounded down", "34 bytes: the last 2 would be dropped"),
    "copy_nothing": ("illegal argument", "of 0 bytes"),
    "copy_past_ub": ("out of bounds", "needs 288 bytes, the UB view holds 256"),
    "copy_ub_unaligned": ("misaligned address", "16 bytes past a 32-byte boundary"),
    "copy_gm_past": ("out of bounds", '256 bytes at byte 32516 of GM "gm", which has 32768'),
    "copy_gm_unaligned": ("misaligned address", "not aligned to 4 bytes"),
    "copy_past_declared": ("out of bounds", "64 bytes, the GlobalTensor holds 60"),
    "copy_stranger": ("out of bounds", "in no tensor or window"),
    "pad_count": ("illegal argument", "blockCount 4096 is over 4095"),
    "pad_element": ("illegal argument", "blockLen 6 is not a multiple of the 4-byte element"),
    "pad_right_over": ("illegal argument", "more than 32 bytes"),
    "atomic_type": ("illegal argument", "SetAtomic of another element type"),
    "atomic_left": ("illegal argument", "SetAtomicNone is missing"),
    "element_past": ("out of bounds", "element 8 of a LocalTensor of 8"),
    "vector_past": ("out of bounds", "260 bytes, the UB view holds 256"),
    "cast_none": ("illegal argument", "round mode 0"),
    "queue_alloc_3": ("queue discipline", "none of the queue's 2 tensors free"),
    "queue_out_9": ("queue discipline", "more than 8 queue tensors"),
    "queue_depth_over": ("queue discipline", "over the queue's depth 1"),
    "queue_empty": ("queue discipline", "DeQue of an empty queue"),
    "queue_freed_twice": ("queue discipline", "freed twice"),
    "queue_leak": ("queue discipline", "1 queue tensors were never freed"),
    "queue_foreign": ("queue discipline", "not this queue's"),
    "use_after_free": ("use after free", "after FreeTensor"),
    "use_after_reset": ("use after free", "TPipe was reset"),
    "never_allocated": ("use after free", "never allocated"),
    "event_8": ("event discipline", "event id 8"),
    "event_twice": ("event discipline", "set twice"),
    "event_unset": ("event discipline", "nobody has set"),
    "event_left": ("event discipline", "still set"),
    "sync_diverges": ("SyncAll divergence", "but cores 1 have left"),
    "fail_while_waiting": ("event discipline", "(rank 5, core 3)"),
}
# These name no source line: they are found after the kernel, or by an object without one.
WITHOUT_LINE = {"atomic_left", "queue_leak", "event_left", "two_pipes"}
KEPT = {
    "ub_full", "buffers_64", "pipe_after_destroy", "buf_view_ok", "copy_ok", "copy_ub_aligned", "copy_gm_end",
    "copy_declared", "pad_ok", "pad_right_ok", "atomic_ok", "element_last", "vector_ok", "cast_rint",
    "queue_alloc_2", "queue_out_8", "queue_depth_ok", "queue_freed", "use_before_free", "use_before_reset",
    "event_7", "sync_all", "sync_often",
}  # fmt: skip


@functools.cache
def opened(name: str, engine: str) -> ctypes.CDLL:
    library = ctypes.CDLL(str(native_library(name, engine)))
    for function in (
        ("run_rule", "rule_names") if name == "rule_kernels" else ("run_checked", "checked_names")
    ):
        getattr(library, function).restype = ctypes.c_char_p
    return library


@pytest.mark.asan
@pytest.mark.parametrize("engine", ["fast", "checked"])
def test_rules(engine: str) -> None:
    rules = opened("rule_kernels", engine)
    assert sorted(rules.rule_names().decode().split()) == sorted([*FAULTS, *KEPT])
    for name in KEPT:
        assert rules.run_rule(name.encode()) == b"", name
    for name, (finding, detail) in FAULTS.items():
        text = rules.run_rule(name.encode()).decode()
        assert text.startswith(f"{finding}: ") and detail in text, (name, text)
        assert "\n" not in text and (engine == "checked" or "(rank 5, core " in text)
        assert name in WITHOUT_LINE or "rule_kernels.cpp:" in text, (name, text)


LATE, RANDOM, LAZY, PCT = 0, 1, 2, 3
SYNC = "missing pipe synchronisation"
PIPES = ["MTE2_V", "V_MTE2", "V_MTE3", "MTE3_V", "MTE3_MTE2", "MTE2_MTE3"]
PIPES += ["S_V", "V_S", "S_MTE2", "MTE2_S", "S_MTE3", "MTE3_S"]
# Kernel -> the finding, and what its text says: both accesses, and the edge.
FINDINGS = {
    **{
        f"{edge}_missing".lower(): (
            SYNC,
            f"is not ordered before {edge.split('_')[1]} ",
            f"needs {edge} or PipeBarrier<PIPE_ALL>",
        )
        for edge in PIPES
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
NEAR_MISSES = {
    *(edge.lower() for edge in PIPES), "other_bytes", "through_scalar", "queues", "v_v", "v_v_compiler",
    "mte2_mte2", "mte3_mte3", "fresh", "padding", "freed", "stale", "unflushed", "unflushed_copy",
    "shared_line", "unflushed_sync", "cores", "two_writers", "adders", "cross_flags", "ranks", "foreign",
    "half",
}  # fmt: skip
SCHEDULES = [(LATE, 0), *((policy, seed) for policy in (RANDOM, LAZY, PCT) for seed in range(8))]


def says(name: str, policy: int, seed: int, unordered: bool) -> str:
    run = opened("checked_kernels", "checked").run_checked
    return run(name.encode(), policy, ctypes.c_uint64(seed), int(unordered)).decode()


def test_every_kernel_is_expected_to_do_something() -> None:
    names = opened("checked_kernels", "checked").checked_names().decode().split()
    assert sorted(names) == sorted([*FINDINGS, *ONLY_UNORDERED, *NEAR_MISSES])


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


@pytest.mark.parametrize("name", sorted(NEAR_MISSES | ONLY_UNORDERED))
def test_a_near_miss_is_never_found(name: str) -> None:
    """A flag may overtake its row only where stores have no order."""
    for policy, seed in SCHEDULES:
        assert says(name, policy, seed, False) == "", (policy, seed)
        found = "race between ranks: " if name in ONLY_UNORDERED else ""
        text = says(name, policy, seed, True)
        assert text.startswith(found) and (text == "") == (found == ""), (policy, seed, text)
