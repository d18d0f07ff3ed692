"""vllm-ascend's own operators, ``torch.ops._C_ascend.*``, where its compiled part is not installed.

    from ascend_moe.interop import vllm_ascend
    vllm_ascend.register()

Schemas and defaults are those of the installed release of vllm-ascend (`vllm_ascend_schemas`); the work is that of the
operators of `ascend_moe.npu`. On NPUs with a built vllm-ascend nothing is left to define: there
`ascend_moe.patch_torch_npu` is the one line.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.nn.functional import silu

from ascend_moe import log
from ascend_moe._torch_npu import on_npu, resolve_dtype
from ascend_moe.errors import need, need_dims, need_dtype, need_shape
from ascend_moe.experts import npu_dequant_swiglu_quant, npu_grouped_matmul, whole_shape
from ascend_moe.experts.groups import PAIRS
from ascend_moe.experts.quant import dynamic_quant_rows
from ascend_moe.fused import dispatch_ffn_combine
from ascend_moe.fused.decode import dispatch_gmm_combine_decode
from ascend_moe.interop import vllm_ascend_schemas
from ascend_moe.routing import npu_moe_gating_top_k
from ascend_moe.routing.gating import SOFTMAX, Groups, gating_top_k
from ascend_moe.torch_npu_ops import meta
from ascend_moe.torch_npu_ops.fused import (
    grouped_matmul_swiglu_quant,
    need_int8_weight,
    npu_grouped_matmul_swiglu_quant,
)
from ascend_moe.torch_npu_ops.routing import npu_moe_init_routing_v2

NAMESPACE = "_C_ascend"
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
    bias_opt: torch.Tensor | None = None,
) -> Triple:
    """`ascend_moe.npu.npu_moe_gating_top_k`, whose arguments these are; bias_opt is its bias, of any float type.

    Softmax weights are divided by their sum with renorm 1, those of the other types always.
    """
    plain = bias_opt is None or bias_opt.dtype == x.dtype
    if on_npu(x) and plain and not (renorm and norm_type == SOFTMAX):  # torch_npu's documents renorm 0 only
        return npu_moe_gating_top_k(
            x, k, bias=bias_opt, k_group=k_group, group_count=group_count, group_select_mode=group_select_mode,
            renorm=0, norm_type=norm_type, out_flag=out_flag, routed_scaling_factor=routed_scaling_factor, eps=eps,
        )  # fmt: skip
    groups = Groups(group_count, k_group, group_select_mode)
    return gating_top_k(x, k, bias_opt, groups, norm_type, renorm, routed_scaling_factor, eps, out_flag)


def moe_gating_top_k_hash(
    x: torch.Tensor,
    k: int,
    bias: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
) -> Triple:
    """The same; with input_ids ``(T,)`` and tid2eid ``(V, k)`` the experts are ``tid2eid[input_ids]``. renorm is 0."""
    need(renorm == 0, "renorm", "is {}; moe_gating_top_k_hash takes 0, divide the weights afterwards", renorm)
    groups = Groups(group_count, k_group, group_select_mode)
    hashed = {"input_ids": input_ids, "tid2eid": tid2eid}
    return gating_top_k(x, k, bias, groups, norm_type, renorm, routed_scaling_factor, eps, out_flag, **hashed)


def _need_no_int4(**arguments: Any) -> None:
    for name, value in arguments.items():
        absent = value is None or (isinstance(value, (list, tuple)) and len(value) == 0)
        need(absent, name, "belongs to int4 weights, which are not supported; leave it out")


_HALVES = 1  # swiglu_mode with limit, alpha and bias: torch_npu's 2; its 1, interleaved columns, is not among these
_NO_LIMIT = torch.finfo(torch.float32).max


def dequant_swiglu_quant(
    x: torch.Tensor,
    *,
    weight_scale: torch.Tensor | None = None,
    activation_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    activate_left: bool = True,
    quant_mode: int = 0,
    swiglu_mode: int = 0,
    clamp_limit: float = 0.0,
    glu_alpha: float = 1.0,
    glu_bias: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``npu_dequant_swiglu_quant``: as `ascend_moe.npu.npu_dequant_swiglu_quant`, whose arguments these are.

    swiglu_mode 0 is SwiGLU. 1: ``g * sigmoid(glu_alpha * g) * (u + glu_bias)`` of the two halves of a row, g cut at
    clamp_limit and u at both sides, where clamp_limit is above 0.
    """
    need(swiglu_mode in (0, _HALVES), "swiglu_mode", "is {}; it must be 0 or {}", swiglu_mode, _HALVES)
    need(clamp_limit >= 0, "clamp_limit", "is {}; it must be at least 0 (0: no limit)", clamp_limit)
    variant: dict[str, Any] = {}
    if swiglu_mode == _HALVES:
        limit = clamp_limit or _NO_LIMIT
        variant = {"swiglu_mode": 2, "clamp_limit": limit, "glu_alpha": glu_alpha, "glu_bias": glu_bias}
    return npu_dequant_swiglu_quant(
        x, weight_scale=weight_scale, activation_scale=activation_scale, bias=bias, quant_scale=quant_scale,
        quant_offset=quant_offset, group_index=group_index, activate_left=activate_left, quant_mode=quant_mode,
        **variant,
    )  # fmt: skip


