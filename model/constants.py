#!/usr/bin/env python3
"""constants.pml: what the model takes from the kernel headers, never typed by hand.

A small C++ program is compiled against protocol/window.h and common/verdict.h of op_kernel and prints block
counts, verdict rounds, error codes with their severities, the parts of the cores, and for every epoch of a
run its successor, its parity and which older epochs a reader takes for stale. Promela sees epochs as indices
0..N (0: a fresh window) into that table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
INCLUDES = (ROOT / "op_kernel", ROOT / "twin" / "include")
STAMPS = 7  # a prime: stamps of rows alias neither with a half (2) nor with a few ops
RING = 2 * STAMPS  # epochs of a run without end; even, so that parities alternate
RING_BASE = 1000  # any even epoch far from the wrap
CODES = ("OK", "CONFIG", "BADIDS", "TIMEOUT")  # as the model numbers them
BEFORE_WRAP = 0xFFFFFFFC  # the first op then gets 0xFFFFFFFD

PROBE = r"""
#include <cstdio>
#include <cstdlib>
#include "common/verdict.h"
using namespace moe;
static unsigned Sev(unsigned code) { Verdict v; v.code = code; return Severity(v); }
int main(int, char** argv) {
    const unsigned world = atoi(argv[1]), cores = atoi(argv[2]), experts = atoi(argv[3]);
    const unsigned before = strtoul(argv[4], nullptr, 0), count = atoi(argv[5]), ring = atoi(argv[6]);
    printf("{\"header_blocks\":%u,\"count_blocks\":%u,\"per_block\":%u,\"rounds\":%u,\"max_world\":%u",
           kHeaderBlocks, CountBlocks(experts), kCountsPerBlock, kVerdictRounds, kMaxWorld);
    printf(",\"codes\":{\"TIMEOUT\":%u,\"CONFIG\":%u,\"BADIDS\":%u,\"OK\":%u}", kCommTimeout, kConfigMismatch,
           kInvalidExpertId, kOk);
    printf(",\"severity\":{\"TIMEOUT\":%u,\"CONFIG\":%u,\"BADIDS\":%u,\"OK\":%u}", Sev(kCommTimeout),
           Sev(kConfigMismatch), Sev(kInvalidExpertId), Sev(kOk));
    printf(",\"first_fatal\":%u,\"parts\":[", kFirstFatal);
    for (unsigned c = 0; c <= cores; ++c) printf("%s%u", c ? "," : "", PartBegin(world, c, cores));
    printf("],\"epochs\":[");
    unsigned epoch = before;
    for (unsigned i = 0; i < count; ++i) {
        epoch = NextEpoch(epoch);
        printf("%s{\"epoch\":%u,\"parity\":%u,\"stale\":[", i ? "," : "", epoch, Parity(epoch));
        unsigned other = before;
        for (unsigned j = 0; j <= count; ++j) {
            // On a ring, index j stands for its last occurrence before this epoch.
            const unsigned seen = j == 0 ? 0 : ring && j > i + 1 ? other - count : other;
            printf("%s%u", j ? "," : "", IsStale(seen, epoch) ? 1 : 0);
            other = NextEpoch(other);
        }
        printf("]}");
    }
    printf("]}\n");
}
"""


Facts = dict[str, Any]


class ModelError(Exception):
    """What is missing or went wrong, for the user."""


@dataclass(frozen=True)
class Shape:
    """What a run of the model is about. ``epochs`` 0: a ring of epochs, the run never ends."""

    world: int = 2
    cores: int = 1
    local_experts: int = 1
    epochs: int = 4
    before: int = BEFORE_WRAP
    # Broken tables, for mutants: "wrap_to_one", "stale_unknown_across_wrap".
    broken: str = ""
    per_owner: bool = False  # each (source, owner) has its own rows; else a source serves all owners alike
    slots: int = 0  # row slots of a (source, owner) pair; 0: the larger of L and the cores, at most 2

    def row_slots(self) -> int:
        return self.slots or min(2, max(self.local_experts, self.cores))


def run(command: list[str], **options: object) -> str:
    """Its standard output; ModelError with what it said when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    except FileNotFoundError as error:
        raise ModelError(f"{command[0]} is not there: {error}") from None
    if done.returncode != 0:
        raise ModelError(
            f"{' '.join(command)}: exit {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}"
        )
    return str(done.stdout)


