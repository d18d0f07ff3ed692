"""The custom ops ``torch.ops.ascend_moe.npu_moe_distribute_*``: torch_npu's schemas; kernels on twin and NPU.

The public functions here are the same ops with the same argument names and defaults.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.fx.node import has_side_effect
from torch.utils._pytree import tree_map

from .. import comm
from .._torch_npu import resolve_dtype
from ..errors import ArgumentError, AscendMoeError, LibraryError
from . import calls as native
from . import compiled, ops_compiled
from . import npu as npu_launch
from .schemas import DOCS, NAMESPACE, SCHEMAS

_LIBRARY: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
# Beyond these no rank count, expert count or K makes sense, and the sizes of outputs would overflow.
_MAX_SIZE, _MAX_BATCHES = 2**15, 2**31 - 1
# Layouts without a kernel: the op of dense tensors refuses them by name.
_OTHER_LAYOUTS = ("SparseCPU", "SparseCsrCPU", "MkldnnCPU", "QuantizedCPU", "SparseMeta", "SparseCsrMeta")
_OP_CODES = {"dispatch": native.OP_DISPATCH, "combine": native.OP_COMBINE}
_ANNOTATIONS: dict[str, Any] = {
    "Tensor": torch.Tensor,
    "Optional[Tensor]": torch.Tensor | None,
    "int": int,
    "Optional[int]": int | None,
    "str": str,
}

_T = torch.Tensor
Dispatched = tuple[_T, _T, _T, _T, _T, _T, _T]


class _NotDifferentiable(torch.autograd.Function):
    """Runs an op below autograd; its backward raises: gradients left out silently train a wrong model."""

    @staticmethod
    def forward(ctx: Any, op: _Op, keys: Any, args: Any, kwargs: Any, *needing_grad: torch.Tensor) -> Any:
        ctx.name = op.name
        return op.below_autograd(keys, args, kwargs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AscendMoeError(
            f"{ctx.name} is not differentiable yet: call it under torch.no_grad(), "
            "or detach() the inputs that require grad"
        )


def _keep_order_in_inductor(op: Any) -> None:
    """Gives inductor a lowering of an ordered op that depends on the ordered op before it.

    Inductor's own (seen in torch 2.13, pytorch/pytorch#189209) notes that order under the name of the op's
    buffer, while its scheduler looks for the name of the operation: two ops that share no tensor may be
    swapped, and on another rank, with other sizes, not. Does nothing where inductor is not in use.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    lowerings = getattr(lowering, "lowerings", None)  # None while it is being imported
    if lowerings is not None and op not in lowerings:
        lowerings[op] = functools.partial(_lower_in_order, op)


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


