"""npu_grouped_matmul: each expert's rows times that expert's weight."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec

import torch
from torch.autograd.function import once_differentiable

from ascend_moe.errors import ArgumentError, need, need_unset
from ascend_moe.experts.groups import COUNTS, CUMSUM, PAIRS, read_groups
from ascend_moe.experts.int4 import Int4Matrix, Matrix, codes_of, scales_of_groups
from ascend_moe.experts.products import antiquant_matmul, float_matmul, int8_matmul, w4a8_matmul
from ascend_moe.native.torch_npu import npu_operator, on_npu, resolve_dtype

Tensors = Sequence[torch.Tensor]
P = ParamSpec("P")

# Arguments that only torch_npu's operator supports.
NPU_ONLY = (
    "activation_input",
    "activation_quant_scale",
    "activation_quant_offset",
    "act_type",
    "x_dtype",
    "weight_dtype",
    "scale_dtype",
    "per_token_scale_dtype",
)
_COLUMNS = 2  # group_type
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_DEQUANTIZED = (torch.bfloat16, torch.float16, torch.float32)


class _Segment(NamedTuple):
    """The rows of one group, and their scales."""

    expert: int
    x: torch.Tensor
    per_token_scale: torch.Tensor | None


class _Weights(NamedTuple):
    """Lists with one entry per expert. ``antiquant``: scale and offset belong to codes multiplied by float rows."""

    weight: Sequence[Matrix]
    bias: list[torch.Tensor] | None
    scale: list[torch.Tensor] | None
    offset: list[torch.Tensor] | None = None
    antiquant: bool = False


# ---- gradients


def has_products_for_gradients(given: dict[str, Any]) -> bool:
    """Return whether a call of `npu_grouped_matmul` needs gradients that are grouped products too.

    True only for unquantized floats, one x cut by a group_list tensor of sums or counts, and one output. ``given``:
    the arguments by name.
    """
    x, weight, bias = (given[name] for name in ("x", "weight", "bias"))
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in (*x, *weight, *(bias or ()))):
        return False
    single = len(x) == 1 and x[0].dim() == 2 and x[0].is_floating_point()
    grouped = isinstance(given["group_list"], torch.Tensor) and given["group_list_type"] in (None, CUMSUM, COUNTS)
    form = grouped and given["group_type"] == 0 and given["split_item"] in (2, 3)
    scaled = given["scale"] or given["per_token_scale"] or given["antiquant_scale"]
    return single and form and not scaled


def multiply_with_gradient(multiply: Callable[..., Any], given: dict[str, Any]) -> list[torch.Tensor]:
    """Run the grouped matmul ``multiply`` with gradients; `has_products_for_gradients` must be True for ``given``."""
    weight, bias = given["weight"], given["bias"] or ()
    return [_Product.apply(multiply, given, len(weight), given["x"][0], *weight, *bias)]  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    """Grouped rows times weights. The gradient of the weights is the product of grouped columns (group_type 2)."""

    @staticmethod
    def forward(
        ctx: Any,
        multiply: Callable[..., Any],
        given: dict[str, Any],
        count: int,
        x: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        options = {"group_list_type": given["group_list_type"] or 0, "split_item": given["split_item"]}
        ctx.multiply, ctx.options, ctx.count = multiply, options, count
        groups, weight, bias = given["group_list"], parameters[:count], parameters[count:]
        ctx.save_for_backward(groups, x, *weight)
        ctx.bias_shapes = [each.shape for each in bias]
        more = {"bias": list(bias) or None, "output_dtype": given["output_dtype"]}
        y: torch.Tensor = multiply([x], list(weight), group_list=groups, group_type=0, **options, **more)[0]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: torch.Tensor) -> Any:
        groups, x, *weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        multiply = functools.partial(ctx.multiply, group_list=groups, **ctx.options)
        gx = gw = gb = None
        if wanted[0]:
            gx = multiply([gy], [each.transpose(-1, -2) for each in weight], group_type=0)[0]
            if on_npu(gx):  # where rows after the last group are undefined
                end = groups[-1] if ctx.options["group_list_type"] == CUMSUM else groups.sum()
                used = torch.arange(gx.shape[0], device=gx.device) < end
                gx = torch.where(used[:, None], gx, torch.zeros_like(gx))
        if any(wanted[1 : 1 + ctx.count]):
            gw = multiply([x.t()], [gy], group_type=2)[0]
        if any(wanted[1 + ctx.count :]):
            gb = multiply([gy.new_ones(1, gy.shape[0])], [gy], group_type=2)[0]
        weight_grads = _split(gw, [each.shape for each in weight])
        return None, None, None, gx, *weight_grads, *_split(gb, ctx.bias_shapes)


def _split(grads: torch.Tensor | None, shapes: list[torch.Size]) -> list[torch.Tensor | None]:
    """Return the gradients of all groups in the form of the weights: one tensor, or one per group."""
    if grads is None:
        return [None] * len(shapes)
    parts = [grads] if len(shapes) == 1 else grads.unbind(0)
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _differentiable(function: Callable[P, list[torch.Tensor]]) -> Callable[P, list[torch.Tensor]]:
    """Decorator: compute gradients of ``function`` as grouped products where possible."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> list[torch.Tensor]:
        try:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            differentiable = has_products_for_gradients(bound.arguments)
        except (TypeError, AttributeError, RuntimeError):  # invalid call: the function raises the right error
            differentiable = False
        return multiply_with_gradient(function, bound.arguments) if differentiable else function(*args, **kwargs)

    return run


