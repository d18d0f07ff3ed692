"""Tuning tables: for which calls how many cores, rows, which algorithm. ``ascend-moe tune`` writes them.

A table is chosen by ASCEND_MOE_TUNING_TABLE, the same on all ranks: its hash travels in the status header of
every op, and ranks with different tables raise ``ConfigMismatch``. An entry is looked up by values that are
equal on all ranks, so that all of them pick the same. It may ask for less than the operators' own tiling,
never for more than fits; results are the same bits with any table.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import ArgumentError

VARIABLE = "ASCEND_MOE_TUNING_TABLE"
FORMAT, VERSION = "ascend_moe tuning table", 1
CPU = "cpu"  # the SoC of the twin
OPS = ("dispatch", "combine")
ALGORITHMS = ("", "window", "direct")  # "": the op's own choice
_MOST_BYTES = 16 << 20
_HASH_DIGITS = 6
_REQUIRED = ("op", "soc", "ranks", "experts", "topk", "hidden", "max_bs")
_LARGEST = {"cores": 255, "ring": 255, "rows": 2047, "list_cores": 255}
NOTHING = ("", 0, 0, 0, 0)  # what an entry asks for that asks for nothing


@dataclass(frozen=True)
class Facts:
    """What of a call an entry is looked up by: equal on all ranks of a correct call.

    Attributes:
        op: dispatch or combine; soc: of the NPU, "cpu" on the twin.
        ranks, experts, topk, hidden: W, E, K, H.
        max_bs: tokens of the rank that may have most.
        dtype: of x or expand_x: bf16, fp16 or fp32.
        quant: int8 rows; combine does not know, False.
        window_mib: HCCL_BUFFSIZE, the data's part.
    """

    op: str
    soc: str
    ranks: int
    experts: int
    topk: int
    hidden: int
    max_bs: int
    dtype: str
    quant: bool
    window_mib: int


@dataclass(frozen=True)
class Entry:
    """How calls of one shape are to run. Of several that fit, the first counts.

    Attributes:
        op, soc, ranks, experts, topk, hidden, dtype, quant: as in ``Facts``, to be equal.
        max_bs: for calls with at most this maxBS; of the entries for a shape the nearest counts.
        min_window_mib: for windows of at least this size.
        algorithm: for calls whose comm_alg is auto, or names this one; "" for any.
        cores, ring, rows: AIV cores of a launch, UB rows in flight, rows of one copy; 0: the op's own choice.
        list_cores: of direct dispatch: so many cores make the lists of rows, the others publish the rows; 0:
            every core does both.
        default_us, tuned_us: what the search predicted, 0 where nobody did.
    """

    op: str
    soc: str
    ranks: int
    experts: int
    topk: int
    hidden: int
    max_bs: int
    dtype: str = "bf16"
    quant: bool = False
    min_window_mib: int = 0
    algorithm: str = ""
    cores: int = 0
    ring: int = 0
    rows: int = 0
    list_cores: int = 0
    default_us: float = 0.0
    tuned_us: float = 0.0

    def asked(self) -> tuple[str, int, int, int, int]:
        """What it asks of the operators' tiling, in the order in which ``am_tuning_pack`` takes it."""
        return (self.algorithm, self.cores, self.ring, self.rows, self.list_cores)

    def said(self) -> dict[str, Any]:
        """What the table's hash is of: roles only where they are asked for, as in tables that know none."""
        said = {name: value for name, value in asdict(self).items() if name not in _COMMENTS}
        return said if self.list_cores else {name: v for name, v in said.items() if name != "list_cores"}

    def fits(self, facts: Facts) -> bool:
        same = all(
            getattr(self, name) == getattr(facts, name)
            for name in ("op", "soc", "ranks", "experts", "topk", "hidden", "dtype", "quant")
        )
        return same and facts.max_bs <= self.max_bs and facts.window_mib >= self.min_window_mib


@dataclass(frozen=True)
class Table:
    """A table as it was read or will be written.

    Attributes:
        entries: in order of preference.
        about: how it was made, free text by name; no part of the hash.
        path: where it was read from, "" for nowhere.
    """

    entries: tuple[Entry, ...]
    about: Mapping[str, Any] = field(default_factory=dict)
    path: str = ""

    @functools.cached_property
    def hash(self) -> str:
        """Of what the entries say, 6 hex digits, never 000000: that is "no table"."""
        text = json.dumps([one.said() for one in self.entries], sort_keys=True, separators=(",", ":"))
        digits = hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]
        return digits if int(digits, 16) else "000001"

    def lookup(self, facts: Facts, comm_alg: str) -> Entry | None:
        """The entry for a call with this comm_alg, None for none.

        "auto" takes the first of the nearest ``max_bs``; an algorithm by name ("" is window) the first that
        is for it.
        """
        wanted = None if comm_alg == "auto" else comm_alg if comm_alg == "direct" else "window"
        found = [
            one
            for one in self.entries
            if one.fits(facts) and (wanted is None or one.algorithm in ("", wanted))
        ]
        return min(found, key=lambda one: one.max_bs, default=None)

    def text(self) -> str:
        """The file's text."""
        head = {"format": FORMAT, "version": VERSION, "hash": self.hash, "about": dict(self.about)}
        lines = [json.dumps(asdict(one)) for one in self.entries]
        body = ",\n    ".join(lines)
        return json.dumps(head, indent=2)[:-2] + f',\n  "entries": [\n    {body}\n  ]\n}}\n'


