"""Calls of dispatch and combine that are checked on the spot, for tests that make them fail.

Each case has unequal batches with an empty rank, a mask and ids of -1; the experts return rows unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import op_runs
import pytest
import torch

import ascend_moe
import ascend_moe.reference as ref
from ascend_moe.errors import AscendMoeError
from ascend_moe.reference.cases import Case
from ascend_moe.validate import run as validate_run
from ascend_moe.validate.run import DevicePlace

TOPK, HIDDEN, MAX_BS, LOCAL = 2, 48, 4, 3


@functools.cache
def case_of(world: int, seed: int, contract: int = 1) -> Case:
    """The case of a seed; the empty rank goes round with the seed."""
    batches = tuple(MAX_BS if world == 1 else (MAX_BS + rank + seed) % (MAX_BS + 1) for rank in range(world))
    sizes = {"world": world, "local": LOCAL, "topk": TOPK, "batch": MAX_BS, "width": HIDDEN}
    return Case(**sizes, batches=batches, mask="token", ids="minus", contract=contract, seed=seed)


@functools.cache
def expected(world: int, seed: int) -> tuple[list[ref.DispatchResult], list[torch.Tensor]]:
    """Returns what both ops must give on every rank."""
    case = case_of(world, seed)
    sent = case.dispatched()
    return sent, case.combined([result.expand_x for result in sent], sent)


@contextlib.contextmanager
def opened(world: int, algorithm: str, share: int, *, timeout_s: int, cores: int) -> Iterator[ascend_moe.LocalCluster]:
    """A cluster with these settings as long as it is open; ``share``: ranks a server, 0: all."""
    settings = {"ASCEND_MOE_COMM_ALG": algorithm, "ASCEND_MOE_RANKS_PER_SERVER": str(share), "HCCL_BUFFSIZE": "2"}
    settings |= {"ASCEND_MOE_TIMEOUT_S": str(timeout_s), "ASCEND_MOE_AIV_CORES": str(cores)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        with ascend_moe.LocalCluster(world) as cluster:
            yield cluster


def arguments(place: DevicePlace) -> dict[str, Any]:
    """The arguments of an op that say who calls."""
    return place.arguments(moe_expert_num=place.world * LOCAL)


def dispatch(place: DevicePlace, seed: int = 0, contract: int = 1, **changes: Any) -> tuple[torch.Tensor, ...]:
    """Calls dispatch with the case of this seed."""
    return validate_run.dispatch(place, case_of(place.world, seed, contract), **changes)


def combine(
    place: DevicePlace, sent: tuple[torch.Tensor, ...], seed: int = 0, contract: int = 1, **changes: Any
) -> torch.Tensor:
    """Calls combine on dispatch's outputs."""
    return validate_run.combine(place, case_of(place.world, seed, contract), sent[0], sent, **changes)


def check_dispatch(place: DevicePlace, sent: tuple[torch.Tensor, ...], seed: int = 0, contract: int = 1) -> None:
    want = expected(place.world, seed)[0][place.rank]
    op_runs.check_dispatch(contract, place.rank, sent, want)


def check_combine(place: DevicePlace, result: torch.Tensor, seed: int = 0) -> None:
    op_runs.check_combine(place.rank, result, expected(place.world, seed)[1][place.rank])


def round_trip(place: DevicePlace, seed: int = 0, contract: int = 1) -> str:
    """Dispatch and combine, both compared with what they must give."""
    sent = dispatch(place, seed, contract)
    check_dispatch(place, sent, seed, contract)
    check_combine(place, combine(place, sent, seed, contract), seed)
    return "right"


def repeat(place: DevicePlace, rounds: int) -> None:
    """Round trips with the bits of the first of their kind, which are those of the reference."""
    kinds = [(seed, contract) for seed in range(5) for contract in (1, 2)]
    for kind in kinds:
        round_trip(place, *kind)
    first: dict[tuple[int, int], torch.Tensor] = {}
    for number in range(rounds):
        kind = kinds[number % len(kinds)]
        result = combine(place, dispatch(place, *kind), *kind)
        assert torch.equal(first.setdefault(kind, result), result), f"round trip {number} is another"


def resources() -> dict[str, int]:
    """Resident bytes and open descriptors of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"bytes": pages * os.sysconf("SC_PAGE_SIZE"), "files": len(os.listdir("/proc/self/fd"))}


# ---- outcomes


@dataclass
class Caught:
    """Holds what a call did, with its start and end on the clock that all ranks share."""

    value: Any
    error: AscendMoeError | None
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def caught(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Caught:
    found = Caught(None, None, time.monotonic(), 0)
    try:
        found.value = function(*args, **kwargs)
    except AscendMoeError as error:
        found.error = error
    found.ended = time.monotonic()
    return found


# ---- in rank processes: functions that a test names, on the default group


def here(group_ep: str = "") -> DevicePlace:
    dist = torch.distributed
    name = group_ep or ascend_moe.comm_name()
    group = dist.distributed_c10d._resolve_process_group(name)
    return DevicePlace(name, group.size(), group.rank())


def run_round_trip(seed: int = 0, group_ep: str = "", contract: int = 1) -> str:
    return round_trip(here(group_ep), seed, contract)


def stream(rounds: int, seed: int) -> None:
    """Round trips, up to the first error."""
    for number in range(rounds):
        round_trip(here(), (seed + number) % 5, 1 + number % 2)


def run_repeat(rounds: int) -> dict[str, int]:
    repeat(here(), rounds)
    return resources()


def run_faulty(case: Case) -> None:
    """Dispatch and combine of a case in which every rank must raise."""
    outcome = op_runs.run_rank(case, here().rank, here().group_ep)
    if isinstance(outcome, AscendMoeError):
        raise outcome


_kept: dict[str, tuple[int, tuple[torch.Tensor, ...]]] = {}


def run_dispatch(seed: int = 0, group_ep: str = "") -> str:
    """Keeps the outputs for ``run_combine``."""
    place = here(group_ep)
    _kept.pop(place.group_ep, None)
    sent = dispatch(place, seed)
    check_dispatch(place, sent, seed)
    _kept[place.group_ep] = seed, sent
    return "right"


def run_combine(group_ep: str = "") -> str:
    """Combines what the last dispatch gave; after one that failed, what breaks no rule that one rank sees."""
    place = here(group_ep)
    if place.group_ep in _kept:
        seed, sent = _kept[place.group_ep]
    else:
        seed, ids = 0, case_of(place.world, 0).inputs[place.rank].expert_ids
        rows, none = torch.zeros(1, HIDDEN, dtype=torch.bfloat16), torch.zeros(0)
        index = torch.zeros(ids.numel(), dtype=torch.int32)
        counts = torch.zeros(place.world * LOCAL, dtype=torch.int32)
        sent = (rows, none, index, none, counts, torch.zeros(0, dtype=torch.int32), torch.zeros(1))
    check_combine(place, combine(place, sent, seed), seed)
    return "right"


def finish(seed: int) -> None:
    """Runs a last round trip and ends the process as a program does that has come to its end."""
    assert round_trip(here(), seed) == "right"
    sys.exit(0)


def finish_at_once(seed: int) -> None:
    """The same without a goodbye."""
    assert round_trip(here(), seed) == "right"
    os._exit(0)
