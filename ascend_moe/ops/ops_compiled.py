"""The way between the compiled kernels and Python's: ops of the same names in a namespace of their own.

The compiled kernels call those with what they do not know, and ``raise_error`` with what a kernel found. Only
they call them.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..comm import threads
from ..comm.communicator import Communicator, by_number
from ..errors import AscendMoeError
from ..native import library as _lib
from . import calls as native
from . import compiled
from .schemas import SCHEMAS

_NAMESPACE = "ascend_moe_python"  # as in csrc/torch/kernels.cpp
_LIBRARY: Any = None
_numbers = itertools.count()


def install(
    name: str, names: Sequence[str], cpu: Callable[..., Any], autograd: Callable[..., Any]
) -> compiled.Caller | None:
    """Gives an op of torch.ops.ascend_moe, whose schema is defined, its compiled kernels over Python's.

    Args:
        names: of its arguments, in the schema's order.

    Returns:
        The call of those kernels past torch, if there is one (``compiled.caller``).

    Raises:
        LibraryError: torch refuses.
    """
    library = _library()
    library.define(f"{name}{SCHEMAS[name]}")
    library.impl(name, cpu, "CPU")
    library.impl(name, autograd, "Autograd", with_keyset=True)
    number = next(_numbers)
    compiled.register(number, name)
    return compiled.caller(number, name, names)


def remember(positions: Sequence[int], group_ep: str, plan: native.Plan, communicator: Communicator) -> None:
    """Equal calls launch at once from now on, for as long as this communicator is what they mean."""
    if communicator.gate is None or _lib.lib().am_error_record_words() > compiled.RECORD_WORDS:
        return
    compiled.remember(
        plan.shared(),
        communicator.gate,
        communicator.number,
        _lib.lib().am_run,
        None if threads.find(group_ep) is not None else group_ep,
        positions,
        len(native.tensor_names()),
        plan.outputs,
    )


def _library() -> Any:
    global _LIBRARY
    if _LIBRARY is None:
        _LIBRARY = torch.library.Library(_NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
        _LIBRARY.define("raise_error(int communicator, int code, Tensor record, str fault) -> ()")
        _LIBRARY.impl("raise_error", _raise_error, "CPU")
    return _LIBRARY


def _raise_error(number: int, code: int, record: torch.Tensor, fault: str) -> None:
    """The turn of the op is still held."""
    communicator = by_number(number)
    if communicator is None:
        raise AscendMoeError(f"an op of a communicator that is gone failed with code {code}: {fault}")
    words = (ctypes.c_int32 * record.numel()).from_address(record.data_ptr())
    raise native.failure(code, words, fault, communicator)
