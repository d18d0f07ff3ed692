"""Many schedules of one case, or of many cases; the first finding as one line that repeats it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from .case import Case, draw
from .engine import Options, RunResult, World

# One case after another has this many schedules: enough to tell schedules apart, few enough to see cases.
SCHEDULES_A_CASE = 100


@dataclass(frozen=True)
class Finding:
    """What a schedule showed: kind (as the engine names it) and text, the case, the seed of the schedule."""

    kind: str
    message: str
    case: Case
    seed: int
    options: Options
    choices: tuple[int, ...] = ()

    def command(self) -> str:
        """The command that runs this one schedule again."""
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
        """Kind, text and command in one line."""
        return f"{self.message} | repeat: {self.command()}"


@dataclass
class Result:
    """Counts over all schedules, and the first finding or None."""

    schedules: int = 0
    cases: int = 0
    steps: int = 0
    instructions: int = 0
    distinct: int = 0
    seconds: float = 0.0
    polls: dict[str, tuple[int, int]] = field(default_factory=dict)
    finding: Finding | None = None

    def add_polls(self, polls: dict[str, tuple[int, int]]) -> None:
        """Counts of one world on top."""
        for place, (waiting, ready) in polls.items():
            before = self.polls.get(place, (0, 0))
            self.polls[place] = before[0] + waiting, before[1] + ready


def explore(
    case: Case,
    schedules: int = 1000,
    seed: int = 0,
    options: Options | None = None,
    library: ctypes.CDLL | None = None,
) -> Result:
    """Schedules ``seed`` .. ``seed + schedules - 1`` of one case, to the first finding."""
    return campaign([case], schedules, seed, options, library, a_case=schedules)


def campaign(
    cases: Iterable[Case] | None = None,
    schedules: int = 10_000,
    seed: int = 0,
    options: Options | None = None,
    library: ctypes.CDLL | None = None,
    a_case: int = SCHEDULES_A_CASE,
    progress: Callable[[Result], None] | None = None,
) -> Result:
    """At most ``schedules`` schedules over the cases (default: drawn from ``seed`` on), ``a_case`` each."""
    options = options or Options()
    result, start = Result(), time.monotonic()
    worlds: dict[int, World] = {}
    chosen = iter(cases) if cases is not None else (draw(seed + n) for n in range(schedules))
    try:
        for case in chosen:
            count = min(a_case, schedules - result.schedules)
            if count <= 0:
                break
            world = worlds.get(case.world)
            if world is None:
                world = worlds[case.world] = World(case.world, library)
            world.load(case)
            run = world.run(seed + result.schedules, count, options)
            result.cases += 1
            result.schedules += run.schedules
            result.steps += run.steps
            result.instructions += run.instructions
            result.seconds = time.monotonic() - start
            if run.failed:
                result.finding = finding_of(run, case, options, world)
                break
            if progress is not None:
                progress(result)
    finally:
        for world in worlds.values():
            result.distinct += world.distinct()
            result.add_polls(world.polls())
            world.close()
    result.seconds = time.monotonic() - start
    return result


def finding_of(run: RunResult, case: Case, options: Options, world: World) -> Finding:
    """The finding of a failed run."""
    kind, message, seed = run.kind.decode(), run.message.decode(), run.failed_seed
    if not message.startswith(kind):
        message = f"{kind}: {message}"
    return Finding(kind, message, case, seed, replace(options), tuple(world.choices()))
