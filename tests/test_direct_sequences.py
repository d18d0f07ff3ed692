"""Both algorithms on one communicator in any order, on windows full of poison, ranks running free."""

from __future__ import annotations

import random
import threading
import time

import op_runs
import pytest
import torch
from test_sequences import CORES, LAST_EPOCH, SEQUENCES, WINDOW_MIB, Entry, Ranks, cores, pool

from ascend_moe import LocalCluster, comm, compiled, native

__all__ = ["cores"]  # a fixture
# Every op runs direct, or by chance one or the other, the same on all ranks.
PATTERNS = ("direct", "mixed", "mixed again")


class MixedRanks(Ranks):
    """Poisons what nobody reads any more: the half of a window op after it, that of a direct op before."""

    def before(self, rank: int, algorithm: str) -> None:
        """The half of the op to come. In direct only this rank stores there; its readers of two ops ago are
        done, or this rank had not come through the last op."""
        if algorithm == "direct":
            self.poison(rank, (self.following(rank)) & 1)

    def following(self, rank: int) -> int:
        return 2 if self.epochs[rank] == LAST_EPOCH else self.epochs[rank] + 1

    def passed(self, rank: int, algorithm: str) -> None:
        self.epochs[rank] = self.following(rank)
        if algorithm == "window":
            self.poison(rank, self.epochs[rank] & 1)

    def mix(
        self, sequence: str, entries: list[Entry], seed: int, epoch: int | None, algorithms: list[str]
    ) -> None:
        rng = random.Random(seed)
        picks = rng.sample(range(len(entries)), len(sequence))
        delays = [[rng.random() < 0.1 for _ in sequence] for _ in range(self.world)]
        barrier = threading.Barrier(self.world)

        def body(rank: int, group_ep: str) -> None:
            self.begin(barrier, rank, group_ep, epoch)
            sent: tuple[torch.Tensor, ...] = ()
            for step, op in enumerate(sequence):
                self.cores.count = CORES[(seed + 2 * step + rank) % len(CORES)]
                self.cores.algorithm = algorithms[step]
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
                    summed = op_runs.combine(entry.case, rank, group_ep, rows, sent)
                    entry.check_combine(rank, variant, summed)
                ran = comm.lookup(group_ep, self.world, rank).algorithm
                assert ran == algorithms[step]
                self.passed(rank, algorithms[step])

        with compiled.paused():  # its calls do not ask what is patched here
            self.cluster.run(body)


@pytest.fixture(autouse=True)
def by_thread(monkeypatch: pytest.MonkeyPatch, cores: threading.local) -> None:
    """The algorithm of each thread's next op."""
    monkeypatch.setattr(native, "comm_algorithm", lambda _: cores.algorithm)


def algorithms_of(pattern: str, sequence: str, number: int) -> list[str]:
    rng = random.Random(f"{pattern} {number}")
    return [pattern if pattern == "direct" else rng.choice(["window", "direct"]) for _ in sequence]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("contract", ["V1", "V2", "mixed"])
@pytest.mark.parametrize(("world", "local"), [(2, 2), (3, 3)])
def test_every_sequence(world: int, local: int, contract: str, pattern: str, cores: threading.local) -> None:
    """One after the other on the same windows: each starts with what the last one left there."""
    contracts = {"V1": (1,), "V2": (2,), "mixed": (1, 2)}[contract]
    entries = [entry for number in contracts for entry in pool(world, local, number)]
    with LocalCluster(world, window_mib=WINDOW_MIB) as cluster:
        ranks = MixedRanks(cluster, cores)
        for number, sequence in enumerate(SEQUENCES):
            ranks.mix(sequence, entries, number, None, algorithms_of(pattern, sequence, number))
        assert ranks.epochs == [sum(map(len, SEQUENCES))] * world


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("contract", [1, 2])
def test_every_sequence_across_the_wrap(contract: int, pattern: str, cores: threading.local) -> None:
    """On fresh windows, with the wrap of the epoch in the middle of each sequence."""
    with LocalCluster(2, window_mib=WINDOW_MIB) as cluster:
        for number, sequence in enumerate(SEQUENCES):
            cluster.close()
            ranks = MixedRanks(cluster, cores)
            before = LAST_EPOCH - len(sequence) // 2
            names = algorithms_of(pattern, sequence, number)
            ranks.mix(sequence, pool(2, 2, contract), number, before, names)
            assert ranks.epochs == [1 + len(sequence) - len(sequence) // 2] * 2