@_differentiable
@npu_operator
def npu_grouped_matmul(
    x: Tensors,
    weight: Tensors,
    *,
    bias: Tensors | None = None,
    scale: Tensors | None = None,
    offset: Tensors | None = None,
    antiquant_scale: Tensors | None = None,
    antiquant_offset: Tensors | None = None,
    per_token_scale: Tensors | None = None,
    group_list: torch.Tensor | Sequence[int] | None = None,
    activation_input: Tensors | None = None,
    activation_quant_scale: Tensors | None = None,
    activation_quant_offset: Tensors | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: Sequence[int] | None = None,
    output_dtype: torch.dtype | int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[torch.Tensor]:
    """Multiply each group of rows by its expert's weight.

    Floats: ``y = x @ weight + bias``, summed in float32, rounded once, differentiable. int8:
    ``y = (x @ weight [+ int32 bias]) * scale [* per_token_scale] [+ float bias]``, summed exactly in int32,
    scaled in float32 in that order.

    int8 x, int4 weights (W4A8): ``y = (sum over groups of ((x - 8) @ weight) * scale + bias [+ sum(x) * offset]) *
    per_token_scale``, a group's sum exact in int32, the rest in float32 in that order. bias is ``8 * sum(weight *
    scale)`` over K, which cancels the 8: torch_npu takes the low half of x as a signed int4. If the scales are powers
    of two and no sum needs more than 24 bits, that is ``x @ (weight * scale) * per_token_scale`` of float64, rounded
    once; else, with G groups, before the last rounding within ``(G + 5) * 2**-24 * (|x| + 8) @ |weight * scale| *
    per_token_scale`` of it.

    Float x, int4 or int8 weights (W4A16, W8A16): ``y = x @ ((weight + antiquant_offset) * antiquant_scale) + bias``,
    in float32, rounded once.

    Args:
        x: one ``(M, K)`` matrix that group_list cuts, or one matrix per expert (``(..., K)`` with
            split_item 0/1); bf16, fp16, fp32 or int8. group_type 2: one float ``(M, K)``, whose columns
            group_list cuts.
        weight: one ``(E, K, N)`` tensor or E tensors ``(K, N)``; x's type, any strides. group_type 2: one
            ``(K, N)``, whose rows group_list cuts. int4: int32 ``(E, K, N / 8)`` or E of ``(K, N / 8)``, eight
            numbers in each, the first in the lowest bits (`ascend_moe.experts.int4`).
        bias: ``[(E, N)]`` for a single weight, else E tensors ``(N,)``; float, or int32 with int8 x. W4A8 needs it,
            fp32.
        scale: per output channel of int8 weights, shaped like bias; fp32, bf16 or fp16. int4: also ``(E, G, N)`` for
            G groups of K's rows, and int64 or uint64 whose low half is an fp32.
        offset: W4A8: ``(E, N)`` or ``(E, 1, N)`` fp32, the offset of int4 codes times their scale, not included in
            bias; this is an assumption, since CANN's documentation has no formula.
        antiquant_scale, antiquant_offset: with float x: ``(E, N)`` or ``(E, G, N)``, or E of ``(N,)`` or ``(G, N)``.
        per_token_scale: one tensor per x, ``(M,)`` or ``(M, 1)`` fp32; needs scale. Required for W4A8.
        group_list: int64 ``(E,)``, pairs ``(n, 2)``, or a Python list; may cover fewer than M rows.
        split_item: 0/1 returns one tensor per group, 2/3 one for all.
        group_type: 0 with a group_list tensor, 2 for the product of each group's columns and rows (the
            gradient of weights; split_item 2 or 3, no bias), else -1 or None.
        group_list_type: 0 running sums, 1 counts, 2 pairs (expert, count) in row order.
        output_dtype: float x: x's type. int8 x: int32 without scale; bf16, fp16, fp32 with it.
        tuning_config: a hint for the NPU, ignored here.
        activation_input, activation_quant_scale, activation_quant_offset, act_type, x_dtype, weight_dtype, scale_dtype,
            per_token_scale_dtype: supported on NPUs only.

    Returns:
        ``[(M, N)]``, or one tensor per group; group_type 2: ``[(E, M, N)]``. Rows after the last group are zero
        here, undefined on the NPU.

    Raises:
        ArgumentError: an argument breaks one of these rules or is supported on NPUs only (`NPU_ONLY`).

    Source: torch_npu ``npu_grouped_matmul``. NPU tensors are passed there unchecked; no list is read on the host.
    """
    given = dict(locals())
    if not isinstance(x, Sequence) or not isinstance(weight, Sequence) or len(x) == 0:
        raise ArgumentError("x and weight must be lists of tensors, x not empty", argument="x")
    need_unset(**{name: None if given[name] == 0 else given[name] for name in NPU_ONLY})
    split_item, group_list_type = split_item or 0, group_list_type or 0
    if group_type == _COLUMNS:
        need_unset(bias=bias or None, scale=scale or None, per_token_scale=per_token_scale or None)
        return [_products_of_columns(x, weight, group_list, split_item, group_list_type, output_dtype)]
    _check_modes(x, group_list, split_item, group_type, group_list_type)
    single = len(weight) == 1 and weight[0].dim() == 3
    plain = list(weight[0].unbind(0) if single else weight)
    rule = "has shapes {}; it must be one (E, K, N) tensor or a list of (K, N)"
    need(bool(plain) and all(w.dim() == 2 for w in plain), "weight", rule, _shapes(weight))
    out = resolve_dtype(output_dtype, "output_dtype")
    if antiquant_scale or antiquant_offset or offset or any(w.dtype == torch.int32 for w in plain):
        scales = {"scale": scale, "offset": offset, "antiquant_scale": antiquant_scale}
        weights = _narrow(x[0], plain, bias, scales | {"antiquant_offset": antiquant_offset}, per_token_scale)
        out_dtype = _narrow_output(x[0].dtype, out)
    else:
        weights = _Weights(plain, _per_expert(bias, plain, "bias"), _per_expert(scale, plain, "scale"))
        out_dtype = _check_dtypes(x, weights, per_token_scale, out)
    segments, rows = _segments(x, per_token_scale, group_list, group_list_type, len(weights.weight))
    if split_item in (0, 1):
        return [_product(segment, weights, out_dtype) for segment in segments]
    return [_stack(segments, weights, rows, out_dtype)]


def _check_modes(
    x: Tensors,
    group_list: torch.Tensor | Sequence[int] | None,
    split_item: int,
    group_type: int | None,
    group_list_type: int,
) -> None:
    need(split_item in (0, 1, 2, 3), "split_item", "is {}; it must be 0, 1, 2 or 3", split_item)
    rule = "is {}; it must be 0 (rows are grouped), 2 (columns) or -1 (one x per expert)"
    need(group_type in (None, -1, 0), "group_type", rule, group_type)
    pairs = group_list_type == PAIRS
    rule = "2 (pairs) needs split_item 2 or 3: one output"
    need(not pairs or split_item in (2, 3), "group_list_type", rule)
    rule = "is {}; it must be 0, 1 or 2"
    need(group_list_type in (CUMSUM, COUNTS, PAIRS), "group_list_type", rule, group_list_type)
    if isinstance(group_list, torch.Tensor):
        need(group_list.dtype == torch.int64, "group_list", "is {}; it must be int64", group_list.dtype)
        form = "(n, 2)" if pairs else "(E,)"
        rule = "is {}-D; group_list_type {} takes {}"
        need(group_list.dim() == (2 if pairs else 1), "group_list", rule, group_list.dim(), group_list_type, form)
        rule = "is {}, but one x is cut by a group_list tensor; pass group_type=0"
        need(group_type == 0 or len(x) != 1, "group_type", rule, group_type)


def _products_of_columns(
    x: Tensors,
    weight: Tensors,
    group_list: torch.Tensor | Sequence[int] | None,
    split_item: int,
    group_list_type: int,
    output_dtype: torch.dtype | int | None,
) -> torch.Tensor:
    """Return ``(E, M, N)``: each group's columns of x times its rows of weight."""
    need(split_item in (2, 3), "split_item", "is {}; group_type 2 needs 2 or 3: one output", split_item)
    rule = "is {}; group_type 2 takes 0 (running sums) or 1 (counts)"
    need(group_list_type in (CUMSUM, COUNTS), "group_list_type", rule, group_list_type)
    for name, tensors in (("x", x), ("weight", weight)):
        single = len(tensors) == 1 and tensors[0].dim() == 2
        need(single, name, "has shapes {}; group_type 2 takes one matrix", _shapes(tensors))
    if group_list is None:
        raise ArgumentError("group_list is None; group_type 2 needs it: pass sums or counts", argument="group_list")
    (left,), (right,) = x, weight
    dtype = _check_dtypes(x, _Weights([right], None, None), None, resolve_dtype(output_dtype, "output_dtype"))
    need(dtype in _FLOATS, "x", "is {}; group_type 2 takes bf16, fp16 or fp32", left.dtype)
    rule = "of {} does not fit weight of {}; x's columns are the weight's rows"
    need(left.shape[1] == right.shape[0], "x", rule, left.shape, right.shape)
    groups = read_groups(group_list, group_list_type, len(group_list), left.shape[1])
    need(len(groups) > 0, "group_list", "is empty; it must have a group at least")
    return torch.stack([float_matmul(left[:, g.start : g.stop], right[g.start : g.stop], None) for g in groups])


def _shapes(tensors: Tensors) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors]


