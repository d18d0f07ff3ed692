"""Reductions of the twin's API against numpy: order of sums, masks, strides, and what each declares."""

from __future__ import annotations

import numpy as np
import pytest
from twin_calls import TYPES, Array, lanes_of, offsets, run

F4 = TYPES["f4"]
GAPS = 0x0F0F_3C3C_8001_FFFF
SOME_BLOCKS = 0xFF00_0000_00FF_0001  # of floats: blocks 0, 2 and 7
SOME_PAIRS = 0b1100_0001_0011

# form, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride
SHAPES = [
    (1, 64, 4, 1, 1, 8),
    (1, 13, 3, 2, 1, 8),
    (1, 60, 2, 1, 2, 17),
    (2, GAPS, 3, 1, 1, 8),
    (2, SOME_BLOCKS, 2, 3, 1, 9),
    (2, SOME_PAIRS, 2, 1, 1, 8),
    (3, GAPS, 2, 1, 2, 16),
    (1, 5, 3, 1, 1, 0),
]


def data(dtype: np.dtype, seed: int = 1) -> Array:
    """Numbers whose sums depend on the order, a few equal."""
    rng = np.random.default_rng(seed)
    count = 8192 // dtype.itemsize
    return (rng.standard_normal(count) * np.exp2(rng.integers(-6, 3, count))).astype(dtype)


def tree(values: dict[int, Array], width: int, dtype: np.dtype) -> Array:
    """The sum over neighbours of `width` lanes, of which some are absent."""
    while width > 1:
        width //= 2
        level = {}
        for i in range(width):
            pair = [values[j] for j in (2 * i, 2 * i + 1) if j in values]
            if pair:
                level[i] = dtype.type(pair[0] + pair[1]) if len(pair) == 2 else pair[0]
        values = level
    return values[0]


