"""Draws the cases that explore tests run, and tells what no run may find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ascend_moe import explore
from ascend_moe.explore import Program, World

#: What a case is changed to, by what it then explores.
MODES = {
    "window": {"algorithm": "window"},
    "servers": {"algorithm": "window", "servers": 1},
    "direct": {"algorithm": "direct"},
    "mixed": {"algorithm": "mixed"},
    "lent": {"algorithm": "direct", "rows": "lent"},
    "roles": {"algorithm": "direct", "list_cores": 2, "cores": 4},
}


def assert_nothing_found(result: explore.Result) -> None:
    assert result.finding is None, result.finding.line()


def drawn(mode: str, first: int, count: int) -> Iterator[Program]:
    for seed in range(first, first + count):
        case = replace(explore.draw(seed), **MODES[mode])
        if mode == "servers":
            case = replace(case, servers=1 + seed % 2, near=seed // 2 % 2 == 1)
        elif mode == "lent":
            rows, algorithm = ("partly", "lent")[seed % 2], "direct" if seed % 3 else "mixed"
            case = replace(case, rows=rows, algorithm=algorithm, comm_quant_mode=0)
        elif mode == "roles":
            cores = explore.draw(seed).cores
            algorithm = "direct" if seed % 2 else "mixed"
            case = replace(case, cores=cores + 1, list_cores=1 + seed % cores, algorithm=algorithm)
        yield case


Worlds = Callable[[int], World]
