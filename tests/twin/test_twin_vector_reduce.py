"""Reductions of the twin's vector unit against numpy: order of sums, ties, zeros, NaN; bit for bit."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from numpy.typing import NDArray
from twin_oracle import VARIANTS, VECTOR_TYPES, assert_same, bits, build, lane_index, pointer

pytestmark = pytest.mark.asan

Array = NDArray[np.generic]
F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
REAL = [F16, F32]
LANES = {F16: 128, F32: 64}


@pytest.fixture(scope="module", params=list(VARIANTS))
def oracle(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return build("vector_oracle", request.param)


def code(dtype: np.dtype) -> int:
    return VECTOR_TYPES.index(dtype)


def tree(values: Array, present: NDArray[np.bool_] | None = None) -> Array:
    """Sums of the last axis (a power of two), neighbours first; absent lanes pass the other one through."""
    present = np.ones(values.shape, bool) if present is None else present
    while values.shape[-1] > 1:
        (left, right), (has_left, has_right) = ((x[..., ::2], x[..., 1::2]) for x in (values, present))
        values = np.where(has_left & has_right, left + right, np.where(has_left, left, right))
        present = has_left | has_right
    return values[..., 0]


def in_repeats(x: Array) -> tuple[Array, NDArray[np.bool_]]:
    lanes = LANES[x.dtype]
    rows = -(-x.size // lanes)
    padded = np.zeros(rows * lanes, x.dtype)
    padded[: x.size] = x
    return padded.reshape(rows, lanes), (np.arange(rows * lanes) < x.size).reshape(rows, lanes)


def levelled(x: Array) -> Array:
    while x.size > 1:
        x = tree(*in_repeats(x))
    return x


REDUCE_COUNTS = [1, 2, 3, 63, 64, 65, 127, 128, 129, 1000, 8192, 20000]


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_reduce_sum_order(oracle: ctypes.CDLL, dtype: np.dtype) -> None:
    rng = np.random.default_rng(6)
    for count in REDUCE_COUNTS:
        x = (rng.standard_normal(count) * np.exp2(rng.integers(-8, 3, count))).astype(dtype)
        out = np.zeros(2, dtype)
        assert oracle.oracle_reduce(0, code(dtype), pointer(out), pointer(x), count, 0) == 1
        sums = tree(*in_repeats(x))
        total = sums[0]
        for value in sums[1:]:
            total = dtype.type(total + value)
        assert_same(out, np.array([total, 0], dtype))
        rows = np.ascontiguousarray(np.stack([x, x[::-1], x * dtype.type(3)]))
        out = np.zeros(4, dtype)
        for n in {count, max(1, count - 5)}:
            oracle.oracle_sum_rows(code(dtype), pointer(out), pointer(rows), 3, count, n)
            assert_same(out, np.append(np.concatenate([levelled(row[:n]) for row in rows]), dtype.type(0)))


def test_reduce_sum_specials(oracle: ctypes.CDLL) -> None:
    out = np.zeros(1, F32)
    inf, nan = np.inf, np.nan
    for values, want in [([-0.0] * 3, -0.0), ([inf, 1, -inf], nan), ([nan, 1], nan), ([1e38] * 4, inf)]:
        x = np.array(values, F32)
        oracle.oracle_reduce(0, code(F32), pointer(out), pointer(x), x.size, 0)
        assert_same(out, np.array([want], F32))
    x = np.full(4, 60000, F16)
    out16 = np.zeros(1, F16)
    oracle.oracle_reduce(0, code(F16), pointer(out16), pointer(x), 4, 0)
    assert out16[0] == np.inf  # each node is a half


def extreme(x: Array, largest: bool) -> int:
    """Index of the maximum or minimum by our rules."""
    valid = ~np.isnan(x)
    if not valid.any():
        return 0
    best = x[valid].max() if largest else x[valid].min()
    return int(np.argmax(valid & (x == best)))


def tricky(dtype: np.dtype, count: int, rng: np.random.Generator) -> Array:
    """Few distinct values, so that ties, both zeros, infinities and NaN all decide somewhere."""
    pool = [0.0, -0.0, 1.0, -1.0, np.nan, np.inf, -np.inf, 6e-8, -6e-8, 65504.0, -65504.0]
    chosen = rng.choice(pool, rng.integers(1, 5), replace=False)
    return rng.choice(chosen, count).astype(dtype)


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_reduce_max_and_min(oracle: ctypes.CDLL, dtype: np.dtype) -> None:
    rng = np.random.default_rng(7)
    cases = [tricky(dtype, int(n), rng) for n in rng.integers(1, 200, 300)]
    cases += [rng.standard_normal(n).astype(dtype) for n in REDUCE_COUNTS]
    for x in cases:
        for op, largest in ((1, True), (2, False)):
            at = extreme(x, largest)
            for with_index in (0, 1):
                out = np.full(2, 7, dtype)
                oracle.oracle_reduce(op, code(dtype), pointer(out), pointer(x), x.size, with_index)
                assert_same(out[:1], x[at : at + 1], x[:1])
                assert bits(out)[1] == (at if with_index else bits(np.array(7, dtype)))


def test_reductions_of_nothing_write_nothing(oracle: ctypes.CDLL) -> None:
    mask, strides = np.zeros(2, np.uint64), np.array([1, 8], np.uint32)
    out = np.full(512, 7, F32)
    x = np.ones(512, F32)
    for op in (0, 1, 2):
        oracle.oracle_reduce(op, code(F32), pointer(out), pointer(x), 0, 1)
        for block in (oracle.oracle_whole, oracle.oracle_block):
            extra = (0,) if block is oracle.oracle_whole else ()
            block(op, code(F32), pointer(out), pointer(x), pointer(mask), 4, 1, pointer(strides), *extra)
    oracle.oracle_reduce_sum_repeats(code(F32), pointer(out), pointer(x), pointer(mask), 4, 8)
    oracle.oracle_sum_rows(code(F32), pointer(out), pointer(x), 4, 8, 0)
    assert (out == 7).all()


MASKS = [2**128 - 1, 1, 1 << 70, 0x55555555_AAAAAAAA_00FF00FF_80000001]
MASKS += [2**20 - 1, 0xFFFF << 64, 0xFF00 | 5 << 33]


def repeats_of(x: Array, repeats: int, strides: list[int]) -> Array:
    """(repeats, lanes) view of what the instruction reads."""
    size = x.dtype.itemsize
    index = [[lane_index(size, r, lane, *strides) for lane in range(256 // size)] for r in range(repeats)]
    return x[np.array(index)]


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=hex)
def test_repeat_reductions(oracle: ctypes.CDLL, dtype: np.dtype, mask: int) -> None:
    rng = np.random.default_rng(8)
    lanes, repeats = LANES[dtype], 5
    active = np.array([(mask >> i) & 1 == 1 for i in range(lanes)])
    words = np.array([mask & (2**64 - 1), mask >> 64], np.uint64)
    for strides in ([1, 8], [2, 3], [1, 0]):
        steps = np.array(strides, np.uint32)
        for x in (rng.standard_normal(4096).astype(dtype), tricky(dtype, 4096, rng)):
            table = repeats_of(x, repeats, strides)
            present = np.broadcast_to(active, table.shape)
            call = (code(dtype), pointer(out := np.full(4096, 7, dtype)), pointer(x), pointer(words), repeats)
            with np.errstate(all="ignore"):
                want = out.copy()
                if active.any():
                    want[: 3 * repeats : 3] = tree(table, present)
                oracle.oracle_whole(0, *call, 3, pointer(steps), 0)
                assert_same(out, want)
                if active.any() and strides[0] == 1:
                    oracle.oracle_reduce_sum_repeats(*call, strides[1])
                    want[:1] = levelled(tree(table, present))
                    assert_same(out, want)
                check_blocks(oracle, call, out, table, active, steps)
            if active.any():
                check_whole_extremes(oracle, call, out, table, active, steps)


def check_blocks(
    oracle: ctypes.CDLL, call: tuple[object, ...], out: Array, table: Array, active: Array, steps: Array
) -> None:
    """BlockReduce* and PairReduceSum."""
    repeats, lanes = table.shape
    for op, width in ((0, lanes // 8), (1, lanes // 8), (2, lanes // 8), (3, 2)):
        out[:] = 7
        oracle.oracle_block(op, *call, 2, pointer(steps))
        want = np.full_like(out, 7)
        for r in range(repeats):
            for group in range(lanes // width):
                on = active[group * width : (group + 1) * width]
                values = table[r, group * width : (group + 1) * width]
                if not on.any():
                    continue
                at = r * 2 * (lanes // width) + group
                if op in (0, 3):
                    want[at] = tree(values, on)
                else:
                    want[at] = values[on][extreme(values[on], op == 1)]
        assert_same(out, want)


def check_whole_extremes(
    oracle: ctypes.CDLL, call: tuple[object, ...], out: Array, table: Array, active: Array, steps: Array
) -> None:
    """WholeReduceMax and WholeReduceMin in all four orders."""
    numbers = np.flatnonzero(active)
    for op, largest in ((1, True), (2, False)):
        picks = [numbers[extreme(row[active], largest)] for row in table]
        values = np.array([row[at] for row, at in zip(table, picks, strict=True)], out.dtype)
        index = np.array(picks, bits(out).dtype).view(out.dtype)
        pairs = {0: [values, index], 1: [index, values]}
        for order in range(4):
            out[:] = 7
            oracle.oracle_whole(op, *call, 1, pointer(steps), order)
            if order in pairs:
                assert_same(out[: 2 * len(picks)], np.stack(pairs[order], 1).ravel())
            elif order == 2:
                assert_same(out[: len(picks)], values)
            else:
                assert out.view(np.uint32)[: len(picks)].tolist() == [int(at) for at in picks]
