"""Forbids reads of tensor values on the host, as a graph of an NPU does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

_READS = ("item", "cpu", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__")


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Context manager: a tensor's values cannot be read by any thread."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a value is read on the host")

    with pytest.MonkeyPatch.context() as patch:
        for name in _READS:
            patch.setattr(torch.Tensor, name, refuse)
        yield
