"""What one measurement is of: a layer's shape, ranks, tokens, routing and row format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ascend_moe.checkpoint.presets import PRESETS
from ascend_moe.errors import ArgumentError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SKEWS = ("uniform", "zipf", "hot")
QUANTS = ("none", "int8")
SWEEPS = ("tokens", "ranks", "hidden")

_SWEPT_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_SWEPT_RANKS = (1, 2, 4, 8)
_SWEPT_HIDDEN = (1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192)


@dataclass(frozen=True)
class Layer:
    """H, K and E of a published MoE layer."""

    about: str
    hidden: int
    topk: int
    experts: int


def _published(name: str) -> Layer:
    layer = PRESETS[name]
    config = layer.published
    return Layer(layer.about, config.hidden_size, config.top_k, config.num_experts)


LAYERS = {
    "deepseek-v3": _published("deepseek-v3"),
    "qwen3": Layer("a layer of Qwen3-235B-A22B", hidden=4096, topk=8, experts=128),
    "small": Layer("a layer of DeepSeek-V2-Lite", hidden=2048, topk=6, experts=64),
}


@dataclass(frozen=True)
class Case:
    """One measurement; the same on all ranks.

    Attributes:
        world, batch: W ranks, BS tokens on each.
        hidden, topk, experts: H, K, E; E is a multiple of W.
        skew: "uniform"; "zipf": expert e drawn with weight 1 / (e + 1); "hot": every token has expert 0.
        quant: "none", or "int8": rows travel as codes with a scale (quant_mode 2), and return as x's dtype.
    """

    preset: str
    world: int
    batch: int
    hidden: int
    topk: int
    experts: int
    skew: str = "uniform"
    quant: str = "none"
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        extra = [one for one in (self.skew, self.quant) if one not in ("uniform", "none")]
        extra += [self.dtype] if self.dtype != "bf16" else []
        return " ".join([f"{self.preset} H{self.hidden} BS{self.batch} W{self.world}", *extra])

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def local_experts(self) -> int:
        return self.experts // self.world

    @property
    def quant_mode(self) -> int:
        return 2 if self.quant == "int8" else 0

    @property
    def dispatch_bytes(self) -> int:
        """Bytes of the BS * K rows a rank sends."""
        item = 1 if self.quant == "int8" else self.torch_dtype.itemsize
        return self.batch * self.topk * self.hidden * item

    @property
    def combine_bytes(self) -> int:
        """Bytes of the BS * K rows a rank gets back."""
        return self.batch * self.topk * self.hidden * self.torch_dtype.itemsize

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def matrix(
    presets: Sequence[str],
    worlds: Sequence[int],
    batches: Sequence[int],
    *,
    sweep: str = "",
    hidden: int = 0,
    **common: str,
) -> list[Case]:
    """The cases of a run, ordered by ranks: every preset x ranks x batch, or along ``sweep``.

    A sweep replaces the list it goes along: "tokens" BS 1..512, "ranks" 1..8, "hidden" H 1024..8192.

    Raises:
        ArgumentError: a name or a number that makes no case.
    """
    for name in presets:
        if name not in LAYERS:
            raise ArgumentError(f"preset is {name!r}; need one of {', '.join(LAYERS)}", argument="preset")
    if sweep not in ("", *SWEEPS):
        raise ArgumentError(f"sweep is {sweep!r}; need one of {', '.join(SWEEPS)}", argument="sweep")
    batches = _SWEPT_TOKENS if sweep == "tokens" else batches
    worlds = _SWEPT_RANKS if sweep == "ranks" else worlds
    widths = _SWEPT_HIDDEN if sweep == "hidden" else (hidden,)
    found = [
        Case(
            name,
            world,
            batch,
            width or LAYERS[name].hidden,
            LAYERS[name].topk,
            LAYERS[name].experts,
            **common,
        )
        for world in sorted(set(worlds))
        for name in presets
        for width in widths
        for batch in batches
    ]
    _check(found)
    return found


def _check(cases: Iterable[Case]) -> None:
    for case in cases:
        for argument, value, allowed in (
            ("skew", case.skew, SKEWS),
            ("quant", case.quant, QUANTS),
            ("dtype", case.dtype, tuple(DTYPES)),
        ):
            if value not in allowed:
                raise ArgumentError(
                    f"{argument} is {value!r}; need one of {', '.join(allowed)}", argument=argument
                )
        if not 1 <= case.world <= 64 or case.experts % case.world:
            raise ArgumentError(
                f"ranks is {case.world}; need 1..64 that divide the {case.experts} experts of {case.preset}",
                argument="ranks",
            )
        if not 1 <= case.batch <= 4096:
            raise ArgumentError(f"bs is {case.batch}; need 1..4096 tokens a rank", argument="bs")
