"""Tensor helpers around a call: casts of ids, autocast, default devices, recomputed forwards, loading.

- A plain cast to int32 keeps the low bits only, which would turn 2**32 into 0.
- A layer keeps its dtypes under autocast: a router in another dtype chooses other experts.
- Activation checkpointing repeats a forward; code that counts or records tokens must run once.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from ascend_moe.errors import ArgumentError, ConfigMismatch, InvalidExpertId, need, need_dtype

P = ParamSpec("P")
R = TypeVar("R")

_INT32 = torch.iinfo(torch.int32)
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def narrow(argument: str, values: Tensor) -> Tensor:
    """Convert int32 or int64 ids, counts or indices to int32 without reading a value on the host.

    Values outside of int32 saturate to 2**31 - 1 or -2**31. Neither is a valid expert, count or index, nor -1 (not
    routed), so later checks refuse them.

    Raises ArgumentError if ``values`` have another dtype.
    """
    need_dtype(argument, values, torch.int32, torch.int64)
    return values if values.dtype == torch.int32 else values.clamp(_INT32.min, _INT32.max).to(torch.int32)


def id_text(expert_id: int) -> str:
    """Return an id as text, with " or more" or " or less" for the int32 extremes, which `narrow` makes of wider ids."""
    return str(expert_id) + {_INT32.max: " or more", _INT32.min: " or less"}.get(expert_id, "")


@contextmanager
def wide_ids_named(ids: Tensor, rank: int) -> Iterator[None]:
    """Context manager: in an InvalidExpertId about this rank's ids, report the id as it was before `narrow`.

    ``ids`` (T, K) are the original ids. Other ranks, and this rank if they are not on the CPU, report the narrow id.
    """
    try:
        yield
    except InvalidExpertId as error:
        if error.details.get("rank") == rank and ids.device.type == "cpu":
            wide = int(ids[error.details["token"], error.details["k"]])
            error.args = (str(error).replace(id_text(error.details["expert_id"]), str(wide)), *error.args[1:])
            error.details["expert_id"] = wide
        raise


@contextmanager
def rows_named(each: int, rows: Tensor, global_bs: int) -> Iterator[None]:
    """Context manager: in errors of a dispatch of ``each`` rows (BS * each, R) per token, add the numbers in tokens."""
    try:
        yield
    except (ArgumentError, ConfigMismatch, InvalidExpertId) as error:
        rule = f"these numbers count rows, of which router 'llama4' dispatches {each} per token: divide them by {each}"
        own = f"x has {len(rows) // each} tokens, global_bs is {global_bs}"
        error.args = (f"{error}; {rule} ({own})", *error.args[1:])
        raise


def autocasts(tensor: torch.Tensor) -> bool:
    """Return whether torch.autocast currently affects operators on ``tensor``'s device."""
    kind = tensor.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: disable torch.autocast in ``function``, which takes at least one tensor by position."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = next(each for each in args if isinstance(each, torch.Tensor))
        if not autocasts(first):
            return function(*args, **kwargs)
        with torch.autocast(first.device.type, enabled=False):
            return function(*args, **kwargs)

    return run