def _narrow(
    x: torch.Tensor,
    weight: list[torch.Tensor],
    bias: Tensors | None,
    scales: dict[str, Tensors | None],
    per_token_scale: Tensors | None,
) -> _Weights:
    """Check and return the weights of a W4A8 call (int8 x), a W4A16 or a W8A16 call (float x)."""
    integer, int4 = x.dtype == torch.int8, all(w.dtype == torch.int32 for w in weight)
    kinds = ", ".join(sorted({str(w.dtype) for w in weight}))
    need(integer or x.dtype in _FLOATS, "x", "is {}; it must be bf16, fp16, fp32 or int8", x.dtype)
    wanted, also = ("scale", "offset") if integer else ("antiquant_scale", "antiquant_offset")
    for name, value in scales.items():
        need(name in (wanted, also) or not value, name, "does not go with {} x; use {}", x.dtype, wanted)
    fits = int4 or (not integer and all(w.dtype == torch.int8 for w in weight))
    named = next((name for name in (also, wanted) if scales[name]), "weight")
    rule = "needs x of {} and weights of int32 (eight int4 each)" + ("" if integer else " or int8") + ", not {}"
    need(fits, named, rule, x.dtype, kinds)
    need(bool(scales[wanted]), wanted, "is missing; {} weights with x of {} need it", kinds, x.dtype)
    need(integer or not per_token_scale, "per_token_scale", "needs int8 x; x is {}: leave it out", x.dtype)
    matrices: list[Matrix] = [Int4Matrix(w, x.shape[-1]) for w in weight] if int4 else list(weight)
    if integer:
        need(bool(per_token_scale), "per_token_scale", "is missing; int8 rows and int4 weights need it")
        need(bool(bias), "bias", "is missing; int4 weights take 8 * the sum of weight * scale over K, (E, N) fp32")
    biases = _per_expert(bias, matrices, "bias")
    if biases is not None:
        rule = "is {}; it must be " + ("fp32" if integer else "float")
        fits = all(b.dtype == torch.float32 if integer else b.is_floating_point() for b in biases)
        need(fits, "bias", rule, biases[0].dtype)
    scale, offset = (scales_of_groups(scales[name], matrices, name) for name in (wanted, also))
    if scale is not None and offset is not None:
        same = all(s.shape == o.shape for s, o in zip(scale, offset, strict=True))
        rule = "has other groups than {}: it must have the same shape"
        need(same, also, rule, wanted)
        need(not integer or offset[0].shape[0] == 1, "offset", "has groups of K; it must be (E, N) or (E, 1, N)")
    return _Weights(matrices, biases, scale, offset, not integer)


