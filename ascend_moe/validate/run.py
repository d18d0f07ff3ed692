"""One rank of `ascend-moe validate`: make each call and compare its outputs with the reference.

The second half contains the calls that must raise, with the typed error that each must raise on every rank.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

import ascend_moe

from .. import comm, reference
from ..comm.place import Place
from ..errors import ArgumentError, AscendMoeError, CommError, ConfigMismatch, RoutingMismatch, WindowTooSmall
from ..ops.calls import is_two_level
from ..ops.collectives import MAX_BATCH
from ..ops.registration import OPERATORS
from ..reference.cases import Case, legal

CPU = torch.device("cpu")


@dataclass(frozen=True)
class DevicePlace(Place):
    """A `Place` (group, number of ranks, rank) and the device of the rank's tensors."""

    device: torch.device = CPU

    def move(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """Return ``tensor``, which may be None, on the rank's device."""
        return None if tensor is None else tensor.to(self.device)


#: Makes a call, given op, place, case and the op's arguments by name.
Call = Callable[[str, DevicePlace, Case, dict[str, Any]], Any]


def by_two_levels(world: int, share: int) -> bool:
    """Return whether calls without comm_alg run hierarchy on ``world`` ranks, in servers of ``share`` (0: all)."""
    return is_two_level("") and 0 < share < world


def _share(place: DevicePlace) -> int:
    """Ranks per server if calls run hierarchy between servers, else 0."""
    share = comm.ranks_per_server(place.group_ep, place.world, place.rank)
    return share if by_two_levels(place.world, share) else 0


def exchanged(store: Any, key: str, place: tuple[int, int], own: Any, seconds: float) -> list[Any]:
    """Publish a value under ``key`` in a store and return those of all ranks; None of a rank that did not in time.

    ``place``: this rank, and their number. Used where collectives may not work.
    """
    rank, world = place
    store.set(f"{key}/{rank}", json.dumps(own))
    keys = [f"{key}/{each}" for each in range(world)]
    with contextlib.suppress(RuntimeError):
        store.wait(keys, timedelta(seconds=seconds))
    return [json.loads(store.get(each)) if store.check([each]) else None for each in keys]


@dataclass(frozen=True)
class Result:
    """Result of one call on one rank. ``case``: name of the call; ``text``: what is wrong."""

    op: str
    mode: str
    case: str
    rank: int
    ok: bool
    text: str = ""


class Stopped(Exception):
    """Raised if this rank is out of step with the others, so that it must make no further call."""


def run_all(place: DevicePlace, cases: Sequence[Case], note: Callable[[Result], None]) -> None:
    """Run all cases, the calls of `BAD` that apply, and a valid case; pass each `Result` to ``note``."""
    for case in cases:
        for result in run_case(place, case):
            note(result)
    share = _share(place)
    for bad in BAD:
        if place.world >= bad.least_world and not (bad.of_v1 and share):
            note(run_bad(place, bad))
    case = legal(Case("plain, after all errors", place.world, ids="distinct", share=share, seed=99))
    wrong = [result.text for result in run_case(place, case) if not result.ok]
    mode = "valid call after errors"
    note(Result("errors", mode, case.name, place.rank, not wrong, "".join(wrong[:1])))


def run_case(place: DevicePlace, case: Case) -> Iterable[Result]:
    """Run a case and yield the comparison of dispatch, combine or its error with the reference. May raise Stopped."""
    fault = case.fault()

    def result(op: str, ok: bool, text: str = "") -> Result:
        mode = case.mode if op != "errors" else str(fault and fault.kind)
        return Result(op, mode, case.name, place.rank, ok, text)

    try:
        sent = dispatch(place, case)
        ascend_moe.check()
    except RuntimeError as error:  # ours, or CANN's through torch_npu
        if fault is None:
            yield result("dispatch", False, f"raised {type(error).__name__}: {error}")
            raise Stopped from error
        yield result("errors", *_is_fault(error, fault))
        return
    if fault is not None:
        yield result("errors", False, f"raised nothing, expected {fault}")
        raise Stopped
    want = case.dispatched()
    report = reference.validate(
        "dispatch",
        sent,
        want[place.rank],
        rank=place.rank,
        contract=f"v{case.contract}",
        exact_shapes=True,
        ranks_per_server=0 if case.share else comm.ranks_per_server(place.group_ep, place.world, place.rank),
    )
    yield result("dispatch", report.ok, "" if report.ok else report.text)
    rows = case.rows_of(want)
    try:
        got = combine(place, case, padded(rows[place.rank], case, sent[0]), sent)
        ascend_moe.check()
    except RuntimeError as error:
        yield result("combine", False, f"raised {type(error).__name__}: {error}")
        raise Stopped from error
    sums = case.combined(rows, want)
    report = reference.validate("combine", got, sums[place.rank], rank=place.rank)
    yield result("combine", report.ok, "" if report.ok else report.text)


def run_bad(place: DevicePlace, bad: Bad) -> Result:
    """Make a call that must raise; its result is ok if the error has the right class and names the right argument."""

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


def padded(rows: torch.Tensor, case: Case, expand_x: torch.Tensor) -> torch.Tensor:
    """Pad the rows of a rank's experts to the length of dispatch's output, with NaN if ``case.tail``, else zeros."""
    rest = float("nan") if case.tail else 0.0
    whole = torch.full((expand_x.shape[0], case.hidden), rest, dtype=rows.dtype)
    whole[: len(rows)] = rows
    return whole


# ---- the calls of one rank


def _call(op: str, place: DevicePlace, case: Case, values: dict[str, Any]) -> Any:
    return getattr(ascend_moe, _name(op, case))(**values)


def _name(op: str, case: Case) -> str:
    return f"npu_moe_distribute_{op}" + ("_v2" if case.contract == 2 else "")


def _options(op: str, case: Case) -> dict[str, Any]:
    """Options of a case that the operator accepts."""
    return {name: value for name, value in case.options.items() if name in OPERATORS[_name(op, case)].names}


def dispatch(place: DevicePlace, case: Case, *, call: Call = _call, **changes: Any) -> tuple[torch.Tensor, ...]:
    """Run one rank's dispatch of the case; ``call`` makes the call, ``changes`` replace arguments by name."""
    values: dict[str, Any] = {
        **case.dispatch_tensors(place.rank),
        **place.arguments(moe_expert_num=case.experts),
        **_options("dispatch", case),
    }
    outputs: tuple[torch.Tensor, ...] = call("dispatch", place, case, _moved(place, values | changes))
    return outputs


def combine(
    place: DevicePlace,
    case: Case,
    rows: torch.Tensor,
    sent: Sequence[torch.Tensor],
    *,
    call: Call = _call,
    **changes: Any,
) -> torch.Tensor:
    """Run one rank's combine of ``rows`` after a dispatch that returned ``sent``; else as `dispatch`."""
    values: dict[str, Any] = {
        **case.combine_tensors(place.rank),
        "expand_x": rows,
        "expand_idx" if case.contract == 1 else "assist_info_for_combine": sent[2],
        "ep_send_counts": sent[4],
        **place.arguments(moe_expert_num=case.experts),
        "tp_send_counts": sent[5],
        "expand_scales": sent[6],
        **_options("combine", case),
    }
    result: torch.Tensor = call("combine", place, case, _moved(place, values | changes))
    return result


def _moved(place: DevicePlace, values: dict[str, Any]) -> dict[str, Any]:
    moved = {name: place.move(value) for name, value in values.items() if isinstance(value, torch.Tensor)}
    return values | moved


# ---- calls that must raise

_BS, _K, _H, _LOCAL = 3, 2, 64, 2


@dataclass(frozen=True)
class Bad:
    """A call that must raise ``error`` about ``argument`` ("": any) on every rank. ``of_v1``: for V1 only."""

    name: str
    error: type[AscendMoeError]
    argument: str
    call: Callable[[DevicePlace], Any]
    least_world: int = 1
    of_v1: bool = False


def _refused(name: str, argument: str, contract: int = 1, op: str = "dispatch", **changes: Any) -> Bad:
    """Return a call that ArgumentError refuses. A changed argument is a value, or a function of the DevicePlace."""

    def call(place: DevicePlace) -> Any:
        values = {key: value(place) if callable(value) else value for key, value in changes.items()}
        return (_dispatch if op == "dispatch" else _combine)(place, contract, **values)

    return Bad(name, ArgumentError, argument, call, of_v1=name.endswith("with V1"))


def _small(place: DevicePlace, contract: int) -> Case:
    sizes: dict[str, Any] = {"local": _LOCAL, "topk": _K, "batch": _BS, "units": 4}
    return legal(Case(world=place.world, **sizes, contract=contract, ids="distinct", share=_share(place)))


def _dispatch(place: DevicePlace, contract: int = 1, **changes: Any) -> Any:
    return dispatch(place, _small(place, contract), **changes)


def _combine(place: DevicePlace, contract: int = 1, **changes: Any) -> Any:
    """Run combine after a valid dispatch, with some arguments changed."""
    sent = _dispatch(place, contract)
    ascend_moe.check()
    return combine(place, _small(place, contract), sent[0], sent, **changes)


def _other_ids(place: DevicePlace) -> Any:
    """Combine with ids of -1."""
    return _combine(place, expert_ids=torch.full((_BS, _K), -1, dtype=torch.int32))


def _other_hidden(place: DevicePlace) -> Any:
    """Dispatch with rows of another length on rank 0."""
    return _dispatch(place, x=torch.ones(_BS, _H * (2 if place.rank == 0 else 1), dtype=torch.bfloat16))


def _large(place: DevicePlace) -> Any:
    """Dispatch the largest batches and rows that the rules allow, which exceed any usual window."""
    x, ids = torch.ones(1, 16384, dtype=torch.bfloat16), torch.zeros(1, 32, dtype=torch.int32)
    experts, global_bs = place.world * 32, place.world * MAX_BATCH
    weights: dict[str, Any] = {"expert_scales": torch.ones(ids.shape)} if _share(place) else {}
    return _dispatch(place, x=x, expert_ids=ids, moe_expert_num=experts, global_bs=global_bs, **weights)


_MASK, _SHARED = torch.ones(_BS), torch.ones(_BS, _H, dtype=torch.bfloat16)
_WEIGHTS = torch.ones(_BS, _K, dtype=torch.bfloat16)
BAD: tuple[Bad, ...] = (
    _refused("x of int32", "x", x=torch.ones(_BS, _H, dtype=torch.int32)),
    _refused("x with rows of 10 bytes", "x", x=torch.ones(_BS, 5).bfloat16()),
    _refused("expert_ids of int64", "expert_ids", expert_ids=torch.zeros(_BS, _K).long()),
    _refused("expert_ids of another batch", "expert_ids", expert_ids=torch.zeros(_BS + 1, _K).int()),
    _refused("moe_expert_num 0", "moe_expert_num", moe_expert_num=0),
    _refused("ep_world_size + 1", "ep_world_size", ep_world_size=lambda place: place.world + 1),
    _refused("quant_mode 7", "quant_mode", quant_mode=7),
    _refused("scales without quant_mode", "scales", scales=lambda place: torch.ones(place.world * _LOCAL, _H)),
    _refused("x_active_mask of float32", "x_active_mask", 2, x_active_mask=_MASK),
    _refused("global_bs for fewer tokens", "global_bs", global_bs=lambda place: place.world * 2),
    _refused("tp_world_size 2", "tp_world_size", tp_world_size=2),
    _refused("an unknown group_ep", "group_ep", group_ep="no such group"),
    _refused("comm_alg 'none'", "comm_alg", 2, comm_alg="none"),
    Bad("a window too small", WindowTooSmall, "", _large),
    _refused("shared_expert_x with V1", "shared_expert_x", op="combine", shared_expert_x=_SHARED),
    _refused("expert_scales of bfloat16", "expert_scales", 2, "combine", expert_scales=_WEIGHTS),
    Bad("combine with other ids", RoutingMismatch, "", _other_ids),
    Bad("another H on rank 0", ConfigMismatch, "", _other_hidden, least_world=2),
)
