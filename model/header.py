"""Values from the kernel headers, read through a small compiled library, and the layout of a window."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INCLUDES = (ROOT / "op_kernel", ROOT / "twin" / "include")
BLOCK = 32
SOURCE = r"""
#include "common/core_barrier.h"
extern "C" {
uint32_t header_blocks() { return moe::kHeaderBlocks; }
uint32_t count_blocks(uint32_t experts) { return moe::CountBlocks(experts); }
uint32_t rounds() { return moe::kCoreBarrierRounds; }
uint32_t code(uint32_t which) {
    const uint32_t codes[] = {moe::kOk, moe::kConfigMismatch, moe::kInvalidExpertId, moe::kCommTimeout};
    return codes[which];
}
uint32_t severity(uint32_t code) { moe::OpStatus v; v.code = code; return moe::Severity(v); }
uint32_t part_begin(uint32_t w, uint32_t c, uint32_t cores) { return moe::PartBegin(w, c, cores); }
uint32_t is_stale(uint32_t seen, uint32_t e) { return moe::IsStale(seen, e); }
uint64_t control_offset() { return moe::kControlOffset; }
uint64_t abort_offset(uint32_t s) { return moe::AbortOffset(s); }
uint64_t status_offset(uint32_t w, uint32_t p, uint32_t s) { return moe::StatusOffset(w, p, s); }
uint64_t core_barrier_offset(uint32_t w, uint32_t round) { return moe::CoreBarrierOffset(w, round); }
uint64_t status_stride(uint32_t w) { return moe::StatusStride(w); }
uint64_t run_bytes(uint32_t l) { return moe::StatusMessageBytes(l); }
uint64_t ping_pong_offset(uint64_t d, uint32_t p) { return moe::PingPongOffset(d, p); }
uint64_t region_offset(uint64_t d, uint32_t w, uint32_t p, uint32_t s) {
    return moe::RegionOffset(d, w, p, s);
}
uint32_t regions_of(uint32_t w, uint32_t per_server) { return moe::RegionsOf(w, per_server); }
uint32_t next_epoch(uint32_t e) { return moe::NextEpoch(e); }
uint32_t parity(uint32_t e) { return moe::Parity(e); }
uint32_t header_word(uint32_t e) { return moe::HeaderWord(e); }
uint32_t control_magic() { return moe::kControlMagic; }
uint32_t abort_magic() { return moe::kAbortMagic; }
uint32_t first_fatal() { return moe::kFirstFatal; }
uint32_t header1_code_word() { return moe::kH1Code; }
}
"""


class ModelError(Exception):
    """Raised with a message for the user: a missing tool or a failure."""


def run(command: list[str], **options: object) -> str:
    """Run a command and return its standard output; raise ModelError with its output if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    except FileNotFoundError as error:
        raise ModelError(f"{command[0]} is not there: {error}") from None
    if done.returncode != 0:
        raise ModelError(f"{' '.join(command)}: exit {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    return str(done.stdout)


class Header:
    """The headers' functions, by their names above, compiled against the headers as they are now."""

    def __init__(self, build: Path, includes: tuple[Path, ...] = INCLUDES) -> None:
        build.mkdir(parents=True, exist_ok=True)
        source, library = build / "header.cpp", build / "header.so"
        source.write_text(SOURCE)
        library.unlink(missing_ok=True)
        flags = ["-std=c++17", "-O0", "-w", "-shared", "-fPIC", *(f"-I{folder}" for folder in includes)]
        run(["g++", *flags, str(source), "-o", str(library)])
        self._library = ctypes.CDLL(str(library))

    def __call__(self, name: str, *numbers: int) -> int:
        function = getattr(self._library, name)
        wide = name.endswith(("offset", "bytes", "stride"))
        function.restype = ctypes.c_uint64 if wide else ctypes.c_uint32
        first = ctypes.c_uint64 if name in ("ping_pong_offset", "region_offset") else ctypes.c_uint32
        return int(function(*(first(n) if i == 0 else ctypes.c_uint32(n) for i, n in enumerate(numbers))))


@dataclass(frozen=True)
class Place:
    """The item at an offset of the state area."""

    what: str  # "control", "abort", "status", "core barrier" (block: its round) or "other"
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
        self._core_barriers = [header("core_barrier_offset", world, round_) for round_ in range(header("rounds") + 1)]

    def place(self, offset: int) -> Place:
        """Return the place of one block of the state area."""
        if self._control <= offset < self._control + BLOCK:
            return Place("control")
        if self._abort <= offset < self._abort + self.world * BLOCK:
            return Place("abort", source=(offset - self._abort) // BLOCK)
        if self._core_barriers[0] <= offset < self._core_barriers[-1]:
            return Place("core barrier", block=sum(begin <= offset for begin in self._core_barriers) - 1)
        slot, rest = divmod(offset - self._status, self._stride)
        if 0 <= slot < 2 * self.world and rest // BLOCK < self.blocks:
            return Place("status", source=slot % self.world, parity=slot // self.world, block=rest // BLOCK)
        return Place("other")

    def region(self, parity: int, source: int) -> int:
        return self.header("region_offset", self.data_bytes, self.world, parity, source)

    def half_of(self, offset: int) -> int:
        """Return the parity of the ping-pong buffer at an offset of the data area."""
        return int(offset >= self.header("ping_pong_offset", self.data_bytes, 1))