def swiglu_quant_of_one(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    swiglu_limit: float = 0.0,
) -> Triple:
    """``grouped_matmul_swiglu_quant`` and ``…_weight_nz``: int8 weight ``(E, K, N)``, group_list running sums.

    As `ascend_moe.npu.npu_grouped_matmul_swiglu_quant`. swiglu_limit above 0: the gate (left half) is cut at it, up at
    both sides, before silu. int4 weights, and bias and offset, which belong to them, are refused.
    """
    need_int8_weight("weight", weight)
    _need_no_int4(bias=bias, offset=offset)
    if on_npu(x) and swiglu_limit == 0:
        return npu_grouped_matmul_swiglu_quant(x, weight, group_list, weight_scale, x_scale)
    return swiglu_quant_of_lists(x, [weight], [weight_scale], x_scale, group_list, swiglu_limit=swiglu_limit)


def swiglu_quant_of_lists(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    weight_scale: Sequence[torch.Tensor],
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    swiglu_limit: float = 0.0,
) -> Triple:
    """``grouped_matmul_swiglu_quant_weight_nz_tensor_list``: the same with a weight ``(K, N)`` of each expert."""
    _need_no_int4(bias=bias, offset=offset)
    codes, scale = grouped_matmul_swiglu_quant(x, weight, weight_scale, x_scale, group_list, swiglu_limit=swiglu_limit)
    return codes, scale, scale.new_zeros(())


