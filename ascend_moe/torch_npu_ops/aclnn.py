"""The aclnn functions of MoE layers on the virtual NPU, computed by this package's functions of the same names.

Rows or outputs that an operator leaves unspecified on a device are left unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import silu

from ascend_moe import routers
from ascend_moe.errors import ArgumentError, need
from ascend_moe.experts import (
    npu_clipped_swiglu,
    npu_dequant_swiglu_quant,
    npu_dynamic_quant,
    npu_grouped_matmul,
    npu_swiglu,
)
from ascend_moe.experts.groups import as_counts, read_groups
from ascend_moe.experts.int4 import MOST, pack_int4, unpack_int4
from ascend_moe.experts.quant import scale_of_bits, to_int8
from ascend_moe.torch_npu_ops import matmul_epilogues, permute
from ascend_moe.torch_npu_ops.init_routing import (
    npu_moe_compute_expert_tokens,
    npu_moe_init_routing,
    npu_moe_init_routing_v2,
    npu_moe_update_expert,
)
from ascend_vnpu.operators.registry import DTYPES, effect, returns, write

Arguments = dict[str, Any]
Named = TypeVar("Named", bound=Callable[..., None])


def _by_name(function: str, names: str) -> Callable[[Named], Named]:
    """Return a decorator like `effect`; the function gets a dict of the arguments by name, and the outputs behind."""
    words = names.split()

    def register(run: Named) -> Named:
        effect(function)(lambda *values: run(dict(zip(words, values, strict=False)), *values[len(words) :]))
        return run

    return register


def _write_all(outputs: tuple[Any, ...], *results: Tensor | None) -> None:
    """Copy the results into the outputs, as many rows as they have; None: unspecified."""
    for out, result in zip(outputs, results, strict=False):
        if out is not None and result is not None:
            write(out[: len(result)] if result.dim() else out, result)


# ---- choosing experts, moving rows to them and back

returns("aclnnMoeGatingTopKSoftmax", outputs=3)(routers.npu_moe_gating_top_k_softmax)
returns("aclnnMoeInitRouting", outputs=3)(npu_moe_init_routing)
returns("aclnnMoeComputeExpertTokens")(npu_moe_compute_expert_tokens)


_GATING = "k k_group group_count group_select_mode renorm norm_type out_flag routed_scaling_factor eps"


@_by_name("aclnnMoeGatingTopK", f"x bias {_GATING}")
@_by_name("aclnnMoeGatingTopKV2", f"x bias input_ids tid2eid {_GATING}")
def _gating_top_k(given: Arguments, *outputs: Any) -> None:
    weights, ids, scores = routers.npu_moe_gating_top_k(**given)
    _write_all(outputs, weights, ids, scores if given["out_flag"] else None)


@_by_name("aclnnMoeGatingTopKSoftmaxV2", "x finished k renorm output_softmax")
def _gating_top_k_softmax_v2(given: Arguments, *outputs: Any) -> None:
    weights, ids, softmax = routers.npu_moe_gating_top_k_softmax_v2(**given)
    asked = given["output_softmax"] and not given["renorm"]
    _write_all(outputs, weights, ids, softmax if asked else None)


@_by_name(
    "aclnnMoeInitRoutingV2",
    "x expert_idx active_num expert_capacity expert_num drop_pad_mode counts_form before_capacity",
)
def _init_routing_v2(given: Arguments, *outputs: Any) -> None:
    # This older version numbers the kinds of counts differently: 0 none, 1 running sums, 2 counts.
    form, _ = given.pop("counts_form"), given.pop("before_capacity")
    rows, places, tokens, _ = npu_moe_init_routing_v2(
        **given, expert_tokens_num_type=0 if form == 1 else 1, expert_tokens_num_flag=form != 0
    )
    _write_all(outputs, rows, places, tokens if form else None)


@_by_name(
    "aclnnMoeInitRoutingV3",
    """x expert_idx scale offset active_num expert_capacity expert_num drop_pad_mode expert_tokens_num_type
    expert_tokens_num_flag quant_mode active_expert_range row_idx_type""",
)
def _init_routing_v3(given: Arguments, *outputs: Any) -> None:
    rows, places, tokens, scales = npu_moe_init_routing_v2(**given)
    scaled = given["quant_mode"] == 1 or (given["quant_mode"] == -1 and given["scale"] is not None)
    counted = given["expert_tokens_num_flag"]
    _write_all(outputs, rows, places, tokens if counted else None, scales if scaled else None)


@returns("aclnnMoeTokenPermute", outputs=2)
def _token_permute(tokens: Tensor, indices: Tensor, rows: int, padded_mode: int) -> tuple[Tensor, Tensor]:
    permuted, places = permute.npu_moe_token_permute(tokens, indices, padded_mode=bool(padded_mode))
    return permuted[:rows], places


@returns("aclnnMoeTokenUnpermute")
def _token_unpermute(rows: Tensor, places: Tensor, probs: Tensor | None, padded_mode: int, _: Any) -> Tensor:
    # torch_npu always passes a restore_shape; only padded_mode uses it.
    return permute.npu_moe_token_unpermute(rows, places, probs, bool(padded_mode))


@returns("aclnnMoeFinalizeRoutingV2")
def _finalize_routing(rows: Tensor, places: Tensor, *rest: Any) -> Tensor:
    skip1, skip2, bias, scales, expert_ids, mode = rest
    return permute.npu_moe_finalize_routing(rows, skip1, skip2, bias, scales, places, expert_ids, mode)


@_by_name("aclnnMoeReRouting", "tokens expert_token_num_per_rank per_token_scales expert_token_num_type idx_type")
def _re_routing(given: Arguments, *outputs: Any) -> None:
    _write_all(outputs, *permute.npu_moe_re_routing(**given))


@_by_name(
    "aclnnMoeUpdateExpert",
    "expert_ids eplb_table expert_scales pruning_threshold active_mask local_rank_id world_size balance_mode",
)
def _update_expert(given: Arguments, *outputs: Any) -> None:
    ids, mask = npu_moe_update_expert(**given)
    _write_all(outputs, ids, None if given["pruning_threshold"] is None else mask)


@effect("aclnnMoeTokenPermuteGrad")
def _token_permute_grad(grad: Tensor, places: Tensor, topk: int, padded_mode: int, out: Tensor) -> None:
    # A token's gradient is the sum over its copies' rows: the way back with weights 1.
    ones = torch.ones(places.numel() // topk, topk, dtype=torch.float32, device=grad.device)
    write(out, permute.npu_moe_token_unpermute(grad, places, ones, bool(padded_mode)))


@effect("aclnnMoeTokenUnpermuteGrad")
def _token_unpermute_grad(
    tokens: Tensor | None,
    grad: Tensor,
    places: Tensor,
    probs: Tensor | None,
    padded_mode: int,
    restore_shape: list[int] | None,
    *outputs: Tensor,
) -> None:
    rows = torch.zeros_like(outputs[0], dtype=torch.float32) if tokens is None else tokens.detach().float()
    weights = None if probs is None else probs.detach().float()
    with torch.enable_grad():
        wanted = [tensor.requires_grad_() for tensor in (rows, weights) if tensor is not None]
        total = permute.npu_moe_token_unpermute(rows, places, weights, bool(padded_mode))
        gradients = torch.autograd.grad(total, wanted, grad.float())
    _write_all(outputs, *gradients)


# ---- experts: grouped matmul, SwiGLU and quantization, alone and fused


_GROUPED_MATMUL = """x weight bias scale offset antiquant_scale antiquant_offset per_token_scale group_list
    activation_input activation_quant_scale activation_quant_offset split_item group_type group_list_type act_type"""


@_by_name("aclnnGroupedMatmulV4", _GROUPED_MATMUL)
@_by_name("aclnnGroupedMatmulV5", f"{_GROUPED_MATMUL} tuning_config")
@_by_name("aclnnGroupedMatmulWeightNz", f"{_GROUPED_MATMUL} tuning_config group_size")
def _grouped_matmul_of_tensors(given: Arguments, out: Any, *_: Any) -> None:
    given.pop("group_size", None)  # the scales' shape says it
    x, weight, group_list = given["x"], given["weight"], given["group_list"]
    if len(x) == 1 and group_list is not None and given["group_type"] == 0:
        experts = weight[0].shape[0] if weight[0].dim() == 3 else len(weight)
        groups = read_groups(group_list, given["group_list_type"], experts, x[0].shape[0])
        used = groups[-1].stop if groups else 0
        given["x"] = [x[0][:used]]
        scales = given["per_token_scale"] or []
        given["per_token_scale"] = [scale.reshape(-1)[:used] for scale in scales]
    _write_all(out, *npu_grouped_matmul(**given, output_dtype=out[0].dtype))


@_by_name("aclnnGroupedMatmul", "x weight bias scale offset antiquant_scale antiquant_offset group_list split_item")
def _grouped_matmul_of_a_list(given: Arguments, out: Any) -> None:
    given["group_list"] = given["group_list"] or None
    _write_all(out, *npu_grouped_matmul(**given, output_dtype=out[0].dtype))


@_by_name("aclnnGroupedMatmulSwigluQuantWeightNZ", "x weight bias offset weight_scale x_scale group_list")
def _swiglu_quant(given: Arguments, *outputs: Any) -> None:
    codes, scale, _ = matmul_epilogues.npu_grouped_matmul_swiglu_quant(**given)
    used = int(given["group_list"][-1])
    _write_all(outputs, codes[:used], scale[:used])


@_by_name(
    "aclnnGroupedMatmulSwigluQuantV2",
    """x weight weight_scale weight_assist_matrix bias x_scale smooth_scale group_list dequant_mode dequant_dtype
    quant_mode group_list_type tuning_config""",
)
def _swiglu_quant_v2(given: Arguments, *outputs: Any) -> None:
    del given["dequant_dtype"]  # numbered as aclDataType; float32 is all there is
    codes, scale = matmul_epilogues.npu_grouped_matmul_swiglu_quant_v2(**given)
    used = int(as_counts(given["group_list"], given["group_list_type"]).sum())
    _write_all(outputs, codes[:used], scale[:used])


returns("aclnnSwiGlu")(npu_swiglu)


@_by_name("aclnnClippedSwiglu", "x group_index dim alpha limit bias interleaved")
def _clipped_swiglu(given: Arguments, out: Tensor) -> None:
    y, groups = npu_clipped_swiglu(**given), given["group_index"]
    rows = given["x"].shape[: given["dim"] % y.dim()].numel()
    used = rows if groups is None else int(groups.sum())
    width = y.numel() // max(rows, 1)
    out.reshape(rows, width)[:used] = y.reshape(rows, width)[:used]


@returns("aclnnSwiGluGrad")
def _swiglu_grad(grad: Tensor, x: Tensor, dim: int) -> Tensor:
    left, right = x.float().chunk(2, dim)
    gate = torch.sigmoid(left)
    wide = grad.float()
    slope = gate * (1 + left * (1 - gate))
    return torch.cat([wide * right * slope, wide * silu(left)], dim)


@_by_name("aclnnDynamicQuantV2", "input smooth_scales group_index dst_type")
@_by_name("aclnnDynamicQuantV3", "input smooth_scales group_index dst_type symmetrical quant_mode")
def _dynamic_quant(given: Arguments, y: Tensor, scale: Tensor, offset: Tensor | None) -> None:
    if not given.pop("symmetrical", True) or offset is not None:
        text = "asymmetric quantization is not supported on the virtual NPU: quantize symmetrically, without offset"
        raise ArgumentError(text, argument="offset")
    given["dst_type"] = _dtype(given["dst_type"], "dst_type")
    if given["dst_type"] == torch.int32 and given["smooth_scales"] is None:
        rows = given["input"].float()
        _write_int4(rows, rows.abs().amax(-1) / MOST, y, scale)
    else:
        _write_all((y, scale), *npu_dynamic_quant(**given))


@effect("aclnnFlatQuant")
def _flat_quant(x: Tensor, left: Tensor, right: Tensor, clip_ratio: float, out: Tensor, scale: Tensor) -> None:
    turned = left.float() @ (x.float() @ right.float())
    _write_int4(turned, turned.abs().amax((-2, -1)) * clip_ratio / MOST, out, scale)


def _write_int4(values: Tensor, scales: Tensor, codes: Tensor, scales_out: Tensor) -> None:
    """Write the scales, and the quotients by them as int4, eight in an int32."""
    divisors = scales.reshape(scales.shape + (1,) * (values.dim() - scales.dim()))
    write(codes, pack_int4(to_int8(values / divisors).clamp(-MOST - 1, MOST)))
    write(scales_out, scales)


@_by_name(
    "aclnnDequantSwigluQuantV2",
    """x weight_scale activation_scale bias quant_scale quant_offset group_index activate_left quant_mode dst_type
    round_mode activate_dim swiglu_mode clamp_limit glu_alpha glu_bias""",
)
def _dequant_swiglu_quant_v2(given: Arguments, *outputs: Any) -> None:
    mode, round_mode, groups = given["quant_mode"], given.pop("round_mode"), given["group_index"]
    need(round_mode == "rint", "round_mode", "is {}; the virtual NPU supports rint", round_mode)
    given["quant_mode"] = ("static", "dynamic").index(mode)
    given["dst_type"] = _dtype(given["dst_type"], "dst_type")
    codes, scales = npu_dequant_swiglu_quant(**given)
    rows = int(groups.sum()) if groups is not None and codes.dim() == 2 else codes.shape[0]
    _write_all(outputs, codes[:rows], scales[:rows] if mode == "dynamic" else None)


@effect("aclnnQuantize")
def _quantize(x: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int, out: Tensor) -> None:
    shape = [1] * x.dim()
    shape[axis] = -1
    values = torch.round(x.float() / scales.float().reshape(shape))
    if zero_points is not None:
        values = values + zero_points.float().reshape(shape)
    limits = torch.iinfo(out.dtype)
    write(out, values.clamp(limits.min, limits.max).to(out.dtype))


@_by_name("aclnnAscendQuantV3", "x scales offset sqrt_mode round_mode dst_type axis")
def _ascend_quant(given: Arguments, out: Tensor) -> None:
    if out.dtype != torch.int8 or given["sqrt_mode"]:
        text = f"the output is {out.dtype}, sqrt_mode {given['sqrt_mode']}; the virtual NPU needs int8 and False"
        raise ArgumentError(text, argument="dtype")
    products = given["x"].float() * given["scales"].float()
    offset = given["offset"]
    write(out, to_int8(products if offset is None else products + offset.float()))


# ---- products of int8 matrices: exact sums, scaled in float32 and rounded once


@effect("aclnnQuantMatmulV5", "aclnnQuantMatmulWeightNz")
def _quant_matmul(x1: Tensor, x2: Tensor, x1_scale: Tensor | None, scale: Tensor, *rest: Any) -> None:
    y_scale, x1_offset, offset, y_offset, bias, *transposed, _, out = rest
    offset, x1_scale, bias, *others = (
        x if x is not None and x.numel() else None for x in (offset, x1_scale, bias, y_scale, y_offset, x1_offset)
    )
    if x1.dtype == x2.dtype == torch.int32:  # eight int4 in each
        x1, x2 = unpack_int4(x1), unpack_int4(x2.mT).mT if x2.stride(-1) != 1 else unpack_int4(x2)
    if x1.dtype != torch.int8 or x2.dtype != torch.int8 or any(x is not None for x in others):
        raise ArgumentError(
            f"x1 is {x1.dtype}, x2 {x2.dtype}; the virtual NPU supports int8 by int8 and int4 by int4, without "
            "y_scale, y_offset and x1_offset",
            argument="x1",
        )
    left, right = (x.mT if turned else x for x, turned in zip((x1, x2), transposed, strict=True))
    sums = left.int() @ right.int()
    if bias is not None and bias.dtype == torch.int32:
        sums = sums + bias
    product = sums.float() * scale_of_bits(scale).float()
    if x1_scale is not None:
        product = product * x1_scale.float().unsqueeze(-1)
    if bias is not None and bias.dtype != torch.int32:
        product = product + bias.float()
    if offset is not None:
        product = product + offset.float()
    write(out, sums if out.dtype == torch.int32 else to_int8(product) if out.dtype == torch.int8 else product)


@effect("aclnnWeightQuantBatchMatmulV2")
def _weight_quant_matmul(x: Tensor, weight: Tensor, *rest: Any) -> None:
    scale, offset, quant_scale, quant_offset, bias, _, out = rest
    if quant_scale is not None or quant_offset is not None:
        text = "the virtual NPU supports no quantized result: omit quant_scale and quant_offset"
        raise ArgumentError(text, argument="quant_scale")
    shape = (-1, out.shape[-1]) if scale.dim() == 2 and 1 not in scale.shape else (out.shape[-1],)
    given = {"antiquant_scale": scale, "antiquant_offset": offset}
    options: dict[str, Any] = {name: [value.reshape(shape)] for name, value in given.items() if value is not None}
    options["bias"] = None if bias is None else [bias.reshape(-1)]
    write(out, npu_grouped_matmul([x], [weight], **options, split_item=0)[0])


_SCALE_BITS = -0x2000  # the 19 bits of a float32 that the hardware reads
_SIGNED, _OFFSET_AT = 1 << 46, 37


@effect("aclnnTransQuantParamV2")
def _trans_quant_param(scale: Tensor, offset: Tensor | None, out: Tensor) -> None:
    bits = (scale.float().contiguous().view(torch.int32) & _SCALE_BITS).to(torch.int64) & 0xFFFFFFFF | _SIGNED
    if offset is not None:
        bits = bits | (offset.float().round().clamp(-256, 255).to(torch.int64) & 0x1FF) << _OFFSET_AT
    out.view(torch.int64).copy_(bits.reshape(out.shape))


def _dtype(number: int, argument: str) -> torch.dtype:
    need(number in DTYPES, argument, "is aclDataType {}; the virtual NPU supports {}", number, sorted(DTYPES))
    return DTYPES[number]
