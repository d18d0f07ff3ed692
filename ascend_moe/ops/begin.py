"""Dispatch and combine in two launches: one that sends, and one that waits and gives the outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from ..native import binding
from . import answers, npu_moe_distribute_combine_v2, npu_moe_distribute_dispatch_v2, recorder
from .begin_traced import Halves
from .registration import NotDifferentiable, wants_gradient

P = ParamSpec("P")
R = TypeVar("R")


class OpenCall(Generic[R]):
    """Stands for a call of ``begin_dispatch`` or ``begin_combine``: this rank has sent, and has waited for nobody.

    Until ``finish`` the call's tensors must stay as they are, and this rank calls no other op of the group: that
    raises ArgumentError, also when this object was dropped, until ``ascend_moe.close``.
    """

    def __init__(
        self, name: str, outputs: R, opened: binding.Open | None, needing_grad: Sequence[torch.Tensor]
    ) -> None:
        self._name, self._outputs, self._opened = name, outputs, opened
        self._needing_grad = needing_grad
        self._failure: BaseException | None = None
        self._call = binding.last_call() if opened is not None else None

    def finish(self) -> R:
        """Waits for the other ranks, ASCEND_MOE_TIMEOUT_S from now on at most; returns the op's outputs.

        Called again it returns or raises the same. Raises as the op does.
        """
        if self._failure is not None:
            raise self._failure
        if self._opened is not None:  # None: finished, or shapes alone
            try:
                self._opened.finish()
            except RuntimeError as error:
                self._failure = failure = answers.kept(error)
                self._opened, self._needing_grad = None, ()  # the call's tensors
                del self._outputs
                recorder.failed(failure, self._call)
                raise failure from failure.__cause__
            self._opened = None
            if self._needing_grad:
                self._outputs = self._without_gradient(self._outputs)
        return self._outputs

    def close(self) -> None:
        """Finishes the op, if nobody has, and drops its outputs."""
        self.finish()

    def _without_gradient(self, outputs: Any) -> Any:
        made: Any = NotDifferentiable.apply(self._name, outputs, *self._needing_grad)  # type: ignore[no-untyped-call]
        return type(outputs)._make(made) if isinstance(outputs, tuple) else made  # type: ignore[attr-defined]


class _TracedCall(OpenCall[R]):
    """The same in a traced program: ``finish`` is an operator there, as the begin was."""

    def __init__(self, finish: Callable[[], R]) -> None:
        self._finish: Callable[[], R] | None = finish

    def finish(self) -> R:
        if self._finish is not None:
            self._outputs, self._finish = self._finish(), None
        return self._outputs


def _in_two_launches(name: str, op: Callable[P, R]) -> Callable[P, OpenCall[R]]:
    def send(*args: P.args, **kwargs: P.kwargs) -> OpenCall[R]:
        given = (*args, *kwargs.values())
        needing_grad = [each for each in given if wants_gradient([each])]
        with torch.no_grad(), binding.send_only() as opened:
            outputs = op(*args, **kwargs)
        return OpenCall(name, outputs, opened[0] if opened else None, needing_grad)  # type: ignore[arg-type]

    @functools.wraps(op)
    def begin(*args: P.args, **kwargs: P.kwargs) -> OpenCall[R]:
        if torch.compiler.is_compiling():  # also where another thread is: so a graph's operator calls send
            return _TracedCall(halves.begin(*args, **kwargs))
        return send(*args, **kwargs)

    begin.__name__ = begin.__qualname__ = name
    halves = Halves(name, op.__name__, send)
    return begin


begin_dispatch = _in_two_launches("begin_dispatch", npu_moe_distribute_dispatch_v2)
begin_dispatch.__doc__ = """``npu_moe_distribute_dispatch_v2`` in two launches: sends the rows, and waits for nobody.

    Args:
        all: as of ``npu_moe_distribute_dispatch_v2``. The tensors must stay as they are until ``finish``.

    Returns:
        An ``OpenCall``: ``finish()`` gives what that op returns, the same bit for bit. Between the two: any
        computation, ops of other groups; no other op of this group, on this rank.

    Collective as that op is; other ranks may call the op itself.
    Raises what this rank knows: its arguments (nothing was sent then); a failure of the group; what its own ids break,
    for which it waits for the others, who raise it at ``finish``. Has no gradient.
    """

begin_combine = _in_two_launches("begin_combine", npu_moe_distribute_combine_v2)
begin_combine.__doc__ = """``npu_moe_distribute_combine_v2`` in two launches; see ``begin_dispatch``."""
