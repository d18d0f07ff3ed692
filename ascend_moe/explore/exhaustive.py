"""All schedules of a small case with at most a few switches away from the tame one."""

from __future__ import annotations

import ctypes
import time
from dataclasses import replace

from .campaigns import Result, finding_of
from .case import Case
from .engine import Options, World


def exhaustive(
    case: Case,
    preemptions: int = 1,
    options: Options | None = None,
    library: ctypes.CDLL | None = None,
    limit: int | None = None,
) -> Result:
    """Every order of cores, pipes and stores with at most ``preemptions`` choices other than the first.

    ``limit`` ends it early; ``Result.schedules`` says how many were run.
    """
    options = replace(options or Options(store_order="unordered", vary_epoch=False), policy="exhaustive")
    result, start = Result(cases=1), time.monotonic()
    with World(case.world, library) as world:
        world.load(case)
        prefix: list[int] | None = []
        while prefix is not None and (limit is None or result.schedules < limit):
            run = world.run(0, 1, replace(options, choices=tuple(prefix)))
            result.schedules += 1
            result.steps += run.steps
            result.instructions += run.instructions
            if run.failed:
                result.finding = finding_of(run, case, replace(options, choices=tuple(prefix)), world)
                break
            prefix = _next(world.choices(), world.choices(widths=True), preemptions)
        result.distinct = world.distinct()
        result.add_polls(world.polls())
    result.seconds = time.monotonic() - start
    return result


def _next(choices: list[int], widths: list[int], preemptions: int) -> list[int] | None:
    """The next schedule in depth-first order, or None after the last."""
    used = sum(1 for choice in choices if choice)
    for at in range(len(choices) - 1, -1, -1):
        here = choices[at]
        used -= 1 if here else 0  # switches before this point
        if here + 1 < widths[at] and used < preemptions:
            return [*choices[:at], here + 1]
    return None
