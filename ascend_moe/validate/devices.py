"""Which device there is to run on: an NPU, a virtual one, or the CPU. Imports torch_npu only when asked."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ArgumentError, need_one_of

KINDS = ("auto", "npu", "cpu")


@dataclass(frozen=True)
class Device:
    """What ops run on. ``about`` names it; ``virtual``: an NPU of ``ascend-moe vnpu``, not silicon."""

    kind: str
    about: str
    count: int = 1
    virtual: bool = False


def find(wanted: str = "auto") -> Device:
    """The device of this name; auto: an NPU when torch_npu finds one, else the CPU."""
    need_one_of("device", wanted, KINDS)
    if wanted == "cpu":
        return Device("cpu", "cpu, kernels on the twin")
    found, why = _npu()
    if found is None and wanted == "npu":
        raise ArgumentError(f"there is no NPU: {why}; `ascend-moe doctor` says more", argument="device")
    return found or Device("cpu", "cpu, kernels on the twin")


def is_virtual() -> bool:
    """Whether torch_npu runs on the virtual NPU of this package."""
    if importlib.util.find_spec("ascend_moe.vnpu") is None:
        return False
    return bool(importlib.import_module("ascend_moe.vnpu").is_active())


def _npu() -> tuple[Device | None, str]:
    if importlib.util.find_spec("torch_npu") is None:
        return None, "torch_npu is not installed"
    try:
        importlib.import_module("torch_npu")
        npu: Any = torch.npu  # type: ignore[attr-defined,unused-ignore]
        if not npu.is_available():
            return None, "torch_npu finds no device"
        name, count = str(npu.get_device_name(0)), int(npu.device_count())
    except Exception as error:  # a broken CANN shows itself in many ways
        return None, f"torch_npu cannot be used: {str(error).partition(chr(10))[0]}"
    virtual = is_virtual()
    return Device("npu", f"{'virtual ' if virtual else ''}npu, {name}", count, virtual), ""
