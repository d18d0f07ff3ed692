"""Draws logits of a router, and compares what comes of them."""

from __future__ import annotations

import torch
from torch import Tensor

FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16

E, K = 8, 3


def close(found: Tensor, expected: Tensor, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
