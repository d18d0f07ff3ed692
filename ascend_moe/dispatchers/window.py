"""Dispatcher over the window ops: torch.ops.ascend_moe.npu_moe_distribute_*."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ascend_moe import ops
from ascend_moe.comm import comm_name, group_of, name_of, window_empty
from ascend_moe.dispatchers.base import Dispatched, Dispatcher, foreign
from ascend_moe.errors import need, with_typed_errors

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass
class _Handle:
    owner: WindowDispatcher
    expert_ids: Tensor
    arguments: dict[str, Any]  # of combine, as dispatch had or made them


class WindowDispatcher(Dispatcher):
    """Dispatch and combine by kernels through the communication windows of ``group_ep``.

    Args:
        group_ep: name from ``ascend_moe.comm_name`` or a ``LocalCluster``; or the group itself, as `comm.group_of`.
        world_size: W, ranks of the group.
        rank: this rank.
        num_experts: E, a multiple of W.
        contract: "v2" (triples) or "v1" (expand_idx; its combine takes no shared_expert_x).
        comm_alg: of the V2 ops: "" or "window", "direct", "auto".
        zero_copy: ``empty_expert_out`` gives window tensors, from which a direct combine sends without a
            copy (``ascend_moe.window_empty``); with comm_alg "direct" or "auto", on the CPU.
    """

    @with_typed_errors
    def __init__(
        self,
        group_ep: str,
        world_size: int,
        rank: int,
        num_experts: int,
        contract: str = "v2",
        *,
        comm_alg: str = "",
        zero_copy: bool = False,
    ) -> None:
        super().__init__(rank, world_size, num_experts)
        need(contract in ("v1", "v2"), "contract", "is {!r}; need 'v1' or 'v2'", contract)
        rule = "is {!r}, which the V1 ops do not take: use contract 'v2'"
        need(not comm_alg or contract == "v2", "comm_alg", rule, comm_alg)
        rule = "goes with comm_alg 'direct' or 'auto', comm_alg is {!r}"
        need(not zero_copy or comm_alg in ("direct", "auto"), "zero_copy", rule, comm_alg)
        self.group_ep = group_ep = name_of("group_ep", group_ep)
        self.contract = contract
        self.comm_alg = comm_alg
        self.zero_copy = zero_copy
        self.fuses_shared_expert = contract == "v2"
        self._place = (group_ep, world_size, rank)
        self._options = {"comm_alg": comm_alg} if comm_alg else {}

    @classmethod
    def from_group(
        cls,
        process_group: ProcessGroup | None,
        num_experts: int,
        contract: str = "v2",
        *,
        comm_alg: str = "",
        zero_copy: bool = False,
    ) -> WindowDispatcher:
        """The dispatcher of a process group (None: the default one). Collective on first use."""
        group = group_of("process_group", process_group)
        name, size, rank = comm_name(group), group.size(), group.rank()
        return cls(name, size, rank, num_experts, contract, comm_alg=comm_alg, zero_copy=zero_copy)

    def dispatch(
        self,
        x: Tensor,
        expert_ids: Tensor,
        *,
        scales: Tensor | None = None,
        x_active_mask: Tensor | None = None,
        quant_mode: int = 0,
        global_bs: int = 0,
        expert_token_nums_type: int = 1,
    ) -> Dispatched:
        name = "npu_moe_distribute_dispatch" + ("_v2" if self.contract == "v2" else "")
        expand_x, dynamic_scales, index, nums, counts, tp_counts, expand_scales = getattr(ops, name)(
            x,
            expert_ids,
            *self._place,
            self.num_experts,
            scales=scales,
            x_active_mask=x_active_mask,
            quant_mode=quant_mode,
            global_bs=global_bs,
            expert_token_nums_type=expert_token_nums_type,
            **self._options,
        )
        arguments = {"x_active_mask": x_active_mask, "global_bs": global_bs, "tp_send_counts": tp_counts}
        handle = _Handle(self, expert_ids, arguments | {"expand_scales": expand_scales})
        return Dispatched(expand_x, dynamic_scales, nums, counts, index, handle)

    def empty_expert_out(self, dispatched: Dispatched, dtype: torch.dtype) -> Tensor | None:
        """With zero_copy, a window tensor: one combine may send from it. Raises as ``window_empty`` does.

        In a traced program None: combine copies the rows there.
        """
        if not self.zero_copy or torch.compiler.is_compiling():  # a graph has no lent memory: combine copies
            return None
        return window_empty(
            dispatched.expand_x.shape,
            dtype=dtype,
            group_ep=self.group_ep,
            ep_world_size=self.world_size,
            ep_rank_id=self.rank,
        )

    def combine(
        self,
        expert_out: Tensor,
        dispatched: Dispatched,
        expert_scales: Tensor,
        *,
        shared_expert_x: Tensor | None = None,
    ) -> Tensor:
        handle = dispatched.handle
        if not isinstance(handle, _Handle) or handle.owner is not self:
            raise foreign(self)
        name = "npu_moe_distribute_combine" + ("_v2" if self.contract == "v2" else "")
        result: Tensor = getattr(ops, name)(
            expert_out,
            handle.expert_ids,
            dispatched.expand_idx,
            dispatched.ep_recv_counts,
            expert_scales,
            *self._place,
            self.num_experts,
            shared_expert_x=shared_expert_x,
            **handle.arguments,
            **self._options,
        )
        return result
