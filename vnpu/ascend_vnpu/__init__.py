"""The virtual NPU: torch_npu's ``npu:0`` and following on the memory and the cores of this machine.

``ascend-vnpu -- python script.py`` starts a script with this package's libraries instead of CANN's, so that an
unmodified torch_npu runs without an NPU: tensors, copies, streams, events, HCCL groups, and the operators of
ascend_moe on its CPU emulator. Use it to check results; times measured on it mean nothing.

`PAIRS` lists the supported versions of torch and torch_npu. All ranks run on one machine.
"""

from __future__ import annotations

import ctypes
from typing import Any

from .launch import LIBRARY, environment, library_folder
from .package import LibraryError, installed_version, library, settings
from .wheels import PAIRS, pair_of

_SIGNATURES = {
    "vnpu_soc": (ctypes.c_char_p, ()),
    "aclrtGetDeviceCount": (ctypes.c_int, (ctypes.POINTER(ctypes.c_uint32),)),
}
ABOUT = "a virtual NPU of ascend_moe: host memory and CPU cores, no Ascend device; times mean nothing"

__all__ = ["ABOUT", "PAIRS", "environment", "info", "is_active", "library_folder", "pair_of"]


def is_active() -> bool:
    """Return whether this process was started by ``ascend-vnpu``, so that its torch_npu uses the virtual NPU."""
    return settings.VNPU.is_set() and _runtime() is not None


def info() -> dict[str, Any]:
    """Return a description of the virtual NPU that this process uses, for reports.

    Returns:
        ``virtual`` (bool): False on a real NPU or none. If it is True also ``about`` (a sentence), ``soc`` (name),
        ``devices`` (number), the versions ``torch`` and ``torch_npu``, and ``libraries`` (folder).
    """
    runtime = _runtime() if is_active() else None
    if runtime is None:
        return {"virtual": False}
    devices = ctypes.c_uint32()
    runtime.aclrtGetDeviceCount(ctypes.byref(devices))
    return {
        "virtual": True,
        "about": ABOUT,
        "soc": runtime.vnpu_soc().decode(),
        "devices": devices.value,
        "torch": installed_version("torch") or "not installed",
        "torch_npu": installed_version("torch_npu") or "not installed",
        "libraries": settings.VNPU.text(),
    }


def _runtime() -> ctypes.CDLL | None:
    """The libascendcl.so of this process when it is ours; never that of CANN."""
    try:
        return library.open_library(LIBRARY, _SIGNATURES)
    except LibraryError:
        return None
