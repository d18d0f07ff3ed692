"""Runs cases on ranks and compares what comes out with the reference."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import ascend_moe.reference as ref
from ascend_moe import LocalCluster, comm
from ascend_moe.errors import AscendMoeError
from ascend_moe.native.windows import ranks_per_server
from ascend_moe.ops import calls
from ascend_moe.reference.cases import Case, draw
from ascend_moe.validate import run as validate_run
from ascend_moe.validate.run import DevicePlace

CROWDED_S = "240"  # a deadline where hundreds of threads take turns on a busy machine
Register = Callable[[Case, int, str, torch.Tensor, int], torch.Tensor]


@dataclass
class RankRun:
    """Holds a rank's dispatch outputs, its rows for combine, the result; of both ops bytes moved and algorithm."""

    dispatched: tuple[torch.Tensor, ...]
    rows: torch.Tensor
    result: torch.Tensor
    traffic: list[dict[str, int]]
    algorithms: tuple[str, str] = ("window", "window")


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


def cores(count: int) -> Any:
    """Within it: AIV cores a launch."""
    return mock.patch.dict(os.environ, ASCEND_MOE_AIV_CORES=str(count))


def dispatch(case: Case, rank: int, group_ep: str, **call: validate_run.Call) -> tuple[torch.Tensor, ...]:
    """``call`` makes it, where that is given."""
    return validate_run.dispatch(DevicePlace(group_ep, case.world, rank), case, **call)


def combine(
    case: Case, rank: int, group_ep: str, rows: torch.Tensor, sent: Sequence[torch.Tensor], **call: validate_run.Call
) -> torch.Tensor:
    """``sent``: dispatch's outputs. What only CANN reads is passed as its callers do, uninitialised."""
    other: dict[str, Any] = {"tp_send_counts": torch.empty(1, dtype=torch.int32)} if case.tp_world_size else {}
    return validate_run.combine(DevicePlace(group_ep, case.world, rank), case, rows, sent, **other, **call)


