"""vllm-ascend's operators ``torch.ops._C_ascend.*`` without its compiled part.

    from ascend_moe.interop import vllm_ascend
    vllm_ascend.register()

Schemas and defaults are those of the installed release of vllm-ascend (`schemas`), implemented by the operators of
`ascend_moe.npu`. With a built vllm-ascend on NPUs call `ascend_moe.patch_torch_npu` instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ascend_moe.comm import comm_name
from ascend_moe.errors import need, need_dims
from ascend_moe.experts import npu_dequant_swiglu_quant, npu_grouped_matmul, whole_shape
from ascend_moe.experts.groups import PAIRS
from ascend_moe.interop.vllm.all2all import FaultTolerance
from ascend_moe.interop.vllm_ascend import schemas
from ascend_moe.layer_ops import dispatch_ffn_combine
from ascend_moe.layer_ops.decode import dispatch_gmm_combine_decode
from ascend_moe.native import log
from ascend_moe.native.torch_npu import on_npu
from ascend_moe.routers import npu_moe_gating_top_k
from ascend_moe.routers.gating import SOFTMAX, Groups, gating_top_k
from ascend_moe.torch_npu_ops import coded_activations as coded
from ascend_moe.torch_npu_ops import meta
from ascend_moe.torch_npu_ops.init_routing import npu_moe_init_routing_v2
from ascend_moe.torch_npu_ops.matmul_epilogues import (
    grouped_matmul_swiglu_quant,
    need_int8_weight,
    need_rows_in_int8,
    npu_grouped_matmul_swiglu_quant,
)

__all__ = ["NAMESPACE", "OPS", "moe_gating_top_k", "moe_gating_top_k_hash", "register", "use_fault_tolerance"]

NAMESPACE = "_C_ascend"

Quantized = tuple[Tensor, Tensor, Tensor]


# ---- implementations: called with every argument of the schema by name, they declare those that they read


def moe_gating_top_k(
    x: Tensor,
    k: int,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
    bias_opt: Tensor | None = None,
) -> Quantized:
    """Choose k experts for every token: `ascend_moe.npu.npu_moe_gating_top_k` with vllm-ascend's arguments.

    Args:
        x, k, k_group, group_count, group_select_mode, norm_type, out_flag, routed_scaling_factor, eps: as there.
        renorm: 1: divide softmax weights by their sum, 0: do not; weights of other norm_types are always divided.
        bias_opt: ``(E,)`` of any float dtype, the bias there; None: no bias.
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
    x: Tensor,
    k: int,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
) -> Quantized:
    """Choose k experts for every token as `moe_gating_top_k` does, or look them up: ``tid2eid[input_ids]``.

    Args:
        x, k, bias, k_group, group_count, routed_scaling_factor, eps, group_select_mode, norm_type, out_flag: as of
            `ascend_moe.npu.npu_moe_gating_top_k`.
        input_ids, tid2eid: token ids ``(T,)``, and the experts of each id ``(V, k)``; both, or None: choose by scores.
        renorm: must be 0.

    Raises ArgumentError if renorm is not 0, or another argument is invalid.
    """
    need(renorm == 0, "renorm", "is {}; need 0: divide the weights afterwards", renorm)
    groups = Groups(group_count, k_group, group_select_mode)
    hashed = {"input_ids": input_ids, "tid2eid": tid2eid}
    return gating_top_k(x, k, bias, groups, norm_type, renorm, routed_scaling_factor, eps, out_flag, **hashed)


def _need_absent(name: str, value: Any) -> None:
    absent = value is None or (isinstance(value, (list, tuple)) and len(value) == 0)
    need(absent, name, "is given; only None, as vllm-ascend passes it, is supported: leave it out")


_HALVES = 1  # swiglu_mode with limit, alpha and bias: torch_npu's 2; its 1, interleaved columns, is not among these
_NO_LIMIT = torch.finfo(torch.float32).max


