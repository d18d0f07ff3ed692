"""What the operators' tiling makes of an entry of a tuning table."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from . import plan
from .errors import ArgumentError
from .native import library as _lib
from .ops import calls
from .plan import Request
from .plan.soc import DEFAULT_SOC, SOCS
from .tuning import CPU, Entry

# What an entry asks for -> the tiling's own words for it, by op.
_ASKED = {
    "dispatch": {
        "cores": ["block_dim"],
        "ring": ["send_ring", "copy_ring"],
        "rows": ["copy_rows"],
        "list_cores": ["list_cores"],
    },
    "combine": {"cores": ["block_dim"], "ring": ["sum_ring"], "rows": ["send_rows"]},
}


def request_of(entry: Entry) -> Request:
    """The configuration that the entry is for, with the most cores that a launch may have there."""
    chip = SOCS.get(entry.soc, SOCS[DEFAULT_SOC])
    cores = calls.core_count() if entry.soc == CPU else chip.aiv
    return Request(
        ranks=entry.ranks,
        experts=entry.experts,
        topk=entry.topk,
        hidden=entry.hidden,
        batch=entry.max_bs,
        dtype=entry.dtype,
        quant=entry.quant,
        soc=chip.name,
        cores=cores,
    )


def tiling(entry: Entry) -> dict[str, int]:
    """``OpPlan.tiling`` of the entry's call, with what it asks for.

    Raises:
        ArgumentError: the operators refuse the configuration.
    """
    spec = plan.describe(entry.op, request_of(entry), entry.algorithm)
    library = _lib.lib()
    algorithm, *asked = entry.asked()
    packed = library.am_tuning_pack(0, algorithm.encode(), *asked)
    library.am_spec_tune(ctypes.byref(spec), packed)
    return plan.tiling_of(calls.Plan(entry.op, spec))


def largest(entries: Sequence[Entry]) -> dict[str, int]:
    """Of cores, rows in flight and rows of a copy, the most that the tiling of one of these takes.

    Raises:
        ArgumentError: the operators refuse a configuration.
    """
    most = {"cores": 0, "ring": 0, "rows": 0}
    for entry in entries:
        taken = tiling(entry)
        for name in most:
            most[name] = max(most[name], *(taken[word] for word in _ASKED[entry.op][name]))
    return most


def cut(entry: Entry) -> list[str]:
    """Where the entry asks for more than fits, in words; what the operators refuse as a whole also."""
    try:
        taken = tiling(entry)
    except ArgumentError as problem:
        return [f"a call that the operators refuse ({problem})"]
    asked = _ASKED[entry.op]
    return [
        f"{name} {getattr(entry, name)}, {most} fit"
        for name, words in asked.items()
        if getattr(entry, name) > (most := max(taken[word] for word in words))
    ]
