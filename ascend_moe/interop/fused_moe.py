"""vLLM's FusedMoE over aligned blocks, by vLLM's names: every rank has all tokens, all-reduces sum the parts.

`select_experts` chooses the experts. `moe_align_block_size` groups (token, k) pairs into blocks of one expert,
`fused_experts` runs the expert MLP over them, `moe_sum` adds a token's k rows. With data parallelism `naive_multicast`
sends all tokens to every rank before, `all_reduce_dp` and `all_reduce_tp` sum and slice after. With expert
parallelism an expert_map names the experts of this rank. Over dispatch and combine, see `ascend_moe.MoELayer`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ascend_moe.comm import group_of
from ascend_moe.dispatchers.base import ROW_DTYPES
from ascend_moe.errors import need, need_dims, need_dtype, need_one_of, need_shape, with_typed_errors
from ascend_moe.experts import Activation, grouped_mlp
from ascend_moe.interop.vllm.experts import ACTIVATIONS, activation_of, check_experts, is_w8a8, name_of
from ascend_moe.interop.vllm.experts import with_optional_inplace as _with_optional_inplace
from ascend_moe.ops.collectives import gather
from ascend_moe.permute import batched_moe_align_block_size, moe_align_block_size, need_map, need_pairs
from ascend_moe.routers.gating import BY_MAX, BY_TOP2_SUM, SIGMOID, SOFTMAX, SQRT_SOFTPLUS, Groups, gating_top_k
from ascend_moe.routers.replay import taken

__all__ = [
    "all_reduce_dp",
    "all_reduce_tp",
    "batched_moe_align_block_size",
    "fused_experts",
    "moe_align_block_size",
    "moe_sum",
    "naive_multicast",
    "select_experts",
]

_SCORES = {"softmax": SOFTMAX, "sigmoid": SIGMOID, "sqrtsoftplus": SQRT_SOFTPLUS}


@with_typed_errors
def select_experts(
    hidden_states: Tensor,
    router_logits: Tensor,
    top_k: int,
    use_grouped_topk: bool,
    renormalize: bool,
    topk_group: int | None = None,
    num_expert_group: int | None = None,
    custom_routing_function: Callable[..., tuple[Tensor, Tensor]] | None = None,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: Tensor | None = None,
    indices_type: torch.dtype | None = None,
    *,
    ids: Tensor | None = None,
    capture_fn: Callable[[Tensor], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose K experts for every token, and compute their weights from the router's scores.

    Args:
        hidden_states: ``(T, H)``; read by custom_routing_function only.
        router_logits: ``(T, E)`` bf16, fp16 or fp32. top_k: K.
        use_grouped_topk: a token chooses from its best topk_group of num_expert_group groups; both are needed, and
            ignored otherwise. A group's score is its best expert's, with a correction bias the sum of its two best.
        renormalize: divide the K weights by their sum.
        custom_routing_function: called as ``f(hidden_states=, gating_output=router_logits, topk=, renormalize=)``,
            returns weights and ids; the other options apart from indices_type and capture_fn are ignored.
        scoring_func: "softmax", "sigmoid" or "sqrtsoftplus". routed_scaling_factor: multiplies the weights.
        e_score_correction_bias: ``(E,)``, added to the scores for the choice only; None: no bias.
        indices_type: dtype of the returned ids; None: int32.
        ids: ``(T, K)``, experts to use instead of the best (routing replay); -1: no expert, weight 0. None: choose.
        capture_fn: a `RouteCapture` or a function, called with the chosen ids; None: not called.

    Returns weights ``(T, K)`` float32 and ids ``(T, K)``, the best first, or in the order of ``ids``. Raises
    ArgumentError if an argument breaks one of these rules, or ids are passed with custom_routing_function. Source: vLLM
    ``FusedMoE.select_experts``, vllm-ascend ``select_experts``.
    """
    if custom_routing_function is not None:
        need(ids is None, "ids", "are passed with custom_routing_function, which takes none; pass one of them")
        weights, chosen = custom_routing_function(
            hidden_states=hidden_states, gating_output=router_logits, topk=top_k, renormalize=renormalize
        )
    else:
        need_one_of("scoring_func", scoring_func, _SCORES)
        mode = BY_MAX if e_score_correction_bias is None else BY_TOP2_SUM
        groups = Groups.of(use_grouped_topk, num_expert_group, topk_group, mode)
        bias, kind = e_score_correction_bias, _SCORES[scoring_func]
        softmax = kind == SOFTMAX
        weights, chosen, scores = gating_top_k(
            router_logits.float(), top_k, bias, groups, kind, int(renormalize and softmax), routed_scaling_factor,
            1e-20, not renormalize, ids=ids,
        )  # fmt: skip
        if not renormalize and not softmax:  # the operator always divides these
            weights = taken(scores, chosen.long()) * routed_scaling_factor
    chosen = chosen.to(indices_type or torch.int32)
    if capture_fn is not None:
        capture_fn(chosen)
    return weights.float(), chosen


