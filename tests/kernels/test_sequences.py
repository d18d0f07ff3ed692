"""Any order of dispatch and combine on two communicators, of window and direct, across the wrap of the epoch."""

from __future__ import annotations

import itertools
import random
import threading

import failure_cases as cases
import pytest
import soak_rows
import torch
from failure_windows import set_epoch
from soak_rows import Tally

from ascend_moe import LocalCluster, comm
from ascend_moe.errors import CommTimeout
from ascend_moe.validate.run import DevicePlace

WORLD, WINDOW_MIB = 2, 1
LAST_EPOCH = 0xFFFFFFFF
# An upper case letter is an op of one communicator, a lower case one of the other.
WORDS = ["".join(word) for n in range(1, 7) for word in itertools.product("DCdc", repeat=n)]


@soak_rows.row("op order", quick=300, full=len(WORDS), chunk=1000)
def test_ops_in_any_order_equal_the_reference(numbers: range, tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each op has other inputs, cores and perhaps another algorithm; a combine may come again, with the same rows."""
    monkeypatch.setenv("HCCL_BUFFSIZE", str(WINDOW_MIB))
    clusters, barrier = [LocalCluster(WORLD) for _ in range(2)], threading.Barrier(WORLD)

    def play(number: int) -> str:
        rng, word = random.Random(number), WORDS[number * 7919 % len(WORDS)]
        steps = [(rng.randrange(50), rng.choice(["window", "direct"])) for _ in word]
        wraps, contracts = number % 2 == 0, [1 + number % 3 % 2, 2 - number % 3 % 2]
        monkeypatch.setenv("ASCEND_MOE_COMM_ALG", rng.choice(["window", "direct"]))  # of V1

        for cluster in clusters if wraps else ():  # fresh windows know no other message of these epochs
            cluster.close()

        def body(rank: int, name: str) -> None:
            names = [name, clusters[1].name]
            sent: list[tuple[int, tuple[torch.Tensor, ...]] | None] = [None, None]
            for which in (0, 1) if wraps else ():
                comm.lookup(names[which], WORLD, rank)
                set_epoch(clusters[which], rank, LAST_EPOCH - len(word) // 2)
            barrier.wait(20)
            for letter, (seed, algorithm) in zip(word, steps, strict=True):
                which = int(letter.islower())
                place, contract, before = DevicePlace(names[which], WORLD, rank), contracts[which], sent[which]
                options = {"comm_alg": algorithm} if contract == 2 else {}
                if letter in "Dd":
                    given = cases.dispatch(place, seed, contract, **options)
                    cases.check_dispatch(place, given, seed, contract)
                    sent[which] = seed, given
                elif before is not None:
                    result = cases.combine(place, before[1], before[0], contract, **options)
                    cases.check_combine(place, result, before[0])

        clusters[0].run(body)
        return "across the wrap of the epoch" if wraps else "on two communicators"

    with clusters[0], clusters[1]:
        tally.each(numbers, play)


@pytest.mark.tsan
@pytest.mark.parametrize("algorithm", ["window", "direct"])
@pytest.mark.parametrize("missed", [2, 3])
def test_words_from_before_the_wrap_are_not_corrupt(
    missed: int, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that does not call in the first epochs after the wrap is missing: its last message is old, not corrupt."""
    for name, value in (("COMM_ALG", algorithm), ("TIMEOUT_S", "0.5"), ("AIV_CORES", "2")):
        monkeypatch.setenv(f"ASCEND_MOE_{name}", value)

    def body(rank: int, group_ep: str) -> cases.Caught | None:
        place = DevicePlace(group_ep, WORLD, rank)
        for _ in range(missed):  # the last two before the wrap, and those before the missed one
            cases.dispatch(place, 1)
        return cases.caught(cases.dispatch, place, 1) if rank == 0 else None

    with LocalCluster(WORLD, window_mib=WINDOW_MIB) as cluster:
        for rank in range(WORLD):
            set_epoch(cluster, rank, LAST_EPOCH - 2)
        first = cluster.run(body)[0]
        assert first is not None and type(first.error) is CommTimeout and first.error.rank == 1, repr(first)
        assert f"last seen in dispatch, epoch {missed - 1 if missed > 2 else LAST_EPOCH}" in str(first.error)