def dequant_swiglu_quant(
    *, swiglu_mode: int, clamp_limit: float, glu_alpha: float, glu_bias: float, **call: Any
) -> tuple[Tensor, Tensor]:
    """Run vllm-ascend's ``npu_dequant_swiglu_quant`` by `ascend_moe.npu.npu_dequant_swiglu_quant`.

    swiglu_mode 0 is SwiGLU, without the other numbers. 1: ``g * sigmoid(glu_alpha * g) * (u + glu_bias)`` of g (left
    half) and u (right half); a clamp_limit above 0 first clamps g at most there, u at plus and minus it.
    """
    need(swiglu_mode in (0, _HALVES), "swiglu_mode", "is {}; it must be 0 or {}", swiglu_mode, _HALVES)
    need(clamp_limit >= 0, "clamp_limit", "is {}; it must be at least 0 (0: no limit)", clamp_limit)
    if swiglu_mode == _HALVES:
        limit = clamp_limit or _NO_LIMIT
        call |= {"swiglu_mode": 2, "clamp_limit": limit, "glu_alpha": glu_alpha, "glu_bias": glu_bias}
    return npu_dequant_swiglu_quant(**call)


def swiglu_quant_of_one(
    *,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    offset: Tensor | None,
    swiglu_limit: float = 0.0,
    **rows: Tensor,
) -> Quantized:
    """Run vllm-ascend's ``grouped_matmul_swiglu_quant`` or ``…_weight_nz``: weight ``(E, K, N)``, group_list sums.

    As `ascend_moe.npu.npu_grouped_matmul_swiglu_quant`, also for int4 weights, which need bias. swiglu_limit above 0:
    clamp gate (left) at most there, up (right) at plus and minus it, before silu. offset must be None.
    """
    _need_int8_or_words(weight)
    _need_absent("offset", offset)
    if on_npu(rows["x"]) and swiglu_limit == 0:
        return npu_grouped_matmul_swiglu_quant(weight=weight, weight_scale=weight_scale, bias=bias, **rows)
    assist = [] if bias is None else [bias]
    return _with_offset(weight=[weight], weight_scale=[weight_scale], swiglu_limit=swiglu_limit, assist=assist, **rows)


def _need_int8_or_words(weight: Tensor) -> None:
    if weight.dtype != torch.int32:
        need_int8_weight("weight", weight)


def swiglu_quant_of_lists(*, bias: Tensor | Sequence[Tensor] | None, offset: Tensor | None, **call: Any) -> Quantized:
    """Run vllm-ascend's ``grouped_matmul_swiglu_quant_weight_nz_tensor_list``: a list of one ``(K, N)`` per expert."""
    _need_absent("offset", offset)
    return _with_offset(assist=[bias] if isinstance(bias, Tensor) else bias, **call)


def _with_offset(**call: Any) -> Quantized:
    codes, scale = grouped_matmul_swiglu_quant(**call, assist_name="bias")
    return codes, scale, scale.new_zeros(())


def swiglu_quant_v2(
    *,
    weight: Sequence[Tensor],
    weight_assist_matrix: Sequence[Tensor] | None,
    bias: Tensor | None,
    dequant_mode: int | None,
    dequant_dtype: int | None,
    quant_mode: int | None,
    quant_dtype: int | None,
    transpose_weight: bool,
    group_list_type: int,
    tuning_config: Sequence[int],
    **call: Any,
) -> tuple[Tensor, Tensor]:
    """Run vllm-ascend's ``grouped_matmul_swiglu_quant_v2``: weight is a list of one tensor, or of one per expert.

    Weights are int8, or int4 in int32 with weight_assist_matrix. transpose_weight: int8 weights are ``(…, N, K)``.
    group_list_type: 0 running sums, 1 counts. dequant_mode, quant_mode: 0 or None. dequant_dtype, quant_dtype: 0 or
    None, or the numbers of float32 and int8. bias: None. tuning_config: ignored.
    """
    for matrix in weight:
        _need_int8_or_words(matrix)
        rule = "is True, but int4 weights are packed along N: pass False"
        need(not transpose_weight or matrix.dtype == torch.int8, "transpose_weight", rule)
    _need_absent("bias", bias)
    need_rows_in_int8(dequant_mode, quant_mode, dequant_dtype or None, quant_dtype or None)
    need(group_list_type in (0, 1), "group_list_type", "is {}; it must be 0 (sums) or 1 (counts)", group_list_type)
    matrices = [matrix.transpose(-1, -2) for matrix in weight] if transpose_weight else weight
    return grouped_matmul_swiglu_quant(
        weight=matrices, group_list_type=group_list_type, assist=weight_assist_matrix, **call
    )


