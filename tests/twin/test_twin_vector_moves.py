"""Compare, Select, GatherMask, Brcb, index sequences and sorting of the twin's vector unit against numpy."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from numpy.typing import NDArray
from twin_oracle import VARIANTS, VECTOR_TYPES, assert_same, bits, build, pointer, vector_samples

pytestmark = pytest.mark.asan

Array = NDArray[np.generic]
F16, F32, I16, I32 = (np.dtype(t) for t in (np.float16, np.float32, np.int16, np.int32))
REAL = [F16, F32]
LANES = {F16: 128, F32: 64}
MOVED = [t for t in VECTOR_TYPES if t.itemsize in (2, 4)]
NOTHING = ctypes.c_void_p(0)


@pytest.fixture(scope="module", params=list(VARIANTS))
def oracle(request: pytest.FixtureRequest) -> ctypes.CDLL:
    library = build("vector_oracle", request.param)
    library.oracle_gather.restype = ctypes.c_int64
    return library


def code(dtype: np.dtype) -> int:
    return VECTOR_TYPES.index(dtype)


def raw_values(dtype: np.dtype, count: int, seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)


def same_bits(got: Array, want: Array) -> bool:
    return got.dtype == want.dtype and bits(got).tolist() == bits(want).tolist()


# ---- Compare, Select ----

# In CMPMODE's order.
COMPARISONS = [np.less, np.greater, np.equal, np.less_equal, np.greater_equal, np.not_equal]


@pytest.mark.parametrize("scalar", [False, True], ids=["tensor", "scalar"])
def test_compare(oracle: ctypes.CDLL, scalar: bool) -> None:
    for dtype in VECTOR_TYPES:
        for mode, function in enumerate(COMPARISONS):
            call = (code(dtype), mode)
            if dtype not in (F16, F32, I32):
                assert oracle.oracle_compare(*call, NOTHING, NOTHING, NOTHING, 0, int(scalar)) == 0
                continue
            a = vector_samples(dtype, 1)
            b = np.where(np.random.default_rng(2).random(a.size) < 0.3, a, vector_samples(dtype, 3))
            for count, picks in ((a.size, 3), (64, 20), (0, 1), (1, 5), (67, 5), (8, 5)):
                for pick in range(picks):
                    right = b[pick].reshape(1) if scalar else b[:count].copy()
                    out = np.full(count // 8 + 9, 0xA5, np.uint8)
                    data = (pointer(out), pointer(a), pointer(right))
                    status = oracle.oracle_compare(*call, *data, count, int(scalar))
                    assert status == (2 if dtype == I32 and function is not np.equal else 1)
                    want = np.unpackbits(np.full_like(out, 0xA5), bitorder="little")
                    want[:count] = function(a[:count], right)
                    assert out.tolist() == np.packbits(want, bitorder="little").tolist()


def test_select(oracle: ctypes.CDLL) -> None:
    for dtype in VECTOR_TYPES:
        for mode in range(3):
            if dtype not in REAL:
                assert oracle.oracle_select(code(dtype), mode, NOTHING, NOTHING, NOTHING, NOTHING, 0) == 0
                continue
            for count in (0, 1, 7, 64, 100, 128, 1024, 4096 + 24):
                a, b = raw_values(dtype, count + 1, 4), raw_values(dtype, count + 1, 5)
                mask = raw_values(np.dtype(np.uint8), count // 8 + 16, 6)
                where = np.unpackbits(mask, bitorder="little").astype(bool)
                if mode == 0:
                    where = np.tile(where[: LANES[dtype]], count // LANES[dtype] + 1)
                other = np.full_like(b, b[0]) if mode == 1 else b
                want = np.append(np.where(where[:count], a[:count], other[:count]), a[count])
                for out in (a.copy(), a):  # the second: in place
                    data = (pointer(out), pointer(mask), pointer(a), pointer(b))
                    oracle.oracle_select(code(dtype), mode, *data, count)
                    assert same_bits(out, want)


# ---- GatherMask, Brcb, sequences ----

PATTERNS = {1: "10", 2: "01", 3: "1000", 4: "0100", 5: "0010", 6: "0001", 7: "1"}  # lane 0 first


def walk(dtype: np.dtype, lanes: int, block: int, start: int) -> list[int]:
    """Source indices of one repeat: blocks of 32 bytes at a stride of `block`."""
    per_block = 32 // dtype.itemsize
    return [start + lane // per_block * block * per_block + lane % per_block for lane in range(lanes)]


# (lanes or None for 256 bytes, repeats, block stride, source repeat stride, bits repeat stride)
SHAPES = [(None, 4, 1, 8, 0), (None, 3, 2, 17, 1), (70, 2, 1, 4, 0), (70, 2, 1, 8, 3)]
SHAPES += [(1000, 1, 1, 0, 0), (5, 6, 1, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gather_mask(oracle: ctypes.CDLL, shape: tuple[int | None, int, int, int, int]) -> None:
    asked, repeats, block, source_stride, bits_stride = shape
    for dtype in VECTOR_TYPES:
        lanes = asked if asked is not None else 256 // dtype.itemsize
        numbers = np.array([lanes, repeats, block, source_stride, bits_stride], np.uint32)
        source = raw_values(dtype, 4096, 7)
        if dtype not in MOVED:
            assert oracle.oracle_gather(code(dtype), NOTHING, NOTHING, 7, NOTHING, pointer(numbers)) == -1
            continue
        per_block = 32 // dtype.itemsize
        index = [walk(dtype, lanes, block, r * source_stride * per_block) for r in range(repeats)]
        masks = raw_values(np.dtype(np.uint8), 4096, 8)
        chosen = {p: [(text * lanes)[:lanes] for _ in range(repeats)] for p, text in PATTERNS.items()}
        unpacked = np.unpackbits(masks, bitorder="little")
        chosen[0] = ["".join(map(str, unpacked[r * bits_stride * 256 :][:lanes])) for r in range(repeats)]
        for pattern, texts in chosen.items():
            on = "".join(texts)
            picks = [at for at, bit in zip(np.ravel(index).tolist(), on, strict=True) if bit == "1"]
            in_place = block == 1 and source_stride * per_block >= lanes  # never writes ahead of its reading
            for out in (raw_values(dtype, 4096, 9), source.copy())[: 2 if in_place else 1]:
                want = out.copy()
                want[: len(picks)] = source[picks]
                read = out if same_bits(out, source) else source
                data = (pointer(out), pointer(read), pattern, NOTHING if pattern else pointer(masks))
                assert oracle.oracle_gather(code(dtype), *data, pointer(numbers)) == len(picks)
                assert same_bits(out, want)


def test_gather_mask_documented_examples(oracle: ctypes.CDLL) -> None:
    x = np.arange(1, 257, dtype=np.uint32)
    shape = np.array([64, 4, 1, 8, 0], np.uint32)
    assert oracle.oracle_gather(code(x.dtype), pointer(x), pointer(x), 2, NOTHING, pointer(shape)) == 128
    assert x[:128].tolist() == list(range(2, 257, 2))


def test_brcb(oracle: ctypes.CDLL) -> None:
    for dtype in VECTOR_TYPES:
        source = raw_values(dtype, 8 * 4, 10)
        for block, repeat in ((1, 8), (2, 16), (3, 25)):
            strides = np.array([block, repeat], np.uint32)
            out = raw_values(dtype, 8192, 11)
            want = out.copy()
            per_block = 32 // dtype.itemsize
            for r in range(4):
                for j in range(8):
                    at = (r * repeat + j * block) * per_block
                    want[at : at + per_block] = source[8 * r + j]
            status = oracle.oracle_brcb(code(dtype), pointer(out), pointer(source), 4, pointer(strides))
            assert status == int(dtype in MOVED)
            assert status == 0 or same_bits(out, want)


def test_index_and_progression(oracle: ctypes.CDLL) -> None:
    for dtype in VECTOR_TYPES:
        if dtype not in (F16, F32, I16, I32):
            assert oracle.oracle_progression(code(dtype), NOTHING, NOTHING, NOTHING, 0) == 0
            continue
        steps = np.arange(5000)
        for first, step in ((0, 1), (-7, 3), (100, -2), (0.1, 0.3), (32000, 1), (2047, 5)):
            start, by = np.array([first]).astype(dtype), np.array([step]).astype(dtype)
            out = np.full(5001, 7, dtype)
            with np.errstate(over="ignore"):
                oracle.oracle_progression(code(dtype), pointer(out), pointer(start), NOTHING, 5000)
                exact = start.astype(np.float64 if dtype in REAL else np.int64) + steps
                assert_same(out[:5000], exact.astype(dtype))
                oracle.oracle_progression(code(dtype), pointer(out), pointer(start), pointer(by), 5000)
                products = by.astype(exact.dtype) * steps  # exact, so one rounding follows
                assert_same(out[:5000], start + products.astype(dtype))
            assert out[5000] == 7


# ---- sorting ----


def scores_of(dtype: np.dtype, count: int, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    few = rng.choice([0.0, -0.0, 1.0, -2.0, np.nan, np.inf, -np.inf], count)
    return np.where(rng.random(count) < 0.5, few, rng.integers(-20, 20, count) / 4).astype(dtype)


def descending(scores: Array) -> NDArray[np.int64]:
    """Stable order of the scores, NaN last."""
    nan = np.isnan(scores)
    return np.lexsort((np.where(nan, 0, -scores.astype(np.float64)), nan))


def entries_of(scores: Array, index: Array) -> Array:
    """(score, index) in 8 bytes each."""
    words = np.zeros((scores.size, 2), np.uint32)
    words[:, 0] = bits(scores)
    words[:, 1] = index
    return words.ravel()


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("repeats", [1, 2, 3, 5, 16, 33])
def test_sort_and_extract(oracle: ctypes.CDLL, dtype: np.dtype, repeats: int) -> None:
    count = 32 * repeats
    scores = scores_of(dtype, count, repeats)
    index = np.random.default_rng(12).integers(0, 1 << 32, count, dtype=np.uint32)
    out, tmp = np.zeros(2 * count, np.uint32), np.zeros(2 * count, np.uint32)
    args = (code(dtype), pointer(out), pointer(tmp), pointer(scores), pointer(index), repeats)
    oracle.oracle_sort(*args, 0)
    order = np.concatenate([32 * r + descending(scores[32 * r :][:32]) for r in range(repeats)])
    assert out.tolist() == entries_of(scores[order], index[order]).tolist()
    oracle.oracle_sort(*args, 1)
    order = descending(scores)
    assert out.tolist() == entries_of(scores[order], index[order]).tolist()
    values, numbers = np.empty(count, dtype), np.empty(count, np.uint32)
    oracle.oracle_extract(code(dtype), pointer(values), pointer(numbers), pointer(out), repeats)
    assert same_bits(values, scores[order]) and (numbers == index[order]).all()


def merged(lists: list[Array], suspend: bool) -> tuple[list[tuple[int, int]], list[int]]:
    """(list, position) in the order written, and how many of each list were."""
    used, order = [0] * len(lists), []
    while True:
        open_lists = [i for i, x in enumerate(lists) if used[i] < x.size]
        if not open_lists or (suspend and len(open_lists) < len(lists)):
            return order, used
        heads = np.array([lists[i][used[i]] for i in open_lists])
        best = open_lists[descending(heads)[0]]
        order.append((best, used[best]))
        used[best] += 1


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("suspend", [False, True])
def test_merge(oracle: ctypes.CDLL, dtype: np.dtype, suspend: bool) -> None:
    rng = np.random.default_rng(13)
    for case in range(60):
        count = int(rng.integers(2, 5))
        lists = [scores_of(dtype, int(n), 100 * case + i) for i, n in enumerate(rng.integers(1, 70, count))]
        lists = [x[descending(x)] for x in lists]
        packed = [entries_of(x, np.arange(x.size, dtype=np.uint32) + 1000 * i) for i, x in enumerate(lists)]
        sources = (ctypes.c_void_p * 4)(*[p.ctypes.data for p in packed])
        lengths = np.array([x.size for x in lists] + [0] * (4 - count), np.uint16)
        used = np.zeros(4, np.uint32)
        out = np.full(2 * sum(x.size for x in lists), 7, np.uint32)
        call = (code(dtype), pointer(out), sources, pointer(lengths), count, int(suspend), 1)
        oracle.oracle_merge(*call, pointer(used))
        order, want_used = merged(lists, suspend)
        want = [word for i, at in order for word in packed[i][2 * at : 2 * at + 2].tolist()]
        assert out.tolist() == want + [7] * (out.size - len(want))
        assert used[:count].tolist() == want_used


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_merge_repeats(oracle: ctypes.CDLL, dtype: np.dtype) -> None:
    scores = scores_of(dtype, 256, 14)
    index = np.arange(256, dtype=np.uint32)
    runs, out = np.zeros(512, np.uint32), np.zeros(512, np.uint32)
    oracle.oracle_sort(code(dtype), pointer(runs), NOTHING, pointer(scores), pointer(index), 8, 0)
    sources = (ctypes.c_void_p * 4)(*[runs.ctypes.data + 256 * i for i in range(4)])
    lengths, used = np.full(4, 32, np.uint16), np.zeros(4, np.uint32)
    oracle.oracle_merge(code(dtype), pointer(out), sources, pointer(lengths), 4, 0, 2, pointer(used))
    order = np.concatenate([128 * r + descending(scores[128 * r :][:128]) for r in range(2)])
    assert out.tolist() == entries_of(scores[order], index[order]).tolist()
