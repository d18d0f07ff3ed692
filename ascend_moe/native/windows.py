"""Sizes and layouts of windows, and timeouts, from the settings at the time a communicator opens.

A window's first page contains, after the words of csrc/abi/window.h, the state of its rank in the opening.
"""

from __future__ import annotations

import math
import os
from typing import NamedTuple

from .. import settings
from ..errors import ArgumentError, need
from ..settings import CONTEXTS

MIB = 1 << 20
CONTEXT_TABLE, CONTEXT_A3, CONTEXT_A2 = range(len(CONTEXTS))
MEMFD = "ascend_moe-window"
PAGE_BYTES = 4096
OPEN, READY, DONE, LEFT = "open", "ready", "done", "left"  # LEFT is never written: it follows from the closed word
STATE_AT, STATE_BYTES = 2304, 256
_NPU_TIMEOUT_S = 300.0
# Default of HCCL_EXEC_TIMEOUT, after which the runtime stops an operator.
_HCCL_EXEC_TIMEOUT_S = 1836.0
_MARGIN_S = 10.0
A2_STATE_MIB = 1  # part of HCCL_BUFFSIZE if the state has no window of its own


class OpeningState(NamedTuple):
    """A rank's progress (``word``) in the opening ``token``; ``digest``: of all ranks' tokens, "" until known."""

    token: str
    word: str
    digest: str
    rank: int
    world: int
    name: str

    def text(self) -> str:
        # Fixed columns: a reader that sees a partly written state reads an invalid word or digest.
        return f"{self.token:32}{self.word:8}{self.digest:64}{self.rank:4}{self.world:4}{self.name}"


def opening_of(page: bytes) -> OpeningState | None:
    """Return the state that a rank has written into its window's first page, or None if there is none."""
    text = page[STATE_AT : STATE_AT + STATE_BYTES].partition(b"\0")[0].decode(errors="replace")
    rank, world = text[104:108].strip(), text[108:112].strip()
    if not (rank.isdigit() and world.isdigit()):
        return None
    return OpeningState(text[:32], text[32:40].strip(), text[40:104].strip(), int(rank), int(world), text[112:])


def timeout_s() -> float:
    """Return the seconds to wait for a peer on the CPU: ASCEND_MOE_TIMEOUT_S, default 60."""
    return settings.TIMEOUT_S.get()


def deadline_s(first: bool) -> float:
    """Return the seconds that a kernel on an NPU waits for a peer: ASCEND_MOE_TIMEOUT_S, default 300.

    Twice as long for a communicator's ``first`` op, whose peers may still be compiling; at most 10 s less than
    HCCL_EXEC_TIMEOUT (default 1836), after which the runtime stops the operator.
    """
    given = timeout_s() if settings.TIMEOUT_S.is_set() else _NPU_TIMEOUT_S
    text = os.environ.get("HCCL_EXEC_TIMEOUT", "").strip()
    try:
        runtime = float(text) if text else _HCCL_EXEC_TIMEOUT_S
    except ValueError:
        runtime = _HCCL_EXEC_TIMEOUT_S
    limit = runtime - _MARGIN_S if runtime > 2 * _MARGIN_S and math.isfinite(runtime) else math.inf
    return min(given * (2 if first else 1), limit)


def ranks_per_server() -> int:
    """Return the setting ASCEND_MOE_RANKS_PER_SERVER, ranks per server; 0 (default): not set."""
    return settings.RANKS_PER_SERVER.get()


def context_kind() -> int:
    """Return the layout of the CPU kernels' communication context: ASCEND_MOE_CONTEXT, as an index into ``CONTEXTS``.

    ``table`` (default) is this package's own layout; ``a3`` and ``a2`` are HCCL's. Servers that are simulated by
    ASCEND_MOE_RANKS_PER_SERVER need ``a2``, then the default; ArgumentError is raised for another layout.
    """
    servers = ranks_per_server()
    layout = settings.CONTEXT.get() or ("a2" if servers else "table")
    if servers and layout != "a2":
        name = settings.CONTEXT.name
        raise ArgumentError(
            f"{name}={layout} with {settings.RANKS_PER_SERVER.name}={servers}: simulated servers need a2, the only "
            f"layout that supports RDMA between ranks: unset {name} or {settings.RANKS_PER_SERVER.name}",
            argument=name,
        )
    return CONTEXTS.index(layout)


def window_data_bytes(window_mib: int | None = None) -> int:
    """Return the bytes of one rank's data area, which is its whole window or, with an A2 context, all but one MiB.

    The window has ``window_mib`` MiB; None: HCCL_BUFFSIZE, default 200. An A2's last MiB is the state area. Raises
    ArgumentError if the number is invalid.
    """
    if window_mib is not None:
        name, is_number = "window_mib", isinstance(window_mib, int) and not isinstance(window_mib, bool)
        need(is_number, name, "must be an int, not {!r}", window_mib)
        value = settings.HCCL_BUFFSIZE.value_of(str(window_mib), name)
    else:
        name = settings.HCCL_BUFFSIZE.name
        value = settings.HCCL_BUFFSIZE.get()
    if context_kind() == CONTEXT_A2:
        if value <= A2_STATE_MIB:
            raise ArgumentError(f"{name}={value} must be at least {A2_STATE_MIB + 1} with an A2 context", argument=name)
        value -= A2_STATE_MIB
    return value * MIB


def window_registered_bytes(data_bytes: int) -> int:
    """Return the bytes of one rank's memory for `window_empty`: ASCEND_MOE_REGISTERED_MIB, default ``data_bytes``.

    Pages use memory only once they are written.
    """
    registered_mib = settings.REGISTERED_MIB.get()
    return data_bytes if registered_mib is None else registered_mib * MIB
