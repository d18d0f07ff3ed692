#!/usr/bin/env python3
"""Replay a trace of the checked twin in the model: ACCEPTED, or the first event that is not allowed.

    python model/replay.py trace.jsonl ...

The trace is turned into protocol events (a source's rows or a status block become visible, a core passes a
barrier, reads rows or status words ...); spin then looks for a run of window.pml with these events in this
order. A cell of the model is what one core of a source sends one owner in one op.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from constants import TAGS, Shape, write
from header import BLOCK, ROOT, Header, Layout, ModelError, Place, run

HERE = Path(__file__).resolve().parent
MAX_WORLD, MAX_CORES, MAX_EPOCHS = 4, 4, 28
KINDS = (
    *("NONE", "BEGIN", "SYNC", "END", "PUBLISH"),
    *(f"{what}_{where}" for where in ("ROW", "BLOCK", "ABORT") for what in ("STORE", "LAND", "LOAD")),
    "LOAD_EPOCH",
)
UNKNOWN = 255  # an epoch that no op of the trace has
Line = SimpleNamespace  # of a trace


@dataclass(frozen=True)
class Event:
    """One protocol event of ``line`` of the trace, from 1. ``reason``: why the model cannot have it."""

    kind: str
    rank: int
    core: int
    x: int
    y: int
    line: int
    text: str
    reason: str = ""


@dataclass
class Cell:
    """Messages from one core of a source to one owner in one launch."""

    pieces: list[tuple[int, int]] = field(default_factory=list)  # [begin, end) in the data area
    stored: int = 0
    landed: int = 0


def words_of(line: Line) -> list[int]:
    """The 32-bit words that a load or a landing of the state area has seen; a store has seen none."""
    if line.event == "store":
        return []
    return [int(word, 16) for word in re.findall(r"(?:0x)?([0-9a-fA-F]{8})", str(getattr(line, "words", "")))]


class Translation:
    """A trace as protocol events."""

    def __init__(self, lines: list[dict[str, Any]], header: Header) -> None:
        first, self.lines = Line(**lines[0]), [Line(**line) for line in lines[1:]]
        self.world, self.cores = first.world, first.cores
        self.local_experts, self.before = first.localExperts, first.epoch0
        if self.world > MAX_WORLD or self.cores > MAX_CORES:
            raise ModelError(f"the model replays at most {MAX_WORLD} ranks of {MAX_CORES} cores")
        self.header = header
        self.layout = Layout(header, self.world, self.local_experts, first.data_bytes)
        self.events: list[Event] = []
        #: by rank, core, epoch index, owner
        self.cells: dict[tuple[int, int, int, int], Cell] = defaultdict(Cell)
        self.kinds: dict[tuple[int, int], int] = {}
        self.bad: set[tuple[int, int]] = set()
        self._survey()
        self._blocks: dict[tuple[int, ...], int] = defaultdict(int)
        # By rank, launch, barrier: bytes of status blocks that are there; and the cores that have passed.
        self._posted: dict[tuple[int, int, int], int] = defaultdict(int)
        self._passed: set[tuple[int, int, int, int]] = set()
        for number, line in enumerate(self.lines, start=2):
            self._translate(number, line)

    # ---- what has to be known before the first event

    def _survey(self) -> None:
        sent: dict[int, set[int]] = defaultdict(set)  # launches of a rank that sent a status run
        started: dict[int, dict[int, int]] = defaultdict(dict)  # launches of a rank in order; 1: a combine
        for line in self.lines:
            started[line.rank].setdefault(line.launch, 0)
            if line.event == "begin":
                started[line.rank][line.launch] = int(line.op == "combine")
            elif self._is(line, "status", "store", "land"):
                sent[line.rank].add(line.launch)
        self.index: dict[tuple[int, int], int] = {}  # of the epoch of a launch; a failed entry takes none
        for rank, launches in started.items():
            epoch = 1
            for launch, kind in launches.items():
                self.index[rank, launch] = epoch
                self.kinds.setdefault((rank, epoch), kind)
                epoch += launch in sent[rank]
        self.count = max(self.index.values(), default=1)
        if self.count > MAX_EPOCHS:
            raise ModelError(f"the model replays at most {MAX_EPOCHS} ops, the trace has {self.count}")
        self.epochs = [self.before]
        for _ in range(self.count):
            self.epochs.append(self.header("next_epoch", self.epochs[-1]))
        self.publishes: dict[tuple[int, int], int] = {}
        event = "land" if any(self._is_control(line, "land") for line in self.lines) else "store"
        for number, line in enumerate(self.lines, start=2):
            if self._is_control(line, event):
                self.publishes[line.rank, line.launch] = number
            if line.event == "store" and line.area == "data":
                cell = self._cell(line)
                cell.pieces.append((line.offset, line.offset + line.bytes))
                cell.stored += line.bytes
            if self._is(line, "status", "land") and len(words := words_of(line)) == BLOCK // 4:
                # Collective errors travel in header 1.
                code = words[self.header("header1_code_word")] & 0xFF  # the algorithm above it
                if self.layout.place(line.offset).block == 1 and code:
                    self.bad.add((line.rank, self._epoch(line)))

    def _is(self, line: Line, what: str, *events: str) -> bool:
        """One of these events, at such a place of the state area."""
        return line.event in events and line.area == "state" and self.layout.place(line.offset).what == what

    def _is_control(self, line: Line, event: str) -> bool:
        return self._is(line, "control", event) and line.target == line.rank

    def _epoch(self, line: Line) -> int:
        return self.index[line.rank, line.launch]

    def _cell(self, line: Line) -> Cell:
        return self.cells[line.rank, line.core, self._epoch(line), line.target]

    # ---- events

    def _add(self, kind: str, number: int, line: Line, x: int = 0, y: int = 0, text: str = "", why: str = "") -> None:
        who = f"rank {line.rank} core {line.core} launch {line.launch}"
        where = f"{who}: {line.event} {text}".rstrip()
        self.events.append(Event("NONE" if why else kind, line.rank, line.core, x, y, number, where, why))

    def _translate(self, number: int, line: Line) -> None:
        if line.event == "begin":
            self._add("BEGIN", number, line, text=str(line.op))
        elif line.event == "end":
            self._add("END", number, line)
        elif self._is(line, "core barrier", "store", "land", "load"):
            self._barrier(number, line)
        elif line.area == "state":
            offset, words = line.offset, words_of(line)
            for at in range(offset // BLOCK * BLOCK, offset + line.bytes, BLOCK):
                covered = min(at + BLOCK, offset + line.bytes) - max(at, offset)
                mine = words[(at - offset) // 4 :][: BLOCK // 4] if at >= offset else []
                self._block(number, line, at, covered, mine)
        elif line.event == "load":
            self._load_rows(number, line)
        else:
            self._rows(number, line)

    def _barrier(self, number: int, line: Line) -> None:
        """A status block that lands, or a look at those of all cores: a core's first when all are there passes."""
        barrier = self.layout.place(line.offset).block
        launch, passed = (line.rank, line.launch, barrier), self._passed
        if line.event == "land":
            self._posted[launch] += line.bytes
        elif line.event == "load" and self._posted[launch] == self.cores * BLOCK and (*launch, line.core) not in passed:
            passed.add((*launch, line.core))
            self._add("SYNC", number, line, x=barrier, text=f"core barrier {barrier}")

    def _rows(self, number: int, line: Line) -> None:
        """A store or landing of rows."""
        epoch, half = self._epoch(line), self.layout.half_of(line.offset)
        parity = self.header("parity", self.epochs[epoch])
        cell, text, why = self._cell(line), f"rows for rank {line.target}", ""
        begin = self.layout.region(parity, line.rank)
        end = begin + self.layout.region(0, 1) - self.layout.region(0, 0)
        if half != parity:
            why = f"epoch {self.epochs[epoch]:#x} has half {parity}, this is half {half}"
        elif self.kinds[line.rank, epoch] == 0 and not begin <= line.offset <= end - line.bytes:
            why = "outside the region of the source"
        cell.landed += line.bytes if line.event == "land" else 0
        if why or line.event == "store" or cell.landed == cell.stored:  # the last landing
            self._add(f"{line.event.upper()}_ROW", number, line, line.target, line.core, text, why)

    def _load_rows(self, number: int, line: Line) -> None:
        owner, epoch, half = line.rank, self._epoch(line), self.layout.half_of(line.offset)
        found = False
        for source in range(self.world):
            sent = [self.cells[source, core, epoch, owner].pieces for core in range(self.cores)]
            mask = [core for core in range(self.cores) if sent[core]]
            for place, core in enumerate(mask):
                if any(a < line.offset + line.bytes and line.offset < b for a, b in sent[core]):
                    at = ((owner * 2 + half) * self.world + source) * self.cores + place
                    value = 1 + epoch % TAGS | core << 3
                    self._add("LOAD_ROW", number, line, at, value, f"rows of rank {source}, core {core}")
                    found = True
        if not found:
            self._add("NONE", number, line, text="rows", why="nobody has sent these bytes in this op")

    def _block(self, number: int, line: Line, at: int, covered: int, words: list[int]) -> None:
        """A part of one block of the state area."""
        place, event, target = self.layout.place(at), line.event, line.target
        if place.what == "control":
            if event == "load" and len(words) > 1:
                value = self._index_of(words[1]) if words[0] == self.header("control_magic") else 0
                self._add("LOAD_EPOCH", number, line, y=value, text=f"epoch word {words[1]:#x}")
            if self.publishes.get((line.rank, line.launch)) == number:
                self._add("PUBLISH", number, line, text="epoch word")
        elif place.what == "abort" and event != "load":
            why = "" if place.source == line.rank else "another rank's abort block"
            self._add(f"{event.upper()}_ABORT", number, line, target, 0, f"abort block for rank {target}", why)
        elif place.what == "abort" and words:
            here = int(words[0] == self.header("abort_magic"))
            self._add("LOAD_ABORT", number, line, place.source, here, f"abort block of rank {place.source}")
        elif place.what == "status":
            text = f"status block {place.block} of rank {place.source}, parity {place.parity}"
            if event == "load" and words:
                run = (target * 2 + place.parity) * self.world + place.source
                x = run * self.layout.blocks + place.block
                self._add("LOAD_BLOCK", number, line, x, self._seen(words, place.block), text)
            elif event != "load":
                why = self._wrong_block(place, line, words)
                key = (line.rank, line.core, self._epoch(line), target, place.block, int(event == "store"))
                before = self._blocks[key]
                self._blocks[key] += covered
                # A store is seen when its first bytes leave, a landing when its last are there.
                if why or (before == 0 if event == "store" else before + covered == BLOCK):
                    text += f" for rank {target}"
                    self._add(f"{event.upper()}_BLOCK", number, line, target, place.block, text, why)

    def _wrong_block(self, place: Place, line: Line, words: list[int]) -> str:
        epoch = self._epoch(line)
        if place.source != line.rank:
            return "another rank's status run"
        if place.parity != self.header("parity", self.epochs[epoch]):
            return f"epoch {self.epochs[epoch]:#x} has the other parity"
        if words and self._seen(words, place.block) != epoch:
            return f"it does not carry epoch {self.epochs[epoch]:#x}"
        return ""

    def _index_of(self, epoch: int) -> int:
        return self.epochs.index(epoch) if epoch in self.epochs else UNKNOWN

    def _seen(self, words: list[int], block: int) -> int:
        """Index of the epoch that the first word of a block carries."""
        if words[0] == 0:
            return 0
        if block > 0:
            return self._index_of(words[0])
        carried = [self.header("header_word", epoch) for epoch in self.epochs[1:]]
        return carried.index(words[0]) + 1 if words[0] in carried else UNKNOWN

    # ---- the driver

    def shape(self) -> Shape:
        epochs = max(2, self.count)
        return Shape(self.world, self.cores, self.local_experts, epochs, self.before, slots=self.cores)

    def macros(self) -> list[str]:
        """Return the macros of window.pml for this trace."""
        kinds = {event.kind for event in self.events}
        aborts, publishes = kinds & {"STORE_ABORT", "LAND_ABORT"}, "PUBLISH" in kinds
        return ["-DREPLAY", *["-DDEADLINES=2"] * bool(aborts), *["-DPUBLISH_SEEN"] * publishes]

    def driver(self) -> str:
        """trace.h."""
        size = f"[{self.world}][{max(2, self.count) + 2}]"
        masks: dict[tuple[int, int], int] = defaultdict(int)
        for (rank, core, epoch, owner), cell in self.cells.items():
            if cell.pieces:
                masks[rank, epoch] |= 1 << (owner * self.cores + core)
        rows = [f"{{EV_{event.kind}, {event.rank}, {event.core}, {event.x}, {event.y}}}," for event in self.events]
        return f"""/* Generated from a trace by replay.py. */
enum {{ {", ".join("EV_" + kind for kind in KINDS)} }};
typedef struct {{ int kind, r, c, x, y; }} TraceEvent;
static const TraceEvent trace[] = {{ {" ".join(rows)} {{EV_NONE}} }};
static const unsigned char trace_kind{size} = {fill(self.kinds)};
static const unsigned char trace_bad{size} = {fill(dict.fromkeys(self.bad, 1))};
static const int trace_rows{size} = {fill(masks)};
enum {{ TRACE_EVENTS = {len(self.events)} }};
{DRIVER}"""


