"""Calls across the C ABI with torch's dtypes, and the errors of launches."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Any

import torch

from .. import errors
from ..comm.communicator import Communicator
from ..native import library as _lib
from ..native import plans
from ..native.plans import MAX_CORES as MAX_CORES
from ..native.plans import OP_COMBINE as OP_COMBINE
from ..native.plans import OP_DISPATCH as OP_DISPATCH
from ..native.plans import CheckResult as CheckResult
from ..native.plans import Plan as Plan
from ..native.plans import attribute_names as attribute_names
from ..native.plans import comm_algorithm as comm_algorithm
from ..native.plans import core_count as core_count
from ..native.plans import describe as describe
from ..native.plans import is_two_level as is_two_level
from ..native.plans import rule_broken as rule_broken
from ..native.plans import tensor_names as tensor_names

_TEXT_BYTES = 1024
_REGISTERED_REFUSED = -1  # am_run's code for a refused window tensor


@functools.cache
def error_record_words() -> int:
    return int(_lib.lib().am_error_record_words())


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name without "torch.", such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def outputs_of(spec: Any) -> list[tuple[torch.dtype | None, tuple[int, ...]]]:
    """Return dtype and allocated shape of every output; dtype None: that of the input rows, unknown to the kernels."""
    return [(None if dtype is None else getattr(torch, dtype), shape) for dtype, shape in plans.outputs_of(spec)]


def infer(
    op: int,
    contract: int,
    dtypes: Mapping[str, torch.dtype],
    attributes: Mapping[str, int | None],
    batch: Any,
    topk: int,
    hidden: Any,
) -> list[tuple[torch.dtype | None, tuple[Any, ...]]]:
    """Return dtype and shape of every output, as ``outputs_of``, where ``batch`` and ``hidden`` may be torch.SymInt.

    ``op``: OP_DISPATCH or OP_COMBINE. ``contract``: 1 (V1) or 2 (V2). ``dtypes``: of the passed tensors by argument.
    ``attributes``: values of the integer arguments. ``batch``, ``topk``, ``hidden``: BS, K, H.
    """

    def at(bs: int) -> list[tuple[torch.dtype | None, tuple[int, ...]]]:
        ids = (bs, topk)
        shapes = tuple((name, dtype, ids if name == "expert_ids" else (bs, 1)) for name, dtype in dtypes.items())
        return outputs_of(describe(op, contract, "g", "", shapes, attributes))

    def first_sizes(bs: int) -> list[int]:
        return [shape[0] for _, shape in at(bs)]

    def along(bs: Any) -> list[Any]:
        pairs = zip(first_sizes(0), first_sizes(1), strict=True)
        return [low + (high - low) * bs if high != low else low for low, high in pairs]

    # First dimensions are affine in BS, except for BS*W // shared ranks with a remainder: there BS is specialised.
    large = max(2, attributes["shared_expert_rank_num"] or 0)
    symbolic = isinstance(batch, torch.SymInt) and along(large) == first_sizes(large)
    sizes = along(batch) if symbolic else first_sizes(int(batch))
    # The second dimension is always H.
    return [(dtype, (size, hidden)[: len(shape)]) for size, (dtype, shape) in zip(sizes, at(0), strict=True)]


def failure(code: int, record: Any, fault: str, communicator: Communicator) -> errors.AscendMoeError:
    """Return the error of an op on the CPU, as `error_of`; a fatal one puts the communicator into the failed state."""
    error = error_of(code, record, fault, communicator)
    if _lib.lib().am_error_is_fatal(code):
        communicator.failed = error
    return error


def error_of(code: int, record: Any, fault: str, communicator: Any) -> errors.AscendMoeError:
    """Return the error in ``record``, an array of words (NPU: its address). ``fault``: the emulator's text or ""."""
    if fault and code == _REGISTERED_REFUSED:
        return errors.WindowTensorError(fault, argument="expand_x", generation=record[0], epoch=record[1])
    if fault:
        return errors.KernelFault(fault, rank=communicator.rank)
    library = _lib.lib()
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    library.am_error_fields(record, text, _TEXT_BYTES)
    fields: dict[str, Any] = {}
    for field in text.value.decode().split(";"):
        name, _, value = field.partition("=")
        fields[name] = int(value) if value.lstrip("-").isdigit() else value
    library.am_error_message(record, text, _TEXT_BYTES)
    message = text.value.decode()
    kind = getattr(errors, library.am_error_name(code).decode())
    if issubclass(kind, errors.CommError) and fields["rank"] != communicator.rank:
        seen = communicator.describe_peer(fields["rank"])
        message += f" [rank {fields['rank']}: {seen}]" if seen else ""
    if kind is errors.RoutingMismatch and message.endswith("as dispatch"):  # counts of zeros look the same
        message += ", and the ep_send_counts that it returned"
    error: errors.AscendMoeError = kind(message, **fields)
    return error


def traffic(communicator: Communicator) -> dict[str, int]:
    """Return the bytes that this rank's MTE pipes moved in its last op, by "read_KIND" and "written_KIND" of GM."""
    kinds = ("tensor", "window_data", "window_state", "workspace", "window_registered")
    counts = (ctypes.c_uint64 * (2 * len(kinds)))()
    with communicator.use() as handle:
        _lib.lib().am_comm_traffic(handle, counts)
    names = [f"{direction}_{kind}" for direction in ("read", "written") for kind in kinds]
    return dict(zip(names, counts, strict=True))
