"""Draws values of experts whose results are exact, and multiplies rows by experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ascend_moe.experts import npu_grouped_matmul

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
EACH_FLOAT = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def int8s(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def grouped(x: torch.Tensor, weight: torch.Tensor, counts: Sequence[int], **kwargs: Any) -> torch.Tensor:
    """One tensor of rows by one of weights, numbers of rows by expert."""
    place = {"group_list": torch.tensor(counts), "group_list_type": 1, "split_item": 2, "group_type": 0}
    return npu_grouped_matmul([x], [weight], **(place | kwargs))[0]


DYNAMIC: dict[str, Any] = {"activate_left": True, "quant_mode": 1}
