"""One rank of `ascend-moe validate`: makes each call, compares what comes out with the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

import ascend_moe

from .. import comm, reference
from ..errors import AscendMoeError, CommError
from .bad import BAD, Bad
from .cases import DTYPES, Case, build


@dataclass(frozen=True)
class Result:
    """Of one rank and one call. ``text`` says what is wrong; ``case`` which call it was."""

    op: str
    mode: str
    case: str
    rank: int
    ok: bool
    text: str = ""


@dataclass(frozen=True)
class Place:
    """Where a rank runs: its number, the ranks, the communicator's name and its device."""

    rank: int
    world: int
    group_ep: str
    device: torch.device

    def ranks_per_server(self) -> int:
        """Of the communicator; 0 for one server."""
        return comm.ranks_per_server(self.group_ep, self.world, self.rank)

    def move(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """To the rank's device."""
        return None if tensor is None else tensor.to(self.device)


class Stopped(Exception):
    """This rank is out of step with the others: no further call makes sense."""


def run_all(place: Place, cases: Sequence[Case], note: Callable[[Result], None]) -> None:
    """Every case, then every bad call. ``note`` sees each result as it comes.

    Raises:
        Stopped: the ranks cannot go on together; what was found so far has been noted.
    """
    for case in cases:
        for result in run_case(place, case):
            note(result)
    for bad in BAD:
        if place.world < bad.least_world:
            continue
        note(run_bad(place, bad))
    note(_after_errors(place))


def _after_errors(place: Place) -> Result:
    """A sound call after all the bad ones: the communicator still works."""
    case = Case("plain, after all errors", place.world, ids="distinct", seed=99)
    found = list(run_case(place, case))
    wrong = [one for one in found if not one.ok]
    text = wrong[0].text if wrong else ""
    return Result("errors", "the communicator works on", case.name, place.rank, not wrong, text)


def run_case(place: Place, case: Case) -> Iterable[Result]:
    """Dispatch and combine of one case, each against the reference."""
    inputs = build(case)
    fault = reference.check(inputs, case.experts, case.given_global_bs)

    def result(op: str, ok: bool, text: str = "") -> Result:
        return Result(
            op, case.mode if op != "errors" else str(fault and fault.kind), case.name, place.rank, ok, text
        )

    try:
        sent = _dispatch(place, case, inputs[place.rank])
        ascend_moe.check()
    except RuntimeError as error:  # ours, or CANN's through torch_npu
        if fault is None:
            yield result("dispatch", False, f"raised {type(error).__name__}: {error}")
            raise Stopped from error
        yield result("errors", *_is_fault(error, fault))
        return
    if fault is not None:
        yield result("errors", False, f"must raise {fault}, and raised nothing")
        raise Stopped
    want = _expected(case, inputs)
    report = reference.validate(
        "dispatch",
        sent,
        want[place.rank],
        rank=place.rank,
        contract=f"v{case.contract}",
        exact_shapes=True,
        ranks_per_server=place.ranks_per_server(),
    )
    yield result("dispatch", report.ok, "" if report.ok else report.text)
    rows = [_expert_rows(case, rank, one) for rank, one in enumerate(want)]
    try:
        got = _combine(place, case, inputs[place.rank], rows[place.rank], sent)
        ascend_moe.check()
    except RuntimeError as error:
        yield result("combine", False, f"raised {type(error).__name__}: {error}")
        raise Stopped from error
    sums = reference.combine(inputs, rows, want, moe_expert_num=case.experts, global_bs=case.given_global_bs)
    report = reference.validate("combine", got, sums[place.rank], rank=place.rank)
    yield result("combine", report.ok, "" if report.ok else report.text)


def run_bad(place: Place, bad: Bad) -> Result:
    """A call that must raise: its class, and which argument it names."""

    def result(ok: bool, text: str = "") -> Result:
        return Result("errors", bad.error.__name__, bad.name, place.rank, ok, text)

    try:
        bad.call(place)
        ascend_moe.check()
    except RuntimeError as error:
        if type(error) is bad.error and bad.argument in ("", getattr(error, "argument", "")):
            return result(True)
        text = f"{bad.name}: raised {type(error).__name__}: {error}; expected {bad.error.__name__}"
        if isinstance(error, CommError) or not isinstance(error, AscendMoeError):
            raise Stopped(text) from error
        return result(False, text + (f" about {bad.argument}" if bad.argument else ""))
    return result(False, f"{bad.name}: raised nothing, expected {bad.error.__name__}")


def _is_fault(error: RuntimeError, fault: reference.Fault) -> tuple[bool, str]:
    fields = {name: value for name, value in vars(fault).items() if value is not None and name != "kind"}
    ok = type(error).__name__ == fault.kind and getattr(error, "details", None) == fields
    return ok, "" if ok else f"raised {type(error).__name__}: {error}; expected {fault}"


def _dispatch(place: Place, case: Case, one: reference.RankInput) -> tuple[torch.Tensor, ...]:
    op = (
        ascend_moe.npu_moe_distribute_dispatch
        if case.contract == 1
        else ascend_moe.npu_moe_distribute_dispatch_v2
    )
    outputs: tuple[torch.Tensor, ...] = op(
        place.move(one.x),
        place.move(one.expert_ids),
        place.group_ep,
        place.world,
        place.rank,
        case.experts,
        scales=place.move(one.scales),
        x_active_mask=place.move(one.x_active_mask),
        tp_world_size=case.tp,
        quant_mode=case.quant_mode,
        global_bs=case.given_global_bs,
        expert_token_nums_type=case.nums_type,
    )
    return outputs


def _combine(
    place: Place, case: Case, one: reference.RankInput, rows: torch.Tensor, sent: Sequence[torch.Tensor]
) -> torch.Tensor:
    op = (
        ascend_moe.npu_moe_distribute_combine
        if case.contract == 1
        else ascend_moe.npu_moe_distribute_combine_v2
    )
    whole = torch.full((sent[0].shape[0], case.hidden), float("nan") if case.tail else 0.0, dtype=rows.dtype)
    whole[: len(rows)] = rows
    out: torch.Tensor = op(
        place.move(whole),
        place.move(one.expert_ids),
        sent[2],
        sent[4],
        place.move(one.expert_scales),
        place.group_ep,
        place.world,
        place.rank,
        case.experts,
        tp_send_counts=sent[5],
        x_active_mask=place.move(one.x_active_mask),
        expand_scales=sent[6],
        shared_expert_x=place.move(one.shared_expert_x),
        tp_world_size=case.tp,
        global_bs=case.given_global_bs,
    )
    return out


def _expected(case: Case, inputs: Sequence[reference.RankInput]) -> list[reference.DispatchResult]:
    return reference.dispatch(
        inputs,
        moe_expert_num=case.experts,
        quant_mode=case.quant_mode,
        global_bs=case.given_global_bs,
        expert_token_nums_type=case.nums_type,
        tp_world_size=case.tp,
    )


def _expert_rows(case: Case, rank: int, sent: reference.DispatchResult) -> torch.Tensor:
    """What the experts would return: any function of row, expert and rank, in x's dtype."""
    rows = sent.expand_x.float()
    if sent.dynamic_scales is not None:
        rows = rows * sent.dynamic_scales[:, None]
    ends = sent.ep_recv_counts[case.world - 1 :: case.world].contiguous()
    expert = torch.searchsorted(ends, torch.arange(len(rows), dtype=torch.int32), right=True)
    weight = (1 + (expert + rank * case.local).float() / 7)[:, None]
    return (rows * weight + weight / 3).to(DTYPES[case.dtype])
