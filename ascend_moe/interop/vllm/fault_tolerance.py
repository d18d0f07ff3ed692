"""vLLM's hooks of an all2all manager for fault tolerance: who is there, whether that has changed, and a fresh start.

vLLM reads `query_fault` after each step and drops the step where it is true, with the mask in its error; operators of
ours raise `PeerLost` or `CommTimeout` in the step itself, which ends it the same way. Its instruction "retry" then
calls `clean_buffers` on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

import ascend_moe
from ascend_moe.comm import survivors
from ascend_moe.errors import ArgumentError, need, with_typed_errors
from ascend_moe.settings import MAX_WORLD


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
            mask[survivors.ended(self._group)] = 1
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
