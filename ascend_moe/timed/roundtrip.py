"""Runs one round trip for ``ascend-moe trace`` on the ranks of a ``LocalCluster``."""

from __future__ import annotations

import statistics
import threading
from dataclasses import asdict, dataclass, replace

import torch

from .. import ops, plan
from ..comm import LocalCluster, window_empty
from ..comm.communicator import DEFAULT_WINDOW_MIB, timeout_s
from ..errors import ArgumentError
from ..ops.calls import core_count
from ..timeline import LAUNCH, PREDICTED, Event, Timeline
from ..timeline.record import trace
from ..timeline.stats import op_runs, rank_ns
from . import predict

OPS = ("dispatch", "combine", "both")
ALGORITHMS = ("window", "direct", "zero-copy", "cann-style")  # the last is a model's alone
PREDICTED_EVENTS = 1_000_000  # an op
PICKS = {"fastest": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9}
WARM_UPS = 4  # both halves of the windows, twice


@dataclass(frozen=True)
class TraceRequest:
    """What to run: ``batch`` tokens a rank, uniform random routing, int8 rows with ``quant``.

    Of ``repeat`` recorded rounds the one of rank ``pick`` by its time is shown.
    """

    ranks: int = 2
    batch: int = 32
    hidden: int = 7168
    topk: int = 8
    experts: int = 256
    quant: bool = False
    op: str = "both"
    algorithm: str = "window"
    repeat: int = 15
    pick: str = "p10"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ArgumentError(f"op is {self.op!r}; need one of {', '.join(OPS)}", argument="op")
        if self.algorithm not in ALGORITHMS:
            known = ", ".join(ALGORITHMS)
            raise ArgumentError(f"algorithm is {self.algorithm!r}; need one of {known}", argument="algorithm")
        if self.pick not in PICKS:
            raise ArgumentError(f"pick is {self.pick!r}; need one of {', '.join(PICKS)}", argument="pick")
        for name in ("ranks", "batch", "hidden", "topk", "experts", "repeat"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}; it must be at least 1", argument=name)

    @property
    def title(self) -> str:
        rows = "int8" if self.quant else "bf16"
        return (
            f"{self.algorithm}: {self.ranks} ranks, {self.batch} tokens each, H {self.hidden}, "
            f"K {self.topk}, E {self.experts}, {rows} rows"
        )


def measured(request: TraceRequest) -> Timeline:
    """The timeline of one round of ``request.repeat`` that were recorded after warm-ups.

    Raises:
        AscendMoeError: what the ops raise; the engine records nothing.
    """
    if request.algorithm == "cann-style":
        raise ArgumentError("algorithm cann-style is predicted alone: give a SoC", argument="algorithm")
    with LocalCluster(request.ranks, window_mib=_window_mib(request)) as cluster:
        barrier = threading.Barrier(request.ranks)
        inputs = [_inputs(request, rank) for rank in range(request.ranks)]

        def rounds(count: int) -> None:
            def body(rank: int, group_ep: str) -> None:
                for _ in range(count):
                    barrier.wait(timeout_s())
                    _round_trip(request, rank, group_ep, *inputs[rank])

            cluster.run(body)

        rounds(WARM_UPS)
        with trace(title=request.title) as recording:
            rounds(request.repeat)
    return _chosen_round(recording.timeline, request)


def predicted(request: TraceRequest, soc: str) -> Timeline:
    """The timeline of one dispatch and the combine that follows it, of the timed engine's model of ``soc``.

    Raises:
        ArgumentError: no such SoC, or an algorithm that the model has not.
        AscendMoeError: what the kernels raise.
    """
    found = predict(_plan_request(request), soc, algorithm=request.algorithm, events=PREDICTED_EVENTS)
    events: list[Event] = []
    start = 0.0
    dropped = 0
    for name, one in (("dispatch", found.dispatch), ("combine", found.combine)):
        if request.op not in ("both", name):
            continue
        dropped += len(one.events) == PREDICTED_EVENTS
        events += [shifted(event, start) for event in with_launches(one.events, name)]
        start += one.us * 1000 * 1.05
    details = {**{name: str(value) for name, value in asdict(request).items()}, "soc": soc}
    return Timeline(PREDICTED, events, f"{soc}, {request.title}", details, dropped)


