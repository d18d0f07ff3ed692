"""Log records of this package on the logger ``ascend_moe``, each with its rank.

Programs receive them through Python's ``logging``. Without configuration warnings go to stderr, as for every library;
ASCEND_MOE_LOG adds the lower levels.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile

from .. import settings
from .._text import reason

logger = logging.getLogger("ascend_moe")


def configure() -> None:
    """Apply ASCEND_MOE_LOG, a level such as "info", if it is set: records of it and above go to stderr."""
    if settings.LOG.is_set():
        logger.setLevel(settings.LOG.get().upper())
        _to_stderr()


@functools.cache
def _to_stderr() -> None:
    """Add one handler for this package's records; the program's own handlers still receive them."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)


def say(level: int, text: str, *values: object, rank: int | None = None) -> None:
    """Log ``text % values`` at a level of `logging`; ``rank`` (None: no rank) is part of text and record."""
    head = "ascend_moe: " if rank is None else f"ascend_moe: rank {rank}: "
    logger.log(level, head + text, *values, extra={"rank": rank})


def saved(prefix: str, suffix: str, text: str) -> tuple[str, bool]:
    """Write a new file in the folder of ASCEND_MOE_CALLS; return (its name, True), or (why it is not there, False)."""
    try:
        file, path = tempfile.mkstemp(prefix=prefix, suffix=suffix, dir=settings.CALLS.get())
        with os.fdopen(file, "w", encoding="utf-8") as out:
            out.write(text + "\n")
    except OSError as error:
        return f"not written: {reason(error)} ({settings.CALLS.name})", False
    return path, True


def unproven(group: str, rank: int, command: str) -> None:
    """Log that comm_alg auto means window on a group, until ``command`` has validated direct on this machine."""
    text = "comm_alg auto is window on group %s: direct is not validated on this machine yet (run %s)"
    say(logging.INFO, text, group, command, rank=rank)


def opened(group: str, rank: int, world: int, window_mib: int, registered_mib: int) -> None:
    """Log that a rank has opened its communicator, after `configure`."""
    configure()
    text = "opened the windows of group %s: %d ranks, %d MiB each and %d MiB for registered buffers"
    say(logging.INFO, text, group, world, window_mib, registered_mib, rank=rank)
