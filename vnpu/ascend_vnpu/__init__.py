"""The virtual NPU: torch_npu's ``npu:0`` and following on the memory and the cores of this machine.

``ascend-vnpu -- python script.py`` starts a script with our own libraries in the place of CANN's, so that
an unmodified torch_npu runs where no NPU is: tensors, copies, streams, events, HCCL groups, and the operators
of this package on the CPU twin. It is for correctness. It is not an NPU; times measured on it mean nothing.

Which torch it takes with which torch_npu is `PAIRS`. All ranks are of one machine.
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
    """Return whether torch_npu of this process runs on the virtual NPU (it was started by ``ascend-vnpu``)."""
    return settings.VNPU.is_set() and _runtime() is not None


def info() -> dict[str, Any]:
    """Return what this process runs on, for reports.

    Returns:
        ``virtual`` (bool); when it is True also ``about``, ``soc``, ``devices``, the versions ``torch`` and
        ``torch_npu``, and ``libraries`` (folder).
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
