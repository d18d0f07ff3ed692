"""Calls torch_npu's own operators for NPU tensors, and reads the three kinds of dtype that they take."""

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

from ascend_moe.errors import ArgumentError, LibraryError, need, with_typed_errors

P = ParamSpec("P")
R = TypeVar("R")


def on_npu(tensor: torch.Tensor) -> bool:
    """True when ``tensor`` lives on an NPU, so that torch_npu has to do the work."""
    return tensor.device.type == "npu"


def missing_library(error: BaseException) -> str:
    """The file name of the shared library that the loader did not find; "" if the error is another."""
    match = re.search(r"(lib[^\s/:]+\.so[^\s/:]*): cannot open shared object file", str(error))
    return match[1] if match else ""


def fix_of_library(name: str) -> str:
    """How to get a missing library: torch's and torch_npu's come with their wheels, the others with CANN."""
    if re.match(r"lib(torch|c10)", name):
        return "install the torch_npu that matches this torch"
    return (
        f"{name} is CANN's and was not found: source CANN's set_env.sh, or, without an NPU, start the "
        "program with `ascend-moe vnpu -- `"
    )


def import_torch_npu(subject: str) -> Any:
    """The module torch_npu; ``subject`` begins the error text."""
    try:
        return importlib.import_module("torch_npu")
    except (ImportError, RuntimeError) as error:  # torch raises the latter when a backend fails to load
        library = missing_library(error)
        fix = fix_of_library(library) if library else "install the torch_npu that matches this torch"
        why = str(error).strip().partition("\n")[0]
        raise LibraryError(f"{subject} cannot be imported ({why}); {fix}") from error


# ---- generations of torch_npu's MoE operators
#
# The schemas and rules here are those of torch_npu 2.13.0. OLDER says what torch_npu has otherwise in its wheels up to
# 2.9.0 and 2.10.0.post6. Later wheels of the same torch (2.9.0.post9, 2.10.0.post7) have the newer ones, so a call asks
# the wheel that is there, not its number.


@dataclass(frozen=True)
class Operators:
    """Where one generation of torch_npu's MoE operators differs from that of 2.13.0."""

    lacks: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Arguments that it does not know, by operator, with 2.13.0's defaults."""
    defaults: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Its own defaults, by operator and argument."""
    more: tuple[str, ...] = ()
    """Operators of dispatch and combine that it has and 2.13.0 has not."""
    refuses: Mapping[str, Mapping[str, tuple[object, ...]]] = field(default_factory=dict)
    """Values that it refuses, by operator and argument: torch's own operators compute such a call on the NPU."""
    shapes: Mapping[str, Mapping[str, tuple[object, ...]]] = field(default_factory=dict)
    """Calls, by operator and values of all these arguments, whose outputs have another shape."""


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
    # An output a group of a product by columns: without rows.
    shapes={"npu_grouped_matmul": {"group_type": (2,), "split_item": (0, 1)}},
    refuses={"npu_dequant_swiglu_quant": {"swiglu_mode": (2,)}},
)
_MARK = "npu_moe_gating_top_k", "input_ids"  # an operator's argument that tells the generations apart


@functools.cache
def operators() -> Operators:
    """The generation of MoE operators in the torch_npu that is installed."""
    name, argument = _MARK
    operator = getattr(torch.ops.npu, name, None)
    if operator is None or any(known.name == argument for known in operator.default._schema.arguments):
        return NEWER
    return OLDER


