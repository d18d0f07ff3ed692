"""Layers that a traced program contains as one operator: values read on the host are read when it runs.

One graph then serves every batch, and compilers keep the calls and their order, as for the ops.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .registration import Operator

_layers: weakref.WeakValueDictionary[int, WholeLayer] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class WholeLayer(nn.Module):
    """Base of layers that traced programs call as one operator, by their ``number``; a copy gets its own number."""

    number: int

    def __init__(self) -> None:
        super().__init__()
        self._take_number()

    def __setstate__(self, state: Any) -> None:  # of copies and unpickled layers
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._take_number()

    def _take_number(self) -> None:
        self.number = next(_numbers)
        _layers[self.number] = self


class WholeCall:
    """The operator ``ascend_moe_traced::{name}``, which calls ``run(layer, *args)``.

    Args:
        name: name of the operator.
        arguments: schema of ``args``; the result has the shape and dtype of the first, which must be a tensor.
        run: the implementation, called under torch.no_grad().
    """

    def __init__(self, name: str, arguments: str, run: Callable[..., torch.Tensor]) -> None:
        self._run = run
        self._op = Operator.traced(name, f"(int layer, {arguments}) -> Tensor", self._call, self._fake)

    def __call__(self, layer: WholeLayer, *args: Any) -> torch.Tensor:
        with torch.no_grad():
            made: torch.Tensor = self._op.overload(layer.number, *args)
        return made

    def _call(self, layer: int, *args: Any) -> torch.Tensor:
        with torch.no_grad():
            made = self._run(_layers[layer], *args)
        return made.clone() if any(made is each for each in args) else made  # operators in graphs return new tensors

    def _fake(self, layer: int, first: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.empty_like(first, memory_format=torch.contiguous_format)
