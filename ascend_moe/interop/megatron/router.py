"""Megatron-LM's TopKRouter: logits, choice, capacity, and losses attached to the gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ascend_moe._tensors import FittedModule, need_values, runs_again_with_gradients, without_autocast, without_casts
from ascend_moe.errors import need, need_dims, need_one_of, need_shape, with_typed_errors
from ascend_moe.routers import (
    MoEAuxLossAutoScaler,
    RouterReplay,
    apply_router_token_dropping,
    compute_routing_scores_for_aux_loss,
    get_tokens_per_expert_and_token_count,
    get_updated_expert_bias,
    sinkhorn_routing,
    switch_load_balancing_loss_func,
    topk_routing_with_score_function,
    z_loss_func,
)

LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
#: Options that sinkhorn does not support.
_NOT_WITH_SINKHORN = (
    "moe_aux_loss_coeff",
    "moe_router_enable_expert_bias",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_enable_routing_replay",
)
#: Options of a TransformerConfig that no router here supports.
_FORCED = ("moe_router_force_load_balancing", "moe_router_force_biased")


@dataclass
class RouterConfig:
    """The fields of Megatron-LM's TransformerConfig that a router reads, with its names, meanings and defaults.

    Only add_bias_linear is True there by default. `TopKRouter` takes a TransformerConfig as well.

    Attributes:
        num_moe_experts, hidden_size, moe_router_topk: E, H, K.
        moe_router_load_balancing_type, moe_aux_loss_coeff, moe_z_loss_coeff, calculate_per_token_loss: for the losses.
        moe_router_score_function, moe_router_pre_softmax, moe_router_num_groups, moe_router_group_topk,
            moe_router_topk_scaling_factor, moe_enable_routing_replay: for the choice of experts.
        moe_router_enable_expert_bias, moe_router_bias_update_rate: a bias that balances the load, and its step size.
        moe_input_jitter_eps: inputs are multiplied by random factors in 1 - eps..1 + eps; None: no jitter.
        moe_expert_capacity_factor, moe_token_drop_policy, moe_pad_expert_input_to_capacity: for an expert's capacity.
        moe_router_dtype, params_dtype, add_bias_linear: dtype of logits ("fp32", "fp64", None: the input's), dtype of
            weights, and whether the logits have a bias.
    """

    num_moe_experts: int
    hidden_size: int
    moe_router_topk: int = 2
    moe_router_load_balancing_type: str | list[str] = "aux_loss"
    moe_aux_loss_coeff: float | list[float] = 0.0
    moe_z_loss_coeff: float | None = None
    moe_router_score_function: str = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_topk_scaling_factor: float | None = None
    moe_router_dtype: str | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 1e-3
    moe_input_jitter_eps: float | None = None
    moe_expert_capacity_factor: float | None = None
    moe_token_drop_policy: str = "probs"
    moe_pad_expert_input_to_capacity: bool = False
    calculate_per_token_loss: bool = False
    add_bias_linear: bool = False
    moe_enable_routing_replay: bool = False
    params_dtype: torch.dtype = torch.float32


class TopKRouter(FittedModule):
    """Router of tokens ``(S, B, H)``, which attaches its losses to the probabilities' gradients.

    Losses are computed in training with gradients only: "aux_loss" over the tokens of the tp x cp ranks, "seq_aux_loss"
    for each sequence, "global_aux_loss" with the rows of each expert averaged over the steps since
    `reset_global_aux_loss_tracker` and summed over tp x dp x cp, z loss on the logits. For several at once pass lists
    as moe_router_load_balancing_type and moe_aux_loss_coeff. The first two balance a micro-batch, whose tokens are on
    the tp x cp ranks, while tokens are dispatched over tp x ep: EP ranks are other replicas of attention.

    Parameters: weight ``(E, H)`` and, with add_bias_linear, bias ``(E,)`` in params_dtype; without values until they
    are loaded. Buffers: expert_bias and local_tokens_per_expert ``(E,)`` fp32 with moe_router_enable_expert_bias.

    Args:
        config: `RouterConfig`, or Megatron-LM's TransformerConfig.
        pg_collection: an object with the process groups ``tp_cp`` and ``tp_dp_cp``; None, or a group that is None: this
            rank only. `update_expert_bias` without ``tp_dp_cp`` sums over the default group, if there is one.
        device: that of the parameters.

    Attributes:
        router_replay: with moe_enable_routing_replay a `RouterReplay`, else None.
        losses: this rank's part of the last forward's losses, divided by their coefficients, by name:
            "load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss" and "z_loss".

    Raises ArgumentError if moe_router_load_balancing_type is unknown or "quantile_balancing", moe_aux_loss_coeff or
    another option does not fit it, or a TransformerConfig forces the load. Source: Megatron-LM ``TopKRouter``.
    """

    _shared = ("tp_cp_group", "tp_dp_cp_group")
    _initial = ("expert_bias",)
    expert_bias: Tensor | None
    local_tokens_per_expert: Tensor | None
    global_tokens_per_expert: Tensor | None
    ga_steps: Tensor | None

    @with_typed_errors
    def __init__(self, config: Any, pg_collection: Any = None, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.config, self.topk = config, config.moe_router_topk
        kinds = config.moe_router_load_balancing_type
        for kind in [kinds] if isinstance(kinds, str) else kinds:
            rule = "is {!r}, which is not supported; use an aux loss or moe_router_enable_expert_bias"
            need(kind != "quantile_balancing", "moe_router_load_balancing_type", rule, kind)
            need_one_of("moe_router_load_balancing_type", kind, (*LOSSES, "none", *(["sinkhorn"] * (kinds == kind))))
        for name in (*_FORCED, *(_NOT_WITH_SINKHORN if kinds == "sinkhorn" else ())):
            value, by = getattr(config, name, None), "TopKRouter" if name in _FORCED else "sinkhorn"
            need(not value, name, "is {!r}, which {} does not support: leave it out", value, by)
        experts, hidden = config.num_moe_experts, config.hidden_size
        made: dict[str, Any] = {"dtype": config.params_dtype, "device": device}
        self.weight = nn.Parameter(torch.empty(experts, hidden, **made))
        self.bias = nn.Parameter(torch.empty(experts, **made)) if config.add_bias_linear else None
        self.tp_cp_group = getattr(pg_collection, "tp_cp", None)
        self.tp_dp_cp_group = getattr(pg_collection, "tp_dp_cp", None)
        self.router_replay = RouterReplay() if getattr(config, "moe_enable_routing_replay", False) else None
        self.losses: dict[str, Tensor] = {}
        zeros = torch.zeros(experts, dtype=torch.float32, device=device)
        biased, counted = config.moe_router_enable_expert_bias, self.get_aux_loss_coeff("global_aux_loss") > 0
        self.register_buffer("expert_bias", zeros.clone() if biased else None)
        for name, used, value in (
            ("local_tokens_per_expert", biased, zeros),
            ("global_tokens_per_expert", counted, zeros),
            ("ga_steps", counted, torch.zeros((), dtype=torch.float32, device=device)),
        ):
            self.register_buffer(name, value.clone() if used else None, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> TopKRouter:
        """Cast and move; bias and counts stay fp32, as small steps would be lost in bf16."""
        super()._apply(without_casts(fn, self._buffers.values()), recurse)
        return self

    def get_aux_loss_coeff(self, aux_loss_type: str) -> float:
        """Return the coefficient of ``aux_loss_type``: "aux_loss", "seq_aux_loss", "global_aux_loss"; 0: not used.

        Raises ArgumentError if moe_aux_loss_coeff does not fit moe_router_load_balancing_type.
        """
        kinds, coeffs = self.config.moe_router_load_balancing_type, self.config.moe_aux_loss_coeff
        names, numbers = ((kinds,), (coeffs,)) if isinstance(kinds, str) else (kinds, coeffs)
        fits = isinstance(numbers, (list, tuple)) and len(numbers) == len(names)
        fits = fits and all(isinstance(number, (int, float)) for number in numbers)
        rule = "is {!r} for moe_router_load_balancing_type {!r}; pass a number, or a list for a list of losses"
        need(fits, "moe_aux_loss_coeff", rule, coeffs, kinds)
        return float(dict(zip(names, numbers, strict=True)).get(aux_loss_type, 0.0))

    def reset_global_aux_loss_tracker(self) -> None:
        """Forget the rows and steps counted for "global_aux_loss": call it before a new global batch."""
        for buffer in (self.global_tokens_per_expert, self.ga_steps):
            if buffer is not None:
                buffer.zero_()

    def update_expert_bias(self) -> None:
        """Update expert_bias by the rows counted since the last call, summed over tp x dp x cp, and reset the counts.

        Call it at the end of a step. Raises ArgumentError unless moe_router_enable_expert_bias is True.
        """
        rule = "is False, so there is no bias to update: set it to True"
        need(self.expert_bias is not None, "moe_router_enable_expert_bias", rule)
        assert self.expert_bias is not None and self.local_tokens_per_expert is not None
        rate = self.config.moe_router_bias_update_rate
        new = get_updated_expert_bias(self.local_tokens_per_expert, self.expert_bias, rate, self.tp_dp_cp_group)
        self.expert_bias.copy_(new)
        self.local_tokens_per_expert.zero_()

    def apply_input_jitter(self, input: Tensor) -> Tensor:
        """Return input ``(..., H)`` times random numbers in 1 - eps .. 1 + eps; moe_input_jitter_eps None: input."""
        eps = self.config.moe_input_jitter_eps
        if eps is None:
            return input
        return input * torch.empty_like(input).uniform_(1.0 - eps, 1.0 + eps)

    @without_autocast
    def gating(self, input: Tensor) -> Tensor:
        """Return logits ``(..., E)`` of input ``(..., H)`` in moe_router_dtype, "fp32" or "fp64"; None: input's dtype.

        Raises ArgumentError for other values.
        """
        names = {None: input.dtype, "fp32": torch.float32, "fp64": torch.float64}
        need_one_of("moe_router_dtype", self.config.moe_router_dtype or "None", ("None", "fp32", "fp64"))
        dtype = names[self.config.moe_router_dtype]
        bias = None if self.bias is None else self.bias.to(dtype)
        return nn.functional.linear(input.to(dtype), self.weight.to(dtype), bias)

    @with_typed_errors
    def forward(self, input: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the chosen experts' probabilities ``(T, E)``, 0 elsewhere, and their map ``(T, E)`` bool; T = S * B.

        Args:
            input: ``(S, B, H)``, or ``(T, H)`` as one sequence.
            mask: bool, input's shape without H, True for active tokens. The others are not in the map, do not count in
                capacity, losses and bias, and their values are not read. None: all are active.

        Raises ArgumentError if input or mask has another shape, or mask is not bool.
        """
        need_dims("input", input, 2, 3)
        need_values(self, input)
        if input.dim() == 2:
            input, mask = input.unsqueeze(1), None if mask is None else mask.unsqueeze(1)
        if mask is not None:
            need_shape("mask", mask, tuple(input.shape[:2]), dtypes=(torch.bool,))
            input = torch.where(mask.unsqueeze(-1), input, 0)
        return self.routing(self.gating(self.apply_input_jitter(input)), mask)

    def routing(self, logits: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return what `forward` returns, from logits ``(S, B, E)``; mask ``(S, B)`` bool as there."""
        config = self.config
        sequence, batch = logits.shape[:2]
        logits = logits.reshape(-1, config.num_moe_experts)
        active = None if mask is None else mask.reshape(-1)
        if active is not None:
            logits = torch.where(active[:, None], logits, 0)
        attached = self.training and torch.is_grad_enabled()
        self.losses = {}
        if attached:
            logits = self._with_z_loss(logits, active)
        probs, routing_map = self._choose(logits, active)
        if active is not None:
            routing_map = routing_map & active[:, None]
            probs = torch.where(routing_map, probs, 0)
        if config.moe_expert_capacity_factor is not None:
            factor, policy = config.moe_expert_capacity_factor, config.moe_token_drop_policy
            how = factor, policy, config.moe_pad_expert_input_to_capacity
            probs, routing_map = apply_router_token_dropping(probs, routing_map, self.topk, *how, mask=active)
        if attached and any(self.get_aux_loss_coeff(kind) > 0 for kind in LOSSES):
            name = config.moe_router_score_function
            chosen, scores = compute_routing_scores_for_aux_loss(logits, self.topk, name, mask=active)
            probs = self._with_aux_losses(probs, scores, chosen, sequence, batch, active)
        if self.local_tokens_per_expert is not None and torch.is_grad_enabled() and not runs_again_with_gradients():
            self.local_tokens_per_expert += routing_map.detach().sum(0)
        return probs, routing_map

    def _choose(self, logits: Tensor, active: Tensor | None) -> tuple[Tensor, Tensor]:
        config = self.config
        if config.moe_router_load_balancing_type == "sinkhorn":
            return sinkhorn_routing(logits, self.topk, self.training, active)
        return topk_routing_with_score_function(
            logits,
            self.topk,
            use_pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            scaling_factor=config.moe_router_topk_scaling_factor,
            score_function=config.moe_router_score_function,
            expert_bias=self.expert_bias,
            router_replay=self.router_replay,
        )

    def _attach(self, tensor: Tensor, name: str, loss: Tensor, coeff: float, active: Tensor | None) -> Tensor:
        self.losses[name] = loss.detach() / coeff
        if self.config.calculate_per_token_loss:
            size = 1 if self.tp_cp_group is None else self.tp_cp_group.size()
            loss = loss * ((len(tensor) if active is None else active.sum()) * size)
        attached: Tensor = MoEAuxLossAutoScaler.apply(tensor, loss)  # type: ignore[no-untyped-call]
        return attached

    def _with_z_loss(self, logits: Tensor, active: Tensor | None) -> Tensor:
        if self.config.moe_z_loss_coeff is None:
            return logits
        coeff = self.config.moe_z_loss_coeff / (1 if self.tp_cp_group is None else self.tp_cp_group.size())
        return self._attach(logits, "z_loss", z_loss_func(logits, coeff, mask=active), coeff, active)

    def _with_aux_losses(
        self, probs: Tensor, scores: Tensor, chosen: Tensor, sequence: int, batch: int, active: Tensor | None
    ) -> Tensor:
        experts, padded = self.config.num_moe_experts, active is not None
        if (coeff := self.get_aux_loss_coeff("aux_loss")) > 0:
            rows, _, total = get_tokens_per_expert_and_token_count(chosen, self.tp_cp_group, self.topk, padded)
            loss = switch_load_balancing_loss_func(scores, rows, total, self.topk, experts, coeff)
            probs = self._attach(probs, "load_balancing_loss", loss, coeff, active)
        if (coeff := self.get_aux_loss_coeff("seq_aux_loss")) > 0:
            # Experts of another sequence count as other experts: the loss is the sum of all sequences' then.
            seqs, seq_scores = (each.reshape(sequence, batch * experts) for each in (chosen, scores))
            topk = self.topk * batch
            rows, _, total = get_tokens_per_expert_and_token_count(seqs, self.tp_cp_group, topk, padded)
            loss = switch_load_balancing_loss_func(seq_scores, rows, total, self.topk, experts, coeff) / max(batch, 1)
            probs = self._attach(probs, "seq_load_balancing_loss", loss, coeff, active)
        if (coeff := self.get_aux_loss_coeff("global_aux_loss")) > 0:
            rows, _, total = get_tokens_per_expert_and_token_count(chosen, self.tp_dp_cp_group, self.topk, padded)
            assert self.global_tokens_per_expert is not None and self.ga_steps is not None
            if not runs_again_with_gradients():
                self.global_tokens_per_expert += rows
                self.ga_steps += 1
            # A copy: the next step changes the sum in place.
            rows = self.global_tokens_per_expert / self.ga_steps
            loss = switch_load_balancing_loss_func(scores, rows, total, self.topk, experts, coeff)
            probs = self._attach(probs, "global_load_balancing_loss", loss, coeff, active)
        return probs
