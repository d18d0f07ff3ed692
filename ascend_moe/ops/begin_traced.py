"""The two launches of an op as operators for traced programs, since a graph cannot hold an in-flight call.

The first returns the call's number. The second takes it, and the arguments again, which keeps them alive until then.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from .registration import (
    OPERATORS,
    SCHEMAS,
    TRACED,
    NotDifferentiable,
    Operator,
    keep_order_in_inductor,
    wants_gradient,
)

_open: dict[int, Any] = {}  # in-flight calls begun by traced programs, by number
_numbers = itertools.count()


class TracedLaunches:
    """The op ``whole`` as operators: {name} runs ``send`` and returns a number, {name}_finish takes it and waits."""

    def __init__(self, name: str, whole: str, send: Callable[..., Any]) -> None:
        self._name, self._run, self._whole = name, send, OPERATORS[whole]
        arguments, _, results = SCHEMAS[whole].partition(" -> ")
        self._first = self._define(name, f"{arguments} -> Tensor", self._send, self._number)
        schema = f"(Tensor call, {arguments[1:]} -> {results}"
        self._second = self._define(f"{name}_finish", schema, self._receive, self._outputs)
        TRACED.impl(f"{name}_finish", self._without_gradient, "Autograd", with_keyset=True)

    def begin(self, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        """Call the first operator with the op's arguments; return a function that calls the second."""
        call = self._first.overload(*args, **kwargs)

        def finish() -> Any:
            return self._whole.named(self._second.overload(call, *args, **kwargs))

        return finish

    def _define(self, name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Operator:
        made = Operator(name, schema, TRACED)
        for key in ("CPU", "PrivateUse1"):
            TRACED.impl(name, run, key)
        torch.library.register_fake(f"{TRACED.ns}::{name}", fake, lib=TRACED)
        made.keep_calls()
        return made

    def _send(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        number = next(_numbers)
        _open[number] = self._run(*args, **kwargs)
        return torch.tensor(number, device="cpu")

    def _number(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        keep_order_in_inductor(self._first.overload)
        self._whole.fake(*args, **kwargs)  # refuse invalid shapes here too
        return torch.empty((), dtype=torch.int64, device="cpu")

    def _receive(self, call: torch.Tensor, *_: Any, **__: Any) -> Any:
        outputs = _open.pop(int(call)).finish()
        return outputs if isinstance(outputs, torch.Tensor) else tuple(outputs)

    def _outputs(self, call: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        keep_order_in_inductor(self._second.overload)
        return self._whole.fake(*args, **kwargs)

    def _without_gradient(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        needing_grad = [each for each in (*args, *kwargs.values()) if wants_gradient([each])]
        with torch._C._AutoDispatchBelowAutograd():
            outputs = self._second.overload.redispatch(keys & torch._C._after_autograd_keyset, *args, **kwargs)
        if not needing_grad:
            return outputs
        return NotDifferentiable.apply(self._name, outputs, *needing_grad)  # type: ignore[no-untyped-call]
