"""The expert MLP between dispatch and combine, and its operators.

`grouped_mlp` runs the gate/up product, the activation and the down product of every local expert over dispatch's rows.
The operators have torch_npu's names and signatures: NPU tensors are passed to torch_npu, others use plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ascend_moe.errors import need, need_shape, with_typed_errors
from ascend_moe.experts.activations import Activation
from ascend_moe.experts.grouped_matmul import npu_grouped_matmul
from ascend_moe.experts.groups import COUNTS, as_counts, read_groups
from ascend_moe.experts.int4 import logical_shape, quantize_weight_int4
from ascend_moe.experts.quant import (
    DYNAMIC,
    dequant_activate_quant,
    npu_clipped_swiglu,
    npu_dequant_swiglu_quant,
    npu_dynamic_quant,
    npu_swiglu,
    quantize_weight,
)
from ascend_moe.native.torch_npu import on_npu

__all__ = [
    "Activation",
    "grouped_mlp",
    "npu_clipped_swiglu",
    "npu_dequant_swiglu_quant",
    "npu_dynamic_quant",
    "npu_grouped_matmul",
    "npu_swiglu",
    "quantize_weight",
    "quantize_weight_int4",
]

Weights = torch.Tensor | Sequence[torch.Tensor]  # one tensor for all experts, or one per expert


@with_typed_errors
def grouped_mlp(
    expand_x: torch.Tensor,
    w_gate_up: Weights,
    w_down: Weights,
    expert_token_nums: torch.Tensor,
    *,
    group_list_type: int = COUNTS,
    dynamic_scales: torch.Tensor | None = None,
    w_gate_up_scale: torch.Tensor | None = None,
    w_down_scale: torch.Tensor | None = None,
    output_dtype: torch.dtype | int | None = None,
    topk_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    swiglu_limit: float = 0.0,
    activation: str | Activation = "swiglu",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    operators: Any = None,
) -> torch.Tensor:
    """Return ``activation(x @ gate, x @ up) @ down`` for every row, with the weights of the row's local expert.

    Unquantized: grouped matmul, activation, grouped matmul in expand_x's dtype. W8A8 (dynamic_scales passed): int8
    product to int32, dequantize + activation + quantize per row, int8 product to output_dtype. W4A8 (also int32
    weights): int4 product to fp32 (on an NPU bf16), activation, quantize per row, int4 product.

    Args:
        expand_x: ``(A, H)`` rows by local expert, from dispatch: bf16, fp16, fp32; W8A8 int8.
        w_gate_up: ``(L, H, 2I)``, gate in the first I columns, up in the last; expand_x's dtype, any strides.
            ``(L, H, I)`` for an activation without a gate.
        w_down: ``(L, I, H)``; expand_x's dtype, any strides. Either may be a list of L tensors, one per expert. Both
            may be int4: int32 ``(L, H, 2I / 8)`` and ``(L, I, H / 8)`` from `quantize_weight_int4`.
        expert_token_nums: ``(L,)`` int64, from dispatch; may cover fewer than A rows. Never read on the
            host for NPU tensors.
        group_list_type: 1 counts, 0 running sums; the expert_token_nums_type passed to dispatch.
        dynamic_scales: W8A8: float32 ``(A,)``, from dispatch: row = codes * scale.
        w_gate_up_scale, w_down_scale: W8A8: ``(L, 2I)`` and ``(L, H)`` from `quantize_weight`. The NPU needs a bf16
            w_down_scale for bf16 output, fp32 for fp16. W4A8: also ``(L, G, 2I)`` and ``(L, G, H)``, and int64 of the
            bits, which the NPU needs.
        output_dtype: W8A8: None uses w_down_scale's dtype if that is bf16 or fp16, else bf16.
            Unquantized: None or expand_x's dtype.
        topk_scales: ``(A,)`` or ``(A, 1)``, a factor for each row of the result, but not for down_bias in it (routing
            weights that combine does not apply).
        out: ``(A, H)`` of the result's dtype: the last product is written into it; rows after the last expert's are
            unchanged. Not under autograd. combine sends a tensor of `ascend_moe.window_empty` without a copy.
        swiglu_limit: above 0: clamp the gate at this value before silu, and up at plus and minus it. 0: no limit.
            Another name for the limit of `Activation`'s swiglu.
        activation: a name of `ascend_moe.experts.activations`, or an `Activation` with its numbers.
        gate_up_bias, down_bias: ``(L, 2I)`` and ``(L, H)``, added to the two products; unquantized only. W4A8 needs
            both, fp32: the third result of `quantize_weight_int4`.
        operators: namespace with npu_grouped_matmul, npu_swiglu, npu_dequant_swiglu_quant and for W4A8
            npu_dynamic_quant; None: this package's.

    Returns:
        ``(A, H)``, rows as in expand_x; ``out`` if passed. Rows after the last expert's are zero here and
        unspecified on the NPU. Differentiable when unquantized and without out.

    Raises:
        ArgumentError: shapes, dtypes or the group list do not fit, or only part of the W8A8 tensors is passed.
    """
    per_row = {"dynamic_scales": dynamic_scales, "topk_scales": topk_scales}
    need(swiglu_limit >= 0, "swiglu_limit", "is {}; it must be above 0, or 0 for no limit", swiglu_limit)
    act = Activation.of(activation, limit=swiglu_limit or None)
    experts = _check_shapes(expand_x, w_gate_up, w_down, per_row, act.gated)
    gate_up_weights, down_weights = _weight_list(w_gate_up), _weight_list(w_down)
    scales = _check_scales(expand_x, dynamic_scales, w_gate_up_scale, w_down_scale)
    biases = _biases(expand_x, w_gate_up, w_down, gate_up_bias, down_bias)
    counts = as_counts(expert_token_nums, group_list_type)
    rows = used = expand_x.shape[0]
    # Compilers keep registered operators whole, but would trace the functions into every group.
    compiling = torch.compiler.is_compiling()
    ops: Any = operators or (torch.ops.ascend_moe if compiling else _functions)
    if not on_npu(expand_x) and not compiling:
        # Compute only received rows, not the worst case that expand_x is allocated for.
        groups = read_groups(expert_token_nums, group_list_type, experts, rows, "expert_token_nums")
        used = groups[-1].stop
    x = expand_x[:used]
    weights = None if topk_scales is None else topk_scales.reshape(rows)[:used]
    multiply: Multiply = partial(
        ops.npu_grouped_matmul, group_type=0, group_list=expert_token_nums, group_list_type=group_list_type
    )
    if scales is None:
        gate_up = multiply([x], gate_up_weights, split_item=2, **biases[0])[0]
        hidden = _activated(ops, gate_up, act)
        if weights is not None:
            hidden = (hidden * weights.unsqueeze(1)).to(hidden.dtype)
        y = multiply([hidden], down_weights, split_item=2, output_dtype=output_dtype, **biases[1])[0]
    else:
        scales = scales._replace(dynamic=scales.dynamic.reshape(rows)[:used])
        if output_dtype is None:
            narrow = (torch.bfloat16, torch.float16)
            output_dtype = scales.down.dtype if scales.down.dtype in narrow else torch.bfloat16
        if gate_up_weights[0].dtype == torch.int32:
            # The NPU's int4 product needs counts.
            multiply = partial(ops.npu_grouped_matmul, group_type=0, group_list=counts, group_list_type=COUNTS)
            hidden, scale = _w4a8_hidden(ops, multiply, x, gate_up_weights, biases[0], scales, act)
        else:
            hidden, scale = _w8a8_hidden(ops, multiply, x, gate_up_weights, counts, scales, act)
        if weights is not None:
            # The down product is linear, so a row's weight can be part of its scale.
            scale = scale * weights
        y = multiply(
            [hidden], down_weights, split_item=2, output_dtype=output_dtype, per_token_scale=[scale],
            scale=_scale_list(scales.down, down_weights), **biases[1],
        )[0]  # fmt: skip
    if out is not None:
        _check_out(out, expand_x.shape, y)
        out[:used].copy_(y)
        return out
    return y if used == rows else torch.cat([y, y.new_zeros(rows - used, y.shape[1])])


_functions = SimpleNamespace(
    npu_grouped_matmul=npu_grouped_matmul,
    npu_swiglu=npu_swiglu,
    npu_dequant_swiglu_quant=npu_dequant_swiglu_quant,
    npu_dynamic_quant=npu_dynamic_quant,
)
Multiply = Callable[..., list[torch.Tensor]]


def _check_out(out: torch.Tensor, shape: torch.Size, y: torch.Tensor) -> None:
    fits = out.shape == shape and out.dtype == y.dtype and out.device == y.device
    rule = "is {} {} on {}; it must be {} {} on {}"
    need(fits, "out", rule, out.shape, out.dtype, out.device, shape, y.dtype, y.device)
    graph = torch.is_grad_enabled() and (out.requires_grad or y.requires_grad)
    need(not graph, "out", "does not support autograd: call it under torch.no_grad()")


class _Scales(NamedTuple):
    dynamic: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def _weight_list(weights: Weights) -> list[torch.Tensor]:
    """Return weights in npu_grouped_matmul's form: a list of one tensor for all experts, or one per expert."""
    return [weights] if isinstance(weights, torch.Tensor) else list(weights)


