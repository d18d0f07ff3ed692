"""Any order of dispatch and combine, of window and direct, is right on windows full of poison."""

from __future__ import annotations

import functools
import itertools
import random
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import op_runs
import pytest
import soak_rows
import torch
from failure_windows import State, next_epoch, set_epoch
from soak_rows import Tally

import ascend_moe.reference as ref
from ascend_moe import LocalCluster, comm
from ascend_moe.native import binding
from ascend_moe.ops import calls
from ascend_moe.reference.cases import QUANTS, Case, legal

SEQUENCES = ["D" + "".join(ops) for n in range(1, 7) for ops in itertools.product("DC", repeat=n)]
CORES = (1, 2, 3, 5, 7, 8, 13, 24, 48)
POOL = 12  # routings to choose from
LAST_EPOCH = 0xFFFFFFFF
WINDOW_MIB = 1


@dataclass
class Entry:
    """A call of dispatch with what must come out of it, and two ways of combining its rows."""

    case: Case
    dispatched: list[ref.DispatchResult]
    rows: list[list[torch.Tensor]]  # by variant, by rank
    sums: list[list[torch.Tensor]]

    def check_dispatch(self, rank: int, got: tuple[torch.Tensor, ...]) -> None:
        op_runs.check_dispatch(self.case.contract, rank, got, self.dispatched[rank])

    def check_combine(self, rank: int, variant: int, got: torch.Tensor) -> None:
        op_runs.check_combine(rank, got, self.sums[variant][rank])


@functools.cache
def pool(world: int, local: int, contract: int) -> list[Entry]:
    """Different shapes, dtypes and routings; in each a rank without tokens, by turns."""
    entries: list[Entry] = []
    base = Case(world=world, local=local, topk=3, batch=4, contract=contract, batches="zero rank")
    for seed in itertools.count(100 * world + 10 * local):
        number = len(entries)
        case = legal(
            replace(
                base,
                seed=seed,
                units=1 + number % 3,
                dtype=("bf16", "fp32", "fp16")[number % 3],
                **QUANTS[("none", "int8", "none", "smooth")[number % 4]],
                ids=("any", "minus", "hot", "distinct")[number % 4],
                mask=("none", "pair", "token")[number % 3],
                shared=2 * (number % 2 == 0),
            )
        )
        if case.batch_sizes[number % world] == 0 and not case.fault():
            entries.append(_entry(case))
        if len(entries) == POOL:
            break
    return entries


def _entry(case: Case) -> Entry:
    expected = case.dispatched()
    rows = []
    for rank, one in enumerate(expected):
        scales = torch.empty(0) if one.dynamic_scales is None else one.dynamic_scales
        sent = (one.expand_x, scales, one.expand_idx, one.expert_token_nums, one.ep_recv_counts)
        rows.append(op_runs.expert_rows(case, rank, sent))
    variants = [rows, [-3 * tensor for tensor in rows]]
    sums = [case.combined(variant, expected) for variant in variants]
    return Entry(case, expected, variants, sums)


