"""A MoE layer's experts in one call: dispatch, the MLP of the local experts, combine.

Two interfaces over the same three calls, with bit-identical results: vllm-ascend's ``dispatch_ffn_combine``, and CANN's
``get_symm_buffer_for_mega_moe`` with ``mega_moe``. Tensors on CPU and NPU take one code path. Weights are bf16 (in the
first interface also fp16 and fp32), or int8 with one scale per output channel, or int4; the last two send int8 rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ascend_moe import comm
from ascend_moe.comm.place import Place
from ascend_moe.dispatchers.mc2 import MC2Dispatcher
from ascend_moe.errors import need, need_dtype, need_shape, with_typed_errors
from ascend_moe.experts import Activation
from ascend_moe.layer_ops.agreement import Limit, agree, gather_loads, judge
from ascend_moe.layer_ops.arguments import (
    Experts,
    TensorList,
    Tokens,
    check_quantization,
    check_tokens,
    check_weight_type,
    experts_of,
    is_int4,
    need_beside,
    need_int,
    need_number,
)
from ascend_moe.layer_ops.calls import dispatch, dispatch_any_batches, finish, run_shared
from ascend_moe.ops.npu_communicator import check

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["SymmBuffer", "dispatch_ffn_combine", "get_symm_buffer_for_mega_moe", "mega_moe"]

# ---- vllm-ascend's interface


@with_typed_errors
def dispatch_ffn_combine(
    x: Tensor,
    weight1: TensorList,
    weight2: TensorList,
    expert_idx: Tensor,
    scale1: TensorList | None,
    scale2: TensorList | None,
    bias1: TensorList | None,
    bias2: TensorList | None,
    probs: Tensor,
    group: str,
    max_output_size: int,
    out: Tensor,
    expert_token_nums: Tensor,
    x_active_mask: Tensor | None = None,
    swiglu_limit: float = 1e6,
) -> tuple[Tensor, Tensor]:
    """Route tokens to their experts, run the experts, and write the weighted sums of their rows into ``out``.

    T tokens of H elements, K experts per token, W ranks, L experts per rank (E = L*W), F their inner width.

    Args:
        x: (T, H) bf16, fp16 or fp32. Ranks may have different T, on the CPU.
        weight1: L tensors (H, 2F), gate left and up right, or one (L, H, 2F) in a list; x's dtype or int8; int4: packed
            by eight in int32, (…, H, 2F / 8).
        weight2: L tensors (F, H) or one (L, F, H), weight1's dtype.
        expert_idx: (T, K) int32 in 0..E-1, or -1: not routed.
        scale1, scale2: with int8 weights L tensors (2F,) and (H,), or one (L, 2F) and (L, H): fp32, bf16, or
            int64 whose low 32 bits are an fp32's; with int4 also by group, (G, 2F) and (G, H). Else None, empty or
            zeros.
        bias1, bias2: with int4 weights L tensors (2F,) and (H,), or one of all: fp32, 8 * sum(weight * scale) over the
            rows. Else None, empty or zeros.
        probs: (T, K) fp32, the weight of each expert's row.
        group: name of the EP group: ``ascend_moe.comm_name``, HCCL's, or a LocalCluster's; or as in `comm.group_of`.
        max_output_size: the most rows that a rank may receive, equal on all ranks; 0: no limit. If W*T*min(K, L), the
            largest possible number, is more, the ranks first exchange their counts, which an NPU's host waits for.
        out: (T, H), x's dtype; written.
        expert_token_nums: (L,) int32; written: the rows of each local expert.
        x_active_mask: (T,) or (T, K), bool or int8; an inactive token is not sent and its row of out is zeros.
        swiglu_limit: above 0: clamp the gate at this value before silu, up at plus and minus it. 0: no limit.

    Returns:
        out, expert_token_nums. Meta tensors are returned unchanged.

    Collective. Differentiable like dispatch, `grouped_mlp` and combine.

    Raises:
        ArgumentError: invalid arguments of this rank; nothing was sent.
        RoutingOverflow, ConfigMismatch, InvalidExpertId: on every rank; the next call works.
        Other errors: those of `ascend_moe.npu_moe_distribute_dispatch_v2` and ``_combine_v2``.

    Source: vllm-ascend ``torch.ops._C_ascend.dispatch_ffn_combine``.
    """
    given = {"weight1": weight1, "weight2": weight2, "scale1": scale1, "scale2": scale2, "bias1": bias1, "bias2": bias2}
    experts = experts_of(x, given)
    mask = check_tokens(x, ("expert_idx", expert_idx), ("probs", probs), x_active_mask, experts.hidden)
    need_shape("out", out, tuple(x.shape), dtypes=(x.dtype,))
    need_dtype("expert_token_nums", expert_token_nums, torch.int32)
    rule = "is {}; it must be ({},)"
    need(expert_token_nums.numel() == experts.count, "expert_token_nums", rule, expert_token_nums.shape, experts.count)
    need_beside(x, "out", out)
    need_beside(x, "expert_token_nums", expert_token_nums)
    need_int("max_output_size", max_output_size)
    need(max_output_size >= 0, "max_output_size", "is {}; it must be at least 1, or 0 for no limit", max_output_size)
    need_number("swiglu_limit", swiglu_limit)
    need(swiglu_limit >= 0, "swiglu_limit", "is {}; it must be above 0, or 0 for no limit", swiglu_limit)
    if x.is_meta:
        return out, expert_token_nums
    place = Place.of(group)
    dispatcher = MC2Dispatcher.from_group(place, experts.count * place.world)
    tokens = Tokens(x, expert_idx, probs, mask)
    sent = dispatch_any_batches(dispatcher, tokens, experts, Limit("max_output_size", max_output_size))
    limit = swiglu_limit if swiglu_limit < math.inf else None
    y = finish(dispatcher, sent, tokens, experts, Activation.of("swiglu", limit=limit))
    out.copy_(y)
    expert_token_nums.copy_(sent.expert_token_nums.reshape(expert_token_nums.shape))
    return out, expert_token_nums


# ---- CANN's interface


@dataclass
class SymmBuffer:
    """Sizes and modes of `mega_moe` calls that the ranks agreed on in get_symm_buffer_for_mega_moe, which creates it.

    It has no memory of its own: the calls use the group's windows.

    Attributes:
        group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden, max_recv_token_num,
            dispatch_quant_mode, dispatch_quant_out_dtype, combine_quant_mode, comm_alg: the arguments.
        group_name: the group's name for the ops.
        ep_world_size, ep_rank_id: W, and this rank.
    """

    group: ProcessGroup | str
    num_experts: int
    num_max_tokens_per_rank: int
    num_topk: int
    hidden: int
    intermediate_hidden: int
    max_recv_token_num: int
    dispatch_quant_mode: int
    dispatch_quant_out_dtype: torch.dtype | int | None
    combine_quant_mode: int
    comm_alg: str
    group_name: str
    ep_world_size: int
    ep_rank_id: int

    @property
    def local_experts(self) -> int:
        """L, experts of this rank."""
        return self.num_experts // self.ep_world_size

    def dispatcher(self) -> MC2Dispatcher:
        """Return a new `MC2Dispatcher` for the group, with this comm_alg."""
        place = (self.group_name, self.ep_world_size, self.ep_rank_id)
        return MC2Dispatcher(*place, self.num_experts, comm_alg=self.comm_alg)


@with_typed_errors
def get_symm_buffer_for_mega_moe(
    group: ProcessGroup | str,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    *,
    max_recv_token_num: int = 0,
    dispatch_quant_mode: int = 0,
    dispatch_quant_out_dtype: torch.dtype | int | None = None,
    combine_quant_mode: int = 0,
    comm_alg: str = "",
) -> SymmBuffer:
    """Agree with the other ranks on the sizes of `mega_moe` calls, and check that they fit the group's windows.

    Args:
        group: the EP group of W ranks, as in `comm.group_of`, or its name (also a LocalCluster's).
        num_experts: E, on all ranks, a multiple of W.
        num_max_tokens_per_rank: the most tokens that any rank will pass; ranks may pass fewer.
        num_topk: K. hidden: H.
        intermediate_hidden: F, or 2F: vllm-ascend passes the width of the first product.
        max_recv_token_num: the most rows that a rank may receive; 0: no limit.
        dispatch_quant_mode: 0 for bf16 weights, 2 for int8 and int4 weights.
        dispatch_quant_out_dtype: None or int8, as torch's dtype or torch_npu's number.
        combine_quant_mode: 0; CANN documents no other mode.
        comm_alg: as in `ascend_moe.npu_moe_distribute_dispatch_v2`.

    Collective: the ranks compare their arguments, then dispatch and combine no tokens.

    Raises:
        ConfigMismatch: an argument differs between ranks: on every rank, with ``.field .rank .ours .theirs``.
        WindowTooSmall, ArgumentError: equally on every rank.

    Source: CANN ``cann_ops_transformer.ops.get_symm_buffer_for_mega_moe``.
    """
    sizes: dict[str, Any] = {
        "num_experts": num_experts,
        "num_max_tokens_per_rank": num_max_tokens_per_rank,
        "num_topk": num_topk,
        "hidden": hidden,
        "intermediate_hidden": intermediate_hidden,
        "max_recv_token_num": max_recv_token_num,
        "dispatch_quant_mode": dispatch_quant_mode,
        "dispatch_quant_out_dtype": dispatch_quant_out_dtype,
        "combine_quant_mode": combine_quant_mode,
        "comm_alg": comm_alg,
    }
    place = Place.of(group)
    device = comm.device_of(place.group_ep)
    # Before any local rule, so that errors of one rank are reported on all of them.
    agree(sizes, place, device)
    for field, value in sizes.items():
        if field not in ("dispatch_quant_out_dtype", "comm_alg"):
            need_int(field, value)
    for field in ("num_experts", "num_max_tokens_per_rank", "num_topk", "hidden", "intermediate_hidden"):
        value = sizes[field]
        need(value >= 1, field, "is {}; it must be at least 1", value)
    need(max_recv_token_num >= 0, "max_recv_token_num", "is {}; it must be at least 0", max_recv_token_num)
    check_quantization(dispatch_quant_mode, dispatch_quant_out_dtype, combine_quant_mode)
    sizes |= {"group_name": place.group_ep, "ep_world_size": place.world, "ep_rank_id": place.rank}
    buffer = SymmBuffer(group, **sizes)
    _try(buffer, device)
    return buffer


@with_typed_errors
def mega_moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    l1_weights: TensorList,
    l2_weights: TensorList,
    sym_buffer: SymmBuffer,
    *,
    l1_weights_sf: TensorList | None = None,
    l2_weights_sf: TensorList | None = None,
    l1_bias: TensorList | None = None,
    l2_bias: TensorList | None = None,
    x_active_mask: Tensor | None = None,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    beta: float | None = None,
    linear_beta: float | None = None,
    weight1_type: torch.dtype | int | None = None,
    weight2_type: torch.dtype | int | None = None,
    shared_l1_weights: TensorList | None = None,
    shared_l2_weights: TensorList | None = None,
    shared_l1_weights_sf: TensorList | None = None,
    shared_l2_weights_sf: TensorList | None = None,
    shared_l1_bias: TensorList | None = None,
    shared_l2_bias: TensorList | None = None,
) -> tuple[Tensor, Tensor]:
    """Route tokens to their experts, run the experts, and return the weighted sums of their rows.

    T tokens of H elements, K experts per token, L experts per rank, F their inner width.

    Args:
        x: (T, H) bf16, T at most the buffer's num_max_tokens_per_rank.
        topk_ids: (T, K) int32, or -1: not routed. topk_weights: (T, K) fp32 or bf16.
        l1_weights, l2_weights: L tensors (H, 2F) and (F, H), gate left and up right, or one tensor of all
            experts in a list; bf16, or int8 or int4 if the buffer's dispatch_quant_mode is 2. int4 are packed by eight
            in int32, or, with weight1_type and weight2_type, by two in int8, as in vllm-ascend.
        sym_buffer: from get_symm_buffer_for_mega_moe.
        l1_weights_sf, l2_weights_sf: with int8 weights L tensors (2F,) and (H,), or one of all experts: fp32,
            bf16, or int64 or uint64 whose low 32 bits are an fp32's; with int4 also by group.
        l1_bias, l2_bias: as bias1 and bias2 in `dispatch_ffn_combine`.
        x_active_mask: (T,) or (T, K), bool or int8; an inactive token is not sent and its result is zeros.
        activation: "swiglu", or another gated one of `ascend_moe.experts.activations`; "situglu" is vllm-ascend's.
        activation_clamp: the activation's limit; "swiglu" clamps the gate at this value before silu, up at plus and
            minus it. None: no limit, or the activation's default.
        beta, linear_beta: numbers of "situglu"; None: 1 and 0.
        weight1_type, weight2_type: None, or the weights' dtype as torch.dtype or torch_npu's number; 285: int4.
        shared_l1_weights, shared_l2_weights: shared experts of all tokens of this rank, in the form of l1_weights and
            l2_weights, any number of them; bf16, int8 with shared_l1_weights_sf and shared_l2_weights_sf, or int4 in
            int32 with shared_l1_bias and shared_l2_bias too.
            They run on this rank, and combine adds the sum of their rows with weight 1.
        shared_l1_bias, shared_l2_bias: as l1_bias and l2_bias.

    Returns:
        y (T, H) bf16; expert_token_nums (L,) int32, the rows of each local expert.

    Collective. Differentiable like dispatch, `grouped_mlp` and combine.

    Raises:
        ArgumentError: invalid arguments of this rank; nothing was sent.
        RoutingOverflow: more rows than max_recv_token_num for a rank: on every rank; the next call works.
        Other errors: those of `ascend_moe.npu_moe_distribute_dispatch_v2` and ``_combine_v2``.

    Source: CANN ``cann_ops_transformer.ops.mega_moe``.
    """
    rule = "is a {}; it must come from get_symm_buffer_for_mega_moe"
    need(isinstance(sym_buffer, SymmBuffer), "sym_buffer", rule, type(sym_buffer).__name__)
    need_dtype("x", x, torch.bfloat16)
    for name, kind, weights in (("weight1_type", weight1_type, l1_weights), ("weight2_type", weight2_type, l2_weights)):
        check_weight_type(name, kind, weights)
    given = {
        "l1_weights": l1_weights, "l2_weights": l2_weights, "l1_weights_sf": l1_weights_sf,
        "l2_weights_sf": l2_weights_sf, "l1_bias": l1_bias, "l2_bias": l2_bias,
    }  # fmt: skip
    rule = "is {}, weight1_type {}; both must be int4, or none"
    int4 = is_int4(weight1_type)
    need(is_int4(weight2_type) == int4, "weight2_type", rule, weight2_type, weight1_type)
    experts = experts_of(x, given, int4)
    shared_given = {
        "shared_l1_weights": shared_l1_weights, "shared_l2_weights": shared_l2_weights,
        "shared_l1_weights_sf": shared_l1_weights_sf, "shared_l2_weights_sf": shared_l2_weights_sf,
        "shared_l1_bias": shared_l1_bias, "shared_l2_bias": shared_l2_bias,
    }  # fmt: skip
    shared = None if all(value is None for value in shared_given.values()) else experts_of(x, shared_given)
    act = _activation_of(activation, activation_clamp, beta, linear_beta)
    need_dtype("topk_weights", topk_weights, torch.float32, torch.bfloat16)
    topk_weights = topk_weights.float()
    mask = check_tokens(x, ("topk_ids", topk_ids), ("topk_weights", topk_weights), x_active_mask, experts.hidden)
    _check_fits_buffer(sym_buffer, x, topk_ids, experts)
    if x.is_meta:
        return torch.empty_like(x), x.new_empty(experts.count, dtype=torch.int32)
    world, most = sym_buffer.ep_world_size, sym_buffer.num_max_tokens_per_rank
    dispatcher, tokens = sym_buffer.dispatcher(), Tokens(x, topk_ids, topk_weights, mask)
    limit = Limit("max_recv_token_num", sym_buffer.max_recv_token_num)
    if limit.may_be_reached(world * most, tokens, experts):
        judge(gather_loads(dispatcher, tokens, experts, limit), limit, rank=dispatcher.rank)
    shared_rows = None if shared is None else run_shared(tokens, shared, act)
    sent = dispatch(dispatcher, tokens, experts, world * most)
    y = finish(dispatcher, sent, tokens, experts, act, shared_rows)
    return y, sent.expert_token_nums.to(torch.int32)


def _activation_of(name: str, clamp: float | None, beta: float | None, linear_beta: float | None) -> Activation:
    if clamp is not None:
        need_number("activation_clamp", clamp)
        need(clamp > 0, "activation_clamp", "is {}; it must be above 0, or None", clamp)
    limit = clamp if clamp is not None and clamp < math.inf else None
    act = Activation.of(name, limit=limit, beta=beta, linear_beta=linear_beta)
    need(act.gated, "activation", "is {!r}, which has no gate; l1_weights contain gate and up: pass a gated one", name)
    return act


def _check_fits_buffer(buffer: SymmBuffer, x: Tensor, ids: Tensor, experts: Experts) -> None:
    """Check a call against the buffer, whose quantization vllm-ascend sets before each call."""
    check_quantization(buffer.dispatch_quant_mode, buffer.dispatch_quant_out_dtype, buffer.combine_quant_mode)
    most, topk, quant = buffer.num_max_tokens_per_rank, buffer.num_topk, buffer.dispatch_quant_mode
    rule = "has {} tokens; the buffer is for {} at most: create one with a larger num_max_tokens_per_rank"
    need(len(x) <= most, "x", rule, len(x), most)
    need(experts.hidden == buffer.hidden, "x", "has H {}; the buffer is for hidden {}", experts.hidden, buffer.hidden)
    need(ids.shape[1] == topk, "topk_ids", "has K {}; the buffer is for num_topk {}", ids.shape[1], topk)
    rule = "has {} experts; the buffer is for {} a rank: create one for this number"
    need(experts.count == buffer.local_experts, "l1_weights", rule, experts.count, buffer.local_experts)
    inner = buffer.intermediate_hidden
    rule = "has width {}; the buffer's intermediate_hidden is {}, which must be this or half of it"
    need(experts.double in (inner, 2 * inner), "l1_weights", rule, experts.double, inner)
    rule = "has quantization {} by its dtype; the buffer's dispatch_quant_mode is {}: make them equal"
    need(experts.quant_mode == quant, "l1_weights", rule, experts.quant_mode, quant)


def _try(buffer: SymmBuffer, device: torch.device) -> None:
    """Run dispatch and combine without tokens, to check the ops' rules for the sizes of later calls."""
    quant = buffer.dispatch_quant_mode
    world, most = buffer.ep_world_size, buffer.num_max_tokens_per_rank
    dispatcher = buffer.dispatcher()
    x = torch.empty(0, buffer.hidden, dtype=torch.bfloat16, device=device)
    ids = torch.empty(0, buffer.num_topk, dtype=torch.int32, device=device)
    with torch.no_grad():
        sent = dispatcher.dispatch(x, ids, quant_mode=quant, global_bs=world * most)
        rows = torch.empty_like(sent.expand_x, dtype=x.dtype)
        dispatcher.combine(rows, sent, torch.empty(ids.shape, dtype=torch.float32, device=device))
    if device.type != "cpu":
        check(buffer.group_name)