def _scale_list(scales: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return scales in the form of the weights: one tensor, or one per expert."""
    return [scales] if weights[0].dim() == 3 else list(scales.unbind(0))


def whole_shape(weights: Weights, argument: str) -> tuple[int, ...]:
    """Return (L, rows, columns) of ``weights``, unpacked; raise ArgumentError about ``argument`` if shapes differ."""
    if isinstance(weights, torch.Tensor):
        return logical_shape(weights)
    first = logical_shape(weights[0])
    if len(weights) == 1 and len(first) == 3:
        return first
    if any(logical_shape(weight) != first for weight in weights):
        shapes = sorted({tuple(weight.shape) for weight in weights})
        need(False, argument, "has shapes {}; a list must contain a matrix of one shape for each expert", shapes)
    return (len(weights), *first)


def _check_shapes(
    expand_x: torch.Tensor, w_gate_up: Weights, w_down: Weights, per_row: dict[str, torch.Tensor | None], gated: bool
) -> int:
    """Check the shapes; return the number of local experts."""
    gate_up, down = whole_shape(w_gate_up, "w_gate_up"), whole_shape(w_down, "w_down")
    fits = expand_x.dim() == 2 and len(gate_up) == 3 and gate_up[1] == expand_x.shape[1]
    rule = "is {}, expand_x {}; need (L, H, " + ("2I" if gated else "I") + "), (A, H)"
    need(fits, "w_gate_up", rule, gate_up, expand_x.shape)
    local_experts, hidden, width = gate_up
    fits = local_experts > 0 and down == (local_experts, width / 2 if gated else width, hidden)
    rule = "is {} and w_gate_up is {}; they must be (L, I, H) and (L, H, "
    need(fits, "w_down", rule + ("2I" if gated else "I") + "), L at least 1", down, gate_up)
    for name, value in per_row.items():
        count = expand_x.shape[0] if value is None else value.numel()
        rule = "has {} values; pass one for each of the {} rows of expand_x"
        need(count == expand_x.shape[0], name, rule, count, expand_x.shape[0])
    return local_experts


def _biases(
    expand_x: torch.Tensor,
    w_gate_up: Weights,
    w_down: Weights,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> list[dict[str, Any]]:
    """Return the bias arguments of the two products."""
    given: list[dict[str, Any]] = []
    for name, bias, weights in (("gate_up_bias", gate_up_bias, w_gate_up), ("down_bias", down_bias, w_down)):
        int4 = _weight_list(weights)[0].dtype == torch.int32
        rule = "is missing; int4 weights need it: pass the third result of quantize_weight_int4"
        need(bias is not None or not int4, name, rule)
        if bias is not None:
            need(int4 or expand_x.dtype != torch.int8, name, "is given; W8A8 does not support a bias: leave it out")
            count, _, width = whole_shape(weights, name)
            need_shape(name, bias, (count, width), dtypes=(torch.float32 if int4 else expand_x.dtype,))
            one = isinstance(weights, torch.Tensor) or len(weights) == 1
            given.append({"bias": [bias] if one else list(bias.unbind(0))})
        else:
            given.append({})
    return given


def _activated(ops: Any, gate_up: torch.Tensor, act: Activation) -> torch.Tensor:
    """Apply the activation to float rows: SwiGLU by the operator, others by their formula."""
    if act.name != "swiglu" or act.interleaved:
        return act(gate_up)
    limit = act.number("limit")
    hidden: torch.Tensor = ops.npu_swiglu(_limited(gate_up, limit) if limit else gate_up)
    return hidden


def _limited(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """Clamp the gate (left half) above, up at both sides."""
    if limit > torch.finfo(gate_up.dtype).max:  # in fp16, 1e6 is infinite
        return gate_up
    gate, up = gate_up.chunk(2, -1)
    return torch.cat([gate.clamp(max=limit), up.clamp(-limit, limit)], -1)


def _check_scales(
    expand_x: torch.Tensor,
    dynamic_scales: torch.Tensor | None,
    w_gate_up_scale: torch.Tensor | None,
    w_down_scale: torch.Tensor | None,
) -> _Scales | None:
    """Return the scales of a W8A8 or W4A8 call, None for an unquantized one."""
    if dynamic_scales is not None and w_gate_up_scale is not None and w_down_scale is not None:
        need(expand_x.dtype == torch.int8, "expand_x", "is {}; with scales it must be int8", expand_x.dtype)
        return _Scales(dynamic_scales, w_gate_up_scale, w_down_scale)
    for name, value in (
        ("dynamic_scales", dynamic_scales),
        ("w_gate_up_scale", w_gate_up_scale),
        ("w_down_scale", w_down_scale),
    ):
        rule = "is {} for {} rows; W8A8 (int8) needs "
        rule += "dynamic_scales, w_gate_up_scale and w_down_scale, unquantized rows none of them"
        fits = (value is None) != (expand_x.dtype == torch.int8)
        need(fits, name, rule, "missing" if value is None else "given", expand_x.dtype)
    return None


def _w4a8_hidden(
    ops: Any,
    multiply: Multiply,
    x: torch.Tensor,
    w_gate_up: list[torch.Tensor],
    bias: dict[str, Any],
    scales: _Scales,
    act: Activation,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input of the down product with int4 weights: int8 codes and one scale per row."""
    gate_up = multiply(
        [x], w_gate_up, split_item=2, scale=_scale_list(scales.gate_up, w_gate_up), per_token_scale=[scales.dynamic],
        output_dtype=torch.bfloat16 if on_npu(x) else torch.float32, **bias,
    )[0]  # fmt: skip
    hidden: tuple[torch.Tensor, torch.Tensor] = ops.npu_dynamic_quant(_activated(ops, gate_up, act))
    return hidden


def _w8a8_hidden(
    ops: Any,
    multiply: Multiply,
    x: torch.Tensor,
    w_gate_up: list[torch.Tensor],
    counts: torch.Tensor,
    scales: _Scales,
    act: Activation,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input of the down product: int8 codes and one scale per row."""
    sums = multiply([x], w_gate_up, split_item=3, output_dtype=torch.int32)[0]
    mode: dict[str, Any] = {}
    if act.name == "clipped_swiglu" or (act.name == "swiglu" and act.number("limit")):
        mode = {"swiglu_mode": 1 if act.interleaved else 2, "clamp_limit": act.number("limit")}
        of_swiglu = {"alpha": 1.0, "bias": 0.0}  # with these numbers the mode is SwiGLU with clamped inputs
        mode |= {f"glu_{name}": act.number(name) if act.has(name) else of_swiglu[name] for name in of_swiglu}
    if mode or (act.name == "swiglu" and not act.interleaved):
        hidden: tuple[torch.Tensor, torch.Tensor] = ops.npu_dequant_swiglu_quant(
            sums, weight_scale=scales.gate_up, activation_scale=scales.dynamic, group_index=counts,
            activate_left=True, quant_mode=DYNAMIC, **mode,
        )  # fmt: skip
        return hidden
    return dequant_activate_quant(sums, scales.gate_up, scales.dynamic, counts, act)
