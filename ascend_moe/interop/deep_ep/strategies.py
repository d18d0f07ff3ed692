"""sgl-kernel-npu's strategies: transports of an AscendBuffer in normal and in low-latency mode.

The default and ops strategies use the window ops of `Runtime`; the others torch.distributed's all-to-all.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ascend_moe._tensors import narrow, wide_ids_named
from ascend_moe.dispatchers import AllToAllDispatcher, Dispatched
from ascend_moe.errors import (
    need,
    need_dims,
    need_one_of,
    need_shape,
    with_signature_like,
    with_signature_of,
    with_typed_errors,
)
from ascend_moe.interop.deep_ep import base
from ascend_moe.interop.deep_ep.base import BufferPlace, EventHandle, EventOverlap, Group, Handle, call_of
from ascend_moe.interop.deep_ep.buffer import Buffer
from ascend_moe.interop.deep_ep.rows import FP8_ROWS, QUANT_MODES, numbers_of, places_of
from ascend_moe.ops.sent_ids import SentIds

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound="type[EPCommStrategy]")
LowLatencyDispatched = tuple[Any, Tensor, tuple[Any, ...], EventOverlap, Callable[[], None]]
LowLatencyCombined = tuple[Tensor, EventOverlap, Callable[[], None]]

# As in sgl-kernel-npu; its MX formats need the 950 series and are refused here.
VALID_QUANT_MODES = frozenset(("bf16", "int8", "mx_fp8_e4m3", "mx_fp8_e5m2", FP8_ROWS, "mx_fp4_e2m1"))


class NormalStrategy:
    """Values of AscendBuffer's normal_strategy: default (the window ops), alltoall (torch.distributed's all-to-all)."""

    DEFAULT, ALLTOALL = "default", "alltoall"
    _names: tuple[str, ...] = (DEFAULT, ALLTOALL)

    @classmethod
    def get_all_strategies(cls) -> list[str]:
        """Return the names of all strategies of this mode."""
        return list(cls._names)


class LowLatencyStrategy(NormalStrategy):
    """Values of AscendBuffer's low_latency_strategy: default, ops (both the window ops), alltoall (all-to-all)."""

    OPS = "ops"
    _names = (NormalStrategy.DEFAULT, OPS, NormalStrategy.ALLTOALL)


class StrategyMap:
    """Map from the environment variable DEEP_USE_MODE to the names of the normal and the low-latency strategy."""

    strategy_map: ClassVar[dict[str, tuple[str, str]]] = {
        "default": ("default", "default"),
        "ops": ("default", "ops"),
        "alltoall": ("alltoall", "alltoall"),
    }

    @classmethod
    def get_strategy(cls, deep_mode: str) -> tuple[str, str]:
        """Return both names for ``deep_mode``, in any case. Raises ArgumentError if it is no key of strategy_map."""
        need_one_of("DEEP_USE_MODE", deep_mode.lower(), cls.strategy_map)
        return cls.strategy_map[deep_mode.lower()]


class Sent(NamedTuple):
    """State of a dispatch by all-to-all for its combine, which its handle contains."""

    dispatched: Dispatched
    dispatcher: AllToAllDispatcher
    ids: SentIds


class EPCommStrategy(ABC):
    """Base of a transport for dispatch and combine in the ``modes``; ``name``: as what it is registered.

    Args:
        runtime: the Buffer's ``Runtime``; None: only ``group`` is used. group: as for ``Buffer``; its first use opens
            it, which is collective.

    A custom class, registered by `register_normal_strategy` or the low-latency one, takes these two by name; it may
    call the base with the process group only, as sgl-kernel-npu's do.
    """

    name: ClassVar[str]
    modes: ClassVar[tuple[str, ...]]

    def __init__(self, runtime: Any = None, group: Group | None = None) -> None:
        alone = group is None and isinstance(runtime, ProcessGroup)
        self.runtime: Any = None if alone else runtime
        self.group: Any = runtime if alone else group

    @cached_property
    def place(self) -> BufferPlace:
        """This rank's place (name, W, rank) in the runtime's group, or without a runtime in ``group``."""
        return self.runtime.place if self.runtime is not None else BufferPlace.of_group(self.group)

    group_name = property(lambda self: self.place.group_ep)
    group_size = property(lambda self: self.place.world)
    rank = property(lambda self: self.place.rank)

    def get_name(self) -> str:
        """Return the name as which the class is registered."""
        return self.name

    def get_supported_modes(self) -> list[str]:
        """Return the modes of this strategy: "normal" or "low_latency"."""
        return list(self.modes)

    def alltoall(self, x: Tensor, topk_idx: Tensor, experts: int, quant: str, most: int) -> Sent:
        """Dispatch by torch.distributed's all-to-all; ``most``: most tokens of a rank."""
        need_dims("topk_idx", topk_idx, 2)
        dispatcher = AllToAllDispatcher(self.place if self.group is None else self.group, experts)
        ids = narrow("topk_idx", topk_idx)
        with wide_ids_named(topk_idx, self.rank):
            sent = dispatcher.dispatch(x, ids, quant_mode=QUANT_MODES[quant], global_bs=self.group_size * most)
        return Sent(sent, dispatcher, SentIds(ids))


