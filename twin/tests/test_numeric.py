"""half, bfloat16_t and Cast of the twin: every pair and mode against numpy and ml_dtypes, bit for bit."""

from __future__ import annotations

import ctypes
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from twin_oracle import assert_same, bits, native_library, pointer, syntax_errors

pytestmark = pytest.mark.asan

Array = NDArray[np.generic]
F16, BF16, F32 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
I8, U8, I16 = np.dtype(np.int8), np.dtype(np.uint8), np.dtype(np.int16)
I32, I64 = np.dtype(np.int32), np.dtype(np.int64)
TYPES = [F16, BF16, F32, I8, U8, I16, I32, I64]  # the numbering of numeric_oracle.cpp
NONE, RINT, FLOOR, CEIL, ROUND, TRUNC, ODD = range(7)
FIVE = {RINT, FLOOR, CEIL, ROUND, TRUNC}

# (source, destination) -> modes, from the vendor's Cast documentation for Atlas A2 and A3.
TABLE: dict[tuple[np.dtype, np.dtype], set[int]] = {
    (I8, F16): {NONE},
    (U8, F16): {NONE},
    (I16, F16): FIVE | {NONE},
    (I16, F32): {NONE},
    (F16, I8): FIVE | {NONE},
    (F16, U8): FIVE | {NONE},
    (F16, I16): FIVE,
    (F16, I32): FIVE,
    (F16, F32): {NONE},
    (BF16, I32): FIVE,
    (BF16, F32): {NONE},
    (I32, I16): {NONE},
    (I32, F16): FIVE | {NONE, ODD},  # the mode is ignored
    (I32, F32): FIVE | {NONE},
    (I32, I64): {NONE},
    (F32, I16): FIVE,
    (F32, F16): FIVE | {NONE, ODD},
    (F32, BF16): FIVE,
    (F32, I32): FIVE,
    (F32, F32): FIVE,
    (F32, I64): FIVE,
    (I64, I32): {NONE},
    (I64, F32): FIVE,
}


# Scalar code, and the widest vectors of this machine: other code paths of the same loops.
@pytest.fixture(scope="module", params=[pytest.param("-O1", marks=pytest.mark.nightly), "-O3 -march=native"])
def oracle(request: pytest.FixtureRequest) -> ctypes.CDLL:
    library = ctypes.CDLL(str(native_library("numeric_oracle", "fast", *request.param.split())))
    library.oracle_scalar_cast.argtypes = [ctypes.c_float, ctypes.c_int]
    return library


def cast(
    library: ctypes.CDLL, src: Array, dst: np.dtype, mode: int, scale: float = 1.0, out: Array | None = None
) -> Array:
    """src cast to dst by the twin, into `out` if given."""
    result = np.full(src.size, 0x5A, np.uint8).astype(dst) if out is None else out
    codes = (TYPES.index(src.dtype), TYPES.index(dst))
    data = (pointer(result), pointer(src))
    assert library.oracle_cast(*codes, mode, *data, src.size, ctypes.c_float(scale)) == 1
    return result


# ---- inputs ----


def all_16(dtype: np.dtype) -> Array:
    return np.arange(1 << 16, dtype=np.uint16).view(dtype)


def float_samples() -> Array:
    """Every exponent with chosen mantissas; midpoints of half, bfloat16 and the integers; random bits."""
    mantissas = [0, 1, 2, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0x18000]
    mantissas += [0x3FFFFF, 0x400000, 0x400001, 0x7FE000, 0x7FEFFF, 0x7FF000, 0x7FF001, 0x7F7FFF, 0x7F8000]
    mantissas += [0x7FFFFE, 0x7FFFFF]
    grid = (np.arange(512, dtype=np.uint32)[:, None] << 23) | np.array(mantissas, np.uint32)
    with np.errstate(all="ignore"):
        halves = all_16(F16)[:0x7C01].astype(np.float64)
        middle_half = ((halves[:-1] + np.append(halves[1:-1], 65536.0)) / 2).astype(np.float32)
    middle_bf16 = (np.arange(0x7F80, dtype=np.uint32) << 16) | 0x8000
    integers = (np.arange(-70000, 70000) / np.float32(2)).astype(np.float32)
    edges = np.array([2.0**p for p in (15, 16, 22, 23, 24, 31, 32, 63, 64)] + [65504, 65520], np.float32)
    near = np.concatenate([bits(middle_half), middle_bf16, bits(integers), bits(edges)])
    near = np.concatenate([near - 1, near, near + 1])
    random = np.random.default_rng(1).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    positive = np.concatenate([grid.ravel(), near])
    return np.concatenate([positive, positive ^ np.uint32(1 << 31), random]).view(np.float32)


