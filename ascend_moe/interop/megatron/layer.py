"""Megatron-LM's MoELayer, router, dispatcher, experts and shared expert in one call, and its GroupedMLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ascend_moe._tensors import FLOATS, FittedModule, need_values
from ascend_moe.errors import need, need_shape, typed_methods
from ascend_moe.experts import Activation, grouped_mlp
from ascend_moe.experts.rank_experts import RankExperts, held_text
from ascend_moe.interop.megatron.dispatchers import TokenDispatcher
from ascend_moe.interop.megatron.router import TopKRouter
from ascend_moe.interop.megatron.shared_experts import SharedExpertMLP


@typed_methods
class GroupedMLP(RankExperts, FittedModule):
    """``(silu(x @ gate) * (x @ up) * prob) @ down`` for every row, with the weights of the row's local expert.

    tokens_per_expert stays on its device; rows after those that it counts are not read. With ETP a rank's result is a
    partial sum, which combine completes. Weight gradients are sums over the tokens of all EP ranks: reduce them over
    the replicas of the experts (edp) only.

    Parameters, without values until they are loaded (F' = F / etp):
        weight1 ``(H, L * 2F')``, whose memory is ``(L, H, 2F')``: gate columns, then up columns of the shard.
        weight2 ``(L * F', H)``, whose memory is ``(L, F', H)``.

    Args:
        num_local_experts: L. hidden_size: H. ffn_hidden_size: F, a multiple of etp_size.
        etp_size, etp_rank: number of shards of an expert, and this rank's shard.
        activation: one of `ascend_moe.experts.activations`. Without a gate weight1 is ``(H, L * F')``.
        dtype, device: those of the weights.

    Raises ArgumentError if an argument breaks one of these rules. Source: Megatron-LM ``GroupedMLP``.
    """

    _expert_parameters = ("weight1", "weight2")

    def __init__(
        self,
        num_local_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        etp_size: int = 1,
        etp_rank: int = 0,
        activation: str | Activation = "swiglu",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        need(num_local_experts >= 1, "num_local_experts", "is {}; need at least 1", num_local_experts)
        fits = etp_size >= 1 and ffn_hidden_size >= 1 and ffn_hidden_size % etp_size == 0
        need(fits, "ffn_hidden_size", "is {}; it must be a multiple of etp_size {}", ffn_hidden_size, etp_size)
        need(0 <= etp_rank < etp_size, "etp_rank", "is {}; need 0..{}", etp_rank, etp_size - 1)
        self.num_local_experts, self.hidden_size, self.ffn_hidden_size = num_local_experts, hidden_size, ffn_hidden_size
        self.etp_size, self.etp_rank = etp_size, etp_rank
        self.activation = Activation.of(activation)
        shard, parts = ffn_hidden_size // etp_size, 2 if self.activation.gated else 1
        sizes = (hidden_size, num_local_experts * parts * shard), (num_local_experts * shard, hidden_size)
        self.weight1, self.weight2 = (nn.Parameter(torch.empty(size, dtype=dtype, device=device)) for size in sizes)

    @property
    def w1(self) -> Tensor:
        """``(L, H, 2F')``, without a gate ``(L, H, F')``: a view of weight1."""
        return self.weight1.view(self.num_local_experts, self.hidden_size, -1)

    @property
    def w2(self) -> Tensor:
        """``(L, F', H)``, a view of weight2."""
        return self.weight2.view(self.num_local_experts, -1, self.hidden_size)

    @torch.no_grad()
    def load_experts(self, w1: Tensor, w2: Tensor) -> GroupedMLP:
        """Copy this rank's shard of whole experts into the weights. Returns self.

        Args:
            w1: ``(L, H, 2F)``, gate columns first; without a gate ``(L, H, F)``. w2: ``(L, F, H)``.

        Raises ArgumentError if a weight has another shape, or is not bf16, fp16 or fp32.
        """
        local, hidden, ffn = self.num_local_experts, self.hidden_size, self.ffn_hidden_size
        parts = 2 if self.activation.gated else 1
        need_shape("w1", w1, (local, hidden, parts * ffn), dtypes=FLOATS)
        need_shape("w2", w2, (local, ffn, hidden), dtypes=FLOATS)
        part = slice(self.etp_rank * ffn // self.etp_size, (self.etp_rank + 1) * ffn // self.etp_size)
        self.w1.copy_(torch.cat([each[:, :, part] for each in w1.chunk(parts, dim=2)], 2))
        self.w2.copy_(w2[:, part])
        return self

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Return the experts' results, and None for Megatron-LM's bias.

        Args:
            permuted_local_hidden_states: ``(A, H)`` rows by local expert, in the weights' dtype.
            tokens_per_expert: ``(L,)`` int64 counts, together at most A.
            permuted_probs: ``(A,)``, factors of the activation's rows; None: 1.

        Returns ``(A, H)``. Raises ArgumentError if a weight is on meta, or tensors do not fit.
        """
        x, act = permuted_local_hidden_states, self.activation
        need_values(self, x)
        counts = tokens_per_expert.to(x.device)
        return grouped_mlp(x, self.w1, self.w2, counts, topk_scales=permuted_probs, activation=act), None


@typed_methods
class MoELayer(nn.Module):
    """MoE layer of one rank, for its attention output ``(S / cp / tp, B, H)``.

    Args:
        router, dispatcher, experts: built with the same E, k, L and etp_size.
        shared_experts: a shared expert, which runs between the dispatcher's phases; None: the layer has none.
        tensor_model_parallel_size: tp, attention's tensor-parallel ranks.
        sequence_parallel: every tp rank has its own share of the sequence. Required in training with tp above 1:
            otherwise the ranks send the same tokens, and their gradients count tp times.

    Raises ArgumentError if forward runs in training with tp above 1 and without sequence_parallel. Source: Megatron-LM
    ``MoELayer``.
    """

    def __init__(
        self,
        router: TopKRouter,
        dispatcher: TokenDispatcher,
        experts: GroupedMLP,
        shared_experts: SharedExpertMLP | None = None,
        *,
        tensor_model_parallel_size: int = 1,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        given = dispatcher.num_experts, dispatcher.router_topk, dispatcher.local_experts, dispatcher.etp_size
        fits = (router.config.num_moe_experts, router.topk, experts.num_local_experts, experts.etp_size) == given
        rule = "has E, k, L and etp_size {}, unlike router or experts; build router and experts with the same"
        need(fits, "dispatcher", rule, given)
        first, local = dispatcher.ep_rank * dispatcher.local_experts, dispatcher.local_experts
        experts.held = held_text(list(range(first, first + local)), dispatcher.num_experts)
        experts.held += f", shard {experts.etp_rank} of {experts.etp_size}" if experts.etp_size > 1 else ""
        self.router, self.experts, self.shared_experts = router, experts, shared_experts
        self.dispatcher = dispatcher
        self.tp, self.sequence_parallel = tensor_model_parallel_size, sequence_parallel
        if shared_experts is not None:
            dispatcher.set_shared_experts(shared_experts)

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> tuple[Tensor, None]:
        """Return the layer's output of hidden_states' shape, and None for Megatron-LM's bias.

        Args:
            hidden_states: ``(S, B, H)`` or ``(T, H)``.
            mask: bool, hidden_states' shape without H, True for active tokens. The others count in no capacity and
                no loss; their output is zeros, and their values are not read.

        Raises ArgumentError if a tensor does not fit or for training over tp ranks without sequence_parallel, or an
        error of the dispatcher.
        """
        rule = "is False in training with tp {}; every tp rank must have its own tokens: set it to True"
        need(not self.training or self.tp == 1 or self.sequence_parallel, "sequence_parallel", rule, self.tp)
        need_values(self, hidden_states)  # of the experts too, before anything is sent
        probs, routing_map = self.router(hidden_states, mask)
        phases = self.dispatcher
        tokens, slots, handle = phases.dispatch_preprocess(hidden_states, routing_map, probs, mask)
        rows, counts, row_probs = phases.dispatch_postprocess(*phases.token_dispatch(tokens, slots, handle), handle)
        results, _ = self.experts(rows, counts, row_probs if phases.probs_on == "experts" else None)
        home = phases.token_combine(phases.combine_preprocess(results, handle), handle)
        return phases.combine_postprocess(home, handle), None
