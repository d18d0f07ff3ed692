"""The calls that `ascend-moe validate` makes: what each is made of, and the tensors of every rank.

Every rank builds all ranks' tensors from the case alone, so that nothing but results has to travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from .. import reference

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
QUANTS = ("none", "int8", "smooth")
MASKS = ("none", "prefix", "token", "pair", "nobody")
IDS = ("distinct", "any", "minus", "hot", "duplicates")
BATCHES = ("equal", "unequal", "zero rank", "one rank only", "no tokens")
FAULTS = ("none", "bad id", "overflow")
ODD = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-40, -1e-38, 6.0e4, 1e-7)


@dataclass(frozen=True)
class Case:
    """A dispatch and a combine of W ranks. H is ``units`` rows of 32 bytes; E = W * ``local``.

    ``fault``: what one rank does wrong in its ids, which every rank must report. ``odd``: NaN, infinities and
    denormals among the values. ``tail``: combine gets NaN rows behind the received ones.
    """

    name: str
    world: int
    local: int = 2
    topk: int = 2
    units: int = 4
    batch: int = 5
    dtype: str = "bf16"
    quant: str = "none"
    contract: int = 1
    mask: str = "none"
    ids: str = "any"
    batches: str = "equal"
    global_bs: bool = False
    nums_type: int = 1
    tp: int = 0
    shared: int = 0  # dimensions of shared_expert_x; 0: none
    odd: bool = False
    tail: bool = False
    fault: str = "none"
    seed: int = 0

    @property
    def experts(self) -> int:
        return self.world * self.local

    @property
    def hidden(self) -> int:
        return self.units * 32 // DTYPES[self.dtype].itemsize

    @property
    def quant_mode(self) -> int:
        return 0 if self.quant == "none" else 2

    @property
    def given_global_bs(self) -> int:
        unequal = self.global_bs or self.batches != "equal"
        return self.world * max(self.batch, 1) if unequal else 0

    @property
    def mode(self) -> str:
        """What the report counts by."""
        return (
            f"V{self.contract} {self.dtype}"
            + {"none": "", "int8": " int8", "smooth": " int8 smooth"}[self.quant]
        )


def build(case: Case) -> list[reference.RankInput]:
    """The tensors of all ranks, on the CPU; the same ones wherever and whenever they are built."""
    rng = np.random.default_rng([case.seed, case.world])
    dtype = DTYPES[case.dtype]
    batches = _batches(case, rng)
    guilty = int(rng.integers(case.world))
    if case.fault != "none":
        batches[guilty] = case.batch
    factors = None
    if case.quant == "smooth":
        factors = torch.from_numpy(_values(rng, (case.experts, case.hidden), False)).abs() + 0.125
    inputs = []
    for rank, batch in enumerate(batches):
        wrong = case.fault if rank == guilty else "none"
        x = torch.from_numpy(_values(rng, (batch, case.hidden), case.odd)).to(dtype)
        if batch > 1:
            x[int(rng.integers(batch))] = 0
        shared = None
        if case.shared:
            shared = torch.from_numpy(_values(rng, (batch, case.hidden), case.odd)).to(dtype)
            shared = shared[None] if case.shared == 3 else shared
        ids = torch.from_numpy(_ids(case, rng, batch, wrong).astype(np.int32))
        mask = _mask(case, rng, batch)
        if mask is not None and wrong != "none":
            mask = torch.ones_like(mask)
        weights = torch.from_numpy(_values(rng, (batch, case.topk), False))
        inputs.append(reference.RankInput(x, ids, factors, mask, weights, shared))
    return inputs


def matrix(world: int, seed: int = 0, extra: int = 24, dtypes: tuple[str, ...] = tuple(DTYPES)) -> list[Case]:
    """All cases for W ranks: every mode, every edge by name, and ``extra`` more by chance."""
    cases = [*_modes(world, dtypes), *_edges(world), *_by_chance(world, seed, extra, dtypes)]
    keep = [replace(case, seed=seed * 1000 + number) for number, case in enumerate(cases)]
    return [_legal(case) for case in keep if case.dtype in dtypes]


def _modes(world: int, dtypes: tuple[str, ...]) -> Iterator[Case]:
    """Each (contract, dtype, quant), with what is usual around it."""
    for contract in (1, 2):
        for dtype in dtypes:
            for quant in QUANTS:
                shared = 2 if contract == 2 and quant == "none" else 0
                base = Case("plain", world, contract=contract, dtype=dtype, quant=quant, shared=shared)
                yield replace(base, ids="distinct", local=4, topk=4)
                yield replace(
                    base, name="unequal batches, masked pairs", batches="unequal", mask="pair", ids="minus"
                )


def _edges(world: int) -> Iterator[Case]:
    for contract in (1, 2):
        base = Case("", world, contract=contract)
        quant = replace(base, quant="int8")
        yield replace(base, name="a rank without tokens", batches="zero rank")
        yield replace(quant, name="a rank without tokens", batches="zero rank")
        yield replace(base, name="tokens on one rank only", batches="one rank only")
        yield replace(base, name="no tokens at all", batches="no tokens")
        yield replace(base, name="one token a rank", batch=1)
        yield replace(base, name="hot expert", ids="hot", batch=12)
        yield replace(base, name="duplicate ids", ids="duplicates", local=4)
        yield replace(quant, name="ids -1", ids="minus")
        yield replace(base, name="mask: a prefix", mask="prefix")
        yield replace(base, name="mask: tokens", mask="token")
        yield replace(quant, name="mask: pairs", mask="pair")
        yield replace(base, name="mask: nobody is active", mask="nobody")
        yield replace(base, name="global_bs with equal batches", global_bs=True)
        yield replace(quant, name="expert_token_nums cumulative", nums_type=0)
        yield replace(base, name="tp_world_size 1", tp=1)
        yield replace(base, name="NaN, infinities, denormals", odd=True)
        yield replace(base, name="NaN rows behind the received ones", tail=True)
        yield replace(base, name="K 1, L 1", topk=1, local=1)
        yield replace(base, name="K 16", topk=16, local=16, batch=3)
        yield replace(base, name="rows of 32 bytes", units=1)
        yield replace(base, name="many experts", local=max(1, min(64, 512 // world)), topk=8)
        yield replace(quant, name="rows of H 7168", units=448, topk=8, local=8, batch=3)
        yield replace(base, name="many tokens", batch=150, topk=4, local=4)
        yield replace(base, name="an id out of range", fault="bad id")
        yield replace(base, name="plain, after an error", ids="distinct")
        yield replace(base, name="more rows than an owner may get", fault="overflow", local=1, topk=4)
        yield replace(base, name="plain, after an error", ids="distinct")
    yield Case("shared_expert_x, three dimensions", world, contract=2, shared=3)


def _by_chance(world: int, seed: int, count: int, dtypes: tuple[str, ...]) -> Iterator[Case]:
    rng = np.random.default_rng([seed, 7])

    def one_of(values: tuple[str, ...]) -> str:
        return values[int(rng.integers(len(values)))]

    for number in range(count):
        contract = int(rng.integers(1, 3))
        yield Case(
            f"by chance {number}",
            world,
            local=int(rng.integers(1, 9)),
            topk=int(rng.integers(1, 9)),
            units=int(rng.integers(1, 40)),
            batch=int(rng.integers(1, 33)),
            dtype=one_of(dtypes),
            quant=one_of(QUANTS),
            contract=contract,
            mask=one_of(MASKS[:4]),
            ids=one_of(IDS[:4]),
            batches=one_of(BATCHES[:3]),
            nums_type=int(rng.integers(2)),
            tp=int(rng.integers(2)),
            shared=int(rng.integers(2)) * 2 if contract == 2 else 0,
        )


def _legal(case: Case) -> Case:
    """The nearest case that the operators take."""
    topk = min(case.topk, case.experts)
    if case.fault == "overflow" and case.experts < 2:
        return replace(case, name="plain", fault="none", topk=topk)
    # Ids that all fall on one owner must stay within its capacity, maxBS * min(K, L) rows.
    if case.ids != "distinct" and case.fault == "none":
        topk = min(topk, case.local)
    return replace(case, topk=topk)


def _batches(case: Case, rng: np.random.Generator) -> list[int]:
    batches = [case.batch] * case.world
    if case.batches in ("unequal", "zero rank"):
        batches = [int(n) for n in rng.integers(case.batch + 1, size=case.world)]
        batches[0] = case.batch
    if case.batches == "zero rank":
        batches[-1] = 0
    if case.batches == "one rank only":
        batches = [0] * case.world
        batches[case.world // 2] = case.batch
    return [0] * case.world if case.batches == "no tokens" else batches


def _values(rng: np.random.Generator, shape: tuple[int, ...], odd: bool) -> np.ndarray:
    values = rng.standard_normal(shape).astype(np.float32)
    if odd:
        strange = np.array(ODD, dtype=np.float32)[rng.integers(len(ODD), size=shape)]
        values = np.where(rng.random(shape) < 0.05, strange, values)
    return values


def _ids(case: Case, rng: np.random.Generator, batch: int, wrong: str) -> np.ndarray:
    shape = (batch, case.topk)
    if wrong == "overflow":
        return np.full(shape, int(rng.integers(case.experts)))
    if case.ids == "distinct" or case.fault == "overflow":
        return np.argsort(rng.random((batch, case.experts)), axis=1)[:, : case.topk]
    ids = rng.integers(-1 if case.ids == "minus" else 0, case.experts, size=shape)
    if case.ids == "hot":
        ids = np.where(rng.random(shape) < 0.8, case.seed % case.experts, ids)
    if case.ids == "duplicates":
        ids = np.repeat(ids[:, :1], case.topk, axis=1)
    if wrong == "bad id":
        ids[rng.integers(batch), rng.integers(case.topk)] = case.experts + 3
    return ids


def _mask(case: Case, rng: np.random.Generator, batch: int) -> torch.Tensor | None:
    if case.mask == "none":
        return None
    if case.mask == "prefix":
        return torch.arange(batch) < (batch + 1) // 2
    if case.mask == "nobody":
        return torch.zeros(batch, dtype=torch.bool)
    shape = (batch, case.topk) if case.mask == "pair" else (batch,)
    return torch.from_numpy(rng.random(shape) < 0.6)
