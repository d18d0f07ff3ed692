"""Elementwise calls against numpy, bit for bit: values, masks, registers, overlaps, what each declares."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from twin_calls import BYTES, FULL, GAPS, REAL, TYPES, Array, clean, engines, lanes_of, offsets, run
from twin_oracle import assert_same, bits, vector_samples

EVERY_OTHER = 0x5555_5555_5555_5555
DENSE = ((1, 1, 1), (8, 8, 8))  # block strides of dst, a, b; repeat strides of dst, a, b


def numbers_of(form: int, mask: int, repeats: int, blocks: tuple[int, ...], steps: tuple[int, ...]) -> list[int]:
    """The numbers of a kernel: form, mask, its high word, repeatTime, block and repeat strides."""
    return [form, mask & FULL, mask >> 64, repeats, *blocks, *steps]


def values(kind: str, seed: int) -> Array:
    """A tensor full of ordinary numbers."""
    dtype, rng = TYPES[kind], np.random.default_rng(seed)
    count = BYTES // dtype.itemsize
    if dtype.kind == "f":
        return (rng.integers(1, 400, count) / 64 * rng.choice([-1, 1], count)).astype(dtype)
    return rng.integers(0 if dtype.kind == "u" else -100, 100, count).astype(dtype)


def relu(x: Array) -> Array:
    return np.where(x < 0, x.dtype.type(0), x)


def shift_left(x: Array, count: Array) -> Array:
    """A signed number keeps its sign bit."""
    wide = bits(x).astype(np.uint64) << np.uint64(count[0])
    width = x.dtype.itemsize * 8
    if x.dtype.kind == "u":
        return (wide % np.uint64(1 << width)).astype(x.dtype)
    sign = np.uint64(1 << (width - 1))
    return ((wide % sign) | (bits(x) & sign)).astype(bits(x).dtype).view(x.dtype)


def by_float64(function: Callable[[float], float]) -> Callable[..., Array]:
    def apply(d: Array, x: Array) -> Array:
        values = np.array([function(v) for v in x.astype(np.float64).tolist()])
        return values.astype(np.float32).astype(x.dtype)

    return apply


def exp(x: float) -> float:
    return math.inf if x > 709 else math.exp(x)


def ln(x: float) -> float:
    return math.nan if x < 0 or x != x else (math.log(x) if x > 0 else -math.inf)


Function = Callable[..., Array]
# Name -> (element types, numpy). Binary calls take (dst, a, b), calls with a scalar (dst, a, scalar).
ARITHMETIC = ["f2", "f4", "i2", "i4"]
SHORT, SHIFTED = ["i2", "u2"], ["i2", "u2", "i4", "u4"]
BINARY: dict[str, tuple[list[str], Function]] = {
    "Add": (ARITHMETIC, lambda d, a, b: a + b),
    "Sub": (ARITHMETIC, lambda d, a, b: a - b),
    "Mul": (ARITHMETIC, lambda d, a, b: a * b),
    "Div": (REAL, lambda d, a, b: a / b),
    "Max": (ARITHMETIC, lambda d, a, b: np.where((b > a) | (a != a), b, a)),
    "Min": (ARITHMETIC, lambda d, a, b: np.where((b < a) | (a != a), b, a)),
    "And": (SHORT, lambda d, a, b: a & b),
    "Or": (SHORT, lambda d, a, b: a | b),
    "AddRelu": (REAL, lambda d, a, b: relu(a + b)),
    "SubRelu": (REAL, lambda d, a, b: relu(a - b)),
    "FusedMulAdd": (REAL, lambda d, a, b: a * d + b),
    "FusedMulAddRelu": (REAL, lambda d, a, b: relu(a * d + b)),
    "MulAddDst": (REAL, lambda d, a, b: d + a * b),  # an fma would not round the product
}
SCALAR: dict[str, tuple[list[str], Function]] = {
    "Adds": BINARY["Add"],
    "Muls": BINARY["Mul"],
    "Maxs": BINARY["Max"],
    "Mins": BINARY["Min"],
    "LeakyRelu": (REAL, lambda d, a, s: np.where(a >= 0, a, a * s)),
    "ShiftLeft": (SHIFTED, lambda d, a, s: shift_left(a, s)),
    "ShiftRight": (SHIFTED, lambda d, a, s: (a.astype(np.int64) >> np.int64(s[0])).astype(a.dtype)),
    "Axpy": (REAL, lambda d, a, s: d + a * s),
}
UNARY: dict[str, tuple[list[str], Function]] = {
    "Abs": (REAL, lambda d, a: np.abs(a)),
    "Relu": ([*REAL, "i4"], lambda d, a: relu(a)),
    "Not": (SHORT, lambda d, a: ~a),
    "Sqrt": (REAL, lambda d, a: np.sqrt(a)),
    "Rsqrt": (REAL, lambda d, a: (1 / np.sqrt(a.astype(np.float64))).astype(np.float32).astype(a.dtype)),
    "Reciprocal": (REAL, lambda d, a: (1 / a).astype(a.dtype)),
    "Exp": (REAL, by_float64(exp)),
    "Ln": (REAL, by_float64(ln)),
    "Copy": ([*ARITHMETIC, "u2", "u4"], lambda d, a: a),
}
CALLS = BINARY | SCALAR | UNARY
CASES = [(name, kind) for name, (kinds, _) in CALLS.items() for kind in kinds]
IN_EVERY_RUN = {("Add", "f4"), ("Mul", "i2"), ("Axpy", "f4"), ("Adds", "f4"), ("Not", "i2"), ("Copy", "u4")}


@pytest.mark.asan
@engines
@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if case[0] != "Copy"])
def test_special_values_follow_the_documented_results(name: str, kind: str, engine: str) -> None:
    """The count form over NaN, infinities, zeros of both signs, subnormals, largest numbers, random bits."""
    dtype, function = TYPES[kind], CALLS[name][1]
    n = BYTES // dtype.itemsize
    dst, a, b = (vector_samples(dtype, seed, 2000)[:n] for seed in (4, 1, 2))
    second = [b]
    if name in SCALAR:
        scalars = np.arange(8 * dtype.itemsize + 1) if "Shift" in name else b[:24]
        second = [np.array([s]).astype(dtype) for s in scalars]
    for count in (a.size, 37):
        for other in second if count > 37 else second[:1]:
            got = clean("elementwise", f"{name}/{kind}", [0, count], a, other, dst, engine=engine).view(dtype)
            operands = [dst[:count], a[:count], other[:count]][: 2 if name in UNARY else 3]
            with np.errstate(all="ignore"):
                assert_same(got[:count], function(*operands), *operands)
            assert_same(got[count : dst.size], dst[count:])


# (form, mask, repeatTime, block strides of dst, a, b, repeat strides of dst, a, b)
Shape = tuple[int, int, int, tuple[int, int, int], tuple[int, int, int]]
SHAPES: list[Shape] = [
    (1, 64, 4, (1, 1, 1), (8, 8, 8)),
    (1, 37, 3, (1, 1, 1), (8, 8, 0)),
    (1, 17, 2, (2, 1, 3), (16, 9, 24)),
    (1, 64, 2, (2, 2, 2), (17, 16, 20)),
    (2, GAPS, 3, (1, 1, 1), (8, 8, 8)),
    (2, EVERY_OTHER, 2, (1, 2, 1), (8, 16, 8)),
    (2, GAPS | GAPS << 64, 2, (1, 1, 1), (9, 8, 8)),
    (3, GAPS, 2, (1, 1, 2), (8, 8, 16)),
]


def reference(shape: Shape, function: Function, *operands: Array) -> Array:
    """The destination (the first operand) after the call."""
    form, mask, repeats, blocks, steps = shape
    dst, *sources = operands
    width = 256 // max(x.dtype.itemsize for x in operands)
    where = [(r, lane) for r in range(repeats) for lane in lanes_of(form, mask, width)]
    at = [
        offsets(x.dtype.itemsize, where, blocks[i], steps[i]) if x.size > 1 else np.zeros(1, np.int64)
        for i, x in enumerate(operands)
    ]
    result = dst.copy()
    with np.errstate(all="ignore"):
        taken = [x[i] for x, i in zip(sources, at[1:], strict=True)]
        result[at[0]] = function(dst[at[0]], *taken)
    return result


@pytest.mark.parametrize(
    ("name", "kind"), [pytest.param(*case, marks=() if case in IN_EVERY_RUN else pytest.mark.nightly) for case in CASES]
)
def test_mask_and_counter_forms(name: str, kind: str) -> None:
    """4 and 5 are mask forms in counter mode, whose repeatTime has no effect."""
    dtype, function = TYPES[kind], CALLS[name][1]
    engine = "audit" if (name, kind) in IN_EVERY_RUN else "audit-all"
    out, a, b = (values(kind, seed) for seed in (1, 2, 3))
    if name in SCALAR:
        b = np.array([3]).astype(dtype)
    operands = [out, a] if name in UNARY else [out, a, b]
    for shape in SHAPES:
        got = clean("elementwise", f"{name}/{kind}", numbers_of(*shape), a, b, out, engine)
        assert_same(got.view(dtype), reference(shape, function, *operands))
    for form, count, block in [(4, 300, 1), (4, 7, 1), (4, 150, 2), (5, 260, 1)]:
        numbers = numbers_of(form, count, 1, (block, 1, 1), (8 * block, 8, 8))
        got = clean("elementwise", f"{name}/{kind}", numbers, a, b, out, engine)
        width = 256 // dtype.itemsize
        to = offsets(dtype.itemsize, [(i // width, i % width) for i in range(count)], block, 8 * block)
        want = out.copy()
        with np.errstate(all="ignore"):
            want[to] = function(out[to], *(x[:count] for x in operands[1:]))
        assert_same(got.view(dtype), want)


@pytest.mark.parametrize("kind", ["f2", "f4", "i2", "i4", "u2", "u4"])
def test_duplicate_and_create_vec_index(kind: str) -> None:
    """Lane i of repeat r of an index holds first + r * lanes + i."""
    dtype = TYPES[kind]
    out, first, width = values(kind, 7), np.array([41]).astype(dtype), 256 // dtype.itemsize
    for shape in SHAPES:
        got = clean("elementwise", f"Duplicate/{kind}", numbers_of(*shape), None, first, out)
        assert_same(got.view(dtype), reference(shape, lambda d, s: s, out, first))
        form, mask, repeats, blocks, steps = shape
        if form == 3 or kind not in ARITHMETIC:
            continue
        where = [(r, lane) for r in range(repeats) for lane in lanes_of(form, mask, width)]
        want = out.copy()
        want[offsets(dtype.itemsize, where, blocks[0], steps[0])] = [41 + r * width + lane for r, lane in where]
        got = clean("elementwise", f"Index/{kind}", numbers_of(*shape), None, first, out)
        assert_same(got.view(dtype), want)
    got = clean("elementwise", f"Duplicate/{kind}", [0, 45], None, first, out).view(dtype)
    assert (got[:45] == 41).all() and (got[45:] == out[45:]).all()


CASTS: dict[str, Callable[[Array], Array]] = {
    "f4f2": lambda x: x.astype(np.float16),
    "f2f4": lambda x: x.astype(np.float32),
    "f4i4": lambda x: np.floor(x).astype(np.int32),
    "i4f4": lambda x: x.astype(np.float32),
    "f2i1": lambda x: np.trunc(x).astype(np.int8),
    "i1f2": lambda x: x.astype(np.float16),
    "f4i8": lambda x: np.rint(x).astype(np.int64),
    "i8i4": lambda x: x.astype(np.int32),
}


@pytest.mark.parametrize("pair", CASTS)
def test_cast_converts_by_the_wider_types_lanes(pair: str) -> None:
    """Lanes are those of the wider type; the narrower one uses fewer blocks."""
    out, a = values(pair[2:], 9), values(pair[:2], 10)
    width = 256 // max(out.itemsize, a.itemsize)
    strides = [DENSE, ((1, 2, 1), (8, 16, 8)), ((2, 1, 1), (16, 4, 8))]
    shapes: list[Shape] = [(1, mask, 2, *some) for mask in (width, 11, width // 2 + 3) for some in strides]
    shapes.append((2, (1 << min(width, 64)) - 1 & GAPS, 2, *DENSE))
    for shape in shapes:
        got = clean("elementwise", f"Cast/{pair}", numbers_of(*shape), a, None, out)
        assert_same(got.view(out.dtype), reference(shape, lambda d, x: CASTS[pair](x), out, a))
    got = clean("elementwise", f"Cast/{pair}", [0, 100], a, None, out).view(out.dtype)
    assert_same(got, np.concatenate([CASTS[pair](a[:100]), out[100:]]))


def test_half_sources_onto_float() -> None:
    out, a, b = values("f4", 11), values("f2", 12), values("f2", 13)
    shape: Shape = (1, 40, 3, (1, 1, 1), (8, 4, 4))
    for name, other in (("MulAddDst", b), ("Axpy", b[:1])):
        got = clean("elementwise", f"{name}/f2f4", numbers_of(*shape), a, other, out)
        want = reference(shape, lambda d, x, y: d + x.astype("f4") * y.astype("f4"), out, a, other)
        assert_same(got.view(np.float32), want)


def test_masks_that_calls_leave_behind() -> None:
    a = values("f4", 14)
    for name, lanes in [("mask_after_count", 64), ("mask_after_mask", 20), ("count_from_register", 100)]:
        got = clean("elementwise", name, [], a).view(np.float32)
        assert (got[:lanes] == a[:lanes] + 1).all() and not got[lanes:].any(), name


# Accesses as declared: name, then w or r with offset, bytes, count, stride. Tensors of 8192 bytes: out, a, b.
@pytest.mark.parametrize(
    ("numbers", "declared"),
    [
        ([0, 100], "w 0 400 1 0 r 8192 400 1 0 r 16384 400 1 0"),
        (numbers_of(1, 10, 3, (1, 1, 1), (8, 8, 0)), "w 0 40 3 256 r 8192 40 3 256 r 16384 40 1 0"),
        (numbers_of(1, 64, 2, *DENSE), "w 0 512 1 0 r 8192 512 1 0 r 16384 512 1 0"),
        (numbers_of(1, 64, 2, (2, 1, 1), (16, 8, 8)), "w 0 32 16 64 r 8192 512 1 0 r 16384 512 1 0"),
        (  # unevenly spaced: piece by piece
            numbers_of(1, 64, 2, (2, 1, 1), (17, 8, 8)),
            " ".join(f"w {repeat * 544 + block * 64} 32 1 0" for repeat in range(2) for block in range(8))
            + " r 8192 512 1 0 r 16384 512 1 0",
        ),
        (  # a mask with uneven gaps
            numbers_of(2, 0b1011, 1, *DENSE),
            "w 0 8 1 0 w 12 4 1 0 r 8192 8 1 0 r 8204 4 1 0 r 16384 8 1 0 r 16396 4 1 0",
        ),
        (numbers_of(2, 0b1010, 1, *DENSE), "w 4 4 2 8 r 8196 4 2 8 r 16388 4 2 8"),
    ],
    ids=str,
)
def test_accesses_are_declared_exactly(numbers: list[int], declared: str) -> None:
    assert run("elementwise", "Add/f4", numbers).log == [f"Add {declared}"]


# Name, numbers, what is said; "": just within the limits.
LIMITS = [
    ("Add/f4", numbers_of(1, 64, 255, (1, 1, 1), (0, 0, 0)), ""),
    ("Add/f4", numbers_of(1, 64, 0, *DENSE), ""),
    ("Add/f4", numbers_of(1, 8, 2, (0, 0, 0), (8, 8, 8)), ""),
    ("Add/f4", numbers_of(1, 0, 1, *DENSE), "mask 0 is outside 1..64"),
    ("Add/f4", numbers_of(1, 65, 1, *DENSE), "mask 65 is outside 1..64"),
    ("Add/f4", numbers_of(2, 0, 1, *DENSE), "a mask of no lane"),
    ("Add/f4", numbers_of(1, 64, 256, *DENSE), "repeatTime 256 is outside 0..255"),
    ("Cast/f4f2", numbers_of(1, 65, 1, *DENSE), "mask 65 is outside 1..64"),
    ("Cast/f4i8", numbers_of(1, 33, 1, *DENSE), "mask 33 is outside 1..32"),
    ("Cast/f4i8", numbers_of(2, 1 << 32, 1, *DENSE), "beyond the 32 lanes"),
    ("Add/f4", numbers_of(1, 64, 2, (0, 1, 1), (8, 8, 8)), "block stride is 0"),
    ("Copy/f4", numbers_of(1, 64, 2, (1, 1, 1), (4096, 8, 8)), "repeat stride of 4096 is over 4095"),
    ("Adds/f4", [0, -1], "of -1 elements"),
    ("ShiftLeft/i2", [0, 8], "a shift by 17 of 16-bit elements"),
    ("vector_mask_range", [0, 65], "SetVectorMask of 65, outside 0..64"),
    # the last lane decides: 32 repeats 8 blocks apart fill 2048 floats
    ("Add/f4", numbers_of(1, 64, 32, *DENSE), ""),
    ("Add/f4", numbers_of(1, 64, 33, *DENSE), "8448 bytes, the UB view holds 8192"),
    ("Add/f4", numbers_of(1, 8, 32, (1, 1, 1), (8, 8, 0)), ""),
]


@pytest.mark.parametrize(("name", "numbers", "says"), LIMITS)
def test_arguments_beyond_a_limit_are_refused(name: str, numbers: list[int], says: str) -> None:
    fault = run("elementwise", name, numbers, b=np.array([17], np.int16)).fault
    assert says in fault and (fault == "") == (says == "")
    if says:
        assert fault.startswith(("illegal argument: ", "out of bounds: ")) and "api_elementwise.cpp:" in fault


ADD, AXPY, WIDEN, NARROW = "overlap_add", "overlap_axpy", "overlap_cast/f2f4", "overlap_cast/f4f2"
ONES = (1, 1, 1)
# Overlaps: call, its numbers, byte offsets of destination and source within one tensor, whether that is legal.
OVERLAPS = [
    (ADD, [0, 64], 0, 0, True),
    (ADD, [0, 64], 0, 256, True),
    (ADD, [0, 64], 224, 0, False),
    (ADD, [0, 64], 0, 32, False),
    (ADD, numbers_of(1, 64, 2, ONES, (8, 8, 8)), 0, 0, True),
    (ADD, numbers_of(1, 64, 1, ONES, (8, 8, 8)), 32, 0, False),  # within a repeat
    (ADD, numbers_of(1, 64, 2, ONES, (8, 8, 8)), 256, 0, False),  # repeat 1 reads what repeat 0 has written
    (ADD, numbers_of(1, 64, 2, ONES, (16, 16, 8)), 256, 0, True),  # between its repeats
    (ADD, numbers_of(1, 64, 2, ONES, (8, 8, 8)), 0, 256, True),  # repeat 1 overwrites what nobody reads any more
    (ADD, numbers_of(1, 64, 3, ONES, (0, 0, 8)), 0, 0, False),  # the accumulator as source 0
    (ADD, numbers_of(2, 64, 3, ONES, (0, 8, 0)), 0, 0, True),  # as source 1, standing still
    (AXPY, [0, 64], 0, 0, False),  # a source of another width lies apart
    (AXPY, [0, 64], 0, 224, False),
    (AXPY, [0, 64], 0, 256, True),
    (NARROW, [0, 200], 0, 0, True),  # in place
    (WIDEN, [0, 200], 0, 0, False),  # in place
    (WIDEN, [0, 256], 0, 512, True),  # from the upper half: each repeat is read before it is written
    (WIDEN, [0, 256], 0, 352, False),
    (WIDEN, [0, 64], 0, 0, True),  # a single repeat
    (NARROW, [0, 200], 32, 0, True),  # falls behind what is read
    (NARROW, [0, 256], 512, 0, False),
]


@pytest.mark.parametrize(("name", "numbers", "dst", "src", "legal"), OVERLAPS)
def test_overlapping_operands_are_legal_or_refused(
    name: str, numbers: list[int], dst: int, src: int, legal: bool
) -> None:
    a, b = values("f2" if name == WIDEN else "f4", 15), values("f4", 16)
    got = run("elementwise", name, [*numbers, *[0] * (10 - len(numbers)), dst, src], a, b)
    assert (got.fault == "") == legal, got.fault
    if not legal:
        assert "overlap" in got.fault or "has written" in got.fault
        assert "api_elementwise.cpp:" in got.fault
    elif numbers[0] == 2:
        assert np.array_equal(got.view("f4")[:64], ((a[:64] + b[:64]) + b[64:128]) + b[128:192])
    elif name in (WIDEN, NARROW):
        target = TYPES["f4" if name == WIDEN else "f2"]
        taken = a[src // a.itemsize :][: numbers[1]].astype(target)
        assert np.array_equal(got.view(target)[dst // target.itemsize :][: numbers[1]], taken)