def swiglu_quant_v2(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    weight_scale: Sequence[torch.Tensor],
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    smooth_scale: torch.Tensor | None = None,
    weight_assist_matrix: Sequence[torch.Tensor] | None = None,
    bias: torch.Tensor | None = None,
    dequant_mode: int | None = 0,
    dequant_dtype: int | None = 0,
    quant_mode: int | None = 0,
    quant_dtype: int | None = 0,
    transpose_weight: bool = False,
    group_list_type: int = 0,
    tuning_config: Sequence[int] = (),
    swiglu_limit: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``grouped_matmul_swiglu_quant_v2``: int8 weights, one or one an expert; group_list sums (0) or counts (1).

    transpose_weight: weights are ``(…, N, K)``. dequant_dtype, quant_dtype: 0, or the numbers of float32 and int8.
    None means 0.
    """
    for matrix in weight:
        need_int8_weight("weight", matrix)
    _need_no_int4(weight_assist_matrix=weight_assist_matrix, bias=bias)
    for name, mode in (("dequant_mode", dequant_mode), ("quant_mode", quant_mode)):
        need(not mode, name, "is {}; it must be 0: a scale a row of x, a column of weight, a row of the result", mode)
    need(group_list_type in (0, 1), "group_list_type", "is {}; it must be 0 (sums) or 1 (counts)", group_list_type)
    for name, value, only in (
        ("dequant_dtype", dequant_dtype, torch.float32),
        ("quant_dtype", quant_dtype, torch.int8),
    ):
        dtype = resolve_dtype(value, name) if value else only
        need(dtype == only, name, "is {}; it must be {}", dtype, only)
    matrices = [matrix.transpose(-1, -2) for matrix in weight] if transpose_weight else weight
    return grouped_matmul_swiglu_quant(
        x, matrices, weight_scale, x_scale, group_list, group_list_type=group_list_type, smooth_scale=smooth_scale,
        swiglu_limit=swiglu_limit,
    )  # fmt: skip


def ffn_of_any_release(
    *,
    out: torch.Tensor,
    weight1: Sequence[torch.Tensor],
    expert_idx: torch.Tensor,
    expert_token_nums: torch.Tensor | None = None,
    bias1: Any = None,
    bias2: Any = None,
    swiglu_limit: float = 0.0,
    **call: Any,
) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
    """`ascend_moe.fused.dispatch_ffn_combine`; 0.18 has no biases, mask and limit, 0.13 no expert_token_nums too."""
    counts = expert_token_nums
    if counts is None:
        counts = expert_idx.new_empty(whole_shape(weight1, "weight1")[0], dtype=torch.int32)
    made = dispatch_ffn_combine(
        out=out, weight1=weight1, expert_idx=expert_idx, expert_token_nums=counts, bias1=bias1, bias2=bias2,
        swiglu_limit=swiglu_limit, **call,
    )  # fmt: skip
    return made[0] if expert_token_nums is None else made


def moe_grouped_matmul(
    x: torch.Tensor, weight: torch.Tensor, group_list: torch.Tensor, split_item: int, group_type: int,
    group_list_type: int,
) -> list[torch.Tensor]:  # fmt: skip
    """`ascend_moe.npu.npu_grouped_matmul` of one x ``(M, K)`` and one weight ``(E, K, N)``, bf16 or fp16.

    group_list is ``(n, 2)``: pairs of an expert and its rows. vllm-ascend has no caller, and documents no other call
    than split_item 2, group_type 0, group_list_type 2; split_item 3 means the same in torch_npu. Others are refused.
    """
    need_dims("x", x, 2, dtypes=(torch.bfloat16, torch.float16))
    need_dims("weight", weight, 3, dtypes=(x.dtype,))
    for name, value, known in (
        ("split_item", split_item, (2, 3)),
        ("group_type", group_type, (0,)),
        ("group_list_type", group_list_type, (PAIRS,)),
    ):
        need(value in known, name, "is {}; it must be {}", value, " or ".join(map(str, known)))
    return npu_grouped_matmul(
        [x], [weight], group_list=group_list, split_item=split_item, group_type=group_type,
        group_list_type=group_list_type,
    )  # fmt: skip


# ---- activations that end in MX codes, and SiTU

_BLOCK = 32  # values that share an exponent
_E4M3_EXPONENT, _E4M3_MAX = 8, 448.0  # of the largest e4m3
_BIAS = 127  # of e8m0
_E4M3_CODE = 36  # situ_mx_quant's number of e4m3
_SWIGLU_MX = 2  # quant_mode
_SCALES_OF_A_PAIR = 2


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    need(x.dim() >= 1 and x.shape[-1] % 2 == 0, "x", "is {}; its last dimension must be even", x.shape)
    gate, up = x.float().chunk(2, -1)
    return gate, up


def _mx_shapes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty codes and scales of the activation of x."""
    width = x.shape[-1] // 2
    pairs = -(-width // (_BLOCK * _SCALES_OF_A_PAIR))
    codes = x.new_empty((*x.shape[:-1], width), dtype=torch.float8_e4m3fn)
    return codes, x.new_empty((*x.shape[:-1], pairs, _SCALES_OF_A_PAIR), dtype=torch.float8_e8m0fnu)


def _mx_quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MX's e4m3 codes and e8m0 scales of float32 values, as npu_dynamic_mx_quant with scale_alg 0.

    The exponent of 32 values is that of the largest less 8; codes past 448 become 448. The second exponent of the last
    pair, where there is no block for it, is that of zeros.
    """
    width = values.shape[-1]
    room = -width % (_BLOCK * _SCALES_OF_A_PAIR)
    blocks = torch.nn.functional.pad(values, (0, room)).reshape(*values.shape[:-1], -1, _BLOCK)
    largest = blocks.abs().amax(-1)
    exponents = (torch.frexp(largest).exponent - 1 - _E4M3_EXPONENT).clamp(-_BIAS, _BIAS)
    exponents = torch.where(largest > 0, exponents, -_BIAS)
    codes = torch.ldexp(blocks, -exponents[..., None]).clamp(-_E4M3_MAX, _E4M3_MAX).flatten(-2)[..., :width]
    scales = (exponents + _BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)
    return codes.to(torch.float8_e4m3fn), scales.reshape(*values.shape[:-1], -1, _SCALES_OF_A_PAIR)


def swiglu_group_quant(
    x: torch.Tensor,
    topk_weight: torch.Tensor | None,
    group_index: torch.Tensor | None,
    dst_type: torch.dtype | int,
    quant_mode: int = 1,
    group_size: int = 128,
    round_scale: bool = False,
    ue8m0_scale: bool = False,
    output_origin: bool = False,
    group_list_type: int = 0,
    clamp_value: float = 0.0,
) -> Triple:
    """``npu_swiglu_group_quant`` with quant_mode 2: ``silu(left) * right`` in MX's e4m3, a scale for 32 values.

    vllm-ascend calls only this mode, with dst_type float8_e4m3fn and defaults. clamp_value above 0: the gate (left) is
    cut at it, up at both sides. The activation is float32 up to its code: assumed. The third result is empty:
    vllm-ascend drops it. Other modes and arguments have no documented meaning, and are refused.
    """
    need_dtype("x", x, torch.bfloat16, torch.float16)
    for name, tensor in (("topk_weight", topk_weight), ("group_index", group_index)):
        need(tensor is None, name, "is given; vllm-ascend passes None, and nothing else is supported")
    kinds = (torch.float8_e4m3fn, 24)  # and torch's number of it
    need(dst_type in kinds, "dst_type", "is {}; it must be torch.float8_e4m3fn", dst_type)
    rule = "is {}; it must be 2 (MX: a scale for 32 values)"
    need(quant_mode == _SWIGLU_MX, "quant_mode", rule, quant_mode)
    for name, value, default in (
        ("group_size", group_size, 128),
        ("round_scale", round_scale, False),
        ("ue8m0_scale", ue8m0_scale, False),
        ("output_origin", output_origin, False),
        ("group_list_type", group_list_type, 0),
    ):
        need(value == default, name, "is {}; only the default, {}, is supported", value, default)
    need(clamp_value >= 0, "clamp_value", "is {}; it must be at least 0 (0: no limit)", clamp_value)
    gate, up = _halves(x)
    if clamp_value > 0:
        gate, up = gate.clamp(max=clamp_value), up.clamp(-clamp_value, clamp_value)
    return *_mx_quantize(silu(gate) * up), x.new_empty(0)


def _situ(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    """Kimi's SiTU in float32; linear_beta 0: up as it is."""
    need(beta > 0, "beta", "is {}; it must be above 0", beta)
    need(linear_beta >= 0, "linear_beta", "is {}; it must be at least 0 (0: no limit of up)", linear_beta)
    gate = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    return gate * (linear_beta * torch.tanh(up / linear_beta) if linear_beta else up)


def _need_gate_left(activate_left: bool) -> None:
    need(
        activate_left, "activate_left", "is False; vllm-ascend passes True, and only the gate in the left half is known"
    )


def situ_mx_quant(
    x: torch.Tensor, beta: float = 1.0, linear_beta: float = 0.0, activate_left: bool = False,
    dst_type: int = _E4M3_CODE,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """SiTU of x ``(..., 2F)``, gate left, in MX's e4m3 as `swiglu_group_quant`."""
    need_dtype("x", x, torch.bfloat16, torch.float16)
    _need_gate_left(activate_left)
    need(dst_type == _E4M3_CODE, "dst_type", "is {}; it must be {}, e4m3", dst_type, _E4M3_CODE)
    return _mx_quantize(_situ(*_halves(x), beta, linear_beta))


def dequant_situ_quant(
    x: torch.Tensor,
    *,
    weight_scale: torch.Tensor | None = None,
    activation_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    beta: float = 4.0,
    linear_beta: float = 25.0,
    activate_left: bool = True,
    quant_mode: str = "dynamic",
) -> tuple[torch.Tensor, torch.Tensor]:
    """SiTU of x ``(rows, 2F)``, gate left, in int8 with a scale a row.

    x is bf16 or fp16, or int32: times weight_scale ``(2F,)`` and activation_scale ``(rows,)``. The other tensors are
    None in vllm-ascend, and else refused.
    """
    need_dims("x", x, 2, dtypes=(torch.bfloat16, torch.float16, torch.int32))
    refused = {"bias": bias, "quant_scale": quant_scale, "quant_offset": quant_offset, "group_index": group_index}
    if x.dtype != torch.int32:
        refused |= {"weight_scale": weight_scale, "activation_scale": activation_scale}
    for name, tensor in refused.items():
        need(
            tensor is None,
            name,
            "is given with x of {}; vllm-ascend passes None, and nothing else is supported",
            x.dtype,
        )
    _need_gate_left(activate_left)
    need(quant_mode == "dynamic", "quant_mode", "is {!r}; it must be 'dynamic'", quant_mode)
    values = x.float()
    if x.dtype == torch.int32:
        need(weight_scale is not None, "weight_scale", "is None; an int32 x needs it")
        assert weight_scale is not None
        need_shape("weight_scale", weight_scale, (x.shape[1],), (1, x.shape[1]))
        values = values * weight_scale.float()
        if activation_scale is not None:
            need_shape("activation_scale", activation_scale, (x.shape[0],), (x.shape[0], 1))
            values = values * activation_scale.float().reshape(-1, 1)
    return dynamic_quant_rows(_situ(*_halves(values), beta, linear_beta))


# ---- registration


class _Op(NamedTuple):
    """An operator: its function for CPU and NPU tensors, and its shapes on Meta. Both take schema's names."""

    run: Callable[..., Any]
    shapes: Callable[[Any], Any]


def _shapes_of_rows(call: Any) -> Any:
    scale = call.weight_scale
    single = scale[0] if isinstance(scale, (list, tuple)) else scale
    return meta.npu_grouped_matmul_swiglu_quant(SimpleNamespace(x=call.x, weight_scale=single))


def _shapes_of_ffn(call: Any) -> Any:
    return (call.out, call.expert_token_nums) if hasattr(call, "expert_token_nums") else call.out


def _shapes_of_decode(call: Any) -> Any:
    local = whole_shape(call.gmm1_permuted_weight, "gmm1_permuted_weight")[0]
    return torch.empty_like(call.x), call.x.new_empty(local, dtype=torch.int64)


def _shapes_of_rows_of_halves(call: Any) -> Any:
    return meta.npu_dequant_swiglu_quant(SimpleNamespace(x=call.x, dst_type=None))


OPS: dict[str, _Op] = {
    "dispatch_ffn_combine": _Op(ffn_of_any_release, _shapes_of_ffn),
    "dispatch_gmm_combine_decode": _Op(dispatch_gmm_combine_decode, _shapes_of_decode),
    "moe_gating_top_k": _Op(moe_gating_top_k, meta.npu_moe_gating_top_k),
    "moe_gating_top_k_hash": _Op(moe_gating_top_k_hash, meta.npu_moe_gating_top_k),
    "npu_dequant_swiglu_quant": _Op(dequant_swiglu_quant, _shapes_of_rows_of_halves),
    "dequant_situ_quant": _Op(dequant_situ_quant, _shapes_of_rows_of_halves),
    "situ_mx_quant": _Op(situ_mx_quant, lambda call: _mx_shapes(call.x)),
    "npu_swiglu_group_quant": _Op(swiglu_group_quant, lambda call: (*_mx_shapes(call.x), call.x.new_empty(0))),
    "grouped_matmul_swiglu_quant": _Op(swiglu_quant_of_one, _shapes_of_rows),
    "grouped_matmul_swiglu_quant_weight_nz": _Op(swiglu_quant_of_one, _shapes_of_rows),
    "grouped_matmul_swiglu_quant_weight_nz_tensor_list": _Op(swiglu_quant_of_lists, _shapes_of_rows),
    "grouped_matmul_swiglu_quant_v2": _Op(swiglu_quant_v2, lambda call: _shapes_of_rows(call)[:2]),
    "moe_grouped_matmul": _Op(
        moe_grouped_matmul, lambda call: [call.x.new_empty((call.x.shape[0], call.weight.shape[2]))]
    ),
    "npu_moe_init_routing_custom": _Op(npu_moe_init_routing_v2, meta.npu_moe_init_routing_v2),
}
_libraries: dict[str, Any] = {}  # a definition lives as long as its library


def register(release: str | None = None) -> tuple[str, ...]:
    """Define in ``torch.ops._C_ascend`` the operators of `OPS` that are not there yet, for CPU, NPU and Meta tensors.

    Operators of a built vllm-ascend stay as they are: import its ``vllm_ascend_C`` first where it exists. A second call
    changes nothing, and with another release adds the operators that only that one has.

    Args:
        release: of vllm-ascend, whose schemas these will be, such as "0.23.0"; None: the installed one, and where there
            is none the newest known. One between two known ones has the schemas of the older, one older than all has
            those of the oldest, with a warning.

    Returns:
        The names that this call has defined.

    Raises:
        ArgumentError: release is no number of a release.
    """
    chosen = vllm_ascend_schemas.choose(release)
    space = getattr(torch.ops, NAMESPACE)
    missing = {
        name: schema
        for name, schema in vllm_ascend_schemas.of_release(chosen).items()
        if not hasattr(space, name.partition(".")[0])
    }
    for name, schema in missing.items():
        _define(name, schema)
    text = "defined %d operators of torch.ops.%s as vllm-ascend %s has them"
    log.say(logging.INFO, text, len(missing), NAMESPACE, chosen)
    return tuple(missing)


def _define(name: str, schema: str) -> None:
    library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    _libraries[name] = library
    library.define(f"{name}{schema}")
    packet, _, overload = name.partition(".")
    op = OPS[packet]
    arguments = getattr(getattr(getattr(torch.ops, NAMESPACE), packet), overload or "default")._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments}

    def whole(args: Any, kwargs: Any) -> dict[str, Any]:
        # torch leaves out what equals the schema's default, and the functions may have others.
        return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}

    def run(*args: Any, **kwargs: Any) -> Any:
        return op.run(**whole(args, kwargs))

    def shapes(*args: Any, **kwargs: Any) -> Any:
        return op.shapes(SimpleNamespace(**whole(args, kwargs)))

    for key, function in (("CPU", run), ("PrivateUse1", run), ("Meta", shapes)):
        library.impl(name, function, key)
