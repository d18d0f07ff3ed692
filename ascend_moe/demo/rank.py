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
from ascend_moe.dispatchers import Dispatched, WindowDispatcher
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
    record = _Pass(layer, dispatcher, x).record(rank)
    steady = torch.equal(layer(x), record.out)
    timed = []
    for done in range(1, passes):
        progress("passes through the layer", done, passes)
        again = _Pass(layer, dispatcher, x)
        steady = steady and torch.equal(again.out, record.out)
        timed.append(again.seconds)
    record.steady = steady
    record.seconds = {phase: [seconds[phase] for seconds in timed] for phase in PHASES}
    record.window_mib = comm.lookup(group_ep, spec.ranks, rank).data_bytes >> 20
    record.needed_mib = needed_mib(spec)
    return record


class _Pass:
    """MoELayer.forward step by step, each timed."""

    def __init__(self, layer: MoELayer, dispatcher: WindowDispatcher, x: Tensor) -> None:
        self.x = x
        start = time.perf_counter()
        self.expert_scales, self.expert_ids = layer.route(x)
        routed = time.perf_counter()
        self.sent = dispatcher.dispatch(
            x, self.expert_ids, quant_mode=layer.quant_mode, global_bs=layer.global_bs
        )
        dispatched = time.perf_counter()
        self.dispatch_traffic = _traffic(dispatcher)
        resumed = time.perf_counter()
        self.expert_rows = layer.run_experts(self.sent)
        self.shared = layer.run_shared(x)
        computed = time.perf_counter()
        self.out = dispatcher.combine(
            self.expert_rows, self.sent, self.expert_scales, shared_expert_x=self.shared
        )
        combined = time.perf_counter()
        self.combine_traffic = _traffic(dispatcher)
        times = (routed - start, dispatched - routed, computed - resumed, combined - computed)
        self.seconds = dict(zip(PHASES, times, strict=True))

    def record(self, rank: int) -> RankRecord:
        sent: Dispatched = self.sent
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
        return RankRecord(
            rank=rank,
            x=self.x,
            expert_ids=self.expert_ids,
            expert_scales=self.expert_scales,
            shared=self.shared,
            dispatched=outputs,
            expert_rows=self.expert_rows[:rows].clone(),
            out=self.out,
            steady=False,
            traffic={"dispatch": self.dispatch_traffic, "combine": self.combine_traffic},
        )


def _traffic(dispatcher: WindowDispatcher) -> dict[str, int]:
    return calls.traffic(comm.lookup(dispatcher.group_ep, dispatcher.world_size, dispatcher.rank))
