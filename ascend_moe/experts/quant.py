"""Symmetric int8 quantization, SwiGLU, the operator that applies both to the sums of the first product, and e4m3.

Activations are quantized per row or per tensor, weights per output channel. ``scale = amax / 127`` and
``code = rint(value / scale)`` in float32, rounding half to even; ``value = code * scale``. An all-zero row has codes 0
and scale 0. A NaN makes its row's scale NaN and its own code 0.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ascend_moe.errors import ArgumentError, need, need_shape, with_typed_errors
from ascend_moe.experts.activations import Activation, clipped_swiglu, swiglu
from ascend_moe.experts.groups import COUNTS, CUMSUM, read_groups
from ascend_moe.moe_config import is_finite
from ascend_moe.native.torch_npu import compute_dtype, npu_operator, on_npu, resolve_dtype

_INT8_MAX = 127.0
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP8_GROUP = 128  # values that share a scale
_FP8_LEAST = 1e-4  # minimum maximum of a group, so that zeros have a scale


def dynamic_quant_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row as npu_dynamic_quant does: ``(..., H) float32 -> (..., H) int8, (...) float32``.

    A row of zeros has scale 0. Dispatch quantizes rows differently, with scale 1 for such rows:
    `ascend_moe.dispatchers.rows.quantize_dispatch_rows`.
    """
    if values.numel() == 0:
        return values.to(torch.int8), values.new_zeros(values.shape[:-1])
    scale = values.abs().amax(dim=-1, keepdim=True) / _INT8_MAX
    return to_int8(values / scale), scale.squeeze(-1)


def to_int8(values: torch.Tensor) -> torch.Tensor:
    """Round half to even and clip to -128..127; NaN (0/0 of an all-zero row) becomes 0."""
    return torch.nan_to_num(values, nan=0.0).round().clamp(-128, 127).to(torch.int8)


def scale_of_bits(scale: torch.Tensor) -> torch.Tensor:
    """Return a scale unchanged, or the float32 whose bits are the low half of each int64 or uint64."""
    if scale.dtype not in (torch.int64, torch.uint64):
        return scale
    return scale.contiguous().view(torch.int32)[..., ::2].view(torch.float32)