def compile_probe(build: Path, includes: tuple[Path, ...] = INCLUDES) -> Path:
    """The probe, compiled against the headers as they are now."""
    build.mkdir(parents=True, exist_ok=True)
    source, program = build / "probe.cpp", build / "probe"
    source.write_text(PROBE)
    flags = [f"-I{folder}" for folder in includes]
    run(["g++", "-std=c++17", "-O0", "-w", *flags, str(source), "-o", str(program)])
    return program


def probe(program: Path, shape: Shape) -> Facts:
    """What the headers say for this shape."""
    ring = shape.epochs == 0
    before = RING_BASE if ring else shape.before
    # One more: a rank that has failed in the last op is launched once more, for the epoch after it.
    count = RING if ring else shape.epochs + 1
    numbers = (shape.world, shape.cores, shape.local_experts, before, count, int(ring))
    facts: Facts = json.loads(run([str(program), *map(str, numbers)]))
    return spoil(facts, shape)


def spoil(facts: Facts, shape: Shape) -> Facts:
    """The mutants that live in the tables."""
    if not shape.broken:
        return facts
    epochs = [entry["epoch"] for entry in facts["epochs"]]
    if shape.broken == "wrap_to_one":
        at = epochs.index(0xFFFFFFFF)
        epochs[at + 1 :] = range(1, len(epochs) - at)
    elif shape.broken != "stale_unknown_across_wrap":
        raise ModelError(f"no such table: {shape.broken}")
    for entry, epoch in zip(facts["epochs"], epochs, strict=True):
        entry["epoch"], entry["parity"] = epoch, epoch & 1
        entry["stale"] = [int(seen in (0, epoch - 2)) for seen in [0, *epochs]]
    return facts


def bits(values: list[int]) -> int:
    return sum(value << i for i, value in enumerate(values))


def masks(shape: Shape) -> list[int]:
    """Rows that a rank may send in an op: nothing, all, or only the last slot (so that rows are packed)."""
    slots = shape.row_slots()
    one = [0, (1 << slots) - 1, *([1 << (slots - 1)] if slots > 1 else [])]
    if not shape.per_owner:
        return [sum(mask << (q * slots) for q in range(shape.world)) for mask in one]
    many = [0]
    for q in range(shape.world):
        many = [old | mask << (q * slots) for old in many for mask in one]
    return many


def table(name: str, rows: list[int]) -> str:
    """A macro name(i) for i = 1.. of constants, as nested choices."""
    text = "0"
    for i in reversed(range(len(rows))):
        text = f"((i) == {i + 1} -> {rows[i]} : {text})"
    return f"#define {name}(i) {text}"


def landings(shape: Shape, blocks: int) -> list[str]:
    """One option of the memory for every store that can be on its way from a core."""
    slots, lines = shape.row_slots(), []
    for q in range(shape.world):
        for m in range(slots):
            first = q * slots
            earlier = bits([0] * first + [1] * m)
            order = " + ".join([f"((MASK_OF(rE[I]) >> {first + j}) & 1)" for j in range(m)]) or "0"
            lines.append(f"LAND_ROW({q}, {m}, {1 << (first + m)}, {earlier}, ({order}))")
        rows = bits([0] * (q * slots) + [1] * slots)
        for b in range(blocks):
            first = q * blocks
            earlier = bits([0] * first + [1] * b)
            lines.append(f"LAND_BLOCK({q}, {b}, {1 << (first + b)}, {earlier}, {rows})")
        lines.append(f"LAND_RUN({q}, {bits([0] * (q * blocks) + [1] * blocks)}, {rows})")
        run_bits = bits([0] * (q * blocks) + [1] * blocks)
        lines.append(f"LAND_ABORT({q}, {1 << q}, {rows}, {run_bits})")
    return lines


