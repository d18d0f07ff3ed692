"""validate(): comparison of an operator's outputs with the reference, and a description of the first difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .records import Comparison, DispatchResult

_NAMES = (
    "expand_x", "dynamic_scales", "expand_idx", "expert_token_nums", "ep_recv_counts", "tp_recv_counts",
    "expand_scales",
)  # fmt: skip
_THIRD = {"v1": "expand_idx", "v2": "assist_info_for_combine"}


def validate(
    op: str,
    outputs: Sequence[torch.Tensor] | torch.Tensor,
    expected: DispatchResult | torch.Tensor,
    *,
    rank: int = 0,
    quantized: bool = False,
    contract: str = "v1",
    exact_shapes: bool = False,
    ranks_per_server: int = 0,
) -> Comparison:
    """Compare one rank's outputs with the reference, bit for bit, over their defined parts only.

    NaN equals NaN whatever its payload. The differences are in the order in which an error spreads: counts, indices,
    rows, scales. Begin with the first.

    Args:
        op: "dispatch" or "combine".
        outputs: the operator's: seven tensors of dispatch, or one ``(BS, H)`` of combine.
        expected: the rank's result of the reference's dispatch or combine.
        rank: the rank, for the text.
        quantized: raise ValueError unless ``expected`` has dynamic_scales.
        contract: "v1" compares dispatch's third tensor as expand_idx, "v2" as source indices.
        exact_shapes: dispatch's tensors must have the shapes that the operator allocates; else they may have more rows.
        ranks_per_server: ``ascend_moe.comm.ranks_per_server``; 0: one server. If it is below W (RDMA between A2
            servers), the third tensor of "v2" begins with expand_idx and is compared as that; the text mentions it.

    Raises:
        ValueError, TypeError: another argument than ``outputs`` is wrong.
    """
    if op not in ("dispatch", "combine") or contract not in ("v1", "v2"):
        raise ValueError(f'op {op!r}, contract {contract!r}: need "dispatch" or "combine", and "v1" or "v2"')
    plain = _on_cpu(outputs)
    if op == "combine":
        if not isinstance(expected, torch.Tensor):
            what = type(expected).__name__
            raise TypeError(f"expected is a {what}; for combine pass the rank's (BS, H) tensor of reference.combine")
        sentence: str | None = f"the operator returns one tensor (BS, H); got {type(plain).__name__}"
        if isinstance(plain, torch.Tensor):
            if plain.dtype != expected.dtype:
                sentence = f"the result has dtype {plain.dtype}, expected {expected.dtype}"
            elif plain.shape != expected.shape:
                sentence = f"the result has shape {tuple(plain.shape)}, expected {tuple(expected.shape)}"
            else:
                sentence = _difference(plain, expected, "token")
        return _finish(op, rank, [sentence] if sentence else [], f"{expected.shape[0]} tokens")
    if not isinstance(expected, DispatchResult):
        what = type(expected).__name__
        raise TypeError(f"expected is a {what}; for dispatch pass the rank's DispatchResult of reference.dispatch")
    if quantized and expected.dynamic_scales is None:
        raise ValueError("expected is unquantized: run reference.dispatch with quant_mode 2, or omit quantized")
    between = 0 < ranks_per_server < len(expected.rows_sent)
    differences = _dispatch_differences(plain, expected, rank, contract, exact_shapes, between)
    size = f"{expected.expand_x.shape[0]} rows"
    if between and contract == "v2":
        size += f"; several servers: {_THIRD['v2']} as expand_idx, not as source indices"
    return _finish(op, rank, differences, size)


def _on_cpu(outputs: object) -> object:
    if isinstance(outputs, torch.Tensor):
        return outputs.detach().cpu()
    if isinstance(outputs, (list, tuple)):
        return [_on_cpu(value) for value in outputs]
    return outputs


def _finish(op: str, rank: int, differences: list[str], size: str) -> Comparison:
    head = f"{op} on rank {rank}"
    if not differences:
        return Comparison(True, f"{head}: equal to the reference, bit for bit ({size})")
    lines = [f"{head}: {differences[0]}"] + [f"  also {sentence}" for sentence in differences[1:]]
    return Comparison(False, "\n".join(lines), tuple(differences))


def _dispatch_differences(
    outputs: object, expected: DispatchResult, rank: int, contract: str, exact_shapes: bool, between_servers: bool
) -> list[str]:
    if not isinstance(outputs, list) or len(outputs) != len(_NAMES):
        what = f"{len(outputs)} values" if isinstance(outputs, list) else f"one {type(outputs).__name__}"
        return [f"the operator returns {len(_NAMES)} tensors ({', '.join(_NAMES)}); got {what}"]
    third, by_source = _THIRD[contract], contract == "v2" and not between_servers
    got = dict(zip((*_NAMES[:2], third, *_NAMES[3:]), outputs, strict=True))
    wanted: dict[str, torch.Tensor] = {
        "ep_recv_counts": expected.ep_recv_counts,
        "expert_token_nums": expected.expert_token_nums,
        "tp_recv_counts": expected.tp_recv_counts,
        third: expected.assist_info if by_source else expected.expand_idx,
        "expand_x": expected.expand_x,
    }
    for name in ("dynamic_scales", "expand_scales"):
        scales: torch.Tensor | None = getattr(expected, name)
        if scales is not None or exact_shapes:
            wanted[name] = torch.empty(0) if scales is None else scales
    places, found = Places(expected, rank), []
    for name, want in wanted.items():
        flat = want if name == "expand_x" else want.reshape(-1)
        sentence = _form(name, got[name], flat, expected, exact_shapes)
        if sentence is None:
            part = got[name][: flat.shape[0]].reshape(want.shape)
            called = "expand_idx" if name == third and not by_source else name
            sentence = _difference(part, want, called, places)
        if sentence is not None:
            found.append(sentence)
    return found


def _form(name: str, got: object, want: torch.Tensor, expected: DispatchResult, exact_shapes: bool) -> str | None:
    """Return a sentence about a wrong type, dtype or shape; there may be more rows than the defined ones."""
    if not isinstance(got, torch.Tensor):
        return f"{name} is not a tensor but {type(got).__name__}"
    if got.dtype != want.dtype:
        return f"{name} has dtype {got.dtype}, expected {want.dtype}"
    shape = tuple(got.shape)
    if exact_shapes:
        if shape != expected.allocated[name]:
            return f"{name} has shape {shape}, the operator allocates {expected.allocated[name]}"
    elif name in ("expand_idx", "expert_token_nums", "tp_recv_counts"):
        if shape != tuple(want.shape):
            return f"{name} has shape {shape}, expected {tuple(want.shape)}"
    elif len(shape) != want.dim() or shape[1:] != tuple(want.shape[1:]) or shape[0] < want.shape[0]:
        tail = "".join(f", {size}" for size in want.shape[1:])
        return f"{name} has shape {shape}, expected ({want.shape[0]} or more{tail})"
    return None


def _difference(got: torch.Tensor, want: torch.Tensor, name: str, places: Places | None = None) -> str | None:
    """Describe the first unequal element of two tensors of the same shape; None if all bits are equal."""
    unequal = differing(got, want)
    if not unequal.any():
        return None
    unequal = unequal.reshape(want.shape[0], -1)
    row = int(unequal.any(axis=1).argmax())
    at = int(unequal[row].argmax())
    g, w = got[row].reshape(-1)[at], want[row].reshape(-1)[at]
    wrong = f"{int(unequal.any(axis=1).sum())} of {unequal.shape[0]}"
    if want.dim() == 1:
        head, wrong = f"{name}[{row}]", f"{wrong} differ"
    else:
        head = f"{name} {row}" if places is None else f"{name} row {row}"
        wrong = f"{int(unequal[row].sum())} of its {unequal.shape[1]} elements differ, in all {wrong} rows"
    element = f", element {at}" if want.dim() > 1 else ""
    place = f" ({places.of(name, row)})" if places else ""
    return (
        f"{head}{place}{element}: expected {words(w)}, got {words(g)}{gap(g, w)}; {wrong}"
        f"{_hint(got, want, row, name, places)}"
    )


def _hint(got: torch.Tensor, want: torch.Tensor, row: int, name: str, places: Places | None) -> str:
    """Return a hint at the cause: another row's bits, a reciprocal, the numbers of the other type."""
    if name == "expert_token_nums" and places is not None:
        sums = torch.tensor(places.ends[places.world - 1 :: places.world], dtype=torch.int64)
        for kind, nums in enumerate((sums, torch.diff(sums, prepend=sums.new_zeros(1)))):
            if torch.equal(got, nums):
                return f"; these are the numbers of expert_token_nums_type {kind}, {1 - kind} was asked for"
    if name == "dynamic_scales":
        inverse = not differing(1 / got[row], want[row]).any() or not differing(got[row], 1 / want[row]).any()
        return "; got is the reciprocal, 127 / max|x| rather than its inverse" if inverse else ""
    if want.dim() == 1:
        return ""
    raw = bits(got[row])
    if not raw.any():
        return "; it is all zeros, as if nothing had been written"
    same = (bits(want) == raw).all(axis=1)
    if not same.any():
        return ""
    other = int(same.argmax())
    return f"; it has the bits of row {other}" + (f" ({places.of(name, other)})" if places else "")


