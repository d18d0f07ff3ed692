"""vLLM's all2all manager: a dispatcher for each configuration of a group, and the hooks for fault tolerance.

vLLM reads `FaultTolerance.query_fault` after each step and drops the step where it is true, with the mask in its error;
operators of ours raise `PeerLost` or `CommTimeout` in the step itself, which ends it as well. Its instruction
"retry" then calls `clean_buffers` on all ranks.
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

#: Tokens a rank that the window operators of CANN take at most; ours take MAX_BATCH.
DEFAULT_MAX_TOKENS = 512
_ANY_NUMBER = 1 << 20  # of tokens a rank, where a dispatcher allocates nothing for it


@dataclass(frozen=True, eq=False)
class All2AllHandle:
    """The dispatcher of a configuration, and ``max_tokens``, the most tokens a rank of a call; None: any number."""

    dispatcher: Dispatcher
    max_tokens: int | None
    _maps: Any = field(default_factory=WeakIdKeyDictionary, repr=False)  # expert maps that fit

    def most_tokens(self, x: Tensor) -> int:
        """Returns a number that is the same on all ranks, at least any rank's tokens; this rank's are x ``(T, H)``."""
        if self.max_tokens is not None:
            return self.max_tokens
        if isinstance(self.dispatcher, AllGatherDispatcher):  # gathers every batch with the length of the longest
            own = torch.tensor([len(x)], dtype=torch.int32, device=x.device)
            return int(gather(own, self.dispatcher.group).max())
        return _ANY_NUMBER

    def check(self, a1: Tensor, weights: Tensor, ids: Tensor, num_experts: int) -> None:
        """Raises ArgumentError where prepare's a1 ``(T, H)``, weights and ids ``(T, K)`` or num_experts do not fit."""
        need_dims("a1", a1, 2, dtypes=ROW_DTYPES)
        need_pairs(a1.shape[0], ids, weights)
        known, local, most = self.dispatcher.num_experts, self.dispatcher.local_experts, self.max_tokens
        rule = "is {}; it must be {}, experts of all ranks, or {}, those of this one"
        need(num_experts in (known, local), "num_experts", rule, num_experts, known, local)
        rule = "has {} tokens, max_num_tokens is {}; make it with more, at most {}, on all ranks, "
        need(most is None or a1.shape[0] <= most, "a1", rule + "or cut the batch", a1.shape[0], most, MAX_BATCH)

    def check_map(self, expert_map: Tensor | None) -> None:
        """Raises ArgumentError unless expert_map ``(E,)`` is None or the one placement that dispatch knows."""
        if expert_map is None or expert_map in self._maps:
            return
        rank, local, experts = self.dispatcher.rank, self.dispatcher.local_experts, self.dispatcher.num_experts
        need_shape("expert_map", expert_map, (experts,), dtypes=(torch.int32, torch.int64))
        expected = torch.full((experts,), -1, device="cpu")
        expected[rank * local : (rank + 1) * local] = torch.arange(local, device="cpu")
        rule = "does not give rank {} experts {} to {}, in this order; "
        rule += "dispatch knows no other placement"
        fits = torch.equal(expert_map.cpu().long(), expected)
        need(fits, "expert_map", rule, rank, rank * local, (rank + 1) * local - 1)
        self._maps[expert_map] = True


class FaultTolerance:
    """The hooks of one rank of a group.

    Args:
        group_name: as dispatch and combine take it.
        world: ranks of the group.

    Source: vLLM ``All2AllManagerBase``.
    """

    support_fault_tolerance = True

    def __init__(self, group_name: str, world: int) -> None:
        self._group, self._ranks = group_name, world

    def query_active_mask(self) -> Tensor:
        """``(world,)`` int32 on the CPU: 0 for a rank that lives, 1 for one whose process has ended.

        Local, and waits for nobody; zeros before the first op.
        """
        mask = torch.zeros(self._ranks, dtype=torch.int32, device="cpu")
        with contextlib.suppress(ArgumentError):  # its windows are not open
            mask[membership.ended(self._group)] = 1
        return mask

    def query_fault(self) -> Tensor:
        """A bool tensor without dimensions: whether a rank has ended; `clean_buffers` is for ranks that live."""
        return self.query_active_mask().any()

    @with_typed_errors
    def clean_buffers(self) -> None:
        """Closes this rank's end, so that the next op opens fresh windows; to be called on all ranks.

        On NPUs windows belong to HCCL: a group that has failed stays so until its process group is made anew.

        Raises:
            ArgumentError: ranks have ended. vLLM's "retry" is for ranks that all live; `ascend_moe.agree` and `shrink`
                make a group of the others, with a manager of its own.
        """
        ended = self.query_active_mask().nonzero().flatten().tolist()
        rule = "finds that ranks {} have ended: ascend_moe.agree and shrink make a group of the others"
        need(not ended, "clean_buffers", rule, ended)
        ascend_moe.close(self._group)


