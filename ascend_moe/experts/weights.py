"""Quantized weights in modules: codes that no copy of floats can overwrite, and the scales that belong to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ascend_moe._tensors import FLOATS
from ascend_moe.errors import need, need_shape
from ascend_moe.experts.int4 import logical_shape, quantize_weight_int4
from ascend_moe.experts.quant import quantize_weight

_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.int64)


class _Guarded(Tensor):
    """Memory of codes or a part of it, as reached by views, ``data``, ``detach()`` and state dicts."""

    _is_param = True  # as nn.Parameter's instances: torch.compile supports no other subclass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        traced = torch.compiler.is_compiling()
        if not traced:
            _need_codes(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
        # Graphs contain plain tensors; detach goes through the operator.
        plainly = traced or func is torch.ops.aten.detach.default
        return made if plainly else _guarded(made, args[0] if args else None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = plain(self).clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A saved state dict must not contain a class of this package.
        return plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class Codes(_Guarded, nn.Parameter):
    """A parameter of int8, int4 or fp8 codes, which are meaningless without their scales.

    Copying another dtype into its memory raises ArgumentError, since floats would become codes with the old scales. So
    do copies into its ``data``, ``detach()``, the tensors of a state dict, and parts of all these. `plain` returns the
    tensor for operators. ``torch.save`` stores a plain parameter.
    """

    def __new__(cls, data: Tensor) -> Codes:
        return torch.Tensor._make_subclass(cls, data.detach(), False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Codes:
        copied = memo[id(self)] = type(self)(plain(self).clone())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(plain(self), False).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor without gradient on the memory of ``tensor``, without the checks of `Codes`, for operators."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
_COPIES = ("copy_", "_foreach_copy_", "__setitem__")  # without masks or indices as values


def _need_codes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise ArgumentError if a call writes values of another dtype into codes."""
    name = getattr(func, "__name__", "").partition(".")[0]  # also of aten.copy_.default
    copies = name in _COPIES or func == _SET_DATA
    if copies or (name.endswith("_") and not name.endswith("__")):
        owns, values = args[0], [*args[2 if name == "__setitem__" else 1 :], *kwargs.values()]
    else:
        owns, values = kwargs.get("out"), list(args)
    several = isinstance(owns, (list, tuple))
    for at, own in enumerate(owns if several else [owns]):
        for value in values if isinstance(own, _Guarded) else ():
            listed = isinstance(value, (list, tuple))
            given = value if listed and not several else [value[at] if listed else value]
            for kind in (each.dtype if isinstance(each, Tensor) else type(each) for each in given):
                other = kind in (*FLOATS, float) or (copies and isinstance(kind, torch.dtype))
                rule = "are {}, and {} is copied into them without new scales: use load_state_dict, or a new layer"
                need(kind == own.dtype or not other, "codes", rule, own.dtype, kind)


def _guarded(made: Any, own: Any) -> Any:
    """Guard results that share the memory of codes; return others unchanged."""
    if isinstance(made, (tuple, list)) and any(isinstance(each, Tensor) for each in made):
        return type(made)(_guarded(each, own) for each in made)
    if type(made) is not Tensor or not isinstance(own, _Guarded):
        return made
    with torch._C.DisableTorchFunctionSubclass():
        same = made.untyped_storage()._cdata == own.untyped_storage()._cdata
        # Not a view: a compiler would follow it to its base.
        return Tensor._make_subclass(_Guarded, made) if same else made


def keep_codes(module: nn.Module, *names: str) -> None:
    """Convert the module's parameters ``names`` back to `Codes` where torch has replaced them by plain parameters."""
    for name in names:
        parameter = getattr(module, name)
        if not isinstance(parameter, Codes):
            codes = Codes(parameter)
            codes.__dict__.update(parameter.__dict__)
            setattr(module, name, codes)


def quantize_for(state_dict: dict[str, Any], name: str, dtype: torch.dtype, own: dict[str, Tensor]) -> None:
    """Replace float weights in a state dict by codes and their scales, for a quantized layer.

    Args:
        state_dict: modified in place.
        name: name of the codes in the state dict.
        dtype: the layer's dtype, to which weights are rounded first, as in a layer that is loaded and then quantized.
        own: the layer's tensors by suffix of the name: "" for codes, "_scale", and "_correction" with int4 codes.

    Raises:
        ArgumentError: codes without scales or scales without codes, or a wrong shape or dtype.
    """
    codes, beside = own[""], [f"{name}{part}" for part in own if part]
    given = state_dict.get(name)
    there = [each for each in beside if state_dict.get(each) is not None]
    if given is None:
        need(not there, (there or beside)[0], "is given without {}; load codes and scales together", name)
        return
    kind = str(codes.dtype).removeprefix("torch.")
    if given.dtype in FLOATS:
        rule = "is given with {} of {}; only {} codes have scales: load floats without scales"
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
            need(value is not None, name, "is {} without {}; load codes and scales together", kind, f"{name}{part}")
            assert value is not None
            need_shape(f"{name}{part}", value, tuple(tensor.shape), dtypes=_SCALE_DTYPES)


class ScaleWatch:
    """Detects scales, and int4 corrections, that were written in place without their codes.

    Codes count as written if their tensor or its version counter has changed. The scales' values are compared when a
    counter has changed, since DDP writes equal scales before each forward. ``names``: parameters of codes.
    """

    def __init__(self, *names: str) -> None:
        self._groups = [(name, f"{name}_scale", f"{name}_correction") for name in names]
        self._seen: dict[str, tuple[list[tuple[int, int]], dict[str, Tensor]]] = {}

    def renew(self, module: nn.Module) -> None:
        """Accept the current codes and scales as belonging together."""
        self._seen.clear()
        self.check(module)

    def check(self, module: nn.Module) -> None:
        """Raise ArgumentError if scales were written without their codes, or codes have become floats.

        Checks nothing in graphs.
        """
        if torch.compiler.is_compiling():
            return
        parameters, buffers = module._parameters, module._buffers
        with torch._C.DisableTorchFunctionSubclass():
            for name, *beside in self._groups:
                tensors: list[Any] = [parameters.get(each, buffers.get(each)) for each in (name, *beside)]
                states = [_state(each) for each in tensors if each is not None]
                rule = "is {}, but {} belongs to codes: use load_state_dict, or a new layer"
                need(tensors[0].dtype not in FLOATS, name, rule, tensors[0].dtype, beside[0])
                before = self._seen.get(name)
                if before is not None and before[0] == states:
                    continue
                scales = zip(beside, tensors[1:], strict=True)
                sums = {each: _digest(scale) for each, scale in scales if scale is not None}
                if before is not None and before[0][0] == states[0]:
                    for each, value in sums.items():
                        rule = "was written without {}: load codes and scales together with load_state_dict"
                        need(each in before[1] and torch.equal(value, before[1][each]), each, rule, name)
                self._seen[name] = states, sums


def _state(tensor: Tensor) -> tuple[int, int]:
    return id(tensor), 0 if tensor.is_inference() else tensor._version


def _digest(values: Tensor) -> Tensor:
    """Return a number that depends on the values and their order."""
    flat = values.detach().float().flatten()
    return (flat * torch.linspace(1, 2, len(flat), dtype=flat.dtype, device=flat.device)).sum()
