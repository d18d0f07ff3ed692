"""The interface that every dispatcher has, and the argument rules that one rank can check alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ascend_moe.errors import ArgumentError, need

ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass
class Dispatched:
    """What this rank's experts receive, and what combine needs to send it back.

    n = ep_recv_counts[-1] rows are defined; window ops allocate more (capacity) rows than that.

    Attributes:
        expand_x: (>= n, H), rows by (local expert, source rank, flat (token, k) order); int8 if quantized.
        dynamic_scales: (>= n,) fp32, multiply a quantized row by its scale; undefined unless quantized.
        expert_token_nums: (L,) int64, rows per local expert (type 1) or their running sum (type 0).
        ep_recv_counts: int32, element l*W + s is the number of rows up to and including segment
            (local expert l, source rank s).
        expand_idx: V1: (BS*K,) int32, earlier pairs of this rank with the same expert;
            V2: triples (source rank, token, k), three int32 a row; between A2 servers V1's.
    """

    expand_x: Tensor
    dynamic_scales: Tensor
    expert_token_nums: Tensor
    ep_recv_counts: Tensor
    expand_idx: Tensor
    handle: Any = field(default=None, repr=False)


class Dispatcher(ABC):
    """Sends token rows to the ranks that own their experts, and brings weighted sums back.

    Expert e of ``num_experts`` (E) lives on rank e // L, L = E / ``world_size``. Every rank of the
    group must call ``dispatch``, then ``combine``, in the same order. Both are differentiable
    (`ascend_moe.autograd`): a backward communicates too, so all ranks run the same one.
    """

    #: combine adds shared_expert_x in fp32 before its one rounding; otherwise it rejects the argument.
    fuses_shared_expert = True

    def __init__(self, rank: int, world_size: int, num_experts: int) -> None:
        rule = "is {} of world size {}; need 0 <= rank < world size"
        need(0 <= rank < world_size, "rank", rule, rank, world_size)
        fits = num_experts >= 1 and num_experts % world_size == 0
        rule = "is {}, not a positive multiple of the {} ranks; choose a world size that divides it"
        need(fits, "num_experts", rule, num_experts, world_size)
        self.rank = rank
        self.world_size = world_size
        self.num_experts = num_experts
        self.local_experts = num_experts // world_size

    def __deepcopy__(self, memo: dict[int, Any]) -> Dispatcher:
        """This one: it stands for ranks and keeps nothing of a call, so that copies of a layer share it."""
        return self

    @abstractmethod
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
        """Routes row t of ``x`` once for every k to the owner of ``expert_ids[t, k]``.

        Args:
            x: (BS, H) bf16, fp16 or fp32; BS may be 0.
            expert_ids: (BS, K) int32; -1 is not routed, equal ids of a token are routed each.
            scales: (E, H) fp32 smoothing factors, only with quant_mode 2.
            x_active_mask: bool, (BS,) or (BS, K); pairs that are False are not routed.
            quant_mode: 0, or 2: int8 rows with one fp32 scale each.
            global_bs: 0 when all ranks have the same BS, else W * (largest BS), the same on all ranks.
            expert_token_nums_type: 0 running sums, 1 counts.

        Raises:
            ArgumentError: on this rank alone, before anything is sent.
            InvalidExpertId, RoutingOverflow, ConfigMismatch: on every rank; the next call works.
        """

    def empty_expert_out(self, dispatched: Dispatched, dtype: torch.dtype) -> Tensor | None:
        """Memory like ``expand_x``, in ``dtype``, that combine sends from without a copy; None: any."""
        return None

    @abstractmethod
    def combine(
        self,
        expert_out: Tensor,
        dispatched: Dispatched,
        expert_scales: Tensor,
        *,
        shared_expert_x: Tensor | None = None,
    ) -> Tensor:
        """Returns (BS, H): for every token the sum over k of expert_scales[t, k] * its expert row.

        fp32, k ascending, product rounded before it is added, then + shared_expert_x, one cast.
        Rows of inactive tokens are zeros.

        Args:
            expert_out: (>= n, H) rows in expand_x order, in x's dtype.
            dispatched: what ``dispatch`` of this dispatcher returned.
            expert_scales: (BS, K) fp32.
            shared_expert_x: (BS, H) in x's dtype, added with weight 1.
        """


def check_dispatch(
    x: Tensor,
    expert_ids: Tensor,
    scales: Tensor | None,
    mask: Tensor | None,
    quant_mode: int,
    global_bs: int,
    expert_token_nums_type: int,
    *,
    world: int,
    experts: int,
) -> int:
    """Checks what one rank can see of dispatch's arguments; returns maxBS (rows)."""
    need(x.dim() == 2 and x.dtype in ROW_DTYPES, "x", "is {}; need (BS, H) bf16, fp16 or fp32", x)
    bs = x.size(0)
    fits = expert_ids.dim() == 2 and expert_ids.dtype == torch.int32 and expert_ids.size(0) == bs
    need(fits, "expert_ids", "is {}; need ({}, K) int32", expert_ids, bs)
    need(expert_ids.size(1) >= 1, "expert_ids", "has K = 0; need K >= 1")
    need(quant_mode in (0, 2), "quant_mode", "is {}; need 0 (none) or 2 (int8 by token)", quant_mode)
    if scales is not None:
        need(quant_mode != 0, "scales", "are given with quant_mode 0; pass None or quant_mode=2")
        fits = tuple(scales.shape) == (experts, x.size(1)) and scales.dtype == torch.float32
        need(fits, "scales", "is {}; need ({}, {}) fp32", scales, experts, x.size(1))
    if mask is not None:
        fits = mask.dtype == torch.bool and mask.shape in (expert_ids.shape, (bs,))
        need(fits, "x_active_mask", "is {}; need ({},) or {} bool", mask, bs, expert_ids.shape)
    kind = expert_token_nums_type
    need(kind in (0, 1), "expert_token_nums_type", "is {}; need 0 or 1", kind)
    fits = global_bs == 0 or (global_bs > 0 and global_bs % world == 0 and global_bs >= bs * world)
    rule = "is {}; need 0, or {} ranks * largest BS (here at least {})"
    need(fits, "global_bs", rule, global_bs, world, world * bs)
    return global_bs // world if global_bs else bs


