"""One set of bad arguments, and the calls that such sets spoil."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ascend_moe.errors import ArgumentError, AscendMoeError

# Equal batches of 3 tokens, bfloat16, 1 or 2 ranks.
BS, K, H, E = 3, 2, 48, 12
OPS = ("dispatch", "dispatch_v2", "combine", "combine_v2")
INT32_MIN, INT32_MAX, INT64_MIN, INT64_MAX = -(2**31), 2**31 - 1, -(2**63), 2**63 - 1
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64),
        *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    )
}
ROWS_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Bad:
    """One set of bad arguments.

    ``changes`` replace arguments of a valid call; a function gets the valid call's arguments and returns the
    value. ``fields`` are the error's, ``words`` stand in its message.
    ``raised_by``: "each" rank makes the mistake and sees its own; or the last rank alone makes it, and "all"
    ranks raise, or only the one it belongs to ("last"). ``setting``: arguments of all ranks, wrong on none.
    """

    op: str
    label: str
    changes: Mapping[str, Any]
    fields: Mapping[str, Any]
    words: tuple[str, ...]
    error: type[AscendMoeError] = ArgumentError
    raised_by: str = "each"
    setting: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, valid: Mapping[str, Any], last: bool) -> dict[str, Any]:
        """The arguments of one rank."""
        call = {**valid, **self.setting}
        if self.raised_by == "each" or last:
            made = {name: value(call) if callable(value) else value for name, value in self.changes.items()}
            call.update(made)
        return call


def is_dispatch(op: str) -> bool:
    return op.startswith("dispatch")


def local(op: str, argument: str, kind: str, changes: Mapping[str, Any], *words: Any) -> Bad:
    texts = tuple(str(word) for word in words)
    return Bad(op, f"{argument}: {kind}", changes, {"argument": argument}, texts)


def index_name(op: str) -> str:
    return "assist_info_for_combine" if op == "combine_v2" else "expand_idx"