def int_samples(dtype: np.dtype) -> Array:
    info = np.iinfo(dtype)
    if dtype.itemsize <= 2:
        return np.arange(info.min, info.max + 1).astype(dtype)
    rng = np.random.default_rng(2)
    powers = np.array([1 << p for p in range(dtype.itemsize * 8 - 1)], dtype)
    near = np.concatenate([powers + d for d in range(-3, 4)] + [powers + powers // 2, powers + powers // 4])
    random = rng.integers(info.min, info.max, 100_000, dtype, endpoint=True)
    # Shifts give every width; half of them end in 1000..., a tie.
    shifted = (random >> rng.integers(0, dtype.itemsize * 8 - 1, random.size).astype(dtype)).astype(dtype)
    ties = (shifted << rng.integers(1, 8, random.size).astype(dtype)).astype(dtype)
    ends = np.array([info.min, info.min + 1, info.max, info.max - 1, 0, -1], dtype)
    return np.concatenate([near, ~near, random, shifted, ties, ends])


def samples(dtype: np.dtype) -> Array:
    if dtype == F32:
        return float_samples()
    return all_16(dtype) if dtype in (F16, BF16) else int_samples(dtype)


INPUTS = {dtype: samples(dtype) for dtype in TYPES}


# ---- what the results must be, from float64 and integers ----


def rounded_to_integral(x: NDArray[np.float64], mode: int) -> NDArray[np.float64]:
    if mode == ROUND:
        # In two parts: |x| + 0.5 is not exact for every float64, but x is a float32 here.
        return np.copysign(np.floor(np.abs(x) + 0.5), x)
    return {NONE: np.rint, RINT: np.rint, FLOOR: np.floor, CEIL: np.ceil, TRUNC: np.trunc}[mode](x)


def to_integer(src: Array, dst: np.dtype, mode: int) -> Array:
    x = rounded_to_integral(src.astype(np.float64), mode)
    info = np.iinfo(dst)
    low, high = x < float(info.min), x >= float(info.max) + 1  # 2^63 is a float64, int64's maximum is not
    safe = np.where(low | high | np.isnan(x), 0, x)
    result = np.where(low, info.min, np.where(high, info.max, safe.astype(np.int64)))
    return result.astype(dst)


def to_float(src: Array, dst: np.dtype, mode: int) -> Array:
    """Between the two neighbours of each exact source, by their bits: the mode's choice."""
    exact = src if src.dtype.kind == "i" else src.astype(np.float64)
    x = exact.astype(np.longdouble if src.dtype == I64 else np.float64)  # holds every source
    magnitude, negative = np.abs(x), np.signbit(x)
    infinity = {F16: 0x7C00, BF16: 0x7F80, F32: 0x7F800000}[dst]
    past_the_end = x.dtype.type(2) ** (16 if dst == F16 else 128)  # where the next finite value would be

    def value(code: Array) -> Array:
        finite = code.astype(f"u{dst.itemsize}").view(dst).astype(np.float64).astype(x.dtype)
        return np.where(code >= infinity, past_the_end, finite)

    # A library's rounding, perhaps twice, is at most one step away.
    low = np.minimum(bits(magnitude.astype(np.float64).astype(dst)).astype(np.int64), infinity) - 1
    low = np.clip(low, 0, infinity - 1)
    for _ in range(2):
        low = np.where((value(low + 1) <= magnitude) & (low < infinity - 1), low + 1, low)
    over = magnitude - value(low) > value(low + 1) - magnitude
    tie = magnitude - value(low) == value(low + 1) - magnitude
    odd = (low & 1) == 1
    to_even = over | (tie & odd)
    choices = {NONE: to_even, RINT: to_even, FLOOR: negative, CEIL: ~negative, ROUND: over | tie}
    up = {**choices, TRUNC: np.zeros_like(odd), ODD: ~odd}[mode]
    result = low + (up & (value(low) != magnitude))
    result = np.where(np.isinf(x), infinity, np.where(np.isnan(x), infinity + 1, result))
    return (result | (negative.astype(np.int64) << (8 * dst.itemsize - 1))).astype(f"u{dst.itemsize}").view(dst)


def expected(src: Array, dst: np.dtype, mode: int) -> Array:
    with np.errstate(all="ignore"):
        if dst == F32 and src.dtype == F32:
            return rounded_to_integral(src.astype(np.float64), mode).astype(np.float32)
        if dst in (F16, BF16, F32):
            return to_float(src, dst, RINT if (src.dtype, dst) == (I32, F16) else mode)
        if src.dtype.kind in "iu":
            return np.clip(src, np.iinfo(dst).min, np.iinfo(dst).max).astype(dst)
        return to_integer(src, dst, mode)


# ---- tests ----


@pytest.mark.parametrize(("src", "dst"), TABLE, ids=str)
def test_cast_every_pair_and_mode(oracle: ctypes.CDLL, src: np.dtype, dst: np.dtype) -> None:
    """All of the samples; in place where the pair does not widen; exactly n elements are written."""
    inputs = INPUTS[src]
    for mode in sorted(TABLE[src, dst]):
        want = expected(inputs, dst, mode)
        assert_same(cast(oracle, inputs, dst, mode), want, inputs)
        for count in (0, 1, 7, 8, 37, 1000):
            out = np.full((count + 40) * dst.itemsize, 0xAB, np.uint8)
            cast(oracle, inputs[:count].copy(), dst, mode, out=out.view(dst))
            assert (out[count * dst.itemsize :] == 0xAB).all()
            if dst.itemsize <= src.itemsize:
                shared = inputs[-count or inputs.size :].copy()
                cast(oracle, shared[:count], dst, mode, out=shared.view(dst)[:count])
                assert_same(shared.view(dst)[:count], want[-count or want.size :][:count])


def test_nan_stays_quiet_and_signed(oracle: ctypes.CDLL) -> None:
    signs = np.array([0, 1 << 31], np.uint32)[:, None]
    payloads = np.array([1, 0x1000, 0x7FFF, 0x400000, 0x7FFFFF], np.uint32)
    nan = (0x7F800000 | payloads | signs).ravel().view(np.float32)
    for dst, quiet in ((F16, 0x7E00), (BF16, 0x7FC0)):
        for mode in sorted(TABLE[F32, dst]):
            raw = bits(cast(oracle, nan, dst, mode))
            assert ((raw & quiet) == quiet).all()
            assert ((raw >> 15) == (bits(nan) >> 31)).all()
    signalling = np.array([0x7C01, 0xFD23], np.uint16).view(np.float16)
    assert (bits(cast(oracle, signalling, F32, NONE)) & 0x400000 != 0).all()


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.0078125, 3.0, 0.333251953125, -1.0, 65504.0, 2.0**-24, 0.0])
def test_int32_to_half_multiplies_by_deq_scale_and_rounds_once(oracle: ctypes.CDLL, scale: float) -> None:
    x = INPUTS[I32]
    with np.errstate(over="ignore"):
        want = (x.astype(np.float64) * scale).astype(np.float16)  # the product is exact
    for mode in range(7):
        assert_same(cast(oracle, x, F16, mode, scale), want, x)


