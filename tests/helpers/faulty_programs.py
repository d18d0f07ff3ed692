"""Programs of explore mode in which something goes wrong on purpose: every fault, in every way that rows go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ascend_moe import explore
from ascend_moe.explore import Program

#: What a drawn case becomes.
WAYS: tuple[Callable[[Program, int], Program], ...] = (
    lambda case, seed: replace(case, algorithm="direct"),
    lambda case, seed: replace(case, algorithm="window"),
    lambda case, seed: replace(case, algorithm="direct", rows="lent"),
    lambda case, seed: replace(case, sequence=case.sequence.lower()),
    lambda case, seed: replace(case, algorithm="direct", list_cores=1 + seed % case.cores, cores=case.cores + 1),
    lambda case, seed: replace(case, algorithm="window", rows="own", servers=1 + seed % 2, near=seed // 2 % 2 == 1),
)
# Shares beyond a chunk of pairs or triples, in one core and in several.
LONG = (
    "w2,c1,l8,k8,b140,u1,v2,equal,ids:distinct,DC",
    "w2,c2,l8,k8,b140,u1,v2,equal,ids:distinct,DC,direct",
    "w2,c1,l8,k8,b140,u1,v1,equal,ids:distinct,DC",
    "w2,c2,l8,k8,b140,u1,v1,equal,ids:distinct,DC,direct",
    "w2,c1,l2,k4,b280,u1,v1,equal,ids:minus,DC,direct",
    "w2,c1,l2,k4,b280,u1,v2,equal,ids:minus,DC",
)


def faulty(first: int, count: int) -> Iterator[Program]:
    """Small programs, a fault each: ways and faults go by turns."""
    for seed in range(first, first + count):
        turn, way = divmod(seed, len(WAYS))
        case = WAYS[way](explore.draw(seed), seed)
        faults = [fault for fault in explore.FAULTS if explore.applies(case, fault)]
        yield replace(case, fault=faults[turn % len(faults)])


def long_faulty(first: int, count: int) -> Iterator[Program]:
    """The same with long shares, of which inputs are wrong at the borders of chunks, too."""
    for seed in range(first, first + count):
        turn, text = divmod(seed, len(LONG))
        case = replace(explore.parse(LONG[text]), seed=seed)
        kinds = [fault for fault in explore.FAULTS if fault not in ("kill", "absent") and explore.applies(case, fault)]
        yield replace(case, fault=kinds[turn % len(kinds)])
