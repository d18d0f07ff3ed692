"""What rank processes do in the tests of `ascend-moe hang`: ops that a test starts, one after the other."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.dispatchers.base import Dispatched

TOKENS, HIDDEN = 4, 64
_dispatchers: list[MC2Dispatcher] = []  # of two groups of all ranks
_sent: list[Dispatched] = []


def configure(variables: dict[str, str]) -> None:
    os.environ |= variables
    world = dist.get_world_size()
    _dispatchers.append(MC2Dispatcher.from_group(dist.group.WORLD, world))
    _dispatchers.append(MC2Dispatcher.from_group(dist.new_group(), world))


def _weights() -> torch.Tensor:
    return torch.full((TOKENS, dist.get_world_size()), 1 / dist.get_world_size())


def dispatch(group: int = 0) -> None:
    x = torch.full((TOKENS, HIDDEN), float(dist.get_rank()))
    ids = torch.arange(dist.get_world_size(), dtype=torch.int32).repeat(TOKENS, 1)
    _sent[:] = [_dispatchers[group].dispatch(x, ids, expert_scales=_weights())]


def combine() -> bool:
    """Return whether the sums are this rank's own rows again."""
    out = _dispatchers[0].combine(_sent[0].expand_x, _sent[0], _weights())
    return bool((out == dist.get_rank()).all())


def sleep_then(seconds: float, op: Any, *args: Any) -> Any:
    time.sleep(seconds)
    return op(*args)


def work_then(seconds: float, op: Any, *args: Any) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(64, 64) @ torch.ones(64, 64)
    return op(*args)
