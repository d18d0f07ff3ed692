"""Dispatcher over this package's ops, or others with their signatures: npu_moe_distribute_*."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ascend_moe import ops
from ascend_moe.call import CallOptions
from ascend_moe.comm import name_of, window_empty
from ascend_moe.comm.place import Place
from ascend_moe.dispatchers.base import CombineTensors, Dispatched, Dispatcher, DispatchTensors, InFlight, given
from ascend_moe.errors import need, with_typed_errors
from ascend_moe.ops.begin import begin_combine, begin_dispatch
from ascend_moe.ops.calls import is_two_level
from ascend_moe.ops.collectives import MAX_BATCH
from ascend_moe.ops.registration import OPERATORS

#: By contract and kind: names of an operator's arguments.
_NAMES = {
    contract: {kind: frozenset(OPERATORS[f"npu_moe_distribute_{kind}{end}"].names) for kind in ("dispatch", "combine")}
    for contract, end in (("v1", ""), ("v2", "_v2"))
}


@dataclass
class _Handle:
    owner: MC2Dispatcher
    tensors: tuple[Tensor, Tensor, Tensor]  # for combine: expert_ids, its third argument, ep_send_counts
    given: dict[str, Any]  # for combine: arguments from dispatch


class MC2Dispatcher(Dispatcher):
    """Dispatcher that runs dispatch and combine as kernels over the communication windows of ``group_ep``.

    Args:
        group_ep: name from ``ascend_moe.comm_name`` or a ``LocalCluster``; or the group itself, as in `comm.group_of`.
        world_size: W, ranks of the group.
        rank: this rank.
        num_experts: E, a multiple of W.
        contract: "v2" (``npu_moe_distribute_*_v2``) or "v1" (without _v2: combine adds the experts' rows only).
        zero_copy: ``empty_expert_out`` returns window tensors, from which a direct combine sends without a copy
            (``ascend_moe.window_empty``); with comm_alg "", "auto" or "direct".
        ops: a namespace with the operators of this contract (patched torch_npu, `ascend_moe.npu`); None: this
            package's.
        options: fields of `CallOptions`, defaults for all calls. comm_alg "hierarchy" (or ASCEND_MOE_COMM_ALG) weights
            rows on the servers of their experts: pass combine's expert_scales to dispatch. With special experts combine
            takes ``ori_x`` and the tensors of const experts.

    Raises:
        ArgumentError: num_experts is no multiple of W, contract is unknown, an option has an invalid value, or options
            exclude each other: contract "v1" supports those of its ops only; for zero_copy see
            `CallOptions.check_zero_copy`.
    """

    max_batch = MAX_BATCH

    @with_typed_errors
    def __init__(
        self,
        group_ep: str,
        world_size: int,
        rank: int,
        num_experts: int,
        contract: str = "v2",
        *,
        zero_copy: bool = False,
        ops: Any = None,
        **options: Any,
    ) -> None:
        place = Place(name_of("group_ep", group_ep), world_size, rank)
        super().__init__(place, num_experts, CallOptions.given_to(type(self), options))
        need(contract in ("v1", "v2"), "contract", "is {!r}; need 'v1' or 'v2', the operators' version", contract)
        self.contract, self._names = contract, _NAMES[contract]
        self._own = {kind: self._arguments_of(kind, self.options) for kind in self._names}
        self._dispatch_op, self._begin_dispatch_op = self._operator("dispatch", ops, begin_dispatch)
        self._combine_op, self._begin_combine_op = self._operator("combine", ops, begin_combine)
        names = self._names["dispatch"] | self._names["combine"]
        for name, value in self.options.options.items():
            need(name in names, name, "is {!r}, not supported by the V1 ops: use contract 'v2'", value)
        if zero_copy:
            self.options.check_zero_copy(contract)
        self.zero_copy = zero_copy
        self.fuses_shared_expert = contract == "v2"
        self.weighs_first = contract == "v2" and is_two_level(self.options.comm_alg)
        self.sends_first = self._begin_dispatch_op is not None and self._begin_combine_op is not None

    @classmethod
    @with_typed_errors
    def from_group(cls, process_group: object, num_experts: int, contract: str = "v2", **options: Any) -> MC2Dispatcher:
        """Return a new dispatcher for a group. Collective on a process group's first use.

        Args:
            process_group: as in `comm.place.Place.of`; None: the default group.
            num_experts, contract, options: as for the class.
        """
        place = Place.of(process_group, "process_group")
        return cls(place.group_ep, place.world, place.rank, num_experts, contract, **options)

    def _take_place(self, place: Place, num_experts: int) -> None:
        super()._take_place(place, num_experts)
        # By position where the ops allow it: torch takes longer for keywords.
        self._group = (place.group_ep, place.world, place.rank, num_experts)

    def moved(self, place: Place) -> MC2Dispatcher:
        """Return a copy of this dispatcher for the group of ``place``, with the same number of experts per rank."""
        made = object.__new__(type(self))
        made.__dict__ |= self.__dict__
        made._take_place(place, self.local_experts * place.world)
        return made

    @property
    def group_ep(self) -> str:
        """The group's name."""
        return self.place.group_ep

    def _operator(self, kind: str, given: Any, begin: Any) -> tuple[Any, Any]:
        """Return an operator and its non-blocking variant, or None if there is none."""
        name = f"npu_moe_distribute_{kind}" + ("_v2" if self.contract == "v2" else "")
        ours = getattr(ops, name)
        rule = "has no {}; pass ascend_moe, ascend_moe.npu or a patched torch_npu"
        need(given is None or hasattr(given, name), "ops", rule, name)
        op = ours if given is None else getattr(given, name)
        if self.contract == "v1":
            return op, None
        return op, begin if op is ours else getattr(given, f"begin_{kind}", None)

    def _arguments_of(self, kind: str, options: CallOptions) -> dict[str, Any]:
        """Return options as keyword arguments of an operator."""
        return {name: value for name, value in options.options.items() if name in self._names[kind]}

    def _arguments(self, kind: str, options: CallOptions) -> dict[str, Any]:
        """The same; those of the dispatcher's own options are computed once."""
        return self._own[kind] if options is self.options else self._arguments_of(kind, options)

    def _need_v2(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            need(self.contract == "v2", name, "is {}, not supported by the V1 ops: use contract 'v2'", tensor)

    def _dispatch_call(self, tensors: DispatchTensors, options: CallOptions) -> dict[str, Any]:
        if tensors.performance_info is not None:
            self._need_v2({"performance_info": tensors.performance_info})
        return {**given(tensors), **self._arguments("dispatch", options)}

    def _dispatch(self, x: Tensor, expert_ids: Tensor, tensors: DispatchTensors, options: CallOptions) -> Dispatched:
        outputs = self._dispatch_op(x, expert_ids, *self._group, **self._dispatch_call(tensors, options))
        return self._dispatched(outputs, expert_ids, tensors, options)

    def _begin_dispatch(
        self, x: Tensor, expert_ids: Tensor, tensors: DispatchTensors, options: CallOptions
    ) -> InFlight[Dispatched]:
        if not self.sends_first:
            return super()._begin_dispatch(x, expert_ids, tensors, options)
        finish = self._begin_dispatch_op(x, expert_ids, *self._group, **self._dispatch_call(tensors, options)).finish
        return InFlight(lambda: self._dispatched(finish(), expert_ids, tensors, options))

    def _dispatched(
        self, outputs: Sequence[Any], expert_ids: Tensor, tensors: DispatchTensors, options: CallOptions
    ) -> Dispatched:
        expand_x, dynamic_scales, index, nums, counts, tp_counts, expand_scales = outputs
        weights, mask = expand_scales, tensors.x_active_mask
        if weights is not None and weights.requires_grad:
            weights = weights.detach()  # a second gradient path would tie combine's graph to dispatch's
        beside = {"tp_send_counts": tp_counts, "expand_scales": weights, **self._arguments("combine", options)}
        if mask is not None:
            beside["x_active_mask"] = mask
        # With expert_scales the op appends words for combine to the counts.
        own = counts if tensors.expert_scales is None else counts[: self.num_experts]
        handle = _Handle(self, (expert_ids, index, counts), beside)
        return Dispatched(expand_x, dynamic_scales, nums, own, index, expand_scales, handle)

    def resume(
        self,
        expert_ids: Tensor,
        expand_idx: Tensor,
        ep_recv_counts: Tensor,
        *,
        x_active_mask: Tensor | None = None,
        max_tokens: int = 0,
    ) -> Dispatched:
        """Return a `Dispatched` without rows, for ``combine``, from tensors that a caller stored.

        Args:
            expert_ids, x_active_mask, max_tokens: as passed to dispatch, (BS, K) and (BS,) or (BS, K).
            expand_idx, ep_recv_counts: as returned by dispatch.
        """
        tensors, none = DispatchTensors(x_active_mask=x_active_mask), expand_idx.new_empty(0)
        outputs = (none, none, expand_idx, none, ep_recv_counts, None, None)
        return self._dispatched(outputs, expert_ids, tensors, self._options(max_tokens, {}))

    def empty_expert_out(self, dispatched: Dispatched, dtype: torch.dtype) -> Tensor | None:
        """Return a tensor of ``window_empty`` for one combine; None without zero_copy and under torch.compile.

        It has ``dtype`` and the shape of ``dispatched.expand_x``. If it is None, combine copies the rows of any tensor.
        Raises as ``window_empty``.
        """
        if not self.zero_copy or torch.compiler.is_compiling():
            return None
        return window_empty(dispatched.expand_x.shape, dtype=dtype, **self.place.arguments())

    def _combine(self, expert_out: Tensor, dispatched: Dispatched, tensors: CombineTensors) -> Tensor:
        arguments, options = self._combine_call(expert_out, dispatched, tensors)
        result: Tensor = self._combine_op(*arguments, **options)
        return result

    def _begin_combine(self, expert_out: Tensor, dispatched: Dispatched, tensors: CombineTensors) -> InFlight[Tensor]:
        if not self.sends_first:
            return super()._begin_combine(expert_out, dispatched, tensors)
        arguments, options = self._combine_call(expert_out, dispatched, tensors)
        return InFlight(self._begin_combine_op(*arguments, **options).finish)

    def _combine_call(
        self, expert_out: Tensor, dispatched: Dispatched, tensors: CombineTensors
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        handle: _Handle = dispatched.handle
        beside, expert_scales = tensors.given, tensors.expert_scales
        self._need_v2(beside)
        if expert_scales is None:
            expert_scales = torch.empty(0, dtype=torch.float32, device=handle.tensors[0].device)
        arguments = (expert_out, *handle.tensors, expert_scales, *self._group)
        return arguments, {**beside, **handle.given}
