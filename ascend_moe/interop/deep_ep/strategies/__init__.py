"""sgl-kernel-npu's strategies: how a Buffer of flavour "ascend" sends, in normal and in low-latency mode."""

from __future__ import annotations

from ascend_moe.interop.deep_ep.strategies.base import (
    VALID_QUANT_MODES,
    EPCommStrategy,
    LowLatencyEPCommStrategy,
    LowLatencyStrategy,
    NormalEPCommStrategy,
    NormalStrategy,
    StrategyMap,
    get_low_latency_strategy,
    get_normal_strategy,
    register_low_latency_strategy,
    register_normal_strategy,
)
from ascend_moe.interop.deep_ep.strategies.low_latency import (
    AllToAllLowLatencyCommStrategy,
    DefaultLowLatencyCommStrategy,
    OpsLowLatencyCommStrategy,
)
from ascend_moe.interop.deep_ep.strategies.normal import AlltoAllNormalCommStrategy, DefaultNormalCommStrategy

__all__ = [
    "VALID_QUANT_MODES",
    "AllToAllLowLatencyCommStrategy",
    "AlltoAllNormalCommStrategy",
    "DefaultLowLatencyCommStrategy",
    "DefaultNormalCommStrategy",
    "EPCommStrategy",
    "LowLatencyEPCommStrategy",
    "LowLatencyStrategy",
    "NormalEPCommStrategy",
    "NormalStrategy",
    "OpsLowLatencyCommStrategy",
    "StrategyMap",
    "get_low_latency_strategy",
    "get_normal_strategy",
    "register_low_latency_strategy",
    "register_normal_strategy",
]