@npu_operator
def npu_dynamic_quant(
    input: torch.Tensor,
    *,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: torch.dtype | int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations to int8 with scales computed from the values themselves.

    Args:
        input: ``(..., H)``, at least 2-D; bf16, fp16 or fp32.
        smooth_scales: multiplied in first: ``(H,)``, or ``(E, H)`` with group_index.
        group_index: ``(E,)`` running sums of rows: group e uses smooth_scales[e]. Rows after the last
            group are quantized unsmoothed. Read on the host.
        dst_type: None or int8.
        quant_mode: "pertoken" (one scale for each row) or "pertensor" (one scale).
        dst_type_max: 0.

    Returns:
        int8 codes shaped as input, and float32 scales ``input.shape[:-1]`` or ``(1,)``; see the module
        docstring for formulas, zero rows and NaN.

    Raises:
        ArgumentError: a rule above is broken (int4, fp8 and "perchannel" exist on NPUs only).

    Source: torch_npu ``npu_dynamic_quant``; NPU tensors go there.
    """
    rule = "is {} {}; it must be at least 2-D and float"
    need(input.dim() >= 2 and input.is_floating_point(), "input", rule, input.shape, input.dtype)
    check_int8(dst_type)
    known = quant_mode in ("pertoken", "pertensor")
    need(known, "quant_mode", "is {!r}; it must be 'pertoken' or 'pertensor'", quant_mode)
    need(dst_type_max == 0, "dst_type_max", "is {}; for int8 it must be 0", dst_type_max)
    values = _smooth(input.float(), smooth_scales, group_index)
    if quant_mode == "pertoken":
        return dynamic_quant_rows(values)
    codes, scale = dynamic_quant_rows(values.reshape(1, -1))
    return codes.reshape(input.shape), scale


def check_int8(dst_type: torch.dtype | int | None) -> None:
    """Raise ArgumentError unless ``dst_type`` is None or int8, as torch's dtype or torch_npu's number."""
    dtype = resolve_dtype(dst_type, "dst_type")
    need(dtype in (None, torch.int8), "dst_type", "is {}; off the NPU only int8 is supported", dtype)


def _smooth(values: torch.Tensor, smooth_scales: torch.Tensor | None, group_index: torch.Tensor | None) -> torch.Tensor:
    width = values.shape[-1]
    if smooth_scales is None:
        need(group_index is None, "group_index", "needs smooth_scales (E, H) too")
        return values
    shape = (width,) if group_index is None else (group_index.numel(), width)
    need_shape("smooth_scales", smooth_scales, shape)
    smooth = smooth_scales.float()
    if group_index is None:
        return values * smooth
    rows = values.reshape(-1, width)
    groups = read_groups(group_index, CUMSUM, group_index.numel(), rows.shape[0], "group_index")
    done = groups[-1].stop if groups else 0
    parts = [rows[group.start : group.stop] * smooth[group.expert] for group in groups]
    return torch.cat([*parts, rows[done:]]).reshape(values.shape)


@with_typed_errors
def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize expert weights per output channel for W8A8 (`ascend_moe.experts.grouped_mlp`).

    Args:
        weight: ``(..., K, N)`` float, N the output channels, e.g. ``(L, H, 2I)``.

    Returns:
        int8 ``(..., K, N)`` (contiguous) and float32 scale ``(..., N)``: ``weight ~ codes * scale``.

    Raises:
        ArgumentError: weight is not a float matrix or a stack of them.
    """
    rule = "is {} {}; it must be float and (..., K, N)"
    need(weight.dim() >= 2 and weight.is_floating_point(), "weight", rule, weight.shape, weight.dtype)
    codes, scale = dynamic_quant_rows(weight.float().transpose(-1, -2))
    return codes.transpose(-1, -2).contiguous(), scale


@npu_operator
def npu_swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Return ``silu(first half) * second half`` along ``dim``; float32 inside, one rounding, differentiable.

    Args:
        input: ``(..., 2I)`` float, an even size along ``dim`` (gate and up projections side by side).
        dim: the dimension to halve.

    Returns:
        input's type and shape, ``dim`` halved.

    Raises:
        ArgumentError: the type is not float, dim is out of range or its size odd.

    Source: torch_npu ``npu_swiglu``; NPU tensors go there.
    """
    need(input.is_floating_point(), "input", "is {}; it must be bf16, fp16 or fp32", input.dtype)
    even = -input.dim() <= dim < input.dim() and input.shape[dim] % 2 == 0
    need(even, "dim", "is {} of {}; it must name a dimension of even size", dim, input.shape)
    gate, up = input.to(compute_dtype(input.dtype)).chunk(2, dim)
    return swiglu(gate, up).to(input.dtype)


@npu_operator
def npu_clipped_swiglu(
    x: torch.Tensor,
    *,
    group_index: torch.Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> torch.Tensor:
    """Return ``g * sigmoid(alpha * g) * (u + bias)``, g clamped at limit, u at +-limit: gpt-oss's activation.

    Computed in float32, rounded once.

    Args:
        x: bf16, fp16 or fp32, an even size along ``dim``.
        group_index: ``(G,)`` row counts; only that many rows, with all dimensions before ``dim`` flattened, are
            computed. Read on the host.
        interleaved: True: g at even positions of ``dim`` and u at odd ones; False: g left, u right.

    Returns:
        x's type and shape, ``dim`` halved. Rows after the last group are zero here, undefined on the NPU.

    Raises:
        ArgumentError: an argument breaks one of these rules, or limit is not above 0.

    Source: torch_npu ``npu_clipped_swiglu``; NPU tensors go there.
    """
    need(x.is_floating_point(), "x", "is {}; it must be bf16, fp16 or fp32", x.dtype)
    even = -x.dim() <= dim < x.dim() and x.shape[dim] % 2 == 0
    need(even, "dim", "is {} of {}; it must name a dimension of even size", dim, x.shape)
    need(0 < limit < math.inf, "limit", "is {}; it must be above 0", limit)
    values = x.to(compute_dtype(x.dtype)).movedim(dim, -1)
    gate, up = (values[..., ::2], values[..., 1::2]) if interleaved else values.chunk(2, -1)
    y = clipped_swiglu(gate, up, alpha=alpha, limit=limit, bias=bias).to(x.dtype).movedim(-1, dim)
    if group_index is None:
        return y
    rows = x.shape[: dim % x.dim()].numel()
    groups = read_groups(group_index, COUNTS, group_index.numel(), rows, "group_index")
    flat = y.reshape(rows, y.numel() // max(rows, 1))
    used = torch.arange(rows, device=flat.device) < (groups[-1].stop if groups else 0)
    return torch.where(used[:, None], flat, 0).reshape(y.shape)


# ---- from int32 sums of the first product to int8 input of the second

STATIC, DYNAMIC = 0, 1


@npu_operator
def npu_dequant_swiglu_quant(
    x: torch.Tensor,
    *,
    weight_scale: torch.Tensor | None = None,
    activation_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = STATIC,
    dst_type: torch.dtype | int | None = None,
    round_mode: int | None = None,
    activate_dim: int | None = None,
    swiglu_mode: int = 0,
    clamp_limit: float = 7.0,
    glu_alpha: float = 1.702,
    glu_bias: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantize int32 sums (float x is used unchanged), apply SwiGLU, quantize to int8; float32 inside.

    Args:
        x: ``(..., 2I)``, at least 2-D: bf16, fp16, fp32, or int32, which becomes
            ``(x [+ int32 bias]) * weight_scale [* activation_scale] [+ float bias]``.
        weight_scale: float ``(G, 2I)``, without groups ``(2I,)`` or ``(1, 2I)``. Required for int32 x, else None.
        activation_scale: float, one value per row, ``(rows,)`` or ``(rows, 1)``. int32 x only.
        bias: ``(2I,)`` or ``(1, 2I)``; int32 x without group_index only.
        quant_scale: float ``(G, I)``, without groups ``(I,)``. Dynamic: a factor applied first. Static: required, the
            divisor; ``(G,)``, one value per group, is allowed.
        quant_offset: added after that division; static without group_index only.
        group_index: ``(G,)`` row counts: group g uses row g of the scales. Read on the host, except for NPUs.
        activate_left: True: ``silu(left) * right``; False: ``left * silu(right)``.
        quant_mode: 0 static, 1 dynamic (one scale per row, formulas in `ascend_moe.experts.quant`).
        dst_type, round_mode, activate_dim: int8, 0 (half to even), the last dimension; or None.
        swiglu_mode: 0 as above. 2: ``g * sigmoid(glu_alpha * g) * (u + glu_bias)``, g clamped at clamp_limit,
            u at +-clamp_limit. 1: the same, g from even and u from odd columns. With glu_alpha 1 and glu_bias 0
            the result equals ``silu(g) * u`` bit for bit.

    Returns:
        int8 ``(..., I)``, and float32 scales ``x.shape[:-1]`` (static: zeros). Rows after the last group
        are zero here, unspecified on the NPU.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: torch_npu ``npu_dequant_swiglu_quant``; NPU tensors go there.
    """
    call = SimpleNamespace(**locals())
    _check(call)
    width, rows = x.shape[-1], x.shape[:-1].numel()
    total, groups = _groups_of(x, rows, group_index)
    values = _dequantize(call, x.reshape(rows, width)[:total], groups)
    if not activate_left and swiglu_mode != 1:
        values = torch.cat(values.chunk(2, -1)[::-1], -1)
    numbers = {"limit": clamp_limit, "alpha": glu_alpha, "bias": glu_bias}
    clipped = Activation("clipped_swiglu", numbers, interleaved=swiglu_mode == 1)
    hidden = (clipped if swiglu_mode else Activation()).values(values)
    codes, scale = _padded(*_quantize(call, hidden, groups), rows)
    return codes.reshape(*x.shape[:-1], width // 2), scale.reshape(x.shape[:-1])


def dequant_activate_quant(
    sums: torch.Tensor,
    weight_scale: torch.Tensor,
    activation_scale: torch.Tensor,
    group_index: torch.Tensor,
    activation: Activation,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `npu_dequant_swiglu_quant` of 2-D int32 ``sums``, quant_mode dynamic, with any activation, in torch."""
    rows, width = sums.shape
    total, groups = _groups_of(sums, rows, group_index)
    values = sums[:total].float() * groups.spread(weight_scale, width, "weight_scale")
    values = values * activation_scale.reshape(rows, 1)[:total].float()
    return _padded(*dynamic_quant_rows(activation.values(values)), rows)


def _groups_of(x: torch.Tensor, rows: int, group_index: torch.Tensor | None) -> tuple[int, _Groups]:
    """Return the number of rows in groups, and the groups."""
    if group_index is None:
        return rows, _Groups(1, None)
    if on_npu(x) or torch.compiler.is_compiling():
        # The host reads no counts; rows after the last group are undefined.
        ends = group_index.to(torch.int64).cumsum(0)
        owner = torch.searchsorted(ends, torch.arange(rows, device=x.device), right=True)
        return rows, _Groups(ends.numel(), owner.clamp(max=ends.numel() - 1))
    counts = group_index.to(torch.int64)
    listed = read_groups(counts, COUNTS, counts.numel(), rows, "group_index")
    total = listed[-1].stop if listed else 0
    return total, _Groups(len(listed), torch.arange(len(listed), device=counts.device).repeat_interleave(counts))


def _padded(codes: torch.Tensor, scale: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Append zeros for the rows after the last group."""
    room = rows - codes.shape[0]
    return torch.cat([codes, codes.new_zeros(room, codes.shape[1])]), torch.cat([scale, scale.new_zeros(room)])


def _check(call: Any) -> None:
    x, grouped = call.x, call.group_index is not None
    integer = x.dtype == torch.int32
    static = call.quant_mode == STATIC
    fits = x.dim() >= 2 and x.shape[-1] % 2 == 0 and (integer or x.is_floating_point())
    need(fits, "x", "is {} {}; it must be at least 2-D, of even last size, int32 or float", x.shape, x.dtype)
    check_int8(call.dst_type)
    rules: list[tuple[str, bool, str]] = [
        ("weight_scale", integer and call.weight_scale is None, "int32 x needs it"),
        ("weight_scale", not integer and call.weight_scale is not None, "it needs int32 x"),
        ("activation_scale", not integer and call.activation_scale is not None, "it needs int32 x"),
        ("bias", not integer and call.bias is not None, "it needs int32 x"),
        ("bias", grouped and call.bias is not None, "it excludes group_index"),
        ("quant_mode", call.quant_mode not in (STATIC, DYNAMIC), "it must be 0 (static) or 1 (dynamic)"),
        ("quant_scale", static and call.quant_scale is None, "static quantization (quant_mode 0) needs it"),
        ("quant_offset", not static and call.quant_offset is not None, "only static quantization supports it"),
        ("quant_offset", grouped and call.quant_offset is not None, "it excludes group_index"),
        ("round_mode", call.round_mode not in (None, 0), "off the NPU it must be 0 (half to even)"),
        ("activate_dim", call.activate_dim not in (None, -1, x.dim() - 1), "it must be the last dimension"),
        ("swiglu_mode", call.swiglu_mode not in (0, 1, 2), "it must be 0, 1 or 2"),
        ("clamp_limit", not (is_finite(call.clamp_limit) and call.clamp_limit > 0), "it must be above 0"),
        ("glu_alpha", not is_finite(call.glu_alpha), "it must be finite"),
        ("glu_bias", not is_finite(call.glu_bias), "it must be finite"),
    ]
    for argument, broken, rule in rules:
        if broken:
            value = getattr(call, argument)
            shown = f"of {tuple(value.shape)}" if isinstance(value, torch.Tensor) else value
            raise ArgumentError(f"{argument} is {shown}: {rule}", argument=argument)


class _Groups(NamedTuple):
    """The number of groups, and the group of each row (None: all rows are one group)."""

    number: int
    owner: torch.Tensor | None

    def spread(self, parameter: torch.Tensor, width: int, argument: str, single: bool = False) -> torch.Tensor:
        """Return ``parameter``'s row for each row of x: float32, broadcastable to (rows, width).

        ``single``: also allow one value per group.
        """
        shape = tuple(parameter.shape)
        if single and shape == (self.number,):
            parameter = parameter.unsqueeze(1)
        elif self.number == 1 and shape == (width,):
            parameter = parameter.unsqueeze(0)
        else:
            rule = "is {}; {} group(s) of width {} need {}"
            need(shape == (self.number, width), argument, rule, shape, self.number, width, (self.number, width))
        parameter = parameter.float()
        return parameter if self.owner is None else parameter[self.owner]


def _dequantize(call: Any, x: torch.Tensor, groups: _Groups) -> torch.Tensor:
    if call.weight_scale is None:
        return x.float()
    width = x.shape[1]
    bias = call.bias
    if bias is not None:
        need_shape("bias", bias, (width,), (1, width))
        x = x if bias.is_floating_point() else x + bias
    values = x.float() * groups.spread(call.weight_scale, width, "weight_scale")
    if call.activation_scale is not None:
        rows = call.x.shape[:-1].numel()
        rule = "is {}; it must have one value for each of {} rows"
        need(call.activation_scale.numel() == rows, "activation_scale", rule, call.activation_scale.shape, rows)
        values = values * call.activation_scale.reshape(rows, 1)[: x.shape[0]].float()
    return values + bias.float() if bias is not None and bias.is_floating_point() else values


def _quantize(call: Any, values: torch.Tensor, groups: _Groups) -> tuple[torch.Tensor, torch.Tensor]:
    width, static = values.shape[1], call.quant_mode == STATIC
    scale = None
    if call.quant_scale is not None:
        scale = groups.spread(call.quant_scale, width, "quant_scale", single=static)
    if not static:
        return dynamic_quant_rows(values if scale is None else values * scale)
    assert scale is not None  # _check
    values = values / scale
    if call.quant_offset is not None:
        values = values + groups.spread(call.quant_offset, width, "quant_offset", single=True)
    return to_int8(values), values.new_zeros(values.shape[0])


# ---- e4m3 codes with float32 scales


def cast_fp8(x: torch.Tensor, round_scale: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast ``(n, H)`` rows to e4m3 codes and float32 scales ``(n, H / 128)``: value = code * scale.

    ``scale = max(max |x|, 1e-4) / 448`` per 128 values; round_scale: rounded up to a power of two.

    Source: DeepEP ``per_token_cast_to_fp8``.
    """
    rule = "has {} columns; with use_fp8 they must be a multiple of {}"
    need(x.shape[1] % FP8_GROUP == 0, "x", rule, x.shape[1], FP8_GROUP)
    groups = x.float().view(x.shape[0], x.shape[1] // FP8_GROUP, FP8_GROUP)
    top = groups.abs().amax(2).clamp(min=_FP8_LEAST)
    factor, scale = top.reciprocal() * FP8_MAX, top / FP8_MAX  # the factor as torch computes DeepEP's 448.0 / top
    if round_scale:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))
        factor = 1.0 / scale
    return (groups * factor.unsqueeze(2)).to(FP8).view(x.shape), scale


def ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """Return the exponents of float32 powers of two as uint8 of the same shape; 2**e is stored as e + 127."""
    return (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)


def cast_fp8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast ``(n, H)`` rows to e4m3 codes and float32 scales ``(n, 1)``: value = code * scale.

    As in the ops' int8 quantization: ``s = 448 / max |x|`` of the row, ``scale = 1 / s``; a row of zeros has scale 1.
    NaN stays NaN and is ignored in the maximum.

    Source: sgl-kernel-npu's quant_mode "pertoken_fp8_e4m3".
    """
    value = x.float()
    top = value.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(1, keepdim=True)
    factor = torch.where(top == 0, 1.0, torch.full_like(top, FP8_MAX) / top)
    return (value * factor).to(FP8), torch.ones_like(factor) / factor


def scaled(rows: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return ``rows * (1 / scale)`` in float32, rounded to dtype; fp8 saturates at +-448. scale ``(n,)``; None: 1."""
    value = rows.float() if scale is None else rows.float() * (1.0 / scale)[:, None]
    return value.clamp(-FP8_MAX, FP8_MAX).to(dtype) if dtype == FP8 else value.to(dtype)
