"""The numbers of one MoE layer, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ascend_moe.choices import ACTIVATIONS, ALIASES
from ascend_moe.errors import need, need_one_of

ROUTERS = ("softmax", "deepseek_v3")


@dataclass(frozen=True)
class MoEConfig:
    """The numbers of one layer.

    Attributes:
        hidden_size: H.
        moe_intermediate_size: I, width of one expert.
        num_experts: E, routed experts on all ranks together.
        top_k: K, experts of a token.
        router: "softmax" (Mixtral, Qwen2/3-MoE, DeepSeek-V2) or "deepseek_v3" (sigmoid scores; a correction
            bias for the choice; a group counts by the sum of its two best experts).
        renormalize: the K weights are divided by their sum.
        n_group, topk_group: a token chooses from its best topk_group of n_group groups of experts. With
            router "softmax" a group counts by its best expert.
        routed_scaling_factor: multiplies the weights at the end.
        shared_intermediate_size: width of the dense shared expert; 0: the layer has none.
        shared_expert_gate: the shared expert's output is multiplied by sigmoid(x . gate), as in Qwen2-MoE.
        activation: of routed and shared experts, a name of `ascend_moe.experts.activations`.
        activation_numbers: its numbers that are not its defaults: limit, alpha, bias, beta, linear_beta.
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
    activation: str = "swiglu"
    activation_numbers: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        need_one_of("activation", self.activation, (*ACTIVATIONS, *ALIASES))
        for name in ("hidden_size", "moe_intermediate_size", "num_experts", "top_k", "n_group", "topk_group"):
            value = getattr(self, name)
            need(isinstance(value, int), name, "is a {}; it must be an int", type(value).__name__)
            need(value >= 1, name, "is {}; need at least 1", value)
        need(self.router in ROUTERS, "router", "is {!r}; need one of {}", self.router, ROUTERS)
        divides = self.num_experts % self.n_group == 0 and self.topk_group <= self.n_group
        rule = "is {} and topk_group {}; n_group must divide the {} experts and topk_group be at most n_group"
        need(divides, "n_group", rule, self.n_group, self.topk_group, self.num_experts)
        choice = self.num_experts // self.n_group * self.topk_group
        rule = "is {}, but a token chooses from {} experts"
        need(self.top_k <= choice, "top_k", rule, self.top_k, choice)
        shared = self.shared_intermediate_size
        rule = "is {}; need at least 0, and more than 0 with shared_expert_gate"
        need(shared >= int(self.shared_expert_gate), "shared_intermediate_size", rule, shared)
