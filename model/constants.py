"""constants.pml: constants that the model takes from the kernel headers.

Block counts, status rounds, severities of error codes, the parts of the cores, and for every epoch of a run
its parity and which older epochs a reader takes for stale. Promela sees epochs as indices 0..N (0: a new
window) into that table.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from header import Header, ModelError

TAGS = 7  # a prime: tags of rows alias neither with a half (2) nor with a few ops
RING = 2 * TAGS  # epochs of a run without end; even, so that parities alternate
RING_BASE = 1000  # any even epoch far from the wrap
CODES = ("OK", "CONFIG", "BADIDS", "TIMEOUT")  # as the model numbers them
BEFORE_WRAP = 0xFFFFFFFC  # the first op then gets 0xFFFFFFFD


@dataclass(frozen=True)
class Shape:
    """Parameters of a run of the model. ``epochs`` 0: a ring of epochs, the run never ends."""

    world: int = 2
    cores: int = 1
    local_experts: int = 1
    epochs: int = 4
    before: int = BEFORE_WRAP
    # Broken tables, for mutants: "wrap_to_one", "stale_unknown_across_wrap".
    broken: str = ""
    per_owner: bool = False  # each (source, owner) has its own rows; else a source serves all owners alike
    slots: int = 0  # row slots of a (source, owner) pair; 0: the larger of L and the cores, at most 2
    per_server: int = 0  # ranks a server, in hierarchy.pml

    def row_slots(self) -> int:
        return self.slots or min(2, max(self.local_experts, self.cores))


@dataclass(frozen=True)
class Epoch:
    """``stale``: by index of another epoch, whether a reader that waits for this one takes it for stale."""

    epoch: int
    parity: int
    stale: list[int]


def epochs_of(header: Header, shape: Shape) -> list[Epoch]:
    """The epochs of a run from the first on."""
    ring = shape.epochs == 0
    # One more: a rank that has failed in the last op is launched once more, for the epoch after it.
    count = RING if ring else shape.epochs + 1
    epochs, epoch = [], RING_BASE if ring else shape.before
    for _ in range(count):
        epoch = header("next_epoch", epoch)
        epochs.append(epoch)
    if shape.broken:
        return corrupted(epochs, shape.broken)
    found = []
    for i, epoch in enumerate(epochs):
        # Index 0 is a new window. On a ring, index j stands for its last occurrence before this epoch.
        seen = [0, *(word - count if ring and j > i else word for j, word in enumerate(epochs))]
        stale = [header("is_stale", word, epoch) for word in seen]
        found.append(Epoch(epoch, header("parity", epoch), stale))
    return found


def corrupted(epochs: list[int], broken: str) -> list[Epoch]:
    """The mutants that live in the tables."""
    if broken == "wrap_to_one":
        at = epochs.index(0xFFFFFFFF)
        epochs[at + 1 :] = range(1, len(epochs) - at)
    elif broken != "stale_unknown_across_wrap":
        raise ModelError(f"no such table: {broken}")
    return [Epoch(epoch, epoch & 1, [int(seen in (0, epoch - 2)) for seen in [0, *epochs]]) for epoch in epochs]


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


def render(header: Header, shape: Shape) -> str:
    """The text of constants.pml."""
    head, count = header("header_blocks"), header("count_blocks", shape.local_experts)
    blocks, slots, epochs = head + count, shape.row_slots(), epochs_of(header, shape)
    n = shape.epochs or RING
    step = max(1, (shape.local_experts - 1) // max(1, slots - 1))
    experts = [min(m * step, shape.local_experts - 1) for m in range(slots)]
    codes = {name: header("code", i) for i, name in enumerate(CODES)}
    parts = [header("part_begin", shape.world, core, shape.cores) for core in range(shape.cores + 1)]
    complete = " && ".join(f"st[(at) + {head + b}] == (e)" for b in range(count))
    lines = [
        "/* Generated from the kernel headers by constants.py. */",
        f"#define W {shape.world}",
        f"#define C {shape.cores}",
        f"#define L {shape.local_experts}",
        f"#define PER_SERVER {shape.per_server}",
        f"#define REGIONS {header('regions_of', shape.world, shape.per_server)} /* of a half */",
        f"#define R {slots} /* row slots of a (source, owner) pair; local experts {experts} */",
        f"#define B {blocks} /* blocks of a status run */",
        f"#define ROUNDS {header('rounds')}",
        f"#define N {n} /* epochs: {[hex(entry.epoch) for entry in epochs]} */",
        f"#define RING {int(shape.epochs == 0)}",
        f"#define TAG(i) (1 + (i) % {TAGS})",
        f"#define NEXT(i) {f'((i) == {n} -> 1 : (i) + 1)' if shape.epochs == 0 else '((i) + 1)'}",
        f"#define PARITY(i) (({bits([0] + [entry.parity for entry in epochs])} >> (i)) & 1)",
        f"#define STALE_ROW(i) {nested('i', [0, *(bits(entry.stale) for entry in epochs)])}",
        "#define STALE(seen, i) ((STALE_ROW(i) >> (seen)) & 1)",
        f"#define COUNTS_COMPLETE(at, e) ({complete})",
        f"#define PART(c) {nested('c', parts)}",
        f"#define CORE_ROWS(c) {nested('c', [core_rows(shape, c) for c in range(shape.cores)])}",
        "#define ROWS_OF_ALL " + str((1 << (slots * shape.world)) - 1),
        "#define CHOOSE_MASK(to) if " + " ".join(f":: to = {mask}" for mask in masks(shape)) + " fi",
        # Status codes of two bits; the real numbers are in the comment.
        f"/* codes {codes}, fatal from {header('first_fatal')} */",
        *(f"#define {name} {number}" for number, name in enumerate(CODES)),
        f"#define SEVERITY(code) {nested('code', [header('severity', code) for code in codes.values()])}",
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


def write(header: Header, shape: Shape, folder: Path) -> None:
    """constants.pml of this shape in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "constants.pml").write_text(render(header, shape))
