"""The custom ops ``torch.ops.ascend_moe.npu_moe_distribute_*`` with torch_npu's schemas and kernels for CPU and NPU.

``operator`` registers an op with a function's name and signature; `Operator` is the base of all operators of this
package. Schemas, derived from the functions of the same names, equal those of torch_npu 2.13.0 as printed by
``torch.ops.npu`` (a test compares them with the wheel), so that call sites need no changes.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.fx.node import has_side_effect
from torch.utils._pytree import tree_map

from .. import settings
from ..errors import ArgumentError, AscendMoeError, LibraryError, unknown_argument, unknown_name
from ..native import binding, log
from ..native.torch_npu import resolve_dtype
from . import callbacks, calls, recorder
from .sent_ids import SentIdStore

P = ParamSpec("P")
R = TypeVar("R")

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

LIBRARY: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
# Operators for traced programs only; torch_npu has no counterpart.
TRACED: Any = torch.library.Library(f"{NAMESPACE}_traced", "DEF")  # type: ignore[no-untyped-call]
# Limits of rank count, expert count and K, beyond which the sizes of outputs would overflow.
_MAX_SIZE, _MAX_BATCHES = 2**15, 2**31 - 1
_PREFIX = "npu_moe_distribute_"


def schema_of(function: Callable[..., Any]) -> str:
    """Return the torch schema of a function's signature, without the name: "(Tensor x, ...) -> Tensor"."""
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
    """Return the schema of npu_grouped_matmul's older overload, whose group_list is a list, from the newer schema."""
    arguments = schema.partition(", int[]? tuning_config")[0].replace("Tensor? group_list", "int[]? group_list")
    return f"{arguments}, ScalarType? output_dtype=None) -> Tensor[]"


class NotDifferentiable(torch.autograd.Function):
    """Autograd function that returns an op's outputs; its backward raises, so that no gradient is silently missing."""

    @staticmethod
    def forward(ctx: Any, name: str, outputs: Any, *needing_grad: torch.Tensor) -> Any:
        ctx.name = name
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AscendMoeError(
            f"{ctx.name} is not differentiable yet: call it under torch.no_grad(), "
            "or detach() the inputs that require grad"
        )


def wants_gradient(values: Iterable[Any]) -> bool:
    """Return whether gradients are enabled and one of the arguments ``values`` is a tensor that requires grad."""
    return torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in values)


def keep_order_in_inductor(op: Any) -> None:
    """Make inductor run ``op`` after the ordered op before it, by a lowering of its own.

    Inductor's lowering (as of torch 2.13, pytorch/pytorch#189209) records that order under the name of the op's buffer,
    while its scheduler looks up the name of the operation: two ops that share no tensor may be swapped on one rank and
    not on another. No effect unless inductor is imported.
    """
    # Not getattr: that of torch imports inductor.
    inductor = vars(torch).get("_inductor")
    lowering = vars(inductor).get("lowering") if inductor is not None else None
    if lowering is not None and op not in lowering.lowerings:
        lowering.lowerings[op] = functools.partial(_lower_in_order, op)


def _lower_in_order(op: Any, *args: Any, **kwargs: Any) -> Any:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    graph: Any = V.graph
    before = graph.effectful_ops.get(_EffectType.ORDERED)
    first = len(graph.operations)
    made = ir.FallbackKernel.create(op, *args, **kwargs)
    if before is not None and hasattr(graph, "additional_star_deps"):
        name = graph.operations[first].get_operation_name()
        graph.additional_star_deps[name].add(before.get_name())
    return tree_map(lambda node: node.wrap_for_lowering() if isinstance(node, ir.IRNode) else node, made)


