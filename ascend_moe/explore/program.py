"""What is explored: a small collective program of dispatches and combines, drawn or spelled out."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace

import torch

from ascend_moe.errors import ArgumentError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
QUANTS = ("none", "int8", "smooth")
MASKS = ("none", "token", "pair")
IDS = ("any", "distinct", "minus", "hot", "zero")
# D: dispatch, C: combine of the oldest dispatch that has none yet.
ALGORITHMS = ("window", "direct", "mixed")  # mixed: op by op one or the other
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
    "copy_cores": "n",
    "seed": "s",
}


@dataclass(frozen=True)
class Case:
    """A program for W = world ranks of ``cores`` AIV cores each, with L = local experts a rank.

    BS is at most ``batch`` (every rank and every dispatch draws its own; ``equal`` batches when not ragged),
    K = topk, a row has ``units`` times 32 bytes. ``sequence`` is what every rank does: D dispatch, C combine.
    ``servers`` ranks share a server, the others are reached by a copy agent; 0: all ranks share one.
    ``algorithm``: comm_alg of all ops, or "mixed". ``rows``: where combine's rows lie: "own" tensors, "lent"
    window tensors, or "partly", the one or the other by op and rank; "early" is lent memory that is written
    again one op too early, which is a bug. ``list_cores`` of direct dispatch make lists, the others publish
    rows; 0: all do both. ``copy_cores`` of direct combine copy rows in stages; 0: all copy whole rows.
    """

    world: int = 2
    cores: int = 2
    local: int = 1
    topk: int = 2
    batch: int = 2
    units: int = 2
    dtype: str = "bf16"
    quant: str = "none"
    contract: int = 1
    mask: str = "none"
    ids: str = "any"
    ragged: bool = True
    sequence: str = "DCDC"
    seed: int = 0
    servers: int = 0
    algorithm: str = "window"
    rows: str = "own"
    list_cores: int = 0
    copy_cores: int = 0

    def algorithm_of(self, op: int) -> str:
        """What the ``op``-th op of the sequence runs on every rank."""
        if self.algorithm != "mixed":
            return self.algorithm
        return "direct" if (self.seed >> op ^ op) & 1 else "window"

    def lent(self, op: int, rank: int) -> int:
        """Where combine's rows lie, ``op``-th of the sequence, on a rank: 0 own, 1 lent, 2 lent too early."""
        if self.rows == "partly":
            return (self.seed >> 1) + op * 5 + rank * 3 >> 1 & 1
        return {"own": 0, "lent": 1, "early": 2}[self.rows]

    @property
    def experts(self) -> int:
        return self.world * self.local

    @property
    def hidden(self) -> int:
        return self.units * 32 // DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        words = [
            f"{_KEYS[f.name]}{getattr(self, f.name)}"
            for f in fields(self)
            if f.name in _KEYS
            and (f.name not in ("servers", "list_cores", "copy_cores") or getattr(self, f.name))
        ]
        words += [self.dtype, self.quant, f"mask:{self.mask}", f"ids:{self.ids}"]
        words += ["ragged" if self.ragged else "equal", self.sequence]
        words += [self.algorithm] if self.algorithm != "window" else []
        words += [self.rows] if self.rows != "own" else []
        return ",".join(words)


def parse(text: str) -> Case:
    """The case that ``str(case)`` describes; what is left out has its default.

    Raises:
        ArgumentError: a word of it is none of a case's.
    """
    values: dict[str, object] = {}
    for word in filter(None, text.split(",")):
        name = next((name for name, key in _KEYS.items() if word[0] == key and word[1:].isdigit()), None)
        if name is not None:
            values[name] = int(word[1:])
        elif word in DTYPES:
            values["dtype"] = word
        elif word in QUANTS:
            values["quant"] = word
        elif word.startswith("mask:") and word[5:] in MASKS:
            values["mask"] = word[5:]
        elif word.startswith("ids:") and word[4:] in IDS:
            values["ids"] = word[4:]
        elif word in ("ragged", "equal"):
            values["ragged"] = word == "ragged"
        elif word in ROWS:
            values["rows"] = word
        elif word in ALGORITHMS:
            values["algorithm"] = word
        elif set(word) <= {"D", "C"}:
            values["sequence"] = word
        else:
            raise ArgumentError(
                f"explore: {word!r} is no part of a case: write it like {Case()}", argument="case"
            )
    return checked(replace(Case(), **values))  # type: ignore[arg-type]


def checked(case: Case) -> Case:
    """The case itself.

    Raises:
        ArgumentError: the ops would refuse it, or its sequence combines what was not dispatched.
    """
    limits = {"world": 8, "cores": 16, "local": 8, "topk": 16, "batch": 64, "units": 64}
    for name, most in limits.items():
        if not 1 <= getattr(case, name) <= most and not (name == "batch" and case.batch == 0):
            raise ArgumentError(
                f"explore: {name} is {getattr(case, name)}, it must be in 1..{most}", argument="case"
            )
    if not 0 <= case.servers <= limits["world"]:
        raise ArgumentError(
            f"explore: servers is {case.servers}, it must be in 0..{limits['world']}", argument="case"
        )
    if not 0 <= case.list_cores < case.cores:
        raise ArgumentError(
            f"explore: list_cores is {case.list_cores}, it must be less than {case.cores} cores",
            argument="case",
        )
    if not 0 <= case.copy_cores <= case.cores:
        raise ArgumentError(
            f"explore: copy_cores is {case.copy_cores}, it must be at most {case.cores} cores",
            argument="case",
        )
    if case.servers and case.algorithm != "window":
        raise ArgumentError(
            f"explore: {case.algorithm} reads other ranks' windows, servers must be 0", argument="case"
        )
    if case.topk > case.experts:
        raise ArgumentError(
            f"explore: topk {case.topk} is more than the {case.experts} experts (w*l)", argument="case"
        )
    if case.contract not in (1, 2):
        raise ArgumentError(
            f"explore: contract v{case.contract} does not exist, it is v1 or v2", argument="case"
        )
    waiting = 0
    for op in case.sequence:
        waiting += 1 if op == "D" else -1
        if waiting < 0:
            raise ArgumentError(
                f"explore: {case.sequence} combines before it has dispatched as often", argument="case"
            )
    return case


def draw(seed: int) -> Case:
    """A small case: W 2..4, cores 2..4, L 1..3, K 1..3, BS 0..4, every mode; the same one for a seed."""
    rng = random.Random(seed)
    world = rng.choice([2, 2, 2, 3, 3, 4])
    cores = rng.choice([2, 2, 2, 3, 4]) if world < 4 else rng.choice([2, 2, 3])
    local = rng.choice([1, 1, 2, 3])
    quant = rng.choice(["none", "none", "int8", "smooth"])
    return Case(
        world=world,
        cores=cores,
        local=local,
        topk=min(rng.choice([1, 2, 2, 3]), world * local),
        batch=rng.choice([1, 2, 2, 3, 4]),
        units=rng.choice([1, 1, 2, 3]),
        dtype=rng.choice(list(DTYPES)),
        quant=quant,
        contract=rng.choice([1, 2]),
        mask=rng.choice(["none", "none", "token", "pair"]),
        ids=rng.choice(IDS),
        ragged=rng.random() < 0.7,
        sequence=rng.choice(SEQUENCES[:4] if world > 2 else SEQUENCES),
        seed=seed,
        algorithm=random.Random(seed * 31 + 7).choice(ALGORITHMS),
        rows=random.Random(seed * 37 + 5).choice(ROWS[:3]),
    )
