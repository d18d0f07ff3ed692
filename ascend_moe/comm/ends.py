"""The ends of a group on CPU and NPU: their numbers, and the first fatal error of each."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import weakref
from typing import Any

from ascend_moe.errors import AscendMoeError
from ascend_moe.native import binding

_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR  # it may go on
_numbers = itertools.count(1)
_alive: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def take_number(end: Any) -> int:
    """A number of its own for one rank's end, on CPU or NPU, by which ``by_number`` knows it."""
    number = next(_numbers)
    _alive[number] = end
    return number


def by_number(number: int) -> Any:
    """The end whose ``number`` this is, while anything refers to it; None after that."""
    return _alive.get(number)


class GroupEnd:
    """Holds what a rank's ends on CPU and NPU have in common: the first fatal error, and the binding's ``end``."""

    end: binding.End
    _failed: BaseException | None = None
    _raised_again: weakref.WeakSet[BaseException] | None = None

    @property
    def failed(self) -> BaseException | None:
        return self._failed

    @failed.setter
    def failed(self, error: BaseException) -> None:
        self._failed = error
        self.end.shut()

    def raise_if_failed(self) -> None:
        """Raises the first fatal error once more (a copy: an exception object carries one traceback)."""
        if isinstance(self.failed, AscendMoeError):
            error = type(self.failed)(str(self.failed), **self.failed.details)
            if self._raised_again is None:
                self._raised_again = weakref.WeakSet()
            self._raised_again.add(error)
            try:
                raise error from self.failed
            finally:
                del error
        if self.failed is not None:
            raise self.failed

    def clear_tracebacks(self) -> None:
        """Drops the variables of calls that a fatal error has ended: its traceback keeps them, and tensors with them.

        The error keeps its text, its details, and the lines of its traceback.
        """
        errors = [*(self._raised_again or ()), self._failed]
        seen: set[int] = set()
        while errors:
            error = errors.pop()
            if error is None or id(error) in seen:
                continue
            seen.add(id(error))
            errors += [error.__cause__, error.__context__]
            traceback = error.__traceback__
            while traceback is not None:
                frame, traceback = traceback.tb_frame, traceback.tb_next
                if not frame.f_code.co_flags & _SUSPENDED:
                    with contextlib.suppress(RuntimeError):  # it still runs
                        frame.clear()
