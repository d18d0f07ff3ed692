"""Sorting against numpy, what kernels print and assert, scalar helpers and state between calls."""

from __future__ import annotations

import numpy as np
import pytest
from twin_calls import REAL, TYPES, Array, clean, engines, run
from twin_oracle import bits

F2, F4, I4, U4 = (TYPES[kind] for kind in ("f2", "f4", "i4", "u4"))
kinds = pytest.mark.parametrize("kind", REAL)


def scores(kind: str, count: int, seed: int) -> Array:
    """Scores with ties, zeros of both signs, infinities and NaN."""
    rng = np.random.default_rng(seed)
    few = rng.choice([0.0, -0.0, 1.0, -2.0, np.nan, np.inf, -np.inf], count)
    return np.where(rng.random(count) < 0.5, few, rng.integers(-20, 20, count) / 4).astype(kind)


def entries(values: Array, index: Array) -> Array:
    """(score, index) in 8 bytes each, as words."""
    words = np.zeros((values.size, 2), np.uint32)
    words[:, 0], words[:, 1] = bits(values), index
    return words.ravel()


def descending(values: Array) -> Array:
    """Stable order of the scores, NaN last."""
    nan = np.isnan(values)
    return np.lexsort((np.where(nan, 0, -values.astype(np.float64)), nan))


@engines
@kinds
@pytest.mark.parametrize("repeats", [1, 3, 8, 32])
def test_sorts_are_stable_and_descending(kind: str, repeats: int, engine: str) -> None:
    count = 32 * repeats
    x, index = scores(kind, count, repeats), np.random.default_rng(1).integers(0, 2**32, count, np.uint32)
    runs = np.concatenate([32 * r + descending(x[32 * r :][:32]) for r in range(repeats)])
    for name, order in (("Sort32", runs), ("Sort", runs), ("FullSort", descending(x))):
        got = clean("sorting", f"{name}/{kind}", [repeats], x, index, engine=engine).view(U4)
        assert np.array_equal(got[: 2 * count], entries(x[order], index[order])), name
        assert not got[2 * count :].any()
    got = clean("sorting", f"Extract/{kind}", [repeats], x, index, engine=engine)
    assert np.array_equal(bits(got.view(kind)[:count]), bits(x[runs]))
    assert np.array_equal(got.view(U4)[1024 : 1024 + count], index[runs])


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


@engines
@kinds
@pytest.mark.parametrize("suspend", [0, 1])
@pytest.mark.parametrize("form", [0, 1])
def test_merges_keep_order_and_count_what_they_used(kind: str, suspend: int, form: int, engine: str) -> None:
    rng = np.random.default_rng(13)
    for case in range(18):
        count = 2 + case % 3
        lists = [scores(kind, int(n), 10 * case + i) for i, n in enumerate(rng.integers(1, 70, count))]
        lists = [x[descending(x)] for x in lists]
        words = [entries(x, np.arange(x.size) + 100 * i) for i, x in enumerate(lists)]
        memory = np.zeros((4, 512), np.uint32)
        for row, one in zip(memory, words, strict=False):
            row[: one.size] = one
        lengths = [x.size for x in lists] + [0] * (4 - count)
        numbers = [{2: 3, 3: 7, 4: 15}[count], 1, suspend, form, *lengths, *range(0, 8192, 2048)]
        got = clean("sorting", f"Merge/{kind}", numbers, memory, engine=engine).view(U4)
        order, used = merged(lists, bool(suspend))
        want = [word for i, at in order for word in words[i][2 * at : 2 * at + 2].tolist()]
        assert got[: len(want)].tolist() == want and not got[len(want) : 2044].any()
        assert got[2044:].tolist() == used + [0] * (4 - count)


def test_repeats_of_a_merge_lie_one_behind_the_other() -> None:
    """Two repeats of four lists of 8 entries, one behind the other."""
    x = scores("f4", 64, 2)
    order = np.concatenate([8 * i + descending(x[8 * i :][:8]) for i in range(8)])
    numbers = [15, 2, 0, 0, 8, 8, 8, 8, 0, 64, 128, 192]
    got = clean("sorting", "Merge/f4", numbers, entries(x[order], order)).view(U4)[:128]
    want = np.concatenate([32 * r + descending(x[32 * r :][:32]) for r in range(2)])
    assert np.array_equal(got, entries(x[want], want))


