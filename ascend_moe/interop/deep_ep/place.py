"""Which group a Buffer is of, its dispatchers, and the rules of its arguments."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ascend_moe import comm
from ascend_moe.comm.place import Place
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.errors import ArgumentError, need

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Group: TypeAlias = "ProcessGroup | DeviceMesh | str | tuple[str, int, int]"

R = TypeVar("R")

ROW_BYTES = 32  # rows of the ops are a multiple of this
MOST_EXPERTS = 1 << 16  # tensors have a number for each: far above what the ops take, and small


@dataclass(frozen=True)
class BufferPlace(Place):
    """The place of a Buffer's rank, and the servers of its group."""

    @classmethod
    def of_group(cls, group: Group) -> BufferPlace:
        """Makes it of a Buffer's ``group``, as `Place.of` takes it. Raises ArgumentError for None, MPI's."""
        need(group is not None, "group", "is None; pass a process group (MPI's communicators are not taken)")
        return cls.of(group)

    @cached_property
    def ranks_per_server(self) -> int:
        """0: one server."""
        here = comm.ranks_per_server(self.group_ep, self.world, self.rank)
        equal = not here or here > self.world or self.world % here == 0
        need(equal, "group", "has {} ranks, {} a server; a Buffer needs as many on every server", self.world, here)
        return here if here < self.world else 0

    def need_one_server(self, what: str, why: str) -> None:
        """Raise ArgumentError where the ranks are on several servers, for what cannot run comm_alg "hierarchy"."""
        rule = "has {} ranks, {} a server; {} is not there between servers, because comm_alg 'hierarchy' {}: use {}"
        servers, instead = self.ranks_per_server, "deep_ep.Buffer's dispatch and combine"
        need(not servers, "group", rule, self.world, servers, what, why, instead)

    def local_experts(self, experts: int) -> int:
        """L of E experts. Raises ArgumentError where the ranks do not share them equally."""
        need_whole("num_experts", experts, self.world, MOST_EXPERTS)
        rule = "is {}; it must be a multiple of the {} ranks"
        need(experts % self.world == 0, "num_experts", rule, experts, self.world)
        return experts // self.world

    def dispatcher(self, experts: int) -> MC2Dispatcher:
        """The way of the rows to E experts."""
        self.local_experts(experts)
        return MC2Dispatcher.from_group(self, experts, comm_alg="hierarchy" if self.ranks_per_server else "")


class Handle(tuple):  # type: ignore[type-arg]
    """Values that DeepEP hands out for a call, and ``call``: all state of it."""

    call: Any


def call_of(handle: object, kind: type[R], function: str) -> R:
    """The call of ``kind`` that made a handle. Raises ArgumentError: ``function`` has not returned it."""
    call = getattr(handle, "call", None)
    need(isinstance(call, kind), "handle", "is a {}; pass what {} returned, as it is", type(handle).__name__, function)
    return call  # type: ignore[return-value]


def need_whole(argument: str, value: object, least: int, most: int = 2**31 - 1) -> None:
    """Raise unless ``value`` is a whole number within these."""
    rule = "is {!r}; it must be a whole number of {}..{}"
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    need(whole and least <= value <= most, argument, rule, value, least, most)  # type: ignore[operator]


def refused(name: str, instead: str) -> Any:
    """Makes the method ``name`` of something that DeepEP has and we have not."""

    def method(*_: Any, **__: Any) -> Any:
        raise not_supported(name, instead)

    method.__name__, method.__doc__ = name, f"Raises ArgumentError: not supported; {instead}."
    return method


def not_supported(what: str, instead: str) -> ArgumentError:
    """The error of something that DeepEP has and we have not."""
    return ArgumentError(f"{what} is not supported; {instead}", argument=what)
