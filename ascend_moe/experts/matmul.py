"""Products of one group of rows with one expert's weight, exact where integers are multiplied.

The products run group by group through torch.matmul rather than through torch._grouped_mm: on the CPU
that one loops over the groups too, refuses rows whose byte size is not a multiple of 16, and leaves the
rows behind the last group as the allocator returned them.
"""

from __future__ import annotations

import torch

from ascend_moe._dtypes import compute_dtype

# 1024 products of two int8 values are at most 2**24 together: every partial sum is a float32 integer.
_EXACT_FLOAT32_TERMS = 1024


def int8_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Exact ``(m, K) int8 @ (K, N) int8 -> (m, N) int32``, any shape, strides and machine."""
    if _int8_instructions_are_exact():
        # matmul's private sibling is the only int8 kernel torch has; it takes any shape on the CPU.
        return torch._int_mm(x, weight)
    return int8_matmul_by_float32(x, weight)


def int8_matmul_by_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`int8_matmul` for machines without integer dot products: float32 in slices that cannot round."""
    total = x.new_zeros((x.shape[0], weight.shape[1]), dtype=torch.int32)
    for first in range(0, x.shape[1], _EXACT_FLOAT32_TERMS):
        part = slice(first, first + _EXACT_FLOAT32_TERMS)
        total += torch.matmul(x[:, part].float(), weight[part].float()).to(torch.int32)
    return total


def float_matmul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``(..., K) @ (K, N) [+ (N,)]`` in x's type: float32 sums, one rounding at the end.

    Differentiable without ``out``, which is what the result is written into.
    """
    if bias is None and (x.dtype in (torch.float32, torch.float64) or _multiplies_natively(x.dtype)):
        if out is None or _is_written_alike(out):
            return torch.matmul(x, weight, out=out)
        return out.copy_(torch.matmul(x, weight))
    wide = compute_dtype(x.dtype)
    product = torch.matmul(x.to(wide), weight.to(wide))
    if bias is not None:
        product = product + bias.to(wide)
    return product.to(x.dtype) if out is None else out.copy_(product)


def _is_written_alike(out: torch.Tensor) -> bool:
    # BLAS may sum in another order where the result is not aligned as fresh memory is: other bits.
    return out.is_contiguous() and out.data_ptr() % 64 == 0


def _int8_instructions_are_exact() -> bool:
    # Older x86 adds pairs of 8-bit products in 16 bits, with saturation; VNNI adds them in 32.
    supported = getattr(torch.cpu, "_is_vnni_supported", None)
    return bool(supported is not None and supported())


def _multiplies_natively(dtype: torch.dtype) -> bool:
    # Without such instructions torch falls back to a scalar loop, hundreds of times slower than float32.
    # float16 has that fallback on most CPUs, so it always goes through float32.
    return (
        dtype == torch.bfloat16
        and torch._C._has_mkldnn
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
