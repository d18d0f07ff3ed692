"""The virtual NPU's built-in operators: torch_npu's aclnn calls, computed by torch over the same memory.

libopapi.so captures a call and passes it to `run`. The modules of this folder implement the operators, and
ascend_moe/torch_npu_ops/aclnn.py those of MoE layers.
To add one, write a VNPU_OP line in vnpu/opapi/*.cpp and a function here, registered as `registry` describes.
"""

from __future__ import annotations

import atexit
import contextlib

import torch

from ..package import load_operators
from . import atb, attention, tensors  # noqa: F401  importing them fills OPERATORS
from .registry import OPERATORS, read_arguments

__all__ = ["OPERATORS", "run"]

load_operators()


@atexit.register
def _finish_queue() -> None:
    """Before torch_npu's own exit, which waits for the queue with the GIL held, while `run` needs the GIL."""
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_initialized():
        with contextlib.suppress(Exception):  # what went wrong was or will be raised where it is asked for
            npu.synchronize()


def run(name: str, address: int, count: int) -> str:
    """Execute a captured call of an operator. libopapi.so calls this function with the GIL held, from any thread.

    Args:
        name: the aclnn function, e.g. ``aclnnAdd``.
        address, count: address and number of the 64-bit words of its arguments, which `read_arguments` decodes.

    Returns:
        "", or the error in one line. No error is raised: the caller is C++.
    """
    operator = OPERATORS.get(name)
    if operator is None:
        return f"{name} is exported by libopapi.so but unknown to {__name__}: build both from one version"
    try:
        # The caller's modes (a default device, say) are about its tensors; these are plain memory.
        with torch._C.DisableTorchFunction():
            operator(read_arguments(address, count))
    except Exception as error:
        text = str(error).strip().splitlines()
        return f"{type(error).__name__}: {text[0] if text else 'no message'}"
    return ""
