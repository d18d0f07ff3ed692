"""Element arithmetic of the twin's vector unit against numpy, bit for bit."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from twin_oracle import VARIANTS, VECTOR_TYPES, assert_same, bits, build, lane_index, pointer, syntax_errors
from twin_oracle import vector_samples as samples

pytestmark = pytest.mark.asan

Array = NDArray[np.generic]
F16, F32, I16, U16 = (np.dtype(t) for t in (np.float16, np.float32, np.int16, np.uint16))
I32, U32 = np.dtype(np.int32), np.dtype(np.uint32)
REAL = [F16, F32]
ARITHMETIC = [F16, F32, I16, I32]
SHIFTED = [I16, U16, I32, U32]
NOTHING = ctypes.c_void_p(0)


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
    a, b = samples(dtype, 1), samples(dtype, 2)
    if shift:
        b = (np.arange(b.size) % (dtype.itemsize * 8 + 1)).astype(dtype)
    return a, b


# ---- elementwise ----


@pytest.mark.parametrize("op", range(len(BINARY)), ids=[name for name, _, _ in BINARY])
def test_binary_and_scalar_forms(oracle: ctypes.CDLL, op: int) -> None:
    name, function, types = BINARY[op]
    for dtype in VECTOR_TYPES:
        call = (op, code(dtype))
        if dtype not in types:
            assert oracle.oracle_binary(*call, NOTHING, NOTHING, NOTHING, 0) == 0, (name, dtype)
            assert oracle.oracle_scalar(*call, NOTHING, NOTHING, NOTHING, 0) == 0, (name, dtype)
            continue
        a, b = operands(dtype, shift="Shift" in name)
        out = np.empty_like(a)
        with np.errstate(all="ignore"):
            assert oracle.oracle_binary(*call, pointer(out), pointer(a), pointer(b), a.size) == 1
            assert_same(out, function(a, b), a, b)
            for at in [*range(40), -1, -2, -3]:
                scalar, broadcast = b[at].reshape(1), np.full_like(a, b[at])
                assert oracle.oracle_scalar(*call, pointer(out), pointer(a), pointer(scalar), a.size) == 1
                assert_same(out, function(a, broadcast), a, broadcast)


@pytest.mark.parametrize("op", range(len(UNARY)), ids=[name for name, _, _ in UNARY])
def test_unary(oracle: ctypes.CDLL, op: int) -> None:
    name, function, types = UNARY[op]
    for dtype in VECTOR_TYPES:
        if dtype not in types:
            assert oracle.oracle_unary(op, code(dtype), NOTHING, NOTHING, 0) == 0, (name, dtype)
            continue
        a = np.arange(1 << 16, dtype=np.uint16).view(F16) if dtype == F16 else samples(dtype, 3)
        out = np.empty_like(a)
        assert oracle.oracle_unary(op, code(dtype), pointer(out), pointer(a), a.size) == 1
        with np.errstate(all="ignore"):
            assert_same(out, function(a), a)


def test_axpy_and_mul_add_dst_round_the_product_first(oracle: ctypes.CDLL) -> None:
    multiply_add = oracle.oracle_multiply_add
    for dst in VECTOR_TYPES:
        for src in VECTOR_TYPES:
            codes = (code(dst), code(src))
            if (dst, src) not in [(F16, F16), (F32, F32), (F32, F16)]:
                assert multiply_add(*codes, *[NOTHING] * 4, 0) == 0
                continue
            a, b = operands(src)
            start = samples(dst, 4)
            with np.errstate(all="ignore"):
                out = start.copy()
                assert multiply_add(*codes, pointer(out), pointer(a), pointer(b), NOTHING, a.size) == 1
                assert_same(out, start + a.astype(dst) * b.astype(dst), start, a, b)
                for scalar in (b[7:8], b[-1:], b[9999:10000]):
                    out = start.copy()
                    multiply_add(*codes, pointer(out), pointer(a), NOTHING, pointer(scalar), a.size)
                    assert_same(out, start + a.astype(dst) * scalar.astype(dst), start, a)
    fused = np.array([-1.0], np.float32)  # an fma would leave -2^-26
    x = np.array([1 + 2.0**-13], np.float32)
    y = np.array([1 - 2.0**-13], np.float32)
    multiply_add(code(F32), code(F32), pointer(fused), pointer(x), pointer(y), NOTHING, 1)
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


def test_mask_and_stride_form(oracle: ctypes.CDLL) -> None:
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal(4096).astype(F32), rng.standard_normal(4096).astype(F16)
    everything = 2**64 - 1
    for mask, *strides in [
        (everything, [1, 8], [1, 8], [1, 4]),
        (1 << 63 | 1, [2, 17], [0, 1], [3, 0]),
        (0x0F0F, [1, 8], [1, 0], [2, 8]),
    ]:
        words = np.array([mask, 0], np.uint64)
        steps = [np.array(pair, np.uint32) for pair in strides]
        out, want = np.zeros(4096, F32), np.zeros(4096, F32)
        oracle.oracle_add_repeats(
            pointer(out), pointer(a), pointer(b), pointer(words), 5, *(pointer(pair) for pair in steps)
        )
        for repeat in range(5):
            for lane in range(64):
                if (mask >> lane) & 1:
                    sizes = (4, 4, 2)
                    at, i, j = (lane_index(n, repeat, lane, *s) for n, s in zip(sizes, strides, strict=True))
                    want[at] = a[i] + np.float32(b[j])
        assert_same(out, want)


def test_contiguous_mask(oracle: ctypes.CDLL) -> None:
    words = np.zeros(2, np.uint64)
    for count in range(129):
        oracle.oracle_first_lanes(pointer(words), count)
        assert int(words[0]) | int(words[1]) << 64 == (1 << count) - 1


def test_missing_types_do_not_compile(tmp_path: Path) -> None:
    header = '#include "twin/math/array_ops.h"\nusing namespace twin;\n'
    body = "void f({0}* d, const {0}* s) {{ {1}; }}"
    compare = "CompareArray(reinterpret_cast<uint8_t*>(d), s, s, CMPMODE::EQ, 8)"
    select = "SelectArray(d, nullptr, s, s, SELMODE::VSEL_CMPMASK_SPR, 8)"
    calls = {  # a type that must compile, one that must not, and what the compiler then says
        "BinaryArray<AddOp>(d, s, s, 8)": ("float", "bfloat16_t", "does not take this element type"),
        "UnaryArray<AbsOp>(d, s, 8)": ("half", "int32_t", "does not take this element type"),
        "BinaryArray<AndOp>(d, s, s, 8)": ("uint16_t", "int32_t", "does not take this element type"),
        "ReduceSumArray(d, s, 8)": ("float", "int32_t", "reductions take half and float"),
        "FillArray(d, *s, 8)": ("bfloat16_t", "int8_t", "no 8-bit ones"),
        select: ("half", "int32_t", "Select: half and float"),
        compare: ("int32_t", "int16_t", "Compare: half, float"),
    }
    good = [body.format(legal, call) for call, (legal, _, _) in calls.items()]
    assert (
        syntax_errors(header + "".join(f"namespace n{i} {{ {f} }}\n" for i, f in enumerate(good)), tmp_path)
        == ""
    )
    for call, (_, bad, message) in calls.items():
        assert message in syntax_errors(header + body.format(bad, call), tmp_path), call
