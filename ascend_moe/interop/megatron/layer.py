"""Megatron-LM's MoELayer: router, dispatcher, experts and shared expert in one call."""

from __future__ import annotations

from torch import Tensor, nn

from ascend_moe._tensors import need_values
from ascend_moe.errors import need, typed_methods
from ascend_moe.experts.rank_experts import held_text
from ascend_moe.interop.megatron.dispatchers import TokenDispatcher
from ascend_moe.interop.megatron.experts import GroupedMLP
from ascend_moe.interop.megatron.router import TopKRouter
from ascend_moe.interop.megatron.shared_experts import SharedExpertMLP


@typed_methods
class MoELayer(nn.Module):
    """MoE layer of one rank, for its attention output ``(S / cp / tp, B, H)``.

    Args:
        router, dispatcher, experts: of the same E, k and shard.
        shared_experts: None: the layer has none. It runs between the dispatcher's phases.
        tensor_model_parallel_size: tp of attention.
        sequence_parallel: every tp rank has its own share of the sequence. Required in training with tp above 1:
            otherwise the ranks send the same tokens, and their gradients count tp times.

    Raises:
        ArgumentError: forward in training with tp above 1 and without sequence_parallel.

    Source: Megatron-LM ``MoELayer``.
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
        rule = "has E, k, L and etp_size {}; build router and experts with the same"
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

        Raises:
            ArgumentError: a tensor does not fit, or training over tp ranks without sequence_parallel.
            Other errors: the dispatcher's.
        """
        rule = "is False in training with tp {}; every tp rank must have its own tokens: set it"
        need(not self.training or self.tp == 1 or self.sequence_parallel, "sequence_parallel", rule, self.tp)
        need_values(self, hidden_states)  # of the experts too, before anything is sent
        probs, routing_map = self.router(hidden_states, mask)
        phases = self.dispatcher
        tokens, slots, handle = phases.dispatch_preprocess(hidden_states, routing_map, probs, mask)
        rows, counts, row_probs = phases.dispatch_postprocess(*phases.token_dispatch(tokens, slots, handle), handle)
        results, _ = self.experts(rows, counts, row_probs if phases.probs_on == "experts" else None)
        home = phases.token_combine(phases.combine_preprocess(results, handle), handle)
        return phases.combine_postprocess(home, handle), None
