"""Tiny random models of transformers, their MoE blocks with fp32 routing, and their checkpoint files."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
}
QWEN = {"num_experts": 8, "num_experts_per_tok": 3}
V2 = {"num_experts_per_tok": 3, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0}
#: name -> (model class, config values). Layer 1 is a MoE layer in each.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2Moe", QWEN | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}),
    "qwen3_moe": ("Qwen3Moe", QWEN | {"moe_intermediate_size": 16, "head_dim": 8, "norm_topk_prob": True}),
    "deepseek_v2": ("DeepseekV2", LATENT | V2),
    "deepseek_v3": ("DeepseekV3", LATENT | {"num_experts_per_tok": 4, "routed_scaling_factor": 2.5}),
}
LAYER = 1

V3_LIKE = {"moe_intermediate_size": 24, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
V3_LIKE |= {"routed_scaling_factor": 1.7, "head_dim": 8}
FIRST_DENSE = {"mlp_layer_types": ["dense", "sparse"]}
INDEXER = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "indexer_types": ["full", "full"]}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
SHARED_QWEN = QWEN | LINEAR | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "head_dim": 8}
#: Further models, whose layers compute as one of the above under other names.
MORE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", SHARED_QWEN | {"norm_topk_prob": False}),
    "qwen3_5_moe_text": ("Qwen3_5Moe", SHARED_QWEN),
    "olmoe": ("Olmoe", QWEN),
    "flex_olmo": ("FlexOlmo", QWEN | {"norm_topk_prob": True}),
    "minimax": ("MiniMax", {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 8}),
    "glm4_moe": ("Glm4Moe", V3_LIKE),
    "glm4_moe_lite": ("Glm4MoeLite", LATENT | V3_LIKE | FIRST_DENSE | {"n_shared_experts": 2}),
    "glm_moe_dsa": ("GlmMoeDsa", LATENT | V3_LIKE | FIRST_DENSE | INDEXER),
    "deepseek_v32": ("DeepseekV32", LATENT | V3_LIKE | FIRST_DENSE | INDEXER | {"norm_topk_prob": False}),
    "solar_open": ("SolarOpen", V3_LIKE),
    "dots1": ("Dots1", V3_LIKE | {"n_shared_experts": 2, "first_k_dense_replace": 1}),
    "mimo_v2_flash": ("MiMoV2Flash", V3_LIKE | FIRST_DENSE),
}


@dataclass
class Saved:
    """A checkpoint directory and the MoE block of its layer ``LAYER``."""

    directory: Path
    block: nn.Module
    experts: int
    hidden: int


def save(
    name: str, directory: Path, *, fused: bool = False, dtype: torch.dtype = torch.float32, **sharding: Any
) -> Saved:
    """Writes the random model ``name`` as save_pretrained does: published names, or ``fused`` ones."""
    kind, values = (MODELS | MORE_MODELS)[name]
    torch.manual_seed(7)
    config = getattr(transformers, CONFIG_MAPPING_NAMES[name])(**SIZES | values)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    block = model.model.layers[LAYER].mlp
    with torch.no_grad():
        for key, value in block.state_dict().items():
            # Router logits of spread 2 keep ties far away; expert rows of RMS near 1 let errors show.
            spread = 2 if key.startswith("gate.") else 1
            value.normal_(0, 0.1 if "correction_bias" in key else spread * value.shape[-1] ** -0.5)
    model.to(dtype)
    model.save_pretrained(directory, save_original_format=not fused, **sharding)
    experts = block.gate.weight.shape[0]
    return Saved(directory, fp32_routing(block), experts, config.hidden_size)


def fp32_routing(block: nn.Module) -> nn.Module:
    """The same block with its router's weights and arithmetic in fp32."""
    block.gate.float()
    block.gate.register_forward_pre_hook(lambda _, given: (given[0].float(), *given[1:]))
    return block.eval()


@functools.cache
def saved(name: str, layout: str = "published", dtype: torch.dtype = torch.float32) -> Saved:
    """The same, written once a session: of published names, of fused ones, or in many small files."""
    _folders.append(tempfile.TemporaryDirectory(prefix=f"{name}-"))
    sharding = {"max_shard_size": "8KB"} if layout == "sharded" else {}
    return save(name, Path(_folders[-1].name), fused=layout == "fused", dtype=dtype, **sharding)


_folders: list[tempfile.TemporaryDirectory[str]] = []


def run_block(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """(T, H) -> (T, H)."""
    with torch.no_grad():
        return block(x[None])[0]
