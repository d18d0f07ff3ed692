"""The product of one group of rows with one expert's weight, exact for integers.

Groups use torch.matmul one by one, not torch._grouped_mm: on the CPU that function loops over the groups too, refuses
rows whose size in bytes is no multiple of 16, and leaves the rows after the last group uninitialized.
"""

from __future__ import annotations

import torch

from ascend_moe._tensors import without_autocast
from ascend_moe.native.torch_npu import compute_dtype

# The sum of 1024 products of two int8 values is at most 2**24: every partial sum is an exact float32.
_EXACT_FLOAT32_TERMS = 1024


def int8_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the exact product ``(m, K) int8 @ (K, N) int8 -> (m, N) int32``, for any shape, strides and machine."""
    if _int8_instructions_are_exact():
        # torch has no public int8 product; this private one supports any shape on the CPU.
        return torch._int_mm(x, weight)
    return int8_matmul_by_float32(x, weight)


@without_autocast
def int8_matmul_by_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute `int8_matmul` without integer dot products: in float32, in slices that are exact."""
    total = x.new_zeros((x.shape[0], weight.shape[1]), dtype=torch.int32)
    for first in range(0, x.shape[1], _EXACT_FLOAT32_TERMS):
        part = slice(first, first + _EXACT_FLOAT32_TERMS)
        total += torch.matmul(x[:, part].float(), weight[part].float()).to(torch.int32)
    return total


@without_autocast
def float_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``(..., K) @ (K, N) [+ (N,)]`` in x's dtype: float32 sums, rounded once; differentiable."""
    if bias is None and (x.dtype in (torch.float32, torch.float64) or _multiplies_natively(x.dtype)):
        return torch.matmul(x, weight)
    wide = compute_dtype(x.dtype)
    product = torch.matmul(x.to(wide), weight.to(wide))
    if bias is not None:
        product = product + bias.to(wide)
    return product.to(x.dtype)


def _int8_instructions_are_exact() -> bool:
    # Older x86 adds pairs of 8-bit products in 16 bits, with saturation; VNNI adds them in 32.
    supported = getattr(torch.cpu, "_is_vnni_supported", None)
    return bool(supported is not None and supported())


def _multiplies_natively(dtype: torch.dtype) -> bool:
    # Without bf16 instructions torch falls back to a scalar loop, hundreds of times slower than float32.
    # float16 has that fallback on most CPUs, so it always goes through float32.
    return dtype == torch.bfloat16 and torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@without_autocast
def antiquant_matmul(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return ``x @ ((codes + offset) * scale) + bias`` in x's dtype, from float32, rounded once; differentiable in x.

    codes int8 ``(K, N)``; scale and offset ``(G, N)`` fp32, of G groups of K's rows; bias ``(N,)``.
    """
    grouped = codes.float().reshape(scale.shape[0], -1, codes.shape[1])
    if offset is not None:
        grouped = grouped + offset.unsqueeze(1)
    wide = compute_dtype(x.dtype)
    product = torch.matmul(x.to(wide), (grouped * scale.unsqueeze(1)).reshape(codes.shape).to(wide))
    return (product if bias is None else product + bias.to(wide)).to(x.dtype)


def w4a8_matmul(
    x: torch.Tensor,
    row_scale: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    offset: torch.Tensor | None,
) -> torch.Tensor:
    """Multiply int8 rows ``(m, K)`` by int4 codes ``(K, N)``; return fp32 ``(m, N)`` by `npu_grouped_matmul`'s formula.

    scale ``(G, N)``, bias ``(N,)``, offset ``(1, N)`` and row_scale ``(m,)`` are fp32. Each group of K is summed in
    int32, and the groups are added in their order.
    """
    y, size = None, codes.shape[0] // scale.shape[0]
    for group, factor in enumerate(scale):
        part = slice(group * size, (group + 1) * size)
        total = int8_matmul(x[:, part], codes[part]) - 8 * codes[part].sum(0, dtype=torch.int32)
        y = total.float() * factor if y is None else y + total.float() * factor
    assert y is not None
    y = y + bias
    if offset is not None:
        y = y + x.sum(1, dtype=torch.int32).float().unsqueeze(1) * offset
    product: torch.Tensor = y * row_scale.float().unsqueeze(1)
    return product
