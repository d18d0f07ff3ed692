"""Describes a program to explore: a small collective program of dispatches and combines."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any

from ascend_moe.call import DEFAULTS
from ascend_moe.errors import ArgumentError
from ascend_moe.ops.collectives import MAX_BATCH
from ascend_moe.plan import limits
from ascend_moe.reference.cases import BATCHES, DTYPES, IDS, MASKS, QUANTS, SPARSE, Case
from ascend_moe.settings import MAX_WORLD

from .faults import FAULTS, applies

_MIB = 1 << 20
# D: dispatch, C: combine of the oldest dispatch that has none yet; d, c: the same in two launches.
ALGORITHMS = ("window", "direct", "mixed")  # mixed: op by op one or the other
TWO_LEVELS = "hierarchy"  # between servers alone
SEQUENCES = ("DC", "DCDC", "DDCC", "DCDCDC", "DDCCDC", "DDDCCC")
ROWS = ("own", "lent", "partly", "early")
_KEYS = {
    "world": "w",
    "cores": "c",
    "local": "l",
    "topk": "k",
    "batch": "b",
    "units": "u",
    "contract": "v",
    "servers": "r",
    "list_cores": "m",
    "ub_bytes": "g",
    "spare": "p",
    "shared": "h",
    "seed": "s",
}
_RARE = ("servers", "list_cores", "ub_bytes", "spare", "shared")  # spelled out where they are not the default
_FLAGS = ("weights", "plain", "odd", "tail", "near", "flags", "measured")
# What a word of a case that is no number sets.
_WORDS: dict[str, tuple[str, object]] = {
    **{word: ("algorithm", word) for word in (*ALGORITHMS, TWO_LEVELS)},
    **{word: ("rows", word) for word in ROWS},
    **{word.replace(" ", "-"): ("batches", word) for word in BATCHES},
    **{f"ids:{word}": ("ids", word) for word in (*IDS, SPARSE)},
    **{f"mask:{word}": ("mask", word) for word in MASKS},
    **{word: ("dtype", word) for word in DTYPES},
    **{word: (word, True) for word in _FLAGS},
    **{f"fault:{word}": ("fault_kind", word) for word in FAULTS},
    "alphas": ("alphas", 2),
}


def given_fields(case: Case, kind: type[Case] | None = None) -> dict[str, Any]:
    """Fields of a case by name, all of its class or those of ``kind``, without those that follow from others."""
    return {each.name: getattr(case, each.name) for each in fields(kind or case) if each.init}


@dataclass(frozen=True)
class Program(Case):
    """Holds what every rank of a case does, op by op, on ``cores`` AIV cores.

    ``sequence``: D is a dispatch, C a combine of the oldest dispatch that has none yet; d and c the same in two
    launches, one that sends and one that waits. Each dispatch has tensors of its own, see ``case_of``.
    ``servers`` ranks share a server; 0: all ranks share one. A copy agent reaches all other ranks, with ``near``
    those of other servers only. With ``flags`` rows travel in flagged blocks, and the agent moves the blocks of an
    item in any order.
    ``algorithm``: comm_alg of all ops, "hierarchy" between servers, or "mixed". ``rows``: where combine's rows lie:
    "own" tensors, "lent" window tensors, or "partly", the one or the other by op and rank; "early" is lent memory that
    is written again one op too early, which is a bug. ``list_cores`` of direct dispatch make lists, the others publish
    rows; 0: all do both. ``ub_bytes`` of UB a core are granted; 0: as many as CANN grants. ``spare``: UB of the plans:
    the least that they run with, and ``spare`` - 1 rows more, so that few rows or chunks are on their way at a time;
    0: ``ub_bytes``. ``measured``: the ops are given performance_info. ``fault_kind``: one of ``FAULTS`` goes wrong,
    where and how follows from ``seed``.
    """

    cores: int = 2
    local: int = 1
    batch: int = 2
    batches: str | tuple[int, ...] = "unequal"
    sequence: str = "DCDC"
    servers: int = 0
    algorithm: str = "window"
    rows: str = "own"
    list_cores: int = 0
    ub_bytes: int = 0
    spare: int = 0
    near: bool = False
    flags: bool = False
    measured: bool = False
    fault_kind: str = ""

    def case_of(self, dispatch: int) -> Case:
        """The tensors of the ``dispatch``-th op of the sequence: other values and other routes for each."""
        share = self.servers if self.algorithm == TWO_LEVELS else 0
        return Case(**given_fields(self, Case) | {"share": share, "seed": self.seed * 7919 + dispatch})

    def algorithm_of(self, op: int) -> str:
        """Return what the ``op``-th op of the sequence runs on every rank."""
        if self.algorithm != "mixed":
            return self.algorithm
        return "direct" if (self.seed >> op ^ op) & 1 else "window"

    def lent(self, op: int, rank: int) -> int:
        """Where combine's rows lie, ``op``-th of the sequence, on a rank: 0 own, 1 lent, 2 lent too early."""
        if self.rows == "partly":
            return (self.seed >> 1) + op * 5 + rank * 3 >> 1 & 1
        return {"own": 0, "lent": 1, "early": 2}[self.rows]

    def __str__(self) -> str:
        words = [
            f"{_KEYS[f.name]}{getattr(self, f.name)}"
            for f in fields(self)
            if f.name in _KEYS and (f.name not in _RARE or getattr(self, f.name) != f.default)
        ]
        words += [self.dtype, self.quant, f"mask:{self.mask}", f"ids:{self.ids}"]
        words += [str(self.batches).replace(" ", "-"), self.sequence]
        words += [self.algorithm] if self.algorithm != "window" else []
        words += [self.rows] if self.rows != "own" else []
        words += [word for word in _FLAGS if getattr(self, word)]
        words += [
            f"{name}:{int(value)}" for name, value in self.options.items() if name not in ("quant_mode", "global_bs")
        ]
        words += ["alphas"] if self.alphas == 2 else []
        words += [f"fault:{self.fault_kind}"] if self.fault_kind else []
        return ",".join(words)


