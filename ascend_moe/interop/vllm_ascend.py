"""vllm-ascend's own operators, ``torch.ops._C_ascend.*``, where its compiled part is not installed.

    from ascend_moe.interop import vllm_ascend
    vllm_ascend.register()

Schemas and defaults are vllm-ascend's; the work is that of the operators of `ascend_moe.npu`. On NPUs with a built
vllm-ascend nothing is left to define: there `ascend_moe.patch_torch_npu` is the one line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ascend_moe._torch_npu import on_npu, resolve_dtype
from ascend_moe.errors import need
from ascend_moe.experts import npu_dequant_swiglu_quant
from ascend_moe.fused import dispatch_ffn_combine
from ascend_moe.ops.schemas import VENDOR_SCHEMAS
from ascend_moe.routing import npu_moe_gating_top_k
from ascend_moe.routing.gating import SOFTMAX, Groups, gating_top_k
from ascend_moe.vendor import meta
from ascend_moe.vendor.fused import (
    grouped_matmul_swiglu_quant,
    need_int8_weight,
    npu_grouped_matmul_swiglu_quant,
)
from ascend_moe.vendor.routing import npu_moe_init_routing_v2

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
    dequant_mode: int = 0,
    dequant_dtype: int = 0,
    quant_mode: int = 0,
    quant_dtype: int = 0,
    transpose_weight: bool = False,
    group_list_type: int = 0,
    tuning_config: Sequence[int] = (),
    swiglu_limit: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``grouped_matmul_swiglu_quant_v2``: int8 weights, one or one an expert; group_list sums (0) or counts (1).

    transpose_weight: weights are ``(…, N, K)``. dequant_dtype, quant_dtype: 0, or the numbers of float32 and int8.
    """
    for matrix in weight:
        need_int8_weight("weight", matrix)
    _need_no_int4(weight_assist_matrix=weight_assist_matrix, bias=bias)
    for name, mode in (("dequant_mode", dequant_mode), ("quant_mode", quant_mode)):
        need(mode == 0, name, "is {}; it must be 0: a scale a row of x, a column of weight, a row of the result", mode)
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