class Ranks:
    """One configuration's cluster, with a grip on its windows."""

    def __init__(self, cluster: LocalCluster, here: threading.local, pattern: str, epoch: int = 0) -> None:
        self.cluster = cluster
        self.world = cluster.world_size
        self.here = here
        self.pattern = pattern
        self.epochs = [epoch] * self.world

    def begin(self, barrier: threading.Barrier, rank: int, group_ep: str, epoch: int | None) -> None:
        """Poison everywhere, and the next op runs as the epoch after ``epoch``."""
        comm.lookup(group_ep, self.world, rank)
        if epoch is not None:
            self.epochs[rank] = epoch
            set_epoch(self.cluster, rank, epoch)
        self.poison(rank, 0)
        self.poison(rank, 1)
        barrier.wait(20)

    def poison(self, rank: int, parity: int) -> None:
        State.of(self.cluster, rank).poison(parity)

    def poisoned(self, rank: int, parity: int) -> bool:
        return State.of(self.cluster, rank).poisoned(parity)

    def before(self, rank: int, algorithm: str) -> None:
        """Poisons the half of a direct op to come. Only this rank stores there; its readers of two ops ago
        are done, or this rank had not come through the last op."""
        self.here.algorithm = algorithm
        self.epochs[rank] = next_epoch(self.epochs[rank])
        if algorithm == "direct":
            self.poison(rank, self.epochs[rank] & 1)

    def after(self, rank: int, algorithm: str) -> None:
        """Poisons the half that a window op has read. No peer stores there before this rank's next status
        message has left."""
        assert comm.lookup(self.cluster.name, self.world, rank).algorithm == algorithm
        if algorithm == "window":
            self.poison(rank, self.epochs[rank] & 1)

    def play(self, sequence: str, entries: list[Entry], seed: int, epoch: int | None) -> None:
        """One sequence on all ranks, each at its own pace and with its own cores."""
        rng = random.Random(seed)
        picks = rng.sample(range(len(entries)), len(sequence))
        delays = [[rng.random() < 0.1 for _ in sequence] for _ in range(self.world)]
        choices = ["window", "direct"] if self.pattern == "mixed" else [self.pattern]
        algorithms = [rng.choice(choices) for _ in sequence]
        barrier = threading.Barrier(self.world)

        def body(rank: int, group_ep: str) -> None:
            self.begin(barrier, rank, group_ep, epoch)
            sent: tuple[torch.Tensor, ...] = ()
            for step, op in enumerate(sequence):
                self.here.count = CORES[(seed + 2 * step + rank) % len(CORES)]
                self.before(rank, algorithms[step])
                if delays[rank][step]:
                    time.sleep(0.001)
                if op == "D":
                    entry = entries[picks[step]]
                    sent = op_runs.dispatch(entry.case, rank, group_ep)
                    entry.check_dispatch(rank, sent)
                else:
                    variant = step % 2
                    rows = entry.rows[variant][rank]
                    result = op_runs.combine(entry.case, rank, group_ep, rows, sent)
                    entry.check_combine(rank, variant, result)
                self.after(rank, algorithms[step])

        with binding.prepare_always():  # its calls do not ask what is patched here
            self.cluster.run(body)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """The AIV cores and the algorithm of each thread's next op, in place of the environment."""
    local = threading.local()
    monkeypatch.setattr(calls, "core_count", lambda: local.count)
    monkeypatch.setattr(calls, "comm_algorithm", lambda _: local.algorithm)
    return local


@pytest.mark.parametrize("contract", [1, 2])
def test_that_the_poison_lies_where_the_rows_go(contract: int, here: threading.local) -> None:
    """Op by op the half of its parity is written on every rank that gets rows, and the other one is not."""
    entry = next(
        entry for entry in pool(2, 2, contract) if all(expected.expand_x.shape[0] > 0 for expected in entry.dispatched)
    )
    with LocalCluster(2, window_mib=WINDOW_MIB) as cluster, binding.prepare_always():
        ranks = Ranks(cluster, here, "window")
        barrier = threading.Barrier(2)

        def body(rank: int, group_ep: str) -> None:
            here.count = 4
            ranks.begin(barrier, rank, group_ep, None)
            for epoch in (1, 2, 3):
                ranks.before(rank, "window")
                op_runs.dispatch(entry.case, rank, group_ep)
                barrier.wait(20)
                assert [ranks.poisoned(rank, parity) for parity in (0, 1)] == [epoch % 2 == 1, epoch % 2 == 0]
                ranks.after(rank, "window")
                barrier.wait(20)

        cluster.run(body)


SIZES = ((2, 2), (2, 3), (3, 2), (3, 3))
EVERY_CHANGE = [("window", 3, 3, "mixed"), ("mixed", 2, 2, "mixed")]
NIGHTLY = [
    (pattern, world, local, contract)
    for pattern in ("window", "direct", "mixed")
    for world, local in SIZES
    for contract in ("V1", "V2", "mixed")
    if (pattern, world, local, contract) not in EVERY_CHANGE
]
WRAP_EVERY_CHANGE = [("window", 2, 2, 2), ("mixed", 2, 2, 1)]
WRAP_NIGHTLY = [
    ("window", 2, 2, 1),
    ("mixed", 2, 2, 2),
    *(("window", *sizes, contract) for sizes in SIZES[1:] for contract in (1, 2)),
    *((*sizes, contract) for sizes in (("direct", 2, 2), ("mixed", 3, 2)) for contract in (1, 2)),
]


