"""Programs of explore mode in which something goes wrong on purpose: every fault, in every way that rows go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ascend_moe import explore
from ascend_moe.explore import Program, wrong_inputs

#: What a drawn case becomes.
WAYS: tuple[Callable[[Program, int], Program], ...] = (
    lambda case, seed: replace(case, algorithm="direct"),
    lambda case, seed: replace(case, algorithm="window"),
    lambda case, seed: replace(case, algorithm="direct", rows="registered"),
    lambda case, seed: replace(case, sequence=case.sequence.lower()),
    lambda case, seed: replace(case, algorithm="direct", list_cores=1 + seed % case.cores, cores=case.cores + 1),
    lambda case, seed: replace(case, algorithm="window", rows="own", servers=1 + seed % 2, stores=seed // 2 % 2 == 1),
)
# Shares beyond a chunk of pairs or source indices, in one core and several; all pairs of a rank in a core's lists.
LONG = (
    "w2,c1,l8,k8,b140,u1,v2,equal,ids:distinct,DC",
    "w2,c1,l8,k8,b140,u1,v2,equal,ids:distinct,DC,direct",
    "w1,c2,l8,k8,b140,u1,v2,equal,ids:distinct,DC,direct",
    "w2,c2,l2,k4,b280,u1,v2,equal,ids:minus,DC",
    "w2,c1,l8,k8,b140,u1,v1,equal,ids:distinct,DC",
    "w2,c1,l2,k4,b280,u1,v1,equal,ids:minus,DC,direct",
    "w2,c3,l3,k3,b40,u1,v1,m1,equal,ids:minus,D,direct",
)


WRONG_INPUTS = [*wrong_inputs.KINDS]


def faulty(seeds: range, faults: Sequence[str]) -> Iterator[Program]:
    """Small programs, one of these faults each that they can have: ways and faults go by turns."""
    for seed in seeds:
        turn, way = divmod(seed, len(WAYS))
        yield from _with_one(WAYS[way](explore.draw(seed), seed), faults, turn)


def long_faulty(seeds: range) -> Iterator[Program]:
    """The same with long shares, of which the inputs are wrong at the borders of cores and chunks."""
    faults = [each for name in ("counts", "ids", "overflow", "routing") for each in (name, "source_index", "index")]
    for seed in seeds:
        turn, text = divmod(seed, len(LONG))
        yield from _with_one(replace(explore.parse(LONG[text]), seed=seed), faults, turn)


def _with_one(case: Program, faults: Sequence[str], turn: int) -> list[Program]:
    possible = [fault for fault in faults if explore.applies(case, fault)]
    return [replace(case, fault_kind=possible[turn % len(possible)])] if possible else []
