"""Runs one schedule of a world, and tells what each rank's ops came to."""

from __future__ import annotations

from dataclasses import dataclass

from ascend_moe.explore import Faults, Options, World
from ascend_moe.native.library import lib


def code_of(name: str) -> int:
    """The first error code with this name."""
    return next(code for code in range(1, 64) if lib().am_error_name(code).decode() == name)


OK = 0
PEER_LOST = code_of("PeerLost")
INVALID_EXPERT_ID = code_of("InvalidExpertId")
CONFIG_MISMATCH = code_of("ConfigMismatch")
ROUTING_MISMATCH = code_of("RoutingMismatch")


@dataclass
class Seen:
    """One schedule: by rank, the error codes of its ops and their messages; -1 for one that did not end."""

    codes: list[list[int]]
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
    program = world.program
    assert program is not None
    codes: list[list[int]] = [[] for _ in range(world.size)]
    texts: list[list[str]] = [[] for _ in range(world.size)]
    for call, (code, text) in zip(program.calls, world.errors(), strict=True):
        codes[call.rank].append(code)
        texts[call.rank].append(text)
        assert "\n" not in text
    return Seen(codes, texts, run.steps, bool(run.time_passed))


def bits(*codes: int) -> int:
    return sum(1 << code for code in codes)
