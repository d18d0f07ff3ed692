"""Explore mode: the kernels on the checked engine, all ranks and cores in one thread, under many schedules.

    from ascend_moe import explore
    result = explore.explore(explore.Program(world=2, cores=2), schedules=1000)
    assert not result.finding, result.finding.line()

A finding is a race, a missing synchronization, a stale or lost scalar access, a hang, or a result that differs from
the reference. Its line contains the command that repeats the schedule.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from .draws import draw, draw_for, draw_large
from .engine import POLICIES, Faults, Options, RunResult, World, checked_library
from .faults import FAULTS, applies, with_fault
from .program import Program, is_large, parse, window_mib
from .reached import REACHED, reached

__all__ = [
    "FAULTS",
    "POLICIES",
    "REACHED",
    "Faults",
    "Options",
    "Program",
    "Result",
    "ScheduleFinding",
    "World",
    "applies",
    "campaign",
    "checked_library",
    "draw",
    "draw_large",
    "exhaustive",
    "explore",
    "parse",
    "shrink",
    "with_fault",
]


@dataclass(frozen=True)
class ScheduleFinding:
    """A fault found in a schedule: kind and text, and the case, seed, options and choices that repeat the schedule."""

    kind: str
    message: str
    case: Program
    seed: int
    options: Options
    choices: tuple[int, ...] = ()

    def command(self) -> str:
        """Return the `ascend-moe explore` command that repeats this schedule."""
        words = [f"ascend-moe explore --case {self.case} --seed {self.seed} --schedules 1"]
        if self.options.policy != "mixed":
            words.append(f"--policy {self.options.policy}")
        if self.options.store_order != "both":
            words.append(f"--stores {self.options.store_order}")
        moved = [f"{at}:{choice}" for at, choice in enumerate(self.choices) if choice]
        if self.options.policy in ("replay", "exhaustive"):
            words.append(f"--replay {','.join(moved) or '0:0'}")
        return " ".join(words)

    def line(self) -> str:
        """Return the message, which begins with the kind, and the command in one line."""
        return f"{self.message} | repeat: {self.command()}"


@dataclass
class Result:
    """Counts over all schedules, and the first finding or None.

    ``distinct``: different traces. ``polls``: place in a kernel -> (times its flag was not ready, times it was).
    ``reached``: part of the kernels, a name in `REACHED` -> number of cases that reach it.
    """

    schedules: int = 0
    cases: int = 0
    steps: int = 0
    instructions: int = 0
    distinct: int = 0
    seconds: float = 0.0
    polls: dict[str, tuple[int, int]] = field(default_factory=dict)
    reached: Counter[str] = field(default_factory=Counter)
    finding: ScheduleFinding | None = None

    def add(self, run: RunResult) -> None:
        """Add the schedules, steps and instructions of a run."""
        self.schedules += run.schedules
        self.steps += run.steps
        self.instructions += run.instructions

    def add_world(self, world: World) -> None:
        """Add the distinct traces and the polls of a world."""
        self.distinct += world.distinct()
        for place, (waiting, ready) in world.polls().items():
            before = self.polls.get(place, (0, 0))
            self.polls[place] = before[0] + waiting, before[1] + ready


def explore(
    case: Program,
    schedules: int = 1000,
    seed: int = 0,
    options: Options | None = None,
    library: ctypes.CDLL | None = None,
) -> Result:
    """Run ``schedules`` schedules of a case from ``seed`` on, of a large one at most 2; stop at the first finding."""
    return campaign([case], schedules, seed, options, library, a_case=schedules)


def campaign(
    cases: Iterable[Program] | None = None,
    schedules: int = 10_000,
    seed: int = 0,
    options: Options | None = None,
    library: ctypes.CDLL | None = None,
    a_case: int = 0,
    progress: Callable[[Result], None] | None = None,
) -> Result:
    """Run up to ``schedules`` schedules of ``cases`` in all; stop at the first finding. None: random cases by ``seed``.

    ``a_case``: schedules per case; 0: one, or for a random case as many as its kind has in draws.py. Ignored for large
    cases: 2, or their kind's. ``progress``: called with the result so far after each case without a finding.
    ``library``: the checked engine's; None: the installed one.
    """
    options = options or Options()
    result, start = Result(), time.monotonic()
    drawn = (draw_for(place, seed) for place in itertools.count())
    chosen = ((case, 2 if is_large(case) else 1) for case in cases) if cases is not None else drawn
    worlds = _Worlds(library, result)
    try:
        for case, usual in chosen:
            count = min(usual if is_large(case) else a_case or usual, schedules - result.schedules)
            if count <= 0:
                break
            world = worlds.of(case)
            program = world.load(case)
            if not case.fault_kind:  # a faulty run may end before
                result.reached.update(reached(program))
            before = world.survived
            run = world.run(seed + result.schedules, count, options)
            result.reached.update(["lost rank"] if world.survived > before else [])
            result.cases += 1
            result.add(run)
            result.seconds = time.monotonic() - start
            if run.failed:
                result.finding = finding_of(run, case, options, world)
                break
            if progress is not None:
                progress(result)
    finally:
        worlds.close()
    result.seconds = time.monotonic() - start
    return result


class _Worlds:
    """Worlds by number of ranks, reused for small cases; the world of a large case is closed after it."""

    def __init__(self, library: ctypes.CDLL | None, result: Result) -> None:
        self._library, self._result = library, result
        self._open: dict[int, World] = {}

    def of(self, case: Program) -> World:
        """Return the world of a case, after closing that of a large case before."""
        self._close(0)
        key = 0 if is_large(case) else case.world
        if key not in self._open:
            self._open[key] = World(case.world, self._library, window_mib(case))
        return self._open[key]

    def close(self) -> None:
        for key in list(self._open):
            self._close(key)

    def _close(self, key: int) -> None:
        world = self._open.pop(key, None)
        if world is not None:
            self._result.add_world(world)
            world.close()


def finding_of(run: RunResult, case: Program, options: Options, world: World) -> ScheduleFinding:
    """Return the finding of a failed ``run``, with the choices of ``world``'s last schedule."""
    kind, message, seed = run.kind.decode(), run.message.decode(), run.failed_seed
    if not message.startswith(kind):
        message = f"{kind}: {message}"
    return ScheduleFinding(kind, message, case, seed, replace(options), tuple(world.choices()))