_COMMENTS = ("default_us", "tuned_us")  # of an entry, no part of the hash


def load(path: str | os.PathLike[str]) -> Table:
    """Reads a table.

    Raises:
        ArgumentError: it cannot be read, is no such table, of another version, or its hash is of other
            contents; one line that says what and where.
    """
    where = os.fspath(path)
    try:
        size = Path(where).stat().st_size
        if size > _MOST_BYTES:
            raise _bad(where, f"it has {size} bytes, a table has at most {_MOST_BYTES}")
        found = json.loads(Path(where).read_text(encoding="utf-8"))
    except OSError as problem:
        raise _bad(where, problem.strerror or str(problem)) from problem
    except (ValueError, RecursionError) as problem:
        raise _bad(where, f"it is no JSON ({str(problem)[:120]})") from problem
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise _bad(where, f'it must be an object with "format": "{FORMAT}"')
    if found.get("version") != VERSION:
        raise _bad(where, f"its version is {found.get('version')!r:.20}, this package reads {VERSION}")
    rows = found.get("entries")
    if not isinstance(rows, list):
        raise _bad(where, '"entries" must be a list')
    about = found.get("about")
    table = Table(
        tuple(_entry(where, number, row) for number, row in enumerate(rows)),
        about if isinstance(about, dict) else {},
        where,
    )
    if found.get("hash") not in (None, table.hash):
        raise _bad(
            where,
            f"its hash is {found['hash']!r:.20}, but that of its entries is {table.hash}: it was changed by "
            'hand or cut off; write it again, or take "hash" out',
        )
    return table


def _bad(where: str, what: str) -> ArgumentError:
    return ArgumentError(f"{VARIABLE}: {where[:200]} is no tuning table: {what}", argument=VARIABLE)


def _entry(where: str, number: int, row: Any) -> Entry:
    def refuse(what: str) -> ArgumentError:
        return _bad(where, f"entry {number}: {what}")

    if not isinstance(row, dict):
        raise refuse("it is no object")
    kinds = {one.name: str(one.type) for one in fields(Entry)}
    unknown = sorted(str(name) for name in row.keys() - kinds.keys())
    missing = [name for name in _REQUIRED if name not in row]
    if unknown or missing:
        raise refuse(f"{unknown[0][:40]!r} is unknown" if unknown else f"{missing[0]!r} is missing")
    for name, value in row.items():
        if not _is_of(kinds[name], value):
            raise refuse(f"{name} is {value!r:.40}, it must be {_WORDS[kinds[name]]}")
    entry = Entry(**row)
    for name, known in (("op", OPS), ("algorithm", ALGORITHMS), ("dtype", ("bf16", "fp16", "fp32"))):
        if getattr(entry, name) not in known:
            raise refuse(f"{name} is {getattr(entry, name)!r:.40}, need one of {', '.join(map(repr, known))}")
    for name, most in _LARGEST.items():
        if getattr(entry, name) > most:
            raise refuse(f"{name} is {getattr(entry, name)}, it must be at most {most}")
    if entry.quant and entry.op == "combine":
        raise refuse("quant is for dispatch; combine sends rows as they are")
    return entry


_WORDS = {"str": "a string", "int": "a whole number from 0 on", "bool": "true or false", "float": "a number"}


def _is_of(kind: str, value: object) -> bool:
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
    if kind == "float":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, {"str": str, "bool": bool}[kind])


@functools.lru_cache(maxsize=8)
def _read_once(path: str) -> Table:
    return load(path)


def current() -> Table | None:
    """The table of ASCEND_MOE_TUNING_TABLE, None when it is not set. A file is read once a process.

    Raises:
        ArgumentError: see ``load``.
    """
    path = os.environ.get(VARIABLE, "").strip()
    return _read_once(path) if path else None


def facts_of(
    op: str,
    soc: str,
    ranks: int,
    window_mib: int,
    shapes: Iterable[tuple[str, Any, Sequence[int]]],
    attributes: Mapping[str, int | None],
) -> Facts:
    """Of a call that keeps the rules, as ``native.plan_for`` has it."""
    tensors = {name: (str(dtype), shape) for name, dtype, shape in shapes}
    dtype, rows = tensors["x" if op == "dispatch" else "expand_x"]
    batch, topk = tensors["expert_ids"][1]
    short = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
    global_bs = attributes.get("global_bs") or 0
    return Facts(
        op,
        soc,
        ranks,
        attributes["moe_expert_num"] or 0,
        topk,
        rows[1],
        global_bs // ranks if global_bs else batch,
        short.get(dtype, dtype),
        op == "dispatch" and bool(attributes.get("quant_mode")),
        window_mib,
    )
