"""Dispatch and combine in two launches: the first one sends, the second one waits and returns the outputs.

In a traced program each launch is an operator, since a graph cannot hold an in-flight call.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from ..native import binding
from . import callbacks, npu_moe_distribute_combine_v2, npu_moe_distribute_dispatch_v2, recorder
from .registration import OPERATORS, SCHEMAS, TRACED, NotDifferentiable, Operator, wants_gradient

P = ParamSpec("P")
R = TypeVar("R")

_open: dict[int, Any] = {}  # in-flight calls begun by traced programs, by number
_numbers = itertools.count()


class OpenCall(Generic[R]):
    """An in-flight op from ``begin_dispatch`` or ``begin_combine``: this rank has sent, and not waited.

    Until ``finish``, the call's tensors must not change, and another op of the group on this rank raises ArgumentError,
    even if this object was dropped; ``ascend_moe.close`` ends that.
    """

    def __init__(
        self, name: str, outputs: R, opened: binding.InFlightCall | None, needing_grad: Sequence[torch.Tensor]
    ) -> None:
        self._name, self._outputs, self._opened = name, outputs, opened
        self._needing_grad = needing_grad
        self._failure: BaseException | None = None
        self._call = binding.last_call() if opened is not None else None

    def finish(self) -> R:
        """Wait for the other ranks, at most ASCEND_MOE_TIMEOUT_S from now; return the op's outputs.

        Repeated calls return or raise the same. Raises as the op does, and CommClosed if the group was closed before.
        """
        if self._failure is not None:
            raise self._failure
        if self._opened is not None:  # None: already finished, or only shapes were computed
            try:
                self._opened.finish()
            except RuntimeError as error:
                self._failure = failure = callbacks.stored_error(error)
                self._opened, self._needing_grad = None, ()  # they hold the call's tensors
                del self._outputs
                recorder.failed(failure, self._call)
                raise failure from failure.__cause__
            self._opened = None
            if self._needing_grad:
                self._outputs = self._without_gradient(self._outputs)
        return self._outputs

    def close(self) -> None:
        """Finish the op unless that was done, without returning its outputs. Raises as ``finish``."""
        self.finish()

    def _without_gradient(self, outputs: Any) -> Any:
        made: Any = NotDifferentiable.apply(self._name, outputs, *self._needing_grad)  # type: ignore[no-untyped-call]
        return type(outputs)._make(made) if isinstance(outputs, tuple) else made  # type: ignore[attr-defined]


class _TracedCall(OpenCall[R]):
    """An in-flight op in a traced program, where ``finish`` is an operator."""

    def __init__(self, finish: Callable[[], R]) -> None:
        self._finish: Callable[[], R] | None = finish

    def finish(self) -> R:
        if self._finish is not None:
            self._outputs, self._finish = self._finish(), None
        return self._outputs


class _TracedLaunches:
    """The op ``whole`` as operators: {name} runs ``send`` and returns a number, {name}_finish takes it and waits.

    The second takes the arguments again, which keeps them alive until then.
    """

    def __init__(self, name: str, whole: str, send: Callable[..., Any]) -> None:
        self._name, self._run, self._whole = name, send, OPERATORS[whole]
        arguments, _, results = SCHEMAS[whole].partition(" -> ")
        self._first = Operator.traced(name, f"{arguments} -> Tensor", self._send, self._number)
        schema = f"(Tensor call, {arguments[1:]} -> {results}"
        self._second = Operator.traced(f"{name}_finish", schema, self._receive, self._outputs)
        TRACED.impl(f"{name}_finish", self._without_gradient, "Autograd", with_keyset=True)

    def begin(self, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        """Call the first operator with the op's arguments; return a function that calls the second."""
        call = self._first.overload(*args, **kwargs)
        return lambda: self._whole.named(self._second.overload(call, *args, **kwargs))

    def _send(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        number = next(_numbers)
        _open[number] = self._run(*args, **kwargs)
        return torch.tensor(number, device="cpu")

    def _number(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._whole.fake(*args, **kwargs)  # refuse invalid shapes here too
        return torch.empty((), dtype=torch.int64, device="cpu")

    def _receive(self, call: torch.Tensor, *_: Any, **__: Any) -> Any:
        outputs = _open.pop(int(call)).finish()
        return outputs if isinstance(outputs, torch.Tensor) else tuple(outputs)

    def _outputs(self, call: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._whole.fake(*args, **kwargs)

    def _without_gradient(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        needing_grad = [each for each in (*args, *kwargs.values()) if wants_gradient([each])]
        with torch._C._AutoDispatchBelowAutograd():
            outputs = self._second.overload.redispatch(keys & torch._C._after_autograd_keyset, *args, **kwargs)
        if not needing_grad:
            return outputs
        return NotDifferentiable.apply(self._name, outputs, *needing_grad)  # type: ignore[no-untyped-call]


def _in_two_launches(name: str, op: Callable[P, R]) -> Callable[P, OpenCall[R]]:
    def send(*args: P.args, **kwargs: P.kwargs) -> OpenCall[R]:
        given = (*args, *kwargs.values())
        needing_grad = [each for each in given if wants_gradient([each])]
        with torch.no_grad(), binding.send_only() as opened:
            outputs = op(*args, **kwargs)
        return OpenCall(name, outputs, opened[0] if opened else None, needing_grad)  # type: ignore[arg-type]

    @functools.wraps(op)
    def begin(*args: P.args, **kwargs: P.kwargs) -> OpenCall[R]:
        if torch.compiler.is_compiling():  # also if another thread compiles: a graph's operators call send
            return _TracedCall(launches.begin(*args, **kwargs))
        return send(*args, **kwargs)

    begin.__name__ = begin.__qualname__ = name
    launches = _TracedLaunches(name, op.__name__, send)
    return begin


begin_dispatch = _in_two_launches("begin_dispatch", npu_moe_distribute_dispatch_v2)
begin_dispatch.__doc__ = """Start ``npu_moe_distribute_dispatch_v2``: send the rows without waiting.

    Args:
        all: as for ``npu_moe_distribute_dispatch_v2``. The tensors must not change until ``finish``.

    Returns:
        An ``OpenCall``: ``finish()`` returns what that op returns, bit for bit. In between, any computation and ops of
        other groups are allowed, but no other op of this group on this rank.

    Collective as that op is; other ranks may call the op itself.
    Raises local errors at once: invalid arguments (nothing was sent then), a failed group, and invalid ids of this
    rank, for which it waits for the others, who raise at ``finish``. No gradient.
    """

begin_combine = _in_two_launches("begin_combine", npu_moe_distribute_combine_v2)
begin_combine.__doc__ = """Start ``npu_moe_distribute_combine_v2`` without waiting; see ``begin_dispatch``."""
