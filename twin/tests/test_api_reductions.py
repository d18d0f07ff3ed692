"""Reductions against numpy, bit for bit: order of sums, ties, zeros, NaN, masks, strides."""

from __future__ import annotations

import numpy as np
import pytest
from twin_calls import GAPS, REAL, TYPES, Array, clean, engines, lanes_of, offsets, run, tricky
from twin_oracle import assert_same, bits

F4 = TYPES["f4"]
SOME_BLOCKS = 0xFF00_0000_00FF_0001  # of floats: blocks 0, 2 and 7
SOME_PAIRS = 0b1100_0001_0011
kinds = pytest.mark.parametrize("kind", REAL)
pytestmark = pytest.mark.asan

# form, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride
Shape = tuple[int, int, int, int, int, int]
SHAPES: list[Shape] = [
    (1, 64, 4, 1, 1, 8),
    (1, 13, 3, 2, 1, 8),
    (1, 60, 2, 1, 2, 17),
    (2, GAPS, 3, 1, 1, 8),
    (2, SOME_BLOCKS, 2, 3, 1, 9),
    (2, SOME_PAIRS, 2, 1, 1, 8),
    (3, GAPS, 2, 1, 2, 16),
    (1, 5, 3, 1, 1, 0),
]


def data(kind: str, seed: int) -> Array:
    """Numbers whose sums depend on the order."""
    rng, count = np.random.default_rng(seed), 8192 // TYPES[kind].itemsize
    return (rng.standard_normal(count) * np.exp2(rng.integers(-6, 3, count))).astype(TYPES[kind])


