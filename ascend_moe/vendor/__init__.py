"""Registers torch_npu's other MoE operators as ``torch.ops.ascend_moe.*``: CPU, NPU, Meta and autograd.

`ascend_moe.ops` has the four of dispatch and combine. On the CPU an operator here is the public function of
the same name. On an NPU it is ``torch.ops.npu``'s, except for the two that use the windows: those are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.fx.node import has_side_effect

from ascend_moe.errors import ArgumentError, AscendMoeError, LibraryError
from ascend_moe.experts import npu_dequant_swiglu_quant, npu_dynamic_quant, npu_grouped_matmul, npu_swiglu
from ascend_moe.ops import registration
from ascend_moe.ops.schemas import NAMESPACE
from ascend_moe.routing import (
    npu_moe_gating_top_k,
    npu_moe_gating_top_k_softmax,
    npu_moe_gating_top_k_softmax_v2,
)
from ascend_moe.vendor import meta
from ascend_moe.vendor.balance import npu_moe_update_expert
from ascend_moe.vendor.collectives import _npu_distribute_barrier, npu_moe_distribute_combine_add_rms_norm
from ascend_moe.vendor.fused import (
    npu_grouped_matmul_finalize_routing,
    npu_grouped_matmul_swiglu_quant,
    npu_grouped_matmul_swiglu_quant_v2,
)
from ascend_moe.vendor.permute import (
    npu_moe_finalize_routing,
    npu_moe_re_routing,
    npu_moe_token_permute,
    npu_moe_token_unpermute,
)
from ascend_moe.vendor.routing import (
    npu_moe_compute_expert_tokens,
    npu_moe_init_routing,
    npu_moe_init_routing_v2,
)
from ascend_moe.vendor.schemas import VENDOR_SCHEMAS, list_overload_of, schema_of

_LIBRARY: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Kind:
    """The functions of one operator.

    ``differentiable``: torch's own gradients on the CPU, torch_npu's on an NPU. ``collective``: the operator
    waits for the other ranks and uses our windows on every device.
    """

    run: Callable[..., Any]
    meta: Callable[[Any], Any]
    differentiable: bool = False
    collective: bool = False


_GROUPED_MATMUL = _Kind(npu_grouped_matmul, meta.grouped_matmul, differentiable=True)
_KINDS = {
    kind.run.__name__: kind
    for kind in (
        _Kind(npu_moe_distribute_combine_add_rms_norm, meta.combine_add_rms_norm, collective=True),
        _Kind(_npu_distribute_barrier, meta.barrier, collective=True),
        _Kind(npu_moe_update_expert, meta.update_expert),
        _GROUPED_MATMUL,
        _Kind(npu_swiglu, meta.swiglu, differentiable=True),
        _Kind(npu_dequant_swiglu_quant, meta.dequant_swiglu_quant),
        _Kind(npu_grouped_matmul_swiglu_quant, meta.grouped_matmul_swiglu_quant),
        _Kind(npu_grouped_matmul_swiglu_quant_v2, meta.grouped_matmul_swiglu_quant_v2),
        _Kind(npu_grouped_matmul_finalize_routing, meta.grouped_matmul_finalize_routing),
        _Kind(npu_dynamic_quant, meta.dynamic_quant),
        _Kind(npu_moe_gating_top_k, meta.gating_top_k, differentiable=True),
        _Kind(npu_moe_gating_top_k_softmax, meta.gating_top_k_softmax, differentiable=True),
        _Kind(npu_moe_gating_top_k_softmax_v2, meta.gating_top_k_softmax_v2, differentiable=True),
        _Kind(npu_moe_init_routing, meta.init_routing),
        _Kind(npu_moe_init_routing_v2, meta.init_routing_v2),
        _Kind(npu_moe_compute_expert_tokens, meta.compute_expert_tokens),
        _Kind(npu_moe_token_permute, meta.token_permute, differentiable=True),
        _Kind(npu_moe_token_unpermute, meta.token_unpermute, differentiable=True),
        _Kind(npu_moe_finalize_routing, meta.finalize_routing),
        _Kind(npu_moe_re_routing, meta.re_routing),
    )
}
VENDOR_SCHEMAS.update((name, schema_of(kind.run)) for name, kind in _KINDS.items())
_KINDS["npu_grouped_matmul.List"] = _GROUPED_MATMUL
VENDOR_SCHEMAS["npu_grouped_matmul.List"] = list_overload_of(VENDOR_SCHEMAS["npu_grouped_matmul"])


class _NoGradient(torch.autograd.Function):
    """Runs an op below autograd; its backward raises: a model trained with missing gradients is wrong."""

    @staticmethod
    def forward(ctx: Any, op: _VendorOp, keys: Any, args: Any, kwargs: Any, *needing_grad: Any) -> Any:
        ctx.name = op.name
        outputs = op.below_autograd(keys, args, kwargs)
        # torch does not look into lists: it would take the tensors in one for constants.
        return tuple(outputs) if isinstance(outputs, list) else outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AscendMoeError(
            f"{ctx.name} is not differentiable: call it under torch.no_grad(), "
            "or detach() the inputs that require grad"
        )


def _tensors(values: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors among the arguments, also those in lists, with the argument's name."""
    return [
        (name, item)
        for name, value in values.items()
        for item in (value if isinstance(value, (list, tuple)) else (value,))
        if isinstance(item, torch.Tensor)
    ]


