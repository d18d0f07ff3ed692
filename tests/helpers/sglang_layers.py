"""Names the sizes and draws the router logits of the tests of SGLang's layer."""

from __future__ import annotations

import torch
from routed_tokens import randn

FP32, BF16, NAN = torch.float32, torch.bfloat16, float("nan")
E, K, H, F = 8, 3, 32, 16


def logits_of(tokens: int, kind: str) -> torch.Tensor:
    logits = randn(tokens, E, seed=8)
    if kind == "one expert":
        logits[:, 1] += 100
    if kind == "an expert without tokens":
        logits[:, 0] -= 100
    return logits
