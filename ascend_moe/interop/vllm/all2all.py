"""vLLM's all2all manager: dispatchers of a group, and hooks for fault tolerance.

vLLM reads `FaultTolerance.query_fault` after each step and drops the step if it is true, with the mask in its error;
this package's operators raise `PeerLost` or `CommTimeout` in the step itself. vLLM's instruction "retry" then calls
`clean_buffers` on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

import ascend_moe
from ascend_moe.comm import membership, name_of
from ascend_moe.comm.place import Place
from ascend_moe.dispatchers import AllGatherDispatcher, Dispatcher, make_dispatcher
from ascend_moe.dispatchers.base import ROW_DTYPES
from ascend_moe.errors import ArgumentError, need, need_dims, need_one_of, need_shape, with_typed_errors
from ascend_moe.ops.collectives import MAX_BATCH, gather
from ascend_moe.permute import need_pairs
from ascend_moe.settings import MAX_WORLD

#: Most tokens per rank of CANN's window operators; this package's limit is MAX_BATCH.
DEFAULT_MAX_TOKENS = 512
_ANY_NUMBER = 1 << 20  # tokens per rank, for dispatchers that allocate nothing by it


@dataclass(frozen=True, eq=False)
class All2AllHandle:
    """Dispatcher of a configuration, and ``max_tokens``, the most tokens of a rank in a call; None: any number."""

    dispatcher: Dispatcher
    max_tokens: int | None
    _maps: Any = field(default_factory=WeakIdKeyDictionary, repr=False)  # expert maps that were checked

    def most_tokens(self, x: Tensor) -> int:
        """Return an upper bound of every rank's T, the same on all ranks; x ``(T, H)``: this rank's tokens."""
        if self.max_tokens is not None:
            return self.max_tokens
        if isinstance(self.dispatcher, AllGatherDispatcher):  # gathers batches padded to the longest
            own = torch.tensor([len(x)], dtype=torch.int32, device=x.device)
            return int(gather(own, self.dispatcher.group).max())
        return _ANY_NUMBER

    def check(self, a1: Tensor, weights: Tensor, ids: Tensor, num_experts: int) -> None:
        """Raise ArgumentError unless prepare's a1 ``(T, H)``, weights and ids ``(T, K)`` and num_experts fit."""
        need_dims("a1", a1, 2, dtypes=ROW_DTYPES)
        need_pairs(a1.shape[0], ids, weights)
        known, local, most = self.dispatcher.num_experts, self.dispatcher.local_experts, self.max_tokens
        rule = "is {}; it must be {}, the experts of all ranks, or {}, this rank's"
        need(num_experts in (known, local), "num_experts", rule, num_experts, known, local)
        rule = "has {} tokens, more than max_num_tokens {}; raise it, up to {}, on all ranks, "
        need(most is None or a1.shape[0] <= most, "a1", rule + "or cut the batch", a1.shape[0], most, MAX_BATCH)

    def check_map(self, expert_map: Tensor | None) -> None:
        """Raise ArgumentError unless expert_map ``(E,)`` is None or has dispatch's experts of this rank, in order."""
        if expert_map is None or expert_map in self._maps:
            return
        rank, local, experts = self.dispatcher.rank, self.dispatcher.local_experts, self.dispatcher.num_experts
        need_shape("expert_map", expert_map, (experts,), dtypes=(torch.int32, torch.int64))
        expected = torch.full((experts,), -1, device="cpu")
        expected[rank * local : (rank + 1) * local] = torch.arange(local, device="cpu")
        rule = "is not the placement of dispatch, which has experts {1} to {2} on rank {0}, in this order: leave it out"
        fits = torch.equal(expert_map.cpu().long(), expected)
        need(fits, "expert_map", rule, rank, rank * local, (rank + 1) * local - 1)
        self._maps[expert_map] = True


