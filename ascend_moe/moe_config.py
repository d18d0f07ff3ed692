"""The numbers of one MoE layer, and presets of published layers. Does not import torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from ascend_moe.call import WithSpecialExperts
from ascend_moe.errors import need, need_one_of

#: Activations of experts, by name their numbers and defaults; `ascend_moe.experts.activations` implements them.
ACTIVATIONS: dict[str, dict[str, float]] = {
    "swiglu": {"limit": 0.0},
    "clipped_swiglu": {"alpha": 1.702, "limit": 7.0, "bias": 1.0},
    "swiglustep": {"limit": 7.0},
    "situ": {"beta": 1.0},
    "situglu": {"beta": 1.0, "linear_beta": 0.0},
    **{name: {} for name in ("geglu", "geglu_tanh", "sigmoid_glu", "relu2", "reglu2")},
}
#: Aliases: names of gated activations in vLLM and SGLang.
ALIASES = {"silu": "swiglu", "swigluoai": "clipped_swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}


def is_finite(number: float) -> bool:
    """Return whether a number is neither infinite nor NaN, in a form that dynamo can trace for changing numbers."""
    return number - number == 0


def known_activation(name: str, numbers: Mapping[str, float]) -> str:
    """Return an activation's name in ``ACTIVATIONS``; ArgumentError if it or a number is unknown or out of range."""
    need_one_of("activation", name, (*ACTIVATIONS, *ALIASES))
    name = ALIASES.get(name, name)
    own = ACTIVATIONS[name]
    for number, value in numbers.items():
        rule = "is not a number of activation {}, which has {}"
        need(number in own, number, rule, name, ", ".join(own) or "none")
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and is_finite(value)
        need(fits, number, "is {!r:.60}; it must be a finite number", value)
        zero = own[number] == 0  # then 0 means none
        fits = number in ("alpha", "bias") or value > 0 or (zero and value == 0)
        need(fits, number, "is {}; it must be above 0" + (", or 0 for no limit" if zero else ""), value)
    return name


class Router(NamedTuple):
    """Properties of a router that a configuration is checked against.

    biased: a correction bias affects the choice, not the weights. grouped: it can choose by groups of experts. chooses:
    the only top_k it supports; 0: any. scores: the score function by its name in config.json.
    """

    biased: bool = False
    grouped: bool = False
    chooses: int = 0
    scores: str = "softmax"


#: By name; `ascend_moe.routers.by_name` implements them.
ROUTERS = {
    "softmax": Router(grouped=True),
    "deepseek_v3": Router(biased=True, grouped=True, scores="sigmoid"),
    "deepseek_v4": Router(biased=True, scores="sqrtsoftplus"),
    "hash": Router(scores="sqrtsoftplus"),
    "softmax_bias": Router(biased=True),
    "sparsemixer": Router(chooses=2),
    "llama4": Router(scores="sigmoid"),
}


