"""Sets of the options that dispatch and combine have together: drawn, counted by pairs, and run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, count
from typing import Any
from unittest import mock

import numpy as np
import op_runs
from begin_ranks import two_launches

from ascend_moe.reference import cases
from ascend_moe.reference.cases import Case
from ascend_moe.validate.run import DevicePlace

Pair = tuple[tuple[str, str], tuple[str, str]]  # of values, each with its option
Options = Mapping[str, tuple[str, ...]]  # values by option
ALL = 1_200  # sets of the whole run
#: Values by option, by the names that docs/operators.md has for them.
OPTIONS: dict[str, tuple[str, ...]] = {
    "algorithm": ("window", "direct", "hierarchy"),
    "ranks": ("on one server", "on several servers"),
    "quant_mode": ("0", "2"),
    "scales": ("none", "given"),
    "x_active_mask": ("none", "1-D", "2-D"),
    "batches": ("equal", "unequal"),
    "special experts": ("none", "zero", "copy", "const"),
    "comm_quant_mode": ("0", "2"),
    "functions": ("V1", "V2"),
    "x": tuple(cases.DTYPES),
    "shared_expert_x": ("none", "given"),
    "expert_scales": ("given", "empty"),
    "launches": ("one", "begin and finish"),
}
HIERARCHY = "`hierarchy` between servers"
#: Pairs of values that are refused, by the words of the list in docs/operators.md.
REFUSED: dict[tuple[str, str], Pair] = {
    ("algorithm `direct`", "ranks on several servers"): (("algorithm", "direct"), ("ranks", "on several servers")),
    (HIERARCHY, "V1's functions"): (("algorithm", "hierarchy"), ("functions", "V1")),
    (HIERARCHY, "`scales`"): (("algorithm", "hierarchy"), ("scales", "given")),
    (HIERARCHY, "dispatch without `expert_scales`"): (("algorithm", "hierarchy"), ("expert_scales", "empty")),
    ("`scales`", "`quant_mode` 0"): (("quant_mode", "0"), ("scales", "given")),
    ("`zero_expert_num`", "V1's functions"): (("special experts", "zero"), ("functions", "V1")),
    ("`copy_expert_num`", "V1's functions"): (("special experts", "copy"), ("functions", "V1")),
    ("`const_expert_num`", "V1's functions"): (("special experts", "const"), ("functions", "V1")),
    ("`shared_expert_x`", "V1's functions"): (("shared_expert_x", "given"), ("functions", "V1")),
    ("`begin_combine`", "V1's tensors"): (("launches", "begin and finish"), ("functions", "V1")),
    ("`comm_quant_mode` 2", "float32 rows"): (("comm_quant_mode", "2"), ("x", "fp32")),
}
#: And pairs that nobody refuses, and that never meet: on one server hierarchy is window.
APART: tuple[Pair, ...] = (*REFUSED.values(), (("algorithm", "hierarchy"), ("ranks", "on one server")))
_MASKS = {"none": ("none",), "1-D": ("prefix", "token"), "2-D": ("pair",)}
_BATCHES = {"equal": ("equal", "global_bs"), "unequal": ("unequal", "zero rank", "one rank only")}
_SPECIAL = {
    "none": ((0, 0, 0),),
    "zero": ((1, 0, 0), (3, 0, 0)),
    "copy": ((0, 1, 0), (2, 3, 0)),
    "const": ((0, 0, 1), (0, 0, 3), (1, 2, 2)),
}


@dataclass(frozen=True)
class OptionSet:
    """A case, and how its ops are called. ``stores``: ranks of one server store into each other's windows."""

    case: Case
    algorithm: str
    servers: int
    stores: bool
    two_launches: bool

    @property
    def values(self) -> dict[str, str]:
        """The value of each of ``OPTIONS``, read off the tensors that a rank gives."""
        case, given = self.case, self.case.inputs[0]
        special = [name for name, number in zip(("zero", "copy", "const"), case.special, strict=True) if number]
        return {
            "algorithm": self.algorithm,
            "ranks": "on one server" if self.servers == 1 else "on several servers",
            "quant_mode": str(case.quant_mode),
            "scales": "none" if given.scales is None else "given",
            "x_active_mask": "none" if given.x_active_mask is None else f"{given.x_active_mask.dim()}-D",
            "batches": "unequal" if len(set(case.batch_sizes)) > 1 else "equal",
            "special experts": special[-1] if special else "none",
            "comm_quant_mode": str(case.comm_quant_mode),
            "functions": f"V{case.contract}",
            "x": next(name for name, dtype in cases.DTYPES.items() if dtype == given.x.dtype),
            "shared_expert_x": "none" if given.shared_expert_x is None else "given",
            "expert_scales": "empty" if case.plain else "given",
            "launches": "begin and finish" if self.two_launches else "one",
        }

    @property
    def pairs(self) -> list[Pair]:
        """Every two values that meet in it."""
        return list(combinations(self.values.items(), 2))


