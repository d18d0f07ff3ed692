"""Both algorithms on one communicator in any order, on windows full of poison, ranks running free."""

from __future__ import annotations

import random
import threading

import pytest
from test_sequences import LAST_EPOCH, SEQUENCES, WINDOW_MIB, Entry, Ranks, cores, pool

from ascend_moe import LocalCluster, comm
from ascend_moe.native import binding
from ascend_moe.ops import calls as native

__all__ = ["cores"]  # a fixture
# Every op runs direct, or by chance one or the other, the same on all ranks.
PATTERNS = ("direct", "mixed", "mixed again")


class MixedRanks(Ranks):
    """Poisons what nobody reads any more: the half of a window op after it, that of a direct op before."""

    algorithms: list[str]  # of the steps that are played

    def before(self, rank: int, step: int) -> None:
        """The half of a direct op to come. Only this rank stores there; its readers of two ops ago are done,
        or this rank had not come through the last op."""
        self.cores.algorithm = self.algorithms[step]
        if self.algorithms[step] == "direct":
            self.poison(rank, self.following(rank) & 1)

    def after(self, rank: int, step: int = 0) -> None:
        assert comm.lookup(self.cluster.name, self.world, rank).algorithm == self.algorithms[step]
        if self.algorithms[step] == "window":
            super().after(rank, step)
        else:
            self.epochs[rank] = self.following(rank)

    def mix(
        self, sequence: str, entries: list[Entry], seed: int, epoch: int | None, algorithms: list[str]
    ) -> None:
        self.algorithms = algorithms
        with binding.prepare_always():  # its calls do not ask what is patched here
            self.play(sequence, entries, seed, epoch)


@pytest.fixture(autouse=True)
def by_thread(monkeypatch: pytest.MonkeyPatch, cores: threading.local) -> None:
    """The algorithm of each thread's next op."""
    monkeypatch.setattr(native, "comm_algorithm", lambda _: cores.algorithm)


def algorithms_of(pattern: str, sequence: str, number: int) -> list[str]:
    rng = random.Random(f"{pattern} {number}")
    return [pattern if pattern == "direct" else rng.choice(["window", "direct"]) for _ in sequence]


@pytest.mark.nightly
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
