"""vllm-ascend's operators ``torch.ops._C_ascend.*`` without its compiled part.

    from ascend_moe.interop import vllm_ascend
    vllm_ascend.register()

Schemas and defaults are those of the installed release of vllm-ascend (`schemas`), implemented by the operators of
`ascend_moe.npu`. With a built vllm-ascend on NPUs call `ascend_moe.patch_torch_npu` instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ascend_moe.comm import comm_name
from ascend_moe.experts import whole_shape
from ascend_moe.interop.vllm.all2all import FaultTolerance
from ascend_moe.interop.vllm_ascend import operators, schemas
from ascend_moe.interop.vllm_ascend.operators import moe_gating_top_k, moe_gating_top_k_hash
from ascend_moe.layer_ops.decode import dispatch_gmm_combine_decode
from ascend_moe.native import log
from ascend_moe.torch_npu_ops import coded_activations as coded
from ascend_moe.torch_npu_ops import meta
from ascend_moe.torch_npu_ops.init_routing import npu_moe_init_routing_v2

__all__ = ["NAMESPACE", "OPS", "moe_gating_top_k", "moe_gating_top_k_hash", "register", "use_fault_tolerance"]

NAMESPACE = "_C_ascend"


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
    "dispatch_ffn_combine": _Op(operators.ffn_of_any_release, _shapes_of_ffn),
    "dispatch_gmm_combine_decode": _Op(dispatch_gmm_combine_decode, _shapes_of_decode),
    "moe_gating_top_k": _Op(moe_gating_top_k, meta.npu_moe_gating_top_k),
    "moe_gating_top_k_hash": _Op(moe_gating_top_k_hash, meta.npu_moe_gating_top_k),
    "npu_dequant_swiglu_quant": _Op(operators.dequant_swiglu_quant, _shapes_of_rows_of_halves),
    "dequant_situ_quant": _Op(coded.dequant_situ_quant, _shapes_of_rows_of_halves),
    "situ_mx_quant": _Op(coded.situ_mx_quant, lambda call: coded.mx_shapes(call.x)),
    "npu_swiglu_group_quant": _Op(
        coded.swiglu_group_quant, lambda call: (*coded.mx_shapes(call.x), call.x.new_empty(0))
    ),
    "grouped_matmul_swiglu_quant": _Op(operators.swiglu_quant_of_one, _shapes_of_rows),
    "grouped_matmul_swiglu_quant_weight_nz": _Op(operators.swiglu_quant_of_one, _shapes_of_rows),
    "grouped_matmul_swiglu_quant_weight_nz_tensor_list": _Op(operators.swiglu_quant_of_lists, _shapes_of_rows),
    "grouped_matmul_swiglu_quant_v2": _Op(operators.swiglu_quant_v2, lambda call: _shapes_of_rows(call)[:2]),
    "moe_grouped_matmul": _Op(
        operators.moe_grouped_matmul, lambda call: [call.x.new_empty((call.x.shape[0], call.weight.shape[2]))]
    ),
    "npu_moe_init_routing_custom": _Op(npu_moe_init_routing_v2, meta.npu_moe_init_routing_v2),
}
_libraries: dict[str, Any] = {}  # a definition lives as long as its library


def register(release: str | None = None) -> tuple[str, ...]:
    """Define in ``torch.ops._C_ascend`` the operators of `OPS` that are not there yet, for CPU, NPU and Meta tensors.

    Operators of a built vllm-ascend are not replaced: import its ``vllm_ascend_C`` first. A second call changes
    nothing, and with another release adds the operators that only that one has.

    Args:
        release: release of vllm-ascend, such as "0.23.0"; None: the installed one, or else the newest known. One
            between two known ones has the schemas of the older; one older than all those of the oldest, with a
            warning.

    Returns:
        Names defined by this call.

    Raises:
        ArgumentError: release is not a release number.
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
    ``query_active_mask()``. Call it in every worker after MC2's group exists.

    Args:
        communicator: of the EP group: ``get_ep_group().device_communicator``.
        mc2_group: the group of dispatch and combine: ``get_mc2_group()``, or a process group.

    Returns:
        The manager.

    Raises:
        ArgumentError: mc2_group is not a group.

    Source: vllm-ascend ``distributed/device_communicators/npu_communicator.py``.
    """
    group = getattr(mc2_group, "device_group", mc2_group)
    manager = FaultTolerance(comm_name(group), int(group.size()))
    communicator.all2all_manager = manager
    return manager
