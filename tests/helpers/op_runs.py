"""Runs the cases of ``op_cases`` on ranks and compares what comes out with the reference."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from op_cases import Case

import ascend_moe
import ascend_moe.reference as ref
from ascend_moe import comm
from ascend_moe.errors import AscendMoeError
from ascend_moe.ops import calls


@dataclass
class RankRun:
    """Of one rank: dispatch's outputs, the rows it gave to combine, the result, bytes moved by both ops."""

    dispatched: tuple[torch.Tensor, ...]
    rows: torch.Tensor
    result: torch.Tensor
    traffic: list[dict[str, int]]


class Clusters:
    """One LocalCluster a world size, opened on first use and kept."""

    def __init__(self) -> None:
        self._open: dict[int, comm.LocalCluster] = {}

    def __getitem__(self, world: int) -> comm.LocalCluster:
        if world not in self._open:
            self._open[world] = comm.LocalCluster(world).__enter__()
        return self._open[world]

    def close(self) -> None:
        for cluster in self._open.values():
            cluster.__exit__(None, None, None)
        self._open.clear()


@contextmanager
def cores(count: int) -> Iterator[None]:
    """AIV cores a launch."""
    before = os.environ.get("ASCEND_MOE_AIV_CORES")
    os.environ["ASCEND_MOE_AIV_CORES"] = str(count)
    try:
        yield
    finally:
        del os.environ["ASCEND_MOE_AIV_CORES"]
        if before is not None:
            os.environ["ASCEND_MOE_AIV_CORES"] = before


def dispatch(case: Case, rank: int, group_ep: str) -> tuple[torch.Tensor, ...]:
    one, world = case.inputs[rank], case.world
    op = (
        ascend_moe.npu_moe_distribute_dispatch
        if case.contract == 1
        else ascend_moe.npu_moe_distribute_dispatch_v2
    )
    outputs: tuple[torch.Tensor, ...] = op(
        one.x,
        one.expert_ids,
        group_ep,
        world,
        rank,
        case.experts,
        scales=one.scales,
        x_active_mask=one.x_active_mask,
        expert_scales=one.expert_scales if case.weights_to_dispatch else None,
        tp_world_size=case.tp,
        quant_mode=case.quant_mode,
        global_bs=case.global_bs,
        expert_token_nums_type=case.nums_type,
    )
    return outputs


def combine(
    case: Case, rank: int, group_ep: str, rows: torch.Tensor, sent: Sequence[torch.Tensor]
) -> torch.Tensor:
    """``sent``: dispatch's outputs. What only CANN reads is passed as its callers do, uninitialised."""
    one = case.inputs[rank]
    op = (
        ascend_moe.npu_moe_distribute_combine
        if case.contract == 1
        else ascend_moe.npu_moe_distribute_combine_v2
    )
    result: torch.Tensor = op(
        rows,
        one.expert_ids,
        sent[2],
        sent[4],
        one.expert_scales,
        group_ep,
        case.world,
        rank,
        case.experts,
        tp_send_counts=torch.empty(1, dtype=torch.int32) if case.tp else sent[5],
        x_active_mask=one.x_active_mask,
        expand_scales=sent[6],
        shared_expert_x=one.shared_expert_x,
        tp_world_size=case.tp,
        global_bs=case.global_bs,
    )
    return result


def expert_rows(case: Case, rank: int, sent: Sequence[torch.Tensor]) -> torch.Tensor:
    """Any function of a row and its expert, in x's dtype."""
    counts = sent[4][: case.experts]
    total = int(counts[-1])
    ends = counts[case.world - 1 :: case.world].contiguous()
    expert = torch.searchsorted(ends, torch.arange(total, dtype=torch.int32), right=True)
    weight = (1 + (expert + rank * ends.numel()).float() / 7)[:, None]
    rows = sent[0][:total].float()
    if case.quant_mode:
        rows = rows * sent[1][:total, None]
    rows = (rows * weight + weight / 3).to(case.dtype)
    if not case.tail:
        return rows
    whole = torch.full((sent[0].shape[0], rows.shape[1]), float("nan"), dtype=case.dtype)
    whole[:total] = rows
    return whole


