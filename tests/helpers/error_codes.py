"""The kernels' error codes by the name of the exception they become, as the library names them."""

from __future__ import annotations

from ascend_moe.native import library as _lib


def code_of(name: str) -> int:
    """The first code with this name."""
    return next(code for code in range(1, 64) if _lib.lib().am_error_name(code).decode() == name)


PEER_LOST, TIMEOUT, CORRUPT = (code_of(name) for name in ("PeerLost", "CommTimeout", "CorruptStatus"))
CONFIG_MISMATCH = code_of("ConfigMismatch")
