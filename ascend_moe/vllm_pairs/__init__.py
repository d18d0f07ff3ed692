"""Tries one pair for real: all ranks on a LocalCluster, against the three calls and against plain torch."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from ascend_moe import LocalCluster
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.errors import need
from ascend_moe.experts import grouped_mlp, quantize_weight
from ascend_moe.interop.vllm.quantization import int8_w8a8_moe_quant_config
from ascend_moe.interop.vllm.selection import MoEKernelConfig, reason, select
from ascend_moe.ops.collectives import MAX_BATCH
from ascend_moe.settings import MAX_WORLD

MAX_WEIGHTS = 1 << 27  # elements of all experts
_ACTIVITIES = [torch.profiler.ProfilerActivity.CPU]
_ROW = 16  # bf16 elements that a row is a multiple of: 32 bytes
#: Root mean square of the difference to plain torch in float32, over that of the result: rounding of bf16, of int8.
ROUNDING, QUANTIZED = 0.02, 0.06


@dataclass(frozen=True)
class Trial:
    """One pair and a layer for it, in bf16.

    Attributes:
        prepare_finalize, experts: kinds.
        batches: tokens of each rank.
        hidden, width, num_experts, topk: H, F, E, K.
        quantized: W8A8.
        seed: of weights, tokens and routing.
    """

    prepare_finalize: str
    experts: str
    batches: tuple[int, ...]
    hidden: int
    width: int
    num_experts: int
    topk: int
    quantized: bool = False
    seed: int = 0

    def check(self) -> None:
        """Raises ArgumentError for a number that cannot be tried."""
        world, most = len(self.batches), max(self.batches)
        need(1 <= world <= MAX_WORLD, "ranks", "is {}; need 1..{}", world, MAX_WORLD)
        need(min(self.batches) >= 0 and most <= MAX_BATCH, "batch", "has {} tokens; need 0..{}", most, MAX_BATCH)
        fits = 1 <= self.num_experts <= 1024 and self.num_experts % world == 0
        rule = "is {}; {} ranks cannot share {} experts: need a multiple, 1..1024"
        need(fits, "experts", rule, self.num_experts, world, self.num_experts)
        need(1 <= self.topk <= min(32, self.num_experts), "topk", "is {}; need 1..32, at most the experts", self.topk)
        fits = 1 <= self.hidden <= 16384 and self.hidden % _ROW == 0
        need(fits, "hidden", "is {}; need a multiple of {}, 16..16384", self.hidden, _ROW)
        weights = 3 * self.num_experts * self.hidden * self.width
        rule = "have weights of {} elements; need at most {}: take fewer experts or a smaller hidden"
        need(weights <= MAX_WEIGHTS, "experts", rule, weights, MAX_WEIGHTS)


@dataclass
class Outcome:
    """Tells what came of a trial.

    Attributes:
        fits: whether the pair can be joined; the others are None or "" where not.
        reason: why not.
        equal: bits are those of dispatch, grouped_mlp and combine, on every rank.
        difference: to plain torch in float32, root mean square, relative; ``tolerance``: the most it may be.
        trace: the profile of rank 0's forward as Chrome trace JSON, where it was asked for.
    """

    fits: bool
    reason: str = ""
    equal: bool | None = None
    difference: float | None = None
    tolerance: float | None = None
    trace: str = ""

    @property
    def ok(self) -> bool:
        """The pair fits and computes what it should."""
        near = self.difference is not None and self.tolerance is not None and self.difference <= self.tolerance
        return self.fits and bool(self.equal) and near


@dataclass
class _Rank:
    """Holds the tensors of one rank."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    w1: Tensor  # (L, 2F, H)
    w2: Tensor  # (L, H, F)
    scales: tuple[Tensor, Tensor] | None


