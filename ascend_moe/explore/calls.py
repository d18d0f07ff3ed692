"""A program as planned calls with tensors, and what the reference says comes out of each."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch

from ascend_moe import ops  # noqa: F401  (ops registers the schemas)
from ascend_moe.comm.communicator import CONTEXTS, MIB
from ascend_moe.errors import AscendMoeError
from ascend_moe.ops import calls as native
from ascend_moe.ops.schemas import NAMESPACE

from ..reference.cases import Case
from .program import Program

GROUP = "explore"
WINDOW_MIB = LENT_MIB = 1
_DEADLINE_MICROS = 60_000_000  # of time that passes only when nothing can move


@dataclass
class Call:
    """One op of one rank: its tensors, and its expected outputs as (output, tensor) of the defined part."""

    rank: int
    name: str
    inputs: dict[str, torch.Tensor]
    attributes: dict[str, int | None]
    outputs: list[torch.Tensor] = field(default_factory=list)
    expected: dict[int, torch.Tensor] = field(default_factory=dict)
    plan: int | None = None
    lent: int = 0  # as Program.lent
    result: Any = None  # a dispatch's: the reference's whole result


def attributes_of(name: str, given: dict[str, int]) -> dict[str, int | None]:
    """All integer attributes of an op in its schema's order, defaults filled in."""
    schema = getattr(getattr(torch.ops, NAMESPACE), name).default._schema
    found: dict[str, int | None] = {}
    for argument in schema.arguments:
        if "int" in str(argument.type):
            default = argument.default_value if argument.has_default_value() else None
            found[argument.name] = given.get(argument.name, default)
    return found


class PlannedProgram:
    """All calls of a program in the order in which each rank makes them, planned for the checked library."""

    def __init__(self, program: Program, library: ctypes.CDLL, window_bytes: int = WINDOW_MIB * MIB) -> None:
        self.program, self._library, self._window_bytes = program, library, window_bytes
        self.calls: list[Call] = []
        open_dispatches: list[tuple[Case, list[Call]]] = []
        self._number, self._algorithm = 0, ""
        for number, op in enumerate(program.sequence):
            self._number, self._algorithm = number, program.algorithm_of(number)
            if op == "D":
                open_dispatches.append(self._dispatch(program.case_of(number)))
            else:
                self._combine(*open_dispatches.pop(0))

    def _name(self, op: str) -> str:
        return f"npu_moe_distribute_{op}" + ("" if self.program.contract == 1 else "_v2")

    def _common(self, rank: int) -> dict[str, int]:
        return {
            "ep_world_size": self.program.world,
            "ep_rank_id": rank,
            "moe_expert_num": self.program.experts,
            "global_bs": self.program.global_bs,
        }

    def _dispatch(self, case: Case) -> tuple[Case, list[Call]]:
        calls, name = [], self._name("dispatch")
        for rank, (inputs, want) in enumerate(zip(case.inputs, case.dispatched(), strict=True)):
            given = {"x": inputs.x, "expert_ids": inputs.expert_ids}
            given |= {} if inputs.scales is None else {"scales": inputs.scales}
            given |= {} if inputs.x_active_mask is None else {"x_active_mask": inputs.x_active_mask}
            attributes = attributes_of(name, {**self._common(rank), "quant_mode": case.quant_mode})
            call = Call(rank, name, given, attributes)
            # Between servers both contracts have V1's expand_idx.
            triples = case.contract == 2 and not 0 < self.program.servers < case.world
            index = want.assist_info.flatten() if triples else want.expand_idx
            call.expected = {0: want.expand_x, 2: index, 3: want.expert_token_nums, 4: want.ep_recv_counts}
            if want.dynamic_scales is not None:
                call.expected[1] = want.dynamic_scales
            call.result = want
            self._plan(call, native.OP_DISPATCH)
            calls.append(call)
        self.calls += calls
        return case, calls

    def _combine(self, case: Case, dispatched: list[Call]) -> None:
        results, name = [call.result for call in dispatched], self._name("combine")
        rows = [
            case.expert_rows(rank, result.expand_x, result.dynamic_scales, result.ep_recv_counts)
            for rank, result in enumerate(results)
        ]
        want = case.combined(rows, results)
        for rank, (inputs, sent) in enumerate(zip(case.inputs, dispatched, strict=True)):
            expand_x = torch.zeros(tuple(sent.outputs[0].shape), dtype=case.torch_dtype)
            expand_x[: rows[rank].shape[0]] = rows[rank]
            assert inputs.expert_scales is not None  # every case has them
            given = {
                "expand_x": expand_x,
                "expert_ids": inputs.expert_ids,
                "expand_idx" if case.contract == 1 else "assist_info_for_combine": sent.outputs[2],
                "ep_send_counts": sent.outputs[4],
                "expert_scales": inputs.expert_scales,
            }
            given |= {} if inputs.x_active_mask is None else {"x_active_mask": inputs.x_active_mask}
            call = Call(rank, name, given, attributes_of(name, self._common(rank)))
            call.expected = {0: want[rank]}
            call.lent = self.program.lent(self._number, rank)
            self._plan(call, native.OP_COMBINE)
            self.calls.append(call)

    def _plan(self, call: Call, op: int) -> None:
        shapes = tuple((name, t.dtype, tuple(t.shape)) for name, t in call.inputs.items())
        spec = native.describe(op, self.program.contract, GROUP, self._algorithm, shapes, call.attributes)
        spec.comm_world, spec.comm_rank = self.program.world, call.rank
        spec.window_mib, spec.cores = self._window_bytes // MIB, self.program.cores
        spec.lent_mib, spec.list_cores = LENT_MIB, self.program.list_cores
        spec.deadline_micros = _DEADLINE_MICROS
        spec.context_kind = CONTEXTS.index("a2" if self.program.servers else "table")
        spec.ranks_per_server = self.program.servers
        check = native.CheckResult()
        call.plan = self._library.am_plan_create(ctypes.byref(spec), ctypes.byref(check))
        if not call.plan:
            raise AscendMoeError(f"explore: {self.program}: {call.name}: {check.message.decode()}")
        call.outputs = [torch.zeros(shape, dtype=dtype) for dtype, shape in native.outputs_of(spec)]
        call.inputs = {name: tensor.contiguous() for name, tensor in call.inputs.items()}

    def close(self) -> None:
        """Gives the plans back."""
        for call in self.calls:
            if call.plan:
                self._library.am_plan_destroy(call.plan)
            call.plan = None
