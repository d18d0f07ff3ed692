"""What a vLLM FusedMoEQuantConfig says, as far as this package computes it."""

from __future__ import annotations

from typing import Any

import torch

from ascend_moe.errors import need
from ascend_moe.interop.vllm.bases import FusedMoEQuantConfig


def is_w8a8(quant_config: Any) -> bool:
    """Whether rows travel as int8 with a scale each; False: as they are.

    Args:
        quant_config: vLLM's FusedMoEQuantConfig of any release, anything with its attributes, or None.

    Raises:
        ArgumentError: it asks for another quantisation.
    """
    dtype = getattr(quant_config, "quant_dtype", None)
    if dtype is None:
        return False
    need(dtype == torch.int8, "quant_config", f"has quant_dtype {dtype}; need None, or int8 with a scale a token")
    by_token = getattr(quant_config, "per_act_token_quant", False) or getattr(quant_config, "is_per_act_token", False)
    need(bool(by_token), "quant_config", "has int8 rows without per_act_token_quant; need a scale a token")
    given = getattr(quant_config, "a1_scale", None) is not None or getattr(quant_config, "a2_scale", None) is not None
    need(not given, "quant_config", "has a1_scale or a2_scale; rows have scales of their own: leave them out")
    return True


def check_weights(quant_config: Any) -> Any:
    """The config, or ours for None, where its weights are ones that the experts multiply."""
    config = FusedMoEQuantConfig() if quant_config is None else quant_config
    for name in ("w1_bias", "w2_bias", "w1_zp", "w2_zp"):
        need(getattr(config, name, None) is None, "quant_config", f"has {name}; experts have no biases and zero points")
    scales = [getattr(config, name, None) for name in ("w1_scale", "w2_scale")]
    if is_w8a8(config):
        need(all(each is not None for each in scales), "quant_config", "needs w1_scale and w2_scale beside int8 rows")
    else:
        rule = "has scales of weights but unquantised rows; give quant_dtype int8 and per_act_token_quant too"
        need(all(each is None for each in scales), "quant_config", rule)
    return config
