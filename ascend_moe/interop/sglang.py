"""SGLang's EPMoE with its own names: whole experts on every rank, replicated tokens, partial sums.

The steps of its forward, each a function: `select_experts`, `run_moe_ep_preproess`, `pre_reorder`,
`GroupedGemmRunner`, `silu_and_mul`, `post_reorder`. `EPMoE` is the layer: it returns its rank's part of the sum, or
the sum itself, by an all-reduce or by dispatch and combine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ascend_moe._narrow import narrow
from ascend_moe.comm import group_of
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.errors import need, need_dims, need_dtype, need_one_of, need_shape, with_typed_errors
from ascend_moe.experts import npu_grouped_matmul, npu_swiglu
from ascend_moe.experts.weights import FLOATS, Codes, copied_beside, fit_state_dict, keep_codes, without_casts
from ascend_moe.ops.collectives import gather
from ascend_moe.ops.whole import WholeCall, WholeLayer
from ascend_moe.permute import sort_by_expert, sum_rows
from ascend_moe.placement import ExpertPlacement
from ascend_moe.routing import deepseek_v3, npu_moe_gating_top_k, softmax_topk

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "EPMoE",
    "ExpertPlacement",
    "Fp8Config",
    "GroupedGemmRunner",
    "dynamic_scale",
    "make_expert_params_mapping",
    "post_reorder",
    "pre_reorder",
    "run_moe_ep_preproess",
    "select_experts",
    "silu_and_mul",
]

FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_INDEX_DTYPES = (torch.int32, torch.int64)
_SHARDS = ("w1", "w2", "w3")  # gate, down, up
_WEIGHTS = ("w13_weight", "w2_weight")


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
    """Choose experts: softmax scores, or with a correction bias sigmoid scores; on request from the best groups only.

    Args:
        hidden_states: ``(T, H)``; for custom_routing_function only.
        router_logits: ``(T, E)`` bf16, fp16 or fp32.
        top_k: K.
        use_grouped_topk: a token chooses from its best topk_group of num_expert_group groups; both are needed. A
            group counts by its best expert, with a correction bias by the sum of its two best.
        renormalize: divide the K weights by their sum.
        custom_routing_function: instead of all this: called with hidden_states, router_logits, top_k, renormalize.
        correction_bias: ``(E,)``, added to the scores for the choice only.

    Returns:
        weights ``(T, K)`` float32, ids ``(T, K)`` int32, the best first.

    Raises:
        ArgumentError: a rule above is broken.

    Source: SGLang ``select_experts``.
    """
    if custom_routing_function is not None:
        given = custom_routing_function(
            hidden_states=hidden_states, gating_output=router_logits, topk=top_k, renormalize=renormalize
        )
        return given[0].float(), narrow("ids of custom_routing_function", given[1])
    groups, kept = 1, 1
    if use_grouped_topk:
        rule = "is {} and topk_group {}; use_grouped_topk needs both"
        fits = num_expert_group is not None and topk_group is not None
        need(fits, "num_expert_group", rule, num_expert_group, topk_group)
        groups, kept = int(num_expert_group or 0), int(topk_group or 0)
    if correction_bias is not None:
        return deepseek_v3(router_logits, correction_bias, top_k, groups, kept, renormalize)
    if groups == 1:
        return softmax_topk(router_logits, top_k, renormalize)
    weights, ids, _ = npu_moe_gating_top_k(router_logits.float(), top_k, k_group=kept, group_count=groups)
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), ids


@with_typed_errors
def run_moe_ep_preproess(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where the row of each (token, k) pair stands when rows are sorted by expert. Stable; nothing read on the host.

    Args:
        topk_ids: ``(T, K)`` int32 or int64. Rows of negative ids stand before all experts.
        num_experts: E.

    Returns:
        the ids in ascending order, ``(T*K,)``; src2dst ``(T*K,)`` int32, the row of pair ``t*K + k``;
        seg_indptr ``(E + 1,)`` int64: the rows of expert e are ``seg_indptr[e]`` to ``seg_indptr[e + 1] - 1``.
        ``seg_indptr[0]`` is the number of negative ids (SGLang has 0 there, which gives their rows to expert 0).

    Raises:
        ArgumentError: a rule above is broken.

    Source: SGLang ``run_moe_ep_preproess``.
    """
    pairs = sort_by_expert(topk_ids, num_experts)
    return pairs.expert_ids, pairs.places, pairs.bounds


