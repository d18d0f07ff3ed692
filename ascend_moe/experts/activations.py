"""The activations between an expert's two products: one table of formulas, by name.

A formula is plain torch, differentiable and compilable. It computes in float32 (float64 for float64), and its caller
rounds once. `grouped_mlp` and the operators with an activation use these formulas. gate, up and the result are
``(..., I)``; an activation without a gate takes one tensor x ``(..., I)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from ascend_moe.moe_config import ACTIVATIONS as NUMBERS
from ascend_moe.moe_config import known_activation
from ascend_moe.native.torch_npu import compute_dtype


def swiglu(gate: Tensor, up: Tensor, *, limit: float = 0.0) -> Tensor:
    """Return ``silu(gate) * up``, ``(..., I)``; limit > 0: first clamp gate at limit, up at plus and minus it."""
    return silu(gate) * up if limit == 0 else clipped_swiglu(gate, up, alpha=1.0, limit=limit, bias=0.0)


def clipped_swiglu(gate: Tensor, up: Tensor, *, alpha: float = 1.702, limit: float = 7.0, bias: float = 1.0) -> Tensor:
    """Return ``gate * sigmoid(alpha * gate) * (up + bias)``, ``(..., I)``, inputs clamped at ``limit`` (gpt-oss)."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    # silu rounds once where the product rounds twice, and SwiGLU without a limit uses it too.
    activated: Tensor = silu(gate) if alpha == 1.0 else gate * torch.sigmoid(alpha * gate)
    return activated * (up + bias)


def swiglustep(gate: Tensor, up: Tensor, *, limit: float = 7.0) -> Tensor:
    """Return ``silu(gate) * up``, ``(..., I)``, with silu's result clamped at limit and up at both sides (Step-3.5)."""
    return silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def situ(x: Tensor, *, beta: float = 1.0) -> Tensor:
    """Return ``beta * tanh(x / beta) * sigmoid(x)``, ``(..., I)``: silu with its linear part bounded by beta."""
    return beta * torch.tanh(x / beta) * torch.sigmoid(x)


def situglu(gate: Tensor, up: Tensor, *, beta: float = 1.0, linear_beta: float = 0.0) -> Tensor:
    """Return ``situ(gate, beta) * linear_beta * tanh(up / linear_beta)`` (Kimi-K3; linear_beta 0: up), ``(..., I)``."""
    return situ(gate, beta=beta) * (linear_beta * torch.tanh(up / linear_beta) if linear_beta else up)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``gelu(gate) * up``, ``(..., I)``, with the exact gelu (error function)."""
    return gelu(gate) * up


def geglu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``gelu(gate) * up``, ``(..., I)``, with gelu's tanh approximation."""
    return gelu(gate, approximate="tanh") * up


def sigmoid_glu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``sigmoid(gate) * up``, ``(..., I)``."""
    return torch.sigmoid(gate) * up


def relu2(x: Tensor) -> Tensor:
    """Return the square of relu of x, ``(..., I)``, as in Nemotron. Without a gate."""
    return torch.relu(x).square()


def reglu2(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``relu(gate) ** 2 * up``, ``(..., I)``."""
    return relu2(gate) * up


#: name -> formula. Keyword arguments are the activation's numbers; a formula of one tensor has no gate.
ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    formula.__name__: formula
    for formula in (
        swiglu, clipped_swiglu, swiglustep, situ, situglu, geglu, geglu_tanh, sigmoid_glu, relu2, reglu2,
    )
}  # fmt: skip


_GATED = {name: formula.__code__.co_argcount > 1 for name, formula in ACTIVATIONS.items()}


@dataclass(frozen=True)
class Activation:
    """One activation with its numbers.

    Attributes:
        name: a key of ``ACTIVATIONS``; names in ``moe_config.ALIASES`` are replaced.
        numbers: non-default numbers by name: limit, alpha, bias, beta, linear_beta.
        interleaved: gate in the even columns and up in the odd ones; False: left and right half.

    Raises:
        ArgumentError: the name is unknown, or a number is unknown or out of range.
    """

    name: str = "swiglu"
    numbers: Mapping[str, float] = field(default_factory=dict, hash=False)
    interleaved: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", known_activation(self.name, self.numbers))

    @classmethod
    def of(cls, given: str | Activation, **numbers: float | None) -> Activation:
        """Return ``given`` (then numbers are ignored), or the activation of this name with the numbers not None."""
        if isinstance(given, Activation):
            return given
        return cls(given, {name: value for name, value in numbers.items() if value is not None})

    @property
    def gated(self) -> bool:
        """Whether the activation takes gate and up (2I columns in all), not one input of I columns."""
        return _GATED[self.name]

    def has(self, number: str) -> bool:
        """Return whether the activation has a parameter named ``number``, such as "limit"."""
        return number in NUMBERS[self.name]

    def number(self, name: str) -> float:
        """Return the value of the activation's parameter ``name``: as passed, or its default."""
        return self.numbers.get(name, NUMBERS[self.name][name])

    def inner(self, width: int) -> int:
        """Return I, the width of the result, for an input of ``width`` columns."""
        return width // 2 if self.gated else width

    def values(self, x: Tensor) -> Tensor:
        """Apply the formula to x ``(..., 2I)``, without a gate ``(..., I)``; return ``(..., I)`` in x's dtype."""
        formula = ACTIVATIONS[self.name]
        if not self.gated:
            return formula(x, **self.numbers)
        gate, up = (x[..., ::2], x[..., 1::2]) if self.interleaved else x.chunk(2, -1)
        return formula(gate, up, **self.numbers)

    def __call__(self, x: Tensor) -> Tensor:
        """Apply `values` to float rows, in float32, rounded once to x's dtype."""
        return self.values(x.to(compute_dtype(x.dtype))).to(x.dtype)
