"""Megatron-LM's shared expert over the tensor-parallel group of attention, whole or in five steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ascend_moe._tensors import FittedModule, need_values, without_autocast
from ascend_moe.comm import group_of
from ascend_moe.errors import AscendMoeError, need, with_typed_errors
from ascend_moe.experts import npu_swiglu
from ascend_moe.ops.collectives import gather, reduce_scatter

Collective = Callable[[Tensor, "dist.ProcessGroup"], Tensor]
Pair = tuple[Collective, Collective]


def _same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _all_reduced(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return gather(x, group).flatten(0, 1)


class _Through(torch.autograd.Function):
    """``there(x, group)``, with the gradient ``back(grad, group)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, there: Collective, back: Collective) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.back(grad, ctx.group), None, None, None


def _parallel(x: Tensor, module: SharedExpertMLP, shared: Pair, sequence: Pair) -> Tensor:
    """Return x after a collective of the tensor-parallel ranks; pairs: it and its gradient's."""
    if module.tp_group is None:
        return x
    pair = sequence if module.sequence_parallel else shared
    made: Tensor = _Through.apply(x, module.tp_group, *pair)  # type: ignore[no-untyped-call]
    return made


@without_autocast
def _product(x: Tensor, by: nn.Linear | Tensor) -> Tensor:
    made: Tensor = by(x) if isinstance(by, nn.Linear) else nn.functional.linear(x, by)
    return made


def _step_of_own_call(name: str) -> Callable[..., None]:
    """Return the method of a `SharedExpertMLP` that runs a step of its own call."""

    def step(self: SharedExpertMLP, overlapped_comm_output: Tensor | None = None) -> None:
        """Run this step of the module's own call; overlapped_comm_output is ignored."""
        getattr(self._steps(), name)()

    step.__name__ = name
    return step


_STEPS = ("pre_forward_comm", "linear_fc1_forward_and_act", "linear_fc2_forward", "post_forward_comm", "get_output")


class SharedExpertMLP(FittedModule):
    """Dense MLP for every token: ``silu(x @ gate) * (x @ up) @ down``, times sigmoid(x . g) if gated.

    ``forward`` runs all of it. To overlap it with the token dispatcher, run its five steps in this order:
    pre_forward_comm, linear_fc1_forward_and_act, linear_fc2_forward, post_forward_comm, get_output; another order
    raises AscendMoeError. `begin` returns an independent call with these steps; the module's own methods are one such
    call. Steps run on the caller's stream.

    Parameters (Megatron-LM's names): linear_fc1.weight ``(2S / tp, H)``, gate rows first; linear_fc2.weight
    ``(H, S / tp)``; gate_weight ``(1, H)``.

    Args:
        hidden_size: H. intermediate_size: S, a multiple of the tp size.
        gate: multiply the output by sigmoid(x . gate_weight).
        tp_group: tensor-parallel group of attention; None: no tensor parallelism.
        sequence_parallel: the input is this rank's share of the sequence: it is gathered before, the sum scattered
            after. False: every rank of tp_group has the same input.
        dtype, device: those of the weights.

    Raises ArgumentError if an argument breaks one of these rules. Source: Megatron-LM ``SharedExpertMLP``.
    """

    _shared = ("tp_group",)

    @with_typed_errors
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        gate: bool = False,
        *,
        tp_group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        tp_group = None if tp_group is None else group_of("tp_group", tp_group)
        size = 1 if tp_group is None else tp_group.size()
        fits = intermediate_size >= 1 and intermediate_size % size == 0
        need(fits, "intermediate_size", "is {}; it must be a multiple of the {} tp ranks", intermediate_size, size)
        made: dict[str, Any] = {"bias": False, "dtype": dtype, "device": device}
        self.linear_fc1 = nn.Linear(hidden_size, 2 * intermediate_size // size, **made)
        self.linear_fc2 = nn.Linear(intermediate_size // size, hidden_size, **made)
        self.gate_weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype, device=device)) if gate else None
        self.tp_group = tp_group if size > 1 else None
        self.sequence_parallel = sequence_parallel
        self._call: SharedExpertCall | None = None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the MLP of hidden_states ``(..., H)``, in its shape."""
        call = self.begin()
        call.pre_forward_comm(hidden_states)
        for step in _STEPS[1:-1]:
            getattr(call, step)()
        return call.get_output()

    def begin(self) -> SharedExpertCall:
        """Return a new call, independent of others, whose five steps the caller runs."""
        return SharedExpertCall(self)

    def _steps(self) -> SharedExpertCall:
        if self._call is None:
            self._call = self.begin()
        return self._call

    def wait_current_stream(self) -> None:
        """Do nothing: the steps run on the caller's stream. Megatron-LM's dispatchers call it."""

    def pre_forward_comm(self, input: Tensor, wait_current_stream: bool = True) -> None:
        """Run the first step of the module's own call on ``input`` ``(..., H)``; wait_current_stream is ignored."""
        self._steps().pre_forward_comm(input)

    linear_fc1_forward_and_act, linear_fc2_forward, post_forward_comm = map(_step_of_own_call, _STEPS[1:-1])

    def get_output(self) -> Tensor:
        """Run the last step of the module's own call: return the output, of input's shape, and end the call."""
        output = self._steps().get_output()
        self._call = None
        return output


class SharedExpertCall:
    """One forward of a `SharedExpertMLP` in five steps. Raises AscendMoeError if a step is called out of order.

    Args:
        module: the MLP to run.
    """

    def __init__(self, module: SharedExpertMLP) -> None:
        self._module, self._next = module, 0
        self._value: Tensor | None = None
        self._gate: Tensor | None = None

    def _step(self, name: str) -> Tensor:
        expected = _STEPS[self._next] if self._next < len(_STEPS) else "nothing: this call has ended"
        if name != expected:
            raise AscendMoeError(f"SharedExpertMLP: {name} was called, expected {expected}; call the steps in order")
        self._next += 1
        return self._value if self._value is not None else torch.empty(0, dtype=torch.float32, device="cpu")

    def pre_forward_comm(self, input: Tensor) -> None:
        """Compute the gate of ``input`` ``(..., H)``; with sequence_parallel gather the tensor-parallel ranks' rows.

        Raises ArgumentError if a weight is on meta; like every step AscendMoeError if another step is next.
        """
        self._step("pre_forward_comm")
        module = self._module
        need_values(module, input)
        if module.gate_weight is not None:
            self._gate = torch.sigmoid(_product(input, module.gate_weight))
        self._value = _parallel(input, module, (_same, _all_reduced), (_gathered, reduce_scatter))

    def linear_fc1_forward_and_act(self) -> None:
        """Compute the product with linear_fc1 and SwiGLU."""
        self._value = npu_swiglu(_product(self._step("linear_fc1_forward_and_act"), self._module.linear_fc1))

    def linear_fc2_forward(self) -> None:
        """Compute the product with linear_fc2, this rank's part of the output."""
        self._value = _product(self._step("linear_fc2_forward"), self._module.linear_fc2)

    def post_forward_comm(self) -> None:
        """Sum the tensor-parallel ranks' parts; with sequence_parallel each rank keeps its share of the rows."""
        value = self._step("post_forward_comm")
        self._value = _parallel(value, self._module, (_all_reduced, _same), (reduce_scatter, _gathered))

    def get_output(self) -> Tensor:
        """Return the output, of the input's shape, times the gate if there is one, and end the call."""
        value = self._step("get_output")
        self._value = None
        return value if self._gate is None else value * self._gate
