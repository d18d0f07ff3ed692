#!/usr/bin/env python3
"""Loops of op_kernel/ that reach a second and third iteration, and rings of tensors that wrap.

    python tools/loop_coverage.py --build BUILD                  builds the engines with a counter in each loop
    python tools/loop_coverage.py --campaign N BUILD             counts the cases of N schedules of `ascend-moe explore`
    python tools/loop_coverage.py --run NAME BUILD COMMAND...    runs a command on these engines
    python tools/loop_coverage.py BUILD                          prints the tables; 1: a cell is empty

The counters are in a copy of the sources. A turn counts for any dtype, core and rank; a ring wraps in a loop when a
tensor of a queue is taken again within it. Left out are loops whose turns are known at compile time, and the probe.
The second table says which engines have run each mode; of "layer-ops" those of runs whose NAME begins so.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("CMakeLists.txt", "cmake", "op_kernel", "op_host", "csrc", "twin", "vnpu", "tools")
FLAGS = "-O1 -w"  # for the compile's speed
PARTS_OFF = ("TIMED", "VNPU", "TORCH", "NPU")
VARIABLE = "ASCEND_MOE_LOOPS"  # the file of counts
ENGINES = ("fast", "checked")
ENTERED, SECOND, THIRD, RING, WRAP = range(5)
CELLS = 8  # bytes of a loop's counts, of which some are used
#: What a launch is asked about its `info` and `op`.
MODES = {
    "special experts": "info.ids > info.experts",
    "comm_quant_mode 2": "op == moe::kOpCombine && info.quantMode != 0",
    "performance_info": "info.measures != 0",
    "hierarchy": "info.algorithm == moe::kAlgorithmHierarchy",
    "flags": "info.rdmaFlags != 0",
    "registered rows": "info.registeredGeneration != 0",
    "begin and finish": "info.part != moe::kPartWhole",
    "many ranks": "info.world > moe::kWholeWorld",
    "layer-ops": "false",  # all of a run of this name
}
_MESSAGES = "i < info_->world && prepared_ < MessagesInUb(*info_)"
#: Cells that nothing can fill, by the loop's file and text, and why.
NEVER: dict[tuple[str, str], tuple[tuple[int, ...], str]] = {
    (f"op_kernel/common/{file}", f"for (uint32_t {head})"): ((THIRD,), why)
    for file, head, why in (
        ("exchange.h", f"i = FirstPeer(); {_MESSAGES}; i += Senders()", "two messages are in UB at most"),
        ("segments.h", "first = 0; first < count; first += kMostRepeats", "384 ranks are two times 255 at most"),
        ("send.h", "at = 0; at < count; at += kMostItems", "an item for each rank of other servers: as above"),
        # Messages of more than 255 blocks come one by one.
        ("status.h", "message = 0; message < count_; message += OfACall()", "two ranks with 1,024 experts at most"),
    )
}

HEADER = """#pragma once
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>
#include "twin/engine/core.h"
namespace loops {{
inline uint8_t* Open() {{
    const char* name = getenv("{variable}");
    const int file = name != nullptr ? open(name, O_RDWR) : -1;
    const int shared = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    void* at = mmap(nullptr, {bytes}, PROT_READ | PROT_WRITE, shared, file, 0);
    if (file >= 0) close(file);
    return static_cast<uint8_t*>(at);
}}
inline uint8_t* Cells() {{
    static uint8_t* const cells = Open();
    return cells;
}}
class Turns {{
public:
    explicit Turns(int loop, uint32_t turns = 0)
        : cells_(Cells() + loop * {cells}), turns_(turns), core_(twin::current_core()), taken_(core_.loops_taken),
          again_(core_.loops_again) {{
        cells_[{entered}] |= turns;
    }}
    ~Turns() {{
        if (core_.loops_taken != taken_) cells_[{ring}] = 1;
        if (core_.loops_again != again_) cells_[{wrap}] = 1;
    }}
    bool Once() {{ return !std::exchange(done_, true); }}
    bool Turn() {{
        if (++turns_ <= 3) cells_[turns_ - 1] = 1;
        return true;
    }}

private:
    uint8_t* cells_;
    uint32_t turns_;
    twin::Core& core_;
    uint32_t taken_, again_;
    bool done_ = false;
}};
template <typename Info>
void Modes(const Info& info, uint32_t op) {{
    uint8_t* const modes = Cells() + {bytes} - {modes};
#ifdef TWIN_CHECKED
    constexpr int kEngine = 1;
#else
    constexpr int kEngine = 0;
#endif
    modes[kEngine] = 1;
{asked}
}}
}}  // namespace loops
"""
_AGAIN = "core.loops_again += chosen.npu_holds;"  # used before
#: What the copy has beside the loops' counters: by file a line, and lines that follow it or, "<", go before it.
EDITS = (
    ("twin/include/twin/engine/core.h", "struct Core {", ">", "uint32_t loops_taken = 0, loops_again = 0;"),
    ("twin/include/twin/api/pipe.h", "chosen.npu_allocated = true;", "<", _AGAIN),
    ("twin/include/twin/api/pipe.h", "buffer.allocated = true;", ">", "++core.loops_taken;"),
    ("op_kernel/common/base.h", '#include "../protocol/window.h"', ">", '#include "loops.h"'),
    ("op_kernel/common/exchange.h", "stamps_.Init(info);", ">", "loops::Modes(info, op);"),
)  # fmt: skip
_QUIET = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^[ \t]*#(?:\\\n|[^\n])*', re.S | re.M)
_CONSTANT = re.compile(r"\s*(?:[\d\s<>=+*/()-]|\bk[A-Z]\w*)*")


@dataclass(frozen=True)
class Loop:
    """A loop of a file: line, the text of its head, and whether its turns are counted in the table."""

    file: str
    line: int
    text: str
    counts: bool


def _end(text: str, at: int, pair: str) -> int:
    """Return the position of the bracket that closes the one at ``at``."""
    depth = 0
    for end in range(at, len(text)):
        depth += (text[end] == pair[0]) - (text[end] == pair[1])
        if depth == 0:
            return end
    raise ValueError(f"{text[at : at + 60]!r} is not closed")


def _fixed(condition: str, begin: str) -> bool:
    """Whether the turns are known at compile time: the condition compares the loop's variable with constants."""
    names = {*re.findall(r"(\w+)\s*=", begin)}
    words = {word for word in re.findall(r"[A-Za-z_]\w*", condition) if word not in names}
    values = re.findall(r"=\s*([^,;]+)", begin)
    return bool(condition.strip()) and all(_CONSTANT.fullmatch(word) for word in (*words, *values))