@_with_optional_inplace
@with_typed_errors
def fused_experts(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    inplace: bool = False,
    activation: Any = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: Tensor | None = None,
    quant_config: Any = None,
    *,
    block_size: int = 16,
    ignore_invalid_experts: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Run this rank's experts (MLPs) on the tokens routed to them; return each token's weighted sum of their results.

    Rows are grouped into blocks of one expert (`moe_align_block_size`). A row is rounded to its dtype after w2; its
    product with the weight and the sum over k, ascending, are float32, rounded once, as combine does. Reads sizes and
    the range of expert_map on the host.

    Args:
        hidden_states: ``(T, H)`` bf16, fp16 or fp32.
        w1: ``(L, 2F, H)`` of hidden_states' dtype, gate rows first; L: experts of this rank. w2: ``(L, H, F)``.
        topk_weights: ``(T, K)``, used as float32. topk_ids: ``(T, K)`` int32 or int64, experts 0..E-1; others add 0.
        inplace: write the result into hidden_states; out_dtype must then be None or the same. As in newer releases of
            vLLM, it can also be left out of positional arguments.
        activation: vLLM's name or MoEActivation of a gated one, such as "silu", as in `vllm.experts.Experts.apply`
            ("swigluoai": gate and up rows alternate); or another gated one of `ascend_moe.experts.activations`.
        apply_router_weight_on_input: multiply a token by its weight before w1, rounded to its dtype, instead of the
            expert's result; K must be 1.
        global_num_experts: E; -1: L. Without expert_map it must be L.
        expert_map: ``(E,)`` int32 or int64: the index in w1 of each expert, -1 for experts of other ranks, which add
            nothing, so that the result is this rank's part of the sum. None: all experts are on this rank.
        quant_config: vLLM's FusedMoEQuantConfig, unquantized: only the activation's numbers are used; None: defaults.
        block_size: rows of a block. out_dtype: None: that of hidden_states. float32 for partial sums.
        ignore_invalid_experts: make no blocks for experts that expert_map has as -1; same result, less to sort.

    Returns ``(T, H)``. Raises ArgumentError if an argument breaks one of these rules. Source: vLLM ``fused_experts``.
    """
    experts = _check(hidden_states, w1, w2, topk_weights, topk_ids, global_num_experts, expert_map)
    need(not is_w8a8(check_experts(quant_config)), "quant_config", "has int8 rows: use interop.vllm.make_experts")
    name = name_of(activation)
    act = activation_of(name, quant_config, None) if name in ACTIVATIONS else Activation.of(activation)
    need(act.gated, "activation", "is {!r}, which has no gate; w1 has gate and up: pass a gated activation", activation)
    tokens, topk = topk_ids.shape
    weights = topk_weights.reshape(-1, 1).float()
    dtype = out_dtype or hidden_states.dtype
    rule = "needs out_dtype None or {}; it is {}: pass inplace=False"
    need(not inplace or dtype == hidden_states.dtype, "inplace", rule, hidden_states.dtype, dtype)
    pairs, block_experts, total = moe_align_block_size(
        topk_ids, block_size, experts, expert_map, ignore_invalid_experts=ignore_invalid_experts
    )
    used = int(total) // block_size
    owner = block_experts[:used].long()
    local = (owner >= 0).nonzero().squeeze(1)
    local = local[owner[local].argsort(stable=True)]  # local numbers need not ascend with global ones
    slots = pairs[: used * block_size].view(used, block_size)[local].reshape(-1).long()
    counts = torch.bincount(owner[local], minlength=w1.shape[0]) * block_size
    real = slots < tokens * topk
    rows = torch.where(real[:, None], hidden_states[(slots // topk).clamp(max=tokens - 1)], 0)
    if apply_router_weight_on_input:  # of the chosen rows only: 0 * NaN of other tokens would reach the gradients
        need(topk == 1, "apply_router_weight_on_input", "needs K = 1; topk_ids has K = {}: pass False", topk)
        factors = torch.where(real[:, None], weights[slots.clamp(max=tokens - 1)], 1)
        rows, weights = (rows.float() * factors).to(rows.dtype), torch.ones_like(weights)
    rows = grouped_mlp(rows, w1.transpose(1, 2), w2.transpose(1, 2), counts, activation=act)
    # Pairs of other ranks have no block here: their places stay zero.
    products = torch.zeros(tokens * topk, rows.shape[1], dtype=torch.float32, device=rows.device)
    products[slots[real]] = rows[real].float() * weights[slots[real]]
    out = hidden_states if inplace else hidden_states.new_empty(hidden_states.shape, dtype=dtype)
    return moe_sum(products.view(tokens, topk, hidden_states.shape[1]), out)


def _check(
    x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, experts: int, expert_map: Tensor | None
) -> int:
    """Return E; raise unless the tensors fit."""
    need_dims("hidden_states", x, 2, dtypes=ROW_DTYPES)
    need_pairs(x.shape[0], ids, weights)
    need_dims("w1", w1, 3, dtypes=(x.dtype,))
    fits = w1.shape[0] >= 1 and w1.shape[1] % 2 == 0 and w1.shape[2] == x.shape[1]
    need(fits, "w1", "is {}; it must be (L, 2F, {})", w1.shape, x.shape[1])
    need_shape("w2", w2, (w1.shape[0], x.shape[1], w1.shape[1] // 2), dtypes=(x.dtype,))
    experts = w1.shape[0] if experts == -1 else experts
    if expert_map is None:
        rule = "is {}; without expert_map it must be -1 or the {} experts of w1"
        need(experts == w1.shape[0], "global_num_experts", rule, experts, w1.shape[0])
    else:
        need_map(expert_map, experts, w1.shape[0])
    return experts


@with_typed_errors
def moe_sum(input: Tensor, output: Tensor | None = None) -> Tensor:
    """Return the sum of ``input`` over dimension 1, computed in float32 in ascending order and rounded once.

    Args:
        input: ``(T, K, H)`` bf16, fp16 or fp32.
        output: ``(T, H)`` of any of these dtypes, to write to and return; None: a new tensor of input's dtype.

    Raises ArgumentError if an argument breaks one of these rules. Source: vLLM ``moe_sum``.
    """
    need_dims("input", input, 3, dtypes=ROW_DTYPES)
    tokens, _, hidden = input.shape
    output = input.new_empty(tokens, hidden) if output is None else output
    need_shape("output", output, (tokens, hidden), dtypes=ROW_DTYPES)
    total = torch.zeros(tokens, hidden, dtype=torch.float32, device=input.device)
    for row in input.unbind(1):
        total += row
    return output.copy_(total)


# ---- between data-parallel ranks: all tokens to every rank, and their sums


@with_typed_errors
def naive_multicast(x: Tensor, cu_tokens_across_dp: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the tokens of all data-parallel ranks in rank order, by an all-gather of batches padded to the largest.

    Args:
        x: ``(T, ...)``, this rank's; dtype and other sizes are equal on all ranks.
        cu_tokens_across_dp: ``(W,)`` int32 or int64 on the CPU, equal on all ranks: running sums of the ranks' tokens.
        group: of the W data-parallel ranks; None: the default group.

    Returns ``(tokens of all ranks, ...)``. Raises ArgumentError if an argument breaks one of these rules. Source:
    vLLM's ``naive_multicast``.
    """
    ranks = group_of("group", group)
    need(x.dim() >= 1, "x", "is a scalar; it must be (T, ...)")
    counts = _counts(cu_tokens_across_dp, ranks)
    rank, most = ranks.rank(), max(counts)
    rule = "has {} tokens, but cu_tokens_across_dp {} for rank {}: pass running sums of every rank's tokens"
    need(x.shape[0] == counts[rank], "x", rule, x.shape[0], counts[rank], rank)
    padded = x.new_zeros(most, *x.shape[1:])
    padded[: x.shape[0]] = x
    return torch.cat([rows[:count] for rows, count in zip(gather(padded, ranks), counts, strict=True)])


@with_typed_errors
def all_reduce_dp(partial: Tensor, cu_tokens_across_dp: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum ``partial`` over the data-parallel ranks, in float32, rounded once; return the rows of this rank's tokens.

    Args:
        partial: ``(tokens of all ranks, H)`` bf16, fp16 or fp32, in the order of `naive_multicast`; not changed.
        cu_tokens_across_dp, group: as of `naive_multicast`.

    Returns ``(T, H)`` of partial's dtype. Raises ArgumentError if an argument breaks one of these rules. Source: vLLM's
    FusedMoE forward with data parallelism.
    """
    ranks = group_of("group", group)
    counts = _counts(cu_tokens_across_dp, ranks)
    rule = "is {}; it must have the {} tokens of cu_tokens_across_dp: pass (tokens, H)"
    need(partial.dim() == 2 and partial.shape[0] == sum(counts), "partial", rule, partial.shape, sum(counts))
    first = sum(counts[: ranks.rank()])
    return all_reduce_tp(partial, ranks)[first : first + counts[ranks.rank()]]


@with_typed_errors
def all_reduce_tp(partial: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sum of ``partial`` over the ranks of ``group``, in float32, rounded once; partial is not changed.

    partial has any shape, the same on all ranks; raises ArgumentError unless it is bf16, fp16 or fp32. group: the
    tensor-parallel (or expert-parallel) ranks; None: the default group. Source: vLLM's
    ``tensor_model_parallel_all_reduce``.
    """
    need_dtype("partial", partial, *ROW_DTYPES)
    total = partial.float() if partial.dtype != torch.float32 else partial.clone()
    dist.all_reduce(total, group=group_of("group", group))
    return total.to(partial.dtype)


def _counts(cu_tokens: Tensor, group: dist.ProcessGroup) -> list[int]:
    """Return the tokens of each rank."""
    name = "cu_tokens_across_dp"
    need_shape(name, cu_tokens, (group.size(),), dtypes=(torch.int32, torch.int64))
    ends = cu_tokens.tolist()
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    need(min(counts) >= 0, name, "is {}; need running sums of the ranks' tokens, which never decrease", ends)
    return counts