def on_the_host(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: create new tensors of ``function`` on the CPU, whatever torch's default device is."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return run


def runs_again() -> bool:
    """Return whether a backward is recomputing this forward (activation checkpointing), with or without gradients."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def runs_again_with_gradients() -> bool:
    """Like `runs_again`, but only if the first forward ran with gradients: ``checkpoint(use_reentrant=False)``.

    Reentrant checkpoints (torch's, Megatron-LM's) run the first forward without gradients.
    """
    if not runs_again():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "unpack_hook" and code.co_filename.endswith("torch/utils/checkpoint.py"):
            return True
        frame = frame.f_back
    return False


class FittedModule(nn.Module):
    """Base class of modules that keep their dtypes on loading and restore non-persistent buffers.

    Floats of a state dict are cast to the module's dtypes. Where ``to_empty`` or ``load_state_dict(assign=True)``
    leaves a non-persistent buffer without values, it gets those of a new module; after ``to_empty`` also the buffers in
    ``_initial``. A deep copy shares the attributes in ``_shared`` (process groups); a module with such attributes
    cannot be pickled.
    """

    _shared: tuple[str, ...] = ()
    _initial: tuple[str, ...] = ()

    def _new_buffer(self, name: str, like: Tensor) -> Tensor:
        """Return the value of a buffer in a new module, with the shape, dtype and device of ``like``."""
        return torch.zeros_like(like)

    def _renew(self, names: Iterable[str]) -> None:
        for name in names:
            buffer = self._buffers.get(name)
            if buffer is not None:
                self._buffers[name] = self._new_buffer(name, buffer)

    def _follow(self, name: str, device: torch.device) -> None:
        """Move a buffer to the device of the weights, which assign=True may have moved."""
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
    """Raise ArgumentError unless ``live``, the attribute ``name`` of a module that is being pickled, is None."""
    rule = "is a {} of this process and cannot be saved: save the layer's state_dict() and load it into a new layer"
    need(live is None, name, rule, type(live).__name__)


def need_values(module: nn.Module, x: Tensor) -> None:
    """Raise ArgumentError if x is not on meta but a tensor of the module or its children is."""
    if x.is_meta or torch.compiler.is_compiling():
        return
    with torch._C.DisableTorchFunctionSubclass():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    rule = "is on meta, without values: load a state dict with assign=True, or call "
                    need(False, name, rule + "to_empty(device=...) and then load or initialize the weights")
    for child in module._modules.values():
        if child is not None:
            need_values(child, x)


def leaves_empty(fn: Callable[[Tensor], Tensor]) -> bool:
    """Return whether a function passed to ``nn.Module._apply`` returns uninitialized tensors, as to_empty's does."""
    try:
        return not fn(torch.empty(0, dtype=torch.float32, device="meta")).is_meta
    except Exception:  # it copies values, which meta tensors do not have
        return False


def without_casts(fn: Callable[[Tensor], Tensor], tensors: Iterable[Tensor | None]) -> Callable[[Tensor], Tensor]:
    """Return a function that acts as ``fn`` of nn.Module._apply, but does not cast ``tensors`` and their grads."""
    same = {id(tensor) for each in tensors if each is not None for tensor in (each, each.grad) if tensor is not None}

    def run(tensor: Tensor) -> Tensor:
        made = fn(tensor)
        if id(tensor) not in same:
            return made
        made = made if made.dtype == tensor.dtype else tensor.to(made.device)
        # nn.Parameter does not accept a subclass that detaches to another class, as codes do.
        with torch._C.DisableTorchFunctionSubclass():
            return made if type(made) in (Tensor, nn.Parameter) else made.detach()

    return run


def fit_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Replace tensors of ``state_dict`` by casts to the dtypes of the module's tensors; keys are ``prefix`` + name.

    Raises ArgumentError if a float weight gets integer or fp8 values, or a non-float tensor another dtype.
    """
    for tensors in (module.named_parameters(), module.named_buffers()):
        for name, own in tensors:
            given = state_dict.get(prefix + name)
            if given is not None:
                need_dtype(prefix + name, given, *(FLOATS if own.dtype in FLOATS else (own.dtype,)))
                state_dict[prefix + name] = given.to(own.dtype)


def copied_beside(module: Any, memo: dict[int, Any], *shared: Any) -> Any:
    """Return a deep copy of ``module``, for its __deepcopy__, that shares the objects in ``shared`` with it."""
    memo.update((id(each), each) for each in shared)
    copied = memo[id(module)] = object.__new__(type(module))
    state = copy.deepcopy(module.__dict__, memo)
    getattr(copied, "__setstate__", copied.__dict__.update)(state)
    return copied
