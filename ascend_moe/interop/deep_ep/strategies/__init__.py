"""sgl-kernel-npu's strategies: how a Buffer of flavour "ascend" sends, in normal and in low-latency mode."""

from __future__ import annotations

from ascend_moe.interop.deep_ep.strategies.base import VALID_QUANT_MODES as VALID_QUANT_MODES
from ascend_moe.interop.deep_ep.strategies.base import EPCommStrategy as EPCommStrategy
from ascend_moe.interop.deep_ep.strategies.base import LowLatencyEPCommStrategy as LowLatencyEPCommStrategy
from ascend_moe.interop.deep_ep.strategies.base import LowLatencyStrategy as LowLatencyStrategy
from ascend_moe.interop.deep_ep.strategies.base import NormalEPCommStrategy as NormalEPCommStrategy
from ascend_moe.interop.deep_ep.strategies.base import NormalStrategy as NormalStrategy
from ascend_moe.interop.deep_ep.strategies.base import StrategyMap as StrategyMap
from ascend_moe.interop.deep_ep.strategies.base import get_low_latency_strategy as get_low_latency_strategy
from ascend_moe.interop.deep_ep.strategies.base import get_normal_strategy as get_normal_strategy
from ascend_moe.interop.deep_ep.strategies.base import register_low_latency_strategy as register_low_latency_strategy
from ascend_moe.interop.deep_ep.strategies.base import register_normal_strategy as register_normal_strategy
from ascend_moe.interop.deep_ep.strategies.low_latency import (
    AllToAllLowLatencyCommStrategy as AllToAllLowLatencyCommStrategy,
)
from ascend_moe.interop.deep_ep.strategies.low_latency import (
    DefaultLowLatencyCommStrategy as DefaultLowLatencyCommStrategy,
)
from ascend_moe.interop.deep_ep.strategies.low_latency import OpsLowLatencyCommStrategy as OpsLowLatencyCommStrategy
from ascend_moe.interop.deep_ep.strategies.normal import AlltoAllNormalCommStrategy as AlltoAllNormalCommStrategy
from ascend_moe.interop.deep_ep.strategies.normal import DefaultNormalCommStrategy as DefaultNormalCommStrategy