class FaultTolerance:
    """vLLM's hooks that report ended ranks and close the group, of one rank. Source: vLLM ``All2AllManagerBase``.

    ``group_name``: the group's name for dispatch and combine; ``world``: its number of ranks.
    """

    support_fault_tolerance = True

    def __init__(self, group_name: str, world: int) -> None:
        self._group, self._ranks = group_name, world

    def query_active_mask(self) -> Tensor:
        """Return ``(world,)`` int32 on the CPU, without waiting: 1 for each rank whose process has ended, else 0."""
        mask = torch.zeros(self._ranks, dtype=torch.int32, device="cpu")
        with contextlib.suppress(ArgumentError):  # its windows are not open
            mask[membership.ended(self._group)] = 1
        return mask

    def query_fault(self) -> Tensor:
        """Return whether a rank's process has ended (on NPUs: one of this machine), as a bool tensor of shape ()."""
        return self.query_active_mask().any()

    @with_typed_errors
    def clean_buffers(self) -> None:
        """Close this rank's communicator, so that the next op opens new windows; call it on all ranks.

        On NPUs windows belong to HCCL: a failed group stays failed until its process group is created again. Raises
        ArgumentError if a rank has ended, as vLLM's "retry" cannot help then: make a group of the others by
        `ascend_moe.agree` and `ascend_moe.shrink`, with its own manager.
        """
        ended = self.query_active_mask().nonzero().flatten().tolist()
        rule = "needs live ranks, but ranks {} have ended: make a group of the others by ascend_moe.agree and shrink"
        need(not ended, "clean_buffers", rule, ended)
        ascend_moe.close(self._group)


#: kind of PrepareAndFinalize -> kind of dispatcher
DISPATCHERS = {"mc2": "mc2", "alltoall": "alltoall", "allgather": "allgather", "batched": "mc2"}


class All2AllManager(FaultTolerance):
    """Cache of a group's handles, one per configuration, which layers share; and vLLM's hooks for fault tolerance.

    Args:
        group_name: ``ascend_moe.comm_name(process_group)``, a c10d group name, a LocalCluster's, or the group itself.
        rank, world: this rank, and the number of ranks of the group.
        ops: namespace with the V2 operators; None: ascend_moe.
    """

    def __init__(self, group_name: str, rank: int, world: int, ops: Any = None) -> None:
        self.group_name, self.rank, self.world, self.ops = name_of("group_name", group_name), rank, world, ops
        super().__init__(self.group_name, world)
        self._handles: dict[tuple[Any, ...], All2AllHandle] = {}

    @with_typed_errors
    def get_handle(self, kwargs: dict[str, Any]) -> All2AllHandle:
        """Return the handle (dispatcher) of a configuration; calls with equal configurations return the same one.

        Args:
            kwargs: the configuration by name: num_experts (E, needed); kind: "mc2" (default), "batched", "alltoall" or
                "allgather"; max_num_tokens: most tokens of a rank, 512 by default, up to 4096, for the first two kinds.

        Raises ArgumentError if an argument breaks one of these rules. Source: vLLM ``All2AllManagerBase.get_handle``.
        """
        known = {"kind": "mc2", "max_num_tokens": DEFAULT_MAX_TOKENS, "num_experts": None}
        for name in kwargs:
            need_one_of("kwargs", name, known)
        chosen = {**known, **kwargs}
        kind, most, experts = chosen["kind"], chosen["max_num_tokens"], chosen["num_experts"]
        need_one_of("kind", kind, DISPATCHERS)
        need(isinstance(experts, int), "num_experts", "is {!r}; it must be an int", experts)
        windows = DISPATCHERS[kind] == "mc2"
        key = DISPATCHERS[kind], experts, most if windows else None
        if key not in self._handles:
            fits = not windows or 1 <= most <= MAX_BATCH
            need(fits, "max_num_tokens", "is {}; need 1..{}", most, MAX_BATCH)
            place, options = Place(self.group_name, self.world, self.rank), {"ops": self.ops} if windows else {}
            self._handles[key] = All2AllHandle(make_dispatcher(key[0], place, experts, **options), key[2])
        return self._handles[key]

    def destroy(self) -> None:
        """Drop all cached handles. The group stays open: ``ascend_moe.close`` closes it."""
        self._handles.clear()


@with_typed_errors
def rank_mapping(world: int, alive: Sequence[int]) -> dict[int, int]:
    """Return the map from old to new ranks, -1 for ranks outside the smaller group, for ``EplbState.rearrange``.

    vLLM's rearrange moves weights in its EP group, whose collectives wait for a lost rank: use it for live ranks that
    leave. After a loss use the tables of `placement.shrunk`: no weight moves.

    Args:
        world: number of ranks of the old group. alive: old ranks of the smaller group, in their new order.

    Raises ArgumentError if world is not in 1..MAX_WORLD, or alive contains a rank twice or one outside the group.
    Source: vLLM ``distributed/elastic_ep/elastic_execute.py``.
    """
    need(isinstance(world, int) and 1 <= world <= MAX_WORLD, "world", "is {!r}; it must be in 1..{}", world, MAX_WORLD)
    fits = len(set(alive)) == len(alive) and set(alive) <= set(range(world))
    need(fits, "alive", "is {}; it must contain ranks below {}, each once", list(alive), world)
    places = {rank: place for place, rank in enumerate(alive)}
    return {rank: places.get(rank, -1) for rank in range(world)}
