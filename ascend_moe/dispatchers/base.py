"""The interface of all dispatchers, and argument checks that need one rank only."""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ascend_moe._tensors import need_unsaved
from ascend_moe.call import DEFAULTS, CallOptions, SpecialExperts
from ascend_moe.comm.place import Place
from ascend_moe.errors import CommClosed, need, need_dims, need_dtype, need_shape, unknown_name

R = TypeVar("R")
_NO_SUCH_OPTION = object()
ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass
class Dispatched:
    """Rows received by this rank's experts, and the data that combine needs.

    n = ep_recv_counts[-1] rows are defined; window ops allocate more rows (the capacity).

    Attributes:
        expand_x: (>= n, H), rows by (local expert, source rank, flat (token, k) order); int8 if quantized.
        dynamic_scales: (>= n,) fp32, factor of each quantized row; undefined unless quantized.
        expert_token_nums: (L,) int64, rows per local expert (type 1) or their running sum (type 0).
        ep_recv_counts: int32, element l*W + s is the number of rows up to and including segment
            (local expert l, source rank s).
        expand_idx: int32, for combine. V2 operators: source indices (rank, token, k), three per row. V1 operators, V2
            between A2 servers, collectives: (BS*K,), for each (token, k) the number of earlier ones of this rank with
            the same expert.
        expand_scales: (>= n,) fp32, the weight of each row; undefined unless dispatch got expert_scales.
        handle: private data of the dispatcher that made this result; only that one can combine it.
    """

    expand_x: Tensor
    dynamic_scales: Tensor
    expert_token_nums: Tensor
    ep_recv_counts: Tensor
    expand_idx: Tensor
    expand_scales: Tensor
    handle: Any = field(default=None, repr=False)


def given(tensors: SpecialTensors | DispatchTensors) -> dict[str, Tensor]:
    """Return the tensors that are not None, as keyword arguments of the operators."""
    if tensors is _NO_SPECIAL or tensors is _NO_TENSORS:
        return {}
    return {name: tensor for name, tensor in zip(tensors._fields, tensors, strict=True) if tensor is not None}


class SpecialTensors(NamedTuple):
    """Combine's tensors for copy and const experts, by the operators' names."""

    ori_x: Tensor | None = None
    const_expert_alpha_1: Tensor | None = None
    const_expert_alpha_2: Tensor | None = None
    const_expert_v: Tensor | None = None

    def check(self, experts: SpecialExperts, like: Tensor) -> None:
        """Raise ArgumentError if a tensor that the special ``experts`` need is None, or does not fit ``like``.

        ``like``: dispatch's x, (BS, H). Shapes and dtypes are compared, devices are not.
        """
        count, (bs, hidden) = experts.const_expert_num, like.shape
        rule = "is None, copy_expert_num {} and const_expert_num {} need it: pass dispatch's x"
        there = self.ori_x is not None or not experts.need_rows
        need(there, "ori_x", rule, experts.copy_expert_num, count)
        alphas = ((count,), (count, hidden))
        for name, tensor in self._asdict().items():
            shapes = ((bs, hidden),) if name == "ori_x" else alphas[1:] if name.endswith("_v") else alphas
            needed = name != "ori_x" and count > 0
            need(tensor is not None or not needed, name, "is None; const_expert_num {} needs it: pass it", count)
            if tensor is not None:
                need_shape(name, tensor, *shapes, dtypes=(like.dtype,))
        if count and self.const_expert_alpha_1 is not None and self.const_expert_alpha_2 is not None:
            first, second = self.const_expert_alpha_1.shape, self.const_expert_alpha_2.shape
            rule = "has shape {}, const_expert_alpha_1 {}: they must be equal"
            need(first == second, "const_expert_alpha_2", rule, second, first)


_NO_SPECIAL = SpecialTensors()


class DispatchTensors(NamedTuple):
    """Tensors of a dispatch apart from x and expert_ids, by the operators' names."""

    expert_scales: Tensor | None = None
    scales: Tensor | None = None
    x_active_mask: Tensor | None = None
    performance_info: Tensor | None = None


_NO_TENSORS = DispatchTensors()


class CombineTensors(NamedTuple):
    """Tensors of a combine apart from those returned by dispatch: weights, local addends, wait times."""

    expert_scales: Tensor | None
    shared_expert_x: Tensor | None
    special: SpecialTensors
    performance_info: Tensor | None

    @property
    def given(self) -> dict[str, Tensor]:
        """The tensors that are not None, by the operators' names, without expert_scales."""
        found = given(self.special)
        if self.shared_expert_x is not None:
            found["shared_expert_x"] = self.shared_expert_x
        if self.performance_info is not None:
            found["performance_info"] = self.performance_info
        return found


