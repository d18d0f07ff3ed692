"""Predicted times of a launch, from the timed engine's model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .errors import ArgumentError, need
from .timeline import PREDICTED, Event, Timeline, chrome, picture

MODEL = "model, not a measurement"


@dataclass(frozen=True)
class Timing:
    """Predicted time of one launch on all ranks: a model, not a measurement.

    Attributes:
        us: microseconds from the common launch until the last rank ends.
        spent: (phase of the kernel, what the scalar unit did or waited for) -> microseconds on the critical path.
        link_use: kind of resource (memory, link, ...) -> share of its bandwidth that the busiest of this kind uses.
        link_bytes: kind of resource -> bytes through all of this kind.
        vector_us: microseconds in which the vector pipe works, of the core with most.
        events: what each pipe of each core did and when; at most ``events`` of `Kernels.launch`.
        instructions: AscendC calls of all cores.
        sync_alls: SyncAll barriers of a rank.
        dropped: number of events that were not recorded, beyond ``events`` of the launch.
    """

    us: float
    spent: dict[tuple[str, str], float]
    link_use: dict[str, float]
    link_bytes: dict[str, float]
    vector_us: float = 0.0
    events: list[Event] = field(default_factory=list, repr=False)
    instructions: int = 0
    sync_alls: int = 0
    dropped: int = 0

    @property
    def phases(self) -> dict[str, float]:
        """Microseconds on the critical path by phase of the kernel, in order; the sum is ``us``."""
        return self._sums(0)

    @property
    def pipes(self) -> dict[str, float]:
        """Microseconds on the critical path by what the scalar unit did or waited for; the sum is ``us``.

        S: scalar instructions. V, MTE2, MTE3: waits for that pipe. SyncAll: waits for the rank's other cores. status:
        waits for a flag that another core stores. launch: until the core's first instruction. post: until HCCL's AI CPU
        server has posted the items of a BatchWrite.
        """
        return self._sums(1)

    @property
    def link_us(self) -> dict[str, float]:
        """Microseconds in which the busiest resource of each kind transfers bytes."""
        return {name: share * self.us for name, share in self.link_use.items()}

    def _sums(self, part: int) -> dict[str, float]:
        sums: dict[str, float] = {}
        for key, us in self.spent.items():
            sums[key[part]] = sums.get(key[part], 0.0) + us
        return sums

    def busy(self) -> dict[str, float]:
        """Return microseconds in which each pipe works, mean over the cores, from ``events``: 0 without them."""
        spans: dict[tuple[int, int, str], list[tuple[float, float]]] = {}
        for event in self.events:
            if event.pipe != "S":
                spans.setdefault((event.rank, event.core, event.pipe), []).append((event.start_ns, event.end_ns))
        cores = len({(event.rank, event.core) for event in self.events})
        found = dict.fromkeys(("MTE2", "V", "MTE3"), 0.0)
        for (_, _, pipe), own in spans.items():
            end = 0.0
            for begin, until in sorted(own):
                found[pipe] += max(0.0, until - max(begin, end)) / 1e3 / cores
                end = max(end, until)
        return found

    def timeline(self, title: str = "") -> Timeline:
        """Return ``events`` as a timeline with this title."""
        return Timeline(PREDICTED, self.events, title, dropped=self.dropped)

    def save(self, path: str | Path, title: str = "") -> None:
        """Write the timeline: ``name.json`` for ui.perfetto.dev and chrome://tracing, or ``name.svg``, a picture.

        Raises:
            ArgumentError: another suffix, or the launch recorded no events.
        """
        write = {".json": chrome.text, ".svg": picture.svg}.get(Path(path).suffix)
        if write is None:
            raise ArgumentError(f"path is {path}; it must end with .json or .svg", argument="path")
        need(bool(self.events), "this launch recorded no events: pass events=100_000 to launch", "path")
        Path(path).write_text(write(self.timeline(title)))

    def __str__(self) -> str:
        pipes = ", ".join(f"{name} {us:.2f}" for name, us in self.pipes.items())
        return f"{self.us:.2f} us ({MODEL}); on the critical path: {pipes}"


def path_of(lines: Sequence[str]) -> dict[tuple[str, str], float]:
    """Return `Timing.spent` from the engine's lines: phase, cause, ns, separated by tabs."""
    parts = (line.split("\t") for line in lines)
    return {(phase, cause): float(ns) / 1e3 for phase, cause, ns in parts}


def links_of(lines: Sequence[str], total_ns: float) -> tuple[dict[str, float], dict[str, float]]:
    """Return `Timing.link_use` and ``link_bytes`` from the engine's lines: name, rank, bytes, GB/s, between tabs."""
    use: dict[str, float] = {}
    moved: dict[str, float] = {}
    for name, _, size, gbps in (line.split("\t") for line in lines):
        use[name] = max(use.get(name, 0.0), float(size) / float(gbps) / total_ns)
        moved[name] = moved.get(name, 0.0) + float(size)
    return use, moved
