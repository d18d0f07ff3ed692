"""Tiny random models of transformers, their MoE blocks with fp32 routing, and their checkpoint files."""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
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
    "num_key_value_heads": 4,
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
TWO_KINDS = {"layer_types": ["linear_attention", "full_attention"]}
#: Further models, whose layers compute as one of the above under other names.
MORE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", SHARED_QWEN | TWO_KINDS | {"norm_topk_prob": False}),
    "qwen3_5_moe_text": ("Qwen3_5Moe", SHARED_QWEN | TWO_KINDS),
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
LATENT_HEADS = {name: value for name, value in LATENT.items() if name.endswith(("_rank", "_dim"))}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
#: Layers with parts of their own.
MORE_MODELS |= {
    "granitemoe": ("GraniteMoe", LOCAL),
    "phimoe": ("Phimoe", LOCAL | {"router_jitter_noise": 0.3}),
    "llama4_text": ("Llama4", LOCAL | {"num_experts_per_tok": 1, "head_dim": 8, "interleave_moe_layer_step": 1}),
    "gpt_oss": ("GptOss", LOCAL | {"head_dim": 8, "swiglu_limit": 1.5}),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"num_experts": 8, "moe_topk": 2, "head_dim": 8}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 2},
    ),
    "qwen3_vl_moe_text": ("Qwen3VLMoeText", QWEN | {"moe_intermediate_size": 24, "head_dim": 8}),
    "deepseek_v4": (
        "DeepseekV4",
        {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 8, "q_lora_rank": 8,
         "o_lora_rank": 8, "o_groups": 2, "mlp_layer_types": ["hash_moe", "moe"],
         "layer_types": ["sliding_attention"] * 2, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4,
         "swiglu_limit": 1.5},
    ),
    "nemotron_h": (
        "NemotronH",
        {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 8, "n_group": 2,
         "moe_shared_expert_intermediate_size": 40, "moe_latent_size": 16, "routed_scaling_factor": 2.5,
         "layers_block_type": ["attention", "moe"]},
    ),
    "longcat_flash": (
        "LongcatFlash",
        LATENT_HEADS | {"n_routed_experts": 8, "zero_expert_num": 4, "moe_topk": 5, "expert_ffn_hidden_size": 24,
                        "num_hidden_layers": 4, "num_key_value_heads": 4, "head_dim": 4},  # two attentions a layer
    ),
    "bailing_hybrid": (
        "BailingHybrid",
        LATENT_HEADS | TWO_KINDS | {"num_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
                                    "num_key_value_heads": 4, "head_dim": 8, "moe_intermediate_size": 24,
                                    "first_k_dense_replace": 1},
    ),
}  # fmt: skip
#: Types without a class in transformers -> the type whose layer theirs is, and its tensors' and keys' other names.
RENAMED: dict[str, tuple[str, dict[str, str]]] = {
    "kimi_k2": ("deepseek_v3", {}),
    "bailing_moe_v2": ("bailing_hybrid", {"gate.e_score_correction_bias": "gate.expert_bias"}),
}
#: Models around a type's language model -> that type.
WRAPPED = {"qwen3_vl_moe": "qwen3_vl_moe_text", "qwen3_5_moe": "qwen3_5_moe_text"}
VISION = {"depth": 1, "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 32}
VISION |= {"num_heads": 2, "num_attention_heads": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": []}


@dataclass
class Saved:
    """A checkpoint directory and the MoE block of its layer ``LAYER``."""

    directory: Path
    block: nn.Module
    experts: int
    hidden: int
    special: dict[str, int] = field(default_factory=dict)  # of dispatchers: what the router has besides


def save(name: str, directory: Path, *, fused: bool = False, dtype: torch.dtype = torch.float32) -> Saved:
    """Writes the random model ``name`` as save_pretrained does: published names, or ``fused`` ones."""
    base, renamed = RENAMED.get(name, (name, {}))
    model, block = make(base)
    with torch.no_grad():
        for key, value in block.state_dict().items():
            # Router logits of spread 2 keep ties far away; expert rows of RMS near 1 let errors show.
            spread = 2 if key.startswith(("gate.", "router.")) else 1
            value.normal_(0, 0.1 if "bias" in key else spread * value.shape[-1] ** -0.5)
    model.to(dtype)
    model.save_pretrained(directory, save_original_format=not fused)
    if base != name:
        rename(directory, name, renamed)
    experts = next(value.shape[0] for key, value in router_of(block).named_parameters() if key.endswith("weight"))
    zero = getattr(model.config, "zero_expert_num", 0)
    special = {"copy_expert_num": zero} if zero else {}
    hidden = model.config.get_text_config().hidden_size
    return Saved(directory, fp32_routing(block), experts - zero, hidden, special)


def make(name: str) -> tuple[Any, nn.Module]:
    """The random model, and the MoE block of its layer ``LAYER``."""
    kind, values = (MODELS | MORE_MODELS)[WRAPPED.get(name, name)]
    values = SIZES | values
    if name in WRAPPED:
        kind, values = kind.removesuffix("Text"), {"text_config": values, "vision_config": VISION}
    torch.manual_seed(7)
    config = getattr(transformers, CONFIG_MAPPING_NAMES[name])(**values)
    heads = ("ForConditionalGeneration",) if name in WRAPPED else ("ForCausalLM", "Model")
    made = next(filter(None, (getattr(transformers, kind + head, None) for head in heads)))
    model = made(config)
    for key, table in model.named_buffers():
        if key.endswith("tid2eid"):  # else it is zero, as if each token had one expert several times
            drawn = torch.rand(len(table), config.n_routed_experts, generator=torch.Generator().manual_seed(7))
            table.copy_(drawn.argsort(1)[:, : table.shape[1]])
    blocks = {key: part for key, part in model.named_modules() if hasattr(part, "experts")}
    return model, next(part for key, part in blocks.items() if f"layers.{LAYER}." in key)


def rename(directory: Path, name: str, tensors: dict[str, str]) -> None:
    """Makes the files those of another model type."""
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | {"model_type": name}))
    for file in directory.glob("*.safetensors"):
        loaded = load_file(file)
        for key in list(loaded):
            for own, theirs in tensors.items():
                if key.endswith(own):
                    loaded[key.removesuffix(own) + theirs] = loaded.pop(key)
        save_file(loaded, file, {"format": "pt"})


def router_of(block: nn.Module) -> nn.Module:
    """The block's gate."""
    router: nn.Module = block.gate if hasattr(block, "gate") else block.router
    return router


def fp32_routing(block: nn.Module) -> nn.Module:
    """The same block with its router's weights and arithmetic in fp32."""
    router_of(block).float()
    router_of(block).register_forward_pre_hook(lambda _, given: (given[0].float(), *given[1:]))
    return block.eval()


@functools.cache
def saved(name: str, layout: str = "published", dtype: torch.dtype = torch.float32) -> Saved:
    """The same, written once a session: of published names, or of fused ones."""
    _folders.append(tempfile.TemporaryDirectory(prefix=f"{name}-"))
    return save(name, Path(_folders[-1].name), fused=layout == "fused", dtype=dtype)


_folders: list[tempfile.TemporaryDirectory[str]] = []


def run_block(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """(T, H) -> (T, H)."""
    with torch.no_grad():
        return first_of(block(x[None])).reshape(x.shape)


def first_of(y: Any) -> torch.Tensor:
    """The output of a block, or of a layer in its place: some return a tuple."""
    out: torch.Tensor = y[0] if isinstance(y, tuple) else y
    return out
