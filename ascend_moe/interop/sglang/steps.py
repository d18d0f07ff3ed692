"""Steps of EPMoE's forward: choose experts, sort rows, scale, multiply, activate, sum."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ascend_moe._tensors import narrow
from ascend_moe.errors import need, need_dims, need_shape, with_typed_errors
from ascend_moe.experts import Activation, npu_grouped_matmul
from ascend_moe.experts.quant import FP8_MAX, scaled
from ascend_moe.permute import sort_by_expert, sum_rows
from ascend_moe.routers import deepseek_v3, npu_moe_gating_top_k, softmax_topk
from ascend_moe.routers.gating import Groups

INDEX_DTYPES = (torch.int32, torch.int64)


@with_typed_errors
def select_experts(
    hidden_states: Tensor,
    router_logits: Tensor,
    top_k: int,
    use_grouped_topk: bool = False,
    renormalize: bool = True,
    topk_group: int | None = None,
    num_expert_group: int | None = None,
    custom_routing_function: Callable[..., tuple[Tensor, Tensor]] | None = None,
    correction_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose K experts for every token by softmax scores, or with a correction bias by sigmoid scores.

    Args:
        hidden_states, router_logits, top_k, use_grouped_topk, renormalize, topk_group, num_expert_group,
            custom_routing_function: as of `ascend_moe.interop.fused_moe.select_experts`.
        correction_bias: ``(E,)``, added to the scores for the choice only; None: softmax scores.

    Returns weights ``(T, K)`` float32, ids ``(T, K)`` int32, the best first. Raises ArgumentError if an argument breaks
    one of these rules. Source: SGLang ``select_experts``.
    """
    if custom_routing_function is not None:
        given = {"gating_output": router_logits, "topk": top_k, "renormalize": renormalize}
        weights, ids = custom_routing_function(hidden_states=hidden_states, **given)
        return weights.float(), narrow("ids of custom_routing_function", ids)
    groups, kept, _ = Groups.of(use_grouped_topk, num_expert_group, topk_group)
    if correction_bias is not None:
        return deepseek_v3(router_logits, correction_bias, top_k, groups, kept, renormalize)
    if groups == 1:
        return softmax_topk(router_logits, top_k, renormalize)
    weights, ids, _ = npu_moe_gating_top_k(router_logits.float(), top_k, k_group=kept, group_count=groups)
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), ids


