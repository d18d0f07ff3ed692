"""Comparisons, selections and gathers of the twin's API against numpy, each declaring what it touches."""

from __future__ import annotations

import numpy as np
import pytest
from twin_calls import TYPES, Array, lanes_of, offsets, run

F4, F2, I4, U2, U4 = (TYPES[kind] for kind in ("f4", "f2", "i4", "u2", "u4"))
GAPS = 0x0F0F_3C3C_8001_FFFF
COMPARISONS = [np.less, np.greater, np.equal, np.less_equal, np.greater_equal, np.not_equal]


def small(dtype: np.dtype, seed: int) -> Array:
    """A tensor of few different numbers, so that many are equal."""
    return np.random.default_rng(seed).integers(-3, 4, 8192 // dtype.itemsize).astype(dtype)


def packed(flags: Array) -> Array:
    return np.packbits(flags, bitorder="little")


def unpacked(raw: Array, count: int) -> Array:
    return np.unpackbits(raw.view(np.uint8), bitorder="little")[:count].astype(bool)


@pytest.mark.parametrize("kind", ["f4", "f2", "i4"])
@pytest.mark.parametrize("scalar", [False, True], ids=["tensor", "scalar"])
def test_comparisons(kind: str, scalar: bool) -> None:
    """Bits of all lanes of every repeat, the repeats' bits one behind the other; a mask has no effect."""
    dtype = TYPES[kind]
    a, b = small(dtype, 1), small(dtype, 2)
    name, lanes = f"{'CompareScalar' if scalar else 'Compare'}/{kind}", 256 // dtype.itemsize
    for mode, function in enumerate(COMPARISONS if kind != "i4" else COMPARISONS[2:3]):
        mode = mode if kind != "i4" else 2
        got = run("selection", name, [0, 4 * lanes, *[0] * 8, mode], a, b)
        other = b[0] if scalar else b[: 4 * lanes]
        assert got.fault == "" and np.array_equal(
            got.out[: lanes // 2], packed(function(a[: 4 * lanes], other))
        )
        assert not got.out[lanes // 2 :].any()
        for form, mask, blocks, steps in [
            (1, 5, (0, 1, 1), (8, 8, 8)),
            (2, GAPS, (0, 2, 1), (8, 17, 0)),
            (1, 1, (0, 1, 3), (8, 0, 24)),
        ]:
            numbers = [form, mask, 0, 3, *blocks, *steps, mode]
            got = run("selection", name, numbers, a, b)
            where = [(r, lane) for r in range(3) for lane in range(lanes)]
            x = a[offsets(dtype.itemsize, where, blocks[1], steps[1])]
            y = b[0] if scalar else b[offsets(dtype.itemsize, where, blocks[2], steps[2])]
            assert got.fault == "" and np.array_equal(got.out[: 3 * lanes // 8], packed(function(x, y)))
            assert not got.out[3 * lanes // 8 :].any()


@pytest.mark.parametrize("kind", ["f4", "f2"])
def test_comparison_into_the_register(kind: str) -> None:
    dtype = TYPES[kind]
    a, b = small(dtype, 3), small(dtype, 4)
    lanes = 256 // dtype.itemsize
    for form, mask in [(1, lanes), (1, 11), (2, GAPS), (2, 0b1010)]:
        got = run("selection", f"register_compare/{kind}", [form, mask, 0, 1, 1, 1, 1, 8, 8, 8], a, b)
        bits = np.zeros(lanes, bool)
        for lane in lanes_of(form, mask, lanes):
            bits[lane] = a[lane] < b[lane]
        assert got.fault == "" and np.array_equal(got.out[: lanes // 8], packed(bits))
        chosen = np.where(np.tile(bits, 2), a[: 2 * lanes], b[: 2 * lanes])
        assert np.array_equal(got.view(dtype)[4096 // dtype.itemsize :][: 2 * lanes], chosen)


def test_the_register_can_be_set() -> None:
    a = small(F4, 5)
    raw = np.random.default_rng(6).integers(0, 256, 16, np.uint8)
    got = run("selection", "register_set", [0, 0, 0, 2, 1, 1, 1, 8, 8, 8], a, raw)
    bits = np.tile(unpacked(raw, 64), 2)
    assert got.fault == "" and np.array_equal(got.view(F4)[:128], np.where(bits, a[:128], a[1024:1152]))


@pytest.mark.parametrize("kind", ["f4", "f2"])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_select(kind: str, mode: int) -> None:
    """Mode 0 uses the first repeat's bits for all; modes 1 and 2 use up the bits, masked lanes included."""
    dtype = TYPES[kind]
    a = np.random.default_rng(7).integers(-1000, 1000, 8192 // dtype.itemsize).astype(dtype)
    raw = np.random.default_rng(8).integers(0, 256, 512, np.uint8)
    lanes, half = 256 // dtype.itemsize, 4096 // dtype.itemsize
    untouched = np.full(8192 // dtype.itemsize, 99, dtype)
    for count in (lanes * 3 + 5, 7, lanes):
        got = run("selection", f"Select/{kind}", [0, count, *[0] * 8, mode], a, raw, untouched)
        bits = unpacked(raw, 4096)
        bits = np.tile(bits[:lanes], 8)[:count] if mode == 0 else bits[:count]
        want = untouched.copy()
        want[:count] = np.where(bits, a[:count], 7 if mode == 1 else a[half : half + count])
        assert got.fault == "" and np.array_equal(got.view(dtype), want)
    for form, mask, blocks, steps in [
        (1, lanes, (1, 1, 1), (8, 8, 8)),
        (1, 13, (1, 2, 1), (8, 16, 0)),
        (2, GAPS, (2, 1, 1), (17, 8, 8)),
    ]:
        got = run("selection", f"Select/{kind}", [form, mask, 0, 3, *blocks, *steps, mode], a, raw, untouched)
        where = [(r, lane) for r in range(3) for lane in lanes_of(form, mask, lanes)]
        chosen = unpacked(raw, 4096)[[(0 if mode == 0 else r * lanes) + lane for r, lane in where]]
        x = a[offsets(dtype.itemsize, where, blocks[1], steps[1])]
        y = a[half:][offsets(dtype.itemsize, where, blocks[2], steps[2])]
        want = untouched.copy()
        want[offsets(dtype.itemsize, where, blocks[0], steps[0])] = np.where(chosen, x, 7 if mode == 1 else y)
        assert got.fault == "" and np.array_equal(got.view(dtype), want)


PATTERNS = {1: [1, 0], 2: [0, 1], 3: [1, 0, 0, 0], 4: [0, 1, 0, 0], 5: [0, 0, 1, 0], 6: [0, 0, 0, 1], 7: [1]}
# mask (0: normal mode), repeats, block stride, repeat stride, bits repeat stride
GATHERS = [(0, 4, 1, 8, 1), (0, 2, 2, 16, 2), (70, 3, 1, 9, 1), (100, 1, 1, 0, 0), (5, 6, 1, 1, 1)]


@pytest.mark.parametrize("kind", ["f4", "i4", "u2", "f2"])
@pytest.mark.parametrize("shape", GATHERS, ids=str)
def test_gather_mask(kind: str, shape: tuple[int, int, int, int, int]) -> None:
    mask, repeats, block, step, bits_step = shape
    dtype = TYPES[kind]
    a = np.random.default_rng(9).integers(0, 1000, 8192 // dtype.itemsize).astype(dtype)
    raw = np.random.default_rng(10).integers(0, 256, 4096, np.uint8)
    lanes = mask or 256 // dtype.itemsize
    where = [(r, lane) for r in range(repeats) for lane in range(lanes)]
    source = a[offsets(dtype.itemsize, where, block, step)]
    for pattern in (*PATTERNS, None):
        if pattern is None:
            keep = np.concatenate(
                [unpacked(raw, 32768)[r * bits_step * 256 :][:lanes] for r in range(repeats)]
            )
        else:
            keep = np.tile(np.resize(np.array(PATTERNS[pattern], bool), lanes), repeats)
        form = 0 if pattern else 1
        numbers = [form, mask, 0, repeats, 0, block, 0, 0, step, bits_step, pattern or 0, -1 & (2**64 - 1)]
        got = run("selection", f"GatherMask/{kind}", numbers, a, raw)
        count = int(keep.sum())
        assert got.fault == "" and got.view(U4)[2046:].tolist() == [count, count]
        assert np.array_equal(got.view(dtype)[:count], source[keep])
        assert not got.out[count * dtype.itemsize : 8184].any()


def test_gather_mask_in_place_and_its_overlaps() -> None:
    a = np.arange(2048, dtype=np.float32)
    for at, legal in [(0, True), (1024, True), (32, False), (992, False)]:
        got = run("selection", "GatherMask/f4", [0, 0, 0, 4, 0, 1, 0, 0, 8, 0, 2, at], a)
        assert (got.fault == "") == legal
        if legal:
            assert np.array_equal(got.view(F4)[at // 4 :][:128], a[1:256:2])
        else:
            assert "overlap in part" in got.fault


def test_gather_mask_into_too_little_room() -> None:
    """The last 512 bytes of a tensor hold 128 floats: the bits decide whether that is enough."""
    fits = np.zeros(64, np.uint8)
    fits[:16] = 255
    numbers = [1, 0, 0, 4, 0, 1, 0, 0, 8, 1, 0, 8192 - 512]
    bits = np.zeros(4096, np.uint8)
    for r in range(4):
        bits[32 * r : 32 * r + 4] = 255  # 32 a repeat
    assert run("selection", "GatherMask/f4", numbers, np.arange(2048, dtype=np.float32), bits).fault == ""
    bits[4] = 1
    fault = run("selection", "GatherMask/f4", numbers, np.arange(2048, dtype=np.float32), bits).fault
    assert fault.startswith("out of bounds: ") and "keeps 129 elements, the destination holds 128" in fault


@pytest.mark.parametrize("kind", ["f4", "u2", "i4"])
def test_gather(kind: str) -> None:
    dtype = TYPES[kind]
    rng = np.random.default_rng(11)
    a = rng.integers(0, 1000, 8192 // dtype.itemsize).astype(dtype)
    index = rng.integers(0, 500, 2048)
    where = (index * dtype.itemsize).astype(np.uint32)
    base = 10 * dtype.itemsize
    got = run("selection", f"Gather/{kind}", [0, 100, *[0] * 8, base], a, where)
    assert got.fault == "" and np.array_equal(got.view(dtype)[:100], a[10 + index[:100]])
    assert not got.view(dtype)[100:].any()
    lanes = 256 // dtype.itemsize
    for form, mask, step in [(1, 30, 8), (2, GAPS, 9)]:
        got = run("selection", f"Gather/{kind}", [form, mask, 0, 2, 0, 0, 0, step, 0, 0, base], a, where)
        pairs = [(r, lane) for r in range(2) for lane in lanes_of(form, mask, lanes)]
        want = np.zeros_like(a)
        want[offsets(dtype.itemsize, pairs, 1, step)] = a[10 + index[[r * lanes + lane for r, lane in pairs]]]
        assert got.fault == "" and np.array_equal(got.view(dtype), want)


@pytest.mark.parametrize("kind", ["u2", "u4"])
def test_gatherb(kind: str) -> None:
    dtype = TYPES[kind]
    rng = np.random.default_rng(12)
    a = rng.integers(0, 1000, 8192 // dtype.itemsize).astype(dtype)
    blocks = rng.integers(0, 200, 24)
    for gap, step in [(1, 8), (2, 17), (0, 8)]:
        got = run(
            "selection", f"Gatherb/{kind}", [0, 0, 0, 3, gap, 0, 0, step], a, (blocks * 32).astype(np.uint32)
        )
        want = np.zeros(8192, np.uint8)
        for i, block in enumerate(blocks):
            at = 32 * (i // 8 * step + i % 8 * max(gap, 1))
            want[at : at + 32] = a.view(np.uint8)[32 * block :][:32]
        assert got.fault == "" and np.array_equal(got.out, want)


@pytest.mark.parametrize("kind", ["f4", "f2", "u4"])
def test_brcb(kind: str) -> None:
    dtype = TYPES[kind]
    a = np.random.default_rng(13).integers(0, 1000, 64).astype(dtype)
    for gap, step in [(1, 8), (2, 16), (1, 12), (3, 25)]:
        got = run("selection", f"Brcb/{kind}", [0, 0, 0, 3, gap, 0, 0, step], a)
        want = np.zeros((256, 32 // dtype.itemsize), dtype)
        for i in range(24):
            want[i // 8 * step + i % 8 * gap] = a[i]
        assert got.fault == "" and np.array_equal(got.view(dtype), want.ravel())


def test_copies_within_ub() -> None:
    a = np.arange(2048, dtype=np.float32)
    rows = a.reshape(-1, 8)
    got = run("selection", "copy_blocks", [3, 2, 1, 4, -1 & (2**64 - 1)], a).view(F4).reshape(-1, 8)
    want = np.zeros_like(rows)
    for block in range(3):
        want[6 * block : 6 * block + 2] = rows[3 * block : 3 * block + 2]
    assert np.array_equal(got, want)
    for numbers, legal in [([2, 2, 1, 1, 0], True), ([2, 2, 1, 1, 64], False), ([2, 2, 1, 1, 160], True)]:
        fault = run("selection", "copy_blocks", numbers, a).fault
        assert (fault == "") == legal and (legal or "destination and source overlap" in fault)
    assert "blockCount 4096 is over 4095" in run("selection", "copy_blocks", [4096, 1]).fault


def test_progressions() -> None:
    assert np.array_equal(
        run("selection", "ArithProgression/f4", [0, 90]).view(F4)[:90], 3 + 2 * np.arange(90.0)
    )
    got = run("selection", "ArithProgression/i2", [0, 90]).view(TYPES["i2"])
    assert np.array_equal(got[:90], 3 + 2 * np.arange(90)) and not got[90:].any()


@pytest.mark.parametrize(
    ("name", "numbers", "says"),
    [
        ("Compare/f4", [0, 65], "65 elements: whole 256 bytes only, the last 4 bytes"),
        ("Compare/i4", [0, 64, *[0] * 8, 1], "only EQ exists"),
        ("CompareScalar/i4", [0, 64, *[0] * 8, 5], "only EQ exists"),
        ("Compare/f4", [1, 1, 0, 256, 1, 1, 1, 8, 8, 8], "repeatTime 256"),
        ("Select/f4", [1, 65, 0, 1, 1, 1, 1, 8, 8, 8], "mask 65 is outside 1..64"),
        ("GatherMask/f4", [0, 0, 0, 1, 0, 1, 0, 0, 8, 0, 8, 2**64 - 1], "pattern 8 is outside 1..7"),
        ("Gather/f4", [0, 8, *[0] * 8, 2], "base address 2 is not a multiple of 4"),
        ("Brcb/f4", [0, 0, 0, 1, 0, 0, 0, 8], "dstBlkStride is 0"),
        ("Brcb/f4", [0, 0, 0, 256, 1, 0, 0, 8], "repeatTime 256"),
        ("Brcb/f4", [0, 0, 0, 1, 1, 0, 0, 8, 0, 0, 0, 224], "destination and source overlap"),
        ("select_scratch", [0, 188417, *[0] * 8, 1], "uses the last 8 KiB of UB as scratch"),
    ],
)
def test_limits(name: str, numbers: list[int], says: str) -> None:
    assert says in run("selection", name, numbers).fault


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("Compare/i4", [0, 64, *[0] * 8, 2]),
        ("Brcb/f4", [0, 0, 0, 1, 1, 0, 0, 8, 0, 0, 0, 256]),
        ("select_scratch", [0, 188416, *[0] * 8, 1]),
        ("select_scratch", [0, 188448, *[0] * 8, 0]),
    ],
    ids=str,
)
def test_just_within_the_limits(name: str, numbers: list[int]) -> None:
    assert run("selection", name, numbers).fault == ""


def test_offsets_are_checked() -> None:
    where = np.array([0, 8192], np.uint32)
    assert run("selection", "Gather/f4", [0, 1], None, where).fault == ""
    fault = run("selection", "Gather/f4", [0, 2], None, where).fault
    assert fault.startswith("out of bounds: ") and "offset 8192 of lane 1" in fault
    fault = run("selection", "Gatherb/u4", [0, 0, 0, 1, 1, 0, 0, 8], None, np.full(8, 16, np.uint32)).fault
    assert fault.startswith("misaligned address: ") and "offset 16 of block 0" in fault
