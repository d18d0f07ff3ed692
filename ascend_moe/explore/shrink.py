"""A finding's schedule with as few switches as still show it."""

from __future__ import annotations

import ctypes
from dataclasses import replace

from .campaigns import Finding, finding_of
from .engine import World


def shrink(finding: Finding, library: ctypes.CDLL | None = None, tries: int = 2000) -> Finding:
    """The same kind of finding by a replayed schedule: choices are turned tame, chunk by chunk.

    The result's options have the policy "replay"; its choices other than 0 are the switches that are left.
    """
    # The store order of a schedule follows from its seed: a replay must be told.
    order = finding.options.store_order
    if order == "both":
        order = "unordered" if finding.seed // 10 % 2 else "fifo"
    policy = "exhaustive" if finding.options.policy == "exhaustive" else "replay"
    with World(finding.case.world, library) as world:
        world.load(finding.case)

        def attempt(choices: list[int]) -> Finding | None:
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
                if not any(part):
                    continue
                tries -= 1
                candidate = choices[:begin] + [0] * len(part) + choices[begin + size :]
                found = attempt(candidate)
                if found is not None:
                    best, choices, shrunk = found, candidate, True
                if tries <= 0:
                    break
            if size == 1 and not shrunk:
                break
            size = max(size // 2, 1)
        while choices and choices[-1] == 0:
            choices.pop()
        return replace(best, choices=tuple(choices))