def _contiguous(outputs: Any) -> Any:
    """Contiguous outputs, as on an NPU and on Meta, whatever strides the inputs have."""
    if isinstance(outputs, torch.Tensor):
        return outputs.contiguous()
    return type(outputs)(output.contiguous() for output in outputs)


class _VendorOp:
    """One overload of one operator, and its implementation for each dispatch key."""

    def __init__(self, qualified: str, kind: _Kind) -> None:
        self.qualified, self.kind = qualified, kind
        self.name, _, overload = qualified.partition(".")
        self.overload_name = overload or "default"
        _LIBRARY.define(f"{qualified}{VENDOR_SCHEMAS[qualified]}")
        self.overload: Any = getattr(getattr(getattr(torch.ops, NAMESPACE), self.name), self.overload_name)
        arguments = self.overload._schema.arguments
        self.names = [argument.name for argument in arguments]
        self.defaults = {argument.name: argument.default_value for argument in arguments}
        self.returns_list = VENDOR_SCHEMAS[qualified].endswith("-> Tensor[]")

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return self.defaults | dict(zip(self.names, args, strict=False)) | kwargs

    def cpu(self, *args: Any, **kwargs: Any) -> Any:
        for name, tensor in _tensors(self.bind(args, kwargs)):
            if tensor.device.type != "cpu":
                raise ArgumentError(
                    f"{self.name}: {name} is on {tensor.device}, "
                    "all tensors must be on the same device (cpu)",
                    argument=name,
                )
        return _contiguous(self.kind.run(*args, **kwargs))

    def npu(self, *args: Any, **kwargs: Any) -> Any:
        """torch_npu's own operator. torch_npu is imported by then: the tensors are on its device."""
        if self.kind.collective:
            return self.kind.run(*args, **kwargs)
        theirs = getattr(getattr(torch.ops.npu, self.name, None), self.overload_name, None)
        if theirs is None:
            raise LibraryError(f"this torch_npu has no {self.qualified}; install a newer torch_npu")
        return theirs(*args, **kwargs)

    def fake(self, *args: Any, **kwargs: Any) -> Any:
        if self.kind.collective:
            # Every compiler runs this, and has been imported by then.
            registration.keep_order_in_inductor(self.overload)
        try:
            return self.kind.meta(SimpleNamespace(**self.bind(args, kwargs)))
        except ArgumentError as error:
            raise ArgumentError(f"{self.name}: {error}", **error.details) from None

    def autograd(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        keys = keys & torch._C._after_autograd_keyset
        given = [tensor for _, tensor in _tensors(self.bind(args, kwargs))]
        needing_grad = [tensor for tensor in given if tensor.requires_grad]
        if not needing_grad or not torch.is_grad_enabled():
            return self.below_autograd(keys, args, kwargs)
        npu = given[0].device.type == "npu"
        if not self.kind.differentiable or (npu and not self._torch_npu_differentiates()):
            outputs: Any = _NoGradient.apply(self, keys, args, kwargs, *needing_grad)  # type: ignore[no-untyped-call]
            return list(outputs) if self.returns_list else outputs
        return self.npu(*args, **kwargs) if npu else self.cpu(*args, **kwargs)

    def _torch_npu_differentiates(self) -> bool:
        # torch_npu does not differentiate all of ours: torch would only warn and leave the gradient out.
        name, key = f"npu::{self.qualified}", "AutogradPrivateUse1"
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))

    def below_autograd(self, keys: Any, args: Any, kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload.redispatch(keys, *args, **kwargs)

    def register(self) -> None:
        _LIBRARY.impl(self.qualified, self.cpu, "CPU")
        _LIBRARY.impl(self.qualified, self.npu, "PrivateUse1")
        _LIBRARY.impl(self.qualified, self.autograd, "Autograd", with_keyset=True)
        torch.library.register_fake(f"{NAMESPACE}::{self.qualified}", self.fake, lib=_LIBRARY)
        if self.kind.collective:
            # As in `ascend_moe.ops`: no compiler may drop, merge or reorder calls that other ranks wait for.
            has_side_effect(self.overload)
            _register_effectful_op(self.overload, _EffectType.ORDERED)


OPS: dict[str, _VendorOp] = {name: _VendorOp(name, _KINDS[name]) for name in VENDOR_SCHEMAS}
for _op in OPS.values():
    _op.register()
