"""A case as calls with tensors, and what the reference says comes out of each."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch

import ascend_moe.reference as ref
from ascend_moe import ops  # noqa: F401  (ops registers the schemas)
from ascend_moe.comm.communicator import CONTEXTS, MIB
from ascend_moe.errors import AscendMoeError
from ascend_moe.ops import calls as native
from ascend_moe.ops.schemas import NAMESPACE

from .case import DTYPES, Case

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
    lent: int = 0  # as Case.lent
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


def build_inputs(case: Case, round_: int) -> list[ref.RankInput]:
    """The ranks' tensors of the case's ``round_``-th dispatch: each round other values and other routes."""
    rng = torch.Generator().manual_seed(case.seed * 7919 + round_)

    def pick(low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=rng, dtype=torch.int32)

    scales = None
    if case.quant == "smooth":
        scales = torch.rand((case.experts, case.hidden), generator=rng) + 0.5
    inputs = []
    for _ in range(case.world):
        tokens = int(pick(0, case.batch + 1, (1,))) if case.ragged else case.batch
        shape = (tokens, case.topk)
        ids = pick(-1 if case.ids == "minus" else 0, case.experts, shape)
        if case.ids == "distinct":
            ids = torch.rand((tokens, case.experts), generator=rng).argsort(1)[:, : case.topk].to(torch.int32)
        elif case.ids == "hot":
            ids = torch.where(torch.rand(shape, generator=rng) < 0.7, case.seed % case.experts, ids).to(
                torch.int32
            )
        elif case.ids == "zero":
            ids = torch.full(shape, -1, dtype=torch.int32)
        ids = _within_capacity(ids, case)
        mask = None
        if case.mask != "none":
            mask = torch.rand((tokens,) if case.mask == "token" else shape, generator=rng) < 0.7
        inputs.append(
            ref.RankInput(
                x=torch.randn((tokens, case.hidden), generator=rng).to(DTYPES[case.dtype]),
                expert_ids=ids,
                scales=scales,
                x_active_mask=mask,
                expert_scales=torch.rand(shape, generator=rng),
            )
        )
    return inputs


def _within_capacity(ids: torch.Tensor, case: Case) -> torch.Tensor:
    """Rows over an owner's capacity, max BS * min(K, L), go nowhere."""
    most = max(case.batch, 1) * min(case.topk, case.local)
    flat, sent = ids.flatten(), [0] * case.world
    for at, expert in enumerate(flat.tolist()):
        if expert < 0:
            continue
        sent[expert // case.local] += 1
        if sent[expert // case.local] > most:
            flat[at] = -1
    return flat.reshape(ids.shape)


class Program:
    """All calls of a case in the order in which each rank makes them, planned for the checked library."""

    def __init__(self, case: Case, library: ctypes.CDLL, window_bytes: int = WINDOW_MIB * MIB) -> None:
        self.case, self._library, self._window_bytes = case, library, window_bytes
        self.calls: list[Call] = []
        open_dispatches: list[tuple[list[ref.RankInput], list[Call]]] = []
        self._number, self._algorithm = 0, ""
        for number, op in enumerate(case.sequence):
            self._number, self._algorithm = number, case.algorithm_of(number)
            if op == "D":
                open_dispatches.append(self._dispatch(len(open_dispatches) + len(self.calls)))
            else:
                self._combine(*open_dispatches.pop(0))

    def _global_bs(self) -> int:
        return self.case.world * max(self.case.batch, 1) if self.case.ragged else 0

    def _suffix(self) -> str:
        return "" if self.case.contract == 1 else "_v2"

    def _common(self, rank: int) -> dict[str, int]:
        return {
            "ep_world_size": self.case.world,
            "ep_rank_id": rank,
            "moe_expert_num": self.case.experts,
            "global_bs": self._global_bs(),
        }

    def _dispatch(self, round_: int) -> tuple[list[ref.RankInput], list[Call]]:
        case = self.case
        inputs = build_inputs(case, round_)
        quant_mode = 0 if case.quant == "none" else 2
        results = ref.dispatch(
            inputs, moe_expert_num=case.experts, quant_mode=quant_mode, global_bs=self._global_bs()
        )
        calls = []
        for rank, (one, want) in enumerate(zip(inputs, results, strict=True)):
            name = f"npu_moe_distribute_dispatch{self._suffix()}"
            given = {"x": one.x, "expert_ids": one.expert_ids}
            if one.scales is not None:
                given["scales"] = one.scales
            if one.x_active_mask is not None:
                given["x_active_mask"] = one.x_active_mask
            call = Call(
                rank, name, given, attributes_of(name, {**self._common(rank), "quant_mode": quant_mode})
            )
            # Between servers both contracts have V1's expand_idx.
            triples = case.contract == 2 and not 0 < case.servers < case.world
            index = want.assist_info.flatten() if triples else want.expand_idx
            call.expected = {0: want.expand_x, 2: index, 3: want.expert_token_nums, 4: want.ep_recv_counts}
            if want.dynamic_scales is not None:
                call.expected[1] = want.dynamic_scales
            call.result = want
            self._plan(call, native.OP_DISPATCH)
            calls.append(call)
        self.calls += calls
        return inputs, calls

    def _combine(self, inputs: list[ref.RankInput], dispatched: list[Call]) -> None:
        case = self.case
        results = [call.result for call in dispatched]
        rows = []
        for rank, result in enumerate(results):
            rng = torch.Generator().manual_seed(case.seed * 104729 + len(self.calls) + rank)
            made = torch.randn((result.expand_x.shape[0], case.hidden), generator=rng).to(DTYPES[case.dtype])
            rows.append(made)
        want = ref.combine(inputs, rows, results, moe_expert_num=case.experts, global_bs=self._global_bs())
        for rank, (one, sent) in enumerate(zip(inputs, dispatched, strict=True)):
            name = f"npu_moe_distribute_combine{self._suffix()}"
            expand_x = torch.zeros(tuple(sent.outputs[0].shape), dtype=DTYPES[case.dtype])
            expand_x[: rows[rank].shape[0]] = rows[rank]
            assert one.expert_scales is not None  # build_inputs gives them
            given = {
                "expand_x": expand_x,
                "expert_ids": one.expert_ids,
                "expand_idx" if case.contract == 1 else "assist_info_for_combine": sent.outputs[2],
                "ep_send_counts": sent.outputs[4],
                "expert_scales": one.expert_scales,
            }
            if one.x_active_mask is not None:
                given["x_active_mask"] = one.x_active_mask
            call = Call(rank, name, given, attributes_of(name, self._common(rank)))
            call.expected = {0: want[rank]}
            call.lent = case.lent(self._number, rank)
            self._plan(call, native.OP_COMBINE)
            self.calls.append(call)

    def _plan(self, call: Call, op: int) -> None:
        shapes = tuple((name, t.dtype, tuple(t.shape)) for name, t in call.inputs.items())
        spec = native.describe(op, self.case.contract, GROUP, self._algorithm, shapes, call.attributes)
        spec.comm_world, spec.comm_rank = self.case.world, call.rank
        spec.window_mib, spec.cores = self._window_bytes // MIB, self.case.cores
        spec.lent_mib = LENT_MIB
        spec.tuned_role_cores = self.case.list_cores if op == native.OP_DISPATCH else self.case.copy_cores
        spec.deadline_micros = _DEADLINE_MICROS
        spec.context_kind = CONTEXTS.index("a2" if self.case.servers else "table")
        spec.ranks_per_server = self.case.servers
        check = native.CheckResult()
        call.plan = self._library.am_plan_create(ctypes.byref(spec), ctypes.byref(check))
        if not call.plan:
            raise AscendMoeError(f"explore: {self.case}: {call.name}: {check.message.decode()}")
        call.outputs = [torch.zeros(shape, dtype=dtype) for dtype, shape in native.outputs_of(spec)]
        call.inputs = {name: tensor.contiguous() for name, tensor in call.inputs.items()}

    def close(self) -> None:
        """Gives the plans back."""
        for call in self.calls:
            if call.plan:
                self._library.am_plan_destroy(call.plan)
            call.plan = None
