"""vLLM plug-in: what vllm-ascend needs in addition to CANN's libraries, in every process on the virtual NPU.

vLLM calls each entry point of the group ``vllm.general_plugins`` at the start of every process.
"""

from __future__ import annotations

import importlib

from . import triton
from .package import define_vllm_ascend_operators, settings

# Modules with kernels that vLLM calls without Triton, and that may have been imported before the plug-in.
_KERNELS = {"vllm.v1.worker.block_table": ("_compute_slot_mapping_kernel",)}


def load() -> None:
    """Define vllm-ascend's compiled operators and make Triton kernels runnable; nothing elsewhere."""
    if not settings.VNPU.is_set():
        return
    define_vllm_ascend_operators()
    importlib.import_module("vllm_ascend.utils").enable_custom_op()  # finds no compiled part; not while torch compiles
    placeholders = importlib.import_module("vllm.triton_utils")
    if placeholders.HAS_TRITON:
        return
    triton.install(placeholders.triton, placeholders.tl)
    for name, kernels in _KERNELS.items():
        module = importlib.import_module(name)
        for kernel in kernels:
            function = getattr(module, kernel)
            if not isinstance(function, triton.Kernel):
                setattr(module, kernel, triton.Kernel(function))