def ffn_of_any_release(
    *,
    out: Tensor,
    weight1: Sequence[Tensor],
    expert_idx: Tensor,
    expert_token_nums: Tensor | None = None,
    bias1: Any = None,
    bias2: Any = None,
    swiglu_limit: float = 0.0,
    **call: Any,
) -> tuple[Tensor, Tensor] | Tensor:
    """Run `layer_ops.dispatch_ffn_combine` by any release's arguments: return out, and expert_token_nums if passed.

    Release 0.18 has no biases, mask and limit, 0.13 no expert_token_nums either.
    """
    counts = expert_token_nums
    if counts is None:
        counts = expert_idx.new_empty(whole_shape(weight1, "weight1")[0], dtype=torch.int32)
    made = dispatch_ffn_combine(
        out=out, weight1=weight1, expert_idx=expert_idx, expert_token_nums=counts, bias1=bias1, bias2=bias2,
        swiglu_limit=swiglu_limit, **call,
    )  # fmt: skip
    return made[0] if expert_token_nums is None else made


def moe_grouped_matmul(*, x: Tensor, weight: Tensor, **groups: Any) -> list[Tensor]:
    """Return ``[(M, N)]``: `ascend_moe.npu.npu_grouped_matmul` of x ``(M, K)`` and weight ``(E, K, N)``, bf16 or fp16.

    group_list ``(n, 2)``: pairs of an expert and its number of rows. split_item must be 2 or 3, which mean the same
    here, group_type 0 and group_list_type 2, as vllm-ascend documents.
    """
    need_dims("x", x, 2, dtypes=(torch.bfloat16, torch.float16))
    need_dims("weight", weight, 3, dtypes=(x.dtype,))
    for name, known in (("split_item", (2, 3)), ("group_type", (0,)), ("group_list_type", (PAIRS,))):
        need(groups[name] in known, name, "is {}; it must be {}", groups[name], " or ".join(map(str, known)))
    return npu_grouped_matmul([x], [weight], **groups)


class _Op(NamedTuple):
    """An operator: its function for CPU and NPU tensors, and its shapes on Meta, called by the schema's names."""

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
    "dequant_situ_quant": _Op(coded.dequant_situ_quant, _shapes_of_rows_of_halves),
    "situ_mx_quant": _Op(coded.situ_mx_quant, lambda call: coded.mx_shapes(call.x)),
    "npu_swiglu_group_quant": _Op(
        coded.swiglu_group_quant, lambda call: (*coded.mx_shapes(call.x), call.x.new_empty(0))
    ),
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

    Operators of a built vllm-ascend are not replaced: import its ``vllm_ascend_C`` first. A second call defines
    nothing, or with another release the operators that only that one has. Returns the names that this call defined.

    release: a release of vllm-ascend, such as "0.23.0"; None: the installed one, or else the newest known. Its schemas
    are those of the newest known release that is not newer, or of the oldest, with a warning, if there is none. Raises
    ArgumentError if it is not a release number.
    """
    chosen = schemas.choose(release)
    space = getattr(torch.ops, NAMESPACE)
    known = schemas.of_release(chosen)
    missing = {name: known[name] for name in known if not hasattr(space, name.partition(".")[0])}
    for name, schema in missing.items():
        _define(name, schema)
    text = "defined %d operators of torch.ops.%s by the schemas of vllm-ascend %s"
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
        # torch omits arguments equal to the schema's default, which may differ from the functions'.
        return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}

    def run(*args: Any, **kwargs: Any) -> Any:
        return op.run(**whole(args, kwargs))

    def shapes(*args: Any, **kwargs: Any) -> Any:
        return op.shapes(SimpleNamespace(**whole(args, kwargs)))

    for key, function in (("CPU", run), ("PrivateUse1", run), ("Meta", shapes)):
        library.impl(name, function, key)


def use_fault_tolerance(communicator: Any, mc2_group: Any) -> FaultTolerance:
    """Set an ``NPUCommunicator``'s ``all2all_manager`` to one that detects lost ranks.

    vLLM's runners query this manager after each step: ``support_fault_tolerance``, ``query_fault()`` and
    ``query_active_mask()``. Call this function in every worker, after the MC2 group was created.

    Args:
        communicator: of the EP group: ``get_ep_group().device_communicator``.
        mc2_group: the group of dispatch and combine: ``get_mc2_group()``, or its process group.

    Returns the manager, a `FaultTolerance`. Raises ArgumentError if mc2_group is not a group. Source: vllm-ascend
    ``distributed/device_communicators/npu_communicator.py``.
    """
    group = getattr(mc2_group, "device_group", mc2_group)
    manager = FaultTolerance(comm_name(group), int(group.size()))
    communicator.all2all_manager = manager
    return manager
