"""SGLang's EPMoE: whole experts on every rank, replicated tokens, partial sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ascend_moe._tensors import need_values
from ascend_moe.comm import group_of
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.errors import need, need_dims, need_one_of, need_shape, with_typed_errors
from ascend_moe.experts import Activation
from ascend_moe.experts.quant import FP8, scaled
from ascend_moe.experts.weights import plain
from ascend_moe.interop.sglang import steps
from ascend_moe.interop.sglang.steps import GroupedGemmRunner, activation_of
from ascend_moe.interop.sglang.weights import (
    ExpertWeights,
    Fp8EPMoEMethod,
    UnquantizedEPMoEMethod,
    make_expert_params_mapping,
)
from ascend_moe.ops.collectives import gather
from ascend_moe.ops.whole import WholeCall
from ascend_moe.permute import segment_of_rows
from ascend_moe.placement import ExpertPlacement


class EPMoE(ExpertWeights):
    """MoE layer for ranks that all have the same tokens, each with the whole weights of its own E / W experts.

    Parameters of a rank: w13_weight ``(L, 2F, H)`` (gate rows first), w2_weight ``(L, H, F)``; with fp8 also
    w13_weight_scale ``(L, 2)`` and w2_weight_scale ``(L,)``, and with static activations w13_input_scale and
    w2_input_scale ``(L,)``, all float32. Every parameter has SGLang's ``weight_loader``.

    Args:
        num_experts: E, a multiple of the ranks. top_k: K. hidden_size: H. intermediate_size: F.
        params_dtype: bf16, fp16 or fp32; None: torch's default. custom_routing_function: as for `select_experts`.
        renormalize, use_grouped_topk, num_expert_group, topk_group, correction_bias: as for `select_experts`.
        quant_config: None: unquantized. fp8: what `Fp8Config.of` accepts; after loading call this layer's or
            ``quant_method``'s ``process_weights_after_loading``, as SGLang's loader does.
        tp_size: W; None: the size of group. tp_rank: this rank; None: that of group. prefix: has no effect.
        activation: "silu", "gelu" (by tanh), or another gated one of `ascend_moe.experts.activations`.
        routed_scaling_factor: has no effect, as SGLang's model multiplies the output; num_fused_shared_experts: 0.
        reduce: what forward returns. "none": this rank's part of the sum. "all_reduce": the sum over the ranks, in
            float32, rounded once. "mc2": the same sum, by dispatch and combine: each rank sends its share of the
            tokens, and gathers the results of all.
        group: the W ranks; None: the default group if there is one, else this rank alone.
        group_ep: with "mc2", the group's name for dispatch and combine; None: ``ascend_moe.comm_name(group)``.

    Raises ArgumentError if an argument breaks one of these rules. Source: SGLang ``EPMoE``.
    """

    make_expert_params_mapping = staticmethod(make_expert_params_mapping)

    @with_typed_errors
    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype | None = None,
        renormalize: bool = True,
        use_grouped_topk: bool = False,
        num_expert_group: int | None = None,
        topk_group: int | None = None,
        quant_config: Any = None,
        tp_size: int | None = None,
        prefix: str = "",
        correction_bias: Tensor | None = None,
        custom_routing_function: Any = None,
        activation: str | Activation = "silu",
        routed_scaling_factor: float | None = None,
        *,
        num_fused_shared_experts: int = 0,
        reduce: str = "none",
        group: dist.ProcessGroup | None = None,
        group_ep: str | None = None,
        tp_rank: int | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation_of(activation)
        need(self.activation.gated, "activation", "is {!r}, which has no gate: pass a gated one", activation)
        rule = "is {}, but shared experts belong to the model here: pass 0"
        need(num_fused_shared_experts == 0, "num_fused_shared_experts", rule, num_fused_shared_experts)
        need_one_of("reduce", reduce, ("none", "all_reduce", "mc2"))
        alone = group is None and not (dist.is_available() and dist.is_initialized())
        self.group = None if alone else group_of("group", group)
        rule = "is missing; reduce {!r} needs a process group: pass one"
        need(reduce == "none" or self.group is not None, "group", rule, reduce)
        size, rank = (1, 0) if self.group is None else (self.group.size(), self.group.rank())
        self.tp_size = size if tp_size is None else tp_size
        self.tp_rank = rank if tp_rank is None else tp_rank
        fits = reduce == "none" or (self.tp_size, self.tp_rank) == (size, rank)
        rule = "is {} and tp_rank {}; group has {} and {}: leave both out"
        need(fits, "tp_size", rule, self.tp_size, self.tp_rank, size, rank)
        self.placement = ExpertPlacement.contiguous(num_experts, self.tp_size)
        self.start_expert_id, self.end_expert_id = self.placement.range_of(self.tp_rank)
        self.num_experts, self.num_experts_per_partition = num_experts, self.placement.local_experts
        self.top_k, self.hidden_size, self.intermediate_size = top_k, hidden_size, intermediate_size
        self.renormalize, self.use_grouped_topk = renormalize, use_grouped_topk
        self.num_expert_group, self.topk_group = num_expert_group, topk_group
        self.correction_bias, self.custom_routing_function = correction_bias, custom_routing_function
        self.params_dtype, self.reduce = params_dtype or torch.get_default_dtype(), reduce
        self._dispatcher: MC2Dispatcher | None = None
        if reduce == "mc2" and group_ep is not None:
            self._dispatcher = MC2Dispatcher(group_ep, size, rank, num_experts)
        elif reduce == "mc2":
            self._dispatcher = MC2Dispatcher.from_group(self.group, num_experts)
        self.quant_method = UnquantizedEPMoEMethod() if quant_config is None else Fp8EPMoEMethod(quant_config)
        config = self.quant_method.quant_config
        self.use_fp8_w8a8 = config is not None
        self.activation_scheme = None if config is None else config.activation_scheme
        self._make_parameters(config)
        self.grouped_gemm_runner = GroupedGemmRunner()

    @with_typed_errors
    @torch.no_grad()
    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        """Return the layer's output ``(T, H)`` in params_dtype, or with reduce "none" this rank's part of it.

        hidden_states ``(T, H)`` in params_dtype and router_logits ``(T, E)`` are the same on all ranks; T may be 0. Has
        no gradient. Raises ArgumentError for invalid arguments, or before process_weights_after_loading with fp8; with
        reduce "mc2" also the errors of dispatch and combine.
        """
        need_dims("hidden_states", hidden_states, 2, dtypes=(self.params_dtype,))
        need_shape("hidden_states", hidden_states, (hidden_states.shape[0], self.hidden_size))
        need_shape("router_logits", router_logits, (hidden_states.shape[0], self.num_experts))
        need(self._ready, "quant_config", "is set: call process_weights_after_loading before forward")
        need_values(self, hidden_states)
        if self.use_fp8_w8a8:
            self._watch.check(self)
        if torch.compiler.is_compiling():
            return _in_one(self, hidden_states, router_logits)
        return self._output(hidden_states, router_logits)

    def _output(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        groups = (self.topk_group, self.num_expert_group, self.custom_routing_function, self.correction_bias)
        choice = (self.top_k, self.use_grouped_topk, self.renormalize, *groups)
        weights, ids = steps.select_experts(hidden_states, router_logits, *choice)
        scale = None
        if self.use_fp8_w8a8:
            # Of all tokens, so that each reduce quantizes by the same scale.
            local = self.num_experts_per_partition
            scale = self.w13_input_scale if self._static else steps.dynamic_scale(hidden_states, local)
        if self._dispatcher is not None:
            return self._dispatched(self._dispatcher, hidden_states, weights, ids, scale)
        return self._partial(hidden_states, weights, ids, scale)

    def _partial(self, x: Tensor, weights: Tensor, ids: Tensor, scale: Tensor | None) -> Tensor:
        sizes = (self.start_expert_id, self.end_expert_id, self.top_k, self.hidden_size)
        sorted_ids, src2dst, segments = steps.run_moe_ep_preproess(ids, self.num_experts)
        rows = x.new_empty(ids.numel(), self.hidden_size, dtype=FP8 if self.use_fp8_w8a8 else x.dtype)
        steps.pre_reorder(x, rows, src2dst, ids, scale, *sizes)
        rows = self._run_experts(rows, sorted_ids, segments[self.start_expert_id : self.end_expert_id + 2], scale)
        total = x.new_empty(x.shape, dtype=x.dtype if self.reduce == "none" else torch.float32)
        steps.post_reorder(rows, total, src2dst, ids, weights, *sizes)
        if self.reduce == "all_reduce":
            dist.all_reduce(total, group=self.group)
        return total.to(x.dtype)

    def _run_experts(self, rows: Tensor, row_experts: Tensor, segments: Tensor, scale: Tensor | None) -> Tensor:
        """Return the MLP of the segments' rows (L + 1 bounds); other rows are undefined."""
        fp8, local = self.use_fp8_w8a8, self.num_experts_per_partition
        options: dict[str, Any] = {"seg_indptr": segments, "use_fp8_w8a8": fp8}
        scales = {"scale_a": scale, "scale_b": self.w13_weight_scale} if fp8 else {}
        gate_up = rows.new_empty(len(rows), 2 * self.intermediate_size, dtype=self.params_dtype)
        self.grouped_gemm_runner(rows, plain(self.w13_weight), gate_up, local, **options, **scales)
        scale = self._hidden_scale(gate_up, row_experts) if fp8 else None
        hidden = rows.new_empty(len(rows), self.intermediate_size, dtype=FP8 if fp8 else self.params_dtype)
        given = (row_experts, scale, self.start_expert_id, self.end_expert_id, self.activation)
        steps.silu_and_mul(gate_up, hidden, 2 * self.intermediate_size, *given)
        scales = {"scale_a": scale, "scale_b": self.w2_weight_scale} if fp8 else {}
        out = rows.new_empty(len(rows), self.hidden_size, dtype=self.params_dtype)
        self.grouped_gemm_runner(hidden, plain(self.w2_weight), out, local, **options, **scales)
        return out

    def _hidden_scale(self, gate_up: Tensor, row_experts: Tensor) -> Tensor:
        """Return the fp8 scales of the down product's input by local expert."""
        if self._static:
            return self.w2_input_scale
        own = steps.local_rows(row_experts, self.start_expert_id, self.end_expert_id)
        return steps.dynamic_scale(self.activation(gate_up[own].float()), self.num_experts_per_partition)

    def _dispatched(
        self, dispatcher: MC2Dispatcher, x: Tensor, weights: Tensor, ids: Tensor, scale: Tensor | None
    ) -> Tensor:
        share = -(-len(x) // self.tp_size)
        mine = slice(self.tp_rank * share, (self.tp_rank + 1) * share)
        sent = dispatcher.dispatch(x[mine], ids[mine], global_bs=share * self.tp_size)
        bounds = torch.cat([sent.expert_token_nums.new_zeros(1), sent.expert_token_nums.cumsum(0)])
        local = segment_of_rows(bounds[1:], len(sent.expand_x))
        rows = sent.expand_x
        if scale is not None:
            # Rows after the last expert's are undefined, and so are their codes.
            rows = scaled(rows, scale[local.clamp(max=self.num_experts_per_partition - 1)], FP8)
        rows = self._run_experts(rows, local + self.start_expert_id, bounds, scale)
        out = x.new_zeros(share, self.hidden_size)
        out[: len(x[mine])] = dispatcher.combine(rows, sent, weights[mine])
        assert self.group is not None
        return gather(out, self.group).view(-1, self.hidden_size)[: len(x)]


_in_one = WholeCall("ep_moe", "Tensor hidden_states, Tensor router_logits", EPMoE._output)
