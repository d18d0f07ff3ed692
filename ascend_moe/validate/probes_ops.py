"""Probes through dispatch and combine alone: on the twin, the virtual NPU and an NPU alike.

Each runs on all ranks, on a communicator of its own; ``run(rank's Place)`` returns what that rank saw.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import ascend_moe

from .. import settings
from ..errors import AscendMoeError, CommError, CommTimeout
from ..reference.cases import Case, Place
from .probes import Skipped
from .run import run_case

DEADLINE_S = 2.0
SOON_S = 1.0  # in which a failed communicator refuses
LATE_S = 1.5  # after the deadline, by which a wait must have ended


@dataclass(frozen=True)
class OpProbe:
    """``run`` is one rank's part."""

    name: str
    assumption: str
    run: Callable[[Place], str]


def _compare(place: Place, case: Case) -> None:
    for one in run_case(place, case):
        assert one.ok, one.text.partition("\n")[2] or one.text


def _fresh(place: Place) -> str:
    _compare(place, Case("first op", place.world, ids="distinct", seed=1))
    return "the first op of a new communicator is right"


def _no_tokens(place: Place) -> str:
    for contract in (1, 2):
        _compare(place, Case("no tokens", place.world, contract=contract, batches="no tokens", seed=2))
        _compare(place, Case("one rank", place.world, contract=contract, batches="one rank only", seed=3))
    return "ranks with BS = 0 took part in 8 ops"


@dataclass
class _Deadline:
    """The environment's deadline while any rank of this process needs a short one: ranks may be threads."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    ranks: int = 0
    before: str | None = None

    def enter(self) -> None:
        with self.lock:
            if self.ranks == 0:
                self.before = os.environ.get(settings.TIMEOUT_S.name)
                os.environ[settings.TIMEOUT_S.name] = str(DEADLINE_S)
            self.ranks += 1

    def leave(self) -> None:
        with self.lock:
            self.ranks -= 1
            if self.ranks > 0:
                return
            if self.before is None:
                os.environ.pop(settings.TIMEOUT_S.name, None)
            else:
                os.environ[settings.TIMEOUT_S.name] = self.before


_short = _Deadline()


@contextmanager
def _deadline() -> Iterator[None]:
    _short.enter()
    try:
        yield
    finally:
        _short.leave()


def _dispatch(place: Place) -> Any:
    x = torch.ones(4, 256, dtype=torch.bfloat16, device=place.device)
    ids = torch.tensor([[0, place.world]] * 4, dtype=torch.int32, device=place.device)
    out = ascend_moe.npu_moe_distribute_dispatch(
        x, ids, place.group_ep, place.world, place.rank, 2 * place.world
    )
    ascend_moe.check()
    return out


def _abort(place: Place) -> str:
    """The last rank does not come; the others must say so at the deadline, and go on saying so at once."""
    if place.world < 2:
        raise Skipped("it takes two ranks")
    missing = place.world - 1
    _dispatch(place)  # all together, so that windows and kernels are there
    if place.rank == missing:
        time.sleep(DEADLINE_S + LATE_S)
        error = _failure(place)
        assert isinstance(error, CommError), f"the late rank got {error!r}"
        return f"the late rank raised {type(error).__name__}"
    start = time.monotonic()
    error = _failure(place)
    waited = time.monotonic() - start
    assert isinstance(error, CommTimeout), f"a missing rank gave {error!r}"
    assert error.rank == missing, f"rank {missing} was missing, the error names {error.rank}"
    assert 0.8 * DEADLINE_S <= waited <= DEADLINE_S + LATE_S, f"waited {waited:.1f} s, not {DEADLINE_S:g} s"
    start = time.monotonic()
    again = _failure(place)
    assert isinstance(again, CommError), f"the next op gave {again!r}"
    assert time.monotonic() - start < SOON_S, "the next op waited again"
    return f"CommTimeout about rank {missing} after {waited:.1f} s, the next op failed at once"


def _failure(place: Place) -> AscendMoeError | None:
    with _deadline():
        try:
            _dispatch(place)
        except AscendMoeError as error:
            return error
    return None


def _capture(place: Place) -> str:
    """A captured dispatch, replayed with other rows in the same places."""
    if place.device.type != "npu":
        raise Skipped("graphs are captured on NPUs, this device is cpu")
    npu: Any = torch.npu  # type: ignore[attr-defined,unused-ignore]
    x = torch.ones(4, 256, dtype=torch.bfloat16, device=place.device)
    ids = torch.tensor([[0, place.world]] * 4, dtype=torch.int32, device=place.device)
    arguments = (x, ids, place.group_ep, place.world, place.rank, 2 * place.world)
    ascend_moe.npu_moe_distribute_dispatch(*arguments)
    ascend_moe.check()
    graph = npu.NPUGraph()
    with npu.graph(graph):
        out = ascend_moe.npu_moe_distribute_dispatch(*arguments)
    for value in (2.0, 3.0):
        x.fill_(value)
        graph.replay()
        npu.synchronize()
        ascend_moe.check()
        rows = int(out[4][-1])
        owners = (0, place.world // 2)  # of the two ids, which every rank sends four rows
        expected = 4 * place.world * owners.count(place.rank)
        assert rows == expected, f"{rows} rows after a replay, not {expected}"
        assert bool((out[0][:rows] == value).all()), f"a replay did not send the rows of {value}"
    return "2 replays, each with the rows of its time"


OP_PROBES = (
    OpProbe("first op", "a new communicator works without any preparation", _fresh),
    OpProbe("BS = 0 launch", "CANN launches an op on a rank without tokens", _no_tokens),
    OpProbe("abort", "a rank that does not come is named at the deadline; the failure stays", _abort),
    OpProbe("capture and replay", "a captured op runs again, on what its tensors hold then", _capture),
)
