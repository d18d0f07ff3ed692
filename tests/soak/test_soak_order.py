"""Ops in any order: on two communicators by turns, combine first."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import failure_cases as cases
import op_runs
import pytest
import soak_rows
import torch
from failure_cases import LOCAL, Caught, caught
from soak_rows import Tally
from test_failures_collective import call, plain
from test_sequences import Entry, pool

from ascend_moe import LocalCluster
from ascend_moe.comm.communicator import ranks_per_server
from ascend_moe.errors import RoutingMismatch
from ascend_moe.reference.cases import Place

LONGEST = 6
# An upper case letter is an op of one communicator, a lower case one of the other.
WORDS = ["".join(word) for n in range(1, LONGEST + 1) for word in itertools.product("DCdc", repeat=n)]


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "10")
    monkeypatch.setenv("HCCL_BUFFSIZE", "1")
    monkeypatch.setenv("ASCEND_MOE_AIV_CORES", "3")


def spread(number: int, total: int) -> int:
    """Every case once in ``total`` numbers, long and short ones among the first."""
    return number * 7919 % total


# ---- two communicators


@dataclass
class Domain:
    """One of two communicators: its own shapes, and what its last dispatch has given to this rank."""

    name: str
    rank: int
    entries: list[Entry]
    entry: Entry | None = None
    sent: tuple[torch.Tensor, ...] = field(default=())

    def dispatch(self, step: int) -> None:
        self.entry = self.entries[step % len(self.entries)]
        self.sent = op_runs.dispatch(self.entry.case, self.rank, self.name)
        self.entry.check_dispatch(self.rank, self.sent)

    def combine(self, step: int) -> None:
        """Before any dispatch: with the tensors that dispatch would have given."""
        if self.entry is None:
            self.entry = self.entries[0]
            want = self.entry.dispatched[self.rank]
            triples = self.entry.case.contract == 2 and not 0 < ranks_per_server() < len(want.rows_sent)
            index = want.assist_info.reshape(-1) if triples else want.expand_idx
            counts = [want.expert_token_nums, want.ep_recv_counts, torch.zeros(1, dtype=torch.int32)]
            self.sent = (want.expand_x, torch.empty(0), index, *counts, torch.empty(0))
        rows = self.entry.rows[step % 2][self.rank]
        self.entry.check_combine(
            self.rank, step % 2, op_runs.combine(self.entry.case, self.rank, self.name, rows, self.sent)
        )


def play(one: LocalCluster, other: LocalCluster, word: str, seed: int) -> str:
    """Ops of the same threads on both, with other shapes and another contract."""

    def body(rank: int, name: str) -> None:
        upper = Domain(name, rank, pool(2, 2, 1 + seed % 2))
        lower = Domain(other.name, rank, pool(2, 3, 2 - seed % 2))
        for step, letter in enumerate(word):
            domain = upper if letter.isupper() else lower
            (domain.dispatch if letter in "Dd" else domain.combine)(seed + step)

    one.run(body)
    return "on two communicators" if word.upper() != word != word.lower() else "on one of two"


@soak_rows.row("op order", quick=150, full=len(WORDS), chunk=1000)
def test_two_communicators_by_turns(numbers: range, tally: Tally) -> None:
    """Also combine first: what it needs is in its arguments, not in the windows."""
    with LocalCluster(2) as one, LocalCluster(2) as other:
        tally.each(numbers, lambda number: play(one, other, WORDS[spread(number, len(WORDS))], number))


# ---- combine that fits no dispatch


@pytest.mark.row("op order")
@pytest.mark.parametrize("version", ["", "_v2"])
@pytest.mark.parametrize("world", [1, 3])
def test_combine_without_a_dispatch(world: int, version: str, tally: Tally) -> None:
    """Without routed pairs it gives zeros; with some it says that their rows have not come."""

    def body(rank: int, name: str) -> Caught:
        place = Place(rank, world, name)
        op = f"combine{version}"
        assert not call(place, op).any()
        ids = plain(op, experts=world * LOCAL)["expert_ids"]
        ids[0, 0] = 1
        found = caught(call, place, op, expert_ids=ids)
        assert cases.round_trip(place, 1, 2 if version else 1) == "right"
        return found

    with LocalCluster(world) as cluster:
        for one in cluster.run(body):
            assert type(one.error) is RoutingMismatch, repr(one)
    tally.count("without a dispatch")
