"""Logs what this package has to say while it works: records of the logger ``ascend_moe``, each with its rank.

A program sees them by Python's ``logging``. Where it has set nothing up, warnings come to stderr, as from every
library; ASCEND_MOE_LOG brings the others there too.
"""

from __future__ import annotations

import functools
import logging

from .. import settings

logger = logging.getLogger("ascend_moe")


def configure() -> None:
    """Follows ASCEND_MOE_LOG where it is set: records of that level and above go to stderr. Read when windows open."""
    if settings.LOG.is_set():
        logger.setLevel(settings.LOG.get().upper())
        _to_stderr()


@functools.cache
def _to_stderr() -> None:
    """One handler for this package's records; those above the root's level go to the program's handlers as well."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)


def say(level: int, text: str, *values: object, rank: int | None = None) -> None:
    """One record: ``text`` with ``values`` as logging formats them; ``rank`` is an attribute of it, None: no rank's."""
    head = "ascend_moe: " if rank is None else f"ascend_moe: rank {rank}: "
    logger.log(level, head + text, *values, extra={"rank": rank})


def unproven(group: str, rank: int, command: str) -> None:
    """The default algorithm of a group is not the fastest one."""
    text = "comm_alg auto is window on group %s: direct's loads are not proven on this machine yet (%s)"
    say(logging.INFO, text, group, command, rank=rank)


def opened(group: str, rank: int, world: int, window_mib: int, lent_mib: int) -> None:
    """A rank's end of a group is open."""
    configure()
    text = "opened the windows of group %s: %d ranks, %d MiB each and %d MiB to lend"
    say(logging.INFO, text, group, world, window_mib, lent_mib, rank=rank)
