"""Searches cores, their roles, copies and algorithm of dispatch and combine on the timed engine's model.

Coordinates are searched one after the other, from the tiling's own choice on. What is taken must be faster
than that on the routing that was searched and on another one; else the own choice stays. All times are a
model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from . import tune_plan
from .plan import Request
from .timed import predict
from .tuning import OPS, Entry

LEAST_GAIN = 0.005  # smaller ones are not worth an entry's difference
PASSES = 2
SEARCHED, OTHER = 0, 1  # seeds of the routing
_CORE_PARTS = (7 / 8, 3 / 4, 2 / 3, 1 / 2, 3 / 8, 1 / 3, 1 / 4)
_LIST_PARTS = (1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 4)
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


@dataclass(frozen=True)
class Setting:
    """Of one op: AIV cores, rows in flight, rows of a copy, 0: the tiling's own choice; and of direct
    dispatch the cores that make lists while the others publish rows, 0: all do both."""

    cores: int = 0
    ring: int = 0
    rows: int = 0
    list_cores: int = 0


OWN = Setting()


@dataclass(frozen=True)
class Choice:
    """What the search found for one op and algorithm, µs of the model.

    Attributes:
        setting: the best one, ``OWN`` where none was better.
        own_us, tuned_us: of the tiling's own choice and of the setting, on the routing that was searched.
        other_own_us, other_tuned_us: the same on another routing, which the search has not seen.
    """

    op: str
    algorithm: str
    setting: Setting
    own_us: float
    tuned_us: float
    other_own_us: float
    other_tuned_us: float

    def entry(self, shape: Request) -> Entry:
        return Entry(
            self.op,
            shape.soc,
            shape.ranks,
            shape.experts,
            shape.topk,
            shape.hidden,
            shape.batch,
            shape.dtype,
            shape.quant and self.op == "dispatch",
            0,
            self.algorithm,
            self.setting.cores,
            self.setting.ring,
            self.setting.rows,
            self.setting.list_cores if self.op == "dispatch" else 0,
            round(self.own_us, 2),
            round(self.tuned_us, 2),
        )


class Times(Protocol):
    """What of ``timed.Prediction`` the search reads."""

    @property
    def dispatch_us(self) -> float: ...
    @property
    def combine_us(self) -> float: ...


Model = Callable[[Request, str, Setting, int], Times]  # of a shape, an algorithm, a setting, a seed


def model(shape: Request, algorithm: str, setting: Setting, seed: int) -> Times:
    """The timed engine."""
    return predict(
        shape,
        algorithm=algorithm,
        cores=setting.cores or None,
        ring=setting.ring or None,
        rows=setting.rows or None,
        list_cores=setting.list_cores,
        seed=seed,
    )


@dataclass
class Search:
    """The search of one shape with one algorithm.

    Attributes:
        limit: most evaluations; those of the other routing come on top.
        evaluations: how many there were, all in all.
    """

    shape: Request
    algorithm: str
    limit: int
    times: Model = model
    evaluations: int = 0
    _known: dict[tuple[Setting, int], dict[str, float]] = field(default_factory=dict)

    def run(self) -> list[Choice]:
        """A choice for dispatch and one for combine."""
        best = dict.fromkeys(OPS, OWN)
        self._us(OWN)
        for _ in range(PASSES):
            before = dict(best)
            for candidates in self._coordinates():
                for op in OPS:
                    for setting in candidates(best[op]):
                        if self._full(setting):
                            break
                        self._us(setting)
                # An evaluation is one of both ops.
                best = {op: self._best(op) for op in OPS}
            if best == before:
                break
        return [self._choice(op, best[op]) for op in OPS]

    def _full(self, setting: Setting) -> bool:
        return (setting, SEARCHED) not in self._known and self.evaluations >= self.limit

    def _best(self, op: str) -> Setting:
        """The fastest; of equals the one that was looked at first, which asks for least."""
        seen = [setting for setting, seed in self._known if seed == SEARCHED]
        return min(seen, key=lambda setting: self._us(setting)[op])

    def _us(self, setting: Setting, seed: int = SEARCHED) -> dict[str, float]:
        if (setting, seed) not in self._known:
            found = self.times(self.shape, self.algorithm, setting, seed)
            self.evaluations += 1
            self._known[setting, seed] = {"dispatch": found.dispatch_us, "combine": found.combine_us}
        return self._known[setting, seed]

    def _coordinates(self) -> Iterator[Callable[[Setting], Iterator[Setting]]]:
        taken = self._tiling()
        cores = sorted({max(1, round(self.shape.cores * part)) for part in _CORE_PARTS}, reverse=True)
        yield lambda at: (replace(at, cores=n) for n in (0, *cores) if n != self.shape.cores)
        if self.algorithm == "direct":
            yield self._roles
        yield lambda at: (replace(at, ring=n) for n in range(taken["ring"]))
        yield lambda at: (replace(at, rows=n) for n in (0, *_ROWS) if n < taken["rows"])

    def _roles(self, at: Setting) -> Iterator[Setting]:
        """Of the cores that are launched."""
        launched = at.cores or self.shape.cores
        lists = sorted({max(1, round(launched * part)) for part in _LIST_PARTS} | {0})
        return (replace(at, list_cores=n) for n in lists if n < launched)

    def _tiling(self) -> dict[str, int]:
        """The most that the tiling of either op takes by itself."""
        entries = [Choice(op, self.algorithm, OWN, 0, 0, 0, 0).entry(self.shape) for op in OPS]
        return tune_plan.largest(entries)

    def _choice(self, op: str, setting: Setting) -> Choice:
        def us(one: Setting, seed: int) -> float:
            return self._us(one, seed)[op]

        gains = us(setting, SEARCHED) <= us(OWN, SEARCHED) * (1 - LEAST_GAIN)
        if not gains or us(setting, OTHER) >= us(OWN, OTHER):
            setting = OWN
        return Choice(
            op,
            self.algorithm,
            setting,
            us(OWN, SEARCHED),
            us(setting, SEARCHED),
            us(OWN, OTHER),
            us(setting, OTHER),
        )


def entries_of(shape: Request, choices: Sequence[Choice]) -> list[Entry]:
    """A shape's entries, of each op the fastest algorithm first: that is what comm_alg "auto" takes."""
    ordered = sorted(choices, key=lambda one: (OPS.index(one.op), one.tuned_us))
    return [choice.entry(shape) for choice in ordered]
