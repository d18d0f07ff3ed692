"""Parts of the operator package that the virtual NPU uses; no other module here imports `ascend_moe`.

Its libraries are built with the operator package's, into the same folder. An operator of MoE layers is computed by the
operator package's own function.
"""

from __future__ import annotations

import importlib

from ascend_moe import settings as settings
from ascend_moe._text import installed_version as installed_version
from ascend_moe.errors import ArgumentError as ArgumentError
from ascend_moe.errors import LibraryError as LibraryError
from ascend_moe.errors import need as need
from ascend_moe.native import library as library
from ascend_moe.plan import DEFAULT_SOC as DEFAULT_SOC
from ascend_moe.plan import SOC_OF_SERIES as SOC_OF_SERIES
from ascend_moe.plan import SOCS as SOCS


def load_operators() -> None:
    """Import the operator package's aclnn functions, which register themselves with `operators.registry`."""
    importlib.import_module("ascend_moe.torch_npu_ops.aclnn")


def define_vllm_ascend_operators() -> None:
    """Define the operators ``torch.ops._C_ascend``, as vllm-ascend's compiled part does on machines with CANN."""
    importlib.import_module("ascend_moe.interop.vllm_ascend").register()