class NormalEPCommStrategy(EPCommStrategy):
    """Base of strategies for normal mode. Methods have the arguments of `Buffer`'s, and those described here."""

    modes = ("normal",)

    @with_signature_of(Buffer.get_dispatch_layout)
    @with_typed_errors
    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int, previous_event: EventOverlap | None
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Return the layout of `Buffer.get_dispatch_layout`, with is_token_in_rank as int32."""
        found = base.dispatch_layout(self.place, topk_idx, num_experts, previous_event, torch.int32)
        return *found, EventOverlap(EventHandle())

    @abstractmethod
    @with_signature_like(Buffer.dispatch, dispatch_wait_recv_cost_stats=None, quant_mode=None)
    def dispatch(self) -> Any:
        """Send each (token, expert) row to the expert's rank.

        Args:
            x: ``(T, H)`` bf16 or fp16, or a tuple of it and any int8 tensor, which selects int8 rows.
            quant_mode: "bf16" (x's dtype), "int8", or with strategy "default" "pertoken_fp8_e4m3"; None: "int8" for a
                tuple x or with the variable DEEP_NORMAL_MODE_USE_INT8_QUANT=1, else "bf16".
            dispatch_wait_recv_cost_stats: ``(W,)`` int32 or int64 on x's device, to which this call's µs of waiting
                for each source rank are added; None: not measured.
            others: as for ``Buffer``; topk_idx is needed, handle must be None, num_worst_tokens 0.

        Returns rows ``(n, H)``, if quantized a tuple of them and their scales; local ids and weights ``(n, K)``, -1 and
        0 except at the row's k; rows per local expert as a list; the handle; the event. Collective. Raises the errors
        of `Buffer.dispatch`.
        """

    @abstractmethod
    @with_signature_like(Buffer.combine, combine_send_cost_stats=None)
    def combine(self) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Combine: return each token's sum of its rows, weighted by the topk_weights of dispatch, if there were any.

        ``topk_weights`` has no effect here, ``bias`` must be None. Returns ``(T, H)``: fp32 sums, k ascending, one
        rounding; dispatch's topk_weights, or None; the event.
        """


class LowLatencyEPCommStrategy(EPCommStrategy):
    """Base of strategies for low-latency mode. Methods have the arguments of `Buffer`'s, except as described here."""

    modes = ("low_latency",)

    @abstractmethod
    @with_signature_like(
        Buffer.low_latency_dispatch,
        without="dispatch_wait_recv_cost_stats async_finish return_recv_hook",
        **dict.fromkeys(("use_mxfp4", "async_finish", "return_recv_hook"), False),
        **dict.fromkeys(("topk_weights", "quant_mode")),
    )
    def low_latency_dispatch(self) -> LowLatencyDispatched:
        """Send each (token, expert) row to the expert's rank.

        Args:
            quant_mode: "none" or "bf16" (x's dtype), "int8", or with strategy "default" "pertoken_fp8_e4m3".
            use_fp8: with quant_mode None an AscendBuffer sends int8 rows. use_ue8m0, use_mxfp4: ask for MX formats.
            topk_weights: stored in the handle by strategy "ops". Others: as for ``Buffer``; stats have no effect.

        Returns rows by local expert without gaps, if quantized a tuple of them and their scales; rows per local expert
        ``(L,)`` int64; the handle; the event; a hook that does nothing. Collective. Raises the errors of
        `Buffer.low_latency_dispatch`.
        """

    @abstractmethod
    @with_signature_like(Buffer.low_latency_combine, without="use_logfmt combine_wait_recv_cost_stats")
    def low_latency_combine(self) -> LowLatencyCombined:
        """Combine: return each token's weighted sum of its rows.

        Returns ``(T, H)``: fp32 sums, k ascending, one rounding; the event; a hook that does nothing.
        """


class Registry:
    """Strategy classes by name; ``argument``: the AscendBuffer's argument that takes such a name."""

    def __init__(self, argument: str) -> None:
        self.argument, self.classes = argument, dict[str, Any]()

    def register(self, name: str) -> Callable[[C], C]:
        """Return a class decorator that registers a strategy as ``name``, replacing an earlier one."""

        def add(cls: C) -> C:
            cls.name, self.classes[name] = name, cls
            return cls

        return add

    def find(self, name: str) -> Any:
        """Return the strategy class that is registered as ``name``. Raises ArgumentError if there is none."""
        need_one_of(self.argument, name, self.classes)
        return self.classes[name]


NORMAL, LOW_LATENCY = Registry("normal_strategy"), Registry("low_latency_strategy")
register_normal_strategy, get_normal_strategy = NORMAL.register, NORMAL.find
register_low_latency_strategy, get_low_latency_strategy = LOW_LATENCY.register, LOW_LATENCY.find


# ---- the strategies


def _as(model: Callable[Concatenate[Any, P], object]) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Return a decorator of a method without gradients that takes ``model``'s arguments, by name."""
    return lambda method: with_signature_of(model)(with_typed_errors(torch.no_grad()(method)))


def _asked(given: dict[str, Any], *modes: str) -> tuple[Tensor, str]:
    """Return rows and quantization from a normal dispatch's arguments."""
    base.begin(given["previous_event"])
    x, handle = given["x"], given["handle"]
    need(handle is None, "handle", "of an earlier dispatch is not supported by flavour 'ascend'; pass topk_idx")
    quant = given["quant_mode"]
    if quant is None and isinstance(x, tuple):
        rule = "is a tuple; it must be (rows, an int8 tensor), which selects int8 rows"
        need(len(x) == 2 and x[1].dtype == torch.int8, "x", rule)
        quant = "int8"
    elif quant is None:
        quant = "int8" if os.environ.get("DEEP_NORMAL_MODE_USE_INT8_QUANT", "").strip() == "1" else "bf16"
    need_one_of("quant_mode", quant, modes)
    for name in ("num_tokens_per_expert", "topk_idx"):
        need(given[name] is not None, name, "is missing; pass get_dispatch_layout's counts and its topk_idx")
    return x if isinstance(x, Tensor) else x[0], quant


def _begin_combine(bias: Any, previous_event: EventOverlap | None) -> None:
    base.begin(previous_event)
    need(bias is None, "bias", "is not supported by flavour 'ascend'; add it to the result")


def _entries(handle: Any, *sizes: int) -> tuple[Any, ...]:
    """Return the entries of a handle. Raises ArgumentError unless it has one of these sizes."""
    fits = isinstance(handle, tuple) and len(handle) in sizes
    rule = "is not a tuple of {} entries; pass the handle that dispatch returned"
    need(fits, "handle", rule, " or ".join(map(str, sizes)))
    return handle  # type: ignore[no-any-return]


@register_normal_strategy("default")
class DefaultNormalCommStrategy(NormalEPCommStrategy):
    """Normal mode by the window ops of `Runtime`. Source: sgl-kernel-npu ``DefaultNormalCommStrategy``."""

    @_as(NormalEPCommStrategy.dispatch)
    def dispatch(self, topk_idx: Tensor, topk_weights: Tensor | None, is_token_in_rank: Tensor, **given: Any) -> Any:
        rows, quant = _asked(given | {"topk_idx": topk_idx}, "bf16", "int8", FP8_ROWS)
        quantized, counts = quant != "bf16", (given["num_tokens_per_rank"], is_token_in_rank)
        names = ("num_tokens_per_expert", "dispatch_wait_recv_cost_stats", "expert_alignment", "num_worst_tokens")
        options = {"use_quant": quantized, "quant_type": quant, **{name: given[name] for name in names}}
        out = self.runtime.intranode_dispatch(rows, None, topk_idx, topk_weights, *counts, **options)
        values, scales, ids, weights, counted, *matrices, index, head, event = out
        handle = (*matrices, index, is_token_in_rank, head, topk_idx, topk_weights)
        return (values, scales) if quantized else values, ids, weights, counted, handle, EventOverlap(event)

    @_as(NormalEPCommStrategy.combine)
    def combine(
        self, x: Tensor, handle: Any, bias: Any, previous_event: Any, combine_send_cost_stats: Tensor | None
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        _begin_combine(bias, previous_event)
        *_, index, _, head, ids, weights = _entries(handle, 8)
        total, weights, event = self.runtime.intranode_combine(x, ids, weights, index, head, combine_send_cost_stats)
        return total, weights, EventOverlap(event)


@register_normal_strategy("alltoall")
class AlltoAllNormalCommStrategy(NormalEPCommStrategy):
    """Normal mode by torch.distributed's all-to-all. Source: sgl-kernel-npu ``AlltoAllNormalCommStrategy``.

    dispatch returns None for the ids and weights of rows, and a dict as handle; expert_alignment and the stats have no
    effect.
    """

    @_as(NormalEPCommStrategy.dispatch)
    def dispatch(self, topk_idx: Tensor, topk_weights: Tensor | None, **given: Any) -> Any:
        rows, quant = _asked(given | {"topk_idx": topk_idx}, "bf16", "int8")
        need_dims("topk_idx", topk_idx, 2)
        experts = given["num_tokens_per_expert"].numel()
        most = base.most_tokens_of(self.place, rows.shape[0], topk_idx, experts)
        call = self.alltoall(rows, topk_idx, experts, quant, max(most, 1))
        sent, local = call.dispatched, experts // self.group_size
        handle = {"call": call, "topk_idx": topk_idx, "topk_weights": topk_weights, "num_local_experts": local}
        handle |= dict.fromkeys(("hidden_shape", "hidden_shape_before_permute"), rows.shape)
        values = (sent.expand_x, sent.dynamic_scales) if quant == "int8" else sent.expand_x
        return values, None, None, sent.expert_token_nums.tolist(), handle, EventOverlap()

    @_as(NormalEPCommStrategy.combine)
    def combine(self, x: Tensor, handle: Any, bias: Any, previous_event: Any) -> tuple[Tensor, None, EventOverlap]:
        _begin_combine(bias, previous_event)
        sent = call_of(handle, Sent, "dispatch of strategy 'alltoall'")
        ids, weights = handle["topk_idx"], handle["topk_weights"]
        weights = torch.ones(ids.shape, dtype=torch.float32, device=x.device) if weights is None else weights
        return sent.dispatcher.combine(x, sent.dispatched, weights.float()), None, EventOverlap()


@register_low_latency_strategy("default")
class DefaultLowLatencyCommStrategy(LowLatencyEPCommStrategy):
    """Low latency by window ops; quant_mode None: "none". Source: sgl-kernel-npu ``DefaultLowLatencyCommStrategy``."""

    quant_modes: tuple[str, ...] = (*QUANT_MODES, FP8_ROWS)

    @_as(LowLatencyEPCommStrategy.low_latency_dispatch)
    def low_latency_dispatch(
        self, x: Tensor, topk_idx: Tensor, num_experts: int, quant_mode: str | None, **given: Any
    ) -> LowLatencyDispatched:
        quant, tokens = quant_mode or "none", given["num_max_dispatch_tokens_per_rank"]
        need_one_of("quant_mode", quant, self.quant_modes)
        stats = given["cumulative_local_expert_recv_stats"]
        sent = self.runtime.low_latency_dispatch(x, topk_idx, stats, tokens, num_experts, quant_mode=quant)
        values, scales, counts, index, ranges, event, hook = sent
        shown = (values, scales) if quant == FP8_ROWS or QUANT_MODES[quant] else values
        handle = (index, ranges, tokens, x.shape[1], num_experts, counts, None)
        return shown, counts, handle, EventOverlap(event), hook

    @_as(LowLatencyEPCommStrategy.low_latency_combine)
    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: tuple[Any, ...]
    ) -> LowLatencyCombined:
        index, ranges, tokens, _, experts, counts = _entries(handle, 7, 10)[:6]
        sizes = (tokens, experts, counts)
        total, event, hook = self.runtime.low_latency_combine(x, topk_idx, topk_weights, index, ranges, *sizes)
        return total, EventOverlap(event), hook


@register_low_latency_strategy("ops")
class OpsLowLatencyCommStrategy(DefaultLowLatencyCommStrategy):
    """Default strategy with handles of ten entries, without fp8. Source: sgl-kernel-npu ``OpsLowLatencyCommStrategy``.

    The last three are a mask of the tokens, all True, their ids as int32 and topk_weights. ``comm_alg`` has no effect.
    """

    quant_modes = tuple(QUANT_MODES)

    def __init__(self, runtime: Any = None, group: Group | None = None, comm_alg: str = "hierarchy") -> None:
        super().__init__(runtime, group)
        need_one_of("comm_alg", comm_alg, ("hierarchy", "fullmesh_v1", "fullmesh_v2", "ccu", ""))
        self.comm_alg = comm_alg

    @_as(LowLatencyEPCommStrategy.low_latency_dispatch)
    def low_latency_dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, **others: Any
    ) -> LowLatencyDispatched:
        shown, counts, handle, event, hook = super().low_latency_dispatch(x, topk_idx, **others)
        counts = numbers_of(counts)
        mask = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
        return shown, counts, (*handle, mask, narrow("topk_idx", topk_idx), topk_weights), event, hook