def try_pair(trial: Trial, profile: bool = False) -> Outcome:
    """Runs the pair's forward on all ranks and compares.

    Raises:
        ArgumentError: the trial's numbers. Others: as dispatch.
    """
    trial.check()
    why = reason(trial.prepare_finalize, trial.experts)
    if why:
        return Outcome(False, why)
    w1, w2 = _layer_weights(trial)
    world, local = len(trial.batches), trial.num_experts // len(trial.batches)

    def run(rank: int, group_ep: str) -> tuple[Any, ...]:
        own = slice(rank * local, (rank + 1) * local)
        part = _rank(trial, rank, w1[own], w2[own])
        config = MoEKernelConfig(
            group_ep, rank, world, trial.num_experts, max(1, *trial.batches), trial.prepare_finalize, trial.experts,
            int8_w8a8_moe_quant_config(*part.scales) if part.scales else None,
        )  # fmt: skip
        kernel = select(config)
        given = (part.x, part.w1, part.w2, part.weights, part.ids)
        made, trace = _profiled(lambda: kernel(*given)) if profile and rank == 0 else (kernel(*given), "")
        return made, _three_calls(part, group_ep, rank, trial), _dense(part, w1, w2), trace

    if profile:  # torch's profiler wants to be started on this thread before it is on another
        with torch.profiler.profile(activities=_ACTIVITIES):
            pass
    with torch.no_grad(), LocalCluster(world) as cluster:
        results = cluster.run(run)
    made, three, dense = (torch.cat(parts).float() for parts in list(zip(*results, strict=True))[:3])
    scale = float(dense.square().mean().sqrt()) if dense.numel() else 1.0
    difference = float((made - dense).square().mean().sqrt()) / scale if dense.numel() else 0.0
    tolerance = QUANTIZED if trial.quantized else ROUNDING
    return Outcome(True, "", torch.equal(made, three), difference, tolerance, results[0][3])


def _layer_weights(trial: Trial) -> tuple[Tensor, Tensor]:
    """(E, 2F, H) and (E, H, F) bf16."""
    generator = torch.Generator().manual_seed(trial.seed)
    experts, width, hidden = trial.num_experts, trial.width, trial.hidden
    w1 = torch.randn(experts, 2 * width, hidden, generator=generator) / hidden**0.5
    w2 = torch.randn(experts, hidden, width, generator=generator) / width**0.5
    return w1.bfloat16(), w2.bfloat16()


def _rank(trial: Trial, rank: int, w1: Tensor, w2: Tensor) -> _Rank:
    generator = torch.Generator().manual_seed(trial.seed + 1 + rank)
    tokens = trial.batches[rank]
    x = torch.randn(tokens, trial.hidden, generator=generator).bfloat16()
    scores, ids = torch.randn(tokens, trial.num_experts, generator=generator).topk(trial.topk)
    scales = None
    if trial.quantized:
        (code1, scale1), (code2, scale2) = (quantize_weight(weight.transpose(1, 2)) for weight in (w1, w2))
        w1, w2, scales = code1.transpose(1, 2), code2.transpose(1, 2), (scale1, scale2)
    return _Rank(x, ids.int(), scores.softmax(1), w1, w2, scales)


def _three_calls(part: _Rank, group_ep: str, rank: int, trial: Trial) -> Tensor:
    """The same layer by dispatch, grouped_mlp and combine."""
    world = len(trial.batches)
    dispatcher = MC2Dispatcher(group_ep, world, rank, trial.num_experts)
    mode = 2 if trial.quantized else 0
    sent = dispatcher.dispatch(part.x, part.ids, quant_mode=mode, global_bs=world * max(1, *trial.batches))
    given: dict[str, Any] = {}
    if part.scales is not None:
        given = {"dynamic_scales": sent.dynamic_scales, "output_dtype": part.x.dtype}
        given |= {"w_gate_up_scale": part.scales[0], "w_down_scale": part.scales[1]}
    weights = (part.w1.transpose(1, 2), part.w2.transpose(1, 2))
    rows = grouped_mlp(sent.expand_x, *weights, sent.expert_token_nums, **given)
    return dispatcher.combine(rows, sent, part.weights)


def _dense(part: _Rank, w1: Tensor, w2: Tensor) -> Tensor:
    """The same layer in plain torch and float32, expert by expert, with all experts here."""
    out = torch.zeros(part.x.shape)
    for expert in sorted(set(part.ids.flatten().tolist())):
        tokens, slots = (part.ids == expert).nonzero(as_tuple=True)
        gate, up = (part.x[tokens].float() @ w1[expert].float().t()).chunk(2, dim=1)
        rows = (silu(gate) * up) @ w2[expert].float().t()
        out.index_add_(0, tokens, rows * part.weights[tokens, slots, None])
    return out


def _profiled(forward: Any) -> tuple[Tensor, str]:
    """The result, and torch's profile of it as Chrome trace JSON."""
    with torch.profiler.profile(activities=_ACTIVITIES, record_shapes=True) as profiler:
        made = forward()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return made, path.read_text()
