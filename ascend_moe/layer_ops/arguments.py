"""The arguments of the one call for a layer: tokens, weights with scales and biases, a group's name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ascend_moe.dispatchers.base import ROW_DTYPES
from ascend_moe.errors import need, need_dims, need_dtype, need_shape
from ascend_moe.experts import whole_shape
from ascend_moe.experts.int4 import bits_of, words_of
from ascend_moe.experts.quant import scale_of_bits
from ascend_moe.native.torch_npu import on_npu, resolve_dtype

TensorList = Tensor | Sequence[Tensor]
INT8 = 2  # quant_mode of dispatch: int8 rows with one scale each
_NPU_INT4 = 285  # torch_npu.int4
BYTES_IN_WORD = 4


class Tokens(NamedTuple):
    x: Tensor
    ids: Tensor
    weights: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class Experts:
    """Weights in the form of `grouped_mlp`: L = ``count``, H = ``hidden``, 2F = ``double``; biases for int4 only."""

    gate_up: Tensor | list[Tensor]
    down: Tensor | list[Tensor]
    gate_up_scale: Tensor | None
    down_scale: Tensor | None
    count: int
    hidden: int
    double: int
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def quant_mode(self) -> int:
        """The quant_mode to pass to dispatch: 0, or 2 (int8 rows) for int8 and int4 weights."""
        return 0 if self.gate_up_scale is None else INT8

    def only(self, number: int) -> Experts:
        """Return the expert ``number`` alone."""
        cut = {name: value[number : number + 1] for name, value in vars(self).items() if hasattr(value, "__getitem__")}
        return replace(self, count=1, **cut)


def need_int(name: str, value: object) -> None:
    need(isinstance(value, int), name, "is a {}; it must be an int", type(value).__name__)


def need_number(name: str, value: object) -> None:
    need(isinstance(value, (int, float)), name, "is a {}; it must be a number", type(value).__name__)


def need_beside(x: Tensor, name: str, *tensors: Tensor) -> None:
    need(all(tensor.device == x.device for tensor in tensors), name, "must be on x's device, {}", x.device)


def tensors_of(name: str, value: TensorList | None) -> list[Tensor]:
    tensors = [] if value is None else [value] if isinstance(value, Tensor) else list(value)
    need(all(isinstance(tensor, Tensor) for tensor in tensors), name, "must be a list of tensors")
    return tensors


def experts_of(x: Tensor, given: dict[str, TensorList | None], int4_bytes: bool = False) -> Experts:
    """Return the weights of a call as `Experts`. Raises ArgumentError for shapes or dtypes that do not fit.

    ``given``: by argument name, the weights of the first and the second product, their two scales, and their two biases
    if the call has them. int32 weights are int4 packed by eight; with ``int4_bytes`` int8 and uint8 are int4 by two.
    """
    need_dims("x", x, 2, dtypes=ROW_DTYPES)
    names = list(given)
    lists = [tensors_of(name, value) for name, value in given.items()]
    for place, (name, weights) in enumerate(zip(names[:2], lists[:2], strict=True)):
        need(len(weights) > 0, name, "is empty; it must be L tensors, or one of all L experts")
        lists[place] = _words(name, weights) if int4_bytes else weights
        _check_weight_dtype(name, lists[place], x.dtype, biased=len(names) > 4)
        need_beside(x, name, *weights)
    first, second = whole_shape(lists[0], names[0]), whole_shape(lists[1], names[1])
    need(len(first) == 3 and first[2] % 2 == 0, names[0], "is {}; it must be (L, H, 2F), or L of (H, 2F)", first)
    count, hidden, double = first
    need(second == (count, double // 2, hidden), names[1], "is {}; it must be {}", second, (count, double // 2, hidden))
    dtype = lists[0][0].dtype
    need(lists[1][0].dtype == dtype, names[1], "is {}; it must be {}'s {}", lists[1][0].dtype, names[0], dtype)
    gate_up, down = (weights[0] if weights[0].dim() == 3 else weights for weights in lists[:2])
    if dtype == torch.int32:
        scales = [_int4_scale(names[2], lists[2], hidden, double, count, x)]
        scales.append(_int4_scale(names[3], lists[3], double // 2, hidden, count, x))
        biases = [_int4_bias(names[4], lists[4], double, count, x), _int4_bias(names[5], lists[5], hidden, count, x)]
        return Experts(gate_up, down, scales[0], scales[1], count, hidden, double, biases[0], biases[1])
    for name, tensors in zip(names[4:], lists[4:], strict=True):
        _need_nothing(name, tensors, f"a bias belongs to int4 weights, {names[0]} is {dtype}")
    gate_up_scale = down_scale = None
    if dtype == torch.int8:
        gate_up_scale = _scale(names[2], lists[2], count, double, x)
        down_scale = _scale(names[3], lists[3], count, hidden, x)
        if on_npu(x) and x.dtype == torch.bfloat16:
            down_scale = down_scale.to(torch.bfloat16)  # the NPU's grouped matmul wants the output's type here
    else:
        for name, tensors in zip(names[2:4], lists[2:4], strict=True):
            _need_nothing(name, tensors, f"scales go with int8 weights, {names[0]} is {dtype}")
    return Experts(gate_up, down, gate_up_scale, down_scale, count, hidden, double)


def _words(name: str, weights: list[Tensor]) -> list[Tensor]:
    """Return int4 packed in int32, also from bytes."""
    for weight in weights:
        need_dtype(name, weight, torch.int32, torch.int8, torch.uint8)
        fits = weight.dtype == torch.int32 or weight.shape[-1] % BYTES_IN_WORD == 0
        need(fits, name, "is {}; with two int4 codes a byte, its last dimension must be a multiple of 4", weight.shape)
    return [words_of(weight) for weight in weights]


def _check_weight_dtype(name: str, weights: list[Tensor], dtype: torch.dtype, biased: bool) -> None:
    kinds = {tensor.dtype for tensor in weights}
    packed = [kind for kind in kinds if kind == torch.uint8 or "int4" in str(kind)]
    rule = "is {0[0]}: int4 are int32 of eight, or in mega_moe bytes of two with the weights' type given as int4"
    need(not packed, name, rule, packed)
    rule = "is torch.int32, which carries int4, and this call has no bias for it: give int8 with one scale a channel"
    need(biased or torch.int32 not in kinds, name, rule)
    if len(kinds) > 1 or not kinds <= {dtype, torch.int8, torch.int32}:
        shown = ", ".join(sorted(map(str, kinds)))
        need(False, name, "is {}; all must be of x's type {}, all int8, or all int32 of eight int4", shown, dtype)


def is_int4(value: torch.dtype | int | None) -> bool:
    """Return whether a weights' type is int4, torch_npu's number or a dtype of that name."""
    return value == _NPU_INT4 or "int4" in str(value)


def check_weight_type(name: str, value: torch.dtype | int | None, weights: TensorList) -> None:
    first = tensors_of(name, weights)[:1]
    own = first[0].dtype if first else None
    if is_int4(value):
        need(own in (None, torch.int8, torch.uint8, torch.int32), name, "is int4; the weights are {}", own)
        return
    kind = resolve_dtype(value, name)
    need(kind is None or kind == own, name, "is {}; the weights are {}", kind, own)


def _need_nothing(name: str, tensors: list[Tensor], why: str) -> None:
    """Raise ArgumentError unless the tensors are absent or zeros."""
    nothing = all(tensor.numel() == 0 or tensor.is_meta or not bool(tensor.any()) for tensor in tensors)
    need(nothing, name, "is not zero: {}; pass None", why)


def _scale(name: str, tensors: list[Tensor], count: int, width: int, x: Tensor) -> Tensor:
    """Return the scales as floats (L, width)."""
    values = sum(tensor.numel() for tensor in tensors)
    shapes = [tuple(tensor.shape) for tensor in tensors]
    rule = "has shapes {}; int8 weights need {} tensors ({},), or one ({}, {})"
    need(len(tensors) in (1, count) and values == count * width, name, rule, shapes, count, width, count, width)
    need_beside(x, name, *tensors)
    floats = [scale.reshape(-1) for scale in _unpacked_scales(name, tensors)]
    return torch.cat(floats).reshape(count, width) if len(floats) > 1 else floats[0].reshape(count, width)


def _unpacked_scales(name: str, tensors: list[Tensor]) -> list[Tensor]:
    """Return scales as floats. Raises ArgumentError for other dtypes than the supported ones, or several."""
    for tensor in tensors:
        need_dtype(name, tensor, torch.float32, torch.bfloat16, torch.int64, torch.uint64)
        need(tensor.dtype == tensors[0].dtype, name, "mixes {} and {}; pass one dtype", tensors[0].dtype, tensor.dtype)
    return [scale_of_bits(tensor) for tensor in tensors]


def _int4_scale(name: str, tensors: list[Tensor], rows: int, width: int, count: int, x: Tensor) -> Tensor:
    """Return scales (L, G, width) of G groups of rows in `grouped_mlp`'s form: fp32, or on an NPU int64."""
    need_beside(x, name, *tensors)
    one = len(tensors) == 1 and tensors[0].dim() > 1
    whole = one and tensors[0].shape[0] == count and tensors[0].shape[-1] == width
    each = list(tensors[0].reshape(count, -1, width).unbind(0)) if whole else tensors
    shapes = [tuple(tensor.shape) for tensor in tensors]
    rule = "has shapes {}; int4 weights need {} tensors ({},) or (G, {}), or one of all experts, G a divisor of {}"
    groups = [tensor.numel() // width for tensor in each]
    fits = len(each) == count and len(set(groups)) == 1 and groups[0] > 0 and rows % groups[0] == 0
    fits = fits and all(tensor.shape[-1] == width for tensor in each)
    need(fits, name, rule, shapes, count, width, width, rows)
    scale = torch.stack([scale.reshape(groups[0], width).float() for scale in _unpacked_scales(name, each)])
    return bits_of(scale) if on_npu(x) else scale


def _int4_bias(name: str, tensors: list[Tensor], width: int, count: int, x: Tensor) -> Tensor:
    """Return int4 biases, (L, width) fp32."""
    values = sum(tensor.numel() for tensor in tensors)
    shapes = [tuple(tensor.shape) for tensor in tensors]
    rule = "has shapes {}; int4 weights need 8 * sum(weight * scale) over the rows: {} tensors ({},), or one ({}, {})"
    fits = len(tensors) in (1, count) and values == count * width
    need(fits, name, rule, shapes, count, width, count, width)
    need_beside(x, name, *tensors)
    for tensor in tensors:
        need_dtype(name, tensor, torch.float32)
    return torch.cat([tensor.reshape(-1, width) for tensor in tensors])


def check_tokens(
    x: Tensor, ids: tuple[str, Tensor], weights: tuple[str, Tensor], mask: Tensor | None, hidden: int
) -> Tensor | None:
    """Return the mask as bool, or None; raise ArgumentError unless x (T, H), ids, weights (T, K) and mask fit.

    ``ids`` and ``weights`` are (argument name, tensor); ``hidden`` is H.
    """
    need_shape("x", x, (x.shape[0], hidden))
    need_dims(ids[0], ids[1], 2, dtypes=(torch.int32,))
    need_shape(*ids, (x.shape[0], ids[1].shape[1]))
    need_shape(*weights, tuple(ids[1].shape), dtypes=(torch.float32,))
    for name, tensor in (ids, weights):
        need_beside(x, name, tensor)
    if mask is None:
        return None
    need_shape("x_active_mask", mask, (x.shape[0],), tuple(ids[1].shape), dtypes=(torch.bool, torch.int8))
    need_beside(x, "x_active_mask", mask)
    return mask.to(torch.bool)


def check_quantization(mode: int, out_dtype: torch.dtype | int | None, combine_mode: int) -> None:
    need(mode in (0, INT8), "dispatch_quant_mode", "is {}; it must be 0 (none) or 2 (int8 by token)", mode)
    kind = resolve_dtype(out_dtype, "dispatch_quant_out_dtype")
    need(kind in (None, torch.int8), "dispatch_quant_out_dtype", "is {}; it must be int8, or None", kind)
    rule = "is {}; it must be 0: CANN documents no other mode. MoELayer over MC2Dispatcher can return rows as int8"
    need(combine_mode == 0, "combine_quant_mode", rule, combine_mode)