def with_launches(events: list[Event], op: str) -> list[Event]:
    """The events of one op, and one that spans it on every rank, where the engine gave none."""
    if any(event.name == LAUNCH for event in events):
        return events
    ends: dict[int, float] = {}
    for event in events:
        ends[event.rank] = max(ends.get(event.rank, 0.0), event.end_ns)
    return [*events, *(Event(rank, 0, "S", LAUNCH, op, 0.0, end) for rank, end in ends.items())]


def shifted(event: Event, ns: float) -> Event:
    return replace(event, start_ns=event.start_ns + ns, end_ns=event.end_ns + ns)


def _plan_request(request: TraceRequest) -> plan.Request:
    return plan.Request(
        ranks=request.ranks,
        experts=request.experts,
        topk=request.topk,
        hidden=request.hidden,
        batch=request.batch,
        quant=request.quant,
    )


def _window_mib(request: TraceRequest) -> int:
    return max(DEFAULT_WINDOW_MIB, plan.plan(_plan_request(request)).buffsize_mib)


def _inputs(request: TraceRequest, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(request.seed * 1009 + rank)
    x = torch.randn(request.batch, request.hidden, generator=generator).bfloat16()
    scores = torch.rand(request.batch, request.experts, generator=generator)
    weights, ids = scores.topk(min(request.topk, request.experts))
    return x, ids.int(), weights / weights.sum(1, keepdim=True)


def _round_trip(
    request: TraceRequest, rank: int, group_ep: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> None:
    comm_alg = "window" if request.algorithm == "window" else "direct"
    place = (group_ep, request.ranks, rank, request.experts)
    sent = ops.npu_moe_distribute_dispatch_v2(
        x, ids, *place, quant_mode=2 if request.quant else 0, comm_alg=comm_alg
    )
    rows = _experts(request, sent[0].to(x.dtype), group_ep, rank)
    ops.npu_moe_distribute_combine_v2(rows, ids, sent[2], sent[4], weights, *place, comm_alg=comm_alg)


def _experts(request: TraceRequest, rows: torch.Tensor, group_ep: str, rank: int) -> torch.Tensor:
    """In the experts' place: the same rows; zero-copy: where combine sends them from."""
    if request.algorithm != "zero-copy":
        return rows
    out = window_empty(
        rows.shape, dtype=rows.dtype, group_ep=group_ep, ep_world_size=request.ranks, ep_rank_id=rank
    )
    return out.copy_(rows)


def _chosen_round(timeline: Timeline, request: TraceRequest) -> Timeline:
    """The round that was asked for; by default at p10, as other programs' time slices are in slower ones.

    Of it the ops that were asked for.
    """
    runs = op_runs(timeline)
    wanted = ("dispatch", "combine") if request.op == "both" else (request.op,)
    rounds: dict[int, dict[str, float]] = {}
    for run in runs:
        # The events of a launch end with its own: a round that was cut off lacks some.
        if run.name in wanted and len(rank_ns(run)) == request.ranks:
            rounds.setdefault(run.number, {})[run.name] = run.ns
    spans = {number: sum(ns.values()) for number, ns in rounds.items() if len(ns) == len(wanted)}
    if not spans:
        return timeline
    ordered = sorted(spans, key=lambda number: spans[number])
    chosen = _at(ordered, PICKS[request.pick])
    kept = [run for run in runs if run.number == chosen and run.name in wanted]
    found = timeline.between(min(run.start_ns for run in kept), max(run.end_ns for run in kept))
    names = {run.name for run in kept}
    if len(names) == 1:
        found.events = [event for run in kept for event in run.events]
    found.dropped = 0  # of other rounds
    found.details = {
        **{name: str(value) for name, value in asdict(request).items()},
        "cores": str(core_count()),
        "rounds": f"{len(spans)} recorded, this is the {request.pick} one, {spans[chosen] / 1000:.0f} µs; "
        f"p10 {spans[_at(ordered, 0.1)] / 1000:.0f}, "
        f"p50 {statistics.median(spans.values()) / 1000:.0f}, "
        f"p90 {spans[_at(ordered, 0.9)] / 1000:.0f} µs",
    }
    return found


def _at(ordered: list[int], share: float) -> int:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
