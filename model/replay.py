#!/usr/bin/env python3
"""Replays a trace of the checked twin in the model: ACCEPTED, or the first event that is not allowed.

    python model/replay.py trace.jsonl ...

The trace is turned into protocol events (a source's rows or a status block become visible, a core passes a
SyncAll, reads rows or status words ...); spin then looks for a run of window.pml with these events in this
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
from typing import Any

from constants import STAMPS, Shape, write
from header import BLOCK, ROOT, Header, Layout, ModelError, run

HERE = Path(__file__).resolve().parent
MAX_WORLD, MAX_CORES, MAX_EPOCHS = 4, 4, 28
KINDS = (
    *("NONE", "BEGIN", "SYNC", "END", "PUBLISH"),
    *(f"{what}_{where}" for where in ("ROW", "BLOCK", "ABORT") for what in ("STORE", "LAND", "LOAD")),
    "LOAD_EPOCH",
)
UNKNOWN = 255  # an epoch that no op of the trace has
Json = dict[str, Any]


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
    """What one core of a source sends one owner in one launch."""

    pieces: list[tuple[int, int]] = field(default_factory=list)  # [begin, end) in the data area
    stored: int = 0
    landed: int = 0


def words_of(event: Json) -> list[int]:
    """The 32-bit words that a load or a landing of the state area has seen; a store has seen none."""
    if event["event"] == "store":
        return []
    return [int(word, 16) for word in re.findall(r"(?:0x)?([0-9a-fA-F]{8})", str(event.get("words", "")))]


class Translation:
    """A trace as protocol events."""

    def __init__(self, lines: list[Json], header: Header) -> None:
        first, self.lines = lines[0], lines[1:]
        self.world, self.cores = int(first["world"]), int(first["cores"])
        self.local_experts, self.before = int(first["localExperts"]), int(first["epoch0"])
        if self.world > MAX_WORLD or self.cores > MAX_CORES:
            raise ModelError(f"the model replays at most {MAX_WORLD} ranks of {MAX_CORES} cores")
        self.header = header
        self.layout = Layout(header, self.world, self.local_experts, int(first["data_bytes"]))
        self.events: list[Event] = []
        self.cells: dict[tuple[int, int, int, int], Cell] = defaultdict(
            Cell
        )  # rank, core, epoch index, owner
        self.kinds: dict[tuple[int, int], int] = {}
        self.bad: set[tuple[int, int]] = set()
        self._survey()
        self._blocks: dict[tuple[int, ...], int] = defaultdict(int)
        self._syncs: dict[tuple[int, int, int], int] = defaultdict(int)
        for number, line in enumerate(self.lines, start=2):
            self._translate(number, line)

    # ---- what has to be known before the first event

    def _survey(self) -> None:
        sent: dict[int, set[int]] = defaultdict(set)  # launches of a rank that sent a status run
        begun: dict[int, list[int]] = defaultdict(list)
        ops: dict[tuple[int, int], int] = {}
        for line in self.lines:
            rank, launch = int(line["rank"]), int(line["launch"])
            if launch not in begun[rank]:
                begun[rank].append(launch)
            if line["event"] == "begin":
                ops[rank, launch] = int(line["op"] == "combine")
            stored = line["event"] in ("store", "land") and line["area"] == "state"
            if stored and self.layout.place(int(line["offset"])).what == "status":
                sent[rank].add(launch)
        self.index: dict[tuple[int, int], int] = {}  # of the epoch of a launch; a failed entry takes none
        for rank, launches in begun.items():
            epoch = 1
            for launch in launches:
                self.index[rank, launch] = epoch
                self.kinds.setdefault((rank, epoch), ops.get((rank, launch), 0))
                epoch += launch in sent[rank]
        self.count = max(self.index.values(), default=1)
        if self.count > MAX_EPOCHS:
            raise ModelError(f"the model replays at most {MAX_EPOCHS} ops, the trace has {self.count}")
        self.epochs, epoch = [self.before], self.before
        for _ in range(self.count):
            epoch = self.header("next_epoch", epoch)
            self.epochs.append(epoch)
        self.publishes: dict[tuple[int, int], int] = {}
        event = "land" if any(self._is_control(line, "land") for line in self.lines) else "store"
        for number, line in enumerate(self.lines, start=2):
            if self._is_control(line, event):
                self.publishes[int(line["rank"]), int(line["launch"])] = number
            if line["event"] == "store" and line["area"] == "data":
                cell = self._cell(line)
                cell.pieces.append((int(line["offset"]), int(line["offset"]) + int(line["bytes"])))
                cell.stored += int(line["bytes"])
            self._note_code(line)

    def _is_control(self, line: Json, event: str) -> bool:
        return bool(
            line["event"] == event
            and line["area"] == "state"
            and int(line["target"]) == int(line["rank"])
            and self.layout.place(int(line["offset"])).what == "control"
        )

    def _note_code(self, line: Json) -> None:
        """Collective errors travel in header 1."""
        words = words_of(line)
        if line["event"] != "land" or line["area"] != "state" or len(words) != BLOCK // 4:
            return
        place = self.layout.place(int(line["offset"]))
        if place.what == "status" and place.block == 1 and words[self.header("header1_code_word")] != 0:
            self.bad.add((int(line["rank"]), self._epoch(line)))

    def _epoch(self, line: Json) -> int:
        return self.index[int(line["rank"]), int(line["launch"])]

    def _cell(self, line: Json) -> Cell:
        return self.cells[int(line["rank"]), int(line["core"]), self._epoch(line), int(line["target"])]

    # ---- events

    def _add(
        self, kind: str, number: int, line: Json, x: int = 0, y: int = 0, text: str = "", why: str = ""
    ) -> None:
        who = f"rank {line['rank']} core {line['core']} launch {line['launch']}"
        where = f"{who}: {line['event']} {text}".rstrip()
        event = Event("NONE" if why else kind, int(line["rank"]), int(line["core"]), x, y, number, where, why)
        self.events.append(event)

    def _translate(self, number: int, line: Json) -> None:
        event = line["event"]
        if event == "begin":
            self._add("BEGIN", number, line, text=str(line["op"]))
        elif event == "end":
            self._add("END", number, line)
        elif event == "sync":
            key = (int(line["rank"]), int(line["core"]), int(line["launch"]))
            self._add("SYNC", number, line, x=self._syncs[key], text=str(self._syncs[key]))
            self._syncs[key] += 1
        elif line["area"] == "data":
            self._data(number, line)
        else:
            self._state(number, line)

    def _data(self, number: int, line: Json) -> None:
        epoch, offset, target = self._epoch(line), int(line["offset"]), int(line["target"])
        parity = self.header("parity", self.epochs[epoch])
        half = self.layout.half_of(offset)
        if line["event"] == "load":
            self._load_rows(number, line, epoch, half)
            return
        cell, core = self._cell(line), int(line["core"])
        text = f"rows for rank {target}"
        why = ""
        if half != parity:
            why = f"epoch {self.epochs[epoch]:#x} has half {parity}, this is half {half}"
        elif self.kinds[int(line["rank"]), epoch] == 0 and not self._in_region(line, parity):
            why = "outside the region of the source"
        if line["event"] == "store":
            self._add("STORE_ROW", number, line, target, core, text, why)
            return
        cell.landed += int(line["bytes"])
        if cell.landed == cell.stored:  # the last of them
            self._add("LAND_ROW", number, line, target, core, text, why)
        elif why:
            self._add("NONE", number, line, text=text, why=why)

    def _in_region(self, line: Json, parity: int) -> bool:
        begin = self.layout.region(parity, int(line["rank"]))
        end = begin + self.layout.region(0, 1) - self.layout.region(0, 0)
        return begin <= int(line["offset"]) and int(line["offset"]) + int(line["bytes"]) <= end

    def _load_rows(self, number: int, line: Json, epoch: int, half: int) -> None:
        owner = int(line["rank"])
        begin, end = int(line["offset"]), int(line["offset"]) + int(line["bytes"])
        found = False
        for source in range(self.world):
            mask = [c for c in range(self.cores) if self.cells[source, c, epoch, owner].pieces]
            for place, core in enumerate(mask):
                pieces = self.cells[source, core, epoch, owner].pieces
                if any(a < end and begin < b for a, b in pieces):
                    at = ((owner * 2 + half) * self.world + source) * self.cores + place
                    value = 1 + epoch % STAMPS | core << 3
                    self._add("LOAD_ROW", number, line, at, value, f"rows of rank {source}, core {core}")
                    found = True
        if not found:
            self._add("NONE", number, line, text="rows", why="nobody has sent these bytes in this op")

    def _state(self, number: int, line: Json) -> None:
        offset, size, words = int(line["offset"]), int(line["bytes"]), words_of(line)
        for at in range(offset // BLOCK * BLOCK, offset + size, BLOCK):
            covered = min(at + BLOCK, offset + size) - max(at, offset)
            mine = words[(at - offset) // 4 :][: BLOCK // 4] if at >= offset else []
            self._block(number, line, at, covered, mine)

    def _block(self, number: int, line: Json, at: int, covered: int, words: list[int]) -> None:
        place, rank = self.layout.place(at), int(line["rank"])
        event, epoch, target = line["event"], self._epoch(line), int(line["target"])
        if place.what == "control":
            if event == "load" and len(words) > 1:
                value = self._index_of(words[1]) if words[0] == self.header("control_magic") else 0
                self._add("LOAD_EPOCH", number, line, y=value, text=f"epoch word {words[1]:#x}")
            if self.publishes.get((rank, int(line["launch"]))) == number:
                self._add("PUBLISH", number, line, text="epoch word")
        elif place.what == "abort":
            if event == "load" and words:
                here = int(words[0] == self.header("abort_magic"))
                self._add(
                    "LOAD_ABORT", number, line, place.source, here, f"abort block of rank {place.source}"
                )
            elif event != "load":
                why = "" if place.source == rank else "another rank's abort block"
                self._add(
                    f"{event.upper()}_ABORT", number, line, target, 0, f"abort block for rank {target}", why
                )
        elif place.what == "status":
            text = f"status block {place.block} of rank {place.source}, parity {place.parity}"
            if event == "load":
                if words:
                    x = (
                        (target * 2 + place.parity) * self.world + place.source
                    ) * self.layout.blocks + place.block
                    self._add("LOAD_BLOCK", number, line, x, self._seen(words, place.block), text)
                return
            why = self._wrong_block(place.parity, place.source, rank, epoch, words, place.block)
            key = (rank, int(line["core"]), epoch, target, place.block, int(event == "store"))
            before = self._blocks[key]
            self._blocks[key] += covered
            # A store is seen when its first bytes leave, a landing when its last are there.
            if why or (before == 0 if event == "store" else before + covered == BLOCK):
                text += f" for rank {target}"
                self._add(f"{event.upper()}_BLOCK", number, line, target, place.block, text, why)

    def _wrong_block(
        self, parity: int, source: int, rank: int, epoch: int, words: list[int], block: int
    ) -> str:
        if source != rank:
            return "another rank's status run"
        if parity != self.header("parity", self.epochs[epoch]):
            return f"epoch {self.epochs[epoch]:#x} has the other parity"
        if words and self._seen(words, block) != epoch:
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
        return next(
            (i for i, e in enumerate(self.epochs) if i and self.header("header_word", e) == words[0]), UNKNOWN
        )

    # ---- the driver

    def shape(self) -> Shape:
        return Shape(
            self.world, self.cores, self.local_experts, max(2, self.count), self.before, slots=self.cores
        )

    def macros(self) -> list[str]:
        """Of window.pml for this trace."""
        kinds = {event.kind for event in self.events}
        return [
            "-DREPLAY",
            *(["-DDEADLINES=2"] if kinds & {"STORE_ABORT", "LAND_ABORT"} else []),
            *(["-DPUBLISH_SEEN"] if "PUBLISH" in kinds else []),
        ]

    def driver(self) -> str:
        """trace.h."""
        size = f"[{self.world}][{max(2, self.count) + 2}]"
        masks: dict[tuple[int, int], int] = defaultdict(int)
        for (rank, core, epoch, owner), cell in self.cells.items():
            if cell.pieces:
                masks[rank, epoch] |= 1 << (owner * self.cores + core)
        rows = [
            f"{{EV_{event.kind}, {event.rank}, {event.core}, {event.x}, {event.y}}}," for event in self.events
        ]
        return "\n".join(
            [
                "/* Generated from a trace by replay.py. */",
                f"enum {{ {', '.join('EV_' + kind for kind in KINDS)} }};",
                "typedef struct { int kind, r, c, x, y; } TraceEvent;",
                f"static const TraceEvent trace[] = {{ {' '.join(rows)} {{EV_NONE}} }};",
                f"static const unsigned char trace_kind{size} = {fill(self.kinds)};",
                f"static const unsigned char trace_bad{size} = {fill(dict.fromkeys(self.bad, 1))};",
                f"static const int trace_rows{size} = {fill(masks)};",
                f"enum {{ TRACE_EVENTS = {len(self.events)} }};",
                DRIVER,
            ]
        )


DRIVER = r"""
static int furthest = -1;
static void tell(void) { printf("replay: furthest %d\n", furthest); }
static void trace_reached(int pos) {
    if (furthest < 0) atexit(tell);
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
class Verdict:
    """What became of a trace. ``refused``: the first event that the model does not allow."""

    events: int
    refused: Event | None

    def __str__(self) -> str:
        if self.refused is None:
            return f"ACCEPTED, {self.events} protocol events"
        why = self.refused.reason or "the model does not allow it here"
        return f"REJECTED at line {self.refused.line}: {self.refused.text}: {why}"


def replay(path: Path, build: Path, seconds: float = 600) -> Verdict:
    """Runs one trace through the model, in ``build``/replay.

    Raises:
        ModelError: a tool is missing, the trace has another format, or there is no answer in ``seconds``.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    if not lines or "world" not in lines[0]:
        raise ModelError(
            f"{path}: the first line must give world, cores, data_bytes, localExperts and epoch0"
        )
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
        done = subprocess.run(
            ["./pan", "-E", "-m2000000"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"{path}: no answer in {seconds:.0f} s") from None
    found = re.search(r"replay: furthest (\d+)", done.stdout)
    if found is None:
        raise ModelError(f"{path}: the verifier gave up:\n{(done.stdout + done.stderr)[-2000:]}")
    furthest = int(found.group(1))
    events = translation.events
    return Verdict(len(events), events[furthest] if furthest < len(events) else None)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "model")
    args = parser.parse_args()
    rejected = 0
    for path in args.traces:
        try:
            verdict = replay(path, args.build)
        except (ModelError, OSError) as error:
            print(f"replay: {error}", file=sys.stderr)
            return 2
        print(f"{path.name}: {verdict}")
        rejected += verdict.refused is not None
    return 1 if rejected else 0


if __name__ == "__main__":
    sys.exit(main())