def parse(text: str) -> Program:
    """The program that ``str(program)`` describes; what is left out has its default."""
    values: dict[str, object] = {}
    numbers = {key: name for name, key in _KEYS.items()}
    for word in filter(None, text.split(",")):
        if word[0] in numbers and word[1:].isdigit():
            values[numbers[word[0]]] = int(word[1:])
        elif (known := _WORDS.get(word.replace(" ", "-"))) is not None:
            values[known[0]] = known[1]
        elif word in QUANTS:
            values |= QUANTS[word]
        elif re.fullmatch(r"\w+:\d+", word) and (name := word.partition(":")[0]) in DEFAULTS:
            values[name] = type(DEFAULTS[name])(int(word.partition(":")[2]))
        elif set(word) <= set("DCdc"):
            values["sequence"] = word
        else:
            text = f"explore: {word!r} is no part of a case: write it like {Program()}"
            raise ArgumentError(text, argument="case")
    return checked(replace(Program(), **values))  # type: ignore[arg-type]


def checked(case: Program) -> Program:
    """The program itself."""

    def need(kept: bool, rule: str, *values: object) -> None:
        if not kept:
            raise ArgumentError("explore: " + rule.format(*values), argument="case")

    ranges = {"world": MAX_WORLD, "cores": 48, "local": 1024, "topk": 32, "batch": MAX_BATCH, "units": 2048}
    for name, most in ranges.items():
        value = getattr(case, name)
        need(1 <= value <= most or (name, value) == ("batch", 0), "{} is {}, it must be in 1..{}", name, value, most)
    servers, lists, most = case.servers, case.list_cores, ranges["world"]
    need(0 <= servers <= most, "servers is {}, it must be in 0..{}", servers, most)
    need(0 <= lists < case.cores, "list_cores is {}, it must be less than {} cores", lists, case.cores)
    granted = limits()["ub_bytes"]
    need(
        0 <= case.ub_bytes <= granted,
        "ub_bytes is {}, it must be in 1..{}, or 0 for the latter",
        case.ub_bytes,
        granted,
    )
    by_copies = not servers or case.algorithm in ("window", TWO_LEVELS)
    equal = 1 < servers < case.world and case.world % servers == 0
    rule = "hierarchy needs v2, weights, no smooth scales and no flags, and servers of equal numbers of ranks, not {}"
    able = case.contract == 2 and case.weights and not case.plain and not case.smooth and not case.flags
    need(case.algorithm != TWO_LEVELS or (equal and able), rule, servers)
    need(by_copies, "{} reads other ranks' windows, servers must be 0", case.algorithm)
    able = case.contract == 2 and case.algorithm != TWO_LEVELS
    need(able or not case.measured, "performance_info needs v2, and is none of hierarchy's")
    need(bool(servers) or not case.flags, "flags are of rows between servers, servers must not be 0")
    most = limits()["moe_expert_num"]
    need(case.experts <= most, "{} experts (w*l) are too many, at most {}", case.experts, most)
    ids = case.experts + case.special.total
    need(case.topk <= ids, "topk {} is more than the {} experts (w*l, and special ones)", case.topk, ids)
    need(case.contract in (1, 2), "contract v{} does not exist, it is v1 or v2", case.contract)
    shared = case.shared
    need(shared in (0, 2, 3), "the shared expert's rows have {} dimensions, it must be 2, 3 or none (h0)", shared)
    need(not shared or case.contract == 2, "contract v1 takes no shared expert's rows, it must be v2")
    need(not case.special.total or case.contract == 2, "contract v1 has no special experts, it must be v2")
    case.check()
    need(not case.returns_int8 or case.dtype != "fp32", "rows that come back as int8 are bf16 or fp16")
    need(not case.returns_int8 or case.rows == "own", "rows that come back as int8 are own, not {}", case.rows)
    possible = not case.fault_kind or applies(case, case.fault_kind)
    need(possible, f"fault:{case.fault_kind} is none that {case} can have")
    waiting = 0
    for op in case.sequence:
        waiting += 1 if op in "Dd" else -1
        need(waiting >= 0, "{} combines before it has dispatched as often", case.sequence)
    return case


def window_mib(case: Program) -> int:
    """MiB of a window, and of a lent area, in which every routing of a program fits; a power of two."""
    batch = max(case.batch, 1)  # of a rank that has none
    row, pairs = case.units * 32, batch * case.topk
    returned = case.world * (batch * min(case.topk, case.local) * (row + 128) * 16 // 15 + 2048)
    half = max(returned, pairs * (row + 96))
    lent = 4 * case.world * batch * min(case.topk, case.local) * row if case.rows != "own" else 0
    return 1 << max(0, (max(2 * half, lent) // _MIB).bit_length())


def is_large(case: Program) -> bool:
    """Whether a world of its own is made for a case, and few schedules are run."""
    return case.world > 8 or case.world * case.cores > 64 or window_mib(case) > 1