class Operator:
    """A torch operator, defined in ``library`` on construction. ``qualified``: its name, or name.overload."""

    def __init__(self, qualified: str, schema: str, library: Any = LIBRARY) -> None:
        self.qualified, self.schema = qualified, schema
        self.name, _, overload = qualified.partition(".")
        library.define(f"{qualified}{schema}")
        self.packet: Any = getattr(getattr(torch.ops, library.ns), self.name)
        self.overload: Any = getattr(self.packet, overload or "default")
        self.arguments = self.overload._schema.arguments

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments of a call by name, with the schema's defaults for omitted ones."""
        values = {argument.name: argument.default_value for argument in self.arguments}
        return values | dict(zip(values, args, strict=False)) | kwargs

    def keep_calls(self) -> None:
        """Make compilers keep every call and the calls' order, since peers wait for every call."""
        # The first line keeps calls in any fx graph. The second chains them, so that no two are equal or independent.
        has_side_effect(self.overload)
        _register_effectful_op(self.overload, _EffectType.ORDERED)

    @classmethod
    def traced(cls, name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Operator:
        """Define an operator of `TRACED`, whose calls compilers keep in order; ``fake`` returns its empty outputs."""

        def in_order(*args: Any, **kwargs: Any) -> Any:
            keep_order_in_inductor(made.overload)
            return fake(*args, **kwargs)

        made = cls(name, schema, TRACED)
        for key in ("CPU", "PrivateUse1"):
            TRACED.impl(name, run, key)
        torch.library.register_fake(f"{TRACED.ns}::{name}", in_order, lib=TRACED)
        made.keep_calls()
        return made


# torch's message for a value that does not fit the schema.
_WRONG_KIND = re.compile(r"Expected a value of type '(.+?)' for argument '(.+?)' but instead found type '(.+?)'")
# Messages for values of the right type that C++ cannot represent.
_NO_SUCH_VALUE = {"int": "does not fit in 64 bits", "str": "cannot be encoded as UTF-8"}

OPERATORS: dict[str, _Op] = {}  # the four, by name
_sent_ids = SentIdStore()  # with ASCEND_MOE_CHECK_ROUTING=1


class _Op(Operator):
    """One of the four ops: runs or infers shapes."""

    def __init__(self, name: str, schema: str, returned: Any) -> None:
        super().__init__(name, schema)
        self._make = getattr(returned, "_make", None)
        self.contract = 2 if name.endswith("_v2") else 1
        self.code = calls.OP_DISPATCH if "dispatch" in name.removeprefix(_PREFIX) else calls.OP_COMBINE
        self.names = [a.name for a in self.arguments]
        self.rows_name = self.names[0]
        self.tensors = [a.name for a in self.arguments if "Tensor" in str(a.type)]
        self.integers = [a.name for a in self.arguments if "int" in str(a.type)]
        self.index_name = "expand_idx" if self.contract == 1 else "assist_info_for_combine"

    def attributes(self, values: Mapping[str, Any]) -> dict[str, int | None]:
        """Return the integers among a call's arguments in the schema's order, with the defaults of omitted ones."""
        bound = self.bind((), dict(values))
        return {name: bound[name] for name in self.integers}

    def through(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap torch's ``call`` to raise typed errors. Everything a call costs in Python is in one frame."""
        below_autograd, grad_enabled = torch._C._AutoDispatchBelowAutograd, torch.is_grad_enabled
        missed, enabled, debug = callbacks.missed, log.logger.isEnabledFor, logging.DEBUG
        dispatches, stored = self.code == calls.OP_DISPATCH, _sent_ids.stored
        checks = settings.CHECK_ROUTING.name

        def op(*args: Any, **kwargs: Any) -> Any:
            if stored and not dispatches:
                args, kwargs = self._compare_ids(args, kwargs)
            try:
                if grad_enabled() and wants_gradient((*args, *kwargs.values())):
                    outputs = call(*args, **kwargs)
                else:
                    # The Autograd key's kernel is in Python and takes longer than the rest of a small call.
                    with below_autograd():
                        outputs = call(*args, **kwargs)
            except BaseException as error:
                raised = self._error_of(error, kwargs)
                try:
                    if raised is error:
                        raise
                    raise raised from raised.__cause__
                finally:
                    del raised  # breaks a cycle with this frame, which keeps the tensors of the call
            if missed or enabled(debug):
                recorder.returned(threading.get_ident() in missed)
                missed.discard(threading.get_ident())
            if dispatches and (stored or checks in os.environ):
                self._store_ids(args, kwargs, outputs)
            return outputs

        return op

    def _error_of(self, error: BaseException, kwargs: dict[str, Any]) -> BaseException:
        """Return the error that a call raises for torch's error, and record it."""
        callbacks.missed.discard(threading.get_ident())
        raised = callbacks.stored_error(error) if isinstance(error, RuntimeError) else error
        if raised is error and isinstance(error, RuntimeError):
            raised = unknown_name(self.name, self.names, kwargs) or error
        recorder.failed(raised)
        return raised

    def named(self, outputs: Any) -> Any:
        """Return ``outputs`` as a named tuple if the op has several."""
        # torch.fx's tracer has one proxy for the whole tuple.
        return self._make(outputs) if self._make is not None and isinstance(outputs, tuple) else outputs

    def _store_ids(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """Store the ids of a dispatch for its combine if ids are compared; else clear the store."""
        if not settings.CHECK_ROUTING.get():
            return _sent_ids.clear()
        if type(outputs[2]) is torch.Tensor and not outputs[2].is_meta:  # not during shape inference
            given = self.bind(args, kwargs)
            _sent_ids.add(outputs[2], given["expert_ids"], given["x_active_mask"])

    def _compare_ids(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a combine, with ids compared to those of its dispatch."""
        given, at = self.bind(args, kwargs), self.names.index("expert_ids")
        ids, index, mask = (given[name] for name in ("expert_ids", self.index_name, "x_active_mask"))
        if type(ids) is not torch.Tensor or type(index) is not torch.Tensor or ids.is_meta:
            return args, kwargs
        ids = _sent_ids.checked("expert_ids", index, ids, mask)
        if len(args) > at:
            return (*args[:at], ids, *args[at + 1 :]), kwargs
        return args, kwargs | {"expert_ids": ids}

    def fake(self, *args: Any, **kwargs: Any) -> Any:
        """Return empty outputs as torch_npu's C++ allocates them, from shapes, dtypes and attributes alone.

        No communicator is looked up. Arguments that the kernels refuse (TP 2, shared ranks) are inferred all the same.
        """
        keep_order_in_inductor(self.overload)  # called by every compiler after its import
        values = self.bind(args, kwargs)
        tensors = {name: values[name] for name in self.tensors if values[name] is not None}
        attributes = self.attributes(values)
        self._check_sizes_known(tensors, attributes)
        rows, ids = tensors[self.rows_name], tensors["expert_ids"]
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        batch, topk, hidden = ids.shape[0], int(ids.shape[1]), rows.shape[1]
        outputs = calls.infer(self.code, self.contract, dtypes, attributes, batch, topk, hidden)
        made = [rows.new_empty(shape, dtype=dtype or rows.dtype) for dtype, shape in outputs]
        y_dtype = resolve_dtype(values.get("y_dtype"), "y_dtype")
        if y_dtype is not None:
            made[0] = rows.new_empty(outputs[0][1], dtype=y_dtype)
        return tuple(made) if self.code == calls.OP_DISPATCH else made[0]

    def _check_sizes_known(self, tensors: dict[str, torch.Tensor], attributes: dict[str, int | None]) -> None:
        """Check the rules that output sizes depend on; all others are checked when the op runs."""

        def refuse(argument: str, text: str) -> ArgumentError:
            return ArgumentError(f"{self.name}: {argument} {text}", argument=argument)

        for name in (self.rows_name, "expert_ids"):
            if name not in tensors:
                raise refuse(name, "is None, it is required: pass a tensor")
            if tensors[name].dim() != 2:
                raise refuse(name, f"has {tensors[name].dim()} dimensions, it must have 2")
        device = tensors[self.rows_name].device
        for name, tensor in tensors.items():
            if tensor.device != device:
                raise refuse(name, f"is on {tensor.device}, {self.rows_name} on {device}: they must be on one device")
        sizes = {name: value for name, value in attributes.items() if value is not None}
        for name, value in [*sizes.items(), ("expert_ids", tensors["expert_ids"].shape[1])]:
            limit = _MAX_BATCHES if name == "global_bs" else _MAX_SIZE
            if not -limit <= value <= limit:
                what = "has K =" if name == "expert_ids" else "is"
                raise refuse(name, f"{what} {value}; it must be in -{limit}..{limit} for computing sizes")
        world = sizes["ep_world_size"]
        if world < 1:
            raise refuse("ep_world_size", f"is {world}, it must be at least 1")
        for name in ("ep_rank_id", "shared_expert_rank_num"):
            if not 0 <= sizes[name] < world:
                raise refuse(name, f"is {sizes[name]}, it must be in 0..{world - 1} (ep_world_size - 1)")


def _missing(*_: Any) -> Any:
    """Kernel of the ops if their library is missing; the rest of the package works without."""
    problem = binding.why_not()
    raise LibraryError(str(problem))


def operator(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: register an op with the function's name and signature; return a function that calls the op."""
    name = function.__name__
    SCHEMAS[name] = schema_of(function)
    op = OPERATORS[name] = _Op(name, SCHEMAS[name], function.__globals__.get(function.__annotations__["return"]))
    torch.library.register_fake(f"{NAMESPACE}::{name}", op.fake, lib=LIBRARY)
    if binding.why_not() is None:
        binding.register(name, SCHEMAS[name])
    else:
        for key in ("CPU", "PrivateUse1"):
            LIBRARY.impl(name, _missing, key)
    # Every call from Python, and every call of a compiled program, goes through `_op` of one of these.
    for callable_ in (op.packet, op.overload):
        callable_._op = op.through(callable_._op)
    op.keep_calls()
    overload, defaults, required = op.overload, function.__kwdefaults__ or {}, object()

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # torch spends time on each argument it is given.
        given = {key: value for key, value in kwargs.items() if value is not defaults.get(key, required)}
        try:
            outputs = overload(*args, **given)
        except RuntimeError as error:
            try:
                function(*args, **kwargs)  # raises Python's TypeError if the call does not fit the signature
            except TypeError as misfit:  # without torch's text of 700 characters
                raise unknown_argument(function, kwargs) or misfit from None
            if (kind := _WRONG_KIND.search(str(error))) is not None and not isinstance(error, AscendMoeError):
                wanted, argument, found = kind.groups()
                no_such_value = _NO_SUCH_VALUE.get(wanted, "has a value that torch does not accept")
                rule = f"is of type {found}; it must be {wanted}" if found != wanted else no_such_value
                fix = ": use ascend_moe.comm_name(process_group)" if argument in ("group_ep", "group_tp") else ""
                text = f"{name}: {argument} {rule}{fix}"
                raise ArgumentError(text, argument=argument) from None
            raise
        result: R = op.named(outputs)
        return result

    return call


if binding.why_not() is None:
    callbacks.connect()