@with_typed_errors
def run_moe_ep_preproess(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the (token, k) pairs by expert, stably, without reading on the host.

    Args:
        topk_ids: ``(T, K)`` int32 or int64; pairs with negative ids come first. num_experts: E.

    Returns the ids in ascending order, ``(T*K,)``; src2dst ``(T*K,)`` int32: the sorted position (row) of pair
    ``t*K + k``; seg_indptr ``(E + 1,)`` int64: the rows of expert e are ``seg_indptr[e]`` to ``seg_indptr[e + 1] - 1``.
    ``seg_indptr[0]`` is the number of negative ids (SGLang has 0 there, so that expert 0 gets their rows).

    Raises ArgumentError if an argument breaks one of these rules. Source: SGLang ``run_moe_ep_preproess``.
    """
    pairs = sort_by_expert(topk_ids, num_experts)
    return pairs.expert_ids, pairs.places, pairs.bounds


@with_typed_errors
def dynamic_scale(x: Tensor, local_experts: int) -> Tensor:
    """Return the fp8 scale of x, ``max |x| / 448`` or 1 for zeros, once for each local expert: ``(L,)`` float32.

    x is float, of any shape; local_experts: L. Source: SGLang EPMoE, which takes the largest x, not ``|x|``.
    """
    top = x.detach().abs().amax().float() if x.numel() else torch.zeros((), dtype=torch.float32, device=x.device)
    return torch.where(top == 0, 1.0, top / FP8_MAX).expand(local_experts).contiguous()


@with_typed_errors
def pre_reorder(
    input: Tensor,
    gateup_input: Tensor,
    src2dst: Tensor,
    topk_ids: Tensor,
    a1_scales: Tensor | None,
    start_expert_id: int,
    end_expert_id: int,
    topk: int,
    hidden_size: int,
) -> None:
    """Copy each token's row to its local experts' rows, divided by the expert's scale; other rows are not changed.

    Args:
        input: ``(T, H)`` float. gateup_input: ``(T*K, H)`` float or float8_e4m3fn, to write to.
        src2dst: ``(T*K,)`` int32, from `run_moe_ep_preproess`. topk_ids: ``(T, K)`` int32 or int64.
        a1_scales: ``(L,)`` float32; None: 1. Rows are multiplied by 1 / scale in float32.
        start_expert_id, end_expert_id: experts of this rank, both inclusive.
        topk: K. hidden_size: H.

    Raises ArgumentError if an argument breaks one of these rules. Source: SGLang ``pre_reorder_triton_kernel``.
    """
    tokens = topk_ids.shape[0]
    need_shape("input", input, (tokens, hidden_size))
    need_shape("topk_ids", topk_ids, (tokens, topk), dtypes=INDEX_DTYPES)
    need_shape("src2dst", src2dst, (tokens * topk,), dtypes=INDEX_DTYPES)
    need_shape("gateup_input", gateup_input, (tokens * topk, hidden_size))
    ids = topk_ids.reshape(-1)
    pairs = local_rows(ids, start_expert_id, end_expert_id)
    rows = input[pairs // topk]
    scale = None if a1_scales is None else a1_scales[(ids[pairs] - start_expert_id).long()]
    gateup_input[src2dst[pairs].long()] = scaled(rows, scale, gateup_input.dtype)


@with_typed_errors
def silu_and_mul(
    gateup_output: Tensor,
    down_input: Tensor,
    hidden_size: int,
    reorder_topk_ids: Tensor,
    scales: Tensor | None,
    start_expert_id: int,
    end_expert_id: int,
    activation: str | Activation = "silu",
) -> None:
    """Write ``silu(gate) * up`` of the local experts' rows, divided by the expert's scale; other rows are not changed.

    Args:
        gateup_output: ``(M, 2F)`` float, gate then up. down_input: ``(M, F)`` float or float8_e4m3fn, to write to.
        hidden_size: 2F. reorder_topk_ids: ``(M,)`` int32 or int64, the expert of each row.
        scales, start_expert_id, end_expert_id: as a1_scales, start_expert_id, end_expert_id of `pre_reorder`.
        activation: "silu", "gelu" (by tanh), or another gated one of `ascend_moe.experts.activations`.

    Raises ArgumentError if an argument breaks one of these rules. Source: SGLang ``silu_and_mul_triton_kernel``,
    ``gelu_and_mul_triton_kernel``.
    """
    rows = reorder_topk_ids.shape[0]
    need_dims("reorder_topk_ids", reorder_topk_ids, 1, dtypes=INDEX_DTYPES)
    need_shape("gateup_output", gateup_output, (rows, hidden_size))
    need_shape("down_input", down_input, (rows, hidden_size // 2))
    local = local_rows(reorder_topk_ids, start_expert_id, end_expert_id)
    scale = None if scales is None else scales[(reorder_topk_ids[local] - start_expert_id).long()]
    down_input[local] = scaled(activation_of(activation)(gateup_output[local].float()), scale, down_input.dtype)


def activation_of(given: str | Activation) -> Activation:
    """Return the activation that EPMoE has by this name: its "gelu" is the one by tanh."""
    return Activation.of("geglu_tanh" if given == "gelu" else given)


@with_typed_errors
def post_reorder(
    down_output: Tensor,
    output: Tensor,
    src2dst: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    start_expert_id: int,
    end_expert_id: int,
    topk: int,
    hidden_size: int,
) -> None:
    """Write each token's weighted sum of the rows of its local experts; zeros for a token without any.

    Computes in float32, k ascending, product rounded before the addition, one rounding (SGLang adds in output's dtype).

    Args:
        down_output: ``(T*K, H)`` float; other ranks' experts' rows are not read. output: ``(T, H)`` float, to write to.
        src2dst, topk_ids, start_expert_id, end_expert_id, topk, hidden_size: as of `pre_reorder`.
        topk_weights: ``(T, K)`` float.

    Raises ArgumentError if an argument breaks one of these rules. Source: SGLang ``post_reorder_triton_kernel``.
    """
    tokens = topk_ids.shape[0]
    need_shape("topk_ids", topk_ids, (tokens, topk), dtypes=INDEX_DTYPES)
    need_shape("src2dst", src2dst, (tokens * topk,), dtypes=INDEX_DTYPES)
    need_shape("topk_weights", topk_weights, (tokens, topk))
    need_shape("down_output", down_output, (tokens * topk, hidden_size))
    need_shape("output", output, (tokens, hidden_size))
    local = (topk_ids >= start_expert_id) & (topk_ids <= end_expert_id)
    places = src2dst.view(tokens, topk).long().masked_fill(~local, -1)
    output.copy_(sum_rows(down_output, places, topk_weights, torch.float32))


def local_rows(ids: Tensor, start: int, end: int) -> Tensor:
    """Return the positions of the ids in start..end (inclusive); their number is read on the host."""
    return ((ids >= start) & (ids <= end)).nonzero().squeeze(1)


class GroupedGemmRunner(nn.Module):
    """Grouped matrix product: every segment of rows times its expert's weight. Source: SGLang ``GroupedGemmRunner``.

    ``device`` and ``use_flashinfer`` have no effect.
    """

    def __init__(self, device: torch.device | str | None = None, use_flashinfer: bool = False) -> None:
        super().__init__()

    @with_typed_errors
    def forward(
        self,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        batch_size: int,
        weight_column_major: bool = True,
        seg_indptr: Tensor | None = None,
        weight_indices: Tensor | None = None,
        use_fp8_w8a8: bool = False,
        scale_a: Tensor | None = None,
        scale_b: Tensor | None = None,
        block_shape: list[int] | None = None,
    ) -> Tensor:
        """Return ``c[seg] = a[seg] @ b[i].T``, summed in float32, for each segment; other rows of c are not changed.

        Args:
            a: ``(M, K)`` bf16, fp16 or fp32; with use_fp8_w8a8 float8_e4m3fn. b: ``(E, N, K)`` of a's type.
            c: ``(M, N)`` float, to write to; without use_fp8_w8a8 of a's type.
            batch_size: S, number of segments. weight_column_major: must be True.
            seg_indptr: ``(S + 1,)`` int64: segment s has the rows ``seg_indptr[s]`` to ``seg_indptr[s + 1] - 1``
                of a. Read on the host.
            weight_indices: ``(S,)`` int32 or int64, the index i in b for each segment; None: i = s.
            use_fp8_w8a8: multiply by ``scale_a[i] * scale_b[i]``, ``(E,)`` float32; False: both must be None.
                block_shape: must be None: weights have one scale each.

        Returns c. Raises ArgumentError if an argument breaks one of these rules.
        """
        need(weight_column_major, "weight_column_major", "is False; weights are (E, N, K): pass True")
        need(block_shape is None, "block_shape", "is {}; weights have one scale per expert: pass None", block_shape)
        need(seg_indptr is not None, "seg_indptr", "is missing: pass the {} bounds of the segments", batch_size + 1)
        assert seg_indptr is not None
        need_shape("seg_indptr", seg_indptr, (batch_size + 1,), dtypes=INDEX_DTYPES)
        if weight_indices is not None:
            need_shape("weight_indices", weight_indices, (batch_size,), dtypes=INDEX_DTYPES)
        need_shape("c", c, (a.shape[0], b.shape[1]))
        first, last = int(seg_indptr[0]), int(seg_indptr[-1])
        rule = "begins at row {} and ends at row {}; it must ascend within 0..{}, the rows of a"
        need(0 <= first <= last <= a.shape[0], "seg_indptr", rule, first, last, a.shape[0])
        scales = _gemm_scales(use_fp8_w8a8, scale_a, scale_b, b.shape[0])
        indices = torch.arange(batch_size, device=b.device) if weight_indices is None else weight_indices.long()
        rows, counts = a[first:last], seg_indptr.diff().long()
        if scales is None:
            weights = b if weight_indices is None and batch_size == b.shape[0] else b[indices]
            c[first:last] = _matmul(rows, [weights.transpose(1, 2)], counts)
            return c
        chosen = [b[index].float().t() for index in indices.tolist()]
        each = scales[indices].repeat_interleave(counts)
        c[first:last] = (_matmul(rows.float(), chosen, counts) * each[:, None]).to(c.dtype)
        return c


def _matmul(rows: Tensor, weights: list[Tensor], counts: Tensor) -> Tensor:
    return npu_grouped_matmul([rows], weights, group_list=counts, group_type=0, group_list_type=1, split_item=2)[0]


def _gemm_scales(fp8: bool, scale_a: Tensor | None, scale_b: Tensor | None, experts: int) -> Tensor | None:
    """Return the product of both scales of each expert."""
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        rule = "is {} with use_fp8_w8a8={}: pass both scales with True, none with False"
        need((scale is not None) == fp8, name, rule, "given" if scale is not None else "missing", fp8)
        if scale is not None:
            need_shape(name, scale, (experts,))
    return scale_a * scale_b if scale_a is not None and scale_b is not None else None
