"""Published MoE layers by name: their numbers, and the experts' width that a small machine holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .errors import ArgumentError
from .moe_config import MoEConfig


@dataclass(frozen=True)
class Preset:
    """One layer of a published model.

    Attributes:
        about: what layer it is, and which of its numbers are assumed, because no config of it was at hand.
        published: the layer's numbers; H, K and E, which decide the rows that travel, are never assumed.
        narrow: width of the routed experts and of the shared expert in ``config()``, at most the published
            ones. The widths are all that differs: routing and rows are those of the model.
    """

    about: str
    published: MoEConfig
    narrow: int

    def config(self) -> MoEConfig:
        """The numbers with every expert at most ``narrow`` wide."""
        return replace(
            self.published,
            moe_intermediate_size=min(self.published.moe_intermediate_size, self.narrow),
            shared_intermediate_size=min(self.published.shared_intermediate_size, self.narrow),
        )


PRESETS: dict[str, Preset] = {
    "deepseek-v3": Preset(
        "a layer of DeepSeek-V3 (671B)",
        MoEConfig(
            hidden_size=7168,
            moe_intermediate_size=2048,
            num_experts=256,
            top_k=8,
            router="deepseek_v3",
            n_group=8,
            topk_group=4,
            routed_scaling_factor=2.5,
            shared_intermediate_size=2048,
        ),
        narrow=64,
    ),
    "deepseek-v2-lite": Preset(
        "a layer of DeepSeek-V2-Lite (16B)",
        MoEConfig(
            hidden_size=2048,
            moe_intermediate_size=1408,
            num_experts=64,
            top_k=6,
            renormalize=False,
            shared_intermediate_size=2816,
        ),
        narrow=352,
    ),
    "qwen3-235b": Preset(
        "a layer of Qwen3-235B-A22B",
        MoEConfig(hidden_size=4096, moe_intermediate_size=1536, num_experts=128, top_k=8),
        narrow=192,
    ),
    "qwen3-30b": Preset(
        "a layer of Qwen3-30B-A3B",
        MoEConfig(hidden_size=2048, moe_intermediate_size=768, num_experts=128, top_k=8),
        narrow=384,
    ),
    "mixtral": Preset(
        "a layer of Mixtral-8x7B",
        MoEConfig(hidden_size=4096, moe_intermediate_size=14336, num_experts=8, top_k=2),
        narrow=2048,
    ),
    "deepseek-v4-flash": Preset(
        "a layer of DeepSeek-V4-Flash, behind the hash layers",
        MoEConfig(
            hidden_size=4096,
            moe_intermediate_size=2048,
            num_experts=256,
            top_k=6,
            router="deepseek_v4",
            routed_scaling_factor=1.5,
            shared_intermediate_size=2048,
            activation_numbers={"limit": 10.0},
        ),
        narrow=64,
    ),
    "deepseek-v4-pro": Preset(
        "a layer of DeepSeek-V4-Pro, behind the hash layers",
        MoEConfig(
            hidden_size=7168,
            moe_intermediate_size=3072,
            num_experts=384,
            top_k=6,
            router="deepseek_v4",
            routed_scaling_factor=2.5,
            shared_intermediate_size=3072,
            activation_numbers={"limit": 10.0},
        ),
        narrow=64,
    ),
    "kimi-k2": Preset(
        "a layer of Kimi-K2 (1T)",
        MoEConfig(
            hidden_size=7168,
            moe_intermediate_size=2048,
            num_experts=384,
            top_k=8,
            router="deepseek_v3",
            routed_scaling_factor=2.827,
            shared_intermediate_size=2048,
        ),
        narrow=32,
    ),
    "glm-5": Preset(
        "a layer of GLM-5",
        MoEConfig(
            hidden_size=6144,
            moe_intermediate_size=2048,
            num_experts=256,
            top_k=8,
            router="deepseek_v3",
            routed_scaling_factor=2.5,
            shared_intermediate_size=2048,
        ),
        narrow=64,
    ),
    "qwen3-next": Preset(
        "a layer of Qwen3-Next-80B-A3B",
        MoEConfig(
            hidden_size=2048,
            moe_intermediate_size=512,
            num_experts=512,
            top_k=10,
            shared_intermediate_size=512,
            shared_expert_gate=True,
        ),
        narrow=64,
    ),
    "gpt-oss-120b": Preset(
        "a layer of gpt-oss-120b",
        MoEConfig(
            hidden_size=2880,
            moe_intermediate_size=2880,
            num_experts=128,
            top_k=4,
            router_bias=True,
            expert_bias=True,
            interleaved=True,
            activation="clipped_swiglu",
            activation_numbers={"limit": 7.0, "alpha": 1.702},
        ),
        narrow=192,
    ),
    "minimax-m2": Preset(
        "a layer of MiniMax-M2",
        MoEConfig(hidden_size=3072, moe_intermediate_size=1536, num_experts=256, top_k=8, router="deepseek_v3"),
        narrow=128,
    ),
    "longcat-flash": Preset(
        "a layer of LongCat-Flash (560B)",
        MoEConfig(
            hidden_size=6144,
            moe_intermediate_size=2048,
            num_experts=512,
            top_k=12,
            router="softmax_bias",
            renormalize=False,
            routed_scaling_factor=6.0,
            copy_expert_num=256,
        ),
        narrow=32,
    ),
    "qwen3.5-397b": Preset(
        "a layer of Qwen3.5-397B-A17B",
        MoEConfig(
            hidden_size=4096,
            moe_intermediate_size=1024,
            num_experts=512,
            top_k=10,
            shared_intermediate_size=1024,
            shared_expert_gate=True,
        ),
        narrow=64,
    ),
    "nemotron-3-super": Preset(
        "a layer of Nemotron 3 Super (120B), whose experts have rows of 1024",
        MoEConfig(
            hidden_size=4096,
            moe_intermediate_size=2688,
            num_experts=512,
            top_k=22,
            router="deepseek_v3",
            routed_scaling_factor=5.0,
            shared_intermediate_size=5376,
            latent_size=1024,
            activation="relu2",
        ),
        narrow=128,
    ),
    "nemotron-3-ultra": Preset(
        "a layer of Nemotron 3 Ultra (550B), whose experts have rows of 2048; their width is assumed",
        MoEConfig(
            hidden_size=8192,
            moe_intermediate_size=5376,
            num_experts=512,
            top_k=22,
            router="deepseek_v3",
            routed_scaling_factor=5.0,
            shared_intermediate_size=10752,
            latent_size=2048,
            activation="relu2",
        ),
        narrow=64,
    ),
    "longcat-lite": Preset(
        "a layer of LongCat-Lite, with 32 zero experts; the experts' width and the weights' factor are assumed",
        MoEConfig(
            hidden_size=4096,
            moe_intermediate_size=1024,
            num_experts=384,
            top_k=18,
            router="softmax_bias",
            renormalize=False,
            routed_scaling_factor=6.0,
            copy_expert_num=32,
        ),
        narrow=32,
    ),
    "step4-pro-v3": Preset(
        "a layer of Step4-Pro V3; router and experts' width are assumed",
        MoEConfig(hidden_size=6144, moe_intermediate_size=1024, num_experts=1024, top_k=16, router="deepseek_v3"),
        narrow=16,
    ),
    "step4-pro-v4": Preset(
        "a layer of Step4-Pro V4; router and experts' width are assumed",
        MoEConfig(hidden_size=9216, moe_intermediate_size=2048, num_experts=384, top_k=8, router="deepseek_v3"),
        narrow=32,
    ),
    "kimi-k3": Preset(
        "a layer of Kimi K3, whose experts have rows of 3584, without the norm of these",
        MoEConfig(
            hidden_size=7168,
            moe_intermediate_size=3072,
            num_experts=896,
            top_k=16,
            router="deepseek_v3",
            shared_intermediate_size=6144,
            latent_size=3584,
            activation="situglu",
            activation_numbers={"beta": 4.0, "linear_beta": 25.0},
        ),
        narrow=16,
    ),
    "tiny": Preset(
        "a small layer for quick tries",
        MoEConfig(hidden_size=128, moe_intermediate_size=64, num_experts=16, top_k=4),
        narrow=64,
    ),
}


def preset(name: str) -> Preset:
    """The preset of this name."""
    if name not in PRESETS:
        raise ArgumentError(f"preset is {name!r}; need one of {', '.join(PRESETS)}", argument="preset")
    return PRESETS[name]