def dispatch_ffn_combine_0_18(
    x: torch.Tensor,
    weight1: Sequence[torch.Tensor],
    weight2: Sequence[torch.Tensor],
    expert_idx: torch.Tensor,
    scale1: Sequence[torch.Tensor],
    scale2: Sequence[torch.Tensor],
    probs: torch.Tensor,
    group: str,
    max_output_size: int,
    out: torch.Tensor,
    expert_token_nums: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ascend_moe.fused.dispatch_ffn_combine` as release 0.18 calls it: without biases, mask and limit."""
    return dispatch_ffn_combine(
        x, weight1, weight2, expert_idx, scale1, scale2, None, None, probs, group, max_output_size, out,
        expert_token_nums, swiglu_limit=0.0,
    )  # fmt: skip


def dispatch_ffn_combine_0_13(
    x: torch.Tensor,
    weight1: Sequence[torch.Tensor],
    weight2: Sequence[torch.Tensor],
    expert_idx: torch.Tensor,
    scale1: Sequence[torch.Tensor],
    scale2: Sequence[torch.Tensor],
    probs: torch.Tensor,
    group: str,
    max_output_size: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """As release 0.13 calls it: without expert_token_nums too."""
    local = weight1[0].shape[0] if weight1[0].dim() == 3 else len(weight1)
    counts = expert_idx.new_empty(local, dtype=torch.int32)
    return dispatch_ffn_combine_0_18(
        x, weight1, weight2, expert_idx, scale1, scale2, probs, group, max_output_size, out, counts
    )[0]


# ---- registration


class _Op(NamedTuple):
    """An operator: its schema, its function for CPU and NPU tensors, and its shapes on Meta."""

    schema: str
    run: Callable[..., Any]
    shapes: Callable[[Any], Any]


def _shapes_of_rows(call: Any) -> Any:
    scale = call.weight_scale
    single = scale[0] if isinstance(scale, (list, tuple)) else scale
    return meta.npu_grouped_matmul_swiglu_quant(SimpleNamespace(x=call.x, weight_scale=single))


_GATING = (
    "(Tensor x, int k, int k_group, int group_count, int group_select_mode, int renorm, int norm_type, bool out_flag, "
    "float routed_scaling_factor, float eps, Tensor? bias_opt=None) -> (Tensor, Tensor, Tensor)"
)
_HASH = (
    "(Tensor x, int k, Tensor? bias=None, Tensor? input_ids=None, Tensor? tid2eid=None, int k_group=1, "
    "int group_count=1, float routed_scaling_factor=1., float eps=1e-20, int group_select_mode=0, int renorm=0, "
    "int norm_type=0, bool out_flag=False) -> (Tensor, Tensor, Tensor)"
)
_DEQUANT = (
    "(Tensor x, *, Tensor? weight_scale=None, Tensor? activation_scale=None, Tensor? bias=None, "
    "Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? group_index=None, bool activate_left=True, "
    "int quant_mode=0, int swiglu_mode=0, float clamp_limit=0., float glu_alpha=1., float glu_bias=0.) "
    "-> (Tensor, Tensor)"
)
_ONE = (
    "(Tensor x, Tensor weight, Tensor weight_scale, Tensor x_scale, Tensor group_list, *, Tensor? bias=None, "
    "Tensor? offset=None, float swiglu_limit=0.) -> (Tensor, Tensor, Tensor)"
)
_LISTS = _ONE.replace("Tensor weight, Tensor weight_scale", "Tensor[] weight, Tensor[] weight_scale")
_V2 = (
    "(Tensor x, Tensor[] weight, Tensor[] weight_scale, Tensor x_scale, Tensor group_list, Tensor? smooth_scale=None, "
    "Tensor[]? weight_assist_matrix=None, Tensor? bias=None, int dequant_mode=0, int dequant_dtype=0, "
    "int quant_mode=0, int quant_dtype=0, bool transpose_weight=False, int group_list_type=0, int[] tuning_config=[], "
    "float swiglu_limit=0.) -> (Tensor, Tensor)"
)
_FUSED_0_13 = (
    "(Tensor x, Tensor[] weight1, Tensor[] weight2, Tensor expert_idx, Tensor[] scale1, Tensor[] scale2, "
    "Tensor probs, str group, int max_output_size, Tensor(a!) out) -> Tensor(a!)"
)
_FUSED_0_18 = _FUSED_0_13.replace(
    "out) -> Tensor(a!)", "out, Tensor(b!) expert_token_nums) -> (Tensor(a!), Tensor(b!))"
)
_FUSED = _FUSED_0_18.replace("Tensor probs", "Tensor[] bias1, Tensor[] bias2, Tensor probs").replace(
    "expert_token_nums)", "expert_token_nums, Tensor? x_active_mask=None, float swiglu_limit=1000000.)"
)
# By name; behind a dot stands the overload of an older release's call, or of vllm-ascend's tests: a tensor for a list.
OPS: dict[str, _Op] = {
    "dispatch_ffn_combine": _Op(_FUSED, dispatch_ffn_combine, lambda call: (call.out, call.expert_token_nums)),
    "dispatch_ffn_combine.bias_tensor": _Op(
        _FUSED.replace("Tensor[] bias1, Tensor[] bias2", "Tensor bias1, Tensor bias2"),
        dispatch_ffn_combine,
        lambda call: (call.out, call.expert_token_nums),
    ),
    "dispatch_ffn_combine.release_0_18": _Op(
        _FUSED_0_18, dispatch_ffn_combine_0_18, lambda call: (call.out, call.expert_token_nums)
    ),
    "dispatch_ffn_combine.release_0_13": _Op(_FUSED_0_13, dispatch_ffn_combine_0_13, lambda call: call.out),
    "moe_gating_top_k": _Op(_GATING, moe_gating_top_k, meta.npu_moe_gating_top_k),
    "moe_gating_top_k_hash": _Op(_HASH, moe_gating_top_k_hash, meta.npu_moe_gating_top_k),
    "npu_dequant_swiglu_quant": _Op(
        _DEQUANT,
        dequant_swiglu_quant,
        lambda call: meta.npu_dequant_swiglu_quant(SimpleNamespace(x=call.x, dst_type=None)),
    ),
    "grouped_matmul_swiglu_quant": _Op(_ONE, swiglu_quant_of_one, _shapes_of_rows),
    "grouped_matmul_swiglu_quant_weight_nz": _Op(_ONE, swiglu_quant_of_one, _shapes_of_rows),
    "grouped_matmul_swiglu_quant_weight_nz_tensor_list": _Op(_LISTS, swiglu_quant_of_lists, _shapes_of_rows),
    "grouped_matmul_swiglu_quant_v2": _Op(_V2, swiglu_quant_v2, lambda call: _shapes_of_rows(call)[:2]),
    "npu_moe_init_routing_custom": _Op(
        VENDOR_SCHEMAS["npu_moe_init_routing_v2"], npu_moe_init_routing_v2, meta.npu_moe_init_routing_v2
    ),
}
_libraries: dict[str, Any] = {}  # a definition lives as long as its library


def register() -> tuple[str, ...]:
    """Define in ``torch.ops._C_ascend`` the operators of `OPS` that are not there yet, for CPU, NPU and Meta tensors.

    Operators of a built vllm-ascend stay as they are: import its ``vllm_ascend_C`` first where it exists. A second call
    changes nothing.

    Returns:
        The names that this call has defined.
    """
    space = getattr(torch.ops, NAMESPACE)
    missing = tuple(name for name in OPS if not hasattr(space, name.partition(".")[0]))
    for name in missing:
        _define(name, OPS[name])
    return missing


def _define(name: str, op: _Op) -> None:
    library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    _libraries[name] = library
    library.define(f"{name}{op.schema}")
    packet, _, overload = name.partition(".")
    arguments = getattr(getattr(getattr(torch.ops, NAMESPACE), packet), overload or "default")._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments}

    def shapes(*args: Any, **kwargs: Any) -> Any:
        return op.shapes(SimpleNamespace(**defaults | dict(zip(defaults, args, strict=False)) | kwargs))

    for key, function in (("CPU", op.run), ("PrivateUse1", op.run), ("Meta", shapes)):
        library.impl(name, function, key)
