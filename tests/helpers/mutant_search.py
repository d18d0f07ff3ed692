"""How soon explore mode finds a mutant: the same cases, settings and seeds for every library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ascend_moe import explore

SEEDS = (11, 22_000, 33_000, 44_000, 55_000)
LIMIT = 200  # schedules, on the median over the seeds
PATIENCE = 2000  # schedules after which a seed has not found it
DTYPE = "bf16"  # of the kernels that have the mutant: two objects a mutant instead of six


@dataclass(frozen=True)
class Found:
    """The class of the first finding, None when there is none, and which schedule it was, counted from 1."""

    kind: str | None
    schedules: int
    line: str = ""


def cases(seed: int, where: str = "") -> Iterator[explore.Program]:
    """Small cases of every mode, a new one a schedule: those in which a mutant of this ``where`` shows."""
    while True:
        direct = where in ("direct", "lent", "roles", "stages")
        drawn = replace(explore.draw(seed), dtype=DTYPE, algorithm="direct" if direct else "window")
        if where == "roles":
            drawn = replace(drawn, cores=drawn.cores + 1, list_cores=1 + seed % drawn.cores)
        if where == "stages":
            drawn = replace(drawn, units=6 + seed % 11, copy_cores=1 + seed % drawn.cores)
        rows = "lent" if where == "lent" else "own"
        yield replace(drawn, servers=1 + seed % 2 if where == "servers" else 0, rows=rows)
        seed += 1


def search(library: Path, seed: int, patience: int = PATIENCE, where: str = "") -> Found:
    """Schedules from this seed on, of mixed policies, to the first finding."""
    loaded = explore.checked_library(library)
    result = explore.campaign(cases(seed, where), patience, seed, library=loaded, a_case=1)
    if result.finding is None:
        return Found(None, result.schedules)
    return Found(result.finding.kind, result.schedules, result.finding.line())
