"""Programs of explore mode in which all ranks of an op are one launch, as in `ascend-moe validate --one-card`."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from ascend_moe.explore import Program

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
