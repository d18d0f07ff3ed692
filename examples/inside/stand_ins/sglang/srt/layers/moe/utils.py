"""As much of SGLang's module as in_sglang.py uses."""

from enum import Enum


class DeepEPMode(Enum):
    NORMAL = "normal"
    LOW_LATENCY = "low_latency"
