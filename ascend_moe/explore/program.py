"""A program to explore: a small collective sequence of dispatches and combines."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any

from ascend_moe.call import DEFAULTS
from ascend_moe.errors import ArgumentError
from ascend_moe.native.plans import MAX_CORES
from ascend_moe.ops.collectives import MAX_BATCH
from ascend_moe.plan import limits
from ascend_moe.reference.cases import BATCHES, DTYPES, IDS, MASKS, QUANTS, SPARSE, Case
from ascend_moe.settings import MAX_WORLD

from .faults import FAULTS, applies

_MIB = 1 << 20
# D: dispatch, C: combine of the oldest open dispatch; d, c: the same in two launches
ALGORITHMS = ("window", "direct", "mixed")  # mixed: alternating between ops
TWO_LEVELS = "hierarchy"  # between servers only
SEQUENCES = ("DC", "DCDC", "DDCC", "DCDCDC", "DDCCDC", "DDDCCC")
ROWS = ("own", "registered", "partly", "early")
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
_RARE = ("servers", "list_cores", "ub_bytes", "spare", "shared")  # written if they are not the default
_FLAGS = ("weights", "plain", "odd", "tail", "stores", "flags", "measured", "one_card")
# Words of a case other than numbers -> field and value.
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
    """Return the values of a case by field, for the fields that can be passed to its class, or to a base ``kind``."""
    return {each.name: getattr(case, each.name) for each in fields(kind or case) if each.init}


@dataclass(frozen=True)
class Program(Case):
    """A program to explore: ops that every rank calls in this order, on ``cores`` AIV cores, with a `Case`'s tensors.

    Attributes:
        sequence: D is a dispatch, C a combine of the oldest open dispatch; d and c are the same in two launches, one
            that sends and one that waits. Each dispatch has its own tensors, see `case_of`.
        servers: ranks per server; a copy agent, like RDMA, transfers rows to all other ranks. 0: one server, no agent.
        stores: ranks store directly within a server; the copy agent transfers to other servers only.
        flags: rows are sent in flagged blocks, which the agent moves in any order.
        algorithm: comm_alg of all ops, "hierarchy" between servers, or "mixed".
        rows: memory of combine's rows: "own" tensors, "registered" window tensors, or "partly", either by op and rank;
            "early" is registered memory that is overwritten one op too early, which is a bug.
        list_cores: cores of direct dispatch that make lists, while the others publish rows; 0: all do both.
        ub_bytes: UB per core; 0: as much as CANN grants.
        spare: the plans use the minimum UB and ``spare`` - 1 rows more, so that few rows or chunks are in flight;
            0: ``ub_bytes``.
        measured: the ops have a performance_info tensor, in which they add up their waits for each rank.
        one_card: all ranks of an op are one launch, each on its own group of ``cores`` cores.
        fault_kind: name of the fault, one of ``FAULTS``, that occurs where ``seed`` selects; "": none.
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
    stores: bool = False
    flags: bool = False
    measured: bool = False
    one_card: bool = False
    fault_kind: str = ""

    def case_of(self, dispatch: int) -> Case:
        """Return the case of the dispatch at index ``dispatch`` of ``sequence``; values and routing differ by index."""
        share = self.servers if self.algorithm == TWO_LEVELS else 0
        return Case(**given_fields(self, Case) | {"share": share, "seed": self.seed * 7919 + dispatch})

    def algorithm_of(self, op: int) -> str:
        """Return the algorithm of the op at index ``op`` of ``sequence``."""
        if self.algorithm != "mixed":
            return self.algorithm
        return "direct" if (self.seed >> op ^ op) & 1 else "window"

    def registered(self, op: int, rank: int) -> int:
        """Return whether the rows of combine ``op`` (index) are registered: 0 no, 1 yes, 2 overwritten too early."""
        if self.rows == "partly":
            return (self.seed >> 1) + op * 5 + rank * 3 >> 1 & 1
        return {"own": 0, "registered": 1, "early": 2}[self.rows]

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
    """Return the program of ``text``, as ``str(program)`` writes it, with defaults for missing parts; see `checked`."""
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
            text = f"explore: {word!r} is not part of a case; a case looks like {Program()}"
            raise ArgumentError(text, argument="case")
    return checked(replace(Program(), **values))  # type: ignore[arg-type]


