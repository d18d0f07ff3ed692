"""Arguments of one rank's launch: tensors as GM ranges, by name and exact size."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from . import abi
from .entries import Parameter
from .errors import ArgumentError

Bytes: TypeAlias = NDArray[np.uint8]
LINE = 64  # bytes of a data cache line; as on an NPU, no two tensors share a line
_GUARD = 512
_BITS = {"b": 8, "c": 8, "a": 8, "h": 8, "s": 16, "t": 16, "i": 32, "j": 32}  # of a parameter by its mangled letter


@dataclass
class _Tensor:
    """One tensor in GM: its address for the caller, and its address for the kernel."""

    owner: Any
    address: int  # the caller's
    size: int
    name: str
    writable: bool
    staged: Bytes | None = None

    @property
    def gm(self) -> int:
        return self.address if self.staged is None else int(self.staged.ctypes.data)

    def view(self) -> Bytes:
        """The caller's bytes."""
        if self.size == 0:
            return np.zeros(0, np.uint8)
        view: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * self.size).from_address(self.address))
        return view


class Arguments:
    """One rank's arguments as 64-bit words (``words``): those in ``values``, then the workspace and the tiling, if any.

    ``stage``: copy every tensor to memory of its own, so that no two share a cache line. Otherwise only tensors that
    do not begin at a cache line, or that are read-only, are copied. Raises ArgumentError for unsuitable values.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[Parameter],
        values: Sequence[Any],
        tiling: Any,
        workspace_bytes: int | None,
        *,
        rank: int,
        stage: bool,
    ) -> None:
        self._tensors: list[_Tensor] = []
        self._stage = stage
        self._where = f"{name}, rank {rank}"
        words = [self._word(value, index, parameters) for index, value in enumerate(values)]
        if workspace_bytes is not None:
            words.append(self._own(bytes(workspace_bytes), "workspace"))
        if tiling is not None:
            words.append(self._own(tiling_bytes(tiling), "tiling"))
        if len(words) != len(parameters):
            given = [f"{len(values)} args"]
            given += ["a workspace"] if workspace_bytes is not None else []
            given += ["a tiling"] if tiling is not None else []
            raise ArgumentError(
                f"{name}({', '.join(parameter.name for parameter in parameters)}) takes {len(parameters)} arguments, "
                f"{' and '.join(given)} are given: pass in args all but the tiling (and the workspace, if "
                "workspace_bytes= makes it)",
                argument="args",
            )
        if len(words) > abi.MAX_ARGUMENTS:
            text = f"{name} has {len(words)} parameters, the limit is {abi.MAX_ARGUMENTS}: pass some in the tiling"
            raise ArgumentError(text, argument="args")
        self.words = (ctypes.c_uint64 * max(1, len(words)))(*words)
        self.count = len(words)
        self._saved: list[Bytes] | None = None

    # ---- values to words ----

    def _word(self, value: Any, index: int, parameters: Sequence[Parameter]) -> int:
        parameter = parameters[index] if index < len(parameters) else Parameter("?", "pointer")
        label = f"arg {index} ({parameter.name})"
        if parameter.kind == "other":
            fix = "declare it as one of these"
            raise self._refused(f"{label} is neither a pointer nor an integer: {fix}", parameter.name)
        if parameter.kind == "integer":
            if isinstance(value, (int, np.integer)):
                bits = _BITS.get(parameter.mangled, 64)
                if not -(1 << bits - 1) <= value < 1 << bits:
                    rule = f"pass -2**{bits - 1} to 2**{bits} - 1"
                    raise self._refused(f"{label} has {bits} bits, {value} does not fit: {rule}", parameter.name)
                return int(value) & 0xFFFFFFFFFFFFFFFF
            raise self._refused(f"{label} is an integer, {type(value).__name__} is given: pass an int", parameter.name)
        if value is None:
            return 0
        return self._add(value, label)

    def _add(self, value: Any, label: str) -> int:
        address, size, writable, owner = self._memory(value, label)
        for known in self._tensors:
            if known.address == address and known.size == size:
                return known.gm  # the same tensor twice: an in-place call
            if size and known.size and address < known.address + known.size and known.address < address + size:
                fix = "pass the same tensor twice, or disjoint ones"
                raise self._refused(f"{label} overlaps {known.name} in part: {fix}", label)
        tensor = _Tensor(owner, address, size, label, writable)
        if self._stage or not writable or address % LINE:
            tensor.staged = _aligned(size)
            tensor.staged[:size] = tensor.view()
        self._tensors.append(tensor)
        return tensor.gm

    def _memory(self, value: Any, label: str) -> tuple[int, int, bool, Any]:
        if _is_torch(value):
            if value.device.type != "cpu" or not value.is_contiguous():
                raise self._refused(f"{label} is not a contiguous CPU tensor: call .cpu().contiguous()", label)
            return value.data_ptr(), value.numel() * value.element_size(), True, value
        if isinstance(value, np.ndarray):
            if not value.flags.c_contiguous:
                raise self._refused(f"{label} is not contiguous: call numpy.ascontiguousarray", label)
            return int(value.ctypes.data), value.nbytes, bool(value.flags.writeable), value
        kind = type(value).__name__
        raise self._refused(f"{label} is a {kind}: pass a torch tensor, a numpy array or None", label)

    def _refused(self, text: str, argument: str) -> ArgumentError:
        return ArgumentError(f"{self._where}: {text}", argument=argument)

    def _own(self, data: bytes, name: str) -> int:
        """A copy, invisible to the caller."""
        staged = _aligned(len(data))
        staged[: len(data)] = np.frombuffer(data, np.uint8)
        self._tensors.append(_Tensor(None, 0, len(data), name, False, staged))
        return self._tensors[-1].gm

    # ---- around a launch ----

    def ranges(self) -> list[abi.Range]:
        """Return a range of global memory for each non-empty tensor, workspace and tiling, of its exact size."""
        kinds = (abi.WORKSPACE if _is_scratch(tensor.name) else abi.TENSOR for tensor in self._tensors)
        return [
            abi.range_of(tensor.gm, tensor.size, tensor.name, kind=kind)
            for tensor, kind in zip(self._tensors, kinds, strict=True)
            if tensor.size > 0
        ]

    def save(self) -> None:
        """Save the tensors' current contents for `restore`."""
        self._saved = [self._gm_view(tensor).copy() for tensor in self._tensors]

    def restore(self) -> None:
        """Restore the contents saved by `save`."""
        for tensor, saved in zip(self._tensors, self._saved or [], strict=True):
            self._gm_view(tensor)[:] = saved

    def finish(self) -> None:
        """Copy the results from copies of writable tensors back into the caller's tensors."""
        for tensor in self._tensors:
            if tensor.staged is not None and tensor.writable:
                tensor.view()[:] = tensor.staged[: tensor.size]

    def contents(self) -> list[tuple[str, bytes]]:
        """Return the name and the present bytes of every writable tensor, in order."""
        return [(tensor.name, self._gm_view(tensor).tobytes()) for tensor in self._tensors if tensor.writable]

    @staticmethod
    def _gm_view(tensor: _Tensor) -> Bytes:
        return tensor.view() if tensor.staged is None else tensor.staged[: tensor.size]


