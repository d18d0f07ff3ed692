"""Registration of torch_npu's other MoE operators as ``torch.ops.ascend_moe.*``: CPU, NPU, Meta and autograd.

`ascend_moe.ops` registers dispatch and combine. On the CPU an operator here is the public function of the same name. On
an NPU it is ``torch.ops.npu``'s, except for the two that use the windows, which are this package's.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from ascend_moe import experts, routers
from ascend_moe.errors import ArgumentError, LibraryError
from ascend_moe.experts import grouped_matmul
from ascend_moe.native.torch_npu import WITHOUT_GRADIENT, fitted, operators, refused
from ascend_moe.ops import registration
from ascend_moe.ops.registration import NAMESPACE, TORCH_NPU_SCHEMAS, list_overload_of, schema_of
from ascend_moe.torch_npu_ops import alltoallv, collectives, init_routing, matmul_epilogues, meta, permute, sharding

# Operators by what holds for them. Differentiable: by torch's gradients on the CPU, by torch_npu's on an NPU.
_DIFFERENTIABLE = (
    experts.npu_grouped_matmul,
    experts.npu_swiglu,
    routers.npu_moe_gating_top_k,
    routers.npu_moe_gating_top_k_softmax,
    routers.npu_moe_gating_top_k_softmax_v2,
    permute.npu_moe_token_permute,
    permute.npu_moe_token_unpermute,
)
_OVER_SHARDS = (permute.npu_moe_token_permute, permute.npu_moe_token_unpermute)
# They use this package's windows on every device, and wait for the other ranks, as those of an all-to-all do.
_WINDOWS = (collectives.npu_moe_distribute_combine_add_rms_norm, collectives._npu_distribute_barrier)
_ALL_TO_ALL = (alltoallv.npu_alltoallv_gmm, alltoallv.npu_gmm_alltoallv)
_OTHERS = (
    init_routing.npu_moe_update_expert,
    experts.npu_clipped_swiglu,
    experts.npu_dequant_swiglu_quant,
    experts.npu_dynamic_quant,
    matmul_epilogues.npu_grouped_matmul_swiglu_quant,
    matmul_epilogues.npu_grouped_matmul_swiglu_quant_v2,
    matmul_epilogues.npu_grouped_matmul_finalize_routing,
    init_routing.npu_moe_init_routing,
    init_routing.npu_moe_init_routing_v2,
    init_routing.npu_moe_compute_expert_tokens,
    permute.npu_moe_finalize_routing,
    permute.npu_moe_re_routing,
)


def _tensors(values: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors among the arguments, also those in lists, with the argument's name."""
    return [
        (name, item)
        for name, value in values.items()
        for item in (value if isinstance(value, (list, tuple)) else (value,))
        if isinstance(item, torch.Tensor)
    ]


def _contiguous(outputs: Any) -> Any:
    """Return contiguous outputs, as on an NPU and on Meta, whatever strides the inputs have."""
    if isinstance(outputs, torch.Tensor):
        return outputs.contiguous()
    return type(outputs)(None if output is None else output.contiguous() for output in outputs)


