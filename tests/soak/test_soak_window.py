"""Windows that hold a call to the last byte, between guard pages, and calls that need one row more."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace

import op_runs
import pytest
import soak_rows
import torch
import window_library
from soak_rows import Tally
from window_library import WindowLibrary

from ascend_moe import LocalCluster
from ascend_moe.errors import WindowTooSmall
from ascend_moe.reference.cases import DTYPES, Case

MIB = 1 << 20
PAGE = mmap.PAGESIZE
PROT_NONE, PROT_RW = 0, 3
_libc = window_library._libc
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


# ---- windows between pages that nobody may touch


class GuardedLibrary(WindowLibrary):
    """Every window lies between two pages without access; its last byte is the last one before a page."""

    def am_window_alloc(self, total: int) -> int | None:
        assert total % PAGE == 0
        base = self.inner.am_window_alloc(total + 2 * PAGE)
        assert base is not None
        for guard in (base, base + PAGE + total):
            assert _libc.mprotect(guard, PAGE, PROT_NONE) == 0
        self.mapped[base + PAGE] = total
        return int(base) + PAGE

    def am_window_unmap(self, base: int, total: int) -> None:
        assert self.mapped.pop(base) == total
        self.inner.am_window_unmap(base - PAGE, total + 2 * PAGE)


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[GuardedLibrary]:
    library = GuardedLibrary()
    monkeypatch.setattr("ascend_moe.native.library.lib", lambda: library)
    yield library
    assert not library.mapped


def test_that_the_guard_is_there(guarded: GuardedLibrary) -> None:
    """A byte outside of a window on either side ends the process, the last ones inside do not."""
    base = guarded.am_window_alloc(4 * PAGE)
    assert base is not None
    for at, fatal in ((0, False), (4 * PAGE - 1, False), (-1, True), (4 * PAGE, True)):
        child = os.fork()
        if child == 0:
            faulthandler.disable()
            ctypes.memset(base + at, 1, 1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == (-signal.SIGSEGV if fatal else 0), f"at {at}"
    guarded.am_window_unmap(base, 4 * PAGE)


# ---- calls by their need


@dataclass(frozen=True)
class Shape:
    """What the need of a window depends on. ``size``: bytes of an element of x."""

    world: int
    local: int
    topk: int
    max_bs: int
    hidden: int
    dtype: str
    quantised: bool
    contract: int

    @property
    def size(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def capacity(self) -> int:
        """Rows that a source may send to one owner."""
        return self.max_bs * min(self.topk, self.local)

    def region_bytes(self) -> dict[str, int]:
        """What one source may fill of its region, by op."""
        payload = -(-self.hidden * (1 if self.quantised else self.size) // 32) * 32
        wire = payload + 32 * self.quantised + 32 * (self.contract == 2)
        back = 0 if self.contract == 2 else self.capacity * self.hidden * self.size
        return {"dispatch": self.capacity * wire, "combine": back}

    def half_bytes(self, op: str) -> int:
        """Of one half, computed afresh from the rules."""
        if op == "combine" and self.contract == 2:
            rows = self.max_bs * self.topk * self.hidden * self.size
            return -(-rows // 512) * 512
        return self.world * (-(-self.region_bytes()[op] // 512) * 512)


def fits(shape: Shape, op: str) -> bool:
    """In 1 MiB. Regions are the half's share, rounded down to 512 bytes."""
    half = MIB // 2
    if op == "combine" and shape.contract == 2:
        return shape.half_bytes(op) <= half
    return shape.region_bytes()[op] <= half // shape.world // 512 * 512


# ---- to the last byte


def full_to_the_last_byte(seed: int) -> str:
    """Every source sends an owner all rows that its region holds; wider rows or one more are refused."""
    rng = random.Random(seed)
    shape, op = exact(rng)
    case = crammed(rng, shape)
    with LocalCluster(shape.world, window_mib=1) as cluster:
        op_runs.check(case, op_runs.run(cluster, case))
        wider = replace(shape, hidden=shape.hidden + 32)
        for more in (wider, replace(shape, max_bs=shape.max_bs + 1)):
            for error in op_runs.run(cluster, crammed(rng, more)):
                assert isinstance(error, WindowTooSmall) and error.needed_mib == 2, error
        op_runs.check(case, op_runs.run(cluster, case))
    return f"{op} full to the last byte"


def exact(rng: random.Random) -> tuple[Shape, str]:
    """A shape whose round trip needs 1 MiB exactly, and the op that does."""
    while True:
        world, local, topk = rng.choice([1, 2, 4]), rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 4])
        dtype, wire = rng.choice(list(DTYPES)), rng.choice([512, 1024, 2048, 4096])
        size, head = DTYPES[dtype].itemsize, rng.choice([0, 32])
        rows = MIB // 2 // world // wire
        shape = Shape(
            world,
            local,
            topk,
            rows // topk,
            (wire - head) // size,
            dtype,
            quantised=rng.random() < 0.5,
            contract=rng.choice([1, 2]),
        )
        if topk > local or not (fits(shape, "dispatch") and fits(shape, "combine")):
            continue
        for op in ("dispatch", "combine"):
            if shape.half_bytes(op) == MIB // 2 == world * rows * wire:
                return shape, op


def crammed(rng: random.Random, shape: Shape) -> Case:
    """All ranks send one of them as much as they may, often the last one: that is the end of its window."""
    spec = Case(
        world=shape.world,
        local=shape.local,
        topk=shape.topk,
        units=shape.hidden * shape.size // 32,
        batch=shape.max_bs,
        dtype=shape.dtype,
        quant="int8" if shape.quantised else "none",
        contract=shape.contract,
        seed=rng.randrange(2**32),
        cores=rng.choice([3, 8, 48]),
    )
    case = replace(spec)
    owner = shape.world - 1 if rng.random() < 0.5 else rng.randrange(shape.world)
    for one in case.inputs:
        expert = torch.arange(shape.max_bs)[:, None] + torch.arange(shape.topk)[None]
        one.expert_ids[:] = (owner * shape.local + expert % shape.local).int()
    return case


@pytest.mark.asan
@soak_rows.row("window size", quick=20, full=500, chunk=125)
def test_window_that_is_just_large_enough(guarded: GuardedLibrary, numbers: range, tally: Tally) -> None:
    """Nothing is touched outside of it, on either side."""
    tally.each(numbers, full_to_the_last_byte)
