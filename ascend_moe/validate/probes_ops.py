"""Probes through dispatch and combine alone: on the twin, the virtual NPU and an NPU alike.

Each runs on all ranks, on a communicator of its own; ``run(rank's Place)`` returns what that rank saw.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import ascend_moe

from .. import settings
from ..errors import AscendMoeError, CommError, CommTimeout
from ..reference.cases import Case, Place
from .probes import Probe, Skipped
from .run import run_case

DEADLINE_S = 2.0
SOON_S = 1.0  # in which a failed communicator refuses
LATE_S = 1.5  # after the deadline, by which a wait must have ended


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


_lock = threading.Lock()
_short_ranks = 0  # ranks of this process that need a short deadline now: ranks may be threads
_before: str | None = None


@contextmanager
def _deadline() -> Iterator[None]:
    """The environment's deadline is short while any rank of this process is in here."""
    global _short_ranks, _before
    name = settings.TIMEOUT_S.name
    with _lock:
        if _short_ranks == 0:
            _before = os.environ.get(name)
            os.environ[name] = str(DEADLINE_S)
        _short_ranks += 1
    try:
        yield
    finally:
        with _lock:
            _short_ranks -= 1
            if _short_ranks == 0:
                os.environ.pop(name)
                os.environ.update({} if _before is None else {name: _before})


def _dispatch(place: Place) -> Any:
    out = ascend_moe.npu_moe_distribute_dispatch(*_arguments(place))
    ascend_moe.check()
    return out


def _arguments(place: Place) -> tuple[Any, ...]:
    x = torch.ones(4, 256, dtype=torch.bfloat16, device=place.device)
    ids = torch.tensor([[0, place.world]] * 4, dtype=torch.int32, device=place.device)
    return x, ids, place.group_ep, place.world, place.rank, 2 * place.world


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
    arguments = _arguments(place)
    ascend_moe.npu_moe_distribute_dispatch(*arguments)
    ascend_moe.check()
    graph = npu.NPUGraph()
    with npu.graph(graph):
        out = ascend_moe.npu_moe_distribute_dispatch(*arguments)
    for value in (2.0, 3.0):
        arguments[0].fill_(value)
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
    Probe("first op", "a new communicator works without any preparation", _fresh),
    Probe("BS = 0 launch", "CANN launches an op on a rank without tokens", _no_tokens),
    Probe("abort", "a rank that does not come is named at the deadline; the failure stays", _abort),
    Probe("capture and replay", "a captured op runs again, on what its tensors hold then", _capture),
)
