"""Element arithmetic and reductions of the twin's vector unit against numpy, bit for bit."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from twin_oracle import VARIANTS, VECTOR_TYPES, assert_same, bits, build, pointer, syntax_errors, vector_samples

Array = NDArray[np.generic]
F16, F32, I16, U16 = (np.dtype(t) for t in (np.float16, np.float32, np.int16, np.uint16))
I32, U32 = np.dtype(np.int32), np.dtype(np.uint32)
REAL = [F16, F32]
ARITHMETIC = [F16, F32, I16, I32]
SHIFTED = [I16, U16, I32, U32]
LANES = {F16: 128, F32: 64}


@pytest.fixture(scope="module", params=list(VARIANTS))
def oracle(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return build("vector_oracle", request.param)


def code(dtype: np.dtype) -> int:
    return VECTOR_TYPES.index(dtype)


def larger(a: Array, b: Array) -> Array:
    return np.where((b > a) | (a != a), b, a)


def smaller(a: Array, b: Array) -> Array:
    return np.where((b < a) | (a != a), b, a)


def shift_left(x: Array, count: Array) -> Array:
    wide = bits(x).astype(np.uint64) << count.astype(np.uint64)
    width = x.dtype.itemsize * 8
    if x.dtype.kind == "u":
        return (wide % (1 << width)).astype(x.dtype)
    sign = 1 << (width - 1)
    return ((wide % sign) | (bits(x) & np.uint64(sign))).astype(bits(x).dtype).view(x.dtype)


def shift_right(x: Array, count: Array) -> Array:
    return (x.astype(np.int64) >> count.astype(np.int64)).astype(x.dtype)


def shift_right_rounded(x: Array, count: Array) -> Array:
    if x.dtype.kind == "u":
        return shift_right(x, count)
    half_up = np.where(count > 0, 1 << np.maximum(count.astype(np.int64) - 1, 0), 0)
    return ((x.astype(np.int64) + half_up) >> count.astype(np.int64)).astype(x.dtype)


BINARY: list[tuple[str, Callable[[Array, Array], Array], list[np.dtype]]] = [
    ("Add", np.add, ARITHMETIC),
    ("Sub", np.subtract, ARITHMETIC),
    ("Mul", np.multiply, ARITHMETIC),
    ("Div", np.divide, REAL),
    ("Max", larger, ARITHMETIC),
    ("Min", smaller, ARITHMETIC),
    ("And", np.bitwise_and, [I16, U16]),
    ("Or", np.bitwise_or, [I16, U16]),
    ("LeakyRelu", lambda a, s: np.where(a >= 0, a, a * s), REAL),
    ("ShiftLeft", shift_left, SHIFTED),
    ("ShiftRight", shift_right, SHIFTED),
    ("ShiftRightRound", shift_right_rounded, SHIFTED),
]


def by_float64(function: Callable[[float], float]) -> Callable[[Array], Array]:
    def apply(x: Array) -> Array:
        values = np.array([function(v) for v in x.astype(np.float64).tolist()])
        return values.astype(np.float32).astype(x.dtype)

    return apply


def exp(x: float) -> float:
    return math.inf if x > 709 else math.exp(x)


def ln(x: float) -> float:
    return math.nan if x < 0 or x != x else (math.log(x) if x > 0 else -math.inf)


UNARY: list[tuple[str, Callable[[Array], Array], list[np.dtype]]] = [
    ("Abs", np.abs, REAL),
    ("Relu", lambda x: np.where(x < 0, x.dtype.type(0), x), [F16, F32, I32]),
    ("Not", np.invert, [I16, U16]),
    ("Sqrt", np.sqrt, REAL),
    ("Reciprocal", lambda x: (1 / x).astype(x.dtype), REAL),
    ("Rsqrt", lambda x: (1 / np.sqrt(x.astype(np.float64))).astype(np.float32).astype(x.dtype), REAL),
    ("Exp", by_float64(exp), REAL),
    ("Ln", by_float64(ln), REAL),
]


def operands(dtype: np.dtype, shift: bool = False) -> tuple[Array, Array]:
    a, b = vector_samples(dtype, 1), vector_samples(dtype, 2)
    if shift:
        b = (np.arange(b.size) % (dtype.itemsize * 8 + 1)).astype(dtype)
    return a, b


# ---- elementwise ----


@pytest.mark.parametrize("op", range(len(BINARY)), ids=[name for name, _, _ in BINARY])
def test_binary_and_scalar_forms(oracle: ctypes.CDLL, op: int) -> None:
    name, function, types = BINARY[op]
    for dtype in VECTOR_TYPES:
        if dtype not in types:
            nothing = ctypes.c_void_p(0)
            assert oracle.oracle_binary(op, code(dtype), nothing, nothing, nothing, 0) == 0, (name, dtype)
            assert oracle.oracle_scalar(op, code(dtype), nothing, nothing, nothing, 0) == 0, (name, dtype)
            continue
        a, b = operands(dtype, shift="Shift" in name)
        out = np.empty_like(a)
        with np.errstate(all="ignore"):
            assert oracle.oracle_binary(op, code(dtype), pointer(out), pointer(a), pointer(b), a.size) == 1
            assert_same(out, function(a, b), a, b)
            for scalar in np.concatenate([b[:40], b[-3:]]):
                again, broadcast = np.array([scalar]), np.full_like(a, scalar)
                assert oracle.oracle_scalar(op, code(dtype), pointer(out), pointer(a), pointer(again), a.size) == 1
                assert_same(out, function(a, broadcast), a, broadcast)


@pytest.mark.parametrize("op", range(len(UNARY)), ids=[name for name, _, _ in UNARY])
def test_unary(oracle: ctypes.CDLL, op: int) -> None:
    name, function, types = UNARY[op]
    for dtype in VECTOR_TYPES:
        if dtype not in types:
            assert oracle.oracle_unary(op, code(dtype), ctypes.c_void_p(0), ctypes.c_void_p(0), 0) == 0, (name, dtype)
            continue
        a = np.arange(1 << 16, dtype=np.uint16).view(F16) if dtype == F16 else vector_samples(dtype, 3)
        out = np.empty_like(a)
        assert oracle.oracle_unary(op, code(dtype), pointer(out), pointer(a), a.size) == 1
        with np.errstate(all="ignore"):
            assert_same(out, function(a), a)


def test_axpy_and_mul_add_dst_round_the_product_first(oracle: ctypes.CDLL) -> None:
    for dst in VECTOR_TYPES:
        for src in VECTOR_TYPES:
            legal = (dst, src) in [(F16, F16), (F32, F32), (F32, F16)]
            nothing = ctypes.c_void_p(0)
            if not legal:
                assert oracle.oracle_multiply_add(code(dst), code(src), *[nothing] * 4, 0) == 0
                continue
            a, b = operands(src)
            start = vector_samples(dst, 4)[: a.size]
            a, b = a[: start.size].copy(), b[: start.size].copy()
            args = (code(dst), code(src))
            with np.errstate(all="ignore"):
                out = start.copy()
                assert oracle.oracle_multiply_add(*args, pointer(out), pointer(a), pointer(b), nothing, a.size) == 1
                product = a.astype(dst) * b.astype(dst)
                assert_same(out, start + product, start, a, b)
                out, scalar = start.copy(), b[7:8].copy()
                oracle.oracle_multiply_add(*args, pointer(out), pointer(a), nothing, pointer(scalar), a.size)
                assert_same(out, start + a.astype(dst) * scalar.astype(dst), start, a)
    fused = np.array([-1.0], np.float32)  # an fma would leave -2^-26
    x = np.array([1 + 2.0**-13], np.float32)
    y = np.array([1 - 2.0**-13], np.float32)
    oracle.oracle_multiply_add(code(F32), code(F32), pointer(fused), pointer(x), pointer(y), ctypes.c_void_p(0), 1)
    assert fused[0] == 0


@pytest.mark.parametrize("count", [1, 3, 8, 31, 64, 1000])
def test_in_place_and_exactly_n(oracle: ctypes.CDLL, count: int) -> None:
    for dtype in ARITHMETIC:
        a, b = (x[:count].copy() for x in operands(dtype))
        with np.errstate(all="ignore"):
            want = a * b
        for first in (True, False):
            shared = np.concatenate([a if first else b, np.ones(40, dtype)])
            other = b if first else a
            pair = (pointer(shared), pointer(other)) if first else (pointer(other), pointer(shared))
            oracle.oracle_binary(2, code(dtype), pointer(shared), *pair, count)
            assert_same(shared[:count], want)
            assert (shared[count:] == 1).all()


def test_fill(oracle: ctypes.CDLL) -> None:
    for dtype in VECTOR_TYPES:
        value = np.full(1, 3).astype(dtype)
        out = np.zeros(103).astype(dtype)
        legal = dtype.itemsize in (2, 4)
        assert oracle.oracle_fill(code(dtype), pointer(out), pointer(value), 100) == int(legal)
        assert (bits(out)[:100] == (bits(value)[0] if legal else 0)).all() and (bits(out)[100:] == 0).all()


def lane_index(itemsize: int, repeat: int, lane: int, block_stride: int, repeat_stride: int) -> int:
    per_block = 32 // itemsize
    return (repeat * repeat_stride + lane // per_block * block_stride) * per_block + lane % per_block


def test_mask_and_stride_form(oracle: ctypes.CDLL) -> None:
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal(4096).astype(F32), rng.standard_normal(4096).astype(F16)
    for mask, strides in [(~0, [1, 8, 1, 8, 1, 4]), (0x8000000000000001, [2, 17, 0, 1, 3, 0]), (0x0F0F, [1, 8, 1, 0, 2, 8])]:
        words = np.array([mask & (2**64 - 1), 0], np.uint64)
        steps = np.array(strides, np.uint32)
        out, want = np.zeros(4096, F32), np.zeros(4096, F32)
        oracle.oracle_add_repeats(
            pointer(out), pointer(a), pointer(b), pointer(words), 5, *(pointer(steps[i : i + 2]) for i in (0, 2, 4))
        )
        for repeat in range(5):
            for lane in range(64):
                if (int(words[0]) >> lane) & 1:
                    at = lane_index(4, repeat, lane, strides[0], strides[1])
                    left = a[lane_index(4, repeat, lane, strides[2], strides[3])]
                    want[at] = left + np.float32(b[lane_index(2, repeat, lane, strides[4], strides[5])])
        assert_same(out, want)


def test_contiguous_mask(oracle: ctypes.CDLL) -> None:
    words = np.zeros(2, np.uint64)
    for count in range(129):
        oracle.oracle_first_lanes(pointer(words), count)
        assert int(words[0]) | int(words[1]) << 64 == (1 << count) - 1


# ---- reductions ----


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
    for values, want in [([-0.0] * 3, -0.0), ([np.inf, 1, -np.inf], np.nan), ([np.nan, 1], np.nan), ([1e38] * 4, np.inf)]:
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
                assert oracle.oracle_reduce(op, code(dtype), pointer(out), pointer(x), x.size, with_index) == 1
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


MASKS = [2**128 - 1, 1, 1 << 70, 0x55555555_AAAAAAAA_00FF00FF_80000001, 2**20 - 1, 0xFFFF << 64, 0xFF00 | 5 << 33]


def repeats_of(x: Array, repeats: int, strides: list[int]) -> Array:
    """(repeats, lanes) view of what the instruction reads."""
    size = x.dtype.itemsize
    index = [[lane_index(size, r, lane, *strides) for lane in range(256 // size)] for r in range(repeats)]
    return x[np.array(index)]


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=hex)
def test_repeat_reductions(oracle: ctypes.CDLL, dtype: np.dtype, mask: int) -> None:
    rng = np.random.default_rng(8)
    lanes, size, repeats = LANES[dtype], dtype.itemsize, 5
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
                check_whole_extremes(oracle, call, out, table, active, steps, size)


def check_blocks(oracle: ctypes.CDLL, call: tuple[object, ...], out: Array, table: Array, active: Array, steps: Array) -> None:
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
    oracle: ctypes.CDLL, call: tuple[object, ...], out: Array, table: Array, active: Array, steps: Array, size: int
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


def test_missing_types_do_not_compile(tmp_path: Path) -> None:
    header = '#include "twin/vector_math.h"\nusing namespace twin;\n'
    body = "void f({0}* d, const {0}* s) {{ {1}; }}"
    calls = {
        "BinaryArray<AddOp>(d, s, s, 8)": ("float", "bfloat16_t", "does not take this element type"),
        "UnaryArray<AbsOp>(d, s, 8)": ("half", "int32_t", "does not take this element type"),
        "BinaryArray<AndOp>(d, s, s, 8)": ("uint16_t", "int32_t", "does not take this element type"),
        "ReduceSumArray(d, s, 8)": ("float", "int32_t", "reductions take half and float"),
        "FillArray(d, *s, 8)": ("bfloat16_t", "int8_t", "no 8-bit ones"),
        "SelectArray(d, nullptr, s, s, SELMODE::VSEL_CMPMASK_SPR, 8)": ("half", "int32_t", "Select: half and float"),
        "CompareArray(reinterpret_cast<uint8_t*>(d), s, s, CMPMODE::EQ, 8)": ("int32_t", "int16_t", "Compare: half, float"),
    }
    good = "".join(f"namespace n{i} {{ {body.format(calls[call][0], call)} }}\n" for i, call in enumerate(calls))
    assert syntax_errors(header + good, tmp_path) == ""
    for call, (_, bad, message) in calls.items():
        assert message in syntax_errors(header + body.format(bad, call), tmp_path), call