@pytest.mark.parametrize(
    ("name", "numbers", "says"),
    [
        ("Merge/f4", [1, 1, 0, 0, 8, 8, 8, 8], "validBit 1 is not 3, 7 or 15"),
        ("Merge/f4", [3, 1, 0, 0, 4096, 8, 0, 0], "list 0 of 4096 entries, at most 4095"),
        ("Merge/f4", [15, 2, 0, 0, 8, 8, 8, 8, 0, 64, 128, 200], "2 repeats need four lists of one length"),
        ("Merge/f4", [15, 2, 1, 0, 8, 8, 8, 8, 0, 64, 128, 192], "2 repeats need four lists of one length"),
        ("Merge/f4", [7, 2, 0, 0, 8, 8, 8, 8, 0, 64, 128, 192], "2 repeats need four lists of one length"),
        ("Merge/f4", [3, 1, 0, 0, 8, 8, 0, 0, 4, 64, 0, 0], "4 bytes past a 8-byte boundary"),
        ("Merge/f4", [3, 1, 0, 1, 600, 600, 0, 0], "needs 9600 bytes, the UB view holds 8192"),
        ("Sort32/f4", [256], "repeatTime 256 is outside 0..255"),
        ("Sort32/f4", [-1], "repeatTime -1 is outside 0..255"),
    ],
)
def test_arguments_beyond_a_limit_are_refused(name: str, numbers: list[int], says: str) -> None:
    assert says in run("sorting", name, numbers).fault


def test_sizes_of_sorted_entries_are_the_documented_ones() -> None:
    assert run("sorting", "sort_sizes", []).view(U4)[:4].tolist() == [20, 40, 64, 128]


# ---- what kernels say ----


def test_prints_and_dumps_say_what_lies_there(capfd: pytest.CaptureFixture[str]) -> None:
    words = np.array([1.5, -2, 0.25, 1e10], np.float32)
    assert run("sorting", "say", [0], words).fault == ""
    said = capfd.readouterr().out.splitlines()
    assert said[:2] == ["printf 7 1.50 2.5 text", "PRINTF 8"]
    assert said[2] == "DumpTensor: desc=5 core=0 UB 4 x 4 bytes: 1.5 -2 0.25 1e+10"
    gm = " ".join(map(str, words.view(np.int32)[:3].tolist()))
    assert said[3] == f"DumpTensor: desc=6 core=0 GM 3 x 4 bytes: {gm}"
    assert len(said) == 4


def test_a_failed_check_logs_and_ends_the_launch(capfd: pytest.CaptureFixture[str]) -> None:
    fault = run("sorting", "say", [1], np.zeros(4, np.float32)).fault
    assert "assert((g.p[0] == 0)) failed" in fault and "api_sorting.cpp:" in fault
    assert capfd.readouterr().out.splitlines()[-1] == "logged 9"


@pytest.mark.parametrize(
    ("name", "number", "says"),
    [
        ("assert_holds", 3, ""),
        ("assert_plain", 4, ""),
        ("assert_plain", 3, "assert(g.p[0] == 4) failed,"),
        ("assert_says", 3, "failed: got 3,"),
        ("trap", 0, ""),
        ("trap", 1, "the kernel called trap"),
        ("trap", 2, "the kernel called trap"),
    ],
)
def test_a_failed_assertion_names_its_line(name: str, number: int, says: str) -> None:
    fault = run("sorting", name, [number]).fault
    assert (fault == "") == (says == "") and says in fault
    assert says == "" or "api_sorting.cpp:" in fault


# ---- scalars and state ----


@pytest.mark.parametrize("x", [0, 1, 0xFF00, 0x00FF, 2**64 - 1, 2**63, 0x0100_0000_0000_0020])
def test_scalar_bit_scans_count_right(x: int) -> None:
    text = f"{x:064b}"[::-1]  # lowest bit first
    high = text[::-1]
    lead = 64 - len(high.lstrip("0"))
    same = len(high) - len(high.lstrip(high[0])) - 1
    want = [text.find("0"), text.find("1"), text.find("1"), text.count("0"), text.count("1"), text.count("1")]
    assert run("sorting", "scalar_bits", [x]).view(I4)[:9].tolist() == [*want, lead, lead, same]


def test_the_deq_scale_multiplies() -> None:
    x = np.arange(-32, 32, dtype=np.int32)
    assert np.array_equal(run("sorting", "deq_scale", [], x).view(F2)[:64], (x / 4).astype(np.float16))


def test_control_bits_are_kept_or_refused() -> None:
    got = run("sorting", "control_bits", [0])
    assert got.fault == "" and got.view(TYPES["i8"])[:2].tolist() == [5, 3211]
    assert "SetCtrlSpr<60, 60>(1): only 0 is modelled" in run("sorting", "control_bits", [1]).fault


def test_names_of_the_compiler() -> None:
    a = np.arange(64, dtype=np.float32)
    got = run("sorting", "intrinsics", [0], a)
    assert got.fault == "" and np.array_equal(got.view(F4)[:65], [*(a + 2), 3])
    assert "still set" in run("sorting", "intrinsics", [1], a, engine="audit").fault
    assert "no event from pipe 2 to pipe 0" in run("sorting", "intrinsics", [2], a).fault
    assert "pipe_barrier of pipe 2" in run("sorting", "intrinsics", [3], a).fault