def _is_torch(value: Any) -> bool:
    """Whether a value is a torch tensor, without importing torch."""
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "data_ptr")


def _is_scratch(name: str) -> bool:
    """Whether cores exchange data through it: a workspace, recognised by the parameter's name."""
    return name == "tiling" or "workspace" in name.lower() or name.lower().endswith("(ws)")


def _aligned(size: int) -> Bytes:
    """Zeroed bytes that begin at a cache line and share no cache line with anything else."""
    raw = np.zeros(-(-size // LINE) * LINE + _GUARD + LINE, np.uint8)
    begin = -int(raw.ctypes.data) % LINE
    return raw[begin : begin + -(-size // LINE) * LINE + _GUARD]


def tiling_bytes(tiling: Any) -> bytes:
    """Return tiling data (bytes-like, a numpy array, a ctypes struct or a torch tensor) as bytes."""
    if _is_torch(tiling):
        whole = tiling.contiguous()
        return ctypes.string_at(whole.data_ptr(), whole.numel() * whole.element_size())
    if isinstance(tiling, np.ndarray):
        return tiling.tobytes()
    try:
        return bytes(memoryview(tiling))
    except TypeError:
        raise ArgumentError(
            f"tiling is a {type(tiling).__name__}: pass bytes, a numpy array, a ctypes struct or a torch tensor",
            argument="tiling",
        ) from None