DRIVER = r"""
static int furthest = -1;
static void report(void) { printf("replay: furthest %d\n", furthest); }
static void trace_reached(int pos) {
    if (furthest < 0) atexit(report);
    if (pos > furthest) furthest = pos;
    if (pos == TRACE_EVENTS) exit(0);
}
static int trace_is(int pos, int kind) {
    trace_reached(pos);
    return trace[pos].kind == kind;
}
static int trace_at(int pos, int kind, int r, int c, int x, int y) {
    const TraceEvent* e = &trace[pos];
    return trace_is(pos, kind) && e->r == r && e->c == c && e->x == x && e->y == y;
}
"""


def fill(values: dict[tuple[int, int], int]) -> str:
    """A C initialiser [rank][epoch index]."""
    return "{ " + ", ".join(f"[{r}][{e}] = {v}" for (r, e), v in sorted(values.items()) if v) + " }"


@dataclass(frozen=True)
class ReplayResult:
    """Result of a trace. ``refused``: the first event that the model does not allow."""

    events: int
    refused: Event | None

    def __str__(self) -> str:
        if self.refused is None:
            return f"ACCEPTED, {self.events} protocol events"
        why = self.refused.reason or "the model does not allow it here"
        return f"REJECTED at line {self.refused.line}: {self.refused.text}: {why}"


