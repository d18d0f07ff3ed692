"""Activations with quantized results: SwiGLU and SiTU in MX's e4m3 or in int8, as called by vllm-ascend."""

from __future__ import annotations

import torch

from ascend_moe.errors import need, need_dims, need_dtype, need_shape
from ascend_moe.experts.activations import Activation
from ascend_moe.experts.quant import FP8, FP8_MAX, dynamic_quant_rows

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_BLOCK = 32  # values that share an exponent
_E4M3_EXPONENT = 8  # of the largest e4m3
_BIAS = 127  # of e8m0
_E4M3_CODE = 36  # situ_mx_quant's number of e4m3
_SWIGLU_MX = 2  # quant_mode
_SCALES_OF_A_PAIR = 2


def _even(x: torch.Tensor) -> torch.Tensor:
    """Return x as float32; raise ArgumentError unless it consists of gate and up."""
    need(x.dim() >= 1 and x.shape[-1] % 2 == 0, "x", "is {}; its last dimension must be even", x.shape)
    return x.float()


def mx_shapes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uninitialized e4m3 codes ``(..., F)`` and e8m0 scales ``(..., ceil(F / 64), 2)`` for x ``(..., 2F)``."""
    width = x.shape[-1] // 2
    pairs = -(-width // (_BLOCK * _SCALES_OF_A_PAIR))
    codes = x.new_empty((*x.shape[:-1], width), dtype=FP8)
    return codes, x.new_empty((*x.shape[:-1], pairs, _SCALES_OF_A_PAIR), dtype=torch.float8_e8m0fnu)


def _mx_quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return MX's e4m3 codes and e8m0 scales of float32 values, as npu_dynamic_mx_quant with scale_alg 0.

    The exponent of 32 values is that of the largest minus 8; codes above 448 are clamped. If the last pair of exponents
    has one block only, its second exponent is that of zeros.
    """
    width = values.shape[-1]
    room = -width % (_BLOCK * _SCALES_OF_A_PAIR)
    blocks = torch.nn.functional.pad(values, (0, room)).reshape(*values.shape[:-1], -1, _BLOCK)
    largest = blocks.abs().amax(-1)
    exponents = (torch.frexp(largest).exponent - 1 - _E4M3_EXPONENT).clamp(-_BIAS, _BIAS)
    exponents = torch.where(largest > 0, exponents, -_BIAS)
    codes = torch.ldexp(blocks, -exponents[..., None]).clamp(-FP8_MAX, FP8_MAX).flatten(-2)[..., :width]
    scales = (exponents + _BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)
    return codes.to(FP8), scales.reshape(*values.shape[:-1], -1, _SCALES_OF_A_PAIR)


def swiglu_group_quant(
    x: torch.Tensor,
    topk_weight: torch.Tensor | None,
    group_index: torch.Tensor | None,
    dst_type: torch.dtype | int,
    quant_mode: int = 1,
    group_size: int = 128,
    round_scale: bool = False,
    ue8m0_scale: bool = False,
    output_origin: bool = False,
    group_list_type: int = 0,
    clamp_value: float = 0.0,
) -> Triple:
    """Compute ``silu(left) * right`` of x ``(..., 2F)``, in MX's e4m3, as ``npu_swiglu_group_quant`` with quant_mode 2.

    Returns codes, scales (shapes as in `mx_shapes`), and an empty tensor, which vllm-ascend ignores. clamp_value above
    0 limits left from above and right on both sides. The activation is computed in float32. vllm-ascend calls only this
    mode, with dst_type float8_e4m3fn and defaults; ArgumentError refuses others, which are not documented.
    """
    need_dtype("x", x, torch.bfloat16, torch.float16)
    for name, tensor in (("topk_weight", topk_weight), ("group_index", group_index)):
        need(tensor is None, name, "is given; vllm-ascend passes None, and nothing else is supported")
    kinds = (FP8, 24)  # and torch's number of it
    need(dst_type in kinds, "dst_type", "is {}; it must be torch.float8_e4m3fn", dst_type)
    rule = "is {}; it must be 2 (MX: a scale for 32 values)"
    need(quant_mode == _SWIGLU_MX, "quant_mode", rule, quant_mode)
    for name, value, default in (
        ("group_size", group_size, 128),
        ("round_scale", round_scale, False),
        ("ue8m0_scale", ue8m0_scale, False),
        ("output_origin", output_origin, False),
        ("group_list_type", group_list_type, 0),
    ):
        need(value == default, name, "is {}; only the default, {}, is supported", value, default)
    need(clamp_value >= 0, "clamp_value", "is {}; it must be at least 0 (0: no limit)", clamp_value)
    return *_mx_quantize(Activation.of("swiglu", limit=clamp_value).values(_even(x))), x.new_empty(0)


def _need_gate_left(activate_left: bool) -> None:
    rule = "is False; vllm-ascend passes True, and only the gate in the left half is known"
    need(activate_left, "activate_left", rule)


def situ_mx_quant(
    x: torch.Tensor, beta: float = 1.0, linear_beta: float = 0.0, activate_left: bool = False,
    dst_type: int = _E4M3_CODE,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return MX's e4m3 codes and scales, as `mx_shapes`, of `situglu` of x ``(..., 2F)``; the left half is the gate."""
    need_dtype("x", x, torch.bfloat16, torch.float16)
    _need_gate_left(activate_left)
    need(dst_type == _E4M3_CODE, "dst_type", "is {}; it must be {}, e4m3", dst_type, _E4M3_CODE)
    return _mx_quantize(Activation.of("situglu", beta=beta, linear_beta=linear_beta).values(_even(x)))


def dequant_situ_quant(
    x: torch.Tensor,
    *,
    weight_scale: torch.Tensor | None = None,
    activation_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    beta: float = 4.0,
    linear_beta: float = 25.0,
    activate_left: bool = True,
    quant_mode: str = "dynamic",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `situglu` of x ``(rows, 2F)``, whose left half is the gate: int8 ``(rows, F)`` and scales ``(rows,)``.

    x is bf16 or fp16, or int32, which is multiplied by weight_scale ``(2F,)`` and, if given, activation_scale
    ``(rows,)``. The other tensors are None in vllm-ascend; other values raise ArgumentError.
    """
    need_dims("x", x, 2, dtypes=(torch.bfloat16, torch.float16, torch.int32))
    refused = {"bias": bias, "quant_scale": quant_scale, "quant_offset": quant_offset, "group_index": group_index}
    if x.dtype != torch.int32:
        refused |= {"weight_scale": weight_scale, "activation_scale": activation_scale}
    for name, tensor in refused.items():
        rule = "is given with x of {}; vllm-ascend passes None, and nothing else is supported"
        need(tensor is None, name, rule, x.dtype)
    _need_gate_left(activate_left)
    need(quant_mode == "dynamic", "quant_mode", "is {!r}; it must be 'dynamic'", quant_mode)
    values = x.float()
    if x.dtype == torch.int32:
        need(weight_scale is not None, "weight_scale", "is None; an int32 x needs it")
        assert weight_scale is not None
        need_shape("weight_scale", weight_scale, (x.shape[1],), (1, x.shape[1]))
        values = values * weight_scale.float()
        if activation_scale is not None:
            need_shape("activation_scale", activation_scale, (x.shape[0],), (x.shape[0], 1))
            values = values * activation_scale.float().reshape(-1, 1)
    return dynamic_quant_rows(Activation.of("situglu", beta=beta, linear_beta=linear_beta).values(_even(values)))
