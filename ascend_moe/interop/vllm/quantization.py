"""vLLM's FusedMoEQuantConfig: the attributes in use, and the supported quantizations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ascend_moe.errors import need, need_one_of
from ascend_moe.experts import Activation

#: Parameters of the activation in the newest releases: argument, attribute, `Activation`'s field, neutral value.
_ACTIVATION = (
    ("quant_config", "gemm1_clamp_limit", "limit", 0),
    ("quant_config", "gemm1_alpha", "alpha", 1),
    ("quant_config", "gemm1_beta", "bias", 0),
    ("moe_config", "swiglu_limit", "limit", 0),
    ("moe_config", "swiglu_alpha", "alpha", 1),
    ("moe_config", "swiglu_beta", "bias", 0),
)
#: vLLM's names -> `ascend_moe.experts.activations`' names. "swigluoai" interleaves gate and up, as gpt-oss's files.
ACTIVATIONS = {
    "silu": "swiglu",
    "gelu": "geglu",
    "gelu_tanh": "geglu_tanh",
    "relu2": "reglu2",
    "swigluoai": "clipped_swiglu",
    "swigluoai_uninterleave": "clipped_swiglu",
    "swiglustep": "swiglustep",
}


@dataclass
class FusedMoEQuantConfig:
    """Attributes of vLLM's class of this name that are read; the defaults mean no quantization.

    Attributes:
        quant_dtype: dtype of rows: None, or int8.
        per_act_token_quant: every row has its own scale.
        w1_scale, w2_scale: ``(L, 2F)`` and ``(L, H)`` float32, a dimension of 1 may follow.
        per_out_ch_quant: every output channel of the weights has its own scale.
        block_shape, a1_scale, a2_scale, w1_bias, w2_bias, w1_zp, w2_zp: must stay None.
    """

    quant_dtype: torch.dtype | str | None = None
    per_act_token_quant: bool = False
    per_out_ch_quant: bool = False
    block_shape: list[int] | None = None
    w1_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    a1_scale: Tensor | None = None
    a2_scale: Tensor | None = None
    w1_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    w1_zp: Tensor | None = None
    w2_zp: Tensor | None = None

    @classmethod
    def make(cls, quant_dtype: torch.dtype | str | None = None, *args: Any, **kwargs: Any) -> FusedMoEQuantConfig:
        """Return an object of quant_dtype and, as args and kwargs, the other attributes."""
        return cls(quant_dtype, *args, **kwargs)

    @property
    def is_quantized(self) -> bool:
        """Whether rows are quantized."""
        return self.quant_dtype is not None


def int8_w8a8_moe_quant_config(
    w1_scale: Tensor,
    w2_scale: Tensor,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    *,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    per_act_token_quant: bool = True,
) -> FusedMoEQuantConfig:
    """Return the configuration of int8 weights with a scale per output channel and int8 rows with a scale each.

    Args:
        w1_scale, w2_scale, a1_scale, a2_scale, w1_bias, w2_bias: as of `FusedMoEQuantConfig`.
        per_act_token_quant: vLLM's is False by default; experts refuse False.
    """
    scales = (w1_scale, w2_scale, a1_scale, a2_scale)
    return FusedMoEQuantConfig(torch.int8, per_act_token_quant, True, None, *scales, w1_bias, w2_bias)


def is_w8a8(quant_config: Any) -> bool:
    """Return whether rows are sent as int8 with a scale each; False: unquantized.

    Args:
        quant_config: vLLM's FusedMoEQuantConfig of any release, an object with its attributes, or None.

    Raises:
        ArgumentError: the configuration has another quantization.
    """
    dtype = getattr(quant_config, "quant_dtype", None)
    if dtype is None:
        return False
    need(dtype == torch.int8, "quant_config", "has quant_dtype {}; need None, or int8 with a scale per token", dtype)
    by_token = getattr(quant_config, "per_act_token_quant", False) or getattr(quant_config, "is_per_act_token", False)
    need(bool(by_token), "quant_config", "has int8 rows without per_act_token_quant; need a scale per token")
    given = getattr(quant_config, "a1_scale", None) is not None or getattr(quant_config, "a2_scale", None) is not None
    need(not given, "quant_config", "has a1_scale or a2_scale, but rows have their own scales: leave them out")
    return True


def check_experts(quant_config: Any) -> Any:
    """Return the quant_config, or the default for None; raise if the experts do not support it."""
    config = FusedMoEQuantConfig() if quant_config is None else quant_config
    for name in ("w1_bias", "w2_bias", "w1_zp", "w2_zp"):
        rule = "has {}, but experts have no biases and zero points: leave it out"
        need(getattr(config, name, None) is None, "quant_config", rule, name)
    need(getattr(config, "block_shape", None) is None, "quant_config", "has block_shape; need scales per channel")
    scales = [getattr(config, name, None) for name in ("w1_scale", "w2_scale")]
    if is_w8a8(config):
        need(all(each is not None for each in scales), "quant_config", "needs w1_scale and w2_scale with int8 rows")
    else:
        rule = "has scales of weights but unquantized rows; pass quant_dtype int8 and per_act_token_quant too"
        need(all(each is None for each in scales), "quant_config", rule)
    return config


def activation_of(name: str, quant_config: Any, moe_config: Any) -> Activation:
    """Return the activation of vLLM's name, with its parameters from the configs.

    Raises:
        ArgumentError: no such activation, or a parameter that it does not have, with an effective value.
    """
    need_one_of("activation", name, ACTIVATIONS)
    activation = Activation(ACTIVATIONS[name], interleaved=name == "swigluoai")
    given = {"quant_config": quant_config, "moe_config": moe_config}
    numbers: dict[str, float] = {}
    for argument, attribute, number, plain in _ACTIVATION:
        value = getattr(given[argument], attribute, None)
        if value is not None and activation.has(number):
            numbers.setdefault(number, value)
        rule = "has {} {}, but activation {!r} has no such parameter: pass {} or None"
        need(value in (None, plain) or activation.has(number), argument, rule, attribute, value, name, plain)
    return replace(activation, numbers=numbers)
