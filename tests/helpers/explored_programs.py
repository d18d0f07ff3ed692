"""Programs of explore mode that tests and the search for mutants share, and what no run may find."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ascend_moe import explore
from ascend_moe.explore import Program, World, wrong_inputs

#: What a case is changed to, by what it then explores.
MODES = {
    "window": {"algorithm": "window"},
    "servers": {"algorithm": "window", "servers": 1},
    "direct": {"algorithm": "direct"},
    "mixed": {"algorithm": "mixed"},
    "registered": {"algorithm": "direct", "rows": "registered"},
    "roles": {"algorithm": "direct", "list_cores": 2, "cores": 4},
}


def assert_nothing_found(result: explore.Result) -> None:
    assert result.finding is None, result.finding.line()


Worlds = Callable[[int], World]

# Larger than any that is drawn: shares of several chunks or batches, and of nothing.
LARGE_SHARES = (
    "w2,c1,l8,k16,b33,u1,v1,equal,ids:distinct,D,direct",  # more than 512 list entries
    "w2,c1,l8,k16,b66,u1,v2,equal,ids:distinct,DC,direct,weights",  # two whole chunks of 512 pairs, of source indices
    "w2,c1,l8,k16,b66,u1,v2,equal,ids:distinct,DC",  # rows whose tails leave by themselves
    "w3,c9,l8,k4,b33,u1,v2,DC,weights,fp32",  # rows that leave with their tails
    "w2,c8,l8,k4,b33,u1,v2,equal,D,int8",
    "w1,c1,l16,k16,b66,u1,v1,equal,ids:none,D,direct,weights",  # chunks without a row
    "w1,c1,l1,k1,b4,u512,v1,equal,smooth,D",  # a row in several pieces
    "w7,c16,l8,k4,b64,u3,v2,s1,bf16,int8,ids:hot,equal,D,direct",  # shared rows, in two batches
    "w1,c8,l32,k32,b80,u1,v2,equal,ids:distinct,D,direct",  # a batch has fewer rows than load at a time
    "w1,c8,l2,k2,b700,u1,v2,equal,ids:distinct,D,direct",  # a batch fills its room
    "w8,c2,l2,k1,b0,u1,v1,equal,D,direct",  # W a multiple of 8, without tokens
    "w2,c8,l1,k1,b3,u1,v1,zero-rank,mask:pair,m5,DC,direct",  # list cores without experts, and without pairs
    "w2,c8,l2,k2,b3,u1,v2,no-tokens,mask:token,m5,DC,direct",
)


# ---- programs in which something goes wrong on purpose: every fault, in every way that rows go

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


# ---- programs in which all ranks of an op are one launch, as in `ascend-moe validate --one-card`

WORLDS = (2, 4, 8)
OPS = ((1, "window"), (2, "window"), (1, "direct"), (2, "direct"), (2, "hierarchy"))  # contract, algorithm
ROWS: tuple[dict[str, int], ...] = ({}, {"quant_mode": 2}, {"comm_quant_mode": 2})


def program(world: int, cores: int, contract: int, algorithm: str, **rows: int) -> Program:
    """Return a program of two dispatches and combines; hierarchy runs between two servers."""
    servers = world // 2 if algorithm == "hierarchy" else 0
    return Program(
        world=world,
        cores=cores,
        local=2,
        topk=2,
        batch=3,
        units=2,
        contract=contract,
        algorithm=algorithm,
        servers=servers,
        stores=servers > 0,
        weights=servers > 0,
        one_card=True,
        **rows,  # type: ignore[arg-type]
    )


def programs(cores: Callable[[int], tuple[int, ...]]) -> list[Program]:
    """Return the programs of every W, algorithm, contract and kind of rows, over these numbers of cores for a W."""
    return [
        program(world, number, contract, algorithm, **rows)
        for world, (contract, algorithm), rows in itertools.product(WORLDS, OPS, ROWS)
        for number in cores(world)
        if algorithm != "hierarchy" or world > 2  # two servers of at least two ranks
    ]


# Items between servers need the SyncAll of a group, which has few cores here: the lack of one shows soon. Items of the
# last one end in a block that a whole piece would cross.
_ROWS = {"local": 2, "topk": 2, "batch": 3, "weights": True, "one_card": True}
SMALL = (
    program(4, 2, 2, "hierarchy"),
    program(4, 3, 2, "hierarchy", comm_quant_mode=2),
    *(Program(world=4, cores=3, servers=2, contract=2, units=units, **_ROWS) for units in (40, 170)),  # type: ignore[arg-type]
)