def expert_rows(case: Case, rank: int, sent: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns what the experts of a rank make of dispatch's outputs."""
    return case.expert_rows(rank, sent[0], sent[1], sent[4])


def run_rank(
    case: Case, rank: int, group_ep: str, register: Register | None = None, call: validate_run.Call | None = None
) -> RankRun | AscendMoeError:
    """One rank's dispatch and combine. A collective error is a result: the communicator stays usable.

    ``register`` puts the rows for combine where it gets them: (case, rank, group_ep, rows, rows at most) -> rows.
    ``call`` makes both calls, where that is given.
    """
    made = {"call": call} if call else {}
    try:
        sent = dispatch(case, rank, group_ep, **made)
        end = comm.lookup(group_ep, case.world, rank)
        moved, first = [calls.traffic(end)], end.algorithm
        rows = expert_rows(case, rank, sent)
        given = register(case, rank, group_ep, rows, sent[0].shape[0]) if register else rows
        result = combine(case, rank, group_ep, given, sent, **made)
        return RankRun(sent, rows, result, [*moved, calls.traffic(end)], (first, end.algorithm))
    except AscendMoeError as error:
        return error


def run(
    cluster: comm.LocalCluster, case: Case, register: Register | None = None, call: validate_run.Call | None = None
) -> list[RankRun | AscendMoeError]:
    with cores(case.cores):
        return cluster.run(lambda rank, group_ep: run_rank(case, rank, group_ep, register, call))


# ---- comparing


def check(case: Case, runs: Sequence[RankRun | AscendMoeError], traffic: Callable[..., None] | None = None) -> bool:
    """Every rank equals the reference in every bit and byte moved, or raises the error that it predicts.

    ``traffic`` stands for ``check_traffic``. Returns whether the call was a sound one.
    """
    fault = case.fault()
    if fault is not None:
        check_fault(fault, runs)
        return False
    good: list[RankRun] = []
    for outcome in runs:
        if isinstance(outcome, BaseException):
            raise AssertionError(f"a sound call raised {outcome!r}") from outcome
        good.append(outcome)
    expected = case.dispatched()
    for rank, one in enumerate(good):
        options = {"quantized": case.quant_mode != 0, "exact_shapes": True}
        check_dispatch(case.contract, rank, one.dispatched, expected[rank], share=case.share, **options)
    check_sums(case, good, expected)
    if not 0 < ranks_per_server() < case.world:
        (traffic or check_traffic)(case, good)
    return True


def check_drawn(seeds: Iterable[int], world: int, window_mib: int, **choices: Sequence[Any]) -> None:
    """Runs the case of each seed that has so many ranks, sound or with bad ids, and checks it; ``choices``: of draw."""
    with LocalCluster(world, window_mib=window_mib) as cluster:
        for seed in seeds:
            case = draw(
                seed,
                world=(world,),
                local=(1, 2, 3),
                topk=(1, 2, 3, 4),
                batch=range(7),
                cores=(1, 2, 8),
                ids=("distinct", "any", "minus", "hot", "mixed", "overflow", "bad"),
                **choices,
            )
            if case.world == world:
                check(case, run(cluster, case))


def check_dispatch(
    contract: int, rank: int, got: Sequence[torch.Tensor], want: ref.DispatchResult, share: int = 0, **options: bool
) -> None:
    """A rank's outputs of dispatch equal the reference. ``share``: of the case: hierarchy has source indices."""
    form = {"contract": f"v{contract}", "ranks_per_server": 0 if share else ranks_per_server()}
    report = ref.validate("dispatch", got, want, rank=rank, **form, **options)
    assert report.ok, report.text


def check_combine(rank: int, got: torch.Tensor, want: torch.Tensor) -> None:
    """A rank's result of combine equals the reference."""
    report = ref.validate("combine", got, want, rank=rank)
    assert report.ok, report.text


def check_sums(case: Case, runs: Sequence[RankRun], dispatched: Sequence[ref.DispatchResult]) -> None:
    """Every rank's result of combine equals the reference."""
    sums = case.combined([outcome.rows for outcome in runs], dispatched)
    for rank, one in enumerate(runs):
        check_combine(rank, one.result, sums[rank])


def check_fault(fault: ref.Fault, runs: Sequence[Any]) -> None:
    """Every rank raises this fault: its class and all its fields, none of them missing."""
    fields = {name: value for name, value in vars(fault).items() if value is not None and name != "kind"}
    for rank, error in enumerate(runs):
        assert type(error).__name__ == fault.kind, f"rank {rank}: {error!r}, expected {fault}"
        assert error.details == fields, f"rank {rank}: {error.details}, expected {fault}"


def check_traffic(case: Case, runs: Sequence[RankRun]) -> None:
    """Bytes through the MTE pipes are those of the rows, the outputs and nothing else."""
    sizes: dict[str, Any] = {
        "moe_expert_num": case.experts,
        "H": case.inputs[0].x.shape[1],
        "dtype": case.torch_dtype,
        "quant_mode": case.quant_mode,
        "contract": f"v{case.contract}",
        "global_bs": case.global_bs,
        "weights": case.weights,
        "cores": case.cores,
        "comm_quant_mode": case.comm_quant_mode,
        "special": case.special,
    }
    predicted = {name: ref.predict_traffic(case.inputs, algorithm=name, **sizes) for name in ("window", "direct")}
    for rank, one in enumerate(runs):
        want, back = (predicted[name][rank] for name in one.algorithms)
        rows = int(one.dispatched[4][case.experts - 1])
        index = 4 * case.inputs[rank].expert_ids.numel() if case.contract == 1 else 12 * rows
        factors = (case.quant_mode != 0) + case.weights
        counts = 4 * case.experts + 8 * case.local + 4 * case.tp_world_size
        written = want.expand_x_write + 4 * rows * factors + index + counts, one.result.nbytes
        windows = (
            (want.dispatch_window_write, want.dispatch_window_read, want.dispatch_window_read_slack),
            (back.combine_window_write, back.combine_window_read, back.combine_window_read_slack),
        )
        ops = zip(("dispatch", "combine"), one.traffic, written, windows, strict=True)
        for op, moved, tensor, (write, read, slack) in ops:
            assert (moved["written_window_data"], moved["written_tensor"]) == (write, tensor), f"{op} on rank {rank}"
            more = moved["read_window_data"] - read
            assert 0 <= more <= slack, f"{op} on rank {rank} reads {more} bytes more, at most {slack}: {case}"
