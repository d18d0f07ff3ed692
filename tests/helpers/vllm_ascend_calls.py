"""Registers vllm-ascend's operators as two of its releases have them, and names the sizes of their inputs."""

from __future__ import annotations

from typing import Any

import torch

from ascend_moe.interop import vllm_ascend

vllm_ascend.register("0.26.0rc1")
vllm_ascend.register("0.23.0")  # adds what later releases have no more
C: Any = torch.ops._C_ascend
BF16, INT8, INT32 = torch.bfloat16, torch.int8, torch.int32
E, K, H, F = 8, 4, 32, 16
X = torch.zeros(2, 2 * F, dtype=BF16)
MX: dict[str, Any] = {"topk_weight": None, "group_index": None, "dst_type": torch.float8_e4m3fn, "quant_mode": 2}
