"""Routers of layers by the name in their config.

Each function returns weights (BS, K) fp32 and ids (BS, K) int32 for fp32 logits (BS, E), special experts included;
given ids replace the choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ascend_moe.errors import need, need_tensor
from ascend_moe.moe_config import MoEConfig
from ascend_moe.routers.gating import deepseek_v2, deepseek_v3, deepseek_v4, sigmoid_of_topk, softmax_topk, sparsemixer
from ascend_moe.routers.replay import divided


class Routed(Protocol):
    """The attributes of a layer that routers read."""

    config: MoEConfig
    tid2eid: Tensor | None
    training: bool

    @property
    def gate_weight(self) -> Tensor: ...

    @property
    def gate_bias(self) -> Tensor | None: ...


class Hints(NamedTuple):
    """Inputs of a router besides the logits: the tokens' ids (...,), and replayed experts (BS, K)."""

    input_ids: Tensor | None
    ids: Tensor | None


def _softmax(layer: Routed, logits: Tensor, hints: Hints) -> tuple[Tensor, Tensor]:
    config = layer.config
    if config.n_group > 1:
        weights, ids = deepseek_v2(logits, config.top_k, config.n_group, config.topk_group, ids=hints.ids)
    elif layer.gate_weight.dtype == torch.float32 or hints.ids is not None:
        weights, ids = softmax_topk(logits, config.top_k, renormalize=False, ids=hints.ids)
    else:
        weights, chosen = torch.topk(torch.softmax(logits, -1), config.top_k)
        ids = chosen.int()
    if config.renormalize:
        weights = weights / weights.sum(-1, keepdim=True) if hints.ids is None else divided(weights)
    scaled = config.routed_scaling_factor != 1.0
    return weights * config.routed_scaling_factor if scaled else weights, ids


def _deepseek_v3(layer: Routed, logits: Tensor, hints: Hints) -> tuple[Tensor, Tensor]:
    config = layer.config
    assert layer.gate_bias is not None
    groups, scaling = (config.n_group, config.topk_group), config.routed_scaling_factor
    return deepseek_v3(logits, layer.gate_bias, config.top_k, *groups, config.renormalize, scaling, ids=hints.ids)


def _deepseek_v4(layer: Routed, logits: Tensor, hints: Hints) -> tuple[Tensor, Tensor]:
    config = layer.config
    return deepseek_v4(logits, config.top_k, layer.gate_bias, config.routed_scaling_factor, ids=hints.ids)


def _hash(layer: Routed, logits: Tensor, hints: Hints) -> tuple[Tensor, Tensor]:
    top_k, scaling, input_ids = layer.config.top_k, layer.config.routed_scaling_factor, hints.input_ids
    if hints.ids is not None:
        return deepseek_v4(logits, top_k, scaling=scaling, ids=hints.ids)
    need(input_ids is not None, "input_ids", "is None; router 'hash' chooses experts by token id: pass the ids")
    assert input_ids is not None
    need_tensor("input_ids", input_ids)
    hashed = {"input_ids": input_ids.reshape(-1), "tid2eid": layer.tid2eid}
    return deepseek_v4(logits, top_k, scaling=scaling, **hashed)


def _softmax_bias(layer: Routed, logits: Tensor, hints: Hints) -> tuple[Tensor, Tensor]:
    config = layer.config
    weights, ids = softmax_topk(logits, config.top_k, config.renormalize, layer.gate_bias, ids=hints.ids)
    scaled = config.routed_scaling_factor != 1.0
    return weights * config.routed_scaling_factor if scaled else weights, ids


def _sparsemixer(layer: Routed, logits: Tensor, hints: Hints) -> tuple[Tensor, Tensor]:
    training = layer.training and layer.gate_weight.requires_grad
    return sparsemixer(logits, layer.config.top_k, layer.config.jitter_eps, ids=hints.ids, training=training)


def _llama4(layer: Routed, logits: Tensor, hints: Hints) -> tuple[Tensor, Tensor]:
    if layer.gate_weight.dtype == torch.float32 or hints.ids is not None:
        return sigmoid_of_topk(logits, layer.config.top_k, ids=hints.ids)
    values, chosen = torch.topk(logits, layer.config.top_k)
    return torch.sigmoid(values), chosen.int()


#: By the names in ``ROUTERS``; a name without a function is refused when a layer is built.
ROUTES: dict[str, Callable[[Routed, Tensor, Hints], tuple[Tensor, Tensor]]] = {
    "softmax": _softmax,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v4": _deepseek_v4,
    "hash": _hash,
    "softmax_bias": _softmax_bias,
    "sparsemixer": _sparsemixer,
    "llama4": _llama4,
}
