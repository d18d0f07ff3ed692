"""The timed library by its C ABI: windows of all ranks, one dispatch, one combine."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from ctypes import c_char, c_char_p, c_double, c_int, c_int32, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ascendc_twin.timeline import EVENT_BYTES, from_native
from ascendc_twin.timing import Timing, links_of, path_of

from .. import plan as planning
from .. import settings
from ..comm.registered import DTYPES
from ..errors import AscendMoeError, need
from ..native import library, timestamps
from ..native.windows import CONTEXT_A2, CONTEXT_TABLE, MIB
from ..ops import calls
from ..plan import Request, soc_of

# name -> (comm_alg of the plan, whether combine's rows lie in registered memory)
ALGORITHMS = {
    "window": ("window", False),
    "direct": ("direct", False),
    "zero-copy": ("direct", True),
    "hierarchy": ("hierarchy", False),  # between servers only
}
_LIMIT_NS = 20e6  # of modelled time
_SMALLEST_ROW = 2048  # elements; shorter rows are always moved, as their size does not identify them


class _Step(ctypes.Structure):
    _fields_ = [("rank", c_int32), *((name, c_void_p) for name in ("plan", "inputs", "outputs"))]


class _Options(ctypes.Structure):
    _fields_ = [("payload_bytes", c_uint64), ("limit_ns", c_double), ("events", c_uint64)]


class _Result(ctypes.Structure):
    _fields_ = [
        *((name, c_double) for name in ("total_ns", "vector_ns")),
        *((name, c_uint64) for name in ("instructions", "switches", "status_stores", "looks", "events")),
        *((name, c_uint64) for name in ("sync_alls", "polled_barriers")),
        ("failed", c_uint32),
        ("message", c_char * 1020),
    ]


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "am_plan_create": (c_void_p, (c_void_p, c_void_p)),
    "am_plan_destroy": (None, (c_void_p,)),
    "am_error_message": (None, (c_void_p, c_char_p, c_uint64)),
    "am_timed_create": (c_void_p, (c_int, c_uint64, c_uint64)),
    "am_timed_registered": (c_void_p, (c_void_p, c_int)),
    "am_timed_destroy": (None, (c_void_p,)),
    "am_timed_communicator": (c_void_p, (c_void_p, c_int)),
    "am_comm_timestamps": (None, (c_void_p, c_int, c_void_p)),
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
    """Return the library of the timed engine, opened by the first call."""
    return library.open_library(library.library_path("timed"), _SIGNATURES)


@dataclass(frozen=True)
class OpPrediction(Timing):
    """Prediction of one op on all ranks.

    Attributes:
        polled_barriers: core barriers of a rank whose cores poll blocks in memory instead of calling SyncAll.
    """

    polled_barriers: int = 0


def check(request: Request, algorithm: str) -> None:
    """Raise ArgumentError if the operators or the ``algorithm`` refuse the configuration. Runs nothing."""
    levels = algorithm == "hierarchy" and not _rdma_share(request)
    rule = (
        "is 'hierarchy', which works between servers of A2; {} ranks of {} share one: use window, direct or zero-copy"
    )
    need(not levels, "algorithm", rule, request.ranks, request.soc)
    planning.require(_as_run(request, algorithm))
    rule = "is 'zero-copy', which does not support int8 rows of combine: use 'direct'"
    need(not (ALGORITHMS[algorithm][1] and request.returns_int8), "algorithm", rule)


def _as_run(request: Request, algorithm: str) -> Request:
    """Return the configuration of the ops that run. Hierarchy sends expert_scales with the rows."""
    weights = request.weights or algorithm == "hierarchy"
    return replace(request, comm_alg=ALGORITHMS[algorithm][0], equal_batches=True, weights=weights)


class TimedWorld:
    """The ranks of a configuration and their windows on the timed engine; inputs and outputs: op -> tensors by rank."""

    def __init__(self, request: Request, algorithm: str, seed: int, payload: bool) -> None:
        self._registered = ALGORITHMS[algorithm][1]
        check(request, algorithm)
        self.request = _as_run(request, algorithm)
        self.payload, self._library = payload, timed_library()
        # hierarchy: words in the middle of what is sent with a row
        self._skips_rows = not payload and request.hidden >= _SMALLEST_ROW and algorithm != "hierarchy"
        self._servers = _rdma_share(request)
        self.routing = Routing(request, seed)
        self._window_mib = 2 * planning.window_need(request)["buffsize_mib"] + 64
        self._plans: list[calls.Plan] = []
        self._keep: list[Any] = []
        self._shared: dict[str, torch.Tensor] = {}
        self.outputs: dict[str, list[list[torch.Tensor]]] = {}
        self.inputs: dict[str, list[dict[str, torch.Tensor]]] = {}
        most_rows = request.ranks * request.batch * min(request.topk, request.experts // request.ranks)
        self._registered_mib = (most_rows * request.hidden * 4 >> 20) + 1 if self._registered else 0
        self._handle = self._library.am_timed_create(request.ranks, self._window_mib * MIB, self._registered_mib * MIB)
        if not self._handle or self._library.am_timed_servers(self._handle, self._servers):
            self.close()
            text = f"no memory for {request.ranks} windows of {self._window_mib} MiB; predict fewer ranks or tokens"
            raise MemoryError(text)

    def __enter__(self) -> TimedWorld:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the windows and plans; the world runs no more ops."""
        if self._handle:
            self._library.am_timed_destroy(self._handle)
        self._handle = None
        self._plans.clear()

    def run(self, op: str, costs: Mapping[str, float], events: int = 0) -> OpPrediction:
        """Run one op, launched at time 0 on all ranks, and return its prediction; raise AscendMoeError if the op fails.

        Args:
            op: "dispatch", or after it "combine", which takes the counts and indices of the dispatch.
            costs: the value of every name in `ascendc_twin.soc.cost_table`.
            events: maximum number of timeline events to record.
        """
        ranks = range(self.request.ranks)
        steps = (_Step * self.request.ranks)()
        self.inputs[op] = [self._inputs(op, rank) for rank in ranks]
        self.outputs[op] = []
        for rank, step in zip(ranks, steps, strict=True):
            self._fill(step, op, rank)
        names = self._library.am_timed_cost_names().decode().split()
        values = (c_double * len(names))(*(costs[name] for name in names))
        row = self.request.hidden * (1 if self.request.quant_mode and op == "dispatch" else 2)
        options, result = _Options(row if self._skips_rows else 0, _LIMIT_NS, events), _Result()
        self._library.am_timed_run(self._handle, steps, len(steps), values, ctypes.byref(options), ctypes.byref(result))
        if result.failed:
            raise AscendMoeError(f"prediction of {op}: {result.message.decode()}")
        self._raise_what_ranks_report(op)
        memory = ctypes.create_string_buffer(result.events * EVENT_BYTES)
        self._library.am_timed_events(self._handle, memory, result.events)
        return OpPrediction(
            result.total_ns / 1e3,
            path_of(self._lines(self._library.am_timed_path)),
            *links_of(self._lines(self._library.am_timed_links), result.total_ns),
            result.vector_ns / 1e3,
            from_native(ctypes.addressof(memory), result.events),
            result.instructions,
            result.sync_alls,
            polled_barriers=result.polled_barriers,
        )

    def timestamps(self, op: str, rank: int) -> list[timestamps.Timestamp]:
        """Return the timestamps of a rank's last ``op``; empty unless `settings.TIMESTAMPS` was set when it ran."""
        communicator = self._library.am_timed_communicator(self._handle, rank)
        return timestamps.of_communicator(communicator, op, self._library)

    def _inputs(self, op: str, rank: int) -> dict[str, torch.Tensor]:
        one, ids = self.request, self.routing.ids[rank]
        dtype = DTYPES[one.dtype]
        if op == "dispatch":
            given = {"x": self._rows("x", one.batch, dtype, rank), "expert_ids": ids}
            if one.smooth:
                given["scales"] = self._scales()
            if one.weights:
                given["expert_scales"] = self.routing.weights[rank]
            return given
        expand_x, _, index, _, counts, *_ = self.outputs["dispatch"][rank]
        contract = planning.CONTRACTS[one.contract]
        if contract == 2 and not self._servers:  # sent with the rows, which may not have been moved
            index = self.routing.source_indices(rank, index.shape)
        return {
            "expand_x": self._rows("expand_x", len(expand_x), dtype, rank),
            "expert_ids": ids,
            "expand_idx" if contract == 1 else "assist_info_for_combine": index,
            "ep_send_counts": counts,
            "expert_scales": self.routing.weights[rank],
        }

    def _scales(self) -> torch.Tensor:
        """Smooth scales, shared by all ranks."""
        if "scales" not in self._shared:
            self._shared["scales"] = torch.ones(self.request.experts, self.request.hidden)
        return self._shared["scales"]

    def _rows(self, name: str, count: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
        """Rows of a rank; without ``payload`` all ranks share them, and those not moved are not initialized."""
        if self.payload:
            rng = torch.Generator().manual_seed(rank + (1 << 20) * (name == "x"))
            return torch.randn((count, self.request.hidden), generator=rng).to(dtype)
        if name not in self._shared:
            make = torch.empty if self._skips_rows else torch.ones
            self._shared[name] = make((count, self.request.hidden), dtype=dtype)
        return self._shared[name]

    def _describe(self, op: str, rank: int, inputs: Mapping[str, torch.Tensor]) -> Any:
        code = calls.OP_DISPATCH if op == "dispatch" else calls.OP_COMBINE
        shapes = tuple((name, calls.name_of(t.dtype), tuple(t.shape)) for name, t in inputs.items())
        spec = planning.call_spec(code, self.request, shapes, self.request.cores, self._window_mib, rank)
        spec.context_kind = CONTEXT_A2 if self._servers else CONTEXT_TABLE
        spec.ranks_per_server = self._servers
        spec.deadline_micros, spec.registered_mib = 10_000_000, self._registered_mib
        spec.timestamps = int(settings.TIMESTAMPS.get())
        return spec

    def _fill(self, step: _Step, op: str, rank: int) -> None:
        given = self.inputs[op][rank]
        spec = self._describe(op, rank, given)
        self._plans.append(calls.Plan(f"prediction of {op}", spec, library=self._library))
        outputs = []
        for at, (dtype, shape) in enumerate(calls.outputs_of(spec)):
            rows = at == 0 and not self.payload
            shared = self._rows(f"{op} 0", shape[0], dtype or torch.int8, rank) if rows else None
            outputs.append(torch.empty(shape, dtype=dtype) if shared is None else shared)
        self.outputs[op].append(outputs)
        index = {name: at for at, name in enumerate(calls.tensor_names())}
        inputs = (c_void_p * len(index))()
        for name, tensor in given.items():
            inputs[index[name]] = tensor.data_ptr() or None
        if self._registered and op == "combine":
            # the rows in the rank's registered buffer
            address, source = int(self._library.am_timed_registered(self._handle, rank)), given["expand_x"]
            if self.payload:
                ctypes.memmove(address, source.data_ptr(), source.numel() * source.element_size())
            inputs[index["expand_x"]] = address
        targets = (c_void_p * len(outputs))(*(tensor.data_ptr() or None for tensor in outputs))
        self._keep += [inputs, targets]
        step.rank, step.plan = rank, self._plans[-1].handle
        step.inputs, step.outputs = ctypes.addressof(inputs), ctypes.addressof(targets)

    def _lines(self, function: Any) -> list[str]:
        return library.text_of(function, self._handle).splitlines()

    def _raise_what_ranks_report(self, op: str) -> None:
        times, record = (c_double * 2)(), (c_int32 * 64)()
        for rank in range(self.request.ranks):
            if self._library.am_timed_outcome(self._handle, rank, times, record):
                text = ctypes.create_string_buffer(1024)
                self._library.am_error_message(record, text, 1024)
                raise AscendMoeError(f"prediction of {op}: {text.value.decode()}")


class Routing:
    """Uniform routing: every token picks ``topk`` different experts with equal probability.

    Attributes:
        ids, weights: expert ids and weights by rank, (BS, K) int32 and float32 each.
    """

    def __init__(self, request: Request, seed: int = 0) -> None:
        rng = torch.Generator().manual_seed(seed)
        keys = torch.rand((request.ranks, request.batch, request.experts), generator=rng)
        ids = keys.argsort(2)[:, :, : request.topk].to(torch.int32).contiguous()
        self.ids = list(ids)
        self.weights = [torch.rand((request.batch, request.topk), generator=rng) for _ in self.ids]
        # routed tokens by (expert, source rank, token, k): the order of expand_x
        self._order = ids.flatten().argsort(stable=True)
        self._owners = ids.flatten()[self._order] // (request.experts // request.ranks)
        self._shape = ids.shape

    def source_indices(self, rank: int, shape: Sequence[int]) -> torch.Tensor:
        """Return assist_info_for_combine of a rank, int32 in ``shape``: (rank, token, k) of each row, then zeros."""
        pairs = self._order[self._owners == rank].numpy()
        rows = np.stack(np.unravel_index(pairs, self._shape), 1).astype(np.int32)
        out = torch.zeros(tuple(shape), dtype=torch.int32)
        out.view(-1)[: rows.size] = torch.from_numpy(rows.ravel())
        return out


def runnable(request: Request) -> list[str]:
    """Return the algorithms to predict: all but hierarchy; between A2 servers window and, if accepted, hierarchy."""
    if not _rdma_share(request):
        return [name for name in ALGORITHMS if name != "hierarchy"]
    return ["window"] if planning.plan(_as_run(request, "hierarchy")).violations else ["window", "hierarchy"]


def _rdma_share(request: Request) -> int:
    """Ranks per server if servers are connected by RDMA; 0 if stores reach every window."""
    chip = soc_of(request.soc)
    share = request.ranks_per_server or chip.ranks_per_server
    return share if chip.series == "A2" and share < request.ranks else 0