class _Op:
    """One of the four ops: binds arguments by the schema, runs or infers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.contract = 2 if name.endswith("_v2") else 1
        self.code = _OP_CODES["dispatch" if "dispatch" in name else "combine"]
        _LIBRARY.define(f"{name}{SCHEMAS[name]}")
        self.overload: Any = getattr(getattr(torch.ops, NAMESPACE), name).default
        arguments = self.overload._schema.arguments
        self.names = [argument.name for argument in arguments]
        self.defaults = {argument.name: argument.default_value for argument in arguments}
        self.tensors = [a.name for a in arguments if "Tensor" in str(a.type)]
        self.integers = [a.name for a in arguments if "int" in str(a.type)]
        self.parameters = [self._parameter(argument) for argument in arguments]

    @staticmethod
    def _parameter(argument: Any) -> inspect.Parameter:
        one = inspect.Parameter
        kind = one.KEYWORD_ONLY if argument.kwarg_only else one.POSITIONAL_OR_KEYWORD
        default = argument.default_value if argument.has_default_value() else one.empty
        return one(argument.name, kind, default=default, annotation=_ANNOTATIONS[str(argument.type)])

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        values = dict(self.defaults)
        values.update(zip(self.names, args, strict=False))
        values.update(kwargs)
        return values

    def _parts(self, values: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, int | None]]:
        tensors = {name: values[name] for name in self.tensors if values[name] is not None}
        return tensors, {name: values[name] for name in self.integers}

    def cpu(self, *args: Any, **kwargs: Any) -> Any:
        refusal = compiled.refusal()
        if refusal is not None:
            raise LibraryError(str(refusal))
        values = self.bind(args, kwargs)
        tensors, attributes = self._parts(values)
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu" or tensor.layout != torch.strided:
                raise ArgumentError(
                    f"{self.name}: {name} is a {tensor.layout} tensor on {tensor.device}, "
                    "all tensors must be dense and on the same device (cpu)",
                    argument=name,
                )
        shapes = tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
        group_ep = values["group_ep"]
        find = functools.partial(
            comm.lookup, group_ep, attributes["ep_world_size"] or 0, attributes["ep_rank_id"] or 0
        )
        comm_alg = values.get("comm_alg", "")
        plan, communicator = native.plan_for(
            self.name, self.code, self.contract, group_ep, comm_alg, shapes, attributes, find, comm.place
        )
        inputs = {name: tensor.contiguous() for name, tensor in tensors.items()}
        outputs = native.run(plan, communicator, inputs)
        if compiled.active():
            ops_compiled.remember(self.positions(), group_ep, plan, communicator)
        return tuple(outputs) if self.code == native.OP_DISPATCH else outputs[0]

    @functools.cache  # noqa: B019  there are four, for good
    def positions(self) -> list[int]:
        """Of every argument among the native inputs; -1: it is no tensor."""
        names = native.tensor_names()
        return [names.index(name) if name in self.tensors else -1 for name in self.names]

    def npu(self, *args: Any, **kwargs: Any) -> Any:
        """PrivateUse1: the same checks, then CANN. Reached only with torch_npu's tensors."""
        values = self.bind(args, kwargs)
        tensors, attributes = self._parts(values)
        outputs = npu_launch.call(self.name, self.code, self.contract, values, tensors, attributes)
        return tuple(outputs) if self.code == native.OP_DISPATCH else outputs[0]

    def autograd(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        keys = keys & torch._C._after_autograd_keyset
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        needing_grad = [tensor for tensor in given if tensor.requires_grad]
        if not needing_grad or not torch.is_grad_enabled():
            return self.below_autograd(keys, args, kwargs)
        return _NotDifferentiable.apply(self, keys, args, kwargs, *needing_grad)  # type: ignore[no-untyped-call]

    def below_autograd(self, keys: Any, args: Any, kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload.redispatch(keys, *args, **kwargs)

    def fake(self, *args: Any, **kwargs: Any) -> Any:
        """Outputs as torch_npu's C++ allocates them, from shapes, dtypes and attributes alone.

        No communicator is looked up. What the kernels refuse (TP 2, shared ranks) is inferred all the same.
        """
        _keep_order_in_inductor(self.overload)  # every compiler comes by here, after it was imported
        values = self.bind(args, kwargs)
        tensors, attributes = self._parts(values)
        self._check_sizes_known(tensors, attributes)
        rows, ids = tensors[self.names[0]], tensors["expert_ids"]
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        batch, topk, hidden = ids.shape[0], int(ids.shape[1]), rows.shape[1]
        outputs = native.infer(self.code, self.contract, dtypes, attributes, batch, topk, hidden)
        made = [rows.new_empty(shape, dtype=dtype or rows.dtype) for dtype, shape in outputs]
        y_dtype = resolve_dtype(values.get("y_dtype"), "y_dtype")
        if y_dtype is not None:
            made[0] = rows.new_empty(outputs[0][1], dtype=y_dtype)
        return tuple(made) if self.code == native.OP_DISPATCH else made[0]

    def _check_sizes_known(self, tensors: dict[str, torch.Tensor], attributes: dict[str, int | None]) -> None:
        """The rules without which outputs have no size; all others are checked when the op runs."""

        def refuse(argument: str, text: str) -> ArgumentError:
            return ArgumentError(f"{self.name}: {argument} {text}", argument=argument)

        for name in (self.names[0], "expert_ids"):
            if name not in tensors:
                raise refuse(name, "is None, it is required")
            if tensors[name].dim() != 2:
                raise refuse(name, f"has {tensors[name].dim()} dimensions, it must have 2")
        device = tensors[self.names[0]].device
        for name, tensor in tensors.items():
            if tensor.device != device:
                raise refuse(
                    name, f"is on {tensor.device}, {self.names[0]} on {device}: they must be on one device"
                )
        sizes = {name: value for name, value in attributes.items() if value is not None}
        for name, value in [*sizes.items(), ("expert_ids", tensors["expert_ids"].shape[1])]:
            limit = _MAX_BATCHES if name == "global_bs" else _MAX_SIZE
            if not -limit <= value <= limit:
                raise refuse(
                    name, f"of {value} is out of the range that sizes are computed in, -{limit}..{limit}"
                )
        world = sizes["ep_world_size"]
        if world < 1:
            raise refuse("ep_world_size", f"is {world}, it must be at least 1")
        for name in ("ep_rank_id", "shared_expert_rank_num"):
            if not 0 <= sizes[name] < world:
                raise refuse(name, f"is {sizes[name]}, it must be in 0..{world - 1} (ep_world_size - 1)")

    def public(self, doc: str, launch: compiled.Caller | None) -> Callable[..., Any]:
        overload, compiling = self.overload, torch.compiler.is_dynamo_compiling

        def call(*args: Any, **kwargs: Any) -> Any:
            if launch is not None and not compiling():
                made = launch(args, kwargs)
                if made is not None:
                    return made
            return overload(*args, **kwargs)

        call.__name__ = call.__qualname__ = self.name
        call.__doc__ = doc
        returns = Dispatched if self.code == native.OP_DISPATCH else torch.Tensor
        signature = inspect.Signature(self.parameters, return_annotation=returns)
        call.__signature__ = signature  # type: ignore[attr-defined]
        return call


def _register(name: str) -> Callable[..., Any]:
    op = _Op(name)
    for key in _OTHER_LAYOUTS:
        _LIBRARY.impl(name, op.cpu, key)
    _LIBRARY.impl(name, op.npu, "PrivateUse1")
    torch.library.register_fake(f"{NAMESPACE}::{name}", op.fake, lib=_LIBRARY)
    launch = None
    if compiled.active():
        launch = ops_compiled.install(name, op.names, op.cpu, op.autograd)
    else:
        _LIBRARY.impl(name, op.cpu, "CPU")
        _LIBRARY.impl(name, op.autograd, "Autograd", with_keyset=True)
    # Peers wait for every call: no compiler may drop one whose results are unused, merge two equal ones, or
    # swap two. The first keeps calls in any fx graph; the second chains them by a token, so that no two are
    # equal or independent.
    has_side_effect(op.overload)
    _register_effectful_op(op.overload, _EffectType.ORDERED)
    return op.public(DOCS[name], launch)


npu_moe_distribute_dispatch: Callable[..., Dispatched] = _register("npu_moe_distribute_dispatch")
npu_moe_distribute_dispatch_v2: Callable[..., Dispatched] = _register("npu_moe_distribute_dispatch_v2")
npu_moe_distribute_combine: Callable[..., torch.Tensor] = _register("npu_moe_distribute_combine")
npu_moe_distribute_combine_v2: Callable[..., torch.Tensor] = _register("npu_moe_distribute_combine_v2")
