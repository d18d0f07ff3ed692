"""Weights as modules hold them: codes that no copy of floats changes, and what a state dict may put into a module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ascend_moe.errors import need, need_dtype, need_shape
from ascend_moe.experts.int4 import logical_shape, quantize_weight_int4
from ascend_moe.experts.quant import quantize_weight

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.int64)


class Codes(nn.Parameter):
    """A parameter of int8, int4 or fp8 codes, which mean nothing without their scales.

    A copy of another dtype into it, into its ``data`` or into a part of them raises ArgumentError: floats would become
    codes and keep the old scales. Operators get a plain tensor from ``detach()``.
    """

    def __new__(cls, data: Tensor) -> Codes:
        return torch.Tensor._make_subclass(cls, data.detach(), False)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            _need_codes(args[0], args[1] if len(args) > 1 else (kwargs or {}).get("other"))
        elif func is Tensor.__setitem__:
            _need_codes(args[0], args[2])
        elif func is torch._foreach_copy_:
            for own, given in zip(*args[:2], strict=True):
                _need_codes(own, given)
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
        # A state dict has plain tensors, which every loader knows, and a compiler follows no class.
        return made if func is Tensor.detach else _guarded(made, args[0] if args else None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Codes:
        copied = memo[id(self)] = type(self)(self.detach().clone())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), (self.detach(),)


def _need_codes(own: Any, given: Any) -> None:
    if isinstance(own, Codes) and isinstance(given, Tensor):
        rule = "are {}, and {} is copied into them, without new scales: use load_state_dict, or make a new layer"
        need(given.dtype == own.dtype, "codes", rule, own.dtype, given.dtype)


def _guarded(made: Any, own: Any) -> Any:
    """Returns what leads to the memory of codes, as `Codes`; all else as it is."""
    if isinstance(made, (tuple, list)) and any(isinstance(each, Tensor) for each in made):
        return type(made)(_guarded(each, own) for each in made)
    if made is own or type(made) is not Tensor or not isinstance(own, Codes) or made.dtype != own.dtype:
        return made
    with torch._C.DisableTorchFunctionSubclass():
        same = made.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
        return made.as_subclass(Codes) if same else made


def keep_codes(module: nn.Module, *names: str) -> None:
    """Make parameters `Codes` again where torch has put plain ones in their place."""
    for name in names:
        parameter = getattr(module, name)
        if not isinstance(parameter, Codes):
            codes = Codes(parameter)
            codes.__dict__.update(parameter.__dict__)
            setattr(module, name, codes)


def fit_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Make a state dict's tensors of a module and its children the dtypes that these have, also for assign=True.

    Raises:
        ArgumentError: codes (int8, fp8) are given for float weights, or another dtype for `Codes` and integers.
    """
    for tensors in (module.named_parameters(), module.named_buffers()):
        for name, own in tensors:
            given = state_dict.get(prefix + name)
            if given is not None:
                exact = isinstance(own, Codes) or own.dtype not in FLOATS
                need_dtype(prefix + name, given, *((own.dtype,) if exact else FLOATS))
                state_dict[prefix + name] = given.to(own.dtype)


def quantize_for(state_dict: dict[str, Any], name: str, dtype: torch.dtype, own: dict[str, Tensor]) -> None:
    """Put codes and what belongs to them into a state dict in the place of float weights, for a quantized layer.

    Args:
        state_dict: is changed.
        name: of the codes in the state dict.
        dtype: of the layer, to which weights are rounded first, as in a layer that is loaded and then quantized.
        own: the layer's tensors by what follows the name: codes "", "_scale", and "_correction" for int4 ones.

    Raises:
        ArgumentError: codes without scales or scales without codes, or a wrong shape or dtype.
    """
    codes, beside = own[""], [f"{name}{part}" for part in own if part]
    given = state_dict.get(name)
    there = [each for each in beside if state_dict.get(each) is not None]
    if given is None:
        need(not there, (there or beside)[0], "is given without {}; codes and scales go together", name)
        return
    kind = str(codes.dtype).removeprefix("torch.")
    if given.dtype in FLOATS:
        rule = "is given beside {} of {}; scales belong to {} codes"
        need(not there, (there or beside)[0], rule, name, given.dtype, kind)
        need_shape(name, given, logical_shape(codes))
        if codes.dtype == torch.int8:
            made: tuple[Tensor, ...] = quantize_weight(given.to(dtype))
        else:
            groups = own["_scale"].shape[-2]
            made = quantize_weight_int4(given.to(dtype), given.shape[-2] // groups)
        state_dict.update(zip((name, *beside), made, strict=True))
        return
    need_shape(name, given, tuple(codes.shape), dtypes=(codes.dtype, *FLOATS))
    for part, tensor in own.items():
        if part:
            value = state_dict.get(f"{name}{part}")
            need(value is not None, name, "is {} without {}; codes and scales go together", kind, f"{name}{part}")
            assert value is not None
            need_shape(f"{name}{part}", value, tuple(tensor.shape), dtypes=_SCALE_DTYPES)


def without_casts(fn: Callable[[Tensor], Tensor], kept: Iterable[Tensor | None]) -> Callable[[Tensor], Tensor]:
    """``fn`` of nn.Module._apply, which moves the tensors of ``kept`` and their gradients, and keeps their dtypes."""
    same = {id(tensor) for each in kept if each is not None for tensor in (each, each.grad) if tensor is not None}

    def run(tensor: Tensor) -> Tensor:
        made = fn(tensor)
        return tensor.to(made.device) if id(tensor) in same and made.dtype != tensor.dtype else made

    return run


class FittedModule(nn.Module):
    """A module that takes a state dict's floats in the dtypes that it has; a copy of it shares the attributes named."""

    _shared: tuple[str, ...] = ()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        fit_state_dict(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copied_beside(self, memo, *(getattr(self, name) for name in self._shared))


def copied_beside(module: Any, memo: dict[int, Any], *shared: Any) -> Any:
    """For __deepcopy__: a copy of ``module`` with the same ``shared`` objects, process groups and the like."""
    memo.update((id(each), each) for each in shared)
    copied = memo[id(module)] = object.__new__(type(module))
    copied.__setstate__(copy.deepcopy(module.__dict__, memo))
    return copied