def test_table_is_the_documented_one(oracle: ctypes.CDLL) -> None:
    nothing = ctypes.c_void_p(0)
    for i, src in enumerate(TYPES):
        for j, dst in enumerate(TYPES):
            modes = TABLE.get((src, dst))
            for mode in [*range(9), 255]:
                status = oracle.oracle_cast(i, j, mode, nothing, nothing, 0, ctypes.c_float(1))
                assert status == (-1 if modes is None else int(mode in modes)), (src, dst, mode)


def half_pairs() -> tuple[Array, Array]:
    """Special values with every half, then random pairs."""
    special = [0, 1, 2, 0x3FF, 0x400, 0x401, 0x3C00, 0x3C01, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x3555]
    signed = np.array(special + [s | 0x8000 for s in special], np.uint16)
    a, b = np.random.default_rng(3).integers(0, 1 << 16, (2, 1 << 18), np.uint16)
    a = np.concatenate([np.repeat(signed, 1 << 16), a])
    b = np.concatenate([np.tile(np.arange(1 << 16, dtype=np.uint16), signed.size), b])
    return a.view(np.float16), b.view(np.float16)


def test_half_arithmetic_and_comparisons_are_ieee(oracle: ctypes.CDLL) -> None:
    a, b = half_pairs()
    out, flags = np.empty_like(a), np.empty(a.size, np.uint16)
    with np.errstate(all="ignore"):
        for op, function in enumerate((np.add, np.subtract, np.multiply, np.divide)):
            oracle.oracle_half_arithmetic(op, pointer(out), pointer(a), pointer(b), a.size)
            assert_same(out, function(a, b), a, b)
    oracle.oracle_half_compare(pointer(flags), pointer(a), pointer(b), a.size)
    want = sum(r.astype(np.uint16) << i for i, r in enumerate([a == b, a != b, a < b, a <= b, a > b, a >= b]))
    assert (flags == (want | want << 6)).all()