def legal_pairs(options: Options = OPTIONS, apart: Sequence[Pair] = APART) -> list[Pair]:
    """Every two values of two options that may meet, in the order of ``options``; those of ``apart`` may not."""
    values = [(option, value) for option, several in options.items() for value in several]
    refused = {frozenset(pair) for pair in apart}
    return [pair for pair in combinations(values, 2) if pair[0][0] != pair[1][0] and frozenset(pair) not in refused]


def chosen_values(rng: np.random.Generator, options: Options, apart: Sequence[Pair]) -> dict[str, str]:
    """A value of each option by chance: options in any order, each among the values that go with the others."""
    refused, chosen = {frozenset(pair) for pair in apart}, dict[str, str]()
    for option in rng.permutation(list(options)).tolist():
        fits = [
            value
            for value in options[option]
            if not any(frozenset(((option, value), other)) in refused for other in chosen.items())
        ]
        chosen[option] = fits[int(rng.integers(len(fits)))]
    return chosen


def draw(seed: int) -> OptionSet:
    """A set by chance, the same one for a seed."""
    rng = np.random.default_rng([seed, 11])
    chosen = chosen_values(rng, OPTIONS, APART)
    several, stores = chosen["ranks"] == "on several servers", bool(rng.integers(2))
    started = chosen["launches"] == "begin and finish"
    for turn in count():  # unequal batches are equal by chance where they are small: the next ones then
        case = _case(seed + turn * ALL, chosen)
        drawn = OptionSet(case, chosen["algorithm"], 1 + several, stores, started)
        if len(set(case.batch_sizes)) > 1 or chosen["batches"] == "equal":
            break
    assert drawn.values == chosen, f"seed {seed}: the tensors have {drawn.values}, drawn were {chosen}"
    return drawn


def _case(seed: int, chosen: dict[str, str]) -> Case:
    """A small case with these values, and the others by chance."""
    return cases.draw(
        seed,
        world=(4,) if chosen["ranks"] == "on several servers" else (2, 2, 3),
        quant=("none",) if chosen["quant_mode"] == "0" else ("smooth" if chosen["scales"] == "given" else "int8",),
        mask=_MASKS[chosen["x_active_mask"]],
        batches=_BATCHES[chosen["batches"]],
        special=_SPECIAL[chosen["special experts"]],
        comm_quant_mode=(int(chosen["comm_quant_mode"]),),
        contract=(int(chosen["functions"][1]),),
        dtype=(chosen["x"],),
        shared=(0,) if chosen["shared_expert_x"] == "none" else (2, 3),
        plain=(chosen["expert_scales"] == "empty",),
        cores=(8, 1, 2, 3, 7, 24),
        **{"share": (2,), "weights": (True,)} if chosen["algorithm"] == "hierarchy" else {},
    )


def covering(sets: Sequence[Any]) -> list[Any]:
    """Some of ``sets`` in which each pair that meets in them meets: again and again the one with most new ``pairs``."""
    missing, chosen = {pair for each in sets for pair in each.pairs}, list[Any]()
    while missing:
        chosen.append(max(sets, key=lambda each: len(missing.intersection(each.pairs))))
        missing.difference_update(chosen[-1].pairs)
    return chosen


# ---- running them


class Worlds:
    """Clusters of every number of ranks and servers that sets have, opened on first use and kept."""

    def __init__(self) -> None:
        self._clusters: dict[tuple[int, bool], op_runs.Clusters] = {}

    def run(self, options: OptionSet) -> None:
        """Runs a set, and compares every rank's outputs with the reference, bit for bit, and its algorithm."""
        case = options.case
        environment = {"ASCEND_MOE_COMM_ALG": options.algorithm, "ASCEND_MOE_AIV_CORES": str(case.cores)}
        if options.servers > 1:
            environment["ASCEND_MOE_RANKS_PER_SERVER"] = str(case.world // options.servers)
            environment["ASCEND_MOE_INTRA_NODE_STORES"] = str(int(options.stores))
        key = (options.servers, options.stores)
        with mock.patch.dict(os.environ, environment):
            cluster = self._clusters.setdefault(key, op_runs.Clusters())[case.world]
            call = _finished if options.two_launches else None
            runs = op_runs.run(cluster, case, call=call)
            # Counters are those of the last launch.
            assert op_runs.check(case, runs, traffic=_uncounted if options.two_launches else None)
        for run in runs:
            assert isinstance(run, op_runs.RankRun)
            assert run.algorithms == (options.algorithm, options.algorithm)

    def close(self) -> None:
        for clusters in self._clusters.values():
            clusters.close()


def worlds() -> Iterator[Worlds]:
    """The body of a fixture."""
    opened = Worlds()
    yield opened
    opened.close()


def _finished(op: str, place: DevicePlace, case: Case, arguments: dict[str, Any]) -> Any:
    return two_launches(op, place, case, arguments).finish()


def _uncounted(case: Case, runs: Sequence[op_runs.RankRun]) -> None:
    pass
