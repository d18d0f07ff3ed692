"""What a vLLM FusedMoEQuantConfig says, as far as this package computes it."""

from __future__ import annotations

from typing import Any

import torch

from ascend_moe.errors import need
from ascend_moe.interop.vllm.bases import FusedMoEQuantConfig

#: What the newest releases say of the activation: argument, attribute, and the value that changes nothing.
_ACTIVATION = (
    ("quant_config", "gemm1_clamp_limit", 0),
    ("quant_config", "gemm1_alpha", 1),
    ("quant_config", "gemm1_beta", 0),
    ("moe_config", "swiglu_limit", 0),
    ("moe_config", "swiglu_alpha", 1),
    ("moe_config", "swiglu_beta", 0),
)


def is_w8a8(quant_config: Any) -> bool:
    """Whether rows travel as int8 with a scale each; False: as they are.

    Args:
        quant_config: vLLM's FusedMoEQuantConfig of any release, anything with its attributes, or None.

    Raises:
        ArgumentError: it asks for another quantization.
    """
    dtype = getattr(quant_config, "quant_dtype", None)
    if dtype is None:
        return False
    need(dtype == torch.int8, "quant_config", "has quant_dtype {}; need None, or int8 with a scale a token", dtype)
    by_token = getattr(quant_config, "per_act_token_quant", False) or getattr(quant_config, "is_per_act_token", False)
    need(bool(by_token), "quant_config", "has int8 rows without per_act_token_quant; need a scale a token")
    given = getattr(quant_config, "a1_scale", None) is not None or getattr(quant_config, "a2_scale", None) is not None
    need(not given, "quant_config", "has a1_scale or a2_scale; rows have scales of their own: leave them out")
    return True


def check_experts(quant_config: Any, moe_config: Any) -> Any:
    """The quant_config, or ours for None, where both configs ask for no more than the experts compute."""
    config = FusedMoEQuantConfig() if quant_config is None else quant_config
    for name in ("w1_bias", "w2_bias", "w1_zp", "w2_zp"):
        need(
            getattr(config, name, None) is None, "quant_config", "has {}; experts have no biases and zero points", name
        )
    need(getattr(config, "block_shape", None) is None, "quant_config", "has block_shape; weights have scales a channel")
    given = {"quant_config": config, "moe_config": moe_config}
    for argument, name, plain in _ACTIVATION:
        value = getattr(given[argument], name, None)
        rule = "has {} {}; the experts' activation is plain silu and mul: {} or None"
        need(value is None or value == plain, argument, rule, name, value, plain)
    scales = [getattr(config, name, None) for name in ("w1_scale", "w2_scale")]
    if is_w8a8(config):
        need(all(each is not None for each in scales), "quant_config", "needs w1_scale and w2_scale beside int8 rows")
    else:
        rule = "has scales of weights but unquantized rows; give quant_dtype int8 and per_act_token_quant too"
        need(all(each is None for each in scales), "quant_config", rule)
    return config
