"""Published MoE layers by name: their numbers, and the experts' width that a small machine holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

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


def _layer(
    model: str, narrow: int, sizes: tuple[int, int, int, int], router: str = "softmax", scaling: float = 1.0,
    shared: int = 0, **others: Any,
) -> Preset:  # fmt: skip
    """``sizes``: H, the experts' width, E and K; ``others``: fields of the layer's `MoEConfig`."""
    named: dict[str, Any] = dict(
        zip(("hidden_size", "moe_intermediate_size", "num_experts", "top_k"), sizes, strict=True)
    )
    named |= {"router": router, "routed_scaling_factor": scaling, "shared_intermediate_size": shared}
    return Preset(f"a layer of {model}", MoEConfig(**named, **others), narrow)


PRESETS: dict[str, Preset] = {
    "deepseek-v3": _layer(
        "DeepSeek-V3 (671B)", 64, (7168, 2048, 256, 8), "deepseek_v3", n_group=8, topk_group=4, scaling=2.5, shared=2048
    ),
    "deepseek-v2-lite": _layer("DeepSeek-V2-Lite (16B)", 352, (2048, 1408, 64, 6), renormalize=False, shared=2816),
    "qwen3-235b": _layer("Qwen3-235B-A22B", 192, (4096, 1536, 128, 8)),
    "qwen3-30b": _layer("Qwen3-30B-A3B", 384, (2048, 768, 128, 8)),
    "mixtral": _layer("Mixtral-8x7B", 2048, (4096, 14336, 8, 2)),
    "deepseek-v4-flash": _layer(
        "DeepSeek-V4-Flash, behind the hash layers",
        64,
        (4096, 2048, 256, 6),
        "deepseek_v4",
        scaling=1.5,
        shared=2048,
        activation_numbers={"limit": 10.0},
    ),
    "deepseek-v4-pro": _layer(
        "DeepSeek-V4-Pro, behind the hash layers",
        64,
        (7168, 3072, 384, 6),
        "deepseek_v4",
        scaling=2.5,
        shared=3072,
        activation_numbers={"limit": 10.0},
    ),
    "kimi-k2": _layer("Kimi-K2 (1T)", 32, (7168, 2048, 384, 8), "deepseek_v3", scaling=2.827, shared=2048),
    "glm-5": _layer("GLM-5", 64, (6144, 2048, 256, 8), "deepseek_v3", scaling=2.5, shared=2048),
    "qwen3-next": _layer("Qwen3-Next-80B-A3B", 64, (2048, 512, 512, 10), shared=512, shared_expert_gate=True),
    "gpt-oss-120b": _layer(
        "gpt-oss-120b",
        192,
        (2880, 2880, 128, 4),
        router_bias=True,
        expert_bias=True,
        interleaved=True,
        activation="clipped_swiglu",
        activation_numbers={"limit": 7.0, "alpha": 1.702},
    ),
    "minimax-m2": _layer("MiniMax-M2", 128, (3072, 1536, 256, 8), "deepseek_v3"),
    "longcat-flash": _layer(
        "LongCat-Flash (560B)",
        32,
        (6144, 2048, 512, 12),
        "softmax_bias",
        renormalize=False,
        scaling=6.0,
        copy_expert_num=256,
    ),
    "qwen3.5-397b": _layer("Qwen3.5-397B-A17B", 64, (4096, 1024, 512, 10), shared=1024, shared_expert_gate=True),
    "nemotron-3-super": _layer(
        "Nemotron 3 Super (120B), whose experts have rows of 1024",
        128,
        (4096, 2688, 512, 22),
        "deepseek_v3",
        scaling=5.0,
        shared=5376,
        latent_size=1024,
        activation="relu2",
    ),
    "nemotron-3-ultra": _layer(
        "Nemotron 3 Ultra (550B), whose experts have rows of 2048; their width is assumed",
        64,
        (8192, 5376, 512, 22),
        "deepseek_v3",
        scaling=5.0,
        shared=10752,
        latent_size=2048,
        activation="relu2",
    ),
    "longcat-lite": _layer(
        "LongCat-Lite, with 32 zero experts; the experts' width and the weights' factor are assumed",
        32,
        (4096, 1024, 384, 18),
        "softmax_bias",
        renormalize=False,
        scaling=6.0,
        copy_expert_num=32,
    ),
    "step4-pro-v3": _layer(
        "Step4-Pro V3; router and experts' width are assumed", 16, (6144, 1024, 1024, 16), "deepseek_v3"
    ),
    "step4-pro-v4": _layer(
        "Step4-Pro V4; router and experts' width are assumed", 32, (9216, 2048, 384, 8), "deepseek_v3"
    ),
    "kimi-k3": _layer(
        "Kimi K3, whose experts have rows of 3584, without the norm of these",
        16,
        (7168, 3072, 896, 16),
        "deepseek_v3",
        shared=6144,
        latent_size=3584,
        activation="situglu",
        activation_numbers={"beta": 4.0, "linear_beta": 25.0},
    ),
    "tiny": replace(_layer("", 64, (128, 64, 16, 4)), about="a small layer for quick tries"),
}


def preset(name: str) -> Preset:
    """The preset of this name."""
    if name not in PRESETS:
        raise ArgumentError(f"preset is {name!r}; need one of {', '.join(PRESETS)}", argument="preset")
    return PRESETS[name]