# ---- all schedules of a small program with at most a few switches from the default one


def exhaustive(case: Program, preemptions: int = 1, limit: int | None = None) -> Result:
    """Run every schedule in which at most ``preemptions`` choices of core, pipe or store differ from the default (0).

    ``limit``: maximum number of schedules; None: all of them.
    """
    options = Options(policy="exhaustive", store_order="unordered", vary_epoch=False)
    result, start = Result(cases=1), time.monotonic()
    with World(case.world, None, window_mib(case)) as world:
        world.load(case)
        prefix: list[int] | None = []
        while prefix is not None and (limit is None or result.schedules < limit):
            options = replace(options, choices=tuple(prefix))
            run = world.run(0, 1, options)
            result.add(run)
            if run.failed:
                result.finding = finding_of(run, case, options, world)
                break
            prefix = _next(world.choices(), world.choices(widths=True), preemptions)
        result.add_world(world)
    result.seconds = time.monotonic() - start
    return result


def _next(choices: list[int], widths: list[int], preemptions: int) -> list[int] | None:
    """Return the next schedule in depth-first order, or None after the last."""
    used = sum(1 for choice in choices if choice)
    for at in range(len(choices) - 1, -1, -1):
        here = choices[at]
        used -= 1 if here else 0  # switches before this point
        if here + 1 < widths[at] and used < preemptions:
            return [*choices[:at], here + 1]
    return None


# ---- the schedule with the fewest switches that still shows a finding


def shrink(finding: ScheduleFinding, library: ctypes.CDLL | None = None, tries: int = 2000) -> ScheduleFinding:
    """Return a finding of the same kind in a schedule with fewer switches, found by at most ``tries`` replays.

    Switches are choices other than 0, the default. If a replay does not show ``finding`` again, it is returned as is.
    """
    # the store order follows from the seed of a schedule, a replay needs it explicitly
    order = finding.options.store_order
    if order == "both":
        order = "unordered" if finding.seed // 10 % 2 else "fifo"
    policy = "exhaustive" if finding.options.policy == "exhaustive" else "replay"
    with World(finding.case.world, library, window_mib(finding.case)) as world:
        world.load(finding.case)

        def attempt(choices: list[int]) -> ScheduleFinding | None:
            options = replace(finding.options, policy=policy, store_order=order, choices=tuple(choices))
            run = world.run(finding.seed, 1, options)
            if not run.failed or run.kind.decode() != finding.kind:
                return None
            return replace(finding_of(run, finding.case, options, world), choices=tuple(choices))

        best = attempt(list(finding.choices))
        if best is None:
            return finding
        choices, size = list(finding.choices), max(len(finding.choices) // 2, 1)
        while tries > 0:
            shrunk = False
            for begin in range(0, len(choices), size):
                part = choices[begin : begin + size]
                if not any(part) or tries <= 0:
                    continue
                tries -= 1
                candidate = choices[:begin] + [0] * len(part) + choices[begin + size :]
                if (found := attempt(candidate)) is not None:
                    best, choices, shrunk = found, candidate, True
            if size == 1 and not shrunk:
                break
            size = max(size // 2, 1)
        while choices and choices[-1] == 0:
            choices.pop()
        return replace(best, choices=tuple(choices))
