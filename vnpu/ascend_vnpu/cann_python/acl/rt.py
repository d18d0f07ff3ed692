"""`acl.rt`: functions of the runtime, which return CANN's error code."""

from __future__ import annotations

import ctypes

_MEMCPY = ctypes.CDLL("libascendcl.so").aclrtMemcpy
_MEMCPY.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def memcpy(destination: int, room: int, source: int, count: int, kind: int) -> int:
    """Copy ``count`` bytes between two addresses; ``kind`` says which of them are on the device."""
    code: int = _MEMCPY(destination, room, source, count, kind)
    return code
