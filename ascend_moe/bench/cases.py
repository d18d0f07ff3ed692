"""What a measurement is of: the shape of a layer, ranks, tokens, routing, row format; and its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ascend_moe.checkpoint.presets import PRESETS
from ascend_moe.errors import ArgumentError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SKEWS = ("uniform", "zipf", "hot")
QUANTS = ("none", "int8")
SWEEPS = {
    "tokens": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    "ranks": (1, 2, 4, 8),
    "hidden": (1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192),
}
#: preset -> H, K, E of a published layer: DeepSeek-V3, Qwen3-235B-A22B, DeepSeek-V2-Lite
_DEEPSEEK = PRESETS["deepseek-v3"].published
LAYERS = {
    "deepseek-v3": (_DEEPSEEK.hidden_size, _DEEPSEEK.top_k, _DEEPSEEK.num_experts),
    "qwen3": (4096, 8, 128),
    "small": (2048, 6, 64),
}
INPUT_SETS = 16  # used in turns: routing is fresh at every iteration


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
        words = [f"{self.preset} H{self.hidden} BS{self.batch} W{self.world}", self.skew, self.quant]
        words.append(self.dtype)
        return " ".join(word for word in words if word not in ("uniform", "none", "bf16"))

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
        return self.batch * self.topk * self.hidden * (1 if self.quant_mode else self.torch_dtype.itemsize)

    @property
    def combine_bytes(self) -> int:
        """Bytes of the BS * K rows a rank gets back."""
        return self.batch * self.topk * self.hidden * self.torch_dtype.itemsize


def matrix(
    presets: Sequence[str],
    worlds: Sequence[int],
    batches: Sequence[int],
    *,
    sweep: str = "",
    skew: str = "uniform",
    quant: str = "none",
    dtype: str = "bf16",
) -> list[Case]:
    """The cases of a run, ordered by ranks: every preset x ranks x batch, or along ``sweep``.

    Raises:
        ArgumentError: a name or a number that makes no case.
    """
    for preset in presets:
        _check_name("preset", preset, LAYERS)
    _check_name("sweep", sweep, ("", *SWEEPS))
    for argument, value, names in (("skew", skew, SKEWS), ("quant", quant, QUANTS), ("dtype", dtype, DTYPES)):
        _check_name(argument, value, names)
    widths: Sequence[int] = SWEEPS["hidden"] if sweep == "hidden" else (0,)  # 0: the preset's
    cases = []
    for world in sorted(set(SWEEPS["ranks"] if sweep == "ranks" else worlds)):
        for preset in presets:
            hidden, topk, experts = LAYERS[preset]
            if not 1 <= world <= 64 or experts % world:
                raise ArgumentError(
                    f"ranks is {world}; need 1..64 that divide the {experts} experts of {preset}",
                    argument="ranks",
                )
            for width in widths:
                for batch in SWEEPS["tokens"] if sweep == "tokens" else batches:
                    if not 1 <= batch <= 4096:
                        raise ArgumentError(f"bs is {batch}; need 1..4096 tokens a rank", argument="bs")
                    shape = (preset, world, batch, width or hidden, topk, experts)
                    cases.append(Case(*shape, skew, quant, dtype))
    return cases


def _check_name(argument: str, value: str, names: Iterable[str]) -> None:
    listed = list(names)
    if value not in listed:
        raise ArgumentError(
            f"{argument} is {value!r}; need one of {', '.join(filter(None, listed))}", argument=argument
        )


@dataclass(frozen=True)
class Inputs:
    """x (BS, H); expert_ids (BS, K) int32, distinct in a token; expert_scales (BS, K) fp32, rows sum to 1."""

    x: Tensor
    expert_ids: Tensor
    expert_scales: Tensor


def inputs(case: Case, rank: int, number: int) -> Inputs:
    """Input set ``number`` of a rank: a pure function of its arguments, so any rank can make any other's.

    Values are normal: denormals would time other code.
    """
    generator = _generator(1, rank, number)
    x = torch.randn(case.batch, case.hidden, generator=generator).to(case.torch_dtype)
    weights = torch.rand(case.batch, case.topk, generator=generator) + 0.1
    return Inputs(x, expert_ids(case, rank, number), weights / weights.sum(1, keepdim=True))


def expert_ids(case: Case, rank: int, number: int) -> Tensor:
    """The ids of ``inputs`` alone."""
    generator = _generator(0, rank, number)
    scores = torch.rand(case.batch, case.experts, generator=generator)
    if case.skew == "zipf":
        # Gumbel's trick: the largest of log(weight) + noise are a draw by weight without repetition.
        weight = 1.0 / torch.arange(1, case.experts + 1)
        scores = weight.log() - (-scores.clamp(min=1e-12).log()).log()
    elif case.skew == "hot":
        scores[:, 0] = 2.0
    ids = scores.topk(case.topk, dim=1).indices
    order = torch.rand(case.batch, case.topk, generator=generator).argsort(1)
    return ids.gather(1, order).to(torch.int32)


def _generator(kind: int, rank: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed((kind << 24) + (number << 8) + rank)


def most_rows(case: Case) -> int:
    """Rows on the rank that receives most, over all input sets."""
    most = 0
    for number in range(INPUT_SETS):
        ids = torch.cat([expert_ids(case, rank, number).reshape(-1) for rank in range(case.world)])
        owners = torch.bincount(ids // case.local_experts, minlength=case.world)
        most = max(most, int(owners.max()))
    return most
