"""`acl.rt`: functions of the runtime, which return CANN's error code."""

from __future__ import annotations

import ctypes

_MEMCPY = ctypes.CDLL("libascendcl.so").aclrtMemcpy
_MEMCPY.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def memcpy(destination: int, room: int, source: int, count: int, kind: int) -> int:
    """Copy ``count`` bytes between two addresses; return CANN's error code, 0 for success.

    ``room``: bytes at ``destination``, at least ``count``. ``kind``: aclrtMemcpyKind, from and to host or device.
    """
    code: int = _MEMCPY(destination, room, source, count, kind)
    return code
