"""Calls of torch_npu's operators for NPU tensors, and the three kinds of dtype arguments they accept."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from ascend_moe.errors import ArgumentError, LibraryError, need, with_typed_errors

P = ParamSpec("P")
R = TypeVar("R")


def on_npu(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is on an NPU, where torch_npu runs the operators."""
    return tensor.device.type == "npu"


def missing_library(error: BaseException) -> str:
    """Return the file name of the shared library that the loader did not find, or "" for other errors."""
    match = re.search(r"(lib[^\s/:]+\.so[^\s/:]*): cannot open shared object file", str(error))
    return match[1] if match else ""


def fix_of_library(name: str) -> str:
    """Return the text how to install a missing library: from a wheel (torch, torch_npu) or with CANN (others)."""
    if re.match(r"lib(torch|c10)", name):
        return "install the torch_npu that matches this torch"
    return (
        f"{name} is part of CANN and was not found: source CANN's set_env.sh, or, without an NPU, start the "
        "program with `ascend-moe vnpu -- `"
    )


def import_torch_npu(subject: str) -> Any:
    """Import and return torch_npu. Raises LibraryError with a message that begins with ``subject`` if that fails."""
    try:
        return importlib.import_module("torch_npu")
    except (ImportError, RuntimeError) as error:  # torch raises the latter when a backend fails to load
        library = missing_library(error)
        fix = fix_of_library(library) if library else "install the torch_npu that matches this torch"
        why = str(error).strip().partition("\n")[0]
        raise LibraryError(f"{subject} cannot be imported ({why}); {fix}") from error


# ---- generations of torch_npu's MoE operators
#
# Schemas and rules here are those of torch_npu 2.13.0. OLDER lists the differences of wheels up to 2.9.0 and
# 2.10.0.post6. Later wheels of the same torch (2.9.0.post9, 2.10.0.post7) have the newer operators, so the installed
# operators are inspected, not the version.


@dataclass(frozen=True)
class Operators:
    """Differences of one generation of torch_npu's MoE operators from those of torch_npu 2.13.0."""

    lacks: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Arguments that this generation lacks, by operator, with their defaults in 2.13.0."""
    defaults: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Different defaults, by operator and argument."""
    more: tuple[str, ...] = ()
    """Additional dispatch and combine operators."""
    refuses: Mapping[str, Mapping[str, tuple[object, ...]]] = field(default_factory=dict)
    """Values that this generation refuses, by operator and argument; torch's own operators compute such calls."""
    shapes: Mapping[str, Mapping[str, tuple[object, ...]]] = field(default_factory=dict)
    """Calls whose outputs have another shape: by operator, the values that all these arguments must have."""


NEWER = Operators()
OLDER = Operators(
    lacks={"npu_moe_gating_top_k": {"input_ids": None, "tid2eid": None}, "npu_moe_finalize_routing": {"k": 1}},
    defaults={"npu_grouped_matmul_swiglu_quant_v2": {"dequant_dtype": 0}},
    more=(
        "npu_moe_distribute_dispatch_setup",
        "npu_moe_distribute_dispatch_teardown",
        "npu_moe_distribute_combine_setup",
        "npu_moe_distribute_combine_teardown",
    ),
    # One output per group of a column-wise product, without rows.
    shapes={"npu_grouped_matmul": {"group_type": (2,), "split_item": (0, 1)}},
    refuses={"npu_dequant_swiglu_quant": {"swiglu_mode": (2,)}},
)
_MARK = "npu_moe_gating_top_k", "input_ids"  # the operator and argument that distinguish the generations


@functools.cache
def operators() -> Operators:
    """Return the generation of MoE operators in the installed torch_npu, `NEWER` or `OLDER`."""
    name, argument = _MARK
    operator = getattr(torch.ops.npu, name, None)
    if operator is None or any(known.name == argument for known in operator.default._schema.arguments):
        return NEWER
    return OLDER


