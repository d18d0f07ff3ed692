"""Where things lie in a window, asked of protocol/window.h through a small compiled helper."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

from constants import INCLUDES, run

SOURCE = r"""
#include "protocol/window.h"
extern "C" {
uint64_t control_offset() { return moe::kControlOffset; }
uint64_t control_bytes() { return moe::kBlock; }
uint64_t abort_offset(uint32_t s) { return moe::AbortOffset(s); }
uint64_t status_offset(uint32_t w, uint32_t p, uint32_t s) { return moe::StatusOffset(w, p, s); }
uint64_t status_stride(uint32_t w) { return moe::StatusStride(w); }
uint64_t run_bytes(uint32_t l) { return moe::StatusMessageBytes(l); }
uint64_t half_offset(uint64_t d, uint32_t p) { return moe::HalfOffset(d, p); }
uint64_t region_offset(uint64_t d, uint32_t w, uint32_t p, uint32_t s) {
    return moe::RegionOffset(d, w, p, s);
}
uint32_t next_epoch(uint32_t e) { return moe::NextEpoch(e); }
uint32_t parity(uint32_t e) { return moe::Parity(e); }
uint32_t header_word(uint32_t e) { return moe::HeaderWord(e); }
uint32_t header1_tail() { return moe::kHeader1Tail; }
uint32_t op_phase(uint32_t op, uint32_t tail) { return moe::OpPhase(op, moe::kPhaseFinal, tail); }
uint32_t counts_per_block() { return moe::kCountsPerBlock; }
uint32_t control_magic() { return moe::kControlMagic; }
uint32_t abort_magic() { return moe::kAbortMagic; }
uint32_t first_fatal() { return moe::kFirstFatal; }
uint32_t header1_code_word() { return moe::kH1Code; }
}
"""

BLOCK = 32


class Header:
    """The header's functions, by their names above."""

    def __init__(self, build: Path) -> None:
        build.mkdir(parents=True, exist_ok=True)
        source, library = build / "geometry.cpp", build / "geometry.so"
        source.write_text(SOURCE)
        library.unlink(missing_ok=True)
        flags = [f"-I{INCLUDES[0]}"]
        run(["g++", "-std=c++17", "-O0", "-shared", "-fPIC", *flags, str(source), "-o", str(library)])
        self._library = ctypes.CDLL(str(library))

    def __call__(self, name: str, *numbers: int) -> int:
        function = getattr(self._library, name)
        wide = name.endswith(("offset", "bytes", "stride"))
        function.restype = ctypes.c_uint64 if wide else ctypes.c_uint32
        first = ctypes.c_uint64 if name in ("half_offset", "region_offset") else ctypes.c_uint32
        return int(function(*(first(n) if i == 0 else ctypes.c_uint32(n) for i, n in enumerate(numbers))))


@dataclass(frozen=True)
class Place:
    """What lies at an offset of the state area."""

    what: str  # "control", "abort", "status" or "other"
    source: int = 0
    parity: int = 0
    block: int = 0


class Layout:
    """Offsets of a communicator of this size, and back."""

    def __init__(self, header: Header, world: int, local_experts: int, data_bytes: int) -> None:
        self.header, self.world, self.data_bytes = header, world, data_bytes
        self.blocks = header("run_bytes", local_experts) // BLOCK
        self._stride = header("status_stride", world)
        self._status = header("status_offset", world, 0, 0)
        self._abort = header("abort_offset", 0)
        self._control = header("control_offset")

    def place(self, offset: int) -> Place:
        """Of one block of the state area."""
        if self._control <= offset < self._control + BLOCK:
            return Place("control")
        if self._abort <= offset < self._abort + self.world * BLOCK:
            return Place("abort", source=(offset - self._abort) // BLOCK)
        slot, rest = divmod(offset - self._status, self._stride)
        if 0 <= slot < 2 * self.world and rest // BLOCK < self.blocks:
            return Place("status", source=slot % self.world, parity=slot // self.world, block=rest // BLOCK)
        return Place("other")

    def status(self, parity: int, source: int, block: int) -> int:
        return self.header("status_offset", self.world, parity, source) + block * BLOCK

    def abort(self, source: int) -> int:
        return self.header("abort_offset", source)

    def region(self, parity: int, source: int) -> int:
        return self.header("region_offset", self.data_bytes, self.world, parity, source)

    def half_of(self, offset: int) -> int:
        """Parity of the half that an offset of the data area lies in."""
        return int(offset >= self.header("half_offset", self.data_bytes, 1))
