"""The parts of the kernels that a program reaches, such as rings, chunks and batches after the first.

They follow from the plans of the calls, their ids and their counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ascend_moe.ops import calls

from .program import TWO_LEVELS

if TYPE_CHECKING:
    from .engine import OpCall, PlannedProgram

#: Part -> property of a case that reaches it on at least one core.
REACHED = {
    "histograms": "histograms of the cores in more than one batch",
    "routed tokens": "routed tokens in more than one chunk",
    "send ring": "more rows to send than fit in flight",
    "trailer ring": "more rows with trailers than fit in flight",
    "quantized pieces": "rows that are quantized in pieces",
    "coded pieces": "rows that return as int8 codes (comm_quant_mode 2), coded in pieces",
    "coded parts": "rows of int8 codes to sum, for tokens in several parts",
    "window copies": "more chunks to copy out of the window than fit in flight",
    "gather chunks": "more chunks to gather than fit in flight",
    "lists": "list entries in more than one load",
    "weights": "expert_scales gathered in more than one load",
    "shared rows": "rows that are sent once for several experts",
    "roles": "cores that make the lists",
    "index": "expand_idx in more than one chunk",
    "source indices": "source indices in more than one chunk",
    "return ring": "more chunks to return than fit in flight",
    "sum ring": "more rows to sum than fit in flight",
    "sums": "tokens to sum in more than one chunk",
    "parts": "tokens in several parts",
    "shorter part": "tokens whose last part is shorter",
    "shared in parts": "the shared expert's rows for tokens in several parts",
    "aligned ends": "rows over RDMA, for several local experts",
    "counts by vectors": "W a multiple of 8",
    "records": "rows that are sent once to another server and forwarded there",
    "servers' sums": "sums of tokens from other servers",
    "record batches": "tokens with records in more than two batches",
    "server chunks": "tokens counted by server in more than two chunks",
    "flag loads": "flags of a rank's blocks in more than two loads",
    "times": "ops that add up their wait for each rank",
    "two launches": "ops that send and finish in two launches",
    "lost rank": "ranks that continue as a group after another was killed",
}


def reached(program: PlannedProgram) -> set[str]:
    """Return the parts of the kernels that the program's calls reach, by the names of `REACHED`."""
    found = {name for call in program.calls for name, yes in _Reach(program, call).all() if yes}
    return found | ({"two launches"} if set(program.program.sequence) & set("dc") else set())


