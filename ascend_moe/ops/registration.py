"""The custom ops ``torch.ops.ascend_moe.npu_moe_distribute_*``: torch_npu's schemas; kernels on twin and NPU.

``operator`` makes an op of a function's name and signature; `Operator` is what all operators of this package
have in common.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.fx.node import has_side_effect
from torch.utils._pytree import tree_map

from .. import settings
from ..errors import ArgumentError, AscendMoeError, LibraryError, unknown_argument, unknown_name
from ..native import binding, log
from ..native.torch_npu import resolve_dtype
from . import answers, calls, recorder
from .pairs import Pairs
from .schemas import NAMESPACE, SCHEMAS, schema_of

P = ParamSpec("P")
R = TypeVar("R")

LIBRARY: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
# What only traced programs call, apart from the operators that torch_npu has.
TRACED: Any = torch.library.Library(f"{NAMESPACE}_traced", "DEF")  # type: ignore[no-untyped-call]
# Beyond these no rank count, expert count or K makes sense, and the sizes of outputs would overflow.
_MAX_SIZE, _MAX_BATCHES = 2**15, 2**31 - 1
_PREFIX = "npu_moe_distribute_"


class NotDifferentiable(torch.autograd.Function):
    """Passes an op's outputs on; its backward raises: gradients left out silently train a wrong model."""

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
    """Whether autograd has to follow a call of these arguments."""
    return torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in values)


def keep_order_in_inductor(op: Any) -> None:
    """Gives inductor a lowering of an ordered op that depends on the ordered op before it.

    Inductor's own (seen in torch 2.13, pytorch/pytorch#189209) notes that order under the name of the op's
    buffer, while its scheduler looks for the name of the operation: two ops that share no tensor may be
    swapped, and on another rank, with other sizes, not. Does nothing where inductor is not in use.
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
    """An operator of a library, ``torch.ops.ascend_moe``: its overload, and its arguments by the schema."""

    def __init__(self, qualified: str, schema: str, library: Any = LIBRARY) -> None:
        self.qualified, self.schema = qualified, schema
        self.name, _, overload = qualified.partition(".")
        library.define(f"{qualified}{schema}")
        self.packet: Any = getattr(getattr(torch.ops, library.ns), self.name)
        self.overload: Any = getattr(self.packet, overload or "default")
        self.arguments = self.overload._schema.arguments

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Every argument of a call by its name."""
        values = {argument.name: argument.default_value for argument in self.arguments}
        return values | dict(zip(values, args, strict=False)) | kwargs

    def keep_calls(self) -> None:
        """Peers wait for every call: no compiler may drop one, merge two equal ones, or swap two.

        The first line keeps calls in any fx graph. The second chains them by a token: no two are equal
        or independent.
        """
        has_side_effect(self.overload)
        _register_effectful_op(self.overload, _EffectType.ORDERED)


# What torch says of a value that its schema does not take.
_WRONG_KIND = re.compile(r"Expected a value of type '(.+?)' for argument '(.+?)' but instead found type '(.+?)'")
# The type is right: torch passes on values that C++ can hold.
_NO_SUCH_VALUE = {"int": "does not fit in 64 bits", "str": "is no text that UTF-8 can write"}

OPERATORS: dict[str, _Op] = {}  # the four, by name
_pairs = Pairs()  # with ASCEND_MOE_CHECK_PAIRS=1


