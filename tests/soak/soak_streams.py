"""Streams of checked ops, most of whose time goes into the ops; in rank processes a test names them."""

from __future__ import annotations

import gc
import os
from typing import Any

import op_runs
import torch
from failure_cases import here
from test_sequences import Entry, pool
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ascend_moe.reference.cases import Place

LOCAL = 2  # experts a rank


def entries(world: int, seed: int) -> list[Entry]:
    """Of both contracts, in an order of the seed; made once a process."""
    both = pool(world, LOCAL, 1) + pool(world, LOCAL, 2)
    order = torch.randperm(len(both), generator=torch.Generator().manual_seed(seed)).tolist()
    return [both[i] for i in order]


def prepare(world: int) -> None:
    """Computes what the ops must give, so that a stream starts at once."""
    pool(world, LOCAL, 1)
    pool(world, LOCAL, 2)


def round_trip(place: Place, entry: Entry, variant: int) -> None:
    """Dispatch and combine, every bit compared."""
    sent = op_runs.dispatch(entry.case, place.rank, place.group_ep)
    entry.check_dispatch(place.rank, sent)
    rows = entry.rows[variant][place.rank]
    result = op_runs.combine(entry.case, place.rank, place.group_ep, rows, sent)
    entry.check_combine(place.rank, variant, result)


def stream(rounds: int, seed: int = 0) -> int:
    """Round trips, up to the first error."""
    place = here("")
    cases = entries(place.world, seed)
    for number in range(rounds):
        round_trip(place, cases[number % len(cases)], number % 2)
    return rounds


class Recorder(TorchDispatchMode):
    """Keeps every call of the ops: the op, its arguments and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func.namespace == "ascend_moe":
            self.calls.append((func, args, kwargs or {}, tree_leaves(outputs)))
        return outputs


class Recorded:
    """The calls of one rank: each can be repeated without a reference."""

    def __init__(self, place: Place, seed: int = 0) -> None:
        """Runs every case once, against the reference. All ranks do it at the same time."""
        with Recorder() as recorder:
            for number, entry in enumerate(entries(place.world, seed)):
                round_trip(place, entry, number % 2)
        self.calls = recorder.calls
        self.iterations = len(self.calls) // 2  # until the cases come again

    def repeat(self, first: int, count: int) -> None:
        """Dispatch and combine, ``count`` times: the same bits as the first time."""
        for number in range(first, first + count):
            at = number % self.iterations * 2
            for op, args, kwargs, wanted in self.calls[at : at + 2]:
                for got, want in zip(tree_leaves(op(*args, **kwargs)), wanted, strict=True):
                    assert torch.equal(got, want), f"iteration {number} differs from the first of its kind"


def record_and_repeat(parts: list[int]) -> list[dict[str, int]]:
    """In a rank process: iterations in parts, and what the process holds before the first and after each."""
    recorded = Recorded(here())
    found, done = [], 0
    for part in parts:
        recorded.repeat(done, part)
        done += part
        found.append(resources())
    return found


def resources() -> dict[str, int]:
    """Resident bytes and open descriptors of this process."""
    gc.collect()
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return {"rss": pages * os.sysconf("SC_PAGE_SIZE"), "fds": len(os.listdir("/proc/self/fd"))}
