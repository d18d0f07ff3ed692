"""Runs one schedule of a world, and tells what each rank's ops came to."""

from __future__ import annotations

from dataclasses import dataclass

from ascend_moe.explore import Faults, Options, World, checked_library
from ascend_moe.explore.engine import error_codes

OK, PEER_LOST, INVALID_EXPERT_ID = "", "PeerLost", "InvalidExpertId"
CONFIG_MISMATCH, ROUTING_MISMATCH = "ConfigMismatch", "RoutingMismatch"


@dataclass
class Seen:
    """One schedule: by rank, the names of its ops' errors and their messages; "unfinished" for one that did not end."""

    errors: list[list[str]]
    texts: list[list[str]]
    steps: int
    time_passed: bool


def seen(world: World, seed: int, policy: str, **faults: object) -> Seen:
    """Runs one schedule. No races, no hang, no wrong result, no error that is not accepted.

    Time passes when nothing can move, and waits end at their deadline.
    """
    options = Options(policy=policy, hang_is_finding=False, faults=Faults(**faults))  # type: ignore[arg-type]
    run = world.run(seed, 1, options)
    assert not run.failed, f"{run.kind.decode()}: {run.message.decode()}\n{options}"
    errors, texts = ([[call[part] for call in calls] for calls in world._by_rank()] for part in (0, 1))
    assert not any("\n" in text for each in texts for text in each)
    return Seen(errors, texts, run.steps, bool(run.time_passed))


def bits(*errors: str) -> int:
    """The errors that ``World.load`` is to accept."""
    codes = error_codes(checked_library())
    return sum(codes[error] for error in errors)
