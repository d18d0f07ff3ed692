"""Dispatch, the MLP of the local experts, combine: the three calls behind the one call for a layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ascend_moe.dispatchers.base import Dispatched
from ascend_moe.dispatchers.mc2 import MC2Dispatcher
from ascend_moe.errors import ConfigMismatch
from ascend_moe.experts import Activation, grouped_mlp, npu_dynamic_quant
from ascend_moe.layer_ops.agreement import Limit, gather_loads, judge
from ascend_moe.layer_ops.arguments import Experts, Tokens, tensors_of
from ascend_moe.ops.registration import wants_gradient

_SWIGLU = Activation()


def dispatch(dispatcher: MC2Dispatcher, tokens: Tokens, experts: Experts, global_bs: int) -> Dispatched:
    return dispatcher.dispatch(
        tokens.x, tokens.ids, x_active_mask=tokens.mask, quant_mode=experts.quant_mode, global_bs=global_bs
    )


def dispatch_any_batches(dispatcher: MC2Dispatcher, tokens: Tokens, experts: Experts, limit: Limit) -> Dispatched:
    """Dispatch without knowing the batch sizes of the other ranks; at most ``limit`` rows may go to a rank.

    If the limit could be exceeded, the ranks first exchange their counts. Otherwise they dispatch as if all batches
    were equal. If they are not, dispatch raises ConfigMismatch on every rank: on the CPU the ranks then exchange their
    batch sizes and dispatch again; on an NPU the error comes later, and is the caller's.
    """

    def exchange() -> Tensor:
        return gather_loads(dispatcher, tokens, experts, limit)

    equal = dispatcher.world_size * len(tokens.x)
    if limit.may_be_reached(equal, tokens, experts):
        return dispatch(dispatcher, tokens, experts, judge(_twice(exchange), limit, dispatcher.rank))
    try:
        return dispatch(dispatcher, tokens, experts, 0)
    except ConfigMismatch as mismatch:
        global_bs = judge(exchange(), limit, dispatcher.rank)
        if global_bs == 0:  # something other than the batches differs
            raise mismatch
        return dispatch(dispatcher, tokens, experts, global_bs)


def _twice(exchange: Callable[[], Tensor]) -> Tensor:
    try:
        return exchange()
    except ConfigMismatch:  # a rank with fewer tokens has started with its dispatch
        return exchange()


def finish(
    dispatcher: MC2Dispatcher,
    sent: Dispatched,
    tokens: Tokens,
    experts: Experts,
    activation: Activation = _SWIGLU,
    shared_rows: Tensor | None = None,
) -> Tensor:
    """Run the MLP of the local experts on the rows of ``sent``, and combine; return (T, H)."""
    x = tokens.x
    leaves = (*tensors_of("", experts.gate_up), *tensors_of("", experts.down), sent.expand_x, sent.dynamic_scales)
    # Not with autograd. Writes only received rows, not all that could arrive.
    out = None if wants_gradient(leaves) else torch.empty_like(sent.expand_x, dtype=x.dtype)
    rows = _mlp(sent.expand_x, experts, sent.expert_token_nums, sent.dynamic_scales, x.dtype, activation, out)
    return dispatcher.combine(rows, sent, tokens.weights, shared_expert_x=shared_rows)


def _mlp(
    rows: Tensor,
    experts: Experts,
    counts: Tensor,
    row_scales: Tensor,
    dtype: torch.dtype,
    activation: Activation,
    out: Tensor | None = None,
) -> Tensor:
    return grouped_mlp(
        rows,
        experts.gate_up,
        experts.down,
        counts,
        dynamic_scales=row_scales if experts.quant_mode else None,
        w_gate_up_scale=experts.gate_up_scale,
        w_down_scale=experts.down_scale,
        output_dtype=dtype,
        out=out,
        activation=activation,
        gate_up_bias=experts.gate_up_bias,
        down_bias=experts.down_bias,
    )


def run_shared(tokens: Tokens, shared: Experts, activation: Activation) -> Tensor:
    """Run the shared experts on this rank's tokens; return the sum of their rows (T, H), in fp32 until rounded once."""
    x = tokens.x
    if tokens.mask is not None:  # NaN of inactive tokens must not reach the gradients
        active = tokens.mask if tokens.mask.dim() == 1 else tokens.mask.any(1)
        x = torch.where(active[:, None], x, 0)
    rows, scales = npu_dynamic_quant(x) if shared.quant_mode else (x, x)
    count = torch.full((1,), len(x), dtype=torch.int64, device=x.device)
    results = []
    for number in range(shared.count):
        results.append(_mlp(rows, shared.only(number), count, scales, x.dtype, activation))
    if len(results) == 1:
        return results[0]
    return torch.stack(results).float().sum(0).to(x.dtype)