def instrumented(file: str, text: str, first: int) -> tuple[str, list[Loop]]:
    """Return the file with a counter in each loop, of number ``first`` and up, and the loops."""
    bare = _QUIET.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    inserts, loops, tails = list[tuple[int, str]](), list[Loop](), set[int]()
    for match in re.finditer(r"\b(?:for|while|do)\b(?= ?[({])", bare):
        at = match.start()
        if at in tails:
            continue
        number, turns, begin = first + len(loops), 0, ""
        head = end = match.end() + (bare[match.end()] == " ")
        if match[0] == "do":
            turns, tail = 1, _end(bare, head, "{}") + 2
            tails.add(tail)
            head = bare.index("(", tail)
        end = _end(bare, head, "()")
        left, right = head + 1, end
        if match[0] == "for":
            left = bare.index(";", head) + 1
            right = bare.index(";", left)
            begin = bare[head + 1 : left - 1]
        condition, name = bare[left:right], f"loop{number}_"
        inserts.append((at, f"for (loops::Turns {name}({number}{', 1' * bool(turns)}); {name}.Once();) "))
        if condition.strip():
            inserts += [(left, "("), (right, f") && {name}.Turn()")]
        else:
            inserts.append((right, f"{name}.Turn()"))
        shown = " ".join(text[at : end + 1].split()) if match[0] != "do" else f"do .. while {text[head : end + 1]}"
        loops.append(Loop(file, bare.count("\n", 0, at) + 1, shown, not _fixed(condition, begin)))
    for at, more in sorted(inserts, reverse=True):
        text = text[:at] + more + text[at:]
    return text, loops