def _narrow_output(dtype: torch.dtype, output_dtype: torch.dtype | None) -> torch.dtype:
    allowed = _DEQUANTIZED if dtype == torch.int8 else (dtype, None)
    rule = "is {}; {} rows with these weights support {}"
    given = output_dtype in allowed
    need(given, "output_dtype", rule, output_dtype, dtype, ", ".join(str(a) for a in allowed if a is not None))
    return output_dtype or dtype


def _per_expert(tensors: Tensors | None, weights: Sequence[Matrix], argument: str) -> list[torch.Tensor] | None:
    if tensors is None or len(tensors) == 0:
        return None
    experts, width = len(weights), weights[0].shape[1]
    rows = list(tensors[0].unbind(0)) if len(tensors) == 1 and tensors[0].dim() == 2 else list(tensors)
    fits = len(rows) == experts and all(
        tuple(row.shape) in ((w.shape[1],), (1, w.shape[1])) for row, w in zip(rows, weights, strict=True)
    )
    rule = "has shapes {}; {} experts with N={} need one ({}, {}) "
    need(fits, argument, rule + "tensor or {} tensors (N,)", _shapes(tensors), experts, width, experts, width, experts)
    return [row.reshape(-1) for row in rows]


def _check_dtypes(
    x: Tensors, weights: _Weights, per_token_scale: Tensors | None, output_dtype: torch.dtype | None
) -> torch.dtype:
    """Return the output dtype; raise unless npu_grouped_matmul supports these input dtypes."""
    dtype, scale = x[0].dtype, weights.scale
    integer = dtype == torch.int8
    need(integer or dtype in _FLOATS, "x", "is {}; it must be bf16, fp16, fp32 or int8", dtype)
    dtypes = sorted({str(t.dtype) for t in (*x, *weights.weight)})
    rule = "and x have {}; they must have one type, or give antiquant_scale for int8 weights"
    need(len(dtypes) == 1, "weight", rule, ", ".join(dtypes))
    name = "per_token_scale" if scale is None else "scale"
    need(integer or not (scale or per_token_scale), name, "needs int8 x; x is {}: leave it out", dtype)
    need(scale is not None or not per_token_scale, "per_token_scale", "needs scale too: pass the weights' scales")
    if scale is not None:
        rule = "is {}; off the NPU it must be fp32, bf16 or fp16 "
        rule += "(packed 64-bit scales are NPU-only)"
        need(all(s.is_floating_point() for s in scale), "scale", rule, scale[0].dtype)
    elif weights.bias:
        fits = all(b.is_floating_point() != integer for b in weights.bias)
        kind = "int32, as the output is" if integer else "float"
        need(fits, "bias", "is {}; it must be {}", weights.bias[0].dtype, kind)
    if output_dtype is None and not integer:
        return dtype
    allowed = (dtype,) if not integer else (torch.int32,) if scale is None else _DEQUANTIZED
    if output_dtype not in allowed:
        gives = f"{dtype} x {'without' if scale is None else 'with'} scale supports {', '.join(map(str, allowed))}"
        need(False, "output_dtype", "is {}; {}", output_dtype, gives)
    return output_dtype or dtype


