"""Comparisons, selections, gathers and index sequences against numpy, each declaring what it touches."""

from __future__ import annotations

import numpy as np
import pytest
from twin_calls import GAPS, REAL, TYPES, Array, clean, engines, lanes_of, offsets, run, tricky
from twin_oracle import assert_same, bits

F4, U4 = TYPES["f4"], TYPES["u4"]
COMPARISONS = [np.less, np.greater, np.equal, np.less_equal, np.greater_equal, np.not_equal]  # as CMPMODE
pytestmark = pytest.mark.asan


def small(kind: str, seed: int) -> Array:
    """A tensor of few different numbers, so that many are equal."""
    return np.random.default_rng(seed).integers(-3, 4, 8192 // TYPES[kind].itemsize).astype(kind)


def large(kind: str, seed: int, low: int = 0) -> Array:
    return np.random.default_rng(seed).integers(low, 1000, 8192 // TYPES[kind].itemsize).astype(kind)


def random_bits(seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, 256, 8192, np.uint8)


def packed(flags: Array) -> Array:
    return np.packbits(flags, bitorder="little")


def unpacked(raw: Array, count: int) -> Array:
    return np.unpackbits(raw.view(np.uint8), bitorder="little")[:count].astype(bool)


@engines
@pytest.mark.parametrize("kind", ["f4", "f2", "i4"])
@pytest.mark.parametrize("scalar", [False, True], ids=["tensor", "scalar"])
def test_comparisons_give_bits_of_all_lanes(kind: str, scalar: bool, engine: str) -> None:
    """Bits of all lanes of every repeat, the repeats' bits one behind the other; a mask has no effect."""
    dtype, lanes = TYPES[kind], 256 // TYPES[kind].itemsize
    name = f"{'CompareScalar' if scalar else 'Compare'}/{kind}"
    pairs = [(small(kind, 1), small(kind, 2))]
    if kind != "i4":
        pairs += [(tricky(dtype, seed, 1024), tricky(dtype, seed + 3, 1024)) for seed in range(3)]
    shapes = [(1, 5, (0, 1, 1), (8, 8, 8)), (2, GAPS, (0, 2, 1), (8, 17, 0)), (1, 1, (0, 1, 3), (8, 0, 24))]
    for mode, function in enumerate(COMPARISONS):
        if kind == "i4" and function is not np.equal:
            continue
        for a, b in pairs:
            got = clean("selection", name, [0, 4 * lanes, *[0] * 8, mode], a, b, engine=engine)
            want = packed(function(a[: 4 * lanes], b[0] if scalar else b[: 4 * lanes]))
            assert np.array_equal(got[: lanes // 2], want) and not got[lanes // 2 :].any()
        a, b = pairs[0]
        for form, mask, blocks, steps in shapes:
            got = clean("selection", name, [form, mask, 0, 3, *blocks, *steps, mode], a, b, engine=engine)
            where = [(r, lane) for r in range(3) for lane in range(lanes)]
            x = a[offsets(dtype.itemsize, where, blocks[1], steps[1])]
            y = b[0] if scalar else b[offsets(dtype.itemsize, where, blocks[2], steps[2])]
            assert np.array_equal(got[: 3 * lanes // 8], packed(function(x, y)))
            assert not got[3 * lanes // 8 :].any()


@pytest.mark.parametrize("kind", REAL)
def test_comparison_into_the_register(kind: str) -> None:
    a, b = small(kind, 3), small(kind, 4)
    lanes = 256 // a.itemsize
    for form, mask in [(1, lanes), (1, 11), (2, GAPS), (2, 0b1010)]:
        got = clean("selection", f"RegisterCompare/{kind}", [form, mask, 0, 1, 1, 1, 1, 8, 8, 8], a, b)
        taken = np.isin(np.arange(lanes), lanes_of(form, mask, lanes)) & (a < b)[:lanes]
        assert np.array_equal(got[: lanes // 8], packed(taken))
        chosen = np.where(np.tile(taken, 2), a[: 2 * lanes], b[: 2 * lanes])
        assert np.array_equal(got[4096:].view(kind)[: 2 * lanes], chosen)


def test_the_register_can_be_set() -> None:
    a, raw = small("f4", 5), random_bits(6)[:16]
    got = clean("selection", "register_set", [0, 0, 0, 2, 1, 1, 1, 8, 8, 8], a, raw)
    want = np.where(np.tile(unpacked(raw, 64), 2), a[:128], a[1024:1152])
    assert np.array_equal(got.view(F4)[:128], want)


@engines
@pytest.mark.parametrize("kind", REAL)
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_select_uses_bits_by_its_mode(kind: str, mode: int, engine: str) -> None:
    """Mode 0 uses the first repeat's bits for all; modes 1 and 2 use up the bits, masked lanes included."""
    call = f"Select/{kind}"
    a, raw, untouched = large(kind, 7, -1000), random_bits(8), np.full_like(large(kind, 7), 99)
    a.view(np.uint32)[::5] = 0x7FC0_7E01  # NaN with a payload: copied as they are
    lanes, half, flags = 256 // a.itemsize, 4096 // a.itemsize, unpacked(raw, 8192)
    for count in (lanes * 3 + 5, 7, lanes, half):
        got = clean("selection", call, [0, count, *[0] * 8, mode], a, raw, untouched, engine=engine)
        chosen = np.tile(flags[:lanes], half)[:count] if mode == 0 else flags[:count]
        want = untouched.copy()
        want[:count] = np.where(chosen, a[:count], 7 if mode == 1 else a[half : half + count])
        assert np.array_equal(bits(got.view(kind)), bits(want))
    for form, mask, blocks, steps in [
        (1, lanes, (1, 1, 1), (8, 8, 8)),
        (1, 13, (1, 2, 1), (8, 16, 0)),
        (2, GAPS, (2, 1, 1), (17, 8, 8)),
    ]:
        got = clean("selection", call, [form, mask, 0, 3, *blocks, *steps, mode], a, raw, untouched, engine=engine)
        where = [(r, lane) for r in range(3) for lane in lanes_of(form, mask, lanes)]
        chosen = flags[[(0 if mode == 0 else r * lanes) + lane for r, lane in where]]
        to, x, y = (offsets(a.itemsize, where, blocks[i], steps[i]) for i in range(3))
        want = untouched.copy()
        want[to] = np.where(chosen, a[x], 7 if mode == 1 else a[half:][y])
        assert np.array_equal(bits(got.view(kind)), bits(want))


PATTERNS = {1: [1, 0], 2: [0, 1], 3: [1, 0, 0, 0], 4: [0, 1, 0, 0], 5: [0, 0, 1, 0], 6: [0, 0, 0, 1], 7: [1]}
# mask (0: normal mode), repeats, block stride, repeat stride, bits repeat stride
GATHERS = [(0, 4, 1, 8, 1), (0, 2, 2, 16, 2), (70, 3, 1, 9, 1), (100, 1, 1, 0, 0), (5, 6, 1, 1, 1)]


@engines
@pytest.mark.parametrize("kind", ["f4", "i4", "u2", "f2"])
@pytest.mark.parametrize("shape", GATHERS, ids=str)
def test_gather_mask_keeps_the_lanes_of_its_pattern(
    kind: str, shape: tuple[int, int, int, int, int], engine: str
) -> None:
    mask, repeats, block, step, bits_step = shape
    a, raw = large(kind, 9), random_bits(10)
    lanes = mask or 256 // a.itemsize
    where = [(r, lane) for r in range(repeats) for lane in range(lanes)]
    source = a[offsets(a.itemsize, where, block, step)]
    for pattern in (*PATTERNS, None):
        if pattern is None:
            flags = unpacked(raw, 65536)
            keep = np.concatenate([flags[r * bits_step * 256 :][:lanes] for r in range(repeats)])
        else:
            keep = np.tile(np.resize(np.array(PATTERNS[pattern], bool), lanes), repeats)
        numbers = [0 if pattern else 1, mask, 0, repeats, 0, block, 0, 0, step, bits_step, pattern or 0, -1]
        got = clean("selection", f"GatherMask/{kind}", numbers, a, raw, engine=engine)
        count = int(keep.sum())
        assert got.view(U4)[2046:].tolist() == [count, count]
        assert np.array_equal(got.view(kind)[:count], source[keep])
        assert not got[count * a.itemsize : 8184].any()


def test_gather_mask_in_place_and_its_overlaps() -> None:
    a = np.arange(2048, dtype=np.float32)
    for at, legal in [(0, True), (1024, True), (32, False), (992, False)]:
        got = run("selection", "GatherMask/f4", [0, 0, 0, 4, 0, 1, 0, 0, 8, 0, 2, at], a)
        if legal:
            assert got.fault == "" and np.array_equal(got.view(F4)[at // 4 :][:128], a[1:256:2])
        else:
            assert "overlap in part" in got.fault


def test_gather_mask_into_too_little_room() -> None:
    """The last 512 bytes of a tensor hold 128 floats: the bits decide whether that is enough."""
    numbers = [1, 0, 0, 4, 0, 1, 0, 0, 8, 1, 0, 8192 - 512]
    a, chosen = np.arange(2048, dtype=np.float32), np.zeros(4096, np.uint8)
    for r in range(4):
        chosen[32 * r : 32 * r + 4] = 255  # 32 a repeat
    clean("selection", "GatherMask/f4", numbers, a, chosen)
    chosen[4] = 1
    fault = run("selection", "GatherMask/f4", numbers, a, chosen).fault
    assert fault.startswith("out of bounds: ") and "keeps 129 elements, the destination holds 128" in fault


@pytest.mark.parametrize("kind", ["f4", "u2", "i4"])
def test_gather_takes_elements_by_offset(kind: str) -> None:
    a, index = large(kind, 11), np.random.default_rng(11).integers(0, 500, 2048)
    where, base, lanes = (index * a.itemsize).astype(np.uint32), 10 * a.itemsize, 256 // a.itemsize
    got = clean("selection", f"Gather/{kind}", [0, 100, *[0] * 8, base], a, where).view(kind)
    assert np.array_equal(got[:100], a[10 + index[:100]]) and not got[100:].any()
    for form, mask, step in [(1, 30, 8), (2, GAPS, 9)]:
        numbers = [form, mask, 0, 2, 0, 0, 0, step, 0, 0, base]
        got = clean("selection", f"Gather/{kind}", numbers, a, where).view(kind)
        pairs = [(r, lane) for r in range(2) for lane in lanes_of(form, mask, lanes)]
        want = np.zeros_like(a)
        want[offsets(a.itemsize, pairs, 1, step)] = a[10 + index[[r * lanes + lane for r, lane in pairs]]]
        assert np.array_equal(got, want)


@pytest.mark.parametrize(
    ("call", "kind"), [*(("Brcb", k) for k in ("f4", "f2", "u4")), ("Gatherb", "u2"), ("Gatherb", "u4")]
)
def test_blocks_are_filled_and_taken_at_strides(call: str, kind: str) -> None:
    """Brcb fills a block with one element; Gatherb takes a block from where an offset says."""
    a, blocks = large(kind, 12), np.random.default_rng(12).integers(0, 200, 24)
    rows = a.reshape(256, -1)
    taken = rows[blocks] if call == "Gatherb" else np.repeat(a[:24, None], rows.shape[1], 1)
    for gap, step in [(1, 8), (2, 17), (1, 12), (3, 25), (0, 8)]:
        if gap == 0 and call == "Brcb":
            continue
        got = clean("selection", f"{call}/{kind}", [0, 0, 0, 3, gap, 0, 0, step], a, (blocks * 32).astype(np.uint32))
        want = np.zeros_like(rows)
        for i, block in enumerate(taken):
            want[i // 8 * step + i % 8 * max(gap, 1)] = block
        assert np.array_equal(got.view(kind), want.ravel())


def test_copies_within_ub_move_what_they_name() -> None:
    a = np.arange(2048, dtype=np.float32)
    rows, want = a.reshape(-1, 8), np.zeros((256, 8), np.float32)
    got = clean("selection", "copy_blocks", [3, 2, 1, 4, -1], a)
    for block in range(3):
        want[6 * block : 6 * block + 2] = rows[3 * block : 3 * block + 2]
    assert np.array_equal(got.view(F4), want.ravel())


@pytest.mark.parametrize("kind", ["f2", "f4", "i2", "i4"])
def test_progressions_are_rounded_step_by_step(kind: str) -> None:
    dtype = TYPES[kind]
    for first, step in ((0, 1), (-7, 3), (100, -2), (0.1, 0.3), (32000, 1), (2047, 5), (3, 2)):
        b = np.array([first, step]).astype(dtype)
        got = clean("selection", f"ArithProgression/{kind}", [0, 1000], None, b).view(dtype)
        with np.errstate(over="ignore"):
            products = b[1].astype(np.float64 if dtype.kind == "f" else np.int64) * np.arange(1000)
            assert_same(got[:1000], b[0] + products.astype(dtype))  # the product rounds once
        assert not got[1000:].any()


# Name, numbers, what is said; "": just within the limits.
LIMITS = [
    ("Compare/f4", [0, 65], "65 elements: whole 256 bytes only, the last 4 bytes"),
    ("Compare/i4", [0, 64, *[0] * 8, 1], "only EQ exists"),
    ("Compare/i4", [0, 64, *[0] * 8, 2], ""),
    ("Select/f4", [1, 65, 0, 1, 1, 1, 1, 8, 8, 8], "mask 65 is outside 1..64"),
    ("GatherMask/f4", [0, 0, 0, 1, 0, 1, 0, 0, 8, 0, 8, -1], "pattern 8 is outside 1..7"),
    ("Gather/f4", [0, 8, *[0] * 8, 2], "base address 2 is not a multiple of 4"),
    ("Brcb/f4", [0, 0, 0, 1, 0, 0, 0, 8], "dstBlkStride is 0"),
    ("Brcb/f4", [0, 0, 0, 1, 1, 0, 0, 8, 0, 0, 0, 224], "destination and source overlap"),
    ("Brcb/f4", [0, 0, 0, 1, 1, 0, 0, 8, 0, 0, 0, 256], ""),
    ("select_scratch", [0, 188417, *[0] * 8, 1], "uses the last 8 KiB of UB as scratch"),
    ("select_scratch", [0, 188416, *[0] * 8, 1], ""),
    ("copy_blocks", [4096, 1], "blockCount 4096 is over 4095"),
    ("copy_blocks", [2, 2, 1, 1, 0], ""),
    ("copy_blocks", [2, 2, 1, 1, 64], "destination and source overlap"),
    ("copy_blocks", [2, 2, 1, 1, 160], ""),
]


@pytest.mark.parametrize(("name", "numbers", "says"), LIMITS)
def test_arguments_beyond_a_limit_are_refused(name: str, numbers: list[int], says: str) -> None:
    fault = run("selection", name, numbers).fault
    assert says in fault and (fault == "") == (says == "")


def test_offsets_are_checked() -> None:
    where = np.array([0, 8192], np.uint32)
    clean("selection", "Gather/f4", [0, 1], None, where)
    fault = run("selection", "Gather/f4", [0, 2], None, where).fault
    assert fault.startswith("out of bounds: ") and "offset 8192 of lane 1" in fault
    fault = run("selection", "Gatherb/u4", [0, 0, 0, 1, 1, 0, 0, 8], None, np.full(8, 16, np.uint32)).fault
    assert fault.startswith("misaligned address: ") and "offset 16 of block 0" in fault
