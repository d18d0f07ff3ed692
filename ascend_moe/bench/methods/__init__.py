"""The methods by name, in the order of the table."""

from __future__ import annotations

from ascend_moe.bench.methods.base import LIMIT, OURS, PEER, Arrived, Method, Place
from ascend_moe.bench.methods.limit import LimitMemcpy, LimitStream, LimitThroughUb
from ascend_moe.bench.methods.ours import Direct, DirectZeroCopy, Window
from ascend_moe.bench.methods.peers import (
    GlooAllGather,
    GlooAllToAll,
    GlooAllToAllTuned,
    MpiAllToAll,
    MpiAllToAllTuned,
)
from ascend_moe.errors import ArgumentError

_LIMITS: list[type[Method]] = [LimitMemcpy, LimitStream, LimitThroughUb]
_OURS: list[type[Method]] = [DirectZeroCopy, Direct, Window]
_PEERS: list[type[Method]] = [MpiAllToAllTuned, MpiAllToAll, GlooAllToAllTuned, GlooAllToAll, GlooAllGather]
METHODS: dict[str, type[Method]] = {method.name: method for method in _LIMITS + _OURS + _PEERS}
GROUPS = {
    kind: [name for name, method in METHODS.items() if method.kind == kind] for kind in (LIMIT, OURS, PEER)
}


def chosen(text: str) -> list[str]:
    """Names from "auto" or a list of names and groups (limit, ours, peer); limits always are among them."""
    known = {"auto": list(METHODS), **GROUPS, **{name: [name] for name in METHODS}}
    wanted = set(GROUPS[LIMIT])
    for word in text.split(","):
        if word not in known:
            raise ArgumentError(f"methods has {word!r}; need some of {', '.join(known)}", argument="methods")
        wanted.update(known[word])
    return [name for name in METHODS if name in wanted]


__all__ = ["GROUPS", "LIMIT", "METHODS", "OURS", "PEER", "Arrived", "Method", "Place", "chosen"]