def render(facts: Facts, shape: Shape) -> str:
    """The text of constants.pml."""
    count = facts["count_blocks"]
    blocks = facts["header_blocks"] + count
    slots = shape.row_slots()
    epochs = facts["epochs"]
    n = shape.epochs or RING
    step = max(1, (shape.local_experts - 1) // max(1, slots - 1))
    experts = [min(m * step, shape.local_experts - 1) for m in range(slots)]
    severity, parts = facts["severity"], facts["parts"]
    complete = " && ".join(f"st[(at) + {facts['header_blocks'] + b}] == (e)" for b in range(count))
    lines = [
        "/* Generated from the kernel headers by constants.py. */",
        f"#define W {shape.world}",
        f"#define C {shape.cores}",
        f"#define L {shape.local_experts}",
        f"#define R {slots} /* row slots of a (source, owner) pair; local experts {experts} */",
        f"#define B {blocks} /* blocks of a status run */",
        f"#define ROUNDS {facts['rounds']}",
        f"#define N {n} /* epochs: {[hex(entry['epoch']) for entry in epochs]} */",
        f"#define RING {int(shape.epochs == 0)}",
        f"#define STAMP(i) (1 + (i) % {STAMPS})",
        f"#define NEXT(i) {f'((i) == {n} -> 1 : (i) + 1)' if shape.epochs == 0 else '((i) + 1)'}",
        f"#define PARITY(i) (({bits([0] + [entry['parity'] for entry in epochs])} >> (i)) & 1)",
        table("STALE_ROW", [bits(entry["stale"]) for entry in epochs]),
        "#define STALE(seen, i) ((STALE_ROW(i) >> (seen)) & 1)",
        f"#define COUNTS_COMPLETE(at, e) ({complete})",
        f"#define PART(c) {nested('c', parts)}",
        f"#define CORE_ROWS(c) {nested('c', [core_rows(shape, c) for c in range(shape.cores)])}",
        "#define ROWS_OF_ALL " + str((1 << (slots * shape.world)) - 1),
        "#define CHOOSE_MASK(to) if " + " ".join(f":: to = {mask}" for mask in masks(shape)) + " fi",
        # Verdict codes of two bits; the real numbers are in the comment.
        f"/* codes {facts['codes']}, fatal from {facts['first_fatal']} */",
        *(f"#define {name} {number}" for number, name in enumerate(CODES)),
        f"#define SEVERITY(code) {nested('code', [severity[name] for name in CODES])}",
        "#define LANDINGS \\",
        " \\\n".join(f"    {line}" for line in landings(shape, blocks)),
        "",
    ]
    return "\n".join(lines)


def core_rows(shape: Shape, core: int) -> int:
    """Bits of the row slots that this core writes: slot m belongs to core m mod cores."""
    slots = shape.row_slots()
    one = bits([int(m % shape.cores == core) for m in range(slots)])
    return sum(one << (q * slots) for q in range(shape.world))


def nested(variable: str, values: list[int]) -> str:
    text = str(values[-1])
    for i in reversed(range(len(values) - 1)):
        text = f"(({variable}) == {i} -> {values[i]} : {text})"
    return text


def write(shape: Shape, program: Path, folder: Path) -> Path:
    """constants.pml of this shape in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "constants.pml"
    path.write_text(render(probe(program, shape), shape))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "model")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--local-experts", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=4, help="0: a ring")
    args = parser.parse_args()
    shape = Shape(args.world, args.cores, args.local_experts, args.epochs)
    print(write(shape, compile_probe(args.build), args.build).read_text(), end="")


if __name__ == "__main__":
    main()