def built_loops(folder: Path) -> list[Loop]:
    """The loops of the copy that is built."""
    return [Loop(*values) for values in json.loads((folder / "loops.json").read_text())]


def all_loops() -> tuple[dict[str, str], list[Loop]]:
    """The texts of op_kernel/ with counters, by path, and their loops."""
    texts, loops = dict[str, str](), list[Loop]()
    for path in sorted((ROOT / "op_kernel").rglob("*.h")):
        file = path.relative_to(ROOT).as_posix()
        if "/probe/" in file:
            continue
        texts[file], found = instrumented(file, path.read_text(), len(loops))
        loops += found
    return texts, loops


def build(folder: Path) -> None:
    """Build both engines out of a copy of the sources that counts."""
    source = folder / "source"
    shutil.rmtree(folder, ignore_errors=True)
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, source / name)
    texts, loops = all_loops()
    for file, old, side, more in EDITS:
        text = texts.get(file) or (source / file).read_text()
        assert text.count(old) == 1, f"{old!r} is in {file} {text.count(old)} times, not once"
        texts[file] = text.replace(old, f"{old}\n{more}\n" if side == ">" else f"{more}\n{old}")
    asked = (
        f"    if ({question}) modes[{(1 + number) * len(ENGINES)} + kEngine] = 1;"
        for number, question in enumerate(MODES.values())
    )
    names = {"entered": ENTERED, "ring": RING, "wrap": WRAP, "cells": CELLS, "variable": VARIABLE}
    sizes = {"bytes": size(len(loops)), "modes": (len(MODES) + 1) * len(ENGINES)}
    texts["op_kernel/common/loops.h"] = HEADER.format(**names, **sizes, asked="\n".join(asked))
    for file, text in texts.items():
        (source / file).write_text(text)
    (folder / "loops.json").write_text(json.dumps([astuple(loop) for loop in loops]))
    off = [f"-DASCEND_MOE_{part}=OFF" for part in PARTS_OFF]
    configure = ["cmake", "-S", str(source), "-B", str(folder), "-DCMAKE_BUILD_TYPE=None", f"-DCMAKE_CXX_FLAGS={FLAGS}"]
    subprocess.run([*configure, f"-DPython3_EXECUTABLE={sys.executable}", *off], check=True)
    jobs = ["--parallel", str(os.cpu_count() or 1)]
    targets = ["--target", "ascend_moe", "ascend_moe_checked"]
    subprocess.run(["cmake", "--build", str(folder), *targets, *jobs], check=True)


def size(loops: int) -> int:
    """Bytes of the counts: of all loops, and of the modes."""
    return loops * CELLS + (len(MODES) + 1) * len(ENGINES)


class Counts:
    """The counts of a run: a file that all its processes share."""

    def __init__(self, folder: Path, name: str, loops: int) -> None:
        self.path = folder / "counts" / name
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(bytes(size(loops)))
        with self.path.open("r+b") as file:
            self.shared = mmap.mmap(file.fileno(), 0)

    def environment(self, folder: Path) -> dict[str, str]:
        """Of a process that counts here."""
        libraries = {"ASCEND_MOE_LIBRARY": "libascend_moe.so", "ASCEND_MOE_CHECKED_LIBRARY": "libascend_moe_checked.so"}
        return {VARIABLE: str(self.path)} | {name: str(folder / file) for name, file in libraries.items()}


