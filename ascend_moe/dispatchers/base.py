"""The interface that every dispatcher has, and the argument rules that one rank can check alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ascend_moe.errors import ArgumentError

ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass
class Dispatched:
    """What this rank's experts receive, and what combine needs to send it back.

    n = ep_recv_counts[-1] rows are defined; window ops allocate more (capacity) rows than that.

    Attributes:
        expand_x: (>= n, H), rows by (local expert, source rank, flat (token, k) order); int8 if quantised.
        dynamic_scales: (>= n,) fp32, multiply a quantised row by its scale; undefined unless quantised.
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
    group must call ``dispatch``, then ``combine``, in the same order.
    """

    #: combine adds shared_expert_x in fp32 before its one rounding; otherwise it rejects the argument.
    fuses_shared_expert = True

    def __init__(self, rank: int, world_size: int, num_experts: int) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise ArgumentError(
                f"rank is {rank} of world size {world_size}; need 0 <= rank < world size", argument="rank"
            )
        if num_experts < 1 or num_experts % world_size:
            raise ArgumentError(
                f"num_experts is {num_experts}, not a positive multiple of the {world_size} ranks; "
                "choose a world size that divides it",
                argument="num_experts",
            )
        self.rank = rank
        self.world_size = world_size
        self.num_experts = num_experts
        self.local_experts = num_experts // world_size

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
    if x.dim() != 2 or x.dtype not in ROW_DTYPES:
        _reject("x", f"x is {_what(x)}; need (BS, H) bf16, fp16 or fp32")
    if torch.is_grad_enabled() and x.requires_grad:
        _reject("x", "x requires grad, but this dispatcher has no backward; call it under torch.no_grad()")
    bs = x.size(0)
    if expert_ids.dim() != 2 or expert_ids.dtype != torch.int32 or expert_ids.size(0) != bs:
        _reject("expert_ids", f"expert_ids is {_what(expert_ids)}; need ({bs}, K) int32")
    if expert_ids.size(1) < 1:
        _reject("expert_ids", "expert_ids has K = 0; need K >= 1")
    if quant_mode not in (0, 2):
        _reject("quant_mode", f"quant_mode is {quant_mode}; need 0 (none) or 2 (int8 by token)")
    if scales is not None:
        if quant_mode == 0:
            _reject("scales", "scales are given with quant_mode 0; pass None or quant_mode=2")
        if tuple(scales.shape) != (experts, x.size(1)) or scales.dtype != torch.float32:
            _reject("scales", f"scales is {_what(scales)}; need ({experts}, {x.size(1)}) fp32")
    if mask is not None and (mask.dtype != torch.bool or mask.shape not in (expert_ids.shape, (bs,))):
        _reject(
            "x_active_mask", f"x_active_mask is {_what(mask)}; need ({bs},) or {tuple(expert_ids.shape)} bool"
        )
    if expert_token_nums_type not in (0, 1):
        _reject("expert_token_nums_type", f"expert_token_nums_type is {expert_token_nums_type}; need 0 or 1")
    if global_bs < 0 or global_bs % world or (global_bs and global_bs < bs * world):
        _reject(
            "global_bs",
            f"global_bs is {global_bs}; need 0, or {world} ranks * largest BS (here at least {world * bs})",
        )
    return global_bs // world if global_bs else bs


def check_combine(
    expert_out: Tensor,
    rows: int,
    like: Tensor,
    expert_scales: Tensor,
    topk: int,
    shared_expert_x: Tensor | None,
) -> None:
    """Checks combine's arguments against dispatch's x (``like``), its K and its received rows."""
    bs, hidden = like.shape
    if expert_out.dim() != 2 or expert_out.size(1) != hidden or expert_out.size(0) < rows:
        _reject("expert_out", f"expert_out is {_what(expert_out)}; need at least {rows} rows of {hidden}")
    if expert_out.dtype != like.dtype:
        # Ranks that disagree on the row size would deadlock the exchange: hold all to dispatch's dtype.
        _reject("expert_out", f"expert_out is {expert_out.dtype}, x was {like.dtype}; cast it to x's dtype")
    if torch.is_grad_enabled() and expert_out.requires_grad:
        _reject(
            "expert_out", "expert_out requires grad, but this dispatcher has no backward; use torch.no_grad()"
        )
    if tuple(expert_scales.shape) != (bs, topk) or expert_scales.dtype != torch.float32:
        _reject("expert_scales", f"expert_scales is {_what(expert_scales)}; need ({bs}, {topk}) fp32")
    if shared_expert_x is not None and (
        shared_expert_x.numel() != bs * hidden
        or (shared_expert_x.dim() < 2 or shared_expert_x.size(-1) != hidden)
        or shared_expert_x.dtype != like.dtype
    ):
        _reject(
            "shared_expert_x",
            f"shared_expert_x is {_what(shared_expert_x)}; need ({bs}, {hidden}) {like.dtype}",
        )


def foreign(dispatcher: Dispatcher) -> ArgumentError:
    """The error for a ``Dispatched`` that another dispatcher made."""
    return ArgumentError(
        f"dispatched does not come from this {type(dispatcher).__name__}; pass what its dispatch returned",
        argument="dispatched",
    )


def _what(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _reject(argument: str, message: str) -> None:
    raise ArgumentError(message, argument=argument)
