"""One rank's part of a run: builds its share of the layer, passes its tokens through, keeps what to check."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ascend_moe import comm
from ascend_moe.demo.layers import RunSpec, build, embed, needed_mib
from ascend_moe.dispatchers import WindowDispatcher
from ascend_moe.layer import MoELayer
from ascend_moe.ops import calls

PHASES = ("router", "dispatch", "experts", "combine")

# Quantising takes several times the weights' bytes for a moment: threads take turns.
_ONE_AT_A_TIME = threading.Lock()

#: progress(stage, done, total), total 0 when unknown.
Progress = Callable[[str, int, int], None]


@dataclass
class RankRecord:
    """What one rank saw and did. n rows arrived.

    ``dispatched``: dispatch's seven outputs, the rows cut to n; ``expert_rows``: (n, H) of the experts.
    ``steady``: every pass, and MoELayer.forward, gave the bits of ``out``. ``seconds``: by phase, one number
    a timed pass. ``traffic``: by op, the twin's MTE byte counters. ``needed_mib``: for any routing.
    """

    rank: int
    x: Tensor
    expert_ids: Tensor
    expert_scales: Tensor
    shared: Tensor | None
    dispatched: tuple[Tensor, ...]
    expert_rows: Tensor
    out: Tensor
    steady: bool
    seconds: dict[str, list[float]] = field(default_factory=dict)
    traffic: dict[str, dict[str, int]] = field(default_factory=dict)
    window_mib: int = 0
    needed_mib: int = 0


@torch.no_grad()
def run_rank(spec: RunSpec, rank: int, group_ep: str, progress: Progress) -> RankRecord:
    """Runs one rank; collective over ``group_ep``."""
    dispatcher = WindowDispatcher(group_ep, spec.ranks, rank, spec.config.num_experts)
    progress("weights of the experts", 0, 0)
    layer = build(spec, dispatcher)
    if spec.quant:
        with _ONE_AT_A_TIME:
            layer.quantize_()
    x = embed(spec, rank)
    passes = spec.iterations + 1
    progress("passes through the layer", 0, passes)
    record, _ = _pass(layer, dispatcher, x)
    record.steady = torch.equal(layer(x), record.out)
    record.seconds = {phase: [] for phase in PHASES}
    for done in range(1, passes):
        progress("passes through the layer", done, passes)
        again, times = _pass(layer, dispatcher, x)
        record.steady = record.steady and torch.equal(again.out, record.out)
        for phase, seconds in zip(PHASES, times, strict=True):
            record.seconds[phase].append(seconds)
    record.window_mib = comm.lookup(group_ep, spec.ranks, rank).data_bytes >> 20
    record.needed_mib = needed_mib(spec)
    return record


def _pass(layer: MoELayer, dispatcher: WindowDispatcher, x: Tensor) -> tuple[RankRecord, tuple[float, ...]]:
    """MoELayer.forward step by step, and the seconds of each phase."""
    now = time.perf_counter
    start = now()
    weights, ids = layer.route(x)
    routed = now()
    sent = dispatcher.dispatch(x, ids, quant_mode=layer.quant_mode, global_bs=layer.global_bs)
    dispatched = now()
    traffic = {"dispatch": _traffic(dispatcher)}
    resumed = now()
    expert_rows, shared = layer.run_experts(sent), layer.run_shared(x)
    computed = now()
    out = dispatcher.combine(expert_rows, sent, weights, shared_expert_x=shared)
    combined = now()
    traffic["combine"] = _traffic(dispatcher)
    rows = int(sent.ep_recv_counts[-1])
    outputs = (
        sent.expand_x[:rows].clone(),
        sent.dynamic_scales[:rows].clone(),
        sent.expand_idx[: 3 * rows].clone(),
        sent.expert_token_nums,
        sent.ep_recv_counts,
        sent.handle.tp_recv_counts,
        sent.handle.expand_scales[:rows].clone(),
    )
    kept = expert_rows[:rows].clone()
    record = RankRecord(dispatcher.rank, x, ids, weights, shared, outputs, kept, out, False, traffic=traffic)
    return record, (routed - start, dispatched - routed, computed - resumed, combined - computed)


def _traffic(dispatcher: WindowDispatcher) -> dict[str, int]:
    return calls.traffic(comm.lookup(dispatcher.group_ep, dispatcher.world_size, dispatcher.rank))
