"""PrepareAndFinalize of vLLM's modular kernel, over dispatch and combine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ascend_moe._tensors import narrow, wide_ids_named
from ascend_moe.dispatchers import Dispatched
from ascend_moe.dispatchers.base import PendingCall
from ascend_moe.errors import RoutingOverflow, need, need_shape, with_signature_of, with_typed_errors
from ascend_moe.interop.vllm import bases
from ascend_moe.interop.vllm.all2all import All2AllHandle
from ascend_moe.interop.vllm.experts import is_w8a8
from ascend_moe.native.torch_npu import on_npu
from ascend_moe.permute import padded_places, segment_of_rows

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class BatchedRows:
    """Map from dispatch's rows to vLLM's BatchedExperts layout, which has ``most`` places for each expert.

    ``places`` (A,): place of each row among ``local * most``; ``local * most``: none.
    """

    local: int  # L
    most: int  # places of an expert
    places: Tensor

    @classmethod
    def of(cls, counts: Tensor, rows: int, most: int, rank: int) -> BatchedRows:
        """Assign a place to each of A = ``rows`` rows; ``counts`` (L,): rows per local expert; ``most``: their places.

        Raises RoutingOverflow, which names ``rank``, if an expert has more rows than places.
        """
        longest = int(counts.max())
        if longest > most:
            text = f"{longest} rows arrived for one expert, but batched rows have places for {most} = max_num_tokens * "
            fix = f"ranks (rank {rank}): make the expert ids of a token differ"
            raise RoutingOverflow(text + fix, rank=rank, rows=longest)
        return cls(len(counts), most, padded_places(counts.cumsum(0), rows, most))

    def spread(self, values: Tensor) -> Tensor:
        """Return ``(A, n)`` values of dispatch's rows as ``(L, most, n)``, with zeros in free places."""
        spread, places = values.new_zeros(self.local * self.most + 1, values.shape[1]), self.places
        if not on_npu(values):
            places = places[places < self.local * self.most]
            values = values[: len(places)]
        spread[places] = values
        return spread[:-1].view(self.local, self.most, values.shape[1])

    def compacted(self, values: Tensor) -> Tensor:
        """Undo `spread`: return ``(A, n)`` values in dispatch's order, undefined after the last received row."""
        rows = values.reshape(self.local * self.most, values.shape[-1])
        if on_npu(values):
            return rows[self.places.clamp(max=len(rows) - 1)]
        compacted = values.new_empty(len(self.places), values.shape[-1])  # work is proportional to received rows
        used = self.places[self.places < len(rows)]
        compacted[: len(used)] = rows[used]
        return compacted


@dataclass
class _Call:
    """State of one prepare for finalize."""

    sent: Dispatched
    given_ids: Tensor  # the caller's own
    weights: Tensor  # (T, K) float32, of combine
    dtype: torch.dtype
    batched: BatchedRows | None  # None: rows are in dispatch's order


def _at_once(send: Callable[P, Callable[[], R]]) -> Callable[P, R]:
    """Return the function that sends and receives."""

    @functools.wraps(send)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return send(*args, **kwargs)()

    return call