def each(every_change: list[tuple[Any, ...]], nightly: list[tuple[Any, ...]]) -> pytest.MarkDecorator:
    rows = [*every_change, *(pytest.param(*values, marks=pytest.mark.nightly) for values in nightly)]
    return pytest.mark.parametrize(("pattern", "world", "local", "contract"), rows)


@pytest.mark.row("op order")
@each(EVERY_CHANGE, NIGHTLY)
def test_every_sequence_on_the_same_windows_equals_the_reference(
    pattern: str, world: int, local: int, contract: str, here: threading.local, tally: Tally
) -> None:
    """One after the other on the same windows: each starts with what the last one left there."""
    contracts = {"V1": (1,), "V2": (2,), "mixed": (1, 2)}[contract]
    entries = [entry for number in contracts for entry in pool(world, local, number)]
    with LocalCluster(world, window_mib=WINDOW_MIB) as cluster:
        ranks = Ranks(cluster, here, pattern)
        for number, sequence in enumerate(SEQUENCES):
            ranks.play(sequence, entries, number, None)
        assert ranks.epochs == [sum(map(len, SEQUENCES))] * world
    tally.count("on one communicator", cases=len(SEQUENCES))


@pytest.mark.row("op order")
@each(WRAP_EVERY_CHANGE, WRAP_NIGHTLY)
def test_every_sequence_across_the_wrap(
    pattern: str, world: int, local: int, contract: int, here: threading.local, tally: Tally
) -> None:
    """On fresh windows, with the wrap of the epoch in the middle of each sequence."""
    sequences = [sequence for sequence in SEQUENCES if len(sequence) <= soak_rows.pick(6, 7)]
    with LocalCluster(world, window_mib=WINDOW_MIB) as cluster:
        for number, sequence in enumerate(sequences):
            cluster.close()
            ranks = Ranks(cluster, here, pattern)
            ranks.play(sequence, pool(world, local, contract), number, LAST_EPOCH - len(sequence) // 2)
            assert ranks.epochs == [1 + len(sequence) - len(sequence) // 2] * world
    tally.count("across the wrap of the epoch", cases=len(sequences))


# ---- two communicators

# An upper case letter is an op of one communicator, a lower case one of the other.
WORDS = ["".join(word) for n in range(1, 7) for word in itertools.product("DCdc", repeat=n)]


def unsent(entry: Entry, rank: int) -> tuple[torch.Tensor, ...]:
    """The tensors that dispatch would have given to a rank, for a combine before any dispatch."""
    want = entry.dispatched[rank]
    index = want.assist_info.reshape(-1) if entry.case.contract == 2 else want.expand_idx
    counts = [want.expert_token_nums, want.ep_recv_counts, torch.zeros(1, dtype=torch.int32)]
    return (want.expand_x, torch.empty(0), index, *counts, torch.empty(0))


@soak_rows.row("op order", quick=60, full=len(WORDS), chunk=1000)
def test_two_communicators_by_turns(numbers: range, tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other shapes and another contract; also combine first: what it needs is in its arguments."""
    monkeypatch.setenv("HCCL_BUFFSIZE", "1")
    monkeypatch.setenv("ASCEND_MOE_AIV_CORES", "3")

    def play(seed: int) -> str:
        word = WORDS[seed * 7919 % len(WORDS)]  # long and short ones among the first

        def body(rank: int, name: str) -> None:
            pools = {True: pool(2, 2, 1 + seed % 2), False: pool(2, 3, 2 - seed % 2)}
            names = {True: name, False: other.name}
            sent = {first: (pools[first][0], unsent(pools[first][0], rank)) for first in pools}
            for step, letter in enumerate(word, seed):
                first = letter.isupper()
                if letter in "Dd":
                    entry = pools[first][step % POOL]
                    sent[first] = entry, op_runs.dispatch(entry.case, rank, names[first])
                    entry.check_dispatch(rank, sent[first][1])
                else:
                    entry, given = sent[first]
                    rows = entry.rows[step % 2][rank]
                    result = op_runs.combine(entry.case, rank, names[first], rows, given)
                    entry.check_combine(rank, step % 2, result)

        one.run(body)
        return "on two communicators"

    with LocalCluster(2) as one, LocalCluster(2) as other:
        tally.each(numbers, play)