class InFlight(Generic[R]):
    """A dispatch or combine that may have only sent. Its tensors must not change until ``finish`` returns the rows."""

    def __init__(self, finish: Callable[[], R]) -> None:
        self._finish = finish

    def finish(self) -> R:
        """Wait for the rows if necessary; return the call's result, or raise its error. May be called again."""
        return self._finish()


class PendingCall:
    """A rank's in-flight call of a group, if any; it must be finished before the rank's next op of the group."""

    _known: ClassVar[WeakValueDictionary[tuple[str, int], PendingCall]] = WeakValueDictionary()

    def __init__(self) -> None:
        self._receive: Callable[[], Any] | None = None

    @classmethod
    def of(cls, place: Place) -> PendingCall:
        """Return the one that all objects of this rank and group share."""
        return cls._known.setdefault((place.group_ep, place.rank), cls())

    def sent(self, finish: Callable[[], R]) -> Callable[[], R]:
        """Store the in-flight call that ``finish`` completes; return a function that runs ``finish`` at most once.

        `wait` calls that function too.
        """
        once = functools.cache(finish)

        def receive() -> R:
            if self._receive is receive:
                self._receive = None
            return once()

        self._receive = receive
        return receive

    def wait(self) -> None:
        """Finish the in-flight call, if there is one; a group that was closed has none any more."""
        if self._receive is not None:
            with contextlib.suppress(CommClosed):
                self._receive()


