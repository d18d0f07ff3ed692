"""Timelines of one round trip for ``ascend-moe trace``, measured on a `LocalCluster` or predicted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ascendc_twin.timeline import LAUNCH, PREDICTED, Event, Timeline, picture
from ascendc_twin.timeline.stats import OpRun, longest_waits, op_runs, phase_rows

from .. import plan
from .._text import OPS, TRACED, filled, table
from ..call import DEFAULTS, CallOptions
from ..comm import LocalCluster
from ..dispatchers import MC2Dispatcher
from ..errors import need, need_one_of
from ..native.windows import timeout_s
from ..ops.calls import core_count
from ..ops.trace import trace
from ..settings import DEFAULT_WINDOW_MIB
from . import predict

PREDICTED_EVENTS = 1_000_000  # per op
PICKS = {"fastest": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9}
WARM_UPS = 4  # both ping-pong buffers, twice
HEAD = ["step, µs", "work", "worst", "%", "cores", "SyncAll", "wait", "MB"]


@dataclass(frozen=True)
class TraceRequest(CallOptions):
    """A round trip to run: ``batch`` tokens per rank with uniform random routing.

    ``repeat`` rounds are recorded. ``pick`` selects the fastest, or the 10th, 50th or 90th percentile by duration, and
    ``op`` the op in the timeline, or both.
    """

    ranks: int = 2
    batch: int = 32
    hidden: int = 7168
    topk: int = 8
    experts: int = 256
    op: str = "both"
    algorithm: str = "auto"
    repeat: int = 15
    pick: str = "p10"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, names in (("op", OPS), ("algorithm", TRACED), ("pick", PICKS)):
            need_one_of(name, getattr(self, name), names)
        for name in ("ranks", "batch", "hidden", "topk", "experts", "repeat"):
            need(getattr(self, name) >= 1, name, "is {}; it must be at least 1", getattr(self, name))

    @property
    def title(self) -> str:
        rows = "int8" if self.quant_mode else "bf16"
        return (
            f"{self.algorithm}: {self.ranks} ranks, {self.batch} tokens each, H {self.hidden}, "
            f"K {self.topk}, E {self.experts}, {rows} rows"
        )


def measured(request: TraceRequest, begin: Callable[[], object] = lambda: None) -> Timeline:
    """Return the timeline of one of ``request.repeat`` rounds, recorded after warm-ups on a `LocalCluster`.

    ``begin`` is called after all checks, before the work. Raises ArgumentError for algorithm "hierarchy".
    """
    rule = "is 'hierarchy', which works between servers: predict it with --soc Ascend910B3 (A2) and --ranks 16"
    need(request.algorithm != "hierarchy", "algorithm", rule)
    call = replace(_plan_request(request), comm_alg=_comm_alg(request))
    window_mib = max(DEFAULT_WINDOW_MIB, plan.plan(call).buffsize_mib)
    with LocalCluster(request.ranks, window_mib=window_mib) as cluster:
        begin()
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


def predicted(request: TraceRequest, soc: str, begin: Callable[[], object] = lambda: None) -> Timeline:
    """Return the timeline of one dispatch and combine, predicted by the timed engine for ``soc``.

    ``begin`` is called before the work, unless the operators refuse the call. Raises as `predict`.
    """
    call, algorithm = _plan_request(request), request.algorithm
    ops_plans = plan.plan(replace(call, soc=soc)).ops  # empty if the ops refuse the call
    if algorithm == "auto":  # as the ops choose
        algorithm = ops_plans["dispatch"].algorithm if ops_plans else "window"
    if ops_plans:
        begin()
    found = predict(call, soc, algorithm=algorithm, events=PREDICTED_EVENTS)
    events: list[Event] = []
    start = 0.0
    dropped = 0
    for name, one in (("dispatch", found.dispatch), ("combine", found.combine)):
        if request.op not in ("both", name):
            continue
        dropped += len(one.events) == PREDICTED_EVENTS
        events += [
            replace(event, start_ns=event.start_ns + start, end_ns=event.end_ns + start)
            for event in with_launches(one.events, name)
        ]
        start += one.us * 1000 * 1.05
    return Timeline(PREDICTED, events, f"{soc}, {request.title}", {**_details(request), "soc": soc}, dropped)


def _details(request: TraceRequest) -> dict[str, str]:
    own = {name: value for name, value in asdict(request).items() if name not in DEFAULTS}
    return {name: str(value) for name, value in (own | request.options).items()}


def with_launches(events: list[Event], op: str) -> list[Event]:
    """Return the events of ``op``; if none is a launch, add one per rank, from 0 to its last event's end."""
    if any(event.name == LAUNCH for event in events):
        return events
    ends: dict[int, float] = {}
    for event in events:
        ends[event.rank] = max(ends.get(event.rank, 0.0), event.end_ns)
    return [*events, *(Event(rank, 0, "S", LAUNCH, op, 0.0, end) for rank, end in ends.items())]


def _plan_request(request: TraceRequest) -> plan.Request:
    shape = ("ranks", "experts", "topk", "hidden", "batch")
    return plan.Request(**{name: getattr(request, name) for name in shape}, **request.options)


