"""The timed library through its C ABI: the windows of a world of ranks, one dispatch, one combine."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from ctypes import c_char, c_char_p, c_double, c_int, c_int32, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from .. import plan as planning
from .. import timeline
from ..comm.communicator import CONTEXT_A2, MIB
from ..errors import ArgumentError, AscendMoeError
from ..native import library
from ..ops import calls
from ..plan import Request
from ..plan.soc import soc as soc_named
from .routing import Routing

# name -> (comm_alg of the plan, kernel of am_timed_step, whether combine's rows lie in the lent area)
ALGORITHMS = {
    "cann-style": ("window", 1, False),
    "window": ("window", 0, False),
    "direct": ("direct", 0, False),
    "zero-copy": ("direct", 0, True),
}
_EVENT_BYTES = 64  # twin::TimelineEvent
_LIMIT_NS = 20e6  # of modelled time
_SMALLEST_ROW = 2048  # elements; shorter rows are moved: they could be taken for something else


class _Step(ctypes.Structure):
    _fields_ = [
        ("rank", c_int32),
        ("kernel", c_int32),
        ("plan", c_void_p),
        ("inputs", c_void_p),
        ("outputs", c_void_p),
    ]


class _Options(ctypes.Structure):
    _fields_ = [("payload_bytes", c_uint64), ("limit_ns", c_double), ("events", c_uint64)]


class _Result(ctypes.Structure):
    _fields_ = [
        ("total_ns", c_double),
        ("instructions", c_uint64),
        ("switches", c_uint64),
        ("status_stores", c_uint64),
        ("looks", c_uint64),
        ("events", c_uint64),
        ("failed", c_uint32),
        ("message", c_char * 1020),
    ]


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "am_plan_create": (c_void_p, (c_void_p, c_void_p)),
    "am_plan_destroy": (None, (c_void_p,)),
    "am_error_message": (None, (c_void_p, c_char_p, c_uint64)),
    "am_timed_create": (c_void_p, (c_int, c_uint64, c_uint64)),
    "am_timed_lent": (c_void_p, (c_void_p, c_int)),
    "am_timed_destroy": (None, (c_void_p,)),
    "am_timed_servers": (c_int, (c_void_p, c_int)),
    "am_timed_cost_names": (c_char_p, ()),
    "am_timed_run": (None, (c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_void_p)),
    "am_timed_path": (c_uint64, (c_void_p, c_char_p, c_uint64)),
    "am_timed_links": (c_uint64, (c_void_p, c_char_p, c_uint64)),
    "am_timed_outcome": (c_int, (c_void_p, c_int, c_void_p, c_void_p)),
    "am_timed_events": (c_uint64, (c_void_p, c_void_p, c_uint64)),
}


@functools.cache
def timed_library() -> ctypes.CDLL:
    """The library of the timed engine, opened once.

    Raises:
        LibraryError: not found, or built from other sources.
    """
    return library.open_library(library.library_path("timed"), _SIGNATURES)


@dataclass(frozen=True)
class OpRun:
    """One op of all ranks. ``path``: (step, cause) -> ns; ``links``: (name, rank, bytes, GB/s)."""

    total_ns: float
    path: dict[tuple[str, str], float]
    links: list[tuple[str, int, float, float]]
    ends_ns: list[float]
    instructions: int
    looks: int
    events: list[timeline.Event] = field(default_factory=list)


class TimedWorld:
    """All ranks of a configuration with windows of their own. ``outputs`` are by op and rank."""

    def __init__(
        self,
        request: Request,
        algorithm: str,
        seed: int,
        payload: bool,
        list_cores: int = 0,
    ) -> None:
        self.request, self.payload, self._library = request, payload, timed_library()
        self._comm_alg, self._kernel, self._lent = ALGORITHMS[algorithm]
        self._list_cores = list_cores
        self._servers = _rdma_share(request)
        if self._servers and self._kernel:
            text = (
                f"algorithm is {algorithm!r}, a model of stores to every window; {request.ranks} ranks with "
            )
            raise ArgumentError(
                f"{text}{self._servers} a server need RDMA: use 'window'", argument="algorithm"
            )
        self.routing = Routing(request, seed)
        window = planning.window_need(request)["buffsize_mib"]
        # The model's slots are sized for the worst case.
        self._window_mib = 2 * window + 64 if self._kernel == 0 else self._model_mib()
        self._plans: list[int] = []
        self._keep: list[Any] = []
        self.outputs: dict[str, list[list[torch.Tensor]]] = {}
        self.inputs: dict[str, list[dict[str, torch.Tensor]]] = {}
        self._lent_mib = (self._most_rows() * request.hidden * 4 >> 20) + 1 if self._lent else 0
        self._handle = self._library.am_timed_create(
            request.ranks, self._window_mib * MIB, self._lent_mib * MIB
        )
        if not self._handle or self._library.am_timed_servers(self._handle, self._servers):
            self.close()
            raise MemoryError(f"no memory for {request.ranks} windows of {self._window_mib} MiB")

    def __enter__(self) -> TimedWorld:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def ranks_per_server(self) -> int:
        """Of ranks that reach each other by RDMA; 0: all of them by loads and stores."""
        return self._servers

    def close(self) -> None:
        """Gives windows and plans back."""
        if self._handle:
            self._library.am_timed_destroy(self._handle)
        self._handle = None
        for plan in self._plans:
            self._library.am_plan_destroy(plan)
        self._plans.clear()

    def _model_mib(self) -> int:
        one = self.request
        slots = one.experts * one.batch * (one.hidden * 2 + 1024)
        return (2 * (slots + one.batch * one.topk * (one.hidden * 2 + 512)) >> 20) + 16

    def _most_rows(self) -> int:
        one = self.request
        return one.ranks * one.batch * min(one.topk, one.experts // one.ranks)

    def run(self, op: str, costs: Mapping[str, float], events: int = 0) -> OpRun:
        """Runs one op on all ranks from time 0 on.

        Raises:
            ArgumentError: the operators refuse the call.
            AscendMoeError: a kernel failed.
        """
        ranks = range(self.request.ranks)
        steps = (_Step * self.request.ranks)()
        self.inputs[op] = [self._inputs(op, rank) for rank in ranks]
        self.outputs[op] = []
        for rank, step in zip(ranks, steps, strict=True):
            self._fill(step, op, rank)
        names = self._library.am_timed_cost_names().decode().split()
        values = (c_double * len(names))(*(costs[name] for name in names))
        row = self.request.hidden * (1 if self.request.quant and op == "dispatch" else 2)
        skip = 0 if self.payload or self.request.hidden < _SMALLEST_ROW else row
        options, result = _Options(skip, _LIMIT_NS, events), _Result()
        self._library.am_timed_run(
            self._handle, steps, len(steps), values, ctypes.byref(options), ctypes.byref(result)
        )
        if result.failed:
            raise AscendMoeError(f"timed {op}: {result.message.decode()}")
        return OpRun(
            result.total_ns,
            self._path(),
            self._links(),
            self._ends(op),
            result.instructions,
            result.looks,
            self._events(result.events),
        )

    def _inputs(self, op: str, rank: int) -> dict[str, torch.Tensor]:
        one, routing = self.request, self.routing
        dtype = planning.DTYPES[one.dtype]
        if op == "dispatch":
            return {"x": self._rows("x", one.batch, dtype, rank), "expert_ids": routing.ids[rank]}
        contract = planning.CONTRACTS[one.contract]
        index = "expand_idx" if contract == 1 else "assist_info_for_combine"
        spec = self._describe("dispatch", rank, self.inputs["dispatch"][rank])
        shapes = calls.outputs_of(spec)
        slots = shapes[0][1][0]
        return {
            "expand_x": self._rows("expand_x", slots, dtype, rank),
            "expert_ids": routing.ids[rank],
            index: self._index(rank, contract, shapes[2][1]),
            "ep_send_counts": routing.counts(rank),
            "expert_scales": routing.weights[rank],
        }

    def _index(self, rank: int, contract: int, shape: tuple[int, ...]) -> torch.Tensor:
        """What dispatch tells combine: V2 has triples, between servers V1's indices at their place."""
        if contract == 2 and not self._servers:
            return self.routing.triples(rank, shape)
        index = self.routing.expand_idx(rank)
        return index if contract == 1 else torch.nn.functional.pad(index, (0, shape[0] - index.numel()))

    def _rows(self, name: str, count: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
        """Rows of a rank; where their values do not matter all ranks share them, long ones untouched."""
        if self.payload:
            rng = torch.Generator().manual_seed(rank + (1 << 20) * (name == "x"))
            return torch.randn((count, self.request.hidden), generator=rng).to(dtype)
        for kept in self._keep:
            if isinstance(kept, tuple) and kept[0] == name:
                return torch.Tensor(kept[1])
        make = torch.empty if self.request.hidden >= _SMALLEST_ROW else torch.ones
        rows = make((count, self.request.hidden), dtype=dtype)
        self._keep.append((name, rows))
        return rows

    def _describe(self, op: str, rank: int, inputs: Mapping[str, torch.Tensor]) -> Any:
        one = self.request
        attributes: dict[str, int | None] = dict.fromkeys(calls.attribute_names(), 0)
        attributes |= dict.fromkeys(("y_dtype", "x_dtype", "scales_dtype"), None)
        attributes |= {
            "ep_world_size": one.ranks,
            "ep_rank_id": rank,
            "moe_expert_num": one.experts,
            "shared_expert_num": 1,
            "quant_mode": 2 if one.quant and op == "dispatch" else 0,
            "expert_token_nums_type": 1,
        }
        code = calls.OP_DISPATCH if op == "dispatch" else calls.OP_COMBINE
        shapes = tuple((name, t.dtype, tuple(t.shape)) for name, t in inputs.items())
        spec = calls.describe(
            code, planning.CONTRACTS[one.contract], "timed", self._comm_alg, shapes, attributes
        )
        spec.comm_world, spec.comm_rank = one.ranks, rank
        spec.window_mib, spec.cores, spec.deadline_micros = self._window_mib, one.cores, 10_000_000
        spec.lent_mib = self._lent_mib
        if self._servers:
            spec.context_kind, spec.ranks_per_server = CONTEXT_A2, self._servers
        spec.list_cores = self._list_cores
        return spec

    def _fill(self, step: _Step, op: str, rank: int) -> None:
        given = self.inputs[op][rank]
        spec = self._describe(op, rank, given)
        check = calls.CheckResult()
        plan = self._library.am_plan_create(ctypes.byref(spec), ctypes.byref(check))
        if not plan:
            calls.Plan(f"timed {op}", spec)  # raises with the rule's text
            raise AscendMoeError(f"timed {op}: {check.message.decode()}")
        self._plans.append(plan)
        outputs = []
        for at, (dtype, shape) in enumerate(calls.outputs_of(spec)):
            rows = at == 0 and not self.payload
            outputs.append(
                self._rows(f"{op} 0", shape[0], dtype or torch.int8, rank)
                if rows
                else torch.empty(shape, dtype=dtype)
            )
        self.outputs[op].append(outputs)
        index = {name: at for at, name in enumerate(calls.tensor_names())}
        inputs = (c_void_p * len(index))()
        for name, tensor in given.items():
            inputs[index[name]] = tensor.data_ptr() or None
        if self._lent and op == "combine":
            inputs[index["expand_x"]] = self._lend(given["expand_x"], rank)
        targets = (c_void_p * len(outputs))(*(tensor.data_ptr() or None for tensor in outputs))
        self._keep += [inputs, targets]
        step.rank, step.kernel, step.plan = rank, self._kernel, plan
        step.inputs, step.outputs = ctypes.addressof(inputs), ctypes.addressof(targets)

    def _lend(self, rows: torch.Tensor, rank: int) -> int:
        """The rows as they would lie in the rank's lent area."""
        address = int(self._library.am_timed_lent(self._handle, rank))
        if self.payload:
            ctypes.memmove(address, rows.data_ptr(), rows.numel() * rows.element_size())
        return address

    def _text(self, function: Any) -> list[list[str]]:
        size = function(self._handle, None, 0)
        text = ctypes.create_string_buffer(size)
        function(self._handle, text, size)
        return [line.split("\t") for line in text.value.decode().splitlines()]

    def _path(self) -> dict[tuple[str, str], float]:
        lines = self._text(self._library.am_timed_path)
        return {(phase, cause): float(ns) for phase, cause, ns in lines}

    def _links(self) -> list[tuple[str, int, float, float]]:
        lines = self._text(self._library.am_timed_links)
        return [(name, int(rank), float(size), float(gbps)) for name, rank, size, gbps in lines]

    def _ends(self, op: str) -> list[float]:
        times, record = (c_double * 2)(), (c_int32 * 64)()
        ends = []
        for rank in range(self.request.ranks):
            if self._library.am_timed_outcome(self._handle, rank, times, record):
                text = ctypes.create_string_buffer(1024)
                self._library.am_error_message(record, text, 1024)
                raise AscendMoeError(f"timed {op}: {text.value.decode()}")
            ends.append(times[1])
        return ends

    def _events(self, count: int) -> list[timeline.Event]:
        if count == 0:
            return []
        events = ctypes.create_string_buffer(count * _EVENT_BYTES)
        self._library.am_timed_events(self._handle, events, count)
        return timeline.from_native(ctypes.addressof(events), count)


def runnable(request: Request) -> list[str]:
    """The algorithms that a configuration can run: between servers of A2 rows travel in window only."""
    return ["window"] if _rdma_share(request) else list(ALGORITHMS)


def _rdma_share(request: Request) -> int:
    """Ranks of a server where servers are joined by RDMA; 0: every window is a store away."""
    chip = soc_named(request.soc)
    share = request.ranks_per_server or chip.ranks_per_server
    return share if chip.series == "A2" and share < request.ranks else 0
