"""Modules whose tensors stay right through what torch does to them: loading, casts, copies, pickling, meta devices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ascend_moe.errors import need, need_dtype

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class FittedModule(nn.Module):
    """A module that keeps its dtypes, and the values of buffers that no state dict has.

    A state dict's floats become the dtypes that it has. Buffers that are not persistent get the values of a new module
    where ``to_empty`` or ``load_state_dict(assign=True)`` leaves them none, after ``to_empty`` also those of
    ``_initial``. A deep copy shares the attributes named in ``_shared``, process groups, and a module that has them
    cannot be pickled.
    """

    _shared: tuple[str, ...] = ()
    _initial: tuple[str, ...] = ()

    def _new_buffer(self, name: str, like: Tensor) -> Tensor:
        """The value that a buffer has in a new module, with the shape, dtype and device of ``like``."""
        return torch.zeros_like(like)

    def _renew(self, names: Iterable[str]) -> None:
        for name in names:
            buffer = self._buffers.get(name)
            if buffer is not None:
                self._buffers[name] = self._new_buffer(name, buffer)

    def _follow(self, name: str, device: torch.device) -> None:
        """Moves a buffer to the weights, which assign=True may have moved."""
        buffer = self._buffers[name]
        if buffer is None or device.type == "meta" or buffer.device == device:
            return
        if buffer.is_meta:
            self._buffers[name] = torch.empty_like(buffer, device=device)
            self._renew([name])
        else:
            self._buffers[name] = buffer.to(device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        fit_state_dict(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
        parameter = next(self.parameters(), None)
        if parameter is not None:
            for name in self._non_persistent_buffers_set:
                self._follow(name, parameter.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        names = {*self._non_persistent_buffers_set, *self._initial}
        if names and leaves_empty(fn):
            self._renew(names)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copied_beside(self, memo, *(getattr(self, name) for name in self._shared))

    def __reduce_ex__(self, protocol: Any) -> Any:
        for name in self._shared:
            need_unsaved(name, getattr(self, name))
        return super().__reduce_ex__(protocol)


def need_unsaved(name: str, live: Any) -> None:
    """Raise ArgumentError where a module is saved whole whose ``live`` object, a group or a dispatcher, is not None."""
    rule = "is a {} of this process, which no file can hold: save the layer's state_dict() and load it into a new layer"
    need(live is None, name, rule, type(live).__name__)


def need_values(module: nn.Module, x: Tensor) -> None:
    """Raise ArgumentError where x has values and a tensor of the module, or of a module inside it, has none."""
    if x.is_meta or torch.compiler.is_compiling():
        return
    with torch._C.DisableTorchFunctionSubclass():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    rule = (
                        "is on meta, without values: load a state dict with assign=True, or call to_empty(device=...) "
                    )
                    need(False, name, rule + "and then load or initialize the weights")
    for child in module._modules.values():
        if child is not None:
            need_values(child, x)


def leaves_empty(fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether a function of ``nn.Module._apply`` makes tensors without the values of those it gets, as to_empty's."""
    try:
        return not fn(torch.empty(0, dtype=torch.float32, device="meta")).is_meta
    except Exception:  # of a function that copies values: meta tensors have none
        return False


def without_casts(fn: Callable[[Tensor], Tensor], kept: Iterable[Tensor | None]) -> Callable[[Tensor], Tensor]:
    """``fn`` of nn.Module._apply, which moves the tensors of ``kept`` and their gradients, and keeps their dtypes."""
    same = {id(tensor) for each in kept if each is not None for tensor in (each, each.grad) if tensor is not None}

    def run(tensor: Tensor) -> Tensor:
        made = fn(tensor)
        return tensor.to(made.device) if id(tensor) in same and made.dtype != tensor.dtype else made

    return run


def fit_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Make a state dict's tensors of a module and its children the dtypes that these have, also for assign=True.

    Raises:
        ArgumentError: codes (int8, fp8) are given for float weights, or another dtype for codes and integers.
    """
    for tensors in (module.named_parameters(), module.named_buffers()):
        for name, own in tensors:
            given = state_dict.get(prefix + name)
            if given is not None:
                need_dtype(prefix + name, given, *(FLOATS if own.dtype in FLOATS else (own.dtype,)))
                state_dict[prefix + name] = given.to(own.dtype)


def copied_beside(module: Any, memo: dict[int, Any], *shared: Any) -> Any:
    """For __deepcopy__: a copy of ``module`` with the same ``shared`` objects, process groups and the like."""
    memo.update((id(each), each) for each in shared)
    copied = memo[id(module)] = object.__new__(type(module))
    state = copy.deepcopy(module.__dict__, memo)
    getattr(copied, "__setstate__", copied.__dict__.update)(state)
    return copied