def check_combine(
    expert_out: Tensor,
    rows: int,
    like: Tensor,
    expert_scales: Tensor,
    topk: int,
    shared: Tensor | None,
) -> None:
    """Checks combine's arguments against dispatch's x (``like``), its K and its received rows."""
    bs, hidden = like.shape
    fits = expert_out.dim() == 2 and expert_out.size(1) == hidden and expert_out.size(0) >= rows
    need(fits, "expert_out", "is {}; need at least {} rows of {}", expert_out, rows, hidden)
    # Ranks that disagree on the row size would deadlock the exchange: hold all to dispatch's dtype.
    rule = "is {}, x was {}; cast it to x's dtype"
    need(expert_out.dtype == like.dtype, "expert_out", rule, expert_out.dtype, like.dtype)
    fits = tuple(expert_scales.shape) == (bs, topk) and expert_scales.dtype == torch.float32
    need(fits, "expert_scales", "is {}; need ({}, {}) fp32", expert_scales, bs, topk)
    if shared is not None:
        fits = shared.dim() >= 2 and shared.size(-1) == hidden and shared.numel() == bs * hidden
        rule = "is {}; need ({}, {}) {}"
        need(fits and shared.dtype == like.dtype, "shared_expert_x", rule, shared, bs, hidden, like.dtype)


def foreign(dispatcher: Dispatcher) -> ArgumentError:
    """The error for a ``Dispatched`` that another dispatcher made."""
    return ArgumentError(
        f"dispatched does not come from this {type(dispatcher).__name__}; pass what its dispatch returned",
        argument="dispatched",
    )
