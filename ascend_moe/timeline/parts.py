"""Timelines of several processes: each rank leaves its part beside the trace, rank 0 puts them together."""

from __future__ import annotations

import json
import os
import time
import warnings
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from ..comm.communicator import timeout_s
from ..errors import AscendMoeError
from . import Event, Timeline
from .chrome import write_whole

_POLL_S = 0.02


@dataclass(frozen=True)
class Place:
    """This process among those of the job."""

    rank: int
    world: int


def place() -> Place:
    """By torch.distributed where it is initialised, else by torchrun's variables, else alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Place(torch.distributed.get_rank(), torch.distributed.get_world_size())
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdigit() and world.isdigit() and int(rank) < int(world):
        return Place(int(rank), int(world))
    return Place(0, 1)


def _part(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}.rank{rank}")


def forget(path: Path, here: Place) -> None:
    """Removes this rank's part of an earlier trace, before anybody could take it for one of this."""
    _part(path, here.rank).unlink(missing_ok=True)


def write(timeline: Timeline, path: Path, here: Place) -> None:
    """Leaves this rank's events where rank 0 looks for them."""
    rows = [astuple(event) for event in timeline.events]
    write_whole(_part(path, here.rank), json.dumps({"dropped": timeline.dropped, "events": rows}))


def _read(part: Path) -> tuple[list[Event], int]:
    try:
        found = json.loads(part.read_text())
        return [Event(*row) for row in found["events"]], int(found["dropped"])
    except (ValueError, TypeError, KeyError) as problem:
        raise AscendMoeError(f"{part} is no part of a trace ({problem}): remove it") from problem


def gather(own: Timeline, path: Path, here: Place, *, wait: bool) -> Timeline:
    """The events of all ranks; warns of those that have left none within ASCEND_MOE_TIMEOUT_S."""
    deadline = time.monotonic() + (timeout_s() if wait else 0)
    missing = set(range(here.world)) - {here.rank}
    events, dropped = list(own.events), own.dropped
    while missing:
        for rank in sorted(missing):
            part = _part(path, rank)
            if not part.exists():
                continue
            more, lost = _read(part)
            events += more
            dropped += lost
            part.unlink()
            missing.discard(rank)
        if not missing or time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    if missing:
        warnings.warn(
            f"ascend_moe.trace: ranks {sorted(missing)} have left no {path.name}.rank<r> beside {path}"
            + (f" within {timeout_s():g} s (ASCEND_MOE_TIMEOUT_S)" if wait else "")
            + ": the trace is without them",
            stacklevel=5,
        )
    return Timeline(own.source, events, own.title, own.details, dropped)
