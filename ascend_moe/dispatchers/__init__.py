"""Three dispatchers of MoE rows between EP ranks, with one interface and the same results bit for bit.

* ``MC2Dispatcher``: this package's dispatch and combine ops, over communication windows.
* ``AllToAllDispatcher``: ``torch.distributed`` all-to-all; works with any backend.
* ``AllGatherDispatcher``: ``torch.distributed`` all-gather; W times the traffic, no uneven splits.
"""

from __future__ import annotations

import warnings
from typing import Any

from ascend_moe.call import DEFAULTS
from ascend_moe.dispatchers.base import Dispatched, Dispatcher, InFlight
from ascend_moe.dispatchers.collective import AllGatherDispatcher, AllToAllDispatcher
from ascend_moe.dispatchers.mc2 import MC2Dispatcher
from ascend_moe.errors import need, need_one_of

__all__ = [
    "KINDS",
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "Dispatched",
    "Dispatcher",
    "InFlight",
    "MC2Dispatcher",
    "make_dispatcher",
]

#: Kinds for `make_dispatcher`, named as in Megatron-LM and vllm-ascend.
KINDS = ("mc2", "alltoall", "allgather")


def make_dispatcher(kind: str, group: object, num_experts: int, comm_alg: str = "", **options: Any) -> Dispatcher:
    """Return a new `MC2Dispatcher`, `AllToAllDispatcher` or `AllGatherDispatcher`.

    Args:
        kind: which one, in this order: "mc2", "alltoall" or "allgather".
        group: a group as in `comm.group_of` (None: the default one), or a `comm.place.Place`.
        num_experts: E, a multiple of the group's size.
        comm_alg, options: as for `MC2Dispatcher`; the other kinds support only those of `CollectiveDispatcher`.

    Raises:
        ArgumentError: the kind is unknown or does not support an option, or as the class.
    """
    need_one_of("kind", kind, KINDS)
    if kind == "mc2":
        return MC2Dispatcher.from_group(group, num_experts, comm_alg=comm_alg, **options)
    for name, value in options.items():
        need(name in DEFAULTS or not value, name, "is {!r}, not supported by kind {!r}; leave it out", value, kind)
    known = {name: value for name, value in options.items() if name in DEFAULTS}
    made = AllToAllDispatcher if kind == "alltoall" else AllGatherDispatcher
    return made(group, num_experts, comm_alg=comm_alg, **known)


def __getattr__(name: str) -> Any:
    if name == "WindowDispatcher":  # former name
        warnings.warn("WindowDispatcher is MC2Dispatcher now", DeprecationWarning, stacklevel=2)
        return MC2Dispatcher
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