@with_typed_errors
def dynamic_scale(x: Tensor, local_experts: int) -> Tensor:
    """``max |x| / 448``, once for each local expert; 1 where x has no value but 0.

    Args:
        x: float, any shape. local_experts: L.

    Returns:
        ``(L,)`` float32.

    Source: SGLang EPMoE, which takes the largest value, not the largest magnitude.
    """
    top = x.detach().abs().amax().float() if x.numel() else torch.zeros((), dtype=torch.float32, device=x.device)
    return torch.where(top == 0, 1.0, top / _FP8_MAX).expand(local_experts).contiguous()


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
    """Copy each token's row to the places of its local experts, divided by their scale. Other rows stay as they are.

    Args:
        input: ``(T, H)`` float.
        gateup_input: ``(T*K, H)`` float or float8_e4m3fn, is written.
        src2dst: ``(T*K,)`` int32, of `run_moe_ep_preproess`.
        topk_ids: ``(T, K)`` int32 or int64.
        a1_scales: ``(L,)`` float32; None: 1. Multiplied by 1 / scale in float32.
        start_expert_id, end_expert_id: experts of this rank, both inclusive.
        topk: K. hidden_size: H.

    Raises:
        ArgumentError: a rule above is broken.

    Source: SGLang ``pre_reorder_triton_kernel``.
    """
    tokens = topk_ids.shape[0]
    need_shape("input", input, (tokens, hidden_size))
    need_shape("topk_ids", topk_ids, (tokens, topk), dtypes=_INDEX_DTYPES)
    need_shape("src2dst", src2dst, (tokens * topk,), dtypes=_INDEX_DTYPES)
    need_shape("gateup_input", gateup_input, (tokens * topk, hidden_size))
    ids = topk_ids.reshape(-1)
    pairs = _local(ids, start_expert_id, end_expert_id)
    rows = input[pairs // topk]
    scale = None if a1_scales is None else a1_scales[(ids[pairs] - start_expert_id).long()]
    gateup_input[src2dst[pairs].long()] = _scaled(rows, scale, gateup_input.dtype)


@with_typed_errors
def silu_and_mul(
    gateup_output: Tensor,
    down_input: Tensor,
    hidden_size: int,
    reorder_topk_ids: Tensor,
    scales: Tensor | None,
    start_expert_id: int,
    end_expert_id: int,
) -> None:
    """``silu(first half) * second half`` of this rank's rows, divided by their scale. Other rows stay as they are.

    Args:
        gateup_output: ``(M, 2F)`` float. down_input: ``(M, F)`` float or float8_e4m3fn, is written.
        hidden_size: 2F.
        reorder_topk_ids: ``(M,)`` int32 or int64, the expert of each row.
        scales: ``(L,)`` float32; None: 1. Multiplied by 1 / scale in float32.
        start_expert_id, end_expert_id: experts of this rank, both inclusive.

    Raises:
        ArgumentError: a rule above is broken.

    Source: SGLang ``silu_and_mul_triton_kernel``.
    """
    rows = reorder_topk_ids.shape[0]
    need_dims("reorder_topk_ids", reorder_topk_ids, 1, dtypes=_INDEX_DTYPES)
    need_shape("gateup_output", gateup_output, (rows, hidden_size))
    need_shape("down_input", down_input, (rows, hidden_size // 2))
    local = _local(reorder_topk_ids, start_expert_id, end_expert_id)
    scale = None if scales is None else scales[(reorder_topk_ids[local] - start_expert_id).long()]
    down_input[local] = _scaled(npu_swiglu(gateup_output[local].float()), scale, down_input.dtype)


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
    """For each token the weighted sum of the rows of its local experts; zeros for a token without any.

    float32 inside, k ascending, multiply then add, one rounding (SGLang adds in output's type).

    Args:
        down_output: ``(T*K, H)`` float; rows of other ranks' experts are not looked at.
        output: ``(T, H)`` float, is written.
        src2dst, topk_ids, start_expert_id, end_expert_id, topk, hidden_size: as `pre_reorder`.
        topk_weights: ``(T, K)`` float.

    Raises:
        ArgumentError: a rule above is broken.

    Source: SGLang ``post_reorder_triton_kernel``.
    """
    tokens = topk_ids.shape[0]
    need_shape("topk_ids", topk_ids, (tokens, topk), dtypes=_INDEX_DTYPES)
    need_shape("src2dst", src2dst, (tokens * topk,), dtypes=_INDEX_DTYPES)
    need_shape("topk_weights", topk_weights, (tokens, topk))
    need_shape("down_output", down_output, (tokens * topk, hidden_size))
    need_shape("output", output, (tokens, hidden_size))
    local = (topk_ids >= start_expert_id) & (topk_ids <= end_expert_id)
    places = src2dst.view(tokens, topk).long().masked_fill(~local, -1)
    output.copy_(sum_rows(down_output, places, topk_weights, torch.float32))


def _local(ids: Tensor, start: int, end: int) -> Tensor:
    """Where ids are of this rank. Read on the host."""
    return ((ids >= start) & (ids <= end)).nonzero().squeeze(1)


def _scaled(rows: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``rows * (1 / scale)`` in float32, rounded to dtype; fp8 ends at +-448."""
    value = rows.float() if scale is None else rows.float() * (1.0 / scale)[:, None]
    return value.clamp(-_FP8_MAX, _FP8_MAX).to(dtype) if dtype == FP8 else value.to(dtype)


class GroupedGemmRunner(nn.Module):
    """Every segment's rows times its expert's weight.

    Args:
        device, use_flashinfer: have no effect.

    Source: SGLang ``GroupedGemmRunner``.
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
        """``c[seg] = a[seg] @ b[i].T``, summed in float32, for each segment; other rows of c stay as they are.

        Args:
            a: ``(M, K)`` bf16, fp16 or fp32; with use_fp8_w8a8 float8_e4m3fn.
            b: ``(E, N, K)`` of a's type.
            c: ``(M, N)`` float, is written; without use_fp8_w8a8 of a's type.
            batch_size: S, segments.
            weight_column_major: must be True.
            seg_indptr: ``(S + 1,)`` int64: segment s has the rows ``seg_indptr[s]`` to ``seg_indptr[s + 1] - 1``
                of a. Read on the host.
            weight_indices: ``(S,)`` int, the weight of each segment; None: segment s has weight s.
            use_fp8_w8a8: multiply by ``scale_a[i] * scale_b[i]``.
            scale_a, scale_b: ``(E,)`` float32, with use_fp8_w8a8 only.
            block_shape: must be None: weights have one scale each.

        Returns:
            c.

        Raises:
            ArgumentError: a rule above is broken.
        """
        need(weight_column_major, "weight_column_major", "is False; weights are (E, N, K)")
        need(block_shape is None, "block_shape", "is {}; weights have one scale an expert, pass None", block_shape)
        need(seg_indptr is not None, "seg_indptr", "is missing")
        assert seg_indptr is not None
        need_shape("seg_indptr", seg_indptr, (batch_size + 1,), dtypes=_INDEX_DTYPES)
        if weight_indices is not None:
            need_shape("weight_indices", weight_indices, (batch_size,), dtypes=_INDEX_DTYPES)
        need_shape("c", c, (a.shape[0], b.shape[1]))
        first, last = int(seg_indptr[0]), int(seg_indptr[-1])
        rule = "covers rows {} to {} of {}"
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
    """The product of both scales of each expert."""
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        need((scale is not None) == fp8, name, "is {}; goes with fp8", "given" if scale is not None else "missing")
        if scale is not None:
            need_shape(name, scale, (experts,))
    return scale_a * scale_b if scale_a is not None and scale_b is not None else None


@dataclass(frozen=True)
class Fp8Config:
    """fp8 (e4m3) weights and activations, as SGLang's class of this name; that is taken as well.

    Attributes:
        is_checkpoint_fp8_serialized: weights and their scales are loaded as fp8; False: they are quantized after
            loading. None: what is loaded tells, by its weight scales.
        activation_scheme: "dynamic", or "static": the checkpoint has input scales.
    """

    is_checkpoint_fp8_serialized: bool | None = False
    activation_scheme: str = "dynamic"

    @classmethod
    def of(cls, given: Any) -> Fp8Config:
        """The configuration of an object, or of a mapping: SGLang's class, or a checkpoint's quantization_config.

        Args:
            given: has activation_scheme. is_checkpoint_fp8_serialized may be absent, quant_method must be "fp8", fmt
                "e4m3" and weight_block_size None, or absent.

        Raises:
            ArgumentError: a rule above is broken.
        """

        def read(name: str) -> Any:
            return given.get(name) if isinstance(given, Mapping) else getattr(given, name, None)

        scheme, method, serialized = (
            read(name) for name in ("activation_scheme", "quant_method", "is_checkpoint_fp8_serialized")
        )
        rule = "has activation_scheme {!r}; need an Fp8Config, 'dynamic' or 'static'"
        need(scheme in ("dynamic", "static"), "quant_config", rule, scheme)
        need(method in (None, "fp8"), "quant_config", "has quant_method {!r}; need 'fp8'", method)
        blocks, fmt = read("weight_block_size"), read("fmt")
        need(blocks is None, "quant_config", "has weight_block_size {}; a weight has one scale", blocks)
        need(fmt in (None, "e4m3"), "quant_config", "has fmt {!r}; weights are e4m3", fmt)
        return cls(None if serialized is None else bool(serialized), scheme)


class _QuantMethod:
    """What SGLang's loader asks a layer for when its weights are loaded."""

    def __init__(self, quant_config: Fp8Config | None) -> None:
        self.quant_config = quant_config

    def process_weights_after_loading(self, layer: EPMoE) -> None:
        """As the layer's own."""
        layer.process_weights_after_loading()


def make_expert_params_mapping(
    ckpt_gate_proj_name: str, ckpt_down_proj_name: str, ckpt_up_proj_name: str, num_experts: int
) -> list[tuple[str, str, int, str]]:
    """(start of the parameter's name, part of the checkpoint's name, expert, shard), three for every expert.

    Source: SGLang ``EPMoE.make_expert_params_mapping``.
    """
    names = zip(_SHARDS, (ckpt_gate_proj_name, ckpt_down_proj_name, ckpt_up_proj_name), strict=True)
    shards = [("experts.w2_" if shard == "w2" else "experts.w13_", name, shard) for shard, name in names]
    return [
        (param, f"experts.{expert}.{name}.", expert, shard)
        for expert in range(num_experts)
        for param, name, shard in shards
    ]


class EPMoE(WholeLayer):
    """A mixture-of-experts layer whose ranks have all tokens and each its own experts.

    Parameters of a rank: w13_weight ``(L, 2F, H)`` (gate rows first), w2_weight ``(L, H, F)``; with fp8 also
    w13_weight_scale ``(L, 2)`` and w2_weight_scale ``(L,)``, and with static activations w13_input_scale and
    w2_input_scale ``(L,)``, all float32. Every parameter has SGLang's ``weight_loader``.

    Args:
        num_experts: E, a multiple of the ranks. top_k: K. hidden_size: H. intermediate_size: F.
        params_dtype: bf16, fp16 or fp32; None: torch's default.
        renormalize, use_grouped_topk, num_expert_group, topk_group, correction_bias: of `select_experts`.
        quant_config: None, or as `Fp8Config.of` takes it. Call ``process_weights_after_loading`` then, or that of
            ``quant_method``, as SGLang's loader does.
        tp_size: W; None: the size of group.
        prefix: has no effect.
        reduce: "none": forward returns this rank's part of the sum, which the caller adds up. "all_reduce": it
            returns the sum, added up in float32 and rounded once. "mc2": it returns the sum, but each rank
            dispatches its share of the tokens to the experts, combines, and gathers the shares.
        group: the W ranks; None: the default group where there is one, else this rank is alone.
        group_ep: with "mc2": name of the windows; None: ``ascend_moe.comm_name(group)``.
        tp_rank: this rank; None: that of group.

    Raises:
        ArgumentError: a rule above is broken.

    Source: SGLang ``EPMoE``.
    """

    w13_weight: Tensor
    w2_weight: Tensor
    w13_weight_scale: Tensor
    w2_weight_scale: Tensor
    w13_input_scale: Tensor
    w2_input_scale: Tensor
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
        *,
        reduce: str = "none",
        group: ProcessGroup | None = None,
        group_ep: str | None = None,
        tp_rank: int | None = None,
    ) -> None:
        super().__init__()
        need_one_of("reduce", reduce, ("none", "all_reduce", "mc2"))
        alone = group is None and not (dist.is_available() and dist.is_initialized())
        self.group = None if alone else group_of("group", group)
        need(
            reduce == "none" or self.group is not None, "group", "is missing; reduce {!r} needs a process group", reduce
        )
        size, rank = (1, 0) if self.group is None else (self.group.size(), self.group.rank())
        self.tp_size = size if tp_size is None else tp_size
        self.tp_rank = rank if tp_rank is None else tp_rank
        fits = reduce == "none" or (self.tp_size, self.tp_rank) == (size, rank)
        need(fits, "tp_size", "is {} and tp_rank {}; group has {} and {}", self.tp_size, self.tp_rank, size, rank)
        self.placement = ExpertPlacement.contiguous(num_experts, self.tp_size)
        self.start_expert_id, self.end_expert_id = self.placement.range_of(self.tp_rank)
        self.num_experts, self.num_experts_per_partition = num_experts, self.placement.local_experts
        self.top_k, self.hidden_size, self.intermediate_size = top_k, hidden_size, intermediate_size
        self.renormalize, self.use_grouped_topk = renormalize, use_grouped_topk
        self.num_expert_group, self.topk_group = num_expert_group, topk_group
        self.correction_bias, self.reduce = correction_bias, reduce
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self._dispatcher: MC2Dispatcher | None = None
        if reduce == "mc2" and group_ep is not None:
            self._dispatcher = MC2Dispatcher(group_ep, size, rank, num_experts)
        elif reduce == "mc2":
            self._dispatcher = MC2Dispatcher.from_group(self.group, num_experts)
        config = None if quant_config is None else Fp8Config.of(quant_config)
        self.use_fp8_w8a8 = config is not None
        self.activation_scheme = None if config is None else config.activation_scheme
        self.quant_method = _QuantMethod(config)
        self._make_parameters(config)
        self.grouped_gemm_runner = GroupedGemmRunner()

    def _make_parameters(self, config: Fp8Config | None) -> None:
        local, hidden, inner = self.num_experts_per_partition, self.hidden_size, self.intermediate_size
        self._serialized = None if config is None else config.is_checkpoint_fp8_serialized
        self._codes_came = False  # weights that are fp8, whose scales have to come too
        self._static = config is not None and config.activation_scheme == "static"

        def parameter(name: str, *shape: int, dtype: torch.dtype) -> None:
            value = torch.empty(shape, dtype=dtype)
            if name.endswith("scale"):
                value.fill_(torch.nan)  # until it is loaded
            self._put(name, value)

        dtype = FP8 if self._serialized else self.params_dtype
        parameter("w13_weight", local, 2 * inner, hidden, dtype=dtype)
        parameter("w2_weight", local, hidden, inner, dtype=dtype)
        if config is not None:
            parameter("w13_weight_scale", local, 2, dtype=torch.float32)
            parameter("w2_weight_scale", local, dtype=torch.float32)
        for name in ("w13_input_scale", "w2_input_scale"):
            if self._static:
                parameter(name, local, dtype=torch.float32)
        self._ready = config is None

    def _put(self, name: str, value: Tensor) -> None:
        """A parameter of this layer, which has the loader; fp8 are `Codes`."""
        made = Codes(value) if value.dtype == FP8 else nn.Parameter(value, requires_grad=False)
        made.weight_loader = self.weight_loader  # type: ignore[attr-defined]
        self.register_parameter(name, made)

    def _keep_codes(self) -> None:
        keep_codes(self, *(name for name in _WEIGHTS if getattr(self, name).dtype == FP8))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """As the layer is: floats, or behind process_weights_after_loading fp8 codes together with their scales."""
        for name in _WEIGHTS if self.use_fp8_w8a8 and self._ready else ():
            given = [prefix + each in state_dict for each in (name, f"{name}_scale")]
            need(given[0] == given[1], prefix + name, "and its scale go together: give both or none")
        fit_state_dict(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._keep_codes()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EPMoE:
        """Moves and casts. fp8 codes and scales keep their dtypes; ``params_dtype`` goes with the other weights."""
        dtype = fn(self.w2_weight.detach().new_empty(0, dtype=self.params_dtype)).dtype
        need(dtype in _FLOATS, "params_dtype", "is {}; it must be bf16, fp16 or fp32", dtype)
        kept = (each for name, each in self.named_parameters() if name.endswith("scale") or each.dtype == FP8)
        super()._apply(without_casts(fn, kept), recurse)  # type: ignore[no-untyped-call]
        self.params_dtype = dtype
        self._keep_codes()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> EPMoE:
        copied: EPMoE = copied_beside(self, memo, self.group)
        for parameter in copied.parameters():
            parameter.weight_loader = copied.weight_loader  # type: ignore[attr-defined]
        return copied

    @with_typed_errors
    def weight_loader(
        self, param: nn.Parameter, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int
    ) -> None:
        """Put one expert's weight, or scale, into its place; those of other ranks' experts are left out.

        Args:
            param: one of this layer's parameters.
            loaded_weight: w1, w3 ``(F, H)``, w2 ``(H, F)``; a scale has one value.
            weight_name: its name in the checkpoint; with "input_scale" or "weight_scale" in it, a scale.
            shard_id: "w1" (gate), "w2" (down) or "w3" (up).
            expert_id: 0..E-1.

        Raises:
            ArgumentError: the shard has another name, shape or dtype do not fit, w1 and w3 of an expert have input
                scales that differ by more than 1e-5, or fp8 weights are processed already.

        Source: SGLang ``EPMoE.weight_loader``.
        """
        need_one_of("shard_id", shard_id, _SHARDS)
        rule = "have been processed with their scales: load other weights into a new layer"
        need(not (self.use_fp8_w8a8 and self._ready), "param", rule)
        floats = (*FLOATS, FP8) if self.use_fp8_w8a8 else FLOATS
        need_dtype(weight_name, loaded_weight, *((FP8,) if param.dtype == FP8 else floats))
        if not self.start_expert_id <= expert_id <= self.end_expert_id:
            return
        place = param.data[expert_id - self.start_expert_id]
        if "input_scale" in weight_name or "weight_scale" in weight_name:
            rule = "is {} for {}; a scale has one value"
            need(loaded_weight.numel() == 1, "loaded_weight", rule, loaded_weight.shape, weight_name)
            value = loaded_weight.reshape(())
            if "input_scale" in weight_name:
                before, after = float(place), float(value)
                rule = "is {:g} for {}, but {:g} came before; w1 and w3 share one input scale"
                need(not abs(before - after) > 1e-5, "loaded_weight", rule, after, weight_name, before)
                place.copy_(value)
            elif shard_id == "w2":
                place.copy_(value)
            else:
                place[_SHARDS.index(shard_id) // 2] = value
            return
        if shard_id != "w2":
            first = 0 if shard_id == "w1" else self.intermediate_size
            place = place[first : first + self.intermediate_size]
        need_shape("loaded_weight", loaded_weight, tuple(place.shape))
        self._codes_came |= loaded_weight.dtype == FP8
        place.copy_(loaded_weight)  # other floats hold fp8's values exactly

    @torch.no_grad()
    def process_weights_after_loading(self) -> None:
        """With fp8: gives both halves of w13 one scale, or quantizes the loaded weights. Else nothing to do.

        Raises:
            ArgumentError: a scale has not been loaded.
        """
        if self._ready:
            return
        if self._static:
            self._need_loaded("w13_input_scale", "w2_input_scale")
        scales = (self.w13_weight_scale, self.w2_weight_scale)
        serialized = self._serialized or self._codes_came
        if self._serialized is None:
            serialized = serialized or not all(bool(scale.isnan().all()) for scale in scales)
        if not serialized:
            for name in _WEIGHTS:
                weight = getattr(self, name).float()
                top = weight.abs().amax((1, 2))
                scale = torch.where(top == 0, 1.0, top / _FP8_MAX)
                self._replace(name, weight, scale)
        else:
            self._need_loaded("w13_weight_scale", "w2_weight_scale")
            halves = self.w13_weight_scale
            each = halves.repeat_interleave(self.intermediate_size, dim=1)
            self._replace("w13_weight", self.w13_weight.float() * each[..., None], halves.amax(1))
            self._put("w2_weight", self.w2_weight.to(FP8))
        self._ready = True

    def _replace(self, name: str, weight: Tensor, scale: Tensor) -> None:
        codes = torch.stack([_scaled(w, s.expand(len(w)), FP8) for w, s in zip(weight, scale, strict=True)])
        self._put(name, codes)
        self._put(f"{name}_scale", scale)

    def _need_loaded(self, *names: str) -> None:
        for name in names:
            need(not bool(getattr(self, name).isnan().any()), name, "has not been loaded for every expert of this rank")

    @with_typed_errors
    @torch.no_grad()
    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        """The layer's output, or this rank's part of it (reduce "none").

        Args:
            hidden_states: ``(T, H)`` in params_dtype, the same on all ranks; T may be 0.
            router_logits: ``(T, E)``, the same on all ranks.

        Returns:
            ``(T, H)`` in params_dtype.

        Raises:
            ArgumentError: a rule above is broken, or fp8 weights are not processed. With "mc2" also what the ops
                raise.
        """
        need_dims("hidden_states", hidden_states, 2, dtypes=(self.params_dtype,))
        need_shape("hidden_states", hidden_states, (hidden_states.shape[0], self.hidden_size))
        need_shape("router_logits", router_logits, (hidden_states.shape[0], self.num_experts))
        need(self._ready, "quant_config", "is given: call process_weights_after_loading before forward")
        if torch.compiler.is_compiling():
            return _in_one(self, hidden_states, router_logits)
        return self._output(hidden_states, router_logits)

    def _output(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        weights, ids = select_experts(
            hidden_states,
            router_logits,
            self.top_k,
            self.use_grouped_topk,
            self.renormalize,
            self.topk_group,
            self.num_expert_group,
            correction_bias=self.correction_bias,
        )
        scale = None
        if self.use_fp8_w8a8:
            # Of all tokens, so that every way of reducing quantizes by the same scale.
            local = self.num_experts_per_partition
            scale = self.w13_input_scale if self._static else dynamic_scale(hidden_states, local)
        if self._dispatcher is not None:
            return self._dispatched(self._dispatcher, hidden_states, weights, ids, scale)
        return self._partial(hidden_states, weights, ids, scale)

    def _partial(self, x: Tensor, weights: Tensor, ids: Tensor, scale: Tensor | None) -> Tensor:
        start, end = self.start_expert_id, self.end_expert_id
        sizes = (self.top_k, self.hidden_size)
        sorted_ids, src2dst, segments = run_moe_ep_preproess(ids, self.num_experts)
        rows = x.new_empty(ids.numel(), self.hidden_size, dtype=FP8 if self.use_fp8_w8a8 else x.dtype)
        pre_reorder(x, rows, src2dst, ids, scale, start, end, *sizes)
        rows = self._run_experts(rows, sorted_ids, segments[start : end + 2], scale)
        total = x.new_empty(x.shape, dtype=x.dtype if self.reduce == "none" else torch.float32)
        post_reorder(rows, total, src2dst, ids, weights, start, end, *sizes)
        if self.reduce == "all_reduce":
            dist.all_reduce(total, group=self.group)
        return total.to(x.dtype)

    def _run_experts(self, rows: Tensor, row_experts: Tensor, segments: Tensor, scale: Tensor | None) -> Tensor:
        """The MLP of this rank's rows, which are the segments' (L + 1 bounds); other rows are undefined."""
        fp8, local = self.use_fp8_w8a8, self.num_experts_per_partition
        options: dict[str, Any] = {"seg_indptr": segments, "use_fp8_w8a8": fp8}
        scales = {"scale_a": scale, "scale_b": self.w13_weight_scale} if fp8 else {}
        gate_up = rows.new_empty(len(rows), 2 * self.intermediate_size, dtype=self.params_dtype)
        self.grouped_gemm_runner(rows, self.w13_weight.detach(), gate_up, local, **options, **scales)
        hidden = rows.new_empty(len(rows), self.intermediate_size, dtype=self.params_dtype)
        of_rows = (self.start_expert_id, self.end_expert_id)
        if not fp8:
            silu_and_mul(gate_up, hidden, 2 * self.intermediate_size, row_experts, None, *of_rows)
        else:
            hidden, scale = self._quantized_hidden(gate_up, row_experts)
            scales = {"scale_a": scale, "scale_b": self.w2_weight_scale}
        out = rows.new_empty(len(rows), self.hidden_size, dtype=self.params_dtype)
        self.grouped_gemm_runner(hidden, self.w2_weight.detach(), out, local, **options, **scales)
        return out

    def _quantized_hidden(self, gate_up: Tensor, row_experts: Tensor) -> tuple[Tensor, Tensor]:
        """Input of the down product: fp8 rows, and their scales by local expert."""
        of_rows = (self.start_expert_id, self.end_expert_id)
        if self._static:
            scale = self.w2_input_scale
        else:
            products = npu_swiglu(gate_up[_local(row_experts, *of_rows)].float())
            scale = dynamic_scale(products, self.num_experts_per_partition)
        hidden = gate_up.new_empty(len(gate_up), self.intermediate_size, dtype=FP8)
        silu_and_mul(gate_up, hidden, 2 * self.intermediate_size, row_experts, scale, *of_rows)
        return hidden, scale

    def _dispatched(
        self, dispatcher: MC2Dispatcher, x: Tensor, weights: Tensor, ids: Tensor, scale: Tensor | None
    ) -> Tensor:
        share = -(-len(x) // self.tp_size)
        mine = slice(self.tp_rank * share, (self.tp_rank + 1) * share)
        sent = dispatcher.dispatch(x[mine], ids[mine], global_bs=share * self.tp_size)
        bounds = torch.cat([sent.expert_token_nums.new_zeros(1), sent.expert_token_nums.cumsum(0)])
        local = torch.searchsorted(bounds[1:], torch.arange(len(sent.expand_x), device=x.device), right=True)
        rows = sent.expand_x
        if scale is not None:
            # Rows behind the last expert's are undefined, and so are their codes.
            rows = _scaled(rows, scale[local.clamp(max=self.num_experts_per_partition - 1)], FP8)
        rows = self._run_experts(rows, local + self.start_expert_id, bounds, scale)
        out = x.new_zeros(share, self.hidden_size)
        out[: len(x[mine])] = dispatcher.combine(rows, sent, weights[mine])
        assert self.group is not None
        return gather(out, self.group).view(-1, self.hidden_size)[: len(x)]


_in_one = WholeCall("ep_moe", "Tensor hidden_states, Tensor router_logits", EPMoE._output)
