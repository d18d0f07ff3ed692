"""The ends of a group on CPU and NPU: their numbers, and the first fatal error of each."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from ascend_moe.errors import AscendMoeError
from ascend_moe.native import binding

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
            raise type(self.failed)(str(self.failed), **self.failed.details) from self.failed
        if self.failed is not None:
            raise self.failed