def refused(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether the torch_npu that is installed refuses this call, which a newer one takes."""
    values = operators().refuses.get(name, {})
    return any(kwargs.get(argument) in some for argument, some in values.items())


def lacking(name: str, arguments: Iterable[str]) -> list[str]:
    """Those of the arguments that the torch_npu that is installed does not know."""
    lacks = operators().lacks.get(name, {})
    return [argument for argument in arguments if argument in lacks]


def fitted(name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments without those that the installed torch_npu lacks.

    Raises:
        ArgumentError: it lacks one whose value is not the default.
    """
    given = dict(kwargs)
    for argument, default in operators().lacks.get(name, {}).items():
        value = given.pop(argument, default)
        rule = "is given: {} of this torch_npu has no such argument, that of 2.13.0 has; leave it out"
        need(value is None or (default is not None and value == default), argument, rule, name)
    return given


def call_torch_npu(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call ``torch_npu.<name>``; keyword arguments that are None are left out.

    So one call fits every version of torch_npu: an older version does not know the newest keywords, and
    None is the default of each.

    Raises:
        LibraryError: torch_npu is missing, or has no such operator.
        ArgumentError: the torch_npu that is installed has no such argument.
    """
    torch_npu = import_torch_npu(f"{name}: a tensor on an NPU needs torch_npu, which")
    operator = getattr(torch_npu, name, None)
    if operator is None:
        version = getattr(torch_npu, "__version__", "of unknown version")
        raise LibraryError(f"torch_npu {version} has no {name}; install a newer torch_npu")
    return operator(*args, **fitted(name, {key: value for key, value in kwargs.items() if value is not None}))


_INTEGERS = (int, np.integer, torch.SymInt)
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "Tensor": ((torch.Tensor,), "a tensor"),
    "int": (_INTEGERS, "an int"),
    "float": ((*_INTEGERS, float, np.floating, torch.SymFloat), "a number"),
}


def _kind(argument: str, annotation: str) -> tuple[tuple[type, ...], str] | None:
    """The classes of an argument's values and their name in an error; None where values of many kinds are right."""
    if argument.endswith("dtype"):  # torch takes a dtype for an int
        return None
    kind, _, others = annotation.replace("torch.", "").partition(" | ")
    if kind not in _KINDS or others not in ("", "None"):
        return None
    classes, name = _KINDS[kind]
    return (classes if not others else (*classes, type(None))), name


def npu_operator(function: Callable[P, R]) -> Callable[P, R]:
    """Makes ``function`` torch_npu's operator of the same name where its first argument is on an NPU.

    The call goes there unchecked and as it was written: what the caller left out, torch_npu decides. ``function``
    itself computes what an older torch_npu refuses (`refused`), of torch's operators on the NPU.
    In a program that torch.compile traces the call is that of ``torch.ops.ascend_moe``, whole and unread.
    """
    here = with_typed_errors(function)
    parameters = inspect.signature(function).parameters
    names, kinds = tuple(parameters), {name: _kind(name, str(each.annotation)) for name, each in parameters.items()}

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            traced: R = getattr(torch.ops.ascend_moe, function.__name__)(*args, **kwargs)
            return traced
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
                    need(
                        tensor.device == first.device, name, "is on {}, {} on {}", tensor.device, names[0], first.device
                    )
        return here(*args, **kwargs)

    return run


# torch's ScalarType numbers: an `int?` argument receives a torch.dtype as such a number.
_SCALAR_TYPES = {1: torch.int8, 3: torch.int32, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16}
# torch_npu's own numbers (torch_npu.int8 and friends) are ACL's aclDataType plus this offset.
_NPU_OFFSET = 256
_ACL_TYPES = {0: torch.float32, 1: torch.float16, 2: torch.int8, 3: torch.int32, 27: torch.bfloat16}


def resolve_dtype(value: torch.dtype | int | None, argument: str) -> torch.dtype | None:
    """The torch.dtype that ``value`` stands for; None stays None.

    Args:
        value: a torch.dtype, its ScalarType number (``int8`` is 1), or torch_npu's number
            (256 + aclDataType: ``torch_npu.int8`` is 258).
        argument: name to put in the error.

    Raises:
        ArgumentError: a number that stands for none of int8, int32, float16, bfloat16, float32.
    """
    if value is None or isinstance(value, torch.dtype):
        return value
    if not isinstance(value, _INTEGERS):
        raise ArgumentError(f"{argument} is a {type(value).__name__}; it must be a torch.dtype", argument=argument)
    known = _ACL_TYPES.get(value - _NPU_OFFSET) if value >= _NPU_OFFSET else _SCALAR_TYPES.get(value)
    if known is None:
        raise ArgumentError(
            f"{argument} is the number {value}, which is none of int8, int32, float16, bfloat16, float32; "
            "pass a torch.dtype",
            argument=argument,
        )
    return known


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type arithmetic runs in: float32 for half types and integers, otherwise ``dtype`` itself."""
    return dtype if dtype == torch.float64 else torch.float32
