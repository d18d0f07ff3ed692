"""Timestamps of phases that the cores of an op record in their window (``settings.TIMESTAMPS``)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..settings import MAX_CORES
from . import library
from .plans import OP_COMBINE, OP_DISPATCH

OPS = {"dispatch": OP_DISPATCH, "combine": OP_COMBINE}
LAUNCH, END = "launch", "end"


@dataclass(frozen=True)
class Timestamp:
    """The start of a phase on an AIV core, in cycles since the first core of its rank began the launch."""

    core: int
    phase: str
    cycles: int


def words_of_core() -> int:
    """Return the number of 32-bit words for timestamps in the window, per core and op."""
    return int(library.lib().am_timestamp_words())


def of_communicator(handle: int, op: str, native: Any = None) -> list[Timestamp]:
    """Return the timestamps of the last ``op`` of a native communicator; ``native``: its library if not `lib`."""
    words = (ctypes.c_uint32 * (MAX_CORES * words_of_core()))()
    (native or library.lib()).am_comm_timestamps(handle, OPS[op], words)
    return of_words([*words])


def of_words(words: Sequence[int]) -> list[Timestamp]:
    """Return the timestamps in ``words``, those of all cores in core order; empty if none were recorded."""
    given = (ctypes.c_uint32 * (MAX_CORES * words_of_core()))(*words)
    lines = [line.split("\t") for line in library.text_of(library.lib().am_timestamps_text, given).splitlines()]
    return [Timestamp(int(core), phase, int(cycles)) for core, phase, cycles in lines]


def spent(timestamps: Sequence[Timestamp]) -> list[dict[str, int]]:
    """Return for each core a dictionary of the cycles spent in each phase; `LAUNCH` is the time before the first."""
    cores: list[dict[str, int]] = []
    for first, then in pairwise([*timestamps, Timestamp(-1, END, 0)]):
        if first.phase == LAUNCH:
            cores.append({})
        if first.phase != END and first.core == then.core:
            cores[-1][first.phase] = cores[-1].get(first.phase, 0) + then.cycles - first.cycles
    return cores