class Places:
    """Text for positions in dispatch's outputs: expert, source rank, token and k instead of an offset."""

    def __init__(self, expected: DispatchResult, rank: int) -> None:
        self.expected, self.rank = expected, rank
        self.locals = int(expected.expert_token_nums.shape[0])
        self.world = len(expected.rows_sent)
        self.ends: list[int] = expected.ep_recv_counts.tolist()

    def of(self, name: str, i: int) -> str:
        """Describe element ``i`` of the output ``name``, or its row ``i`` if it has two dimensions."""
        if name == "ep_recv_counts":
            return f"{self._expert(i // self.world)}, from rank {i % self.world}; inclusive prefix sum"
        if name == "expert_token_nums":
            return self._expert(i)
        if name == "tp_recv_counts":
            return "all rows of this rank"
        if name == "expand_idx":
            ids = self.expected.expert_ids
            token, k = divmod(i, int(ids.shape[1]))
            return f"token {token}, k {k}, expert {int(ids[token, k])}; this rank's earlier pairs of that expert"
        source, token, k = self.expected.assist_info[i].tolist()
        local = sum(total <= i for total in self.ends) // self.world
        return f"{self._expert(local)}, from rank {source}, token {token}, k {k}"

    def _expert(self, local: int) -> str:
        return f"local expert {local} = expert {self.rank * self.locals + local}"