@dataclass(frozen=True)
class _Reach:
    program: PlannedProgram
    call: OpCall

    def all(self) -> Iterator[tuple[str, bool]]:
        """Yield the parts of this call, and whether they are reached."""
        case, tiling = self.program.program, self.call.tiling
        dispatch, window = self.call.op == calls.OP_DISPATCH, self.call.algorithm == "window"
        pairs, roles = max(self._pairs()), bool(tiling.get("list_cores"))
        yield "routed tokens", pairs > tiling["chunk_pairs"] and not roles
        yield "aligned ends", window and bool(tiling["transport"]) and case.local > 1 and self._rows() > 0
        yield "counts by vectors", case.world % 8 == 0 and case.cores > 1
        yield "times", case.measured
        if self.call.algorithm == TWO_LEVELS:
            tokens = max(end - begin for begin, end in self._shares(len(self._ids())))
            yield "records" if dispatch else "servers' sums", self._crosses()
            record_tokens = max(1, min(32, 256 // case.topk))  # whose records fit into UB together, as RecordTokens()
            yield "record batches", dispatch and tokens > 2 * record_tokens
            yield "server chunks", tokens > 2 * (tiling["chunk_pairs"] // case.topk)
            return
        yield "flag loads", case.flags and self._inter_node_bytes() > 2 * self.FLAGS_BYTES
        if window or (dispatch and not roles):
            yield "histograms", tiling["histograms"] < case.cores
        yield from self._dispatch(window) if dispatch else self._combine(window)

    def _dispatch(self, window: bool) -> Iterator[tuple[str, bool]]:
        case, tiling = self.program.program, self.call.tiling
        routed = max(self._routed())
        yield "quantized pieces", bool(case.quant_mode) and case.hidden > tiling["quant_piece"]
        if window:
            yield "send ring", routed > tiling["send_ring"]
            yield "trailer ring", 0 < tiling["trailer_ring"] < routed
            yield "window copies", max(self._chunks(tiling["copy_rows"])) > tiling["copy_ring"]
            return
        yield "roles", bool(tiling["list_cores"])
        rows = len(self._ids()) * (case.topk if case.smooth else 1)
        yield "send ring", math.ceil(rows / (case.cores - tiling["list_cores"])) > tiling["send_ring"]
        yield "weights", case.weights and max(self._chunks(self.WEIGHT_ROWS)) > 1
        yield "shared rows", bool(tiling["shared_lanes"]) and self._rows() > 0
        share = math.ceil(self._rows() / case.cores)
        if tiling["shared_lanes"]:
            yield "lists", self._rows() > tiling["shared_lanes"]
            yield "gather chunks", share > tiling["copy_ring"]
        else:
            yield "lists", share > tiling["chunk_pairs"]
            yield "gather chunks", math.ceil(share / tiling["copy_rows"]) > tiling["copy_ring"]

    def _combine(self, window: bool) -> Iterator[tuple[str, bool]]:
        case, tiling = self.program.program, self.call.tiling
        by_source = case.contract == 2 and not tiling["transport"]
        share = math.ceil(self._rows() / case.cores)
        yield "index", not by_source and max(self._pairs()) > tiling["chunk_pairs"]
        yield "source indices", by_source and share > tiling["chunk_pairs"]
        if not window:
            rows = math.ceil(share / tiling["send_rows"])
            yield "return ring", not self.call.registered and rows > tiling["return_ring"]
        elif by_source:
            yield "return ring", math.ceil(share / tiling["send_rows"]) > tiling["return_ring"]
        else:
            yield "return ring", max(self._chunks(tiling["send_rows"])) > tiling["return_ring"]
        items = math.ceil(len(self._ids()) * tiling["parts_per_token"] / case.cores)
        parts = tiling["parts_per_token"] > 1 and items > 0
        yield "sum ring", items * case.topk > tiling["sum_ring"] and max(self._routed()) > 0
        yield "sums", items > tiling["chunk_tokens"] * tiling["parts_per_token"]
        yield "parts", parts
        yield "shorter part", parts and case.hidden % tiling["part_elements"] != 0
        yield "shared in parts", parts and bool(case.shared)
        yield "coded pieces", case.returns_int8 and case.hidden > tiling["quant_piece"]
        yield "coded parts", parts and case.returns_int8

    def _crosses(self) -> bool:
        """Whether rows of ranks of other servers have arrived."""
        sources = self.call.result.assist_info[:, 0] // self.program.program.servers
        return bool((sources != self.call.rank // self.program.program.servers).any())

    def _inter_node_bytes(self) -> int:
        """Largest number of bytes of rows exchanged with a rank of another server, without trailers."""
        case, ends = self.program.program, self._ends()
        counts = [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
        others = [rank for rank in range(case.world) if rank // case.servers != self.call.rank // case.servers]
        quantized = case.returns_int8 if self.call.op == calls.OP_COMBINE else case.quant_mode
        size = 1 if quantized else case.torch_dtype.itemsize
        return max((sum(counts[rank :: case.world]) for rank in others), default=0) * case.hidden * size

    WEIGHT_ROWS = 64  # kWeightRows
    FLAGS_BYTES = 128 * 480  # of rows: kFlagsAtOnce blocks

    # ---- shares of the cores

    def _ids(self) -> torch.Tensor:
        return self.call.inputs["expert_ids"]

    def _shares(self, whole: int) -> list[tuple[int, int]]:
        cores = self.program.program.cores
        return [(whole * core // cores, whole * (core + 1) // cores) for core in range(cores)]

    def _pairs(self) -> list[int]:
        """Return the number of (token, k) of each core."""
        batch, topk = self._ids().shape
        unit = topk if batch >= self.program.program.cores or self.call.algorithm != "window" else 1
        return [(end - begin) * unit for begin, end in self._shares(batch * topk // unit)]

    def _routed(self) -> list[int]:
        """Return the number of routed tokens of each core."""
        ids, mask = self._ids(), self.call.inputs.get("x_active_mask")
        routed = ids >= 0
        if mask is not None:
            routed = routed & (mask if mask.dim() == 2 else mask[:, None])
        flat, at, counts = routed.reshape(-1), 0, []
        for pairs in self._pairs():
            counts.append(int(flat[at : at + pairs].sum()))
            at += pairs
        return counts

    def _rows(self) -> int:
        """Rows of expand_x."""
        return self._ends()[-1]

    def _ends(self) -> list[int]:
        """Return the end of the rows of each (local expert, source)."""
        ends: list[int] = self.call.result.ep_recv_counts[: self.program.program.experts].tolist()
        return ends

    def _chunks(self, most: int) -> list[int]:
        """Return each core's chunks: runs of at most so many rows of its share, each of one (local expert, source)."""
        ends = self._ends()
        segments = list(zip([0, *ends[:-1]], ends, strict=True))
        return [
            sum(math.ceil(max(0, min(stop, end) - max(begin, start)) / most) for start, end in segments)
            for begin, stop in self._shares(self._rows())
        ]
