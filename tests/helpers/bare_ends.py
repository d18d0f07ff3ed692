"""One rank's end of a communicator by the C interface alone, and ops of it whose arguments nobody checks."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from ascend_moe import plan
from ascend_moe.native.library import lib
from ascend_moe.native.windows import CONTEXT_A2, MIB
from ascend_moe.ops import calls
from ascend_moe.plan import Request

WHOLE, SEND, FINISH = 0, 1, 2  # kPartWhole, kPartSend, kPartFinish


class Planned(calls.Plan):
    """A plan, with the dtype and shape of each output."""

    def __init__(self, op: str, spec: Any) -> None:
        super().__init__(op, spec)
        self.outputs = calls.outputs_of(spec)


def plan_of(
    op: str,
    kind: int,
    world: int,
    rank: int,
    mib: int,
    part: int = WHOLE,
    algorithm: str = "window",
    deadline_micros: int = 1000,
) -> Planned:
    """For whoever the call says that it is. The default deadline is for ops that no other rank joins."""
    request = Request(ranks=world, experts=12, topk=2, hidden=32, batch=2, cores=3)
    spec = plan.describe(op, request, algorithm)
    spec.attributes[calls.attribute_names().index("ep_rank_id")] = rank
    spec.comm_rank, spec.window_mib = rank, mib
    spec.context_kind, spec.deadline_micros, spec.part = kind, deadline_micros, part
    return Planned(op, spec)


@dataclass
class Bare:
    """One rank's end of a communicator of `world`, without any Python around it."""

    world: int
    rank: int
    kind: int
    data_bytes: int = MIB
    fill: int = 0x5A

    def __post_init__(self) -> None:
        self.total = lib().am_window_total_bytes(self.data_bytes, 0)
        self.bases = [lib().am_window_alloc(self.total) for _ in range(self.world)]
        for base in self.bases:
            ctypes.memset(base, self.fill, self.total)
        table = (ctypes.c_void_p * self.world)(*self.bases)
        self.handle = lib().am_comm_create(self.rank, self.world, table, self.data_bytes, 0, None)
        assert lib().am_comm_use_context(self.handle, self.kind) == 0

    def windows(self) -> list[bytes]:
        """Without the first page, which is the twin's own and says whether a rank is in an op."""
        return [ctypes.string_at(base + 4096, self.total - 4096) for base in self.bases]

    def words(self, rank: int, offset: int, count: int) -> Any:
        """Words of a rank's state area, which may be set."""
        layout = (ctypes.c_uint64 * 3)()
        lib().am_window_layout(self.world, layout)
        behind = self.data_bytes if self.kind == CONTEXT_A2 else 0  # A2: the state comes last
        return (ctypes.c_uint32 * count).from_address(self.bases[rank] + layout[1] + behind + offset)

    def state(self, rank: int, offset: int, count: int) -> list[int]:
        """Words of a rank's state area."""
        return list(self.words(rank, offset, count))

    def run(self, planned: Planned, record: Any = None, byte: int = 0, without: str = "") -> tuple[int, str]:
        """Launch an op. Returns its error code, and what stopped the kernel.

        Args:
            planned: the op.
            record: the words of the error record.
            byte: of which all inputs are made.
            without: an input whose memory is missing.
        """
        names = calls.tensor_names()
        room = torch.full((1 << 16,), byte, dtype=torch.uint8)
        inputs = (ctypes.c_void_p * len(names))(*(None if name == without else room.data_ptr() for name in names))
        kept = [torch.zeros(shape, dtype=dtype) for dtype, shape in planned.outputs]
        outputs = (ctypes.c_void_p * len(kept))(*(tensor.data_ptr() for tensor in kept))
        record = record or (ctypes.c_int32 * lib().am_error_record_words())()
        fault = ctypes.create_string_buffer(1024)
        code = lib().am_run(self.handle, planned.handle, inputs, outputs, record, fault, 1024)
        return code, fault.value.decode()

    def close(self) -> None:
        lib().am_comm_destroy(self.handle)
        for base in self.bases:
            lib().am_window_unmap(base, self.total)