class PrepareAndFinalize:
    """Dispatch and combine of vLLM's modular kernel, in both formats of rows.

    Any number of calls may be open: the ids that prepare returned identify the call to finalize.
    """

    batched: bool  # format of the rows, of each class
    row_format: Any

    def __init__(self, mk: Any, handle: All2AllHandle) -> None:
        self.mk, self.handle = mk, handle
        self.dispatcher = handle.dispatcher
        self._calls: Any = WeakIdKeyDictionary()  # ids returned by prepare -> call
        self._pending = PendingCall.of(self.dispatcher.place)

    # ---- what it is

    @property
    def activation_format(self) -> Any:
        return self.row_format

    def topk_indices_dtype(self) -> torch.dtype | None:
        return torch.int32

    def max_num_tokens_per_rank(self) -> int | None:
        return self.handle.max_tokens

    def num_dispatchers(self) -> int:
        return self.dispatcher.world_size

    def output_is_reduced(self) -> bool:
        """Return True: finalize writes the sums over all experts of a token; no all-reduce may follow."""
        return True

    def supports_async(self) -> bool:
        return self.dispatcher.sends_first

    def has_prepare_no_receive(self) -> bool:
        return self.dispatcher.sends_first

    # ---- dispatch

    @with_signature_of(bases.FusedMoEPrepareAndFinalize.prepare)
    @with_typed_errors
    def prepare_async(
        self, a1: Tensor, topk_weights: Tensor, topk_ids: Tensor, num_experts: int, expert_map: Tensor | None,
        apply_router_weight_on_input: bool, quant_config: Any, defer_input_quant: bool,
    ) -> Callable[[], Any]:  # fmt: skip
        """Send this rank's tokens to their experts; return a receiver of the rows for this rank's experts. Collective.

        If supports_async is False, the receiver also sends. The tensors must not change until it is called.
        `prepare` calls the receiver at once.

        Args:
            a1: ``(T, H)`` bf16, fp16 or fp32; T may differ between ranks, up to max_num_tokens_per_rank.
            topk_weights: ``(T, K)`` float. topk_ids: ``(T, K)`` int32 or int64, experts 0..E-1, -1: not routed.
            num_experts: E, or this rank's L, which vLLM passes if its caller omits global_num_experts.
            expert_map: ``(E,)`` or None, checked once: this rank must own experts rank*L to rank*L + L-1.
            apply_router_weight_on_input: weight a1, rounded to its dtype, instead of the experts' rows; K must be 1.
            quant_config: with quant_dtype int8 rows are sent as int8, unless defer_input_quant is True.

        Returns:
            The receiver, which returns, standard: rows ``(A, H)`` by local expert; their scales ``(A, 1)`` float32 or
            None; expert_num_tokens ``(L,)`` int32; ids ``(A, 1)`` int32 of the rows, local without expert_map and
            global with one, -1 after the last row; weights ``(A, 1)`` of 1. Batched: rows ``(L, max_tokens * W, H)``,
            scales with a last dimension of 1, expert_num_tokens, and the caller's ids and weights. Pass the returned
            ids and weights to finalize: they identify the call.

        Raises ArgumentError on this rank only, before anything is sent; InvalidExpertId on every rank, for an id out of
        range, even if it overflows int32; or an error of dispatch.
        """
        self.handle.check(a1, topk_weights, topk_ids, num_experts)
        self.handle.check_map(expert_map)
        quantize = is_w8a8(quant_config) and not defer_input_quant
        weights = topk_weights.float()
        if apply_router_weight_on_input:
            topk = topk_ids.shape[1]
            need(topk == 1, "apply_router_weight_on_input", "needs K = 1; topk_ids has K = {}: pass False", topk)
            a1, weights = (a1.float() * weights).to(a1.dtype), torch.ones_like(weights)
        self._pending.wait()
        named = wide_ids_named(topk_ids, self.dispatcher.rank)
        ids = narrow("topk_ids", topk_ids).contiguous()

        def start() -> Callable[[], Dispatched]:
            options = {"quant_mode": 2 if quantize else 0, "max_tokens": self.handle.most_tokens(a1)}
            return self.dispatcher.begin_dispatch(a1, ids, **options).finish

        came = self._sent(lambda: named(named(start)()))

        @functools.cache
        def receiver() -> Any:
            with torch.no_grad():
                return self._received(came(), topk_weights, topk_ids, weights, expert_map, a1.dtype)

        return receiver

    prepare = _at_once(prepare_async)
    prepare_no_receive = prepare_async

    def _received(
        self, sent: Dispatched, topk_weights: Tensor, topk_ids: Tensor, weights: Tensor, expert_map: Tensor | None,
        dtype: torch.dtype,
    ) -> Any:  # fmt: skip
        counts, rows = sent.expert_token_nums, sent.expand_x
        meta = self.mk.ExpertTokensMetadata(expert_num_tokens=counts.to(torch.int32), expert_num_tokens_cpu=None)
        scales = sent.dynamic_scales.unsqueeze(1) if rows.dtype == torch.int8 else None
        batched = None
        if self.batched:
            assert self.handle.max_tokens is not None
            most = self.handle.max_tokens * self.dispatcher.world_size
            batched = BatchedRows.of(counts, len(rows), most, self.dispatcher.rank)
            rows = batched.spread(rows)
            scales = None if scales is None else batched.spread(scales)
            # New tensors over the caller's memory, to distinguish two calls with the same ids.
            ids, ones = topk_ids.detach(), topk_weights
        else:
            meta.rows_by_expert = True
            first = 0 if expert_map is None else self.dispatcher.rank * self.dispatcher.local_experts
            expert = segment_of_rows(counts.cumsum(0), len(rows))
            ids = torch.where(expert < len(counts), expert + first, -1).to(torch.int32).unsqueeze(1)
            ones = torch.ones(ids.shape, dtype=torch.float32, device=ids.device)
        self._calls[ids] = _Call(sent, topk_ids, weights, dtype, batched)
        return rows, scales, meta, ids, ones

    # ---- combine

    @with_signature_of(bases.FusedMoEPrepareAndFinalize.finalize)
    @with_typed_errors
    def finalize_async(
        self, output: Tensor, fused_expert_output: Tensor, topk_weights: Tensor, topk_ids: Tensor,
        weight_and_reduce_impl: Any,
    ) -> Callable[[], None]:  # fmt: skip
        """Send the experts' rows back; return a receiver that writes this rank's weighted sums to output. Collective.

        `finalize` calls the receiver at once.

        Args:
            output: ``(T, H)``, in a1's dtype, to write to.
            fused_expert_output: shape of prepare's rows, in a1's dtype; rows after the last are not read.
            topk_weights, topk_ids: those that prepare returned; or the caller's, if one open call has them.
            apply_router_weight_on_input: not read: prepare has applied it.
            weight_and_reduce_impl: any for standard rows; Delegate for batched ones. combine weights and sums.

        Raises ArgumentError if an argument breaks one of these rules, or no open call has these ids.
        """
        key, call = self._open_call(topk_ids)
        rows = self._rows_of(call, fused_expert_output, topk_weights, topk_ids, weight_and_reduce_impl)
        shape = (len(call.weights), rows.shape[1])
        need_shape("output", output, shape, dtypes=(call.dtype,))
        self._pending.wait()
        del self._calls[key]
        result = self._sent(lambda: self.dispatcher.begin_combine(rows, call.sent, call.weights).finish)

        @functools.cache
        def receiver() -> None:
            with torch.no_grad():
                output.copy_(result())

        return receiver

    finalize = _at_once(finalize_async)

    def _rows_of(
        self, call: _Call, fused: Tensor, topk_weights: Tensor, topk_ids: Tensor, weight_and_reduce_impl: Any
    ) -> Tensor:
        """Return the experts' rows in the order of dispatch."""
        length, hidden = call.sent.expand_x.shape
        if call.batched is None:
            if not bases.is_delegate(weight_and_reduce_impl) and topk_ids.shape == (length, 1):
                # Here each row is a token of one expert with weight 1.
                fused = weight_and_reduce_impl.apply(None, fused, topk_weights, topk_ids, False)
            need_shape("fused_expert_output", fused, (length, hidden), (length, 1, hidden), dtypes=(call.dtype,))
            return fused.reshape(length, hidden)
        name = type(weight_and_reduce_impl).__name__
        rule = "is {}; batched rows need TopKWeightAndReduceDelegate, as combine weights and sums"
        need(bases.is_delegate(weight_and_reduce_impl), "weight_and_reduce_impl", rule, name)
        shape = (call.batched.local, call.batched.most, hidden)
        need_shape("fused_expert_output", fused, shape, dtypes=(call.dtype,))
        return call.batched.compacted(fused)

    # ---- calls

    def _open_call(self, topk_ids: Tensor) -> tuple[Tensor, _Call]:
        """Return the open call of the ids, and prepare's ids of it."""
        mine = [key for key, each in self._calls.items() if key is topk_ids or each.given_ids is topk_ids]
        rule = "of finalize belong to {} open calls; pass the ids that prepare returned, once"
        need(len(mine) == 1, "topk_ids", rule, len(mine))
        return mine[0], self._calls[mine[0]]

    def _sent(self, start: Callable[[], Callable[[], R]]) -> Callable[[], R]:
        """Return the receiver of a call, to be called once; without async support it starts the call too."""
        with torch.no_grad():
            if self.dispatcher.sends_first:
                return self._pending.sent(start())
        return functools.cache(lambda: start()())
