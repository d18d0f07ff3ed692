"""validate(): an operator's outputs against the reference, and the first difference in words."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .bits import differing
from .places import Places, elements, row_hint
from .records import DispatchResult, Report

_NAMES = (
    "expand_x",
    "dynamic_scales",
    "expand_idx",
    "expert_token_nums",
    "ep_recv_counts",
    "tp_recv_counts",
    "expand_scales",
)
_THIRD = {"v1": "expand_idx", "v2": "assist_info_for_combine"}


def validate(
    op: str,
    outputs: Sequence[torch.Tensor] | torch.Tensor,
    expected: DispatchResult | torch.Tensor,
    *,
    rank: int = 0,
    quantised: bool = False,
    contract: str = "v1",
    exact_shapes: bool = False,
    ranks_per_server: int = 0,
) -> Report:
    """Compare one rank's outputs with the reference, bit for bit, over their defined parts only.

    op "dispatch": outputs are the operator's seven tensors, expected a DispatchResult; contract "v1" compares
    the third as expand_idx, "v2" as triples. op "combine": outputs and expected are (BS, H) tensors.
    ranks_per_server: of the communicator (``ascend_moe.comm.ranks_per_server``), 0 for one server; with fewer
    than W, which is RDMA between A2 servers, the first words of V2's third tensor are expand_idx and are
    compared as that, and the report says so.
    NaN equals NaN whatever its payload. quantised: insist that expected has dynamic_scales.
    exact_shapes: the whole tensors must have the operator's allocated shapes; otherwise more rows are fine.
    The sentences come in the order in which a fault spreads: counts, indices, rows, scales; the first of them
    is the one to look at. Raises ValueError or TypeError on a misuse of this function only.
    """
    if op not in ("dispatch", "combine") or contract not in ("v1", "v2"):
        raise ValueError('op is "dispatch" or "combine", contract "v1" or "v2"')
    plain = _on_cpu(outputs)
    if op == "combine":
        if not isinstance(expected, torch.Tensor):
            raise TypeError("for combine, expected is the (BS, H) tensor of reference.combine")
        return _finish(op, rank, _combine_differences(plain, expected), f"{expected.shape[0]} tokens")
    if not isinstance(expected, DispatchResult):
        raise TypeError("for dispatch, expected is a DispatchResult of reference.dispatch")
    if quantised and expected.dynamic_scales is None:
        raise ValueError("quantised outputs cannot be compared with an unquantised reference")
    between = 0 < ranks_per_server < len(expected.rows_sent)
    found = _dispatch_differences(plain, expected, rank, contract, exact_shapes, between)
    size = f"{expected.expand_x.shape[0]} rows"
    if between and contract == "v2":
        size += f"; several servers: {_THIRD['v2']} as expand_idx, not as triples"
    return _finish(op, rank, found, size)


def _on_cpu(outputs: object) -> object:
    if isinstance(outputs, torch.Tensor):
        return outputs.detach().cpu()
    if isinstance(outputs, (list, tuple)):
        return [_on_cpu(one) for one in outputs]
    return outputs


def _finish(op: str, rank: int, found: list[str], size: str) -> Report:
    head = f"{op} on rank {rank}"
    if not found:
        return Report(True, f"{head}: equal to the reference, bit for bit ({size})")
    lines = [f"{head}: {found[0]}"] + [f"  also {sentence}" for sentence in found[1:]]
    return Report(False, "\n".join(lines), tuple(found))


def _dispatch_differences(
    outputs: object,
    expected: DispatchResult,
    rank: int,
    contract: str,
    exact_shapes: bool,
    between_servers: bool,
) -> list[str]:
    if not isinstance(outputs, list) or len(outputs) != len(_NAMES):
        what = f"{len(outputs)} values" if isinstance(outputs, list) else f"one {type(outputs).__name__}"
        return [f"the operator gives {len(_NAMES)} tensors ({', '.join(_NAMES)}); got {what}"]
    names = list(_NAMES)
    names[2] = _THIRD[contract]
    triples = contract == "v2" and not between_servers
    got = dict(zip(names, outputs, strict=True))
    where = Places(expected, rank)
    wanted: list[tuple[str, torch.Tensor]] = [
        ("ep_recv_counts", expected.ep_recv_counts),
        ("expert_token_nums", expected.expert_token_nums),
        ("tp_recv_counts", expected.tp_recv_counts),
        (names[2], expected.assist_info.reshape(-1) if triples else expected.expand_idx),
        ("expand_x", expected.expand_x),
    ]
    if expected.dynamic_scales is not None:
        wanted.append(("dynamic_scales", expected.dynamic_scales))
    found = []
    if exact_shapes:
        wanted += [
            (name, torch.empty(0)) for name in ("dynamic_scales", "expand_scales") if name not in dict(wanted)
        ]
    for name, want in wanted:
        sentence = _form(name, got[name], want, expected, exact_shapes)
        if sentence is None:
            part = got[name][: want.shape[0]]
            unequal = differing(part, want)
            kind = "expand_idx" if name == names[2] and not triples else name
            sentence = where.difference(kind, part, want) if unequal.any() else None
        if sentence is not None:
            found.append(sentence)
    return found


def _form(
    name: str, got: object, want: torch.Tensor, expected: DispatchResult, exact_shapes: bool
) -> str | None:
    """Name a wrong type, dtype or shape. Only the rows may be more than the defined ones."""
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


def _combine_differences(outputs: object, want: torch.Tensor) -> list[str]:
    if not isinstance(outputs, torch.Tensor):
        return [f"the operator gives one tensor (BS, H); got {type(outputs).__name__}"]
    if outputs.dtype != want.dtype:
        return [f"the result has dtype {outputs.dtype}, expected {want.dtype}"]
    if outputs.shape != want.shape:
        return [f"the result has shape {tuple(outputs.shape)}, expected {tuple(want.shape)}"]
    unequal = differing(outputs, want)
    if not unequal.any():
        return []
    token = int(unequal.any(axis=1).argmax())
    hint = row_hint(outputs, want, token)
    if isinstance(hint, int):
        hint = f"; it holds the bits of token {hint}"
    return [f"token {token}{elements(outputs, want, token, 'tokens')}{hint}"]