def refused(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Return whether the installed torch_npu refuses a call of ``name`` with ``kwargs`` that a newer one accepts."""
    values = operators().refuses.get(name, {})
    return any(kwargs.get(argument) in some for argument, some in values.items())


def lacking(name: str, arguments: Iterable[str]) -> list[str]:
    """Return those of ``arguments`` that the operator ``name`` of the installed torch_npu lacks."""
    lacks = operators().lacks.get(name, {})
    return [argument for argument in arguments if argument in lacks]


def fitted(name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``kwargs`` without the arguments that the operator ``name`` of the installed torch_npu lacks.

    Raises:
        ArgumentError: such an argument has a value other than None and its default.
    """
    given = dict(kwargs)
    for argument, default in operators().lacks.get(name, {}).items():
        value = given.pop(argument, default)
        rule = "is not supported by {} of the installed torch_npu; leave it out, or install torch_npu 2.13.0"
        need(value is None or (default is not None and value == default), argument, rule, name)
    return given


def call_torch_npu(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call ``torch_npu.<name>`` without the keyword arguments that are None.

    Omitting them makes one call fit every version: older versions lack the newest keywords, whose default is None.

    Raises:
        LibraryError: torch_npu is missing, or lacks the operator.
        ArgumentError: the installed torch_npu lacks an argument whose value is not the default.
    """
    torch_npu = import_torch_npu(f"{name}: a tensor on an NPU needs torch_npu, which")
    operator = getattr(torch_npu, name, None)
    if operator is None:
        version = getattr(torch_npu, "__version__", "of unknown version")
        raise LibraryError(f"torch_npu {version} has no {name}; install a newer torch_npu")
    return operator(*args, **fitted(name, {key: value for key, value in kwargs.items() if value is not None}))


#: Names of the operators whose gradient torch would compute wrongly from the parts of the function.
WITHOUT_GRADIENT: set[str] = set()
_INTEGERS = (int, np.integer, torch.SymInt)
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "Tensor": ((torch.Tensor,), "a tensor"),
    "int": (_INTEGERS, "an int"),
    "float": ((*_INTEGERS, float, np.floating, torch.SymFloat), "a number"),
}


def _kind(argument: str, annotation: str) -> tuple[tuple[type, ...], str] | None:
    """Return the classes of an argument and their name in an error; None if several kinds of values are accepted."""
    if argument.endswith("dtype"):  # torch accepts a dtype as int
        return None
    kind, _, others = annotation.replace("torch.", "").partition(" | ")
    if kind not in _KINDS or others not in ("", "None"):
        return None
    classes, name = _KINDS[kind]
    return (classes if not others else (*classes, type(None))), name


def npu_operator(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: call torch_npu's operator of the same name if the first argument is on an NPU, else ``function``.

    torch_npu gets the arguments unchecked, without defaults. Calls that an older torch_npu refuses (`refused`) run
    ``function`` on the NPU. Calls of ``function`` raise ArgumentError for wrong types or several devices. Where
    torch.compile, torch.export or another mode traces a call, for Meta and FakeTensors, and for gradients that the
    operator does not have, it becomes one of ``torch.ops.ascend_moe``, which calls ``eager`` of the result.
    """
    here = with_typed_errors(function)
    parameters = inspect.signature(function).parameters
    names, kinds = tuple(parameters), {name: _kind(name, str(each.annotation)) for name, each in parameters.items()}

    def of_the_operator(values: list[Any]) -> bool:
        listed = (value if isinstance(value, (list, tuple)) else (value,) for value in values)
        tensors = [each for value in listed for each in value if isinstance(each, torch.Tensor)]
        if tensors and all(each.is_meta or isinstance(each, FakeTensor) for each in tensors):
            return True
        lost = function.__name__ in WITHOUT_GRADIENT and torch.is_grad_enabled()
        return lost and any(each.requires_grad for each in tensors)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        traced = torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0
        if not (traced or of_the_operator([*args, *kwargs.values()])):
            return eager(*args, **kwargs)
        made: R = getattr(torch.ops.ascend_moe, function.__name__)(*args, **kwargs)
        return made

    def eager(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0] if args else kwargs.get(names[0])
        if isinstance(first, (list, tuple)) and first:
            first = first[0]
        if isinstance(first, torch.Tensor) and on_npu(first) and not refused(function.__name__, kwargs):
            result: R = call_torch_npu(function.__name__, *args, **kwargs)
            return result
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            kind = kinds.get(name)
            if kind is not None and not isinstance(value, kind[0]):
                raise ArgumentError(f"{name} is a {type(value).__name__}; it must be {kind[1]}", argument=name)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(first, torch.Tensor) and isinstance(tensor, torch.Tensor):
                    rule = "is on {}, {} on {}; move it there"
                    need(tensor.device == first.device, name, rule, tensor.device, names[0], first.device)
        return here(*args, **kwargs)

    run.eager = eager  # type: ignore[attr-defined]
    return run


# torch's ScalarType numbers: an `int?` argument receives a torch.dtype as a number.
_SCALAR_TYPES = {1: torch.int8, 3: torch.int32, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16}
# torch_npu's own numbers (torch_npu.int8 etc.) are ACL's aclDataType plus this offset.
_NPU_OFFSET = 256
_ACL_TYPES = {0: torch.float32, 1: torch.float16, 2: torch.int8, 3: torch.int32, 27: torch.bfloat16}


def resolve_dtype(value: torch.dtype | int | None, argument: str) -> torch.dtype | None:
    """Convert a dtype argument to a torch.dtype; None stays None.

    Args:
        value: a torch.dtype, its ScalarType number (``int8`` is 1), or torch_npu's number
            (256 + aclDataType: ``torch_npu.int8`` is 258).
        argument: name for the error message.

    Raises:
        ArgumentError: the value is not a dtype, or its number is none of int8, int32, float16, bfloat16, float32.
    """
    if value is None or isinstance(value, torch.dtype):
        return value
    need(isinstance(value, _INTEGERS), argument, "is a {}; it must be a torch.dtype", type(value).__name__)
    known = _ACL_TYPES.get(value - _NPU_OFFSET) if value >= _NPU_OFFSET else _SCALAR_TYPES.get(value)
    rule = "is the number {}, which is none of int8, int32, float16, bfloat16, float32; pass a torch.dtype"
    need(known is not None, argument, rule, value)
    return known


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are computed: float64 for float64, else float32."""
    return dtype if dtype == torch.float64 else torch.float32