#: kind of PrepareAndFinalize -> kind of dispatcher
DISPATCHERS = {"mc2": "mc2", "alltoall": "alltoall", "allgather": "allgather", "batched": "mc2"}


class All2AllManager(FaultTolerance):
    """Makes the handles of one group, one for each configuration; layers of equal numbers share a handle.

    Also has vLLM's hooks for fault tolerance.

    Args:
        group_name: ``ascend_moe.comm_name(process_group)``, a c10d group name, or a LocalCluster's; or the group
            itself, as `comm.group_of`.
        rank, world: this rank, and ranks of the group.
        ops: namespace with the V2 operators; None: ascend_moe.
    """

    def __init__(self, group_name: str, rank: int, world: int, ops: Any = None) -> None:
        self.group_name, self.rank, self.world, self.ops = name_of("group_name", group_name), rank, world, ops
        super().__init__(self.group_name, world)
        self._handles: dict[tuple[Any, ...], All2AllHandle] = {}

    @with_typed_errors
    def get_handle(self, kwargs: dict[str, Any]) -> All2AllHandle:
        """The handle of a configuration, the same object for equal ones.

        Args:
            kwargs: num_experts; kind, "mc2" by default, or "batched", "alltoall", "allgather"; max_num_tokens, 512 by
                default, up to 4096, of the first two kinds.

        Raises:
            ArgumentError: an argument breaks one of these rules.

        Source: vLLM ``All2AllManagerBase.get_handle``.
        """
        known = {"kind": "mc2", "max_num_tokens": DEFAULT_MAX_TOKENS, "num_experts": None}
        for name in kwargs:
            need_one_of("kwargs", name, known)
        chosen = {**known, **kwargs}
        kind, most, experts = chosen["kind"], chosen["max_num_tokens"], chosen["num_experts"]
        need_one_of("kind", kind, DISPATCHERS)
        need(isinstance(experts, int), "num_experts", "is {!r}; it must be an int", experts)
        dispatcher = DISPATCHERS[kind]
        bound = most if dispatcher == "mc2" else None
        if (dispatcher, experts, bound) not in self._handles:
            self._handles[dispatcher, experts, bound] = self._make(dispatcher, experts, bound)
        return self._handles[dispatcher, experts, bound]

    def _make(self, dispatcher: str, experts: int, bound: int | None) -> All2AllHandle:
        options = {} if bound is None else {"ops": self.ops}
        if bound is not None:
            need(1 <= bound <= MAX_BATCH, "max_num_tokens", "is {}; need 1..{}", bound, MAX_BATCH)
        place = Place(self.group_name, self.world, self.rank)
        return All2AllHandle(make_dispatcher(dispatcher, place, experts, **options), bound)

    def destroy(self) -> None:
        """Forgets all handles. The group stays open: ``ascend_moe.close`` closes it."""
        self._handles.clear()


@with_typed_errors
def rank_mapping(world: int, alive: Sequence[int]) -> dict[int, int]:
    """Returns old rank -> new rank, -1 for one that is not in the smaller group, as ``EplbState.rearrange`` takes it.

    vLLM's rearrange moves weights in its EP group, whose collectives wait for a lost rank: it is for ranks that leave
    and still live. After a loss `placement.shrunk` has the tables, and no weight moves.

    Args:
        world: ranks of the group. alive: those of the smaller one, as `ascend_moe.agree` has returned them.

    Raises:
        ArgumentError: world is not in 1..MAX_WORLD, or alive names a rank twice or one outside of the group.

    Source: vLLM ``distributed/elastic_ep/elastic_execute.py``.
    """
    need(isinstance(world, int) and 1 <= world <= MAX_WORLD, "world", "is {!r}; it must be in 1..{}", world, MAX_WORLD)
    fits = len(set(alive)) == len(alive) and set(alive) <= set(range(world))
    need(fits, "alive", "is {}; it must name ranks below {}, each once", list(alive), world)
    places = {rank: place for place, rank in enumerate(alive)}
    return {rank: places.get(rank, -1) for rank in range(world)}