@dataclass(frozen=True)
class MoEConfig(WithSpecialExperts):
    """Configuration of one MoE layer. Raises ArgumentError for values that are invalid or do not fit together.

    `SpecialExperts` follow the routed experts. The router chooses them too; their input is the dispatched row.
    LongCat's "zero" experts return their input, so they are copy experts here.

    Attributes:
        hidden_size: H.
        moe_intermediate_size: I, width of one expert.
        num_experts: E, routed experts on all ranks together.
        top_k: K, experts per token, special ones included.
        router: "softmax" (Mixtral, Qwen2/3-MoE, DeepSeek-V2), "deepseek_v3" (sigmoid scores; a correction
            bias for the choice; a group counts by the sum of its two best experts), "deepseek_v4" (sqrt(softplus)
            scores; a correction bias), "hash" (the same scores; expert ids from a table of token ids), "softmax_bias"
            (ERNIE-4.5, LongCat-Flash: softmax and a correction bias), "sparsemixer" (Phi-3.5-MoE) or "llama4"
            (sigmoids of the largest logits, which multiply the experts' inputs).
        renormalize: divide the K weights by their sum. "deepseek_v4" and "hash" always do, "sparsemixer" and "llama4"
            never.
        n_group, topk_group: a token chooses from its best topk_group of n_group groups of experts. With
            router "softmax" the score of a group is that of its best expert.
        routed_scaling_factor: final factor of the weights; no effect with "sparsemixer" and "llama4".
        shared_intermediate_size: width of the dense shared expert; 0: none.
        shared_expert_gate: multiply the shared expert's output by sigmoid(x . gate), as in Qwen2-MoE.
        router_bias: add a bias to the logits, for choice and weights (gpt-oss).
        jitter_eps: as in `ascend_moe.routers.sparsemixer`; for that router only.
        input_jitter: in a trainable layer, until ``eval()``, multiply each element of x by a random number in
            1 - input_jitter..1 + input_jitter (Mixtral; twice with router "sparsemixer").
        vocab_size: rows of the table of router "hash".
        expert_bias: the experts' matrix products have biases (gpt-oss).
        latent_size: width R of the dispatched rows, the projection of x by a matrix; a second matrix projects the sums
            back (Nemotron-3, Kimi-K3). The shared expert computes on x. 0: x itself is dispatched.
        interleaved: gate and up columns alternate in w_gate_up (gpt-oss).
        const_expert_gate: the two factors of a const expert are the softmax of two products with its input (MoE++);
            False: two numbers.
        activation: of routed and shared experts, a name of `ascend_moe.experts.activations`.
        activation_numbers: its parameters that differ from the defaults: limit, alpha, bias, beta, linear_beta.
    """

    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    top_k: int
    router: str = "softmax"
    renormalize: bool = True
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    shared_intermediate_size: int = 0
    shared_expert_gate: bool = False
    router_bias: bool = False
    jitter_eps: float = 0.01
    input_jitter: float = 0.0
    vocab_size: int = 0
    expert_bias: bool = False
    latent_size: int = 0
    interleaved: bool = False
    const_expert_gate: bool = True
    activation: str = "swiglu"
    activation_numbers: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def row_size(self) -> int:
        """R, elements per dispatched row: latent_size, or H if that is 0."""
        return self.latent_size or self.hidden_size

    @property
    def rows_of_a_token(self) -> int:
        """Rows dispatched per token: K with router "llama4", whose weights multiply the rows, else 1."""
        return self.top_k if self.router == "llama4" else 1

    @property
    def all_experts(self) -> int:
        """The number of experts that the router chooses from: E and the special ones."""
        return self.num_experts + self.special.total

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "moe_intermediate_size", "num_experts", "top_k", "n_group", "topk_group")
        least = {**dict.fromkeys(sizes, 1), "vocab_size": int(self.router == "hash")}
        least["shared_intermediate_size"] = int(self.shared_expert_gate is True)
        for each in fields(self):
            _need_kind(each.name, str(each.type), getattr(self, each.name), least.get(each.name, 0))
        known_activation(self.activation, self.activation_numbers)
        need_one_of("router", self.router, ROUTERS)
        router = ROUTERS[self.router]
        special = self.special.check().total
        rule = "is {} with {} zero, copy and const experts, which belong to no group; it must be 1"
        need(self.n_group == 1 or special == 0, "n_group", rule, self.n_group, special)
        fits = self.n_group == 1 or router.grouped
        need(fits, "n_group", "is {}; router {!r} does not support groups: set it to 1", self.n_group, self.router)
        most = router.chooses or self.top_k
        need(self.top_k == most, "top_k", "is {}; router {!r} supports only {}", self.top_k, self.router, most)
        members = 2 if router.biased and self.n_group > 1 else 1  # a group's score is the sum of its two best
        divides = self.num_experts % self.n_group == 0 and self.n_group * members <= self.num_experts
        rule = "is {} and topk_group {}; n_group must divide {} experts into groups of {} or more, and be >= topk_group"
        fits = divides and self.topk_group <= self.n_group
        need(fits, "n_group", rule, self.n_group, self.topk_group, self.num_experts, members)
        choice = self.num_experts // self.n_group * self.topk_group + special
        rule = "is {}, but only {} experts can be chosen; reduce top_k"
        need(self.top_k <= choice, "top_k", rule, self.top_k, choice)


def _need_kind(name: str, kind: str, value: Any, least: int) -> None:
    """Raise ArgumentError unless the ``value`` of a field fits its annotation ``kind``; names are not checked here."""
    if kind == "int":
        need(type(value) is int and value >= least, name, "is {!r}; need a whole number of at least {}", value, least)
    elif kind == "float":
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value < math.inf
        need(fits, name, "is {!r}; need a finite number of at least {}", value, least)
    elif kind != "str":
        wanted, shown = (bool, "True or False") if kind == "bool" else (Mapping, "a dict of numbers by name")
        need(isinstance(value, wanted), name, "is {!r:.60}; need {}", value, shown)


# ---- published layers by name


@dataclass(frozen=True)
class Preset:
    """One layer of a published model.

    Attributes:
        about: the layer's description; names the numbers that are assumed because no published config contains them.
        published: the layer's numbers; H, K and E, which determine the rows, are never assumed.
        narrow: width limit of routed and shared experts in ``config()``; routing and rows do not depend on it.
    """

    about: str
    published: MoEConfig
    narrow: int

    def config(self) -> MoEConfig:
        """Return the published configuration with the widths of experts limited to ``narrow``."""
        return replace(
            self.published,
            moe_intermediate_size=min(self.published.moe_intermediate_size, self.narrow),
            shared_intermediate_size=min(self.published.shared_intermediate_size, self.narrow),
        )


