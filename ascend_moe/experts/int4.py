"""4-bit weights: memory layout, and the scales of their groups.

An int4 is a two's complement number, -8..7. Eight are packed in an int32, or two in a byte, the first in the lowest
bits, so both have the same memory. They are packed along N, as in torch_npu and vllm-ascend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ascend_moe.errors import need, need_dtype, with_typed_errors
from ascend_moe.experts.quant import scale_of_bits

IN_WORD = 8  # int4 in an int32
MOST = 7


@with_typed_errors
def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """Pack int8 codes ``(..., N)`` of -8..7 into int32 ``(..., N / 8)``, the first of eight in the lowest bits.

    Raises ArgumentError if codes are not int8, N is no multiple of 8, or a code is out of range.

    Source: torch_npu ``npu_convert_weight_to_int4pack`` and ``npu_quantize`` with quint4x2.
    """
    need_dtype("codes", codes, torch.int8)
    rule = "is {}; its last dimension must be a multiple of 8, the int4 of an int32"
    need(codes.dim() > 0 and codes.shape[-1] % IN_WORD == 0, "codes", rule, codes.shape)
    if not codes.is_meta:
        need(not bool(((codes > MOST) | (codes < -MOST - 1)).any()), "codes", "must be -8..7, the range of 4 bits")
    low = codes & 15
    return (low[..., ::2] | (low[..., 1::2] << 4)).contiguous().view(torch.int32)


@with_typed_errors
def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """Return the int8 codes ``(..., N)`` packed in int32 ``(..., N / 8)``, or in int8 or uint8 bytes ``(..., N / 2)``.

    Raises ArgumentError if packed has another dtype.
    """
    need_dtype("packed", packed, torch.int32, torch.int8, torch.uint8)
    both = packed.contiguous().view(torch.uint8)
    numbers = torch.stack([both & 15, both >> 4], -1).flatten(-2)
    return ((numbers ^ 8).to(torch.int8)) - 8


@with_typed_errors
def quantize_weight_int4(weight: torch.Tensor, group_size: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize expert weights to int4 for W4A8 (`ascend_moe.experts.grouped_mlp`): scale = amax / 7.

    Args:
        weight: ``(..., K, N)`` float, N a multiple of 8.
        group_size: rows of K that share a scale, a divisor of K; 0: all.

    Returns:
        int32 ``(..., K, N / 8)``, fp32 scale ``(..., G, N)``, and the bias of the product, fp32 ``(..., N)``.

    Raises:
        ArgumentError: weight is not a float matrix or a stack of them, or a size does not divide.
    """
    rule = "is {} {}; it must be float and (..., K, N), N a multiple of 8"
    fits = weight.dim() >= 2 and weight.is_floating_point() and weight.shape[-1] % IN_WORD == 0
    need(fits, "weight", rule, weight.shape, weight.dtype)
    rows, size = weight.shape[-2], group_size or weight.shape[-2]
    need(size > 0 and rows % size == 0, "group_size", "is {}; it must divide the weight's {} rows", group_size, rows)
    groups = weight.float().reshape(*weight.shape[:-2], rows // size, size, weight.shape[-1])
    scale = groups.abs().amax(-2) / MOST
    codes = torch.nan_to_num(groups / scale.unsqueeze(-2)).round().clamp(-MOST - 1, MOST).to(torch.int8).flatten(-3, -2)
    return pack_int4(codes), scale, correction_of(codes, scale)


def correction_of(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return a W4A8 product's bias, fp32 ``(..., N)``: ``8 * sum(code * scale)`` over K, for G groups of K's rows.

    codes int8 ``(..., K, N)``, scale ``(..., G, N)``. torch_npu's product uses x - 8, so that the bias cancels the 8.
    """
    groups = codes.reshape(*codes.shape[:-2], scale.shape[-2], -1, codes.shape[-1])
    sums = groups.sum(-2, dtype=torch.int32)
    return (8.0 * sums.float() * scale).sum(-2)


def bits_of(scale: torch.Tensor) -> torch.Tensor:
    """Return int64 with the fp32 scales in the low 32 bits, the NPU's form for int4 weights."""
    return scale.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def logical_shape(weight: torch.Tensor) -> tuple[int, ...]:
    """Return a weight's shape with columns counted in numbers: an int32 contains eight int4."""
    *rows, width = weight.shape
    return (*rows, width * (IN_WORD if weight.dtype == torch.int32 else 1))


def words_of(packed: torch.Tensor) -> torch.Tensor:
    """Return int4 packed in int32 or bytes as int32 ``(..., N / 8)``, without a copy if possible."""
    return packed if packed.dtype == torch.int32 else packed.contiguous().view(torch.int32)


class Int4Matrix:
    """One expert's weight ``(K, N)`` of int4, packed in the int32 tensor ``words`` until `codes` unpacks it.

    ``rows`` is K. ``words`` is ``(K, N / 8)``, packed along N, or the transpose of ``(N, K / 8)``, packed along K.
    """

    dtype = torch.int32

    def __init__(self, words: torch.Tensor, rows: int) -> None:
        self.words = words
        self.device = words.device
        first, second = words.shape
        self.transposed = first != rows and first * IN_WORD == rows and words.stride(0) == 1
        self.shape = (rows, second) if self.transposed else (first, second * IN_WORD)

    def codes(self) -> torch.Tensor:
        """Return the codes, int8 ``(K, N)``."""
        return unpack_int4(self.words.t()).t() if self.transposed else unpack_int4(self.words)


Matrix = torch.Tensor | Int4Matrix


def codes_of(weight: Matrix) -> torch.Tensor:
    """Return the int8 codes ``(K, N)`` of an int4 or int8 weight."""
    return weight.codes() if isinstance(weight, Int4Matrix) else weight


def scales_of_groups(
    tensors: Sequence[torch.Tensor] | None, weights: Sequence[Matrix], argument: str
) -> list[torch.Tensor] | None:
    """Return the scales of each expert, fp32 ``(G, N)``: one per column for each of G groups of its K rows.

    ``tensors``: one ``(E, N)`` or ``(E, G, N)``, or E of ``(N,)`` or ``(G, N)``; floats, or int64 and uint64 whose low
    half is an fp32. Returns None for None or an empty list. Raises ArgumentError about ``argument`` for other shapes.
    """
    if not tensors:
        return None
    experts = len(weights)
    shapes = [tuple(tensor.shape) for tensor in tensors]
    single = len(tensors) == 1 and tensors[0].dim() in ((2, 3) if experts > 1 else (3,))
    each = list(tensors[0].unbind(0)) if single else list(tensors)
    (rows, width), made = weights[0].shape, []
    rule = "has shapes {}; {} experts with K={}, N={} need ({}, N) or ({}, G, N), or {} tensors (N,) or (G, N), "
    rule += "G a divisor of K"
    for scale in each:
        scale = scale.unsqueeze(0) if scale.dim() == 1 else scale
        fits = len(each) == experts and scale.dim() == 2 and scale.shape[1] == width
        fits = fits and scale.shape[0] > 0 and rows % scale.shape[0] == 0
        need(fits, argument, rule, shapes, experts, rows, width, experts, experts, experts)
        known = scale.is_floating_point() or scale.dtype in (torch.int64, torch.uint64)
        need(known, argument, "is {}; it must be float, or int64 whose low half is an fp32", scale.dtype)
        made.append(scale_of_bits(scale).float())
    return made
