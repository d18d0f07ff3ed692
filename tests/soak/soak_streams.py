"""Streams of checked ops, most of whose time goes into the ops; in rank processes a test names them."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import op_runs
import torch
from failure_cases import here
from test_sequences import Entry, pool

from ascend_moe import comm
from ascend_moe.native import binding
from ascend_moe.ops import calls
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


def stream(rounds: int, seed: int = 0, group_ep: str = "", pause: float = 0.0, slow: int = -1) -> int:
    """Round trips, up to the first error. ``pause``: seconds that rank ``slow`` sleeps before each op."""
    place = here(group_ep)
    cases = entries(place.world, seed)
    for number in range(rounds):
        if place.rank == slow:
            time.sleep(pause)
        round_trip(place, cases[number % len(cases)], number % 2)
    return rounds


class Recorded:
    """The launches of one rank: each can be repeated without the way through torch and Python's checks."""

    _here = threading.local()

    def __init__(self, place: Place, seed: int = 0) -> None:
        """Runs every case once, against the reference. All ranks do it at the same time."""
        self.end = comm.lookup(place.group_ep, place.world, place.rank)
        self.calls: list[tuple[calls.Plan, Any, list[torch.Tensor]]] = []
        self._here.calls = self.calls
        with binding.prepare_always():
            for number, entry in enumerate(entries(place.world, seed)):
                round_trip(place, entry, number % 2)
        self._here.calls = []
        self.iterations = len(self.calls) // 2  # until the cases come again

    @classmethod
    def run(cls, plan: calls.Plan, end: comm.Communicator, inputs: Any) -> list[torch.Tensor]:
        """Stands for ``calls.run`` while launches are recorded."""
        outputs = native_run(plan, end, inputs)
        cls._here.calls.append((plan, inputs, outputs))
        return outputs

    def repeat(self, first: int, count: int) -> None:
        """Dispatch and combine, ``count`` times: the same bits as the first time."""
        for number in range(first, first + count):
            at = number % self.iterations * 2
            for plan, inputs, wanted in self.calls[at : at + 2]:
                for got, want in zip(native_run(plan, self.end, inputs), wanted, strict=True):
                    assert torch.equal(got, want), f"iteration {number} differs from the first of its kind"


native_run = calls.run


def record_and_repeat(parts: list[int]) -> list[dict[str, int]]:
    """In a rank process: iterations in parts, and what the process holds before the first and after each."""
    calls.run = Recorded.run
    recorded = Recorded(here())
    calls.run = native_run
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
