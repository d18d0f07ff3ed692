"""Keeps the groups that ``shrink`` and ``grow`` have made of processes: torch.distributed knows nothing of them."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass, field

from ascend_moe.comm.communicator import Communicator
from ascend_moe.errors import AscendMoeError

MARK = "~"  # between the name of the first group and a count


@dataclass
class Regrouped:
    """This rank's end of such a group.

    Attributes:
        communicator: open windows; its name is the group's.
        origins: the ranks' numbers in the group that was first, by rank, ascending.
        first_world: ranks of that group.
        steps: calls of ``grow`` so far.
        door: where processes that come back knock; rank 0's alone.
    """

    communicator: Communicator
    origins: list[int]
    first_world: int
    steps: int = field(default=0)
    door: socket.socket | None = field(default=None)

    @property
    def missing(self) -> list[int]:
        """Ranks of that group that are not in this one."""
        return [rank for rank in range(self.first_world) if rank not in self.origins]


_groups: dict[str, Regrouped] = {}


def add(group: Regrouped) -> None:
    """Makes a group known by its name."""
    _groups[group.communicator.name] = group


def find(name: object) -> Regrouped | None:
    """The open group of this name."""
    group = _groups.get(name) if isinstance(name, str) else None
    return None if group is None or group.communicator.closed else group


def names() -> list[str]:
    return sorted(name for name in _groups if find(name) is not None)


def close(name: str, wait_s: float | None = None) -> None:
    """Closes this rank's end; idempotent."""
    group = _groups.get(name)
    if group is not None:
        group.communicator.close(wait_s=wait_s)
        if group.door is not None:
            group.door.close()
        _groups.pop(name, None)


def first_name(name: str) -> str:
    """The name of the group that a group was made from at first."""
    return name.partition(MARK)[0]


def next_name(name: str) -> str:
    """The name of the group that is made of this one."""
    first, _, count = name.partition(MARK)
    return f"{first}{MARK}{int(count or 0) + 1}"


def close_all() -> None:
    """At exit."""
    for name in list(_groups):
        with contextlib.suppress(AscendMoeError):
            close(name, wait_s=1)


os.register_at_fork(after_in_child=_groups.clear)
