"""The methods by name, in the order of the table. One file each."""

from __future__ import annotations

from ascend_moe.bench.methods.all_gather import GlooAllGather
from ascend_moe.bench.methods.all_to_all import GlooAllToAll, MpiAllToAll
from ascend_moe.bench.methods.all_to_all_tuned import GlooAllToAllTuned, MpiAllToAllTuned
from ascend_moe.bench.methods.base import LIMIT, OURS, PEER, Arrived, Method, Place
from ascend_moe.bench.methods.limit import LimitMemcpy, LimitStream, LimitThroughUb
from ascend_moe.bench.methods.ours import Direct, DirectZeroCopy, Window
from ascend_moe.errors import ArgumentError

_ALL: tuple[type[Method], ...] = (
    LimitMemcpy,
    LimitStream,
    LimitThroughUb,
    DirectZeroCopy,
    Direct,
    Window,
    MpiAllToAllTuned,
    MpiAllToAll,
    GlooAllToAllTuned,
    GlooAllToAll,
    GlooAllGather,
)
METHODS: dict[str, type[Method]] = {method.name: method for method in _ALL}
GROUPS = {kind: [m.name for m in _ALL if m.kind == kind] for kind in (LIMIT, OURS, PEER)}


def chosen(text: str) -> list[str]:
    """Names from "auto" or a list of names and groups (limit, ours, peer); limits always are among them.

    Raises:
        ArgumentError: a name that no method has.
    """
    wanted = set(GROUPS[LIMIT])
    for word in text.split(","):
        if word == "auto":
            wanted.update(METHODS)
        elif word in GROUPS:
            wanted.update(GROUPS[word])
        elif word in METHODS:
            wanted.add(word)
        else:
            raise ArgumentError(
                f"methods has {word!r}; need auto, {', '.join(GROUPS)}, or some of {', '.join(METHODS)}",
                argument="methods",
            )
    return [name for name in METHODS if name in wanted]


__all__ = [
    "GROUPS",
    "LIMIT",
    "METHODS",
    "OURS",
    "PEER",
    "Arrived",
    "Method",
    "Place",
    "chosen",
]