def repeats_of(x: Array, shape: tuple[int, int, int, int, int, int]) -> list[dict[int, Array]]:
    """The lanes of each repeat."""
    form, mask, repeats, _, block, step = shape
    lanes = lanes_of(form, mask, 256 // x.dtype.itemsize)
    return [
        {lane: x[offsets(x.dtype.itemsize, [(r, lane)], block, step)[0]] for lane in lanes}
        for r in range(repeats)
    ]


def numbers_of(shape: tuple[int, int, int, int, int, int], order: int = 0) -> list[int]:
    form, mask, repeats, dst, block, step = shape
    return [form, mask, 0, repeats, dst, block, step, order]


@pytest.mark.parametrize("kind", ["f4", "f2"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_whole_repeats(kind: str, shape: tuple[int, int, int, int, int, int]) -> None:
    dtype = TYPES[kind]
    x, out = data(dtype), np.full(8192 // dtype.itemsize, 99, dtype)
    rows, step, width = repeats_of(x, shape), shape[3], 256 // dtype.itemsize
    got = run("reductions", f"WholeSum/{kind}", numbers_of(shape), x, None, out)
    want = out.copy()
    for r, row in enumerate(rows):
        want[r * step] = tree(row, width, dtype)
    assert got.fault == "" and np.array_equal(got.view(dtype), want)
    word = np.dtype(f"u{dtype.itemsize}")
    for name, best in (("WholeMax", max), ("WholeMin", min)):
        for order in range(4):
            got = run("reductions", f"{name}/{kind}", numbers_of(shape, order), x, None, out)
            raw = out.view(word).copy()
            for r, row in enumerate(rows):
                value = best(row.values())
                index = min(lane for lane, v in row.items() if v == value)
                bits = value.view(word)
                if order < 2:
                    raw[2 * r * step : 2 * r * step + 2] = [bits, index] if order == 0 else [index, bits]
                elif order == 2:
                    raw[r * step] = bits
                else:
                    raw.view(np.uint32)[r * step] = index
            assert got.fault == "" and np.array_equal(got.view(word), raw), (name, order)


@pytest.mark.parametrize("kind", ["f4", "f2"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_and_pairs(kind: str, shape: tuple[int, int, int, int, int, int]) -> None:
    """What has no lane in the mask is not written."""
    dtype = TYPES[kind]
    x, out = data(dtype, 2), np.full(8192 // dtype.itemsize, 99, dtype)
    rows, step = repeats_of(x, shape), shape[3]
    for name, each, reach in (("Block", 32 // dtype.itemsize, 8), ("Pair", 2, 128 // dtype.itemsize)):
        for operation in ("Sum", "Max", "Min") if name == "Block" else ("Sum",):
            want = out.copy()
            for r, row in enumerate(rows):
                for part in {lane // each for lane in row}:
                    some = {lane - part * each: v for lane, v in row.items() if lane // each == part}
                    value = (
                        tree(some, each, dtype)
                        if operation == "Sum"
                        else (max if operation == "Max" else min)(some.values())
                    )
                    want[r * step * reach + part] = value
            got = run("reductions", f"{name}{operation}/{kind}", numbers_of(shape), x, None, out)
            assert got.fault == "" and np.array_equal(got.view(dtype), want), (name, operation)


@pytest.mark.parametrize("kind", ["f4", "f2"])
def test_newer_names_mean_the_same(kind: str) -> None:
    dtype = TYPES[kind]
    x = data(dtype, 3)
    parts = run("reductions", f"NewNames/{kind}", [1, 50, 0, 3], x).view(dtype).reshape(8, -1)
    shape = (1, 50, 3, 1, 1, 8)
    for part, name in enumerate(
        ["WholeSum", "WholeMax", "WholeMin", "BlockSum", "BlockMax", "BlockMin", "PairSum", "WholeSum"]
    ):
        want = run("reductions", f"{name}/{kind}", numbers_of(shape, 2), x).view(dtype)
        assert np.array_equal(parts[part], want[: parts.shape[1]]) and want.any(), name


@pytest.mark.parametrize("kind", ["f4", "f2"])
def test_reduce_sum(kind: str) -> None:
    """Over a count: the repeats' trees in order. Over repeats: a tree over the repeats' trees."""
    dtype = TYPES[kind]
    x = data(dtype, 4)
    lanes = 256 // dtype.itemsize
    for form in (0, 3):
        for count in (1, lanes, 3 * lanes + 7):
            total = None
            for at in range(0, count, lanes):
                part = tree(dict(enumerate(x[at : min(at + lanes, count)])), lanes, dtype)
                total = part if total is None else dtype.type(total + part)
            got = run("reductions", f"ReduceSum/{kind}", [form, count], x)
            assert got.fault == "" and got.view(dtype)[0] == total and not got.view(dtype)[1:].any()
    for shape in [(1, 64, 5, 0, 1, 8), (1, 9, 3, 0, 1, 9), (2, GAPS, 4, 0, 1, 8), (2, 0b101, 1, 0, 1, 8)]:
        sums = [tree(row, lanes, dtype) for row in repeats_of(x, shape)]
        got = run("reductions", f"ReduceSum/{kind}", numbers_of(shape), x)
        assert got.fault == "" and got.view(dtype)[0] == tree(dict(enumerate(sums)), lanes, dtype)


@pytest.mark.parametrize("kind", ["f4", "f2"])
@pytest.mark.parametrize("name", ["ReduceMax", "ReduceMin"])
def test_extremes(name: str, kind: str) -> None:
    dtype, best = TYPES[kind], max if name == "ReduceMax" else min
    x = np.round(data(dtype, 5))  # ties
    lanes, word = 256 // dtype.itemsize, np.dtype(f"u{dtype.itemsize}")
    for count in (1, lanes + 1, 1000):
        value = best(x[:count])
        for index in (0, 1):
            got = run("reductions", f"{name}/{kind}", [0, count, *[0] * 5, index], x)
            assert got.fault == "" and got.view(dtype)[0] == value
            assert got.view(word)[1] == (np.argmax(x[:count] == value) if index else 0)
    for shape in [(1, 50, 3, 0, 1, 8), (2, GAPS, 2, 0, 1, 10)]:
        rows = repeats_of(x, shape)
        value = best(v for row in rows for v in row.values())
        first = min(r * lanes + lane for r, row in enumerate(rows) for lane, v in row.items() if v == value)
        got = run("reductions", f"{name}/{kind}", numbers_of(shape, 1), x)
        assert got.fault == "" and got.view(dtype)[0] == value and got.view(word)[1] == first
    assert run("reductions", f"{name}/{kind}", [3, 1000], x).view(dtype)[0] == best(
        x[:1000]
    )  # source as scratch


def test_scratch_of_extremes() -> None:
    """1000 floats are 15 repeats: 32 floats of scratch without index, 40 with."""
    x = data(F4, 6)
    for index, needed in ((0, 128), (1, 160)):
        assert run("reductions", "ReduceMax/f4", [0, 1000, *[0] * 5, index, 8192 - needed], x).fault == ""
        fault = run("reductions", "ReduceMax/f4", [0, 1000, *[0] * 5, index, 8192 - needed + 32], x).fault
        assert "scratch of a reduction needs" in fault
    left = [
        line.split(" c ")
        for line in run("reductions", "ReduceMax/f4", [0, 1000], x, engine="audit").log
        if " c " in line
    ]
    assert left == [["ReduceMax w 0 4 1 0 r 8192 4000 1 0", "24576 128 1 0"]]


@pytest.mark.parametrize("kind", ["f4", "f2"])
def test_sum_of_rows(kind: str) -> None:
    dtype = TYPES[kind]
    x = data(dtype, 7)
    lanes = 256 // dtype.itemsize
    for scratch in (0, 1):
        for rows, inner, n in [(8, 32, 30), (5, 64, 64), (1, 16, 1), (3, 320, 301)]:
            got = run("reductions", f"Sum/{kind}", [scratch, rows, inner, n, 0, 2**64 - 1], x)
            want = []
            for row in range(rows):
                part = x[row * inner :][:n]
                level = [
                    tree(dict(enumerate(part[at : at + lanes])), lanes, dtype) for at in range(0, n, lanes)
                ]
                want.append(tree(dict(enumerate(level)), lanes, dtype))
            assert got.fault == "" and np.array_equal(got.view(dtype)[:rows], np.array(want, dtype))
            assert not got.view(dtype)[rows:].any()


@pytest.mark.parametrize(
    ("taken", "legal"), [(188416 - 4 * 8192, True), (188448 - 4 * 8192, False)], ids=["fits", "over"]
)
def test_sum_without_scratch_wants_the_last_8_kib(taken: int, legal: bool) -> None:
    fault = run("reductions", "Sum/f4", [1, 2, 32, 32, taken, 2**64 - 1], data(F4)).fault
    assert (fault == "") == legal
    assert legal or fault.startswith("UB overflow: Sum without a scratch tensor uses the last 8 KiB of UB")
    assert run("reductions", "Sum/f4", [0, 2, 32, 32, taken, 2**64 - 1], data(F4)).fault == ""


def test_in_place() -> None:
    x = data(F4, 8)
    got = run("reductions", "in_place", [0, 0, 0, 5, 1, 1, 8, 0, 0], x)
    sums = [tree(dict(enumerate(x[64 * r : 64 * r + 64])), 64, F4) for r in range(5)]
    assert got.fault == "" and np.array_equal(got.view(F4)[:5], sums)
    assert "overlap" in run("reductions", "in_place", [0, 0, 0, 5, 1, 1, 8, 0, 64], x).fault
    assert run("reductions", "in_place", [0, 0, 0, 5, 1, 1, 8, 0, 1280], x).fault == ""
    assert "overtake" in run("reductions", "in_place", [0, 0, 0, 5, 65, 1, 8, 0, 0], x).fault


@pytest.mark.parametrize(
    ("name", "numbers", "says"),
    [
        ("WholeSum/f4", (1, 65, 1, 1, 1, 8), "mask 65 is outside 1..64"),
        ("WholeSum/f4", (1, 0, 1, 1, 1, 8), "mask 0 is outside 1..64"),
        ("WholeSum/f4", (2, 0, 1, 1, 1, 8), "a mask of no lane"),
        ("WholeMax/f2", (1, 129, 1, 1, 1, 8), "mask 129 is outside 1..128"),
        ("BlockMax/f4", (1, 64, 256, 1, 1, 8), "repeatTime 256 is outside 0..255"),
        ("PairSum/f4", (1, 64, 1, 65536, 1, 8), "dstRepStride 65536 is outside 0..65535"),
        ("WholeSum/f4", (1, 64, 1, 1, 1, 65536), "srcRepStride 65536 is outside 0..65535"),
        ("ReduceSum/f4", (4, 64, 1, 1, 1, 8), "SetMaskCount is missing"),
    ],
)
def test_limits(name: str, numbers: tuple[int, int, int, int, int, int], says: str) -> None:
    fault = run("reductions", name, numbers_of(numbers)).fault
    assert fault.startswith("illegal argument: ") and says in fault


def test_sum_limits() -> None:
    for rows, inner, n in [(1, 30, 30), (1, 32, 33), (1, 32, 0)]:
        fault = run("reductions", "Sum/f4", [0, rows, inner, n, 0, 2**64 - 1]).fault
        assert f"inner {inner} must be a multiple of 32 bytes, n {n} from 1 to inner" in fault
    assert "destination and source overlap" in run("reductions", "Sum/f4", [0, 2, 32, 32, 0, 224]).fault
    assert run("reductions", "Sum/f4", [0, 2, 32, 32, 0, 256]).fault == ""
