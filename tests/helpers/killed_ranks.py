"""A rank that is killed at any step of a case, and what the others make of it."""

from __future__ import annotations

from pathlib import Path

from error_codes import PEER_LOST, TIMEOUT

from ascend_moe import explore
from ascend_moe.explore import Faults, Options, Program, World

KILLED_AT = range(0, 900, 30)


def killed(case: Program, library: Path | None = None) -> tuple[int, int]:
    """Ops of the others that named the killed rank, and that were right; AssertionError for any other end."""
    loaded = None if library is None else explore.checked_library(library)
    lost = finished = 0
    with World(case.world, library=loaded) as world:
        program = world.load(case, accepted=1 | 1 << PEER_LOST | 1 << TIMEOUT)
        for step in KILLED_AT:
            faults = Faults(kill_rank=case.world - 1, kill_step=step)
            run = world.run(step, 1, Options(hang_is_finding=False, faults=faults))
            assert not run.failed, run.message
            for call, (code, text) in zip(program.calls, world.errors(), strict=True):
                if call.rank == case.world - 1:
                    continue
                assert code in (0, PEER_LOST), (step, code, text)
                lost += code == PEER_LOST
                finished += code == 0
    return lost, finished
