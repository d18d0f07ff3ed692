#!/usr/bin/env python3
"""Traces of a plain simulation, in the format of the checked twin: replay.py is tested with them.

python model/synthetic.py --seed 3 > trace.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from constants import BEFORE_WRAP, ROOT
from geometry import BLOCK, Header, Layout

Json = dict[str, Any]
ROW_BYTES = 64
DISPATCH, COMBINE = 0, 1


@dataclass(frozen=True)
class Plan:
    """What to simulate."""

    world: int = 2
    cores: int = 2
    local_experts: int = 2
    ops: tuple[int, ...] = (DISPATCH, COMBINE, DISPATCH)
    seed: int = 1
    epoch0: int = BEFORE_WRAP
    data_bytes: int = 1 << 20


@dataclass
class Piece:
    """A part of a store that has not landed."""

    line: Json
    words: list[int] = field(default_factory=list)


class Simulation:
    """All ranks and cores as generators, run in a random order."""

    def __init__(self, plan: Plan, header: Header) -> None:
        self.plan, self.header = plan, header
        self.layout = Layout(header, plan.world, plan.local_experts, plan.data_bytes)
        self.random = random.Random(plan.seed)
        self.lines: list[Json] = []
        cells = [(r, c) for r in range(plan.world) for c in range(plan.cores)]
        self.pending: dict[tuple[int, int], list[Piece]] = {cell: [] for cell in cells}
        self.state: list[dict[int, list[int]]] = [{} for _ in range(plan.world)]
        self.epoch = [plan.epoch0] * plan.world
        self.passed = dict.fromkeys(cells, 0)  # meetings that a core has come to
        self.issue = 0
        # Rows by (op, source, core, owner); some are zero.
        self.rows = {
            (i, r, c, q): self.random.choice((0, 1, 2))
            for i in range(len(plan.ops))
            for r, c in cells
            for q in range(plan.world)
        }

    def run(self) -> list[Json]:
        """The lines of the trace."""
        plan = self.plan
        first = {"world": plan.world, "cores": plan.cores, "data_bytes": plan.data_bytes}
        first |= {"localExperts": plan.local_experts, "epoch0": plan.epoch0}
        running = {cell: self._core(*cell) for cell in self.pending}
        while running:
            cell = self.random.choice(list(running))
            if self.pending[cell] and self.random.random() < 0.5:
                self._land(cell)
            elif next(running[cell], "ended") == "ended":
                del running[cell]
        return [first, *({"t": t, **line} for t, line in enumerate(self.lines))]

    def _land(self, cell: tuple[int, int]) -> None:
        piece = self.pending[cell].pop(self.random.randrange(len(self.pending[cell])))
        line = {**piece.line, "event": "land"}
        if piece.words:
            self.state[line["target"]][line["offset"]] = piece.words
            line["words"] = "".join(f"{word:08x}" for word in piece.words)
        self.lines.append(line)

    def _store(self, who: Json, target: int, area: str, offset: int, size: int, words: list[int]) -> None:
        rank, core = who["rank"], who["core"]
        self.issue += 1
        line = {**who, "event": "store", "target": target, "area": area, "offset": offset, "bytes": size}
        line["issue"] = self.issue
        self.lines.append(line)
        for at in range(0, size, BLOCK):
            part = words[at // 4 : at // 4 + 8]
            self.pending[rank, core].append(Piece({**line, "offset": offset + at, "bytes": BLOCK}, part))

    def _load_state(self, who: Json, offset: int) -> list[int]:
        words = self.state[who["rank"]].get(offset, [0] * 8)
        line = {
            **who,
            "event": "load",
            "target": who["rank"],
            "area": "state",
            "offset": offset,
            "bytes": BLOCK,
        }
        self.lines.append(line | {"words": "".join(f"{word:08x}" for word in words)})
        return words

    def _meet(self, who: Json) -> Iterator[None]:
        rank, core = who["rank"], who["core"]
        while self.pending[rank, core]:
            yield
        self.passed[rank, core] += 1
        while min(self.passed[rank, c] for c in range(self.plan.cores)) < self.passed[rank, core]:
            yield
        self.lines.append({**who, "event": "sync"})

    def _core(self, rank: int, core: int) -> Iterator[None]:
        for launch, op in enumerate(self.plan.ops):
            while min(self.passed[rank, c] for c in range(self.plan.cores)) < 4 * launch:
                yield  # the launch before has not ended
            who = {"rank": rank, "core": core, "launch": launch}
            self.lines.append({**who, "event": "begin", "op": ("dispatch", "combine")[op]})
            yield
            control = self.header("control_offset")
            self._load_state(who, control)
            epoch = self.header("next_epoch", self.epoch[rank])
            yield from self._meet(who)
            if core == 0:
                words = [self.header("control_magic"), epoch, *[0] * 6]
                self.epoch[rank] = epoch
                self._store(who, rank, "state", control, BLOCK, words)
            yield from self._send(who, launch, epoch)
            yield from self._meet(who)
            self._status(who, op, epoch)
            while self.pending[rank, core]:
                yield
            yield from self._wait(who, epoch)
            yield from self._meet(who)
            yield from self._read(who, launch, epoch)
            self.lines.append({**who, "event": "end"})
            self.passed[rank, core] += 1

    def _row_at(self, launch: int, source: int, core: int, owner: int, row: int, epoch: int) -> int:
        before = sum(self.rows[launch, source, c, owner] for c in range(core))
        return self.layout.region(self.header("parity", epoch), source) + (before + row) * ROW_BYTES

    def _send(self, who: Json, launch: int, epoch: int) -> Iterator[None]:
        rank, core = who["rank"], who["core"]
        for owner in range(self.plan.world):
            for row in range(self.rows[launch, rank, core, owner]):
                at = self._row_at(launch, rank, core, owner, row, epoch)
                self._store(who, owner, "data", at, ROW_BYTES, [])
                yield

    def _status(self, who: Json, op: int, epoch: int) -> None:
        plan, rank = self.plan, who["rank"]
        tail = self.header("header1_tail")
        words = [
            self.header("header_word", epoch),
            epoch,
            self.header("op_phase", op + 1, 1),
            rank,
            0,
            0,
            0,
            0,
        ]
        words += [epoch, self.header("op_phase", op + 1, tail), *[0] * 6]
        for _ in range(self.layout.blocks - 2):
            words += [epoch, 0, rank, 0, 0, 0, 0, 0]
        for i in range(who["core"], plan.world, plan.cores):
            at = self.layout.status(self.header("parity", epoch), rank, 0)
            self._store(who, (rank + 1 + i) % plan.world, "state", at, 4 * len(words), words)

    def _wait(self, who: Json, epoch: int) -> Iterator[None]:
        plan = self.plan
        first, end = (plan.world * (who["core"] + n) // plan.cores for n in (0, 1))
        while first < end:
            for source in range(first, end):
                ours = True
                for block in range(self.layout.blocks):
                    at = self.layout.status(self.header("parity", epoch), source, block)
                    want = epoch if block else self.header("header_word", epoch)
                    ours &= self._load_state(who, at)[0] == want
                if source == first and ours:
                    first += 1
            yield

    def _read(self, who: Json, launch: int, epoch: int) -> Iterator[None]:
        rank, number = who["rank"], 0
        for source in range(self.plan.world):
            for core in range(self.plan.cores):
                for row in range(self.rows[launch, source, core, rank]):
                    number += 1
                    if number % self.plan.cores != who["core"]:
                        continue
                    at = self._row_at(launch, source, core, rank, row, epoch)
                    line = {**who, "event": "load", "target": rank, "area": "data", "offset": at}
                    self.lines.append({**line, "bytes": ROW_BYTES})
                    yield


def trace(plan: Plan, header: Header) -> list[Json]:
    """A trace without a fault."""
    return Simulation(plan, header).run()


def late_rows(lines: list[Json], layout: Layout) -> list[Json]:
    """The same trace, but a status run overtakes a row, which lands after the run's last block."""
    for at, line in enumerate(lines):
        if line.get("event") != "land" or line["area"] != "data":
            continue
        same = ("rank", "launch", "target")
        flags = [
            i
            for i, other in enumerate(lines)
            if i > at and other.get("event") == "land" and other["area"] == "state"
            if all(other[key] == line[key] for key in same) and layout.place(other["offset"]).what == "status"
        ]
        return [*lines[:at], *lines[at + 1 : flags[-1] + 1], line, *lines[flags[-1] + 1 :]]
    raise ValueError("no row in the trace")


def early_read(lines: list[Json]) -> list[Json]:
    """The same trace, but a core reads a row before it has passed the meeting after the wait."""
    for at, line in enumerate(lines):
        if line.get("event") == "load" and line["area"] == "data":
            who = {key: line[key] for key in ("rank", "core", "launch")}
            meeting = max(i for i in range(at) if lines[i].items() >= {**who, "event": "sync"}.items())
            return [*lines[:meeting], line, *lines[meeting:at], *lines[at + 1 :]]
    raise ValueError("no row is read in the trace")


def write_lines(lines: list[Json], path: Path) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "model")
    args = parser.parse_args()
    for line in trace(Plan(world=args.world, cores=args.cores, seed=args.seed), Header(args.build)):
        print(json.dumps(line))


if __name__ == "__main__":
    main()
