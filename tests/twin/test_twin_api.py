"""Every vector call of the twin's API, run as a kernel and compared with numpy."""

from __future__ import annotations

import ctypes
import functools
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from twin_oracle import COMMON, NATIVE, SCRATCH, compiler, runtime_sources

pytestmark = pytest.mark.asan

Floats = NDArray[np.float32]
N = 256
RNG = np.random.default_rng(11)
A: Floats = RNG.standard_normal(N).astype(np.float32)
A[17] = 1.0
B: Floats = RNG.standard_normal(N).astype(np.float32)


@functools.cache
def kernels() -> ctypes.CDLL:
    library = Path(SCRATCH.name) / "api.so"
    runtime = runtime_sources()
    sources = [NATIVE / "api_kernels.cpp", *runtime]
    command = [compiler(), *COMMON, "-O1", "-shared", "-fPIC", *map(str, sources), "-o", str(library)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    opened = ctypes.CDLL(str(library))
    opened.run_api.restype = ctypes.c_char_p
    return opened


def run(name: str) -> tuple[str, NDArray[np.uint8]]:
    out = np.zeros(2 * N * 4, np.uint8)
    text = kernels().run_api(name.encode(), *(ctypes.c_void_p(array.ctypes.data) for array in (A, B, out)))
    return text.decode(), out


def tree(values: Floats) -> np.float32:
    """A binary tree over neighbours, in fp32."""
    level = values
    while len(level) > 1:
        level = (level[0::2] + level[1::2]).astype(np.float32)
    return level[0]


def packed(flags: NDArray[np.bool_]) -> NDArray[np.uint8]:
    return np.packbits(flags, bitorder="little")


ELEMENTWISE: dict[str, Callable[[], Floats]] = {
    "add": lambda: A + B,
    "sub": lambda: A - B,
    "mul": lambda: A * B,
    "div": lambda: A / B,
    "max": lambda: np.maximum(A, B),
    "min": lambda: np.minimum(A, B),
    "adds": lambda: A + np.float32(1.5),
    "muls": lambda: A * np.float32(1.5),
    "maxs": lambda: np.maximum(A, np.float32(0.25)),
    "mins": lambda: np.minimum(A, np.float32(0.25)),
    "abs": lambda: np.abs(A),
    "relu": lambda: np.maximum(A, np.float32(0)),
    "sqrt": lambda: np.sqrt(np.abs(A)),
    "axpy": lambda: B + A * np.float32(0.5),
    "mul_add_dst": lambda: np.float32(1) + A * B,
    "cast_half": lambda: A.astype(np.float16).astype(np.float32),
    "select": lambda: np.where(A < B, A, B),
    "select_scalar": lambda: np.where(A > 0, A, np.float32(7)),
    "index": lambda: np.arange(5, 5 + N, dtype=np.float32),
    "progression": lambda: 1 + np.arange(N, dtype=np.float32) * np.float32(0.5),
    "whole_max": lambda: A.reshape(4, 64).max(1),
    "block_max": lambda: A.reshape(32, 8).max(1),
    "whole_sum": lambda: np.array([tree(row) for row in A.reshape(4, 64)]),
    "brcb": lambda: np.repeat(A[:64], 8),
    "reduce_min": lambda: A.min()[None],
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_floats(name: str) -> None:
    fault, out = run(name)
    want = ELEMENTWISE[name]().astype(np.float32)
    assert fault == ""
    assert np.array_equal(out.view(np.float32)[: want.size], want)


def test_exp_within_an_ulp() -> None:
    fault, out = run("exp")
    assert fault == ""
    np.testing.assert_array_max_ulp(
        out.view(np.float32)[:N], np.exp(A.astype(np.float64)).astype(np.float32), 1
    )


def test_integers() -> None:
    bits_a, bits_b = A.view(np.int32), B.view(np.int32)
    assert np.array_equal(run("bits_and")[1].view(np.int32)[:N], bits_a & bits_b)
    assert np.array_equal(run("shift")[1].view(np.int32)[:N], bits_a >> 3)


def test_reduce_max_gives_the_first_index() -> None:
    out = run("reduce_max")[1]
    assert out.view(np.float32)[0] == A.max()
    assert out.view(np.uint32)[1] == A.argmax()


def test_reduce_sum_is_trees_of_64_in_order() -> None:
    want = np.float32(0)
    for index, row in enumerate(A.reshape(4, 64)):
        want = tree(row) if index == 0 else np.float32(want + tree(row))
    assert run("reduce_sum")[1].view(np.float32)[0] == want


def test_sum_skips_what_lies_past_n() -> None:
    want = A.reshape(8, 32)[:, :30].astype(np.float64).sum(1)
    np.testing.assert_allclose(run("sum_rows")[1].view(np.float32)[:8], want, rtol=1e-5, atol=1e-5)


def test_comparisons_are_bits_from_the_lowest() -> None:
    assert np.array_equal(run("compare")[1][:32], packed(A > B))
    assert np.array_equal(run("compare_scalar")[1][:32], packed(A <= 0))
    assert np.array_equal(run("compare_int")[1][:32], packed(A == 1.0)) and (A == 1.0).sum() == 1


def test_repeat_forms_follow_mask_and_strides() -> None:
    rows = run("add_repeats")[1].view(np.float32)[:N].reshape(4, 64)
    assert np.array_equal(rows[:, :32], A.reshape(4, 64)[:, :32] + B[:32]) and not rows[:, 32:].any()
    blocks = run("muls_repeats")[1].view(np.float32)[:N].reshape(16, 2, 8)
    assert np.array_equal(blocks[:, 0], (A[:128] * 2).reshape(16, 8)) and not blocks[:, 1].any()
    assert np.array_equal(run("abs_repeats")[1].view(np.float32)[:N], np.abs(A))


def test_sorting_keeps_scores_with_their_indices() -> None:
    entries = run("sort32")[1].view(np.float32).reshape(8, 32, 2)
    order = np.argsort(-A.reshape(8, 32), axis=1, kind="stable")
    assert np.array_equal(entries[:, :, 0], np.take_along_axis(A.reshape(8, 32), order, 1))
    assert np.array_equal(entries[:, :, 1].copy().view(np.uint32), order + 32 * np.arange(8)[:, None])
    out = run("sort_extract")[1].view(np.float32)
    merged = np.argsort(-A[:64], kind="stable")
    assert np.array_equal(out[:64], A[merged]) and np.array_equal(out[64:128].view(np.uint32), merged)


@pytest.mark.parametrize("name", ["gather_pattern", "gather_bits"])
def test_gather_mask_packs_and_counts(name: str) -> None:
    want = A[1::2] if name == "gather_pattern" else A[A > 0]
    out = run(name)[1].view(np.float32)
    assert out[511] == want.size and np.array_equal(out[: want.size], want)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("compare_ragged", "60 elements: whole 256 bytes only, the last 240 bytes"),
        ("compare_int_gt", "only EQ exists"),
        ("mask_range", "mask 65 is outside 1..64"),
        ("repeat_range", "repeatTime 256 is outside 0..255"),
        ("add_mask_range", "mask 65 is outside 1..64"),
        ("merge_lists", "validBit 0 is not 3, 7 or 15"),
        ("brcb_stride", "dstBlkStride is 0"),
        ("pattern_range", "pattern 8 is outside 1..7"),
    ],
)
def test_limits_that_compile(name: str, says: str) -> None:
    fault, _ = run(name)
    assert fault.startswith("illegal argument: ") and says in fault and "api_kernels.cpp:" in fault
