"""Open groups of processes that ``shrink`` has made, by name. torch.distributed does not know them."""

from __future__ import annotations

import contextlib
import os

from ascend_moe.comm.communicator import Communicator
from ascend_moe.errors import AscendMoeError

_MARK = "~"  # between the name of the first group and a count
_groups: dict[str, Communicator] = {}


def add(group: Communicator) -> None:
    """Make a group known by its name."""
    _groups[group.name] = group


def find(name: object) -> Communicator | None:
    """Return this rank's end of the open group of this name."""
    return _groups.get(name) if isinstance(name, str) else None


def names() -> list[str]:
    """Return the names of the open groups."""
    return sorted(_groups)


def close(name: str, wait_s: float | None = None) -> None:
    """Close this rank's end; idempotent."""
    group = _groups.get(name)
    if group is not None:
        try:
            group.close(wait_s=wait_s)
        finally:
            if group.closed:
                _groups.pop(name, None)


def next_name(name: str) -> str:
    """Return the name of the group that is made from this one."""
    first, _, count = name.partition(_MARK)
    return f"{first}{_MARK}{int(count or 0) + 1}"


def close_all() -> None:
    """Close all groups at exit."""
    for name in list(_groups):
        with contextlib.suppress(AscendMoeError):
            close(name, wait_s=1)


os.register_at_fork(after_in_child=_groups.clear)