def run_rank(case: Case, rank: int, group_ep: str) -> RankRun | AscendMoeError:
    """One rank's dispatch and combine. A collective error is a result: the communicator stays usable."""
    try:
        sent = dispatch(case, rank, group_ep)
        end = comm.lookup(group_ep, case.world, rank)
        moved = [calls.traffic(end)]
        rows = expert_rows(case, rank, sent)
        result = combine(case, rank, group_ep, rows, sent)
        return RankRun(sent, rows, result, [*moved, calls.traffic(end)])
    except AscendMoeError as error:
        return error


def run(cluster: comm.LocalCluster, case: Case) -> list[RankRun | AscendMoeError]:
    with cores(case.cores):
        return cluster.run(lambda rank, group_ep: run_rank(case, rank, group_ep))


# ---- comparing


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal dtype, shape and bits; NaN where NaN is."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    view = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    if torch.equal(got.view(view), want.view(view)):
        return True
    if not got.dtype.is_floating_point:
        return False
    unequal = got.view(view) != want.view(view)
    return not bool((unequal & ~(got.isnan() & want.isnan())).any())


def expected_dispatch(case: Case) -> list[ref.DispatchResult]:
    return ref.dispatch(
        case.inputs,
        moe_expert_num=case.experts,
        quant_mode=case.quant_mode,
        global_bs=case.global_bs,
        expert_token_nums_type=case.nums_type,
        tp_world_size=case.tp,
        expert_scales_given=case.weights_to_dispatch,
    )


def check(case: Case, runs: Sequence[RankRun | AscendMoeError]) -> None:
    """Every rank equals the reference in every bit and byte moved, or raises the error that it predicts."""
    fault = ref.check(case.inputs, case.experts, case.global_bs)
    if fault is not None:
        check_fault(fault, runs)
        return
    good: list[RankRun] = []
    for one in runs:
        if isinstance(one, BaseException):
            raise AssertionError(f"a sound call raised {one!r}") from one
        good.append(one)
    expected = expected_dispatch(case)
    for rank, one in enumerate(good):
        report = ref.validate(
            "dispatch",
            one.dispatched,
            expected[rank],
            rank=rank,
            quantised=case.quant_mode != 0,
            contract=f"v{case.contract}",
            exact_shapes=True,
        )
        assert report.ok, report.text
    rows = [one.rows for one in good]
    sums = ref.combine(case.inputs, rows, expected, moe_expert_num=case.experts, global_bs=case.global_bs)
    for rank, one in enumerate(good):
        report = ref.validate("combine", one.result, sums[rank], rank=rank)
        assert report.ok, report.text
    check_traffic(case, good)


def check_fault(fault: ref.Fault, runs: Sequence[Any]) -> None:
    """Every rank raises this fault: its class and all its fields, none of them missing."""
    fields = {name: value for name, value in vars(fault).items() if value is not None and name != "kind"}
    for rank, error in enumerate(runs):
        assert type(error).__name__ == fault.kind, f"rank {rank}: {error!r}, expected {fault}"
        assert error.details == fields, f"rank {rank}: {error.details}, expected {fault}"


def check_traffic(case: Case, runs: Sequence[RankRun]) -> None:
    """Bytes through the MTE pipes are those of the rows, the outputs and nothing else."""
    predicted = ref.predict_traffic(
        case.inputs,
        moe_expert_num=case.experts,
        H=case.inputs[0].x.shape[1],
        dtype=case.dtype,
        quant_mode=case.quant_mode,
        contract=f"v{case.contract}",
        global_bs=case.global_bs,
    )
    local = case.experts // case.world
    for rank, (one, want) in enumerate(zip(runs, predicted, strict=True)):
        rows = int(one.dispatched[4][case.experts - 1])
        index = 4 * case.inputs[rank].expert_ids.numel() if case.contract == 1 else 12 * rows
        counts = 4 * case.experts + 8 * local + 4 * case.tp
        wanted = [
            ("written_window_data", want.dispatch_window_write),
            ("read_window_data", want.dispatch_window_read),
            ("written_tensor", want.expand_x_write + (4 * rows if case.quant_mode else 0) + index + counts),
        ]
        assert [(name, one.traffic[0][name]) for name, _ in wanted] == wanted, f"dispatch on rank {rank}"
        wanted = [
            ("written_window_data", want.combine_window_write),
            ("read_window_data", want.combine_window_read),
            ("written_tensor", one.result.numel() * one.result.element_size()),
        ]
        assert [(name, one.traffic[1][name]) for name, _ in wanted] == wanted, f"combine on rank {rank}"
