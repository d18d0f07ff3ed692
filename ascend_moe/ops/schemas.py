"""Schemas of torch_npu's MoE operators, derived from the functions of the same names.

They equal those of torch_npu 2.13.0 as printed by ``torch.ops.npu`` (a test compares them with the wheel), so that call
sites need no changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

NAMESPACE = "ascend_moe"
# Filled at registration: dispatch and combine; torch_npu's other MoE operators. By the operator's name, with
# ``.overload`` appended if it has more than one.
SCHEMAS: dict[str, str] = {}
TORCH_NPU_SCHEMAS: dict[str, str] = {}

_TYPES = {
    "torch.Tensor": "Tensor",
    "Tensors": "Tensor[]",
    "Sequence[torch.Tensor]": "Tensor[]",
    "Sequence[int]": "int[]",
    "torch.dtype | int": "int",
}
# Types that the annotation does not determine.
_EXACT_TYPES = {
    ("npu_grouped_matmul", "group_list"): "Tensor?",
    ("npu_grouped_matmul_finalize_routing", "dtype"): "ScalarType?",
    ("npu_moe_init_routing_v2", "active_expert_range"): "int[2]",
}


def schema_of(function: Callable[..., Any]) -> str:
    """Return the schema without the operator's name."""
    signature, arguments = inspect.signature(function), []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in arguments:
            arguments.append("*")
        base = parameter.annotation.removesuffix(" | None")
        kind = _TYPES.get(base, base) + ("" if base == parameter.annotation else "?")
        kind = _EXACT_TYPES.get((function.__name__, parameter.name), kind)
        default = parameter.default
        shown = f'"{default}"' if isinstance(default, str) else "[]" if default == () else str(default)
        arguments.append(f"{kind} {parameter.name}" + ("" if default is parameter.empty else f"={shown}"))
    returned = signature.return_annotation
    kind = function.__globals__.get(returned, returned)
    count = len(kind._fields) if hasattr(kind, "_fields") else str(kind).count("torch.Tensor")
    results = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
    if returned.startswith("list"):
        results = "Tensor[]"
    return f"({', '.join(arguments)}) -> {results}"


def list_overload_of(schema: str) -> str:
    """Return the schema of npu_grouped_matmul's older overload, whose group list is a Python list."""
    arguments = schema.partition(", int[]? tuning_config")[0].replace("Tensor? group_list", "int[]? group_list")
    return f"{arguments}, ScalarType? output_dtype=None) -> Tensor[]"