def _layer(
    model: str, narrow: int, sizes: tuple[int, int, int, int], router: str = "softmax", scaling: float = 1.0,
    shared: int = 0, **others: Any,
) -> Preset:  # fmt: skip
    """Return a preset. ``sizes``: H, I, E and K; ``others``: fields of `MoEConfig`."""
    named: dict[str, Any] = dict(
        zip(("hidden_size", "moe_intermediate_size", "num_experts", "top_k"), sizes, strict=True)
    )
    named |= {"router": router, "routed_scaling_factor": scaling, "shared_intermediate_size": shared}
    return Preset(f"a layer of {model}", MoEConfig(**named, **others), narrow)


_deepseek_v4 = functools.partial(_layer, narrow=64, router="deepseek_v4", activation_numbers={"limit": 10.0})
_longcat = functools.partial(_layer, narrow=32, router="softmax_bias", renormalize=False, scaling=6.0)
_nemotron_3 = functools.partial(_layer, router="deepseek_v3", scaling=5.0, activation="relu2")

PRESETS: dict[str, Preset] = {
    "deepseek-v3": _layer(
        "DeepSeek-V3 (671B)", 64, (7168, 2048, 256, 8), "deepseek_v3", n_group=8, topk_group=4, scaling=2.5, shared=2048
    ),
    "deepseek-v2-lite": _layer("DeepSeek-V2-Lite (16B)", 352, (2048, 1408, 64, 6), renormalize=False, shared=2816),
    "qwen3-235b": _layer("Qwen3-235B-A22B", 192, (4096, 1536, 128, 8)),
    "qwen3-30b": _layer("Qwen3-30B-A3B", 384, (2048, 768, 128, 8)),
    "mixtral": _layer("Mixtral-8x7B", 2048, (4096, 14336, 8, 2)),
    "deepseek-v4-flash": _deepseek_v4(
        "DeepSeek-V4-Flash, behind the hash layers", sizes=(4096, 2048, 256, 6), scaling=1.5, shared=2048
    ),
    "deepseek-v4-pro": _deepseek_v4(
        "DeepSeek-V4-Pro, behind the hash layers", sizes=(7168, 3072, 384, 6), scaling=2.5, shared=3072
    ),
    "kimi-k2": _layer("Kimi-K2 (1T)", 32, (7168, 2048, 384, 8), "deepseek_v3", scaling=2.827, shared=2048),
    "glm-5": _layer("GLM-5", 64, (6144, 2048, 256, 8), "deepseek_v3", scaling=2.5, shared=2048),
    "qwen3-next": _layer("Qwen3-Next-80B-A3B", 64, (2048, 512, 512, 10), shared=512, shared_expert_gate=True),
    "gpt-oss-120b": _layer(
        "gpt-oss-120b", 192, (2880, 2880, 128, 4), router_bias=True, expert_bias=True, interleaved=True,
        activation="clipped_swiglu", activation_numbers={"limit": 7.0, "alpha": 1.702},
    ),
    "minimax-m2": _layer("MiniMax-M2", 128, (3072, 1536, 256, 8), "deepseek_v3"),
    "longcat-flash": _longcat("LongCat-Flash (560B)", sizes=(6144, 2048, 512, 12), copy_expert_num=256),
    "qwen3.5-397b": _layer("Qwen3.5-397B-A17B", 64, (4096, 1024, 512, 10), shared=1024, shared_expert_gate=True),
    "nemotron-3-super": _nemotron_3(
        "Nemotron 3 Super (120B), whose experts have rows of 1024", 128, (4096, 2688, 512, 22),
        shared=5376, latent_size=1024,
    ),
    "nemotron-3-ultra": _nemotron_3(
        "Nemotron 3 Ultra (550B), whose experts have rows of 2048; their width is assumed", 64, (8192, 5376, 512, 22),
        shared=10752, latent_size=2048,
    ),
    "longcat-lite": _longcat(
        "LongCat-Lite, with 32 zero experts; the experts' width and the weights' factor are assumed",
        sizes=(4096, 1024, 384, 18), copy_expert_num=32,
    ),
    "step4-pro-v3": _layer(
        "Step4-Pro V3; router and experts' width are assumed", 16, (6144, 1024, 1024, 16), "deepseek_v3"
    ),
    "step4-pro-v4": _layer(
        "Step4-Pro V4; router and experts' width are assumed", 32, (9216, 2048, 384, 8), "deepseek_v3"
    ),
    "kimi-k3": _layer(
        "Kimi K3, whose experts have rows of 3584, without the norm of these", 16, (7168, 3072, 896, 16),
        "deepseek_v3", shared=6144, latent_size=3584,
        activation="situglu", activation_numbers={"beta": 4.0, "linear_beta": 25.0},
    ),
    "tiny": replace(_layer("", 64, (128, 64, 16, 4)), about="a small layer for quick tries"),
}  # fmt: skip


def preset(name: str) -> Preset:
    """Return the `Preset` of a name in `PRESETS`. Raises ArgumentError for other names."""
    need_one_of("preset", name, PRESETS)
    return PRESETS[name]
