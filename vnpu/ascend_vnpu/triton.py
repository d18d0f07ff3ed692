"""Launch of Triton kernels without Triton: the kernel's Python body, once for each program, over device memory.

vLLM calls some kernels although it has found no Triton. Its `triton` and `tl` are then placeholders, whose decorator
returns the plain function; `install` puts this module's names into them. A pointer is a tensor's memory and an offset
in elements, a block is a torch tensor of the CPU. A name of `triton.language` that a kernel needs and that is not here
raises AttributeError with that name.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_grid: tuple[int, ...] = (1,)
_program: tuple[int, ...] = (0,)


class Pointer:
    """Triton's pointer: a tensor's memory and the offset of an element in it, or a block of offsets."""

    def __init__(self, memory: Tensor, offset: Any) -> None:
        self.memory = memory
        self.offset = offset

    def __add__(self, other: Any) -> Pointer:
        """Return the pointer ``other`` elements further."""
        return Pointer(self.memory, self.offset + other)

    __radd__ = __add__


def _pointer(x: Tensor) -> Pointer:
    """The memory behind a tensor of the virtual device, as the CPU's."""
    storage, start = x.untyped_storage(), int(x.storage_offset())
    count = storage.nbytes() // x.itemsize
    if not count:
        return Pointer(torch.empty(0, dtype=x.dtype), 0)
    memory = (ctypes.c_char * (count * x.itemsize)).from_address(x.data_ptr() - start * x.itemsize)
    return Pointer(torch.frombuffer(memory, dtype=x.dtype), start)


def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Tensor:
    """Compute ``tl.load``: the elements at ``pointer``, and ``other`` where ``mask`` is false; None: no mask."""
    places = torch.as_tensor(pointer.offset)
    if mask is None:
        return pointer.memory[places]
    shown = torch.as_tensor(mask)
    found = pointer.memory[torch.where(shown, places, 0)]
    return torch.where(shown, found, torch.as_tensor(other, dtype=found.dtype))


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    """Compute ``tl.store``: write ``value`` at ``pointer`` where ``mask`` is true; None: everywhere."""
    places = torch.as_tensor(pointer.offset)
    value = torch.as_tensor(value).to(pointer.memory.dtype)
    shown = torch.ones((), dtype=torch.bool) if mask is None else torch.as_tensor(mask)
    shown = shown.expand_as(places) if places.dim() else shown
    pointer.memory[places[shown]] = value.expand_as(places)[shown]


class Kernel:
    """A Triton kernel's Python function: ``kernel[grid](arguments)`` calls it once for each program of the grid."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """Return the function that launches over ``grid``, a tuple or a function of the keyword arguments."""
        return lambda *arguments, **options: self._launch(grid, arguments, options)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the function once, as another kernel does."""
        return self.function(*arguments, **options)

    def _launch(self, grid: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        global _grid, _program
        _grid = tuple(grid(options)) if callable(grid) else tuple(grid)
        torch.accelerator.synchronize()  # the tensors are ready
        arguments = tuple(_pointer(x) if isinstance(x, Tensor) else x for x in arguments)
        options = {name: _pointer(x) if isinstance(x, Tensor) else x for name, x in options.items()}
        for _program in itertools.product(*map(range, _grid)):
            self.function(*arguments, **options)


def _program_id(axis: int) -> Tensor:
    return torch.tensor(_program[axis])


_LANGUAGE: dict[str, Any] = {
    "program_id": _program_id,
    "num_programs": lambda axis: _grid[axis],
    "load": load,
    "store": store,
    "arange": torch.arange,
    "where": lambda condition, left, right: torch.where(condition, torch.as_tensor(left), torch.as_tensor(right)),
    "zeros": lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    "full": lambda shape, value, dtype: torch.full(shape, value, dtype=dtype),
    "minimum": lambda left, right: torch.minimum(torch.as_tensor(left), torch.as_tensor(right)),
    "maximum": lambda left, right: torch.maximum(torch.as_tensor(left), torch.as_tensor(right)),
    "min": lambda block, axis: block.amin(axis),
    "gather": lambda block, index, axis: block.gather(axis, index.long()),
    "cdiv": lambda left, right: -(-left // right),
    **{name: getattr(torch, name) for name in ("int8", "int16", "int32", "int64", "float16", "bfloat16", "float32")},
}


def install(triton: Any, language: Any) -> None:
    """Replace names in vLLM's placeholders of ``triton`` and ``tl``: kernels defined from now on can be launched."""
    triton.jit = lambda *functions, **_: Kernel(functions[0]) if functions else Kernel
    for name, value in _LANGUAGE.items():
        setattr(language, name, value)