@register_low_latency_strategy("alltoall")
class AllToAllLowLatencyCommStrategy(LowLatencyEPCommStrategy):
    """Low latency by torch.distributed's all-to-all. Source: sgl-kernel-npu ``AllToAllLowLatencyCommStrategy``.

    Rows are ``(L * W * max, H)``: ``max`` (num_max_dispatch_tokens_per_rank) rows for each local expert and source
    rank, padded with zeros, so that counts are ``W * max`` for each expert. quant_mode None: "int8" with use_fp8.
    """

    @_as(LowLatencyEPCommStrategy.low_latency_dispatch)
    def low_latency_dispatch(
        self, x: Tensor, topk_idx: Tensor, num_experts: int, use_fp8: bool, quant_mode: str | None, **given: Any
    ) -> LowLatencyDispatched:
        quant = quant_mode or ("int8" if use_fp8 else "none")
        need_one_of("quant_mode", quant, QUANT_MODES)
        most, world = given["num_max_dispatch_tokens_per_rank"], self.group_size
        base.need_whole("num_max_dispatch_tokens_per_rank", most, max(x.shape[0], 1))
        call = self.alltoall(x, topk_idx, num_experts, quant, most)
        sent, local, rows = call.dispatched, num_experts // world, call.dispatched.expand_x.shape[0]
        block, rule = f"a source rank for an expert of rank {self.rank}", f"num_max_dispatch_tokens_per_rank {most}"
        places = places_of(sent.ep_recv_counts, rows, most, block, rule)
        counts = torch.full((local,), most * world, dtype=torch.int64, device=x.device)
        handle = Handle.of(call, places, most, x.shape[1], x.shape[0], local, world, counts)
        shown: Any = _spread(sent.expand_x, places, local * most * world)
        if QUANT_MODES[quant]:
            shown = (shown, _spread(sent.dynamic_scales[: len(places)], places, local * most * world))
        return shown, counts, handle, EventOverlap(), base.nothing

    @_as(LowLatencyEPCommStrategy.low_latency_combine)
    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: tuple[Any, ...]
    ) -> LowLatencyCombined:
        sent = call_of(handle, Sent, "low_latency_dispatch of strategy 'alltoall'")
        places, most, hidden, _, local, world, _ = handle
        need_shape("x", x, (local * world * most, hidden))
        sent.ids.checked("topk_idx", narrow("topk_idx", topk_idx))
        rows = x.index_select(0, places.clamp(max=max(x.shape[0] - 1, 0)))
        return sent.dispatcher.combine(rows, sent.dispatched, topk_weights.float()), EventOverlap(), base.nothing


def _spread(rows: Tensor, places: Tensor, size: int) -> Tensor:
    """Return ``size`` rows with these at ``places``, else zeros; rows with place ``size`` are dropped."""
    return rows.new_zeros(size + 1, *rows.shape[1:]).index_copy_(0, places.long(), rows)[:-1]
