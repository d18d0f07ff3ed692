"""Explore mode: our kernels on the checked engine, all ranks and cores in one thread, by many schedules.

    from ascend_moe import explore
    result = explore.explore(explore.Program(world=2, cores=2), schedules=1000)
    assert not result.finding, result.finding.line()

A finding is a race, a missing synchronisation, a stale or lost scalar access, a hang, or a result that is not
the reference's, in any schedule; its line runs that one schedule again.
"""

from __future__ import annotations

from .campaigns import Finding, Result, campaign, exhaustive, explore, shrink
from .engine import POLICIES, Faults, Options, World, checked_library
from .program import Program, draw, parse

__all__ = [
    "POLICIES",
    "Faults",
    "Finding",
    "Options",
    "Program",
    "Result",
    "World",
    "campaign",
    "checked_library",
    "draw",
    "exhaustive",
    "explore",
    "parse",
    "shrink",
]