# ---- tensors as bits: equality, and how a value is put into words

_INTEGER_VIEW = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DIGITS = {torch.float32: 9, torch.float16: 5, torch.bfloat16: 5}

Bits = npt.NDArray[Any]


def bits(tensor: torch.Tensor) -> Bits:
    """Return the elements' bits as an array of signed integers of the same size."""
    plain = tensor.detach().cpu().contiguous()
    return np.asarray(plain.view(_INTEGER_VIEW[plain.element_size()]).numpy())


def differing(got: torch.Tensor, expected: torch.Tensor) -> npt.NDArray[np.bool_]:
    """Return a mask of the elements whose bits differ, of tensors of the same shape and dtype; NaNs are equal."""
    unequal = bits(got) != bits(expected)
    if got.dtype.is_floating_point:
        unequal &= ~(torch.isnan(got) & torch.isnan(expected)).detach().cpu().numpy()
    return np.asarray(unequal, dtype=np.bool_)


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether dtype, shape (any shape) and bits of ``got`` and ``expected`` are equal; NaNs are equal."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return False
    return not differing(got, expected).any()


def words(value: torch.Tensor) -> str:
    """Format a tensor's only element: a float as ``1.5 (0x3fc0)``, an integer without its bits."""
    if not value.dtype.is_floating_point:
        return str(int(value))
    return f"{float(value):.{_DIGITS[value.dtype]}g} (0x{_unsigned(value):0{2 * value.element_size()}x})"


def gap(got: torch.Tensor, expected: torch.Tensor) -> str:
    """Return the distance of two finite floats as ``, 1 ulp apart``, or "" above 64 ulp and for other values."""
    if not got.dtype.is_floating_point or not (math.isfinite(float(got)) and math.isfinite(float(expected))):
        return ""
    if float(got) == float(expected):
        return ", they differ in the sign of zero"
    steps = abs(_ordinal(got) - _ordinal(expected))
    return f", {steps} ulp apart" if steps <= 64 else ""


def _unsigned(value: torch.Tensor) -> int:
    return int(bits(value.reshape(1))[0]) & ((1 << (8 * value.element_size())) - 1)


def _ordinal(value: torch.Tensor) -> int:
    """Map consecutive floats to consecutive integers."""
    raw = _unsigned(value)
    sign = 1 << (8 * value.element_size() - 1)
    return sign - raw if raw & sign else raw
