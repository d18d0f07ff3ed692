"""Data types as torch_npu's operators accept them: torch.dtype, ScalarType number or NPU number."""

from __future__ import annotations

import torch

from ascend_moe.errors import ArgumentError

# torch's ScalarType numbers (what an `int?` schema makes of a torch.dtype).
_SCALAR_TYPES = {
    1: torch.int8,
    3: torch.int32,
    5: torch.float16,
    6: torch.float32,
    15: torch.bfloat16,
}
# torch_npu's own numbers (torch_npu.int8 and friends) are ACL's aclDataType plus this offset.
_NPU_OFFSET = 256
_ACL_TYPES = {
    0: torch.float32,
    1: torch.float16,
    2: torch.int8,
    3: torch.int32,
    27: torch.bfloat16,
}


def resolve_dtype(value: torch.dtype | int | None, argument: str) -> torch.dtype | None:
    """The torch.dtype that ``value`` stands for; None stays None.

    Args:
        value: a torch.dtype, its ScalarType number (``int8`` is 1), or torch_npu's number
            (256 + aclDataType: ``torch_npu.int8`` is 258).
        argument: name to put in the error.

    Raises:
        ArgumentError: a number that stands for none of int8, int32, float16, bfloat16, float32.
    """
    if value is None or isinstance(value, torch.dtype):
        return value
    known = _ACL_TYPES.get(value - _NPU_OFFSET) if value >= _NPU_OFFSET else _SCALAR_TYPES.get(value)
    if known is None:
        raise ArgumentError(
            f"{argument} is the number {value}, which is none of int8, int32, float16, bfloat16, float32; "
            "pass a torch.dtype",
            argument=argument,
        )
    return known


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type arithmetic runs in: float32 for half types and integers, otherwise ``dtype`` itself."""
    return dtype if dtype == torch.float64 else torch.float32