class _VendorOp(registration.Operator):
    """One overload of one operator, and its implementation for each dispatch key."""

    def __init__(self, qualified: str, run: Callable[..., Any], schema: str) -> None:
        TORCH_NPU_SCHEMAS[qualified] = schema
        super().__init__(qualified, schema)
        self.run, self.windows = run, run in _WINDOWS
        self.collective = run in (*_WINDOWS, *_ALL_TO_ALL)
        self.eager = getattr(run, "eager", run)
        self.differentiable = run in (*_DIFFERENTIABLE, collectives.npu_moe_distribute_combine_add_rms_norm)
        if run in _OTHERS:
            WITHOUT_GRADIENT.add(self.name)
        registration.LIBRARY.impl(qualified, self.cpu, "CPU")
        registration.LIBRARY.impl(qualified, self.npu, "PrivateUse1")
        registration.LIBRARY.impl(qualified, self.autograd, "Autograd", with_keyset=True)
        torch.library.register_fake(f"{NAMESPACE}::{qualified}", self.fake, lib=registration.LIBRARY)
        if self.collective:
            self.keep_calls()
        if run in _OVER_SHARDS:
            for callable_ in (self.packet, self.overload):
                callable_._op = sharding.over_shards(callable_._op, self.bind)

    def cpu(self, *args: Any, **kwargs: Any) -> Any:
        for name, tensor in _tensors(self.bind(args, kwargs)):
            if tensor.device.type != "cpu":
                raise ArgumentError(
                    f"{self.name}: {name} is on {tensor.device}, other tensors are on cpu: move all to one device",
                    argument=name,
                )
        return _contiguous(self.eager(*args, **kwargs))

    def npu(self, *args: Any, **kwargs: Any) -> Any:
        """Run torch_npu's operator, or this package's if it uses windows or that one refuses the arguments."""
        if self.windows or refused(self.name, kwargs):
            return self.eager(*args, **kwargs)
        # The tensors are on its device, so torch_npu is already imported.
        theirs = getattr(getattr(torch.ops.npu, self.name, None), self.overload._overloadname, None)
        if theirs is None:
            raise LibraryError(f"this torch_npu has no {self.qualified}; install a newer torch_npu")
        if self.name in operators().lacks:
            return theirs(**fitted(self.name, self.bind(args, kwargs)))
        return theirs(*args, **kwargs)

    def fake(self, *args: Any, **kwargs: Any) -> Any:
        if self.collective:
            # Called by every compiler after its import.
            registration.keep_order_in_inductor(self.overload)
        given = self.bind(args, kwargs)
        tensors = _tensors(given)
        for name, tensor in tensors:
            if tensor.is_meta and not all(other.is_meta for _, other in tensors):  # torch would infer only
                text = f"{self.name}: {name} is on meta, other tensors are not; put all or none there"
                raise ArgumentError(text, argument=name)
        try:
            return getattr(meta, self.run.__name__)(SimpleNamespace(**given))
        except ArgumentError as error:
            raise ArgumentError(f"{self.name}: {error}", **error.details) from None

    def autograd(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        keys = keys & torch._C._after_autograd_keyset
        given = [tensor for _, tensor in _tensors(self.bind(args, kwargs))]
        needing_grad = [tensor for tensor in given if tensor.requires_grad]
        if not needing_grad or not torch.is_grad_enabled():
            return self.below_autograd(keys, args, kwargs)
        bound = self.bind(args, kwargs)
        if self.run in _ALL_TO_ALL:
            return alltoallv.with_gradients(self.name, bound)
        if self.run is experts.npu_grouped_matmul and grouped_matmul.has_products_for_gradients(bound):
            return grouped_matmul.multiply_with_gradient(self.overload, bound)
        # Operators over the windows consist of ops with gradients on every device.
        npu = given[0].device.type == "npu" and not self.windows
        if not self.differentiable or (npu and not self._torch_npu_differentiates()):
            outputs = self.below_autograd(keys, args, kwargs)
            listed = isinstance(outputs, list)  # torch would take the tensors in a list for constants
            made = registration.NotDifferentiable.apply(  # type: ignore[no-untyped-call]
                self.name, tuple(outputs) if listed else outputs, *needing_grad
            )
            return list(made) if listed else made
        return self.npu(*args, **kwargs) if given[0].device.type == "npu" else self.cpu(*args, **kwargs)

    def _torch_npu_differentiates(self) -> bool:
        # torch_npu does not differentiate all of these; torch would only warn and omit the gradient.
        name, key = f"npu::{self.qualified}", "AutogradPrivateUse1"
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))

    def below_autograd(self, keys: Any, args: Any, kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload.redispatch(keys, *args, **kwargs)


OPS: dict[str, _VendorOp] = {}


for _run in (*_WINDOWS, *_ALL_TO_ALL, *_DIFFERENTIABLE, *_OTHERS):
    OPS[_run.__name__] = _VendorOp(_run.__name__, _run, schema_of(_run))
_LIST = "npu_grouped_matmul.List"
OPS[_LIST] = _VendorOp(_LIST, experts.npu_grouped_matmul, list_overload_of(OPS["npu_grouped_matmul"].schema))