def checked(case: Program) -> Program:
    """Return ``case``, or raise ArgumentError if a value, or a combination of values, is not supported."""

    def need(valid: bool, rule: str, *values: object) -> None:
        if not valid:
            raise ArgumentError("explore: " + rule.format(*values), argument="case")

    ranges = {"world": MAX_WORLD, "cores": 48, "local": 1024, "topk": 32, "batch": MAX_BATCH, "units": 2048}
    for name, most in ranges.items():
        value = getattr(case, name)
        need(1 <= value <= most or (name, value) == ("batch", 0), "{} is {}, it must be in 1..{}", name, value, most)
    servers, lists, most = case.servers, case.list_cores, ranges["world"]
    need(0 <= servers <= most, "servers is {}, it must be in 0..{}", servers, most)
    need(0 <= lists < case.cores, "list_cores is {}, it must be less than {} cores", lists, case.cores)
    granted = limits()["ub_bytes"]
    rule = "ub_bytes is {}, it must be in 0..{}, 0: the maximum"
    need(0 <= case.ub_bytes <= granted, rule, case.ub_bytes, granted)
    by_copies = not servers or case.algorithm in ("window", TWO_LEVELS)
    equal = 1 < servers < case.world and case.world % servers == 0
    rule = "hierarchy needs v2, weights, not plain, no smooth scales, no flags, servers of equal size; servers is {}"
    able = case.contract == 2 and case.weights and not case.plain and not case.smooth and not case.flags
    need(case.algorithm != TWO_LEVELS or (equal and able), rule, servers)
    need(by_copies, "{} reads other ranks' windows, servers must be 0", case.algorithm)
    able = case.contract == 2 and case.algorithm != TWO_LEVELS
    need(able or not case.measured, "performance_info needs v2 and another algorithm than hierarchy")
    able = case.dtype == "bf16" and not case.smooth and case.rows == "own" and not case.fault_kind
    rule = "one_card needs bf16, no smooth scales, no registered rows (rows: own) and no fault"
    need(able or not case.one_card, rule)
    launched = case.world * case.cores
    rule = "one_card has {} cores (w*c), there must be at most {}"
    need(launched <= MAX_CORES or not case.one_card, rule, launched, MAX_CORES)
    need(bool(servers) or not case.flags, "flags need several servers, servers must not be 0")
    most = limits()["moe_expert_num"]
    need(case.experts <= most, "{} experts (w*l), there must be at most {}", case.experts, most)
    ids = case.experts + case.special.total
    rule = "topk is {}, it must be at most {}, the number of experts (w*l and special ones)"
    need(case.topk <= ids, rule, case.topk, ids)
    need(case.contract in (1, 2), "contract is v{}, it must be v1 or v2", case.contract)
    shared = case.shared
    need(shared in (0, 2, 3), "shared_expert_x has {} dimensions (h), it must have 2 or 3, or be absent (0)", shared)
    need(not shared or case.contract == 2, "shared_expert_x needs contract v2")
    need(not case.special.total or case.contract == 2, "special experts need contract v2")
    case.check()
    need(not case.returns_int8 or case.dtype != "fp32", "int8 rows of combine need dtype bf16 or fp16")
    rule = "int8 rows of combine need its rows in tensors of their own: leave out {}"
    need(not case.returns_int8 or case.rows == "own", rule, case.rows)
    possible = not case.fault_kind or applies(case, case.fault_kind)
    need(possible, f"fault:{case.fault_kind} cannot occur in {case}: choose another fault or case")
    waiting = 0
    for op in case.sequence:
        waiting += 1 if op in "Dd" else -1
        need(waiting >= 0, "{} has a combine without a dispatch before it", case.sequence)
    return case


def window_mib(case: Program) -> int:
    """Return MiB, a power of two, that suffice for the window and the registered area in any routing of the program."""
    batch = max(case.batch, 1)
    row, pairs = case.units * 32, batch * case.topk
    returned = case.world * (batch * min(case.topk, case.local) * (row + 128) * 16 // 15 + 2048)
    buffer = max(returned, pairs * (row + 96))
    registered = 4 * case.world * batch * min(case.topk, case.local) * row if case.rows != "own" else 0
    return 1 << max(0, (max(2 * buffer, registered) // _MIB).bit_length())


def is_large(case: Program) -> bool:
    """Return whether a case is so large that a campaign runs it in a new `World`, and in at most 2 schedules."""
    return case.world > 8 or case.world * case.cores > 64 or window_mib(case) > 1
