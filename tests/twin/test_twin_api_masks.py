"""Elementwise calls in their mask, register and counter forms against numpy, and what each declares."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from twin_calls import BYTES, TYPES, Array, lanes_of, offsets, run

FULL = 2**64 - 1
GAPS = 0x0F0F_3C3C_8001_FFFF  # uneven stretches
EVERY_OTHER = 0x5555_5555_5555_5555


def numbers_of(
    form: int, mask: int, repeats: int, blocks: tuple[int, ...], steps: tuple[int, ...]
) -> list[int]:
    """The numbers of a kernel: form, mask, its high word, repeatTime, block and repeat strides."""
    return [form, mask & FULL, mask >> 64, repeats, *blocks, *[0] * (3 - len(blocks)), *steps]


def values(dtype: np.dtype, seed: int) -> Array:
    """A tensor full of ordinary numbers."""
    rng = np.random.default_rng(seed)
    count = BYTES // dtype.itemsize
    if dtype.kind == "f":
        return (rng.integers(1, 400, count) / 64 * rng.choice([-1, 1], count)).astype(dtype)
    low = 0 if dtype.kind == "u" else -100
    return rng.integers(low, 100, count).astype(dtype)


def relu(x: Array) -> Array:
    return np.where(x < 0, x.dtype.type(0), x)


Function = Callable[..., Array]
# Name -> (element types, numpy). Binary calls take (dst, a, b), calls with a scalar (dst, a, scalar).
ARITHMETIC = ["f2", "f4", "i2", "i4"]
REAL = ["f2", "f4"]
BINARY: dict[str, tuple[list[str], Function]] = {
    "Add": (ARITHMETIC, lambda d, a, b: a + b),
    "Sub": (ARITHMETIC, lambda d, a, b: a - b),
    "Mul": (ARITHMETIC, lambda d, a, b: a * b),
    "Div": (REAL, lambda d, a, b: a / b),
    "Max": (ARITHMETIC, lambda d, a, b: np.maximum(a, b)),
    "Min": (ARITHMETIC, lambda d, a, b: np.minimum(a, b)),
    "And": (["i2", "u2"], lambda d, a, b: a & b),
    "Or": (["i2", "u2"], lambda d, a, b: a | b),
    "AddRelu": (REAL, lambda d, a, b: relu(a + b)),
    "SubRelu": (REAL, lambda d, a, b: relu(a - b)),
    "FusedMulAdd": (REAL, lambda d, a, b: a * d + b),
    "FusedMulAddRelu": (REAL, lambda d, a, b: relu(a * d + b)),
    "MulAddDst": (REAL, lambda d, a, b: d + a * b),
}
SCALAR: dict[str, tuple[list[str], Function]] = {
    "Adds": (ARITHMETIC, lambda d, a, s: a + s),
    "Muls": (ARITHMETIC, lambda d, a, s: a * s),
    "Maxs": (ARITHMETIC, lambda d, a, s: np.maximum(a, s)),
    "Mins": (ARITHMETIC, lambda d, a, s: np.minimum(a, s)),
    "LeakyRelu": (REAL, lambda d, a, s: np.where(a < 0, a * s, a)),
    "ShiftLeft": (["i2", "u2"], lambda d, a, s: a << s),
    "ShiftRight": (["i2", "u2"], lambda d, a, s: a >> s),
    "Axpy": (REAL, lambda d, a, s: d + a * s),
}
UNARY: dict[str, tuple[list[str], Function]] = {
    "Abs": (REAL, lambda d, a: np.abs(a)),
    "Relu": (REAL, lambda d, a: relu(a)),
    "Not": (["i2", "u2"], lambda d, a: ~a),
    "Sqrt": (REAL, lambda d, a: np.sqrt(a)),
    "Rsqrt": (REAL, lambda d, a: (1 / np.sqrt(a.astype(np.float64))).astype(a.dtype)),
    "Reciprocal": (REAL, lambda d, a: 1 / a),
    "Exp": (REAL, lambda d, a: np.exp(a.astype(np.float64)).astype(np.float32).astype(a.dtype)),
    "Ln": (REAL, lambda d, a: np.log(a.astype(np.float64)).astype(np.float32).astype(a.dtype)),
    "Copy": ([*ARITHMETIC, "u2", "u4"], lambda d, a: a),
}
CASES = [
    (name, kind) for table in (BINARY, SCALAR, UNARY) for name, (kinds, _) in table.items() for kind in kinds
]

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


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "kind"), CASES, ids=lambda x: x)
def test_mask_forms(name: str, kind: str) -> None:
    dtype = TYPES[kind]
    out, a, b = values(dtype, 1), values(dtype, 2), values(dtype, 3)
    if name in SCALAR:
        b = np.array([3]).astype(dtype)
    if name in ("Sqrt", "Rsqrt", "Ln"):
        a = np.abs(a)
    for shape in SHAPES:
        form, mask, repeats, blocks, steps = shape
        numbers = numbers_of(form, mask, repeats, blocks, steps)
        if name in BINARY:
            want = reference(shape, BINARY[name][1], out, a, b)
        elif name in SCALAR:
            want = reference(shape, SCALAR[name][1], out, a, b)
        else:
            want = reference(shape, UNARY[name][1], out, a)
        got = run("elementwise", f"{name}/{kind}", numbers, a, b, out)
        assert got.fault == "", shape
        if name in ("Exp", "Ln") and dtype.itemsize == 4:
            np.testing.assert_array_max_ulp(got.view(dtype), want, 1)
        else:
            np.testing.assert_array_equal(got.view(dtype), want, err_msg=str(shape))


COUNTED = [(name, kind) for name, kind in CASES if name != "Copy"]


@pytest.mark.parametrize(("name", "kind"), COUNTED, ids=lambda x: x)
def test_count_and_counter_forms(name: str, kind: str) -> None:
    """Form 0 is the count form; 4 and 5 are mask forms in counter mode, whose repeatTime has no effect."""
    dtype = TYPES[kind]
    out, a, b = values(dtype, 4), values(dtype, 5), values(dtype, 6)
    if name in SCALAR:
        b = np.array([2]).astype(dtype)
    if name in ("Sqrt", "Rsqrt", "Ln"):
        a = np.abs(a)
    table = BINARY if name in BINARY else SCALAR if name in SCALAR else UNARY
    sources = [a] if name in UNARY else [a, b]
    for form, count, blocks in [
        (0, 100, (1, 1, 1)),
        (0, 0, (1, 1, 1)),
        (4, 300, (1, 1, 1)),
        (4, 7, (1, 1, 1)),
        (4, 150, (2, 1, 1)),
        (5, 260, (1, 1, 1)),
    ]:
        steps = (8 * blocks[0], 8, 8)
        got = run("elementwise", f"{name}/{kind}", numbers_of(form, count, 1, blocks, steps), a, b, out)
        assert got.fault == ""
        width = 256 // dtype.itemsize
        where = [(i // width, i % width) for i in range(count)]
        to = offsets(dtype.itemsize, where, blocks[0], steps[0])
        want = out.copy()
        with np.errstate(all="ignore"):
            flat = [x[:count] if x.size > 1 else x for x in sources]
            want[to] = table[name][1](out[to], *flat) if count else out[to]
        if name in ("Exp", "Ln") and dtype.itemsize == 4:
            np.testing.assert_array_max_ulp(got.view(dtype), want, 1)
        else:
            np.testing.assert_array_equal(got.view(dtype), want)


@pytest.mark.parametrize("kind", ["f2", "f4", "i2", "i4", "u2", "u4"])
def test_duplicate(kind: str) -> None:
    dtype = TYPES[kind]
    out, value = values(dtype, 7), np.array([41]).astype(dtype)
    for shape in SHAPES:
        form, mask, repeats, blocks, steps = shape
        got = run(
            "elementwise",
            f"Duplicate/{kind}",
            numbers_of(form, mask, repeats, blocks, steps),
            None,
            value,
            out,
        )
        assert got.fault == ""
        np.testing.assert_array_equal(got.view(dtype), reference(shape, lambda d, s: s, out, value))
    got = run("elementwise", f"Duplicate/{kind}", [0, 45], None, value, out)
    assert (got.view(dtype)[:45] == 41).all() and (got.view(dtype)[45:] == out[45:]).all()


@pytest.mark.parametrize("kind", ARITHMETIC)
def test_create_vec_index(kind: str) -> None:
    """Lane i of repeat r holds first + r * lanes + i."""
    dtype = TYPES[kind]
    out, first = values(dtype, 8), np.array([5]).astype(dtype)
    lanes = 256 // dtype.itemsize
    for shape in SHAPES[:7]:
        form, mask, repeats, blocks, steps = shape
        numbers = numbers_of(form, mask, repeats, blocks, steps)
        got = run("elementwise", f"Index/{kind}", numbers, None, first, out)
        assert got.fault == ""
        where = [(r, lane) for r in range(repeats) for lane in lanes_of(form, mask, lanes)]
        want = out.copy()
        want[offsets(dtype.itemsize, where, blocks[0], steps[0])] = [
            5 + r * lanes + lane for r, lane in where
        ]
        np.testing.assert_array_equal(got.view(dtype), want)


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
def test_cast(pair: str) -> None:
    """Lanes are those of the wider type; the narrower one uses fewer blocks."""
    source, target = TYPES[pair[:2]], TYPES[pair[2:]]
    out, a = values(target, 9), values(source, 10)
    wide = max(source.itemsize, target.itemsize)
    width = 256 // wide
    for mask in (width, 11, width // 2 + 3):
        for blocks, steps in [((1, 1, 1), (8, 8, 8)), ((1, 2, 1), (8, 16, 8)), ((2, 1, 1), (16, 4, 8))]:
            shape: Shape = (1, mask, 2, blocks, steps)
            got = run("elementwise", f"Cast/{pair}", numbers_of(1, mask, 2, blocks, steps), a, None, out)
            assert got.fault == ""
            want = reference(shape, lambda d, x: CASTS[pair](x), out, a)
            np.testing.assert_array_equal(got.view(target), want)
    got = run("elementwise", f"Cast/{pair}", [0, 100], a, None, out)
    np.testing.assert_array_equal(got.view(target)[:100], CASTS[pair](a[:100]))
    np.testing.assert_array_equal(got.view(target)[100:], out[100:])
    half = (1 << min(width, 64)) - 1 & GAPS
    got = run("elementwise", f"Cast/{pair}", numbers_of(2, half, 2, (1, 1, 1), (8, 8, 8)), a, None, out)
    want = reference((2, half, 2, (1, 1, 1), (8, 8, 8)), lambda d, x: CASTS[pair](x), out, a)
    np.testing.assert_array_equal(got.view(target), want)


def test_half_sources_onto_float() -> None:
    f2, f4 = TYPES["f2"], TYPES["f4"]
    out, a, b = values(f4, 11), values(f2, 12), values(f2, 13)
    shape: Shape = (1, 40, 3, (1, 1, 1), (8, 4, 4))
    numbers = numbers_of(*shape)
    got = run("elementwise", "MulAddDst/f2f4", numbers, a, b, out)
    wide = lambda d, x, y: d + x.astype(f4) * y.astype(f4)  # noqa: E731
    np.testing.assert_array_equal(got.view(f4), reference(shape, wide, out, a, b))
    got = run("elementwise", "Axpy/f2f4", numbers, a, b[:1], out)
    np.testing.assert_array_equal(got.view(f4), reference(shape, wide, out, a, b[:1]))


def test_masks_that_calls_leave_behind() -> None:
    a = values(TYPES["f4"], 14)
    for name, lanes in [("mask_after_count", 64), ("mask_after_mask", 20), ("count_from_register", 100)]:
        got = run("elementwise", name, [], a).view(TYPES["f4"])
        assert (got[:lanes] == a[:lanes] + 1).all() and not got[lanes:].any(), name


# Accesses as declared: name, then w or r with offset, bytes, count, stride. Tensors of 8192 bytes: out, a, b.
@pytest.mark.parametrize(
    ("numbers", "declared"),
    [
        ([0, 100], ["Add w 0 400 1 0 r 8192 400 1 0 r 16384 400 1 0"]),
        (
            numbers_of(1, 10, 3, (1, 1, 1), (8, 8, 0)),
            ["Add w 0 40 3 256 r 8192 40 3 256 r 16384 40 1 0"],
        ),
        (numbers_of(1, 64, 2, (1, 1, 1), (8, 8, 8)), ["Add w 0 512 1 0 r 8192 512 1 0 r 16384 512 1 0"]),
        (
            numbers_of(1, 64, 2, (2, 1, 1), (16, 8, 8)),
            ["Add w 0 32 16 64 r 8192 512 1 0 r 16384 512 1 0"],
        ),
        (  # unevenly spaced: repeat by repeat
            numbers_of(1, 64, 2, (2, 1, 1), (17, 8, 8)),
            [
                "Add w 0 32 8 64 r 8192 256 1 0 r 16384 256 1 0",
                "Add w 544 32 8 64 r 8448 256 1 0 r 16640 256 1 0",
            ],
        ),
        (  # a mask with uneven gaps: stretch by stretch
            numbers_of(2, 0b1011, 1, (1, 1, 1), (8, 8, 8)),
            ["Add w 0 8 1 0 r 8192 8 1 0 r 16384 8 1 0", "Add w 12 4 1 0 r 8204 4 1 0 r 16396 4 1 0"],
        ),
        (numbers_of(2, 0b1010, 1, (1, 1, 1), (8, 8, 8)), ["Add w 4 4 2 8 r 8196 4 2 8 r 16388 4 2 8"]),
    ],
    ids=str,
)
def test_declared_accesses(numbers: list[int], declared: list[str]) -> None:
    assert run("elementwise", "Add/f4", numbers, engine="audit").log == declared


# ---- limits ----


@pytest.mark.parametrize(
    ("name", "numbers", "says"),
    [
        ("Add/f4", numbers_of(1, 0, 1, (1, 1, 1), (8, 8, 8)), "mask 0 is outside 1..64"),
        ("Add/f4", numbers_of(1, 65, 1, (1, 1, 1), (8, 8, 8)), "mask 65 is outside 1..64"),
        ("Add/f2", numbers_of(1, 129, 1, (1, 1, 1), (8, 8, 8)), "mask 129 is outside 1..128"),
        ("Add/f4", numbers_of(2, 0, 1, (1, 1, 1), (8, 8, 8)), "a mask of no lane"),
        ("Add/f4", numbers_of(1, 64, 256, (1, 1, 1), (8, 8, 8)), "repeatTime 256 is outside 0..255"),
        ("Adds/f4", numbers_of(1, 64, 300, (1, 1, 1), (8, 8, 8)), "repeatTime 300 is outside 0..255"),
        ("Duplicate/f4", numbers_of(1, 64, 256, (1, 1, 1), (8, 8, 8)), "repeatTime 256"),
        ("Cast/f4f2", numbers_of(1, 65, 1, (1, 1, 1), (8, 8, 8)), "mask 65 is outside 1..64"),
        ("Cast/f4i8", numbers_of(1, 33, 1, (1, 1, 1), (8, 8, 8)), "mask 33 is outside 1..32"),
        ("Cast/f4i8", numbers_of(2, 1 << 32, 1, (1, 1, 1), (8, 8, 8)), "beyond the 32 lanes"),
        ("Add/f4", numbers_of(1, 64, 2, (0, 1, 1), (8, 8, 8)), "block stride is 0"),
        ("Copy/f4", numbers_of(1, 64, 2, (1, 1, 1), (4096, 8, 8)), "repeat stride of 4096 is over 4095"),
        ("Adds/f4", [0, -1 & FULL], "of -1 elements"),
        ("ShiftLeft/i2", [0, 8], "a shift by 17 of 16-bit elements"),
        ("vector_mask_range", [0, 65], "SetVectorMask of 65, outside 0..64"),
    ],
)
def test_limits(name: str, numbers: list[int], says: str) -> None:
    got = run("elementwise", name, numbers, b=np.array([17], np.int16))
    assert (
        got.fault.startswith("illegal argument: ")
        and says in got.fault
        and "api_elementwise.cpp:" in got.fault
    )


@pytest.mark.parametrize(
    "numbers",
    [
        numbers_of(1, 64, 255, (1, 1, 1), (0, 0, 0)),
        numbers_of(1, 1, 1, (1, 1, 1), (8, 8, 8)),
        numbers_of(1, 64, 0, (1, 1, 1), (8, 8, 8)),
        numbers_of(1, 8, 2, (0, 0, 0), (8, 8, 8)),
    ],
    ids=str,
)
def test_just_within_the_limits(numbers: list[int]) -> None:
    assert run("elementwise", "Add/f4", numbers).fault == ""


def test_bounds_are_those_of_the_last_lane() -> None:
    """32 repeats 8 blocks apart fill 2048 floats; a 33rd does not fit."""
    assert run("elementwise", "Add/f4", numbers_of(1, 64, 32, (1, 1, 1), (8, 8, 8))).fault == ""
    fault = run("elementwise", "Add/f4", numbers_of(1, 64, 33, (1, 1, 1), (8, 8, 8))).fault
    assert fault.startswith("out of bounds: ") and "8448 bytes, the UB view holds 8192" in fault
    assert run("elementwise", "Add/f4", numbers_of(1, 8, 32, (1, 1, 1), (8, 8, 0))).fault == ""


# ---- overlaps of destination and sources, byte offsets within one tensor ----


@pytest.mark.parametrize(
    ("form", "mask", "repeats", "steps", "dst", "src", "legal"),
    [
        (0, 64, 1, (8, 8, 8), 0, 0, True),
        (0, 64, 1, (8, 8, 8), 256, 0, True),
        (0, 64, 1, (8, 8, 8), 0, 256, True),
        (0, 64, 1, (8, 8, 8), 224, 0, False),
        (0, 64, 1, (8, 8, 8), 0, 32, False),
        (1, 64, 2, (8, 8, 8), 0, 0, True),
        (1, 64, 1, (8, 8, 8), 32, 0, False),  # within a repeat
        (1, 8, 1, (8, 8, 8), 32, 0, True),
        (1, 64, 2, (8, 8, 8), 256, 0, False),  # repeat 1 reads what repeat 0 has written
        (1, 64, 2, (16, 16, 8), 256, 0, True),  # between its repeats
        (1, 64, 2, (8, 8, 8), 0, 256, True),  # repeat 1 overwrites what nobody reads any more
        (1, 64, 3, (0, 0, 8), 0, 0, False),  # the accumulator as source 0
        (2, 64, 3, (0, 8, 0), 0, 0, True),  # as source 1, standing still
        (2, 64, 3, (8, 8, 8), 256, 0, False),
    ],
)
def test_overlap(
    form: int, mask: int, repeats: int, steps: tuple[int, int, int], dst: int, src: int, legal: bool
) -> None:
    a, b = values(TYPES["f4"], 15), values(TYPES["f4"], 16)
    numbers = [*numbers_of(form, mask, repeats, (1, 1, 1), steps), dst, src]
    got = run("elementwise", "overlap_add", numbers, a, b)
    assert (got.fault == "") == legal, got.fault
    if not legal:
        assert "overlap in part" in got.fault or "has written" in got.fault
        assert "api_elementwise.cpp:" in got.fault
    if form == 2 and legal:
        assert np.array_equal(got.view(TYPES["f4"])[:64], ((a[:64] + b[:64]) + b[64:128]) + b[128:192])


@pytest.mark.parametrize(("src", "legal"), [(0, False), (128, False), (224, False), (256, True)])
def test_a_source_of_another_width_lies_apart(src: int, legal: bool) -> None:
    fault = run("elementwise", "overlap_axpy", [0, 64, *[0] * 9, src], values(TYPES["f4"], 18)).fault
    assert (fault == "") == legal and (legal or "a source of another width overlap" in fault)


@pytest.mark.parametrize(
    ("pair", "count", "dst", "src", "legal"),
    [
        ("f4f2", 200, 0, 0, True),  # narrowing in place
        ("f2f4", 200, 0, 0, False),  # widening in place
        ("f2f4", 256, 0, 512, True),  # widening from the upper half: each repeat is read before it is written
        ("f2f4", 256, 0, 384, True),
        ("f2f4", 256, 0, 352, False),
        ("f2f4", 64, 0, 0, True),  # a single repeat
        ("f4f2", 200, 32, 0, True),  # falls behind what is read
        ("f4f2", 256, 512, 0, False),
    ],
)
def test_overlapping_casts(pair: str, count: int, dst: int, src: int, legal: bool) -> None:
    source, target = TYPES[pair[:2]], TYPES[pair[2:]]
    memory = values(source, 17)
    got = run("elementwise", f"overlap_cast/{pair}", [0, count, *[0] * 8, dst, src], memory)
    assert (got.fault == "") == legal, got.fault
    if legal:
        taken = memory[src // source.itemsize :][:count].astype(target)
        assert np.array_equal(got.view(target)[dst // target.itemsize :][:count], taken)