class Dispatcher(ABC):
    """Interface that sends token rows to the ranks that own their experts, and weighted sums of the results back.

    Expert e of ``num_experts`` (E) is on rank e // L, L = E / ``world_size``. Every rank of the group must call
    ``dispatch``, then ``combine``, in the same order. Both are differentiable (`ascend_moe.ops.autograd`): a backward
    communicates too, so all ranks must run the same one.

    Ids from E on belong to ``special`` experts: they are not sent, and combine adds their results on this rank.

    Args:
        place: the group, W and this rank.
        num_experts: E, a multiple of W.
        options: default options of the calls.

    Raises:
        ArgumentError: num_experts is no positive multiple of W, or an option has an invalid value.
    """

    #: combine adds shared_expert_x in fp32 before its one rounding; otherwise it refuses the argument.
    fuses_shared_expert = True
    #: begin_dispatch and begin_combine only send; otherwise they run the whole op.
    sends_first = False
    #: rows are weighted before they are sent back: dispatch needs combine's expert_scales.
    weighs_first = False
    #: the most tokens of a rank per call; None: unlimited.
    max_batch: int | None = None

    def __init__(self, place: Place, num_experts: int, options: CallOptions) -> None:
        self._take_place(place, num_experts)
        options.check()
        self.options = options
        self.special = options.special

    def _take_place(self, place: Place, num_experts: int) -> None:
        """Set everything that depends on the group; also called on copies for another group."""
        world_size = place.world
        fits = num_experts >= 1 and num_experts % world_size == 0
        rule = "is {}, not a positive multiple of the {} ranks; choose a world size that divides it"
        need(fits, "num_experts", rule, num_experts, world_size)
        self.place = place
        self.rank = place.rank
        self.world_size = world_size
        self.num_experts = num_experts
        self.local_experts = num_experts // world_size

    def moved(self, place: Place) -> Dispatcher:
        """Return a copy of this dispatcher for the group of ``place``, with the same number of experts per rank.

        Raises ArgumentError unless this is an `MC2Dispatcher`: other kinds need a process group, which a group made by
        ``ascend_moe.shrink`` lacks.
        """
        rule = "is {!r}, which has no process group; {} needs one: use MC2Dispatcher"
        need(False, "place", rule, place.group_ep, type(self).__name__)
        raise AssertionError

    def __deepcopy__(self, memo: dict[int, Any]) -> Dispatcher:
        """Return this object: it stores nothing of a call, so copies of a layer can share it."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        need_unsaved("dispatcher", self)
        raise AssertionError

    def dispatch(
        self,
        x: Tensor,
        expert_ids: Tensor,
        *,
        expert_scales: Tensor | None = None,
        scales: Tensor | None = None,
        x_active_mask: Tensor | None = None,
        performance_info: Tensor | None = None,
        max_tokens: int = 0,
        **options: Any,
    ) -> Dispatched:
        """Send row t of ``x`` to the owner of expert ``expert_ids[t, k]``, for every k; return the received rows.

        Args:
            x: (BS, H) bf16, fp16 or fp32; BS may be 0.
            expert_ids: (BS, K) int32; -1 is not routed, equal ids of a token are sent separately. Ids from E on belong
                to zero, copy and const experts, in this order, and are not sent.
            expert_scales: (BS, K) fp32, sent with the rows and returned as ``expand_scales``. On all ranks or on none.
            scales: (E, H) fp32 smoothing factors, only with quant_mode 2.
            x_active_mask: bool, (BS,) or (BS, K); False entries are not routed.
            performance_info: (W,) int64, to which the op adds the microseconds of its wait for each rank.
            max_tokens: the largest BS of any rank, or more, equal on all ranks. 0: global_bs, by default equal BS.
            options: fields of `CallOptions` for this call and its combine, overriding the dispatcher's: quant_mode (2:
                int8 rows with one fp32 scale each), global_bs (max_tokens times W; pass only one of them),
                expert_token_nums_type (0 running sums, 1 counts).

        Raises:
            ArgumentError: on this rank alone, before anything is sent.
            InvalidExpertId, RoutingOverflow, ConfigMismatch: on every rank; the next call works.
        """
        none = expert_scales is None and scales is None and x_active_mask is None and performance_info is None
        tensors = _NO_TENSORS if none else DispatchTensors(expert_scales, scales, x_active_mask, performance_info)
        return self._dispatch(x, expert_ids, tensors, self._options(max_tokens, options))

    def begin_dispatch(
        self, x: Tensor, expert_ids: Tensor, *, max_tokens: int = 0, **arguments: Any
    ) -> InFlight[Dispatched]:
        """Send the rows of x; ``finish`` of the result returns what ``dispatch`` returns.

        Dispatchers with ``sends_first`` do not wait here, compute no gradient, and allow no other op of the group on
        this rank until ``finish``; others run the whole op.

        Args:
            x, expert_ids, max_tokens, arguments: as for ``dispatch``, with the same errors.
        """
        tensors = DispatchTensors(*(arguments.pop(name, None) for name in DispatchTensors._fields))
        return self._begin_dispatch(x, expert_ids, tensors, self._options(max_tokens, arguments, "begin_dispatch"))

    def combine(
        self,
        expert_out: Tensor,
        dispatched: Dispatched,
        expert_scales: Tensor | None = None,
        *,
        shared_expert_x: Tensor | None = None,
        performance_info: Tensor | None = None,
        **special: Tensor | None,
    ) -> Tensor:
        """Send expert results back; return (BS, H), the sum over k of expert_scales[t, k] * the row of (t, k).

        Sums are in fp32, with k ascending and each product rounded before it is added; then shared_expert_x is added,
        and the sum is cast to x's dtype once. Rows of inactive tokens are zeros.

        Args:
            expert_out: (>= n, H) rows in expand_x order, in x's dtype.
            dispatched: the result of this dispatcher's ``dispatch``.
            expert_scales: (BS, K) fp32; None: all 1.
            shared_expert_x: (BS, H) in x's dtype, added with weight 1.
            performance_info: as for ``dispatch``.
            special: ``ori_x`` (BS, H), the input of copy and const experts: dispatch's x.
                ``const_expert_alpha_1``, ``const_expert_alpha_2``: (C,) or (C, H); ``const_expert_v``: (C, H), for C
                const experts. All in x's dtype; see ``npu_moe_distribute_combine_v2``.

        Raises:
            ArgumentError: a tensor does not fit, or one of ``special`` is missing or unknown.
            Other errors: as for dispatch.
        """
        self._check_own(dispatched)
        tensors = CombineTensors(expert_scales, shared_expert_x, self._special_rows(special), performance_info)
        return self._combine(expert_out, dispatched, tensors)

    def begin_combine(
        self, expert_out: Tensor, dispatched: Dispatched, expert_scales: Tensor | None = None, **tensors: Tensor | None
    ) -> InFlight[Tensor]:
        """Send the rows back; ``finish`` of the result returns what ``combine`` returns. See ``begin_dispatch``.

        Args:
            expert_out, dispatched, expert_scales, tensors: as for ``combine``, with the same errors.
        """
        self._check_own(dispatched)
        shared_expert_x = tensors.pop("shared_expert_x", None)
        performance_info = tensors.pop("performance_info", None)
        given = CombineTensors(expert_scales, shared_expert_x, self._special_rows(tensors), performance_info)
        return self._begin_combine(expert_out, dispatched, given)

    def empty_expert_out(self, dispatched: Dispatched, dtype: torch.dtype) -> Tensor | None:
        """Return a ``dtype`` tensor of ``dispatched.expand_x``'s shape that combine sends without a copy, or None."""
        return None

    def _options(self, max_tokens: int, changes: dict[str, Any], method: str = "dispatch") -> CallOptions:
        """Return the options of a call of ``method``: the dispatcher's own object if none differs."""
        own = self.options
        if max_tokens:
            rule = "is {}; need the largest T of any rank, or 0 where all are equal"
            need(max_tokens > 0, "max_tokens", rule, max_tokens)
            other = changes.get("global_bs", 0)
            need(not other, "max_tokens", "is {} and global_bs is {}; pass only one of them", max_tokens, other)
            changes["global_bs"] = self.world_size * max_tokens
        for name, value in changes.items():
            if getattr(own, name, _NO_SUCH_OPTION) is not value:
                known = [*DispatchTensors._fields, "max_tokens", *DEFAULTS]
                if (unknown := unknown_name(f"{type(self).__name__}.{method}", known, changes)) is not None:
                    raise unknown
                return replace(own, **changes)
        return own

    def _special_rows(self, given: dict[str, Tensor | None]) -> SpecialTensors:
        """Return combine's tensors of copy and const experts."""
        if not given:
            return _NO_SPECIAL
        for name in given:
            known = SpecialTensors._fields
            need(name in known, name, "is no argument of combine, which takes shared_expert_x and {}", ", ".join(known))
        return SpecialTensors(**given)

    def _check_own(self, dispatched: Dispatched) -> None:
        rule = "does not come from this {}; pass what its dispatch returned"
        handle = getattr(dispatched, "handle", None)
        need(getattr(handle, "owner", None) is self, "dispatched", rule, type(self).__name__)

    @abstractmethod
    def _dispatch(self, x: Tensor, expert_ids: Tensor, tensors: DispatchTensors, options: CallOptions) -> Dispatched:
        """Run ``dispatch`` with these options. The result's handle has this object as ``owner``."""

    @abstractmethod
    def _combine(self, expert_out: Tensor, dispatched: Dispatched, tensors: CombineTensors) -> Tensor:
        """Run ``combine`` for a result of this object's ``dispatch``."""

    def _begin_dispatch(
        self, x: Tensor, expert_ids: Tensor, tensors: DispatchTensors, options: CallOptions
    ) -> InFlight[Dispatched]:
        sent = self._dispatch(x, expert_ids, tensors, options)
        return InFlight(lambda: sent)

    def _begin_combine(self, expert_out: Tensor, dispatched: Dispatched, tensors: CombineTensors) -> InFlight[Tensor]:
        result = self._combine(expert_out, dispatched, tensors)
        return InFlight(lambda: result)


