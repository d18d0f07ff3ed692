"""The aclnn functions of the virtual NPU by name, and the arguments of a captured call as Python values.

vnpu/opapi/call.cpp writes the arguments as 64-bit words; `read_arguments` decodes them to numbers, text and CPU
tensors over the caller's memory.

The decorator of a function determines how its result reaches the caller's memory:

    @returns("aclnnAdd")        gets the inputs; its result is written to the last argument
    @in_place("aclnnInplaceX")  gets all arguments; its result is written to the first
    @effect("aclnnXxx")         gets all arguments, and writes to them itself
    @resized("aclnnXxx")        as returns, and the sizes of the caller's tensor become the result's
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

# The first word of an argument (vnpu/opapi/call.h).
_NONE, _TENSOR, _INT, _FLOAT, _TEXT, _LIST = 0, 1, 2, 3, 4, 7

# aclDataType -> torch.dtype
DTYPES: dict[int, torch.dtype] = {
    0: torch.float32,
    1: torch.float16,
    2: torch.int8,
    3: torch.int32,
    4: torch.uint8,
    6: torch.int16,
    7: torch.uint16,
    8: torch.uint32,
    9: torch.int64,
    10: torch.uint64,
    11: torch.float64,
    12: torch.bool,
    16: torch.complex64,
    17: torch.complex128,
    27: torch.bfloat16,
    35: torch.float8_e5m2,
    36: torch.float8_e4m3fn,
}
# Formats whose bytes lie as the strides say: here those of FRACTAL_NZ (29) do too. Others are blocked.
_PLAIN_FORMATS = (-1, 0, 1, 2, 16, 27, 29, 30, 35, 47)


class Arguments(NamedTuple):
    """The arguments of a captured call, and the address of each tensor's sizes, for `resized` (0: not a tensor)."""

    values: list[Any]
    sizes_at: list[int]


def read_arguments(address: int, count: int) -> Arguments:
    """Decode the arguments of a captured call: ``count`` 64-bit words at ``address``, which libopapi.so wrote.

    Raises:
        NotImplementedError: a tensor has a data type, or a blocked format, that is not supported.
        ValueError: an argument is of an unknown kind.
    """
    words: list[int] = (ctypes.c_int64 * count).from_address(address)[:]
    arguments = Arguments([], [])
    position = 0
    while position < count:
        value, sizes_at, position = _read(words, position)
        arguments.values.append(value)
        arguments.sizes_at.append(sizes_at)
    return arguments


def _read(words: list[int], at: int) -> tuple[Any, int, int]:
    """The value at a position, the address of its sizes, and the next position."""
    kind = words[at]
    if kind == _TENSOR:
        dtype, form, data, offset, sizes_at, rank = words[at + 1 : at + 7]
        end = at + 7 + 2 * rank
        sizes, strides = words[at + 7 : at + 7 + rank], words[at + 7 + rank : end]
        return _tensor(dtype, form, data, offset, sizes, strides), sizes_at, end
    if kind == _INT:
        return words[at + 1], 0, at + 2
    if kind == _FLOAT:
        return struct.unpack("d", struct.pack("q", words[at + 1]))[0], 0, at + 2
    if kind == _NONE:
        return None, 0, at + 1
    if kind == _TEXT:
        return ctypes.string_at(words[at + 1], words[at + 2]).decode(), 0, at + 3
    if kind != _LIST:
        raise ValueError(f"unknown kind {kind} of a captured argument: build libopapi.so again, for this version")
    values: list[Any] = []
    length, at = words[at + 1], at + 2
    for _ in range(length):
        value, _, at = _read(words, at)
        values.append(value)
    return values, 0, at


def _tensor(dtype: int, form: int, data: int, offset: int, sizes: list[int], strides: list[int]) -> torch.Tensor:
    known = DTYPES.get(dtype)
    if known is None:
        raise NotImplementedError(f"aclDataType {dtype} is not supported on the virtual NPU; use one of {[*DTYPES]}")
    if form not in _PLAIN_FORMATS:
        raise NotImplementedError(
            f"the virtual NPU has no tensors of the blocked aclFormat {form}: leave torch_npu.npu_format_cast out there"
        )
    if 0 in sizes and not data:
        return torch.empty(sizes, dtype=known, device="cpu")
    last = offset + sum(max(size - 1, 0) * stride for size, stride in zip(sizes, strides, strict=True))
    memory = (ctypes.c_char * ((last + 1) * known.itemsize)).from_address(data)
    return torch.frombuffer(memory, dtype=known).as_strided(sizes, strides, offset)


F = TypeVar("F", bound=Callable[..., Any])
Operator = Callable[[Arguments], None]

OPERATORS: dict[str, Operator] = {}


def _register(names: tuple[str, ...], run: Callable[[Any, Arguments], None]) -> Callable[[F], F]:
    """A decorator: ``run`` calls the function with a call's arguments and puts the result in its place."""

    def register(function: F) -> F:
        for name in names:
            if name in OPERATORS:
                raise ValueError(f"{name} is registered twice: remove one of the two functions")
            OPERATORS[name] = functools.partial(run, function)
        return function

    return register


def returns(*names: str, outputs: int = 1) -> Callable[[F], F]:
    """Return a decorator that registers a function for the aclnn functions ``names``.

    It gets all arguments but the last ``outputs``, to which its result, a tensor or a tuple of tensors, is written.
    """

    def run(function: Any, arguments: Arguments) -> None:
        results = _as_tuple(function(*arguments.values[:-outputs]))
        for out, result in zip(arguments.values[-outputs:], results, strict=True):
            write(out, result)

    return _register(names, run)


def in_place(*names: str) -> Callable[[F], F]:
    """Return a decorator like `returns`; the function gets all arguments, its result overwrites the first."""
    return _register(names, lambda function, given: write(given.values[0], function(*given.values)))


def effect(*names: str) -> Callable[[F], F]:
    """Return a decorator like `returns`; the function gets all arguments, and writes its results into them itself."""
    return _register(names, lambda function, given: function(*given.values))


def resized(*names: str, outputs: int = 1) -> Callable[[F], F]:
    """Return a decorator like `returns`, for results whose sizes depend on the data, as of ``torch.nonzero``.

    The result is written to the beginning of the caller's output without gaps, and the sizes of the caller's tensor
    become the result's. An output that is None or empty is skipped; one that is too small is a ValueError.
    """

    def run(function: Any, arguments: Arguments) -> None:
        results = _as_tuple(function(*arguments.values[:-outputs]))
        places = zip(arguments.values[-outputs:], arguments.sizes_at[-outputs:], results, strict=True)
        for out, sizes_at, result in places:
            if out is None or out.numel() == 0:
                continue
            if result.numel() > out.numel() or result.dim() != out.dim():
                raise ValueError(f"the result {tuple(result.shape)} does not fit into the output {tuple(out.shape)}")
            out.reshape(-1)[: result.numel()].copy_(result.reshape(-1))
            (ctypes.c_int64 * result.dim()).from_address(sizes_at)[:] = list(result.shape)

    return _register(names, run)


def write(out: torch.Tensor | None, result: torch.Tensor) -> None:
    """Copy ``result`` into the caller's ``out``, converted to its data type. ``out`` None: the caller wants no result.

    Raises:
        ValueError: the sizes differ.
    """
    if out is None:
        return
    if out.shape != result.shape:
        raise ValueError(f"the output is {tuple(out.shape)}, the result {tuple(result.shape)}: pass one of that shape")
    out.copy_(result)


def _as_tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)
