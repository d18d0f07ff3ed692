"""The custom ops ``torch.ops.ascend_moe.npu_moe_distribute_*``: torch_npu's schemas, CPU kernels on the twin.

The public functions here are the same ops with the same argument names and defaults.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.node import has_side_effect

from . import comm, native
from .errors import ArgumentError
from .schemas import NAMESPACE, SCHEMAS

_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_OP_CODES = {"dispatch": native.OP_DISPATCH, "combine": native.OP_COMBINE}


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
        kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
        default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        return inspect.Parameter(argument.name, kind, default=default)

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
        plan, communicator = native.plan_for(
            self.name, self.code, self.contract, group_ep, values.get("comm_alg", ""), shapes, attributes, find
        )
        inputs = {name: tensor.contiguous() for name, tensor in tensors.items()}
        outputs = native.run(plan, communicator, inputs)
        return tuple(outputs) if self.code == native.OP_DISPATCH else outputs[0]

    def fake(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes as torch_npu's C++ allocates them. BS and H may be symbolic: every size is affine in BS."""
        values = self.bind(args, kwargs)
        tensors, attributes = self._parts(values)
        rows = tensors["x"] if self.code == native.OP_DISPATCH else tensors["expand_x"]
        torch._check(rows.dim() == 2, lambda: f"{self.name}: x must have 2 dimensions")
        torch._check(tensors["expert_ids"].dim() == 2, lambda: f"{self.name}: expert_ids must have 2 dimensions")
        batch, hidden = tensors["expert_ids"].shape[0], rows.shape[1]
        at = [self._outputs_at(tensors, attributes, bs) for bs in (0, 1)]
        made = []
        for (dtype, base), (_, step) in zip(*at, strict=True):
            sizes = [low + (high - low) * batch if high != low else low for low, high in zip(base, step, strict=True)]
            if len(sizes) == 2:
                sizes[1] = hidden
            made.append(rows.new_empty(sizes, dtype=dtype))
        return tuple(made) if self.code == native.OP_DISPATCH else made[0]

    def _outputs_at(
        self, tensors: dict[str, torch.Tensor], attributes: dict[str, int | None], batch: int
    ) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        # Only BS and K of the ids matter to the sizes; other dimensions stand for themselves.
        topk = int(tensors["expert_ids"].shape[1])
        shapes = []
        for name, tensor in tensors.items():
            shapes.append((name, tensor.dtype, (batch, topk) if name == "expert_ids" else (batch, 1)))
        spec = native.describe(self.code, self.contract, "g", "", tuple(shapes), attributes)
        return native.outputs_of(spec)

    def public(self, doc: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.overload(*args, **kwargs)

        call.__name__ = call.__qualname__ = self.name
        call.__doc__ = doc
        call.__signature__ = inspect.Signature(self.parameters)  # type: ignore[attr-defined]
        return call


def _register(name: str, doc: str) -> Callable[..., Any]:
    op = _Op(name)
    _LIBRARY.impl(name, op.cpu, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", op.fake, lib=_LIBRARY)
    # Peers wait for every call: no compiler may drop one whose results are unused, or merge two.
    has_side_effect(op.overload)
    return op.public(doc)


_COMMON = """
    Args that only CANN uses are accepted and ignored: group_tp (with tp_world_size 0 or 1){ignored}.
    Refused by name until they are supported: tp_world_size 2, shared_expert_rank_num > 0, special experts,
    elastic_info, performance_info, comm_quant_mode.

    Collective: all ranks of group_ep call the same ops in the same order. ASCEND_MOE_TIMEOUT_S bounds the wait.

    Raises:
        ArgumentError, WindowTooSmall: this rank's arguments; nothing was sent, a corrected call works.
        InvalidExpertId, RoutingOverflow, ConfigMismatch: on every rank; the communicator stays usable.
        {mismatch}PeerLost, CommTimeout, CorruptStatus: the communicator must be closed and opened afresh.

    Source: torch_npu.{name}.
"""

_DISPATCH_DOC = """Sends every (token, k) row to the rank that owns its expert, and returns the rows this rank received.

    BS tokens of H elements, K experts a token, W = ep_world_size ranks, E = moe_expert_num experts,
    L = E / W local ones, G = global_bs or BS*W, A = G * min(L, K) rows at most.

    Args:
        x: (BS, H) bfloat16, float16 or float32; rows a multiple of 32 bytes, H <= 8192.
        expert_ids: (BS, K) int32 in 0..E-1, or -1: not routed.
        group_ep: name of the EP group: ``ascend_moe.comm_name``, a live c10d group name, or a LocalCluster's.
        scales: (E, H) float32 smoothing factors, with quant_mode 2 only.
        x_active_mask: (BS,) or (BS, K) bool; masked pairs are not sent and their ids not looked at.
        expert_scales: (BS, K) float32; only lengthens ep_recv_counts, as in CANN.
        quant_mode: 0 none, 2 int8 with one scale a token.
        global_bs: 0 (every rank has the same BS) or W * the largest BS.
        expert_token_nums_type: 0 cumulative, 1 counts.

    Returns:
        expand_x (A, H), rows by (local expert, source rank, flat (token, k)); dynamic_scales (A,) float32;
        {third}; expert_token_nums (L,) int64;
        ep_recv_counts (W*L,) int32, inclusive prefix sums over [local expert][source rank];
        tp_recv_counts (tp_world_size,) int32; expand_scales (A,) float32, without meaning here.
        Rows past ep_recv_counts[W*L-1] are undefined.
"""

_COMBINE_DOC = """Returns the experts' rows to their tokens and sums them, weighted by expert_scales.

    fp32, multiply then add, k ascending, one rounding to the dtype of expand_x: bit-exact whatever the number of
    ranks or cores. Rows of inactive tokens are zeros.

    Args:
        expand_x: (>= rows, H) bfloat16, float16 or float32, in dispatch's row order.
        expert_ids, x_active_mask, global_bs: as given to dispatch.
        {third}
        ep_send_counts: (>= W*L,) int32, dispatch's ep_recv_counts.
        expert_scales: (BS, K) float32 weights.
        {shared}

    Returns:
        (BS, H), dtype of expand_x.
"""

_IGNORED_COMBINE = ", tp_send_counts, expand_scales"
_MISMATCH = "RoutingMismatch: combine's ids, mask or counts are not dispatch's.\n        "

npu_moe_distribute_dispatch = _register(
    "npu_moe_distribute_dispatch",
    _DISPATCH_DOC.format(third="expand_idx (BS*K,) int32: earlier pairs of this rank with the same expert")
    + _COMMON.format(ignored="", mismatch="", name="npu_moe_distribute_dispatch"),
)
npu_moe_distribute_dispatch_v2 = _register(
    "npu_moe_distribute_dispatch_v2",
    _DISPATCH_DOC.format(
        third="assist_info_for_combine (A*128,) int32: (source rank, token, k) of row i at 3*i"
    )
    + _COMMON.format(ignored="", mismatch="", name="npu_moe_distribute_dispatch_v2"),
)
npu_moe_distribute_combine = _register(
    "npu_moe_distribute_combine",
    _COMBINE_DOC.format(
        third="expand_idx: (BS*K,) int32, dispatch's.",
        shared="shared_expert_x, activation_scale, weight_scale, group_list: must be None; out_dtype 0.",
    )
    + _COMMON.format(
        ignored=_IGNORED_COMBINE + ", group_list_type", mismatch=_MISMATCH, name="npu_moe_distribute_combine"
    ),
)
npu_moe_distribute_combine_v2 = _register(
    "npu_moe_distribute_combine_v2",
    _COMBINE_DOC.format(
        third="assist_info_for_combine: (>= 3*rows,) int32, dispatch's.",
        shared="shared_expert_x: (BS, H) or (a, b, H) with a*b = BS, added last with weight 1.",
    )
    + _COMMON.format(ignored=_IGNORED_COMBINE, mismatch=_MISMATCH, name="npu_moe_distribute_combine_v2"),
)