def both(kind: str, seed: int) -> list[Array]:
    return [data(kind, seed), *(tricky(TYPES[kind], seed + i, 8192 // TYPES[kind].itemsize) for i in range(4))]


def tree(values: dict[int, Array], width: int) -> Array:
    """The sum over neighbours of `width` lanes; an absent lane passes the other one through."""
    with np.errstate(all="ignore"):
        while width > 1:
            width //= 2
            pairs = {i: [values[j] for j in (2 * i, 2 * i + 1) if j in values] for i in range(width)}
            values = {i: pair[0] + pair[1] if len(pair) == 2 else pair[0] for i, pair in pairs.items() if pair}
    return values[0]


def trees(x: Array) -> list[Array]:
    """The sum of every 256 bytes."""
    lanes = 256 // x.itemsize
    return [tree(dict(enumerate(x[at : at + lanes])), lanes) for at in range(0, x.size, lanes)]


def first(values: list[Array], largest: bool) -> int:
    """Which value a maximum or minimum names: the first of the best, NaN only if nothing else is there."""
    x = np.array(values)
    if np.isnan(x).all():
        return 0
    return int(np.argmax(x == (np.nanmax(x) if largest else np.nanmin(x))))


def repeats_of(x: Array, shape: Shape) -> list[dict[int, Array]]:
    """The lanes of each repeat."""
    form, mask, repeats, _, block, step = shape
    lanes = lanes_of(form, mask, 256 // x.itemsize)
    rows = [offsets(x.itemsize, [(r, lane) for lane in lanes], block, step) for r in range(repeats)]
    return [dict(zip(lanes, x[row], strict=True)) for row in rows]


def numbers_of(shape: Shape, order: int = 0) -> list[int]:
    form, mask, repeats, dst, block, step = shape
    return [form, mask, 0, repeats, dst, block, step, order]


@kinds
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reductions_of_whole_repeats_equal_numpy(kind: str, shape: Shape) -> None:
    step, width = shape[3], 256 // TYPES[kind].itemsize
    for x in both(kind, 1):
        out, rows = np.full_like(x, 99), repeats_of(x, shape)
        want = out.copy()
        want[: len(rows) * step : step] = [tree(row, width) for row in rows]
        got = clean("reductions", f"WholeSum/{kind}", numbers_of(shape), x, None, out)
        assert_same(got.view(x.dtype), want)
        for name in ("WholeMax", "WholeMin"):
            picks = [list(row)[first(list(row.values()), name == "WholeMax")] for row in rows]
            values = [bits(row[lane]) for row, lane in zip(rows, picks, strict=True)]
            for order in range(4):  # value and index, index and value, value, index
                want = bits(out).copy()
                for r, (value, index) in enumerate(zip(values, picks, strict=True)):
                    if order < 2:
                        want[2 * r * step : 2 * r * step + 2] = [value, index] if order == 0 else [index, value]
                    elif order == 2:
                        want[r * step] = value
                    else:
                        want.view(np.uint32)[r * step] = index
                got = clean("reductions", f"{name}/{kind}", numbers_of(shape, order), x, None, out)
                words = got.view(want.dtype)
                nan = np.isnan(got.view(x.dtype)) & np.isnan(want.view(x.dtype))
                assert ((words == want) | nan).all(), (name, order)


@kinds
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reductions_of_blocks_and_pairs_leave_masked_lanes(kind: str, shape: Shape) -> None:
    """An element without a lane in the mask is not written."""
    for x in both(kind, 2):
        out, rows, step = np.full_like(x, 99), repeats_of(x, shape), shape[3]
        for name, each, reach in (("Block", 32 // x.itemsize, 8), ("Pair", 2, 128 // x.itemsize)):
            for operation in ("Sum", "Max", "Min") if name == "Block" else ("Sum",):
                want = out.copy()
                for r, row in enumerate(rows):
                    for part in {lane // each for lane in row}:
                        some = {lane - part * each: v for lane, v in row.items() if lane // each == part}
                        values = list(some.values())
                        want[r * step * reach + part] = (
                            tree(some, each) if operation == "Sum" else values[first(values, operation == "Max")]
                        )
                got = clean("reductions", f"{name}{operation}/{kind}", numbers_of(shape), x, None, out)
                assert_same(got.view(x.dtype), want)


@kinds
def test_newer_names_mean_the_same(kind: str) -> None:
    x, names = (data(kind, 3), [*(f"{part}{name}" for part in ("Whole", "Block") for name in ("Sum", "Max", "Min"))])
    names += ["PairSum", "WholeSum"]
    parts = clean("reductions", f"NewNames/{kind}", [1, 50, 0, 3], x).reshape(8, -1)
    for part, name in zip(parts, names, strict=True):
        want = clean("reductions", f"{name}/{kind}", numbers_of((1, 50, 3, 1, 1, 8), 2), x)
        assert np.array_equal(part, want[: part.size]) and want.any(), name


@engines
@kinds
def test_reduce_sum_adds_by_trees(kind: str, engine: str) -> None:
    """Over a count: the repeats' trees in order. Over repeats: a tree over the repeats' trees."""
    dtype = TYPES[kind]
    lanes = 256 // dtype.itemsize
    for x in [*both(kind, 4), np.full(8192 // dtype.itemsize, 60000, dtype)]:  # each node of half is a half
        for form in (0, 3):
            for count in (1, 2, lanes - 1, lanes, 3 * lanes + 7, x.size):
                parts = trees(x[:count])
                total = parts[0]
                for part in parts[1:]:
                    with np.errstate(all="ignore"):
                        total = total + part
                got = clean("reductions", f"ReduceSum/{kind}", [form, count], x, engine=engine).view(dtype)
                assert_same(got[:1], np.array([total], dtype))
                assert not got[1:].any()
        for shape in [(1, 64, 5, 0, 1, 8), (1, 9, 3, 0, 1, 9), (2, GAPS, 4, 0, 1, 8), (2, 0b101, 1, 0, 1, 8)]:
            sums = [tree(row, lanes) for row in repeats_of(x, shape)]
            got = clean("reductions", f"ReduceSum/{kind}", numbers_of(shape), x, engine=engine).view(dtype)
            assert_same(got[:1], np.array([tree(dict(enumerate(sums)), lanes)], dtype))


@engines
@kinds
@pytest.mark.parametrize("name", ["ReduceMax", "ReduceMin"])
def test_extremes_and_their_places_equal_numpy(name: str, kind: str, engine: str) -> None:
    dtype, call = TYPES[kind], f"{name}/{kind}"
    lanes, largest = 256 // dtype.itemsize, name == "ReduceMax"
    for x in [np.round(data(kind, 5)), *both(kind, 6), *(tricky(dtype, 20 + i, 1500) for i in range(20))]:
        for count in (1, 3, lanes + 1, 1000):
            at = first(list(x[:count]), largest)
            for index in (0, 1):
                got = clean("reductions", call, [0, count, *[0] * 5, index], x, engine=engine).view(dtype)
                assert_same(got[:1], x[at : at + 1])
                assert bits(got)[1] == (at if index else 0)
        for shape in [(1, 50, 3, 0, 1, 8), (2, GAPS, 2, 0, 1, 10)]:
            seen = {r * lanes + k: v for r, row in enumerate(repeats_of(x, shape)) for k, v in row.items()}
            at = first(list(seen.values()), largest)
            got = clean("reductions", call, numbers_of(shape, 1), x, engine=engine).view(dtype)
            assert_same(got[:1], np.array([list(seen.values())[at]], dtype))
            assert bits(got)[1] == list(seen)[at]
        at = first(list(x[:1000]), largest)  # the source as scratch
        assert_same(clean("reductions", call, [3, 1000], x, engine=engine).view(dtype)[:1], x[at : at + 1])


@kinds
def test_special_registers_have_the_last_reduction(kind: str) -> None:
    x = data(kind, 9)
    lanes = 256 // x.itemsize
    got = clean("reductions", f"Registers/{kind}", [0, 777, 0, 5], x).view(x.dtype)
    total = clean("reductions", f"ReduceSum/{kind}", [0, 777], x).view(x.dtype)[0]
    seen = {r * lanes + lane: x[r * lanes + lane] for r in range(5) for lane in range(64)}
    at = first(list(seen.values()), largest=False)
    index = np.array([list(seen)[at]], np.dtype(f"u{x.itemsize}")).view(x.dtype)[0]
    least = list(seen.values())[at]
    assert_same(got[:7], np.array([total, least, index, x[:777].max(), least, index, total], x.dtype))
    for number, says in [(1, " of the same element type"), (2, ", and none has run")]:
        fault = run("reductions", f"Registers/{kind}", [number, 7, 0, 5], x).fault
        assert f"GetReduceRepeatSumSpr of {x.itemsize}-byte elements" in fault and says in fault


def test_scratch_of_extremes_has_the_documented_size() -> None:
    """1000 floats are 15 repeats: 32 floats of scratch without index, 40 with."""
    x = data("f4", 6)
    for index, needed in ((0, 128), (1, 160)):
        clean("reductions", "ReduceMax/f4", [0, 1000, *[0] * 5, index, 8192 - needed], x)
        fault = run("reductions", "ReduceMax/f4", [0, 1000, *[0] * 5, index, 8192 - needed + 32], x).fault
        assert "scratch of a reduction needs" in fault
    declared = [line for line in run("reductions", "ReduceMax/f4", [0, 1000], x).log if " c " in line]
    assert declared == ["ReduceMax w 0 4 1 0 r 8192 4000 1 0 c 24576 128 1 0"]


@kinds
def test_sums_of_rows_equal_numpy(kind: str) -> None:
    x = data(kind, 7)
    lanes = 256 // x.itemsize
    for scratch in (0, 1):
        for rows, inner, n in [(8, 32, 30), (5, 64, 64), (1, 16, 1), (3, 320, 301)]:
            got = clean("reductions", f"Sum/{kind}", [scratch, rows, inner, n, 0, -1], x).view(x.dtype)
            levels = [trees(x[row * inner :][:n]) for row in range(rows)]
            want = [tree(dict(enumerate(level)), lanes) for level in levels]
            assert_same(got[:rows], np.array(want, x.dtype))
            assert not got[rows:].any()


def test_reductions_in_place_may_not_overtake() -> None:
    x = data("f4", 8)
    got = clean("reductions", "in_place", [0, 0, 0, 5, 1, 1, 8, 0, 0], x)
    assert_same(got.view(F4)[:5], np.array(trees(x)[:5], F4))
    assert run("reductions", "in_place", [0, 0, 0, 5, 1, 1, 8, 0, 1280], x).fault == ""
    assert "overlap" in run("reductions", "in_place", [0, 0, 0, 5, 1, 1, 8, 0, 64], x).fault
    assert "overtake" in run("reductions", "in_place", [0, 0, 0, 5, 65, 1, 8, 0, 0], x).fault


UB_LEFT = 188416 - 4 * 8192  # beside the tensors, when 8 KiB are to be free
LIMITS = [
    ("WholeSum/f4", numbers_of((1, 65, 1, 1, 1, 8)), "mask 65 is outside 1..64"),
    ("WholeSum/f4", numbers_of((2, 0, 1, 1, 1, 8)), "a mask of no lane"),
    ("BlockMax/f4", numbers_of((1, 64, 256, 1, 1, 8)), "repeatTime 256 is outside 0..255"),
    ("PairSum/f4", numbers_of((1, 64, 1, 65536, 1, 8)), "dstRepStride 65536 is outside 0..65535"),
    ("WholeSum/f4", numbers_of((1, 64, 1, 1, 1, 65536)), "srcRepStride 65536 is outside 0..65535"),
    ("ReduceSum/f4", numbers_of((4, 64, 1, 1, 1, 8)), "SetMaskCount is missing"),
    ("Sum/f4", [0, 1, 30, 30, 0, -1], "inner 30 must be a multiple of 32 bytes"),
    ("Sum/f4", [0, 1, 32, 33, 0, -1], "n 33 must be from 1 to inner, 32"),
    ("Sum/f4", [0, 2, 32, 32, 0, 224], "destination and source overlap"),
    ("Sum/f4", [0, 2, 32, 32, 0, 256], ""),
    ("Sum/f4", [1, 2, 32, 32, UB_LEFT, -1], ""),
    ("Sum/f4", [1, 2, 32, 32, UB_LEFT + 32, -1], "Sum without a scratch tensor uses the last 8 KiB of UB"),
]


@pytest.mark.parametrize(("name", "numbers", "says"), LIMITS)
def test_arguments_beyond_a_limit_are_refused(name: str, numbers: list[int], says: str) -> None:
    fault = run("reductions", name, numbers).fault
    assert says in fault and (fault == "") == (says == "")
