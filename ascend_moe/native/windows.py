"""Sizes and layouts of windows, and waits, as the settings say when a communicator opens."""

from __future__ import annotations

from .. import settings
from ..errors import ArgumentError
from ..settings import CONTEXTS

MIB = 1 << 20
CONTEXT_TABLE, CONTEXT_A3, CONTEXT_A2 = range(len(CONTEXTS))
A2_STATE_MIB = 1  # of HCCL_BUFFSIZE, where the state has no window of its own


def timeout_s() -> float:
    """Seconds to wait for a peer: ASCEND_MOE_TIMEOUT_S, default 60."""
    return settings.TIMEOUT_S.get()


def ranks_per_server() -> int:
    """Ranks that share a server: ASCEND_MOE_RANKS_PER_SERVER; 0, the default, means all ranks."""
    return settings.RANKS_PER_SERVER.get()


def near_stores() -> int:
    """1: stores reach the other ranks of this server, where ranks are on several: ASCEND_MOE_NEAR_STORES, default 0."""
    return int(settings.NEAR_STORES.get())


def rdma_flags() -> int:
    """1: rows between servers lie in flagged blocks: ASCEND_MOE_RDMA_FLAGS, default 0."""
    return int(settings.RDMA_FLAGS.get())


def context_kind() -> int:
    """Layout of the communication context of CPU kernels: ASCEND_MOE_CONTEXT, as an index into ``CONTEXTS``.

    ``table`` (the default) is this package's own; ``a3`` and ``a2`` are laid out as HCCL's. Servers need
    ``a2``, which is the default with them.
    """
    servers = ranks_per_server()
    layout = settings.CONTEXT.get() or ("a2" if servers else "table")
    if servers and layout != "a2":
        name = settings.CONTEXT.name
        raise ArgumentError(
            f"{name}={layout} with {settings.RANKS_PER_SERVER.name}={servers}: servers need a2, the one layout with a "
            "windowsOut that HCCL's server carries rows from; in the others stores reach every rank",
            argument=name,
        )
    return CONTEXTS.index(layout)


def window_data_bytes(window_mib: int | None = None) -> int:
    """Bytes of one rank's data area: ``window_mib``, else HCCL_BUFFSIZE (MiB), else 200 MiB.

    With an A2 context one MiB of it is the state area.
    """
    if window_mib is not None:
        if isinstance(window_mib, bool) or not isinstance(window_mib, int):
            raise ArgumentError(f"window_mib must be an int, not {window_mib!r}", argument="window_mib")
        name = "window_mib"
        value = settings.HCCL_BUFFSIZE.value_of(str(window_mib), name)
    else:
        name = settings.HCCL_BUFFSIZE.name
        value = settings.HCCL_BUFFSIZE.get()
    if context_kind() == CONTEXT_A2:
        if value <= A2_STATE_MIB:
            raise ArgumentError(f"{name}={value} must be at least {A2_STATE_MIB + 1} with an A2 context", argument=name)
        value -= A2_STATE_MIB
    return value * MIB


def window_lent_bytes(data_bytes: int) -> int:
    """Bytes of one rank's lent area, which has the tensors of ``window_empty``: ASCEND_MOE_LENT_MIB.

    The default is the data area's size. Only pages that are written take memory.
    """
    lent_mib = settings.LENT_MIB.get()
    return data_bytes if lent_mib is None else lent_mib * MIB
