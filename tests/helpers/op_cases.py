"""Collective calls of dispatch and combine for the tests of the ops: how they are drawn, what they cover."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch

import ascend_moe.reference as ref

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MASKS = ("none", "1-D prefix", "1-D", "2-D")
IDS = ("distinct", "any", "minus", "hot", "overflow", "bad")
BATCHES = ("equal", "global_bs", "unequal", "zero rank")
SPECIALS = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-40, -1e-38, 3.0e38, 6.0e4, 1e-7)


@dataclass(frozen=True)
class Spec:
    """What a case is made of; ``build`` turns it into tensors. ``units`` rows of 32 bytes make H."""

    world: int = 2
    local: int = 2
    topk: int = 2
    units: int = 2
    max_bs: int = 4
    dtype: str = "bf16"
    quant: str = "none"  # none, int8, smooth
    contract: int = 1
    batches: str = "equal"
    mask: str = "none"
    ids: str = "any"
    nums_type: int = 1
    tp: int = 0
    shared: bool = False
    special: bool = False
    tail: bool = False  # expand_x of combine has NaN rows behind the defined ones
    cores: int = 8
    seed: int = 0

    @property
    def experts(self) -> int:
        return self.world * self.local

    @property
    def hidden(self) -> int:
        return self.units * 32 // DTYPES[self.dtype].itemsize


@dataclass
class Case:
    """One call of dispatch and one of combine, of every rank."""

    inputs: list[ref.RankInput]
    experts: int
    contract: int = 1
    quant_mode: int = 0
    global_bs: int = 0
    nums_type: int = 1
    tp: int = 0
    cores: int = 8
    tail: bool = False
    weights_to_dispatch: bool = False
    traits: set[str] = field(default_factory=set)  # that the tensors do not show

    @property
    def world(self) -> int:
        return len(self.inputs)

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs[0].x.dtype


# ---- drawing


def legal(spec: Spec) -> Spec:
    """The nearest spec that the ops accept; one that asks for an overflow gets room for it."""
    values = dict(vars(spec))
    if spec.ids == "overflow":
        values.update(world=max(spec.world, 2), local=1, topk=max(spec.topk, 2), max_bs=max(spec.max_bs, 1))
    if spec.ids == "bad":
        values.update(max_bs=max(spec.max_bs, 1))
    values["topk"] = min(values["topk"], values["world"] * values["local"])
    if values["contract"] == 1:
        values["shared"] = False
    return Spec(**values)


def build(spec: Spec) -> Case:
    """The tensors of a legal spec."""
    rng = np.random.default_rng(spec.seed)
    batches = _batches(spec, rng)
    guilty = int(rng.integers(spec.world))
    batches[guilty] = spec.max_bs if spec.ids in ("overflow", "bad") else batches[guilty]
    smooth = spec.quant == "smooth"
    # As in practice every rank has the same factors.
    factors = (
        torch.from_numpy(_values(rng, (spec.experts, spec.hidden), spec.special)).abs() if smooth else None
    )
    inputs = []
    for rank, batch in enumerate(batches):
        ids = _ids(spec, rng, batch, rank == guilty)
        mask = _mask(spec, rng, batch)
        if rank == guilty and spec.ids in ("overflow", "bad"):
            mask = None if mask is None else torch.ones_like(mask)
        dtype, shape = DTYPES[spec.dtype], (batch, spec.hidden)
        x = torch.from_numpy(_values(rng, shape, spec.special))
        if batch and rng.random() < 0.3:
            x[rng.integers(batch)] = 0
        shared = torch.from_numpy(_values(rng, shape, spec.special)).to(dtype) if spec.shared else None
        if shared is not None and batch % 2 == 0 and rng.random() < 0.5:
            shared = shared.reshape(2, batch // 2, spec.hidden)
        inputs.append(
            ref.RankInput(
                x=x.to(dtype),
                expert_ids=torch.from_numpy(ids.astype(np.int32)),
                scales=factors,
                x_active_mask=mask,
                expert_scales=torch.from_numpy(_values(rng, (batch, spec.topk), spec.special)),
                shared_expert_x=shared,
            )
        )
    return Case(
        inputs,
        spec.experts,
        contract=spec.contract,
        quant_mode=0 if spec.quant == "none" else 2,
        global_bs=0 if spec.batches == "equal" else spec.world * max(spec.max_bs, 1),
        nums_type=spec.nums_type,
        tp=spec.tp,
        cores=spec.cores,
        tail=spec.tail,
        weights_to_dispatch=bool(rng.random() < 0.5),
        traits={"special values"} if spec.special else set(),
    )


def _batches(spec: Spec, rng: np.random.Generator) -> list[int]:
    batches = [spec.max_bs] * spec.world
    if spec.batches in ("unequal", "zero rank"):
        batches = [int(n) for n in rng.integers(spec.max_bs + 1, size=spec.world)]
        if spec.world > 1 and spec.max_bs > 0:
            batches[0], batches[1] = rng.permutation([spec.max_bs, int(rng.integers(spec.max_bs))]).tolist()
    if spec.batches == "zero rank":
        batches[int(rng.integers(spec.world))] = 0
    return batches


def _values(rng: np.random.Generator, shape: tuple[int, ...], special: bool) -> np.ndarray:
    values = rng.standard_normal(shape).astype(np.float32)
    if special:
        odd = np.array(SPECIALS, dtype=np.float32)[rng.integers(len(SPECIALS), size=shape)]
        # Some rows of nothing else, most with a few.
        rate = np.where(rng.random(shape[:1] + (1,) * (len(shape) - 1)) < 0.1, 1.0, 0.03)
        values = np.where(rng.random(shape) < rate, odd, values)
    return values


def _ids(spec: Spec, rng: np.random.Generator, batch: int, guilty: bool) -> np.ndarray:
    experts, shape = spec.experts, (batch, spec.topk)
    if spec.ids == "overflow" and guilty:
        return np.full(shape, int(rng.integers(experts)))
    if spec.ids in ("distinct", "overflow"):
        order = np.argsort(rng.random((batch, experts)), axis=1)
        return order[:, : spec.topk]
    ids = rng.integers(-1 if spec.ids == "minus" else 0, experts, size=shape)
    if spec.ids == "hot":
        ids = np.where(rng.random(shape) < 0.7, spec.seed % experts, ids)
    if spec.ids == "bad" and guilty:
        for _ in range(int(rng.integers(1, 4))):
            ids[rng.integers(batch), rng.integers(spec.topk)] = rng.choice(
                [-2, -3, experts, 2**31 - 1, -(2**31)]
            )
    return ids


def _mask(spec: Spec, rng: np.random.Generator, batch: int) -> torch.Tensor | None:
    if spec.mask == "none":
        return None
    if spec.mask == "1-D prefix":
        return torch.arange(batch) < int(rng.integers(batch + 1) if rng.random() < 0.2 else (batch + 1) // 2)
    shape = (batch,) if spec.mask == "1-D" else (batch, spec.topk)
    return torch.from_numpy(rng.random(shape) < rng.choice([0.5, 0.8, 0.0], p=[0.45, 0.45, 0.1]))


# ---- counting


def digest(case: Case) -> str:
    """Names the case by everything in it."""
    hasher = hashlib.sha256()
    hasher.update(repr([(k, v) for k, v in vars(case).items() if k not in ("inputs", "traits")]).encode())
    for one in case.inputs:
        for name, tensor in vars(one).items():
            hasher.update(f"{name} {None if tensor is None else tuple(tensor.shape)}".encode())
            if tensor is not None and tensor.numel():
                hasher.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def labels(case: Case) -> set[str]:
    """What a case covers, read off its tensors. A call that raises counts for its error alone."""
    fault = ref.check(case.inputs, case.experts, case.global_bs)
    if fault is not None:
        return {fault.kind}
    batches = [one.x.shape[0] for one in case.inputs]
    hidden = case.inputs[0].x.shape[1]
    name = {dtype: name for name, dtype in DTYPES.items()}[case.dtype]
    smooth = case.inputs[0].scales is not None
    found = case.traits | {name, f"V{case.contract}", f"quant {case.quant_mode}", f"tp {case.tp}"}
    found |= {f"expert_token_nums_type {case.nums_type}", f"global_bs {'given' if case.global_bs else 0}"}
    found |= {"smooth scales"} if smooth else set()
    found |= {"W > 1"} if case.world > 1 else set()
    found |= {"L > 1"} if case.experts > case.world else set()
    found |= {"zero-batch rank"} if 0 in batches else set()
    found |= {"unequal batches"} if len(set(batches)) > 1 else set()
    found |= {"int8, H not a multiple of 32"} if case.quant_mode and hidden % 32 else set()
    found |= {"shared_expert_x"} if case.inputs[0].shared_expert_x is not None else set()
    found |= {"NaN rows behind expand_x"} if case.tail else set()
    found |= {f"AIV cores {case.cores}"}
    return found | _routing_labels(case)


def _routing_labels(case: Case) -> set[str]:
    found: set[str] = set()
    total: Counter[int] = Counter()
    for one in case.inputs:
        mask = one.x_active_mask
        live = torch.ones_like(one.expert_ids, dtype=torch.bool)
        if mask is not None:
            live &= mask if mask.dim() == 2 else mask[:, None]
            if mask.numel() and not mask.any():
                found.add("rank without an active token")
            if mask.dim() == 2 and mask.any() and not mask.all():
                found.add("mask 2-D")
            elif mask.dim() == 1 and mask.any() and not mask.all():
                found.add(
                    "mask 1-D, a prefix" if bool((mask[:-1] >= mask[1:]).all()) else "mask 1-D, no prefix"
                )
        for ids, alive in zip(one.expert_ids.tolist(), live.tolist(), strict=True):
            routed = [expert for expert, on in zip(ids, alive, strict=True) if on and expert != -1]
            found |= (
                {"id -1"}
                if any(on and expert == -1 for expert, on in zip(ids, alive, strict=True))
                else set()
            )
            found |= {"duplicates within capacity"} if len(set(routed)) < len(routed) else set()
            total.update(routed)
    rows = sum(total.values())
    if case.experts > 1 and rows >= 4 and 2 * max(total.values()) >= rows:
        found.add("hot expert")
    return found