def replay(path: Path, build: Path, seconds: float = 600) -> ReplayResult:
    """Run one trace through the model, in ``build``/replay.

    Raises:
        ModelError: a tool is missing, the trace has another format, or there is no answer in ``seconds``.
    """
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except ValueError as error:
        raise ModelError(f"{path} is no trace: {error}") from error
    if not lines or "world" not in lines[0]:
        raise ModelError(f"{path}: the first line must give world, cores, data_bytes, localExperts and epoch0")
    header = Header(build)
    translation = Translation(lines, header)
    folder = build / "replay"
    shutil.rmtree(folder, ignore_errors=True)
    write(header, translation.shape(), folder)
    for name in ("window.pml", "memory.pml", "observe.pml"):
        shutil.copy(HERE / name, folder)
    (folder / "trace.h").write_text(translation.driver())
    run(["spin", *translation.macros(), "-a", "window.pml"], cwd=folder)
    flags = ["-DSAFETY", "-DCOLLAPSE", "-DNOFAIR", "-DVECTORSZ=4096", "-DMEMLIM=4000"]
    # An end that the model does not allow is seen by how far it got, not as an error (-E: no invalid ends).
    run(["gcc", "-O0", "-w", *flags, "pan.c", "-o", "pan"], cwd=folder)
    try:
        command = ["./pan", "-E", "-m2000000"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise ModelError(f"{path}: no answer in {seconds:.0f} s") from None
    found = re.search(r"replay: furthest (\d+)", done.stdout)
    if found is None:
        raise ModelError(f"{path}: the verifier gave up:\n{(done.stdout + done.stderr)[-2000:]}")
    furthest = int(found.group(1))
    events = translation.events
    return ReplayResult(len(events), events[furthest] if furthest < len(events) else None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "model")
    args = parser.parse_args()
    rejected = 0
    for path in args.traces:
        try:
            outcome = replay(path, args.build)
        except (ModelError, OSError) as error:
            print(f"replay: {error}", file=sys.stderr)
            return 2
        print(f"{path.name}: {outcome}")
        rejected += outcome.refused is not None
    return 1 if rejected else 0


if __name__ == "__main__":
    sys.exit(main())