def _comm_alg(request: TraceRequest) -> str:
    """comm_alg of the ops."""
    return "direct" if request.algorithm == "zero-copy" else request.algorithm


def _inputs(request: TraceRequest, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed((request.seed * 1009 + rank) % (1 << 63))
    x = torch.randn(request.batch, request.hidden, generator=generator).bfloat16()
    scores = torch.rand(request.batch, request.experts, generator=generator)
    weights, ids = scores.topk(min(request.topk, request.experts))
    return x, ids.int(), weights / weights.sum(1, keepdim=True)


def _round_trip(
    request: TraceRequest, rank: int, group_ep: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> None:
    options: dict[str, Any] = {"comm_alg": _comm_alg(request), "zero_copy": request.algorithm == "zero-copy"}
    dispatcher = MC2Dispatcher(group_ep, request.ranks, rank, request.experts, **options)
    sent = dispatcher.dispatch(x, ids, quant_mode=request.quant_mode)
    rows = sent.expand_x.to(x.dtype)  # in place of the experts' output
    room = dispatcher.empty_expert_out(sent, x.dtype)
    dispatcher.combine(rows if room is None else room.copy_(rows), sent, weights)


def _chosen_round(timeline: Timeline, request: TraceRequest) -> Timeline:
    """Return the requested ops of the round that ``request.pick`` selects."""
    runs = op_runs(timeline)
    wanted = ("dispatch", "combine") if request.op == "both" else (request.op,)
    rounds: dict[int, dict[str, OpRun]] = {}
    for run in runs:
        # a round that was cut off lacks some ranks
        if run.name in wanted and len(run.ranks) == request.ranks:
            rounds.setdefault(run.number, {})[run.name] = run
    whole = {number: [*own.values()] for number, own in rounds.items() if len(own) == len(wanted)}
    if not whole:
        return timeline
    spans = {number: sum(run.ns for run in own) for number, own in whole.items()}
    ordered = sorted(spans, key=lambda number: spans[number])
    chosen = _at(ordered, PICKS[request.pick])
    own = whole[chosen]
    found = timeline.between(min(run.start_ns for run in own), max(run.end_ns for run in own))
    if len(own) == 1:
        found.events = [*own[0].events]
    found.dropped = 0  # of other rounds
    found.details = {
        **_details(request),
        "cores": str(core_count()),
        "rounds": f"{len(spans)} recorded, this is the {request.pick} one, {spans[chosen] / 1000:.0f} µs; "
        + ", ".join(f"{name} {spans[_at(ordered, share)] / 1000:.0f} µs" for name, share in PICKS.items()),
    }
    return found


def _at(ordered: list[int], share: float) -> int:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# ---- the summary


def as_dict(timeline: Timeline) -> dict[str, Any]:
    """Return the summary of a timeline as a dict for JSON; times in ns."""

    def step(row: Any) -> dict[str, Any]:
        names = ("working", "worst", "cores", "sync_all", "wait", "bytes")
        return {"step": picture.phase_name(row.phase), **{name: getattr(row, name) for name in names}}

    def waited(longest: Any) -> dict[str, Any]:
        phase = picture.phase_name(longest.wait.phase)
        return {"rank": longest.wait.rank, "for_rank": longest.store.rank, "step": phase, "ns": longest.wait.ns}

    return {
        "title": timeline.title,
        "source": timeline.source,
        "details": timeline.details,
        "dropped": timeline.dropped,
        "ops": [
            {
                "op": run.name,
                "ns": run.ns,
                "ranks": len(run.ranks),
                "cores": run.cores,
                "steps": [step(row) for row in phase_rows(run)],
                "waits": [waited(longest_wait) for longest_wait in longest_waits(run)[:3]],
            }
            for run in op_runs(timeline)
        ],
    }


def text(timeline: Timeline) -> list[str]:
    """Return the summary of a timeline as lines of text; times in µs."""
    found = as_dict(timeline)
    lines = filled(f"{timeline.title} [{timeline.source}]".split())
    if "rounds" in timeline.details:
        lines += filled(timeline.details["rounds"].split(), "rounds: ")
    for op in found["ops"]:
        lines.append(f"{op['op']}: {op['ns'] / 1000:.1f} µs on {op['ranks']} ranks, {op['cores']} cores each")
        rows = [HEAD]
        for step in op["steps"]:  # work: time in which any core of a rank works in the step, mean over ranks
            work, worst, sync_all, wait = (
                f"{step[name] / 1000:.1f}" for name in ("working", "worst", "sync_all", "wait")
            )
            share, cores = f"{100 * step['working'] / op['ns']:.1f}", f"{step['cores']:.1f}"
            rows.append([step["step"], work, worst, share, cores, sync_all, wait, f"{step['bytes'] / 1e6:.2f}"])
        lines += table(rows, "")
        for waited in op["waits"]:
            words = f"waited {waited['ns'] / 1000:.1f} µs for rank {waited['for_rank']}'s status, in"
            lines += filled([*words.split(), waited["step"]], f"  rank {waited['rank']} ")
    if timeline.dropped:
        lines.append(f"{timeline.dropped} events were dropped: the buffer was full")
    return lines
