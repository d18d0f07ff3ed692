"""The custom ops ``torch.ops.ascend_moe.npu_moe_distribute_*``: torch_npu's schemas, CPU kernels on the twin.

The public functions here are the same ops with the same argument names and defaults.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.fx.node import has_side_effect

from . import comm, native
from .errors import ArgumentError, AscendMoeError
from .experts_dtype import resolve_dtype
from .inductor_order import keep_order
from .schemas import NAMESPACE, SCHEMAS

_LIBRARY: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
# Beyond these no rank count, expert count or K makes sense, and the sizes of outputs would overflow.
_MAX_SIZE, _MAX_BATCHES = 2**15, 2**31 - 1
# Layouts without a kernel: the op of dense tensors refuses them by name.
_OTHER_LAYOUTS = ("SparseCPU", "SparseCsrCPU", "MkldnnCPU", "QuantizedCPU")
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
            self.name, self.code, self.contract, group_ep, comm_alg, shapes, attributes, find
        )
        inputs = {name: tensor.contiguous() for name, tensor in tensors.items()}
        outputs = native.run(plan, communicator, inputs)
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
        keep_order(self.overload)  # every compiler comes by here, after it was imported
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

    def public(self, doc: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.overload(*args, **kwargs)

        call.__name__ = call.__qualname__ = self.name
        call.__doc__ = doc
        returns = Dispatched if self.code == native.OP_DISPATCH else torch.Tensor
        signature = inspect.Signature(self.parameters, return_annotation=returns)
        call.__signature__ = signature  # type: ignore[attr-defined]
        return call


def _register(name: str, doc: str) -> Callable[..., Any]:
    op = _Op(name)
    for key in ("CPU", *_OTHER_LAYOUTS):
        _LIBRARY.impl(name, op.cpu, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", op.fake, lib=_LIBRARY)
    _LIBRARY.impl(name, op.autograd, "Autograd", with_keyset=True)
    # Peers wait for every call: no compiler may drop one whose results are unused, merge two equal ones, or
    # swap two. The first keeps calls in any fx graph; the second chains them by a token, so that no two are
    # equal or independent.
    has_side_effect(op.overload)
    _register_effectful_op(op.overload, _EffectType.ORDERED)
    return op.public(doc)


_COMMON = """
    Accepted and ignored, CANN alone uses them:
    {ignored}.
    Refused by name until they are supported: tp_world_size 2, shared_expert_rank_num above 0,
    shared_expert_num above 1, expert_shard_type 1{refused}.

    Collective: all ranks of group_ep call the same ops in the same order, and wait for each other at most
    ASCEND_MOE_TIMEOUT_S seconds. Compilers keep every call, and their order. Not differentiable yet.

    Raises:
        ArgumentError, WindowTooSmall: this rank's arguments; nothing was sent, a corrected call works.
        InvalidExpertId, RoutingOverflow, ConfigMismatch: on every rank; the communicator stays usable.
        {mismatch}PeerLost, CommTimeout, CorruptStatus: the communicator must be closed and opened afresh.

    Source: torch_npu.{name}.
"""

_DISPATCH_DOC = """Sends every (token, k) row to the rank that owns its expert, and returns the rows received.

    BS tokens of H elements, K experts a token, W = ep_world_size ranks, E = moe_expert_num experts,
    L = E / W local ones, G = global_bs or BS*W, A = G * min(L, K) rows at most.

    Args:
        x: (BS, H) bfloat16, float16 or float32; rows a multiple of 32 bytes, H <= 8192.
        expert_ids: (BS, K) int32 in 0..E-1, or -1: not routed. BS <= 4096, K <= 16.
        group_ep: name of the EP group: ``ascend_moe.comm_name``, a live c10d group name, or a LocalCluster's.
        ep_world_size, ep_rank_id: W, at most 64, and this rank's place in the group.
        moe_expert_num: E, a multiple of W, at most 1024.
        scales: (E, H) float32 smoothing factors, with quant_mode 2 only.
        x_active_mask: (BS,) or (BS, K) bool; masked pairs are not sent and their ids not looked at.
        expert_scales: (BS, K) float32; only lengthens ep_recv_counts, as in CANN.
        quant_mode: 0 none, 2 int8 with one scale a token.
        global_bs: 0 (every rank has the same BS) or W * the largest BS.
        expert_token_nums_type: 0 cumulative, 1 counts.{more}

    Returns:
        expand_x (A, H), dtype of x or int8, rows by (local expert, source rank, flat (token, k));
        dynamic_scales (A,) float32, with quant_mode 2 the factor that turns a row back;
        {third};
        expert_token_nums (L,) int64;
        ep_recv_counts (W*L,) int32, inclusive prefix sums over [local expert][source rank];
        tp_recv_counts (tp_world_size,) int32; expand_scales (A,) float32, without meaning here.
        Rows past ep_recv_counts[W*L-1] are undefined.