class _Op(Operator):
    """One of the four ops: runs or infers."""

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

    def through(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call`` of torch, with errors of their own classes. What every call pays for in Python is in one frame."""
        below_autograd, grad_enabled = torch._C._AutoDispatchBelowAutograd, torch.is_grad_enabled
        fresh, told, debug = answers.fresh, log.logger.isEnabledFor, logging.DEBUG
        dispatches, kept = self.code == calls.OP_DISPATCH, _pairs.kept
        checks = settings.CHECK_PAIRS.name

        def op(*args: Any, **kwargs: Any) -> Any:
            if kept and not dispatches:
                args, kwargs = self._compare_ids(args, kwargs)
            try:
                if grad_enabled() and wants_gradient((*args, *kwargs.values())):
                    outputs = call(*args, **kwargs)
                else:
                    # The kernel of the Autograd key is Python's, and takes longer than the rest of a small call.
                    with below_autograd():
                        outputs = call(*args, **kwargs)
            except BaseException as error:
                raised = self._error_of(error, kwargs)
                try:
                    if raised is error:
                        raise
                    raise raised from raised.__cause__
                finally:
                    del raised  # else it and this frame hold each other, and with them the tensors of the call
            if fresh or told(debug):
                recorder.returned(threading.get_ident() in fresh)
                fresh.discard(threading.get_ident())
            if dispatches and (kept or checks in os.environ):
                self._keep_ids(args, kwargs, outputs)
            return outputs

        return op

    def _error_of(self, error: BaseException, kwargs: dict[str, Any]) -> BaseException:
        """Returns what a call raises for an error of torch's; the record of the call has it."""
        answers.fresh.discard(threading.get_ident())
        raised = answers.kept(error) if isinstance(error, RuntimeError) else error
        if raised is error and isinstance(error, RuntimeError):
            raised = unknown_name(self.name, self.names, kwargs) or error
        recorder.failed(raised)
        return raised

    def named(self, outputs: Any) -> Any:
        """``outputs``, a tuple with names where the op has several."""
        # torch.fx's tracer has a proxy of the whole tuple.
        return self._make(outputs) if self._make is not None and isinstance(outputs, tuple) else outputs

    def _keep_ids(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """Keeps the ids of a dispatch for its combine, where ids are compared; else none."""
        if settings.CHECK_PAIRS.get() != "1":
            return _pairs.clear()
        if type(outputs[2]) is torch.Tensor and not outputs[2].is_meta:  # else a compiler looks for shapes
            given = self.bind(args, kwargs)
            _pairs.sent(outputs[2], given["expert_ids"], given["x_active_mask"])

    def _compare_ids(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a combine, whose ids are compared with those of its dispatch."""
        given, at = self.bind(args, kwargs), self.names.index("expert_ids")
        ids, index, mask = (given[name] for name in ("expert_ids", self.index_name, "x_active_mask"))
        if type(ids) is not torch.Tensor or type(index) is not torch.Tensor or ids.is_meta:
            return args, kwargs
        ids = _pairs.checked("expert_ids", index, ids, mask)
        if len(args) > at:
            return (*args[:at], ids, *args[at + 1 :]), kwargs
        return args, kwargs | {"expert_ids": ids}

    def fake(self, *args: Any, **kwargs: Any) -> Any:
        """Outputs as torch_npu's C++ allocates them, from shapes, dtypes and attributes alone.

        No communicator is looked up. What the kernels refuse (TP 2, shared ranks) is inferred all the same.
        """
        keep_order_in_inductor(self.overload)  # every compiler comes by here, after it was imported
        values = self.bind(args, kwargs)
        tensors = {name: values[name] for name in self.tensors if values[name] is not None}
        attributes: dict[str, int | None] = {name: values[name] for name in self.integers}
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
        """The rules without which outputs have no size; all others are checked when the op runs."""

        def refuse(argument: str, text: str) -> ArgumentError:
            return ArgumentError(f"{self.name}: {argument} {text}", argument=argument)

        for name in (self.rows_name, "expert_ids"):
            if name not in tensors:
                raise refuse(name, "is None, it is required")
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
                raise refuse(name, f"of {value} is out of the range that sizes are computed in, -{limit}..{limit}")
        world = sizes["ep_world_size"]
        if world < 1:
            raise refuse("ep_world_size", f"is {world}, it must be at least 1")
        for name in ("ep_rank_id", "shared_expert_rank_num"):
            if not 0 <= sizes[name] < world:
                raise refuse(name, f"is {sizes[name]}, it must be in 0..{world - 1} (ep_world_size - 1)")


def _missing(*_: Any) -> Any:
    """Stands for the kernels where their library is missing; the rest of the package works without."""
    problem = binding.why_not()
    raise LibraryError(str(problem))


def operator(function: Callable[P, R]) -> Callable[P, R]:
    """Registers the op of a function's name and signature; returns a function of them that calls it."""
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
    overload, defaults = op.overload, function.__kwdefaults__ or {}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # torch takes its time for each argument that it is given.
        given = {key: value for key, value in kwargs.items() if key not in defaults or value is not defaults[key]}
        try:
            outputs = overload(*args, **given)
        except RuntimeError as error:
            try:
                function(*args, **kwargs)  # raises Python's TypeError where the call does not fit the signature
            except TypeError as misfit:  # without torch's 700 characters above it
                raise unknown_argument(function, kwargs) or misfit from None
            if (kind := _WRONG_KIND.search(str(error))) is not None and not isinstance(error, AscendMoeError):
                wanted, argument, found = kind.groups()
                no_such_value = _NO_SUCH_VALUE.get(wanted, "has a value that torch does not take")
                rule = f"is of type {found}; it must be {wanted}" if found != wanted else no_such_value
                fix = ": use ascend_moe.comm_name(process_group)" if argument in ("group_ep", "group_tp") else ""
                text = f"{name}: {argument} {rule}{fix}"
                raise ArgumentError(text, argument=argument) from None
            raise
        result: R = op.named(outputs)
        return result

    return call


if binding.why_not() is None:
    answers.connect()
