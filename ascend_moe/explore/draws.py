"""Draws what a campaign explores: cases by chance, of kinds that reach other parts of the kernels.

A row of 32 bytes costs as much as a long one, and a schedule as much as its rows: so every kind is as small as what
it reaches lets it be, and shares of many pairs have few rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ascend_moe.plan import limits
from ascend_moe.reference import cases
from ascend_moe.reference.cases import BATCHES, IDS, MASKS, RETURNS, SPARSE

from .faults import with_fault
from .program import ALGORITHMS, ROWS, SEQUENCES, TWO_LEVELS, Program, given_fields

Choices = dict[str, Sequence[Any]]

# Values for ``draw``; small, because schedules matter more than sizes.
_SMALL: Choices = {
    "world": (2, 2, 2, 3, 3, 4),
    "cores": (2, 2, 2, 3, 4),
    "local": (1, 1, 2, 3),
    "topk": (1, 2, 2, 3),
    "batch": (1, 2, 2, 3, 4),
    "units": (1, 1, 2, 3),
    "mask": MASKS[:1] + MASKS[2:4],
    "batches": ("unequal", "unequal", "equal", "zero rank"),
    "ids": ("any", "distinct", "minus", "hot", "duplicates", "mixed", "none"),
    **dict.fromkeys(("odd", "tail"), (False,)),
    "weights": (False, True),
    "plain": (False, False, True),
    "expert_token_nums_type": (1,),
    "tp_world_size": (0,),
    "shared": (0,),
}
# Values for ``draw_large``: shares of many chunks, of one and of none, around the limits.
_LARGE: Choices = _SMALL | {
    "world": (1, 2, 2, 3, 5, 8, 16, 33, 64),
    "cores": (1, 2, 5, 8, 9, 16, 24, 48),
    "local": (1, 2, 4, 8, 17, 32),
    "topk": (1, 2, 8, 16, 32),
    "batch": (0, 1, 7, 31, 33, 65, 130, 520),
    "units": (1, 2, 5, 33, 65),
    "mask": MASKS,
    "batches": BATCHES,
    "ids": IDS,
}
# Limits over all ranks: the checked engine checks every byte, and every core of direct polls every message.
_LARGE_PAIRS, _LARGE_BYTES, _LARGE_LOOKS = 6000, 2 << 20, 100_000


def _program(case: cases.Case, **values: Any) -> Program:
    """Return the program of a case; rows returned as int8 are not registered."""
    made = Program(**given_fields(case), **values)
    return made if made.rows == "own" else replace(made, **RETURNS["none"])


def draw(seed: int) -> Program:
    """Return a small random program drawn by ``seed``: W 2..4, cores 2..4, L 1..3, K 1..3, BS 0..4, every mode."""
    rng = np.random.default_rng([seed, 2])
    case = cases.draw(seed, **_SMALL)
    return _program(
        case,
        sequence=_pick(rng, SEQUENCES[:4] if case.world > 2 else SEQUENCES),
        algorithm=_pick(rng, ALGORITHMS),
        rows=_pick(rng, ROWS[:3]),
    )


def draw_large(seed: int) -> Program:
    """Return a random program of one or two round trips drawn by ``seed``, up to W 64, cores 48, L 32, K 32, BS 520."""
    rng = np.random.default_rng([seed, 3])
    case = cases.draw(seed, **_LARGE)
    pairs = max(1, case.world * case.batch * case.topk)
    cut = max(1.0, pairs / _LARGE_PAIRS, pairs * case.units * 32 / _LARGE_BYTES)
    case = replace(
        case,
        batch=int(case.batch / cut),
        cores=max(1, min(case.cores, _LARGE_LOOKS // case.world**3)),
        local=max(1, min(case.local, limits()["moe_expert_num"] // case.world)),
    )
    several = case.world * case.cores <= 64
    return _program(
        cases.legal(case),
        sequence="DCDC" if several and rng.integers(2) else "DC",
        algorithm=_pick(rng, ALGORITHMS),
        rows=_pick(rng, ROWS[:3]),
    )


@dataclass(frozen=True)
class Kind:
    """A kind of random cases, made to reach some part of the kernels, each run in ``schedules`` schedules.

    ``choices``, ``program``: values to draw from for fields of `Case` and `Program`; "faulty" True: add a random fault.
    """

    choices: Choices
    program: dict[str, Any] = field(default_factory=dict)
    schedules: int = 2


_STREAM = 7  # of what a kind's programs choose; other numbers draw their cases (4), faults and votes

# Options that are independent of the others.
_OPTIONS: Choices = {
    "tail": (False, True),
    "expert_token_nums_type": (0, 1),
    "tp_world_size": (0, 1),
    "shared": (0, 2, 3),
}
_MEASURED = (False, False, True)
_TRIP: dict[str, Any] = {"sequence": ("DC",), "algorithm": ("window", "direct"), "measured": _MEASURED}
_WIDE: Choices = _SMALL | _OPTIONS | {"batch": (1, 2), "world": (1, 2), "ids": ("any", "distinct", "minus")}
_CHUNKS: Choices = _SMALL | _OPTIONS | {"world": (1, 1, 2), "cores": (1, 1, 2), "units": (1,)}
KINDS: dict[str, Kind] = {
    "small": Kind(_SMALL, schedules=10),
    "options": Kind(
        _SMALL | _OPTIONS,
        {"sequence": ("DC", "dcdc", "DdCc", "DCDC"), "algorithm": ALGORITHMS, "rows": ROWS[:3], "measured": _MEASURED},
        4,
    ),
    "servers": Kind(
        _SMALL | _OPTIONS | {"local": (1, 2, 3, 4, 18), "batch": (2, 3, 5), "world": (2, 3, 4, 4)},
        {
            "servers": (1, 2, 2, 3),
            "stores": (False, True),
            "sequence": ("DC", "DCDC"),
            "algorithm": ("window",),
            "flags": (False, True),
            "measured": _MEASURED,
        },
        4,
    ),
    # Rows of many blocks with flags, and more blocks of a rank than are looked at together.
    "flagged blocks": Kind(
        _SMALL
        | {"world": (2, 3), "cores": (1, 1, 2), "local": (1,), "topk": (1,), "batch": (11,), "units": (33, 400, 400)}
        | {"ids": ("popular",), "batches": ("equal",), "mask": ("none",), "contract": (1, 2, 2)},
        {
            "servers": (1,),
            "stores": (False, True),
            "sequence": ("DC",),
            "algorithm": ("window",),
            "flags": (True,),
            "measured": _MEASURED,
        },
        8,
    ),
    "two levels": Kind(
        _SMALL
        | _OPTIONS
        | {"world": (4, 4, 6, 8), "local": (1, 2, 3), "batch": (0, 1, 2, 3), "units": (1, 2, 3, 20)}
        | {"cores": (1, 2, 2, 3), "topk": (1, 2, 4, 6)}
        | {"contract": (2,), "weights": (True,), "plain": (False,), "quant": ("none", "none", "int8")},
        {
            "servers": (2, 2, 2, 3),
            "stores": (False, True),
            "sequence": ("DC", "DC", "DCDC", "DDCC", "dcDC"),
            "algorithm": (TWO_LEVELS,),
            "spare": (0, 0, 1, 2),
            "faulty": (False, False, False, True, True),
            "fault_kind": ("", "", "", "algorithm"),  # where it is not faulty
        },
        4,
    ),
    # More tokens a core than there are records, pairs or sums of in UB together; and rows in parts.
    "long levels": Kind(
        _SMALL
        | _OPTIONS
        | {"world": (4, 8), "cores": (1,), "local": (4, 8), "topk": (16, 32), "batch": (70,), "units": (1,)}
        | {"ids": (SPARSE,), "batches": ("one rank only",), "contract": (2,), "weights": (True,), "plain": (False,)}
        | {"quant": ("none", "none", "int8")},
        {
            "servers": (2,),
            "stores": (False, True),
            "sequence": ("DC",),
            "algorithm": (TWO_LEVELS,),
        },
        1,
    ),
    "roles": Kind(
        _SMALL | _OPTIONS | {"cores": (3, 4, 5), "batch": (2, 4, 9), "local": (1, 2, 3, 5)},
        {"list_cores": (1, 2), "sequence": ("DC", "DCDC"), "algorithm": ("direct", "mixed"), "rows": ROWS[:3]},
        4,
    ),
    # More rows a core than are on their way; without roles.
    "rings": Kind(
        _SMALL | _OPTIONS | {"cores": (1, 1, 2, 3), "batch": (6, 9, 13), "world": (1, 2, 2), "batches": ("equal",)},
        _TRIP,
    ),
    # The same with little UB, and rows that are long for it.
    "tight": Kind(
        _SMALL
        | _OPTIONS
        | {"cores": (1, 2, 3), "batch": (9, 13), "world": (1, 2), "batches": ("equal",)}
        | {"units": (20, 40, 66)},
        {"spare": (1, 2, 3, 5), **_TRIP},
    ),
    # The same with many cores: rows leave with their tails, and come one by one.
    "tails": Kind(
        _SMALL
        | _OPTIONS
        | {"cores": (8, 9), "batch": (16, 23), "topk": (3, 4), "local": (2, 4), "world": (1, 2)}
        | {"batches": ("equal",), "mask": ("none",), "ids": ("any", "distinct", "hot"), "units": (1,)}
        | {"weights": (False, True, True), "contract": (1, 2, 2)},
        {"spare": (0, 0, 1, 3), "sequence": ("DC",), "algorithm": ("window", "window", "direct")},
    ),
    # More than 512 pairs a core: few of them routed, or all.
    "chunks": Kind(
        _CHUNKS
        | {"world": (1, 2), "topk": (3, 5, 8, 12), "local": (2, 2, 5, 16), "batch": (130, 280), "ids": (SPARSE,)}
        | {"batches": ("equal", "unequal"), "mask": MASKS[:1] + MASKS[2:4]},
        _TRIP,
    ),
    "dense chunks": Kind(
        _CHUNKS
        | {"world": (1,), "cores": (1, 2), "local": (1, 2), "topk": (1, 2, 2), "batch": (530,), "contract": (1, 2, 2)}
        | {"batches": ("equal",), "ids": ("distinct", "any", "none"), "mask": ("none",)}
        | {"weights": (True, True, False)},
        {"spare": (0, 1, 1), **_TRIP},
        1,
    ),
    # Of which a place in expand_idx is wrong, often in a later chunk.
    "wrong chunks": Kind(
        _CHUNKS
        | {"world": (1,), "cores": (1,), "local": (1, 2), "topk": (1, 2), "batch": (530,), "contract": (1,)}
        | {"batches": ("equal",), "ids": ("distinct", "any"), "mask": ("none",)},
        {"fault_kind": ("index",), **_TRIP},
        1,
    ),
    # A source's list in several loads: of the rows one by one, and of rows that cross once for several experts.
    "lists": Kind(
        _CHUNKS
        | {"world": (2,), "cores": (1,), "local": (1,), "topk": (1,), "batch": (740,), "quant": ("none",)}
        | {"batches": ("equal",), "ids": ("hot",), "mask": ("none",)},
        {"sequence": ("D",), "algorithm": ("direct",)},
        1,
    ),
    "shared rows": Kind(
        _CHUNKS
        | {
            "world": (1, 1, 3),
            "cores": (8, 9),
            "local": (8,),
            "topk": (5, 8),
            "batch": (9, 230, 270),
            "quant": ("none", "int8"),
        }
        | {"batches": ("equal",), "ids": ("distinct", "any"), "mask": ("none", "token")},
        {"sequence": ("D",), "algorithm": ("direct",)},
        1,
    ),
    # A segment of more than 64 rows.
    "segments": Kind(
        _CHUNKS
        | {"world": (1, 2), "cores": (1, 3, 9), "local": (1, 2), "topk": (1, 2), "batch": (70, 140)}
        | {"batches": ("equal",), "ids": ("hot", "distinct"), "mask": ("none", "token"), "weights": (True,)},
        {"list_cores": (0, 1, 2), **_TRIP},
        1,
    ),
    # Histograms of the cores in batches, and many local experts.
    "histograms": Kind(
        _SMALL
        | _OPTIONS
        | {"world": (1, 1, 1, 2), "cores": (4, 5, 7), "local": (1024,), "topk": (2, 7), "batch": (2, 5, 9)}
        | {"ids": ("any", "distinct", "hot", "duplicates", "mixed")},
        {"sequence": ("DC",), "algorithm": ("window", "window", "direct")},
        1,
    ),
    # W a multiple of 8.
    "eight ranks": Kind(
        _SMALL
        | _OPTIONS
        | {"world": (8,), "cores": (2,), "local": (1, 2, 2, 2, 3, 5, 8, 27, 60), "topk": (1, 3), "batch": (1, 3)},
        _TRIP,
        1,
    ),
    # Tokens in parts.
    "parts": Kind(_WIDE | {"units": (66, 100, 130, 200), "cores": (3, 4, 6), "topk": (1, 2, 3)}, _TRIP),
    # Rows that are quantized in pieces; summed in parts, too.
    "pieces": Kind(
        _WIDE
        | {"units": (900, 1000), "dtype": ("bf16", "fp16", "fp32", "fp32"), "quant": ("int8", "smooth")}
        | {"cores": (1, 2), "topk": (1, 2), "batch": (2, 3)},
        _TRIP,
    ),
    # One of the kinds of ``FAULTY`` in which something goes wrong.
    "faults": Kind(_SMALL),
    "large": Kind(_LARGE),
    # More messages than a core has in UB together; of many experts in parts.
    "many ranks": Kind(
        _SMALL
        | _OPTIONS
        | {"world": (65, 72), "cores": (2,), "local": (1, 2, 14), "topk": (1, 2), "batch": (1,), "units": (1,)}
        | {"ids": ("distinct", "any", "minus")},
        {"sequence": ("D", "DC"), "algorithm": ("window", "window", "direct")},
        1,
    ),
}
FAULTY = ("small", "options", "servers", "roles", "small", "chunks")
LARGE_EACH = 480  # cases, of which one is large
MANY_EACH = 599  # cases, of which one has many ranks: it takes as long as hundreds of others
# The other cases by turns, a prime number of them: batches and ids go by turns, too, and every kind meets all.
CYCLE = (
    *("small", "options", "rings", "faults", "chunks", "servers", "parts", "faults", "small", "tails", "roles"),
    *("faults", "histograms", "options", "segments", "small", "faults", "servers", "tight", "eight ranks", "parts"),
    *("faults", "dense chunks", "two levels", "chunks", "lists", "faults", "pieces", "tight", "roles", "shared rows"),
    *("two levels", "small", "flagged blocks", "servers", "long levels", "wrong chunks"),
)


def draw_of(kind: str, seed: int) -> Program:
    """Return a random program of ``kind``, a key of KINDS, drawn by ``seed``."""
    if kind in ("small", "large"):
        return (draw if kind == "small" else draw_large)(seed)
    if kind == "faults":
        return with_fault(draw_of(FAULTY[seed % len(FAULTY)], seed), seed)
    rng, choices = np.random.default_rng([seed, _STREAM]), KINDS[kind].choices
    case = cases.draw(seed, **choices)
    # E at most what the ops take, and experts of which some get rows.
    case = replace(case, local=max(1, min(case.local, limits()["moe_expert_num"] // case.world)))
    values = {name: _pick(rng, values) for name, values in KINDS[kind].program.items()}
    two_levels, share = values["algorithm"] == TWO_LEVELS, values.get("servers", 0)
    if two_levels and case.world % share:
        values["servers"] = 2
    elif share >= case.world:
        values["servers"] = 1
    by_window = values["algorithm"] == "window" or two_levels
    values["list_cores"] = 0 if by_window else min(values.get("list_cores", 0), case.cores - 1)
    values["measured"] = values.get("measured", False) and case.contract == 2
    faulty = values.pop("faulty", False)
    program = _program(cases.legal(case), **values)
    return with_fault(program, seed) if faulty else program


def draw_for(place: int, seed: int = 0) -> tuple[Program, int]:
    """Return case number ``place``, from 0, of a campaign that begins at ``seed``, and its number of schedules."""
    kind = "large" if place % LARGE_EACH == LARGE_EACH - 1 else CYCLE[place % len(CYCLE)]
    kind = "many ranks" if place % MANY_EACH == MANY_EACH // 2 else kind
    return draw_of(kind, seed + place), KINDS[kind].schedules


def _pick(rng: np.random.Generator, values: Sequence[Any]) -> Any:
    return values[int(rng.integers(len(values)))]
