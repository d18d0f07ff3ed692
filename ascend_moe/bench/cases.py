"""The cases of a measurement: shape of a layer, ranks, tokens, routing and row format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from ascend_moe.call import QUANTS, CallOptions
from ascend_moe.errors import ArgumentError, need, need_one_of
from ascend_moe.moe_config import PRESETS
from ascend_moe.ops.collectives import MAX_BATCH
from ascend_moe.plan import Request, require
from ascend_moe.reference import cases
from ascend_moe.reference.cases import DTYPES
from ascend_moe.settings import MAX_WORLD

#: name of the routing -> ids of the generated case
SKEWS = {"uniform": "distinct", "zipf": "zipf", "hot": "popular"}
SWEEPS = {
    "tokens": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    "ranks": (1, 2, 4, 8),
    "hidden": (1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192),
}
INPUT_SETS = 16  # used alternately, so that the routing changes at every iteration


@dataclass(frozen=True)
class Case(CallOptions):
    """One benchmark case: layer shape, ranks, tokens, routing, dtype and options of the calls, equal on all ranks.

    Attributes:
        preset, world, batch: name of the model, W ranks, BS tokens on each.
        hidden, topk, experts: H, K, E; E is a multiple of W.
        skew: "uniform"; "zipf": expert e has weight 1 / (e + 1); "hot": every token selects expert 0.
    """

    preset: str
    world: int
    batch: int
    hidden: int
    topk: int
    experts: int
    skew: str = "uniform"
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        shape = f"{self.preset} H{self.hidden} BS{self.batch} W{self.world}"
        words = [shape, self.skew, "int8" * bool(self.quant_mode), self.dtype]
        return " ".join(word for word in words if word not in ("uniform", "", "bf16"))

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def local_experts(self) -> int:
        return self.experts // self.world

    @property
    def most_rows(self) -> int:
        """Maximum number of rows that one rank can receive in dispatch."""
        return self.world * self.batch * min(self.topk, self.local_experts)

    @property
    def dispatch_bytes(self) -> int:
        """Bytes of the BS * K rows that a rank sends in dispatch, without their int8 scales."""
        return self.batch * self.topk * self.hidden * (1 if self.quant_mode else self.torch_dtype.itemsize)

    @property
    def combine_bytes(self) -> int:
        """Bytes of the BS * K rows that a rank receives back in combine."""
        return self.batch * self.topk * self.hidden * self.torch_dtype.itemsize

    @property
    def request(self) -> Request:
        """The configuration of the ops, to plan."""
        shape = (self.world, self.experts, self.topk, self.hidden, self.batch)
        return Request(*shape, dtype=self.dtype, quant_mode=self.quant_mode)

    def call(self, number: int) -> cases.Case:
        """Return the inputs of all ranks and their expected results; ``number``: which of the random input sets."""
        return cases.Case(
            world=self.world,
            local=self.local_experts,
            topk=self.topk,
            batch=self.batch,
            width=self.hidden,
            dtype=self.dtype,
            quant_mode=self.quant_mode,
            ids=SKEWS[self.skew],
            seed=number * self.experts,  # the hot expert is seed % E: always expert 0
        )


@dataclass(frozen=True)
class Inputs:
    """A rank's tensors: x (BS, H); expert_ids (BS, K) int32, distinct per token; expert_scales (BS, K) fp32."""

    x: Tensor
    expert_ids: Tensor
    expert_scales: Tensor


def inputs(case: Case, rank: int, number: int) -> Inputs:
    """Return the tensors of a rank in the random input set ``number``."""
    made = case.call(number).rank_input(rank)
    assert made.expert_scales is not None  # every generated case has them
    return Inputs(made.x, made.expert_ids, made.expert_scales)


def matrix(
    presets: Sequence[str],
    worlds: Sequence[int],
    batches: Sequence[int],
    *,
    sweep: str = "",
    skew: str = "uniform",
    quant: str = "none",
    dtype: str = "bf16",
    shape: tuple[int | None, int | None, int | None] = (None, None, None),
) -> list[Case]:
    """Return the cases of a run, ordered by ranks: every combination of presets, worlds (ranks) and batches (BS).

    ``sweep``: "", or "tokens", "ranks" or "hidden", which SWEEPS then varies. ``shape``: H, K and E, None: the
    preset's. Raises ArgumentError for an unknown name, or if the operators do not support a case.
    """
    for preset in presets:
        need_one_of("preset", preset, PRESETS)
        special = PRESETS[preset].published.special.total
        rule = "is {!r}, with {} zero, copy or const experts, which bench does not support; use another preset"
        need(special == 0, "preset", rule, preset, special)
    need_one_of("sweep", sweep, ("", *SWEEPS))
    for argument, value, names in (("skew", skew, SKEWS), ("quant", quant, QUANTS), ("dtype", dtype, DTYPES)):
        need_one_of(argument, value, names)
    widths: Sequence[int] = SWEEPS["hidden"] if sweep == "hidden" else (0,)  # 0: the preset's
    worlds = sorted(set(SWEEPS["ranks"] if sweep == "ranks" else worlds))
    batches = SWEEPS["tokens"] if sweep == "tokens" else batches
    made = []
    for world, preset, width, batch in product(worlds, presets, widths, batches):
        layer = PRESETS[preset].published
        usual = (layer.row_size, layer.top_k, layer.num_experts)
        hidden, topk, experts = (own if given is None else given for given, own in zip(shape, usual, strict=True))
        if not 1 <= world <= MAX_WORLD or experts % world:
            text = f"ranks is {world}; need 1..{MAX_WORLD}, to divide the {experts} experts of {preset} evenly"
            raise ArgumentError(text, argument="ranks")
        need(1 <= batch <= MAX_BATCH, "bs", "is {}; need 1..{} tokens per rank", batch, MAX_BATCH)
        made.append(Case(preset, world, batch, width or hidden, topk, experts, skew, dtype, quant_mode=QUANTS[quant]))
        require(made[-1].request)
    return made