"""

_COMBINE_DOC = """Returns the experts' rows to their tokens and sums them, weighted by expert_scales.

    fp32, multiply then add, k ascending, one rounding to the dtype of expand_x: bit-exact whatever the
    number of ranks or cores. Rows of inactive tokens are zeros.

    Args:
        expand_x: (>= rows, H) bfloat16, float16 or float32, in dispatch's row order.
        expert_ids, x_active_mask, global_bs, group_ep, ep_world_size, ep_rank_id, moe_expert_num: as given to
            dispatch.
        {third}
        ep_send_counts: (>= W*L,) int32, dispatch's ep_recv_counts.
        expert_scales: (BS, K) float32 weights.
        {shared}

    Returns:
        (BS, H), dtype of expand_x.
"""

_ALGORITHMS = """
        comm_alg: '', 'window', 'fullmesh', 'fullmesh_v1' or 'fullmesh_v2': all run the window algorithm."""
_IGNORED = "group_tp with one TP rank (tp_world_size 0 or 1, tp_rank_id 0)"
_IGNORED_COMBINE = f"tp_send_counts, expand_scales, {_IGNORED}"
_SPECIAL = ",\n    zero_expert_num, copy_expert_num, const_expert_num, elastic_info, performance_info"
_MISMATCH = "RoutingMismatch: combine's ids, mask or counts are not dispatch's.\n        "

npu_moe_distribute_dispatch: Callable[..., Dispatched] = _register(
    "npu_moe_distribute_dispatch",
    _DISPATCH_DOC.format(
        third="expand_idx (BS*K,) int32: earlier pairs of this rank with the same expert", more=""
    )
    + _COMMON.format(ignored=_IGNORED, refused="", mismatch="", name="npu_moe_distribute_dispatch"),
)
npu_moe_distribute_dispatch_v2: Callable[..., Dispatched] = _register(
    "npu_moe_distribute_dispatch_v2",
    _DISPATCH_DOC.format(
        third="assist_info_for_combine (max(BS*K, A*128),) int32: (source rank, token, k) of row i at 3*i",
        more=_ALGORITHMS,
    )
    + _COMMON.format(
        ignored=_IGNORED,
        refused=_SPECIAL + ", y_dtype,\n    x_dtype, scales_dtype",
        mismatch="",
        name="npu_moe_distribute_dispatch_v2",
    ),
)
npu_moe_distribute_combine: Callable[..., torch.Tensor] = _register(
    "npu_moe_distribute_combine",
    _COMBINE_DOC.format(
        third="expand_idx: (BS*K,) int32, dispatch's.",
        shared="shared_expert_x: must be None, the v2 op adds it.",
    )
    + _COMMON.format(
        ignored=_IGNORED_COMBINE + ",\n    group_list_type",
        refused=", comm_quant_mode,\n    activation_scale, weight_scale, group_list, out_dtype other than 0",
        mismatch=_MISMATCH,
        name="npu_moe_distribute_combine",
    ),
)
npu_moe_distribute_combine_v2: Callable[..., torch.Tensor] = _register(
    "npu_moe_distribute_combine_v2",
    _COMBINE_DOC.format(
        third="assist_info_for_combine: (>= 3*rows,) int32, dispatch's.",
        shared="shared_expert_x: (BS, H) or (a, b, H) with a*b = BS, added last with weight 1." + _ALGORITHMS,
    )
    + _COMMON.format(
        ignored=_IGNORED_COMBINE,
        refused=_SPECIAL
        + ",\n    comm_quant_mode, ori_x, const_expert_alpha_1, const_expert_alpha_2, const_expert_v",
        mismatch=_MISMATCH,
        name="npu_moe_distribute_combine_v2",
    ),
)