def check_dispatch(
    x: Tensor, expert_ids: Tensor, tensors: DispatchTensors, options: CallOptions, *, world: int, experts: int
) -> int:
    """Raise ArgumentError if dispatch's arguments break a rule on this rank; return maxBS: global_bs / W, or BS."""
    weights, scales, mask, _ = tensors
    quant_mode, global_bs = options.quant_mode, options.global_bs
    need_dims("x", x, 2, dtypes=ROW_DTYPES)
    need_dims("expert_ids", expert_ids, 2, dtypes=(torch.int32,))
    bs, topk = x.size(0), expert_ids.size(1)
    need(topk >= 1, "expert_ids", "has K = 0; need K >= 1")
    need_shape("expert_ids", expert_ids, (bs, topk))
    need(quant_mode in (0, 2), "quant_mode", "is {}; need 0 (none) or 2 (int8 by token)", quant_mode)
    if weights is not None:
        need_shape("expert_scales", weights, (bs, topk), dtypes=(torch.float32,))
    if scales is not None:
        need(quant_mode != 0, "scales", "are given with quant_mode 0; pass None or quant_mode=2")
        need_shape("scales", scales, (experts, x.size(1)), dtypes=(torch.float32,))
    if mask is not None:
        need_shape("x_active_mask", mask, (bs,), (bs, topk), dtypes=(torch.bool,))
    options.check()
    whole = hasattr(global_bs, "__index__")
    fits = whole and (global_bs == 0 or (global_bs > 0 and global_bs % world == 0 and global_bs >= bs * world))
    rule = "is {}; need 0, or {} ranks * largest BS (here at least {})"
    need(fits, "global_bs", rule, global_bs, world, world * bs)
    return global_bs // world if global_bs else bs


def check_combine(
    expert_out: Tensor,
    rows: int,
    like: Tensor,
    expert_scales: Tensor | None,
    topk: int,
    shared: Tensor | None,
) -> None:
    """Raise ArgumentError for arguments of combine that do not fit its dispatch: x ``like``, K and received rows."""
    bs, hidden = like.shape
    # Ranks with different row sizes would deadlock the exchange, so the dtype must be dispatch's.
    need_dims("expert_out", expert_out, 2, dtypes=(like.dtype,))
    fits = expert_out.size(1) == hidden and expert_out.size(0) >= rows
    need(fits, "expert_out", "is {}; need at least {} rows of {}", expert_out, rows, hidden)
    if expert_scales is not None:
        need_shape("expert_scales", expert_scales, (bs, topk), dtypes=(torch.float32,))
    if shared is not None:
        need_dtype("shared_expert_x", shared, like.dtype)
        fits = shared.dim() >= 2 and shared.size(-1) == hidden and shared.numel() == bs * hidden
        need(fits, "shared_expert_x", "is {}; need ({}, {})", shared, bs, hidden)