def _segments(
    x: Tensors,
    per_token_scale: Tensors | None,
    group_list: torch.Tensor | Sequence[int] | None,
    group_list_type: int,
    experts: int,
) -> tuple[list[_Segment], int]:
    """Return the groups' rows in order, and the number of rows of x."""
    scales: list[torch.Tensor | None] = [None] * len(x)
    if per_token_scale:
        sizes = [scale.numel() for scale in per_token_scale]
        rule = "has {} values for x of {}; give one per row, in one tensor per x"
        need(sizes == [t.numel() // max(t.shape[-1], 1) for t in x], "per_token_scale", rule, sizes, _shapes(x))
        scales = [scale.reshape(-1) for scale in per_token_scale]
    if len(x) == 1 and group_list is not None:
        rows = x[0].shape[0]
        groups = read_groups(group_list, group_list_type, experts, rows)
        every = scales[0]
        return [
            _Segment(e, x[0][start:stop], None if every is None else every[start:stop]) for e, start, stop in groups
        ], rows
    if len(x) != experts:
        raise ArgumentError(
            f"x has {len(x)} tensors and weight {experts}; without a group_list there must be one x per "
            "expert, with one x pass group_list",
            argument="x" if len(x) > 1 else "group_list",
        )
    counts = [t.shape[0] for t in x]
    if group_list is not None:
        groups = read_groups(group_list, group_list_type, experts, sum(counts))
        described = [group.stop - group.start for group in groups] == counts
        need(described, "group_list", "does not describe x's row counts {}; leave it out", counts)
    return [_Segment(i, t, s) for i, (t, s) in enumerate(zip(x, scales, strict=True))], sum(counts)


def _stack(segments: list[_Segment], weights: _Weights, rows: int, out_dtype: torch.dtype) -> torch.Tensor:
    widths = {w.shape[1] for w in weights.weight}
    if len(widths) > 1 or any(segment.x.dim() != 2 for segment in segments):
        raise ArgumentError(
            f"one output (split_item 2/3) needs 2-D x and equal N; weight has N = {sorted(widths)}",
            argument="weight" if len(widths) > 1 else "x",
        )
    # One empty product keeps x and the weights in the autograd graph of a rank that received nothing.
    filled = [segment for segment in segments if segment.x.shape[0] > 0]
    if not filled and segments:
        filled = [segments[0]._replace(expert=0)]
    products = [_product(segment, weights, out_dtype) for segment in filled]
    missing = rows - sum(product.shape[0] for product in products)
    width = weights.weight[0].shape[1]
    rest = torch.zeros(missing, width, dtype=out_dtype, device=weights.weight[0].device)
    return torch.cat([*products, rest])


def _product(segment: _Segment, weights: _Weights, out_dtype: torch.dtype) -> torch.Tensor:
    x, weight = segment.x, weights.weight[segment.expert]
    bias = None if weights.bias is None else weights.bias[segment.expert]
    rule = "of {} does not fit weight of {} (expert {}); "
    rule += "x's last size must be the weight's first"
    need(x.dim() >= 2 and x.shape[-1] == weight.shape[0], "x", rule, x.shape, weight.shape, segment.expert)
    scale, offset = (None if each is None else each[segment.expert] for each in (weights.scale, weights.offset))
    if weights.antiquant:
        assert scale is not None
        return antiquant_matmul(x, codes_of(weight), scale, offset, bias)
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(weight, Int4Matrix):
        assert scale is not None and bias is not None and segment.per_token_scale is not None
        y = w4a8_matmul(rows, segment.per_token_scale, weight.codes(), scale, bias, offset)
        return y.to(out_dtype).reshape(*x.shape[:-1], weight.shape[1])
    if x.dtype != torch.int8:
        return float_matmul(x, weight, bias)
    total = int8_matmul(rows, weight)
    if bias is not None and not bias.is_floating_point():
        total = total + bias
    if scale is not None:
        y = total.float() * scale.float()
        if segment.per_token_scale is not None:
            y = y * segment.per_token_scale.float().unsqueeze(1)
        if bias is not None and bias.is_floating_point():
            y = y + bias.float()
        total = y.to(out_dtype)
    return total.reshape(*x.shape[:-1], weight.shape[1])