def test_half_and_bf16_from_double_and_int_round_once(oracle: ctypes.CDLL) -> None:
    rng = np.random.default_rng(4)
    halves = all_16(F16)[:0x7C00].astype(np.float64)
    middle = (halves[:-1] + halves[1:]) / 2
    tiny = np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)  # float32 would make ties of them
    wild = rng.integers(0, 1 << 64, 50_000, dtype=np.uint64).view(np.float64)
    bf16_ties = ((np.arange(0x7F7F, dtype=np.uint32) << 16) | 0x8000).view(np.float32).astype(np.float64)
    near = np.nextafter(bf16_ties, np.inf), np.nextafter(bf16_ties, 0)
    x = np.concatenate([halves, middle, *tiny, wild, bf16_ties, *near, [5e-324, -5e-324, 1e300, -1e300]])
    out16, out_bf16 = np.empty(x.size, np.float16), np.empty(x.size, ml_dtypes.bfloat16)
    oracle.oracle_half_from_double(pointer(out16), pointer(x), x.size)
    oracle.oracle_bf16_from_double(pointer(out_bf16), pointer(x), x.size)
    with np.errstate(all="ignore"):
        assert_same(out16, x.astype(np.float16), x)
        assert_same(out_bf16, to_float(x, BF16, RINT), x)
    integers = INPUTS[I64]
    out = np.empty(integers.size, np.float16)
    oracle.oracle_half_from_int(pointer(out), pointer(integers), integers.size)
    with np.errstate(over="ignore"):
        assert_same(out, integers.astype(np.float64).astype(np.float16), integers)


def test_scalar_casts_round_as_documented(oracle: ctypes.CDLL) -> None:
    for x in (3.14159, 1.5, 2.5, -1.5, -2.5, 3e9, -3e9, float("nan"), 0.49999997):
        as_array = np.array([x], np.float32)
        for mode in (RINT, FLOOR, CEIL, ROUND):
            assert oracle.oracle_scalar_cast(x, mode) == to_integer(as_array, I32, mode)[0]
        got = np.array([oracle.oracle_scalar_cast(x, ODD)], np.uint16).view(np.float16)
        assert_same(got, to_float(as_array, F16, ODD))
    vendors_example = np.float16(3.142578)
    assert oracle.oracle_scalar_cast(3.14159, ODD) == vendors_example.view(np.uint16)


HEADER = '#include "twin/math/cast.h"\n'


def test_scalar_code_of_kernels_compiles(tmp_path: Path) -> None:
    code = """
    constexpr half kOne = 1.0;
    static_assert(static_cast<float>(kOne + 1) == 2.0f && (kOne + 0.5f) == 1.5f && sizeof(kOne + 0.5f) == 4);
    static_assert(std::is_same_v<decltype(kOne * kOne), half> && std::is_same_v<decltype(kOne * 2), half>);
    static_assert(std::is_same_v<decltype(2.0 * kOne), double> && -kOne < 0 && 3 > kOne && kOne == 1);
    static_assert(AscendC::ToFloat(AscendC::ToBfloat16(3.14159f)) == 3.140625f);
    static_assert(AscendC::ToFloat((bfloat16_t)1) == 1.0f && static_cast<float>(bfloat16_t(0.5)) == 0.5f);
    uint16_t f(half h, half* p) {
        float x = h;
        h += x; h -= 1; h *= h; h /= 2.0f;
        int32_t i = static_cast<int32_t>(h);
        if (h && !p[0]) p[0] = i;
        half zero(0), k = static_cast<half>(127.0f), m = h > zero ? h : zero;
        p[1] = k / m;
        return *reinterpret_cast<uint16_t*>(&p[1]);
    }
    """
    assert syntax_errors(HEADER + code, tmp_path) == ""
