"""Rows in windows: when they go past the caches, by how long stores have taken, and that their bytes are the same."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest
from twin_oracle import native_library

pytestmark = pytest.mark.asan

ROW = 14336
FAST, SLOW = 700, 7000  # nanoseconds of a row, between cores that share a cache and cores that do not
END = 0  # of a launch
SLOW_ROWS, LAUNCHES = 3, 64


def past(nanos: list[int]) -> list[bool]:
    library = ctypes.CDLL(str(native_library("row_stores", "fast")))
    times, answers = np.array(nanos, np.uint64), np.zeros(len(nanos), np.uint8)
    run = library.run_stores
    run(ctypes.c_void_p(times.ctypes.data), len(nanos), ctypes.c_uint64(ROW), ctypes.c_void_p(answers.ctypes.data))
    return answers.astype(bool).tolist()


def test_drawn_stores_are_decided_as_the_rule_says() -> None:
    draw = random.Random(17)
    for _ in range(50):
        nanos = draw.choices([FAST, SLOW, END], [draw.random() for _ in range(3)], k=400)
        slow, launches, want = 0, 0, []
        for took in nanos:
            if took == END:
                launches = max(0, launches - 1)
            elif launches == 0:
                slow = slow + 1 if took == SLOW else max(0, slow - 1)
                if slow == SLOW_ROWS:
                    slow, launches = 0, LAUNCHES
            want.append(launches > 0)
        assert past(nanos) == want, nanos


@pytest.mark.parametrize("row_bytes", [64, 1024, 4096, 4100, ROW])
@pytest.mark.parametrize("offset", [0, 2, 32])
def test_bytes_are_the_same_past_the_caches(row_bytes: int, offset: int) -> None:
    rows = 8
    source = np.random.default_rng(row_bytes + offset).integers(0, 256, rows * row_bytes, dtype=np.uint8)
    memory = np.zeros(rows * row_bytes + 128, np.uint8)
    at = -memory.ctypes.data % 64 + offset
    ctypes.CDLL(str(native_library("row_stores", "fast"))).copy_rows(
        ctypes.c_void_p(memory.ctypes.data + at), ctypes.c_void_p(source.ctypes.data), ctypes.c_uint64(row_bytes), rows
    )
    assert np.array_equal(memory[at : at + rows * row_bytes], source)
    assert not memory[:at].any() and not memory[at + rows * row_bytes :].any()