def campaign(folder: Path, schedules: int) -> int:
    """Count by case: how many cases fill each cell, and the first of them."""
    loops = built_loops(folder)
    counts = Counts(folder, "campaign", len(loops))
    os.environ.update(counts.environment(folder))
    from ascend_moe import explore

    before, cases, firsts = bytes(size(len(loops))), Counter[int](), dict[int, str]()
    chosen = (explore.draws.draw_for(place)[0] for place in range(schedules))

    def count(result: explore.Result) -> None:
        nonlocal before
        case, filled = next(chosen), bytes(counts.shared)
        for cell in (at for at, byte in enumerate(filled) if byte):
            cases[cell] += 1
            firsts.setdefault(cell, str(case))
        counts.shared[:] = bytes(len(filled))
        before = bytes(old | new for old, new in zip(before, filled, strict=True))

    result = explore.campaign(schedules=schedules, progress=count)
    counts.shared[:] = before
    lines = (f"{cell} {number} {firsts[cell]}" for cell, number in sorted(cases.items()))
    (folder / "counts" / "campaign.cases").write_text("\n".join(lines) + "\n")
    print(result.finding.line() if result.finding else f"{result.schedules} schedules of {result.cases} cases")
    return int(result.finding is not None)


def run(folder: Path, name: str, command: list[str]) -> int:
    """Run a command that counts; its exit code."""
    counts = Counts(folder, name, len(built_loops(folder)))
    return subprocess.run(command, env=os.environ | counts.environment(folder)).returncode


def table(folder: Path) -> Iterator[str]:
    """Rows of both tables; a line with "empty" names a cell that is."""
    loops = built_loops(folder)
    runs = {path.name: path.read_bytes() for path in sorted((folder / "counts").iterdir()) if not path.suffix}
    cases = dict[int, tuple[int, str]]()
    for line in (folder / "counts" / "campaign.cases").read_text().splitlines():
        cell, number, text = line.split(" ", 2)
        cases[int(cell)] = int(number), text
    others = {name: filled for name, filled in runs.items() if name != "campaign"}

    def shown(number: int, cell: int, never: tuple[int, ...]) -> str:
        at = number * CELLS + cell
        if at in cases:
            return str(cases[at][0])
        by = [name for name, filled in others.items() if filled[at]]
        if by or cell in never:
            return by[0] if by else "never"
        return "-" if cell == WRAP and not any(filled[at - WRAP + RING] for filled in runs.values()) else "empty"

    yield (
        f"{'op_kernel/':92}" + "".join(f"{name:>10}" for name in ("second", "third", "wrap")) + "  first of third, wrap"
    )
    for place, loop in enumerate(loops):
        if not loop.counts:
            continue
        never = NEVER.get((loop.file, loop.text), ((), ""))[0]
        cells = [shown(place, cell, never) for cell in (SECOND, THIRD, WRAP)]
        name = f"{loop.file.removeprefix('op_kernel/')}:{loop.line} {loop.text}"
        first = [cases[place * CELLS + cell][1] for cell in (WRAP, THIRD) if place * CELLS + cell in cases]
        yield f"{name[:91]:92}" + "".join(f"{cell:>10}" for cell in cells) + f"  {first[0] if first else ''}"
    yield f"\n{'mode':92}" + "".join(f"{engine:>10}" for engine in ENGINES)
    for place, mode in enumerate(MODES, 1):
        own = [filled for name, filled in runs.items() if name.startswith(mode)]
        at = size(len(loops)) - (len(MODES) + 1) * len(ENGINES) + (0 if own else place * len(ENGINES))
        ran = [any(filled[at + engine] for filled in own or runs.values()) for engine in range(len(ENGINES))]
        yield f"{mode:92}" + "".join(f"{'runs' if cell else 'empty':>10}" for cell in ran)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Which loops of op_kernel/ come to a second and third turn.")
    parser.add_argument("folder", type=Path, help="of the build and the counts")
    parser.add_argument("--build", action="store_true", help="build the engines with counters")
    parser.add_argument("--campaign", type=int, metavar="N", help="schedules of `ascend-moe explore`")
    parser.add_argument("--run", metavar="NAME", help="run a command, and keep its counts by this name")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.build:
        build(folder)
        return 0
    if options.campaign:
        return campaign(folder, options.campaign)
    if options.run:
        return run(folder, options.run, options.command)
    rows = [*table(folder)]
    print(*rows, sep="\n")
    return int(any(" empty" in row for row in rows))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    sys.exit(main())
