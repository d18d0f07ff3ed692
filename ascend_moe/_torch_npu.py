"""The way to torch_npu's own operators, taken for tensors that live on an NPU."""

from __future__ import annotations

import importlib
import re
from typing import Any

import torch

from ascend_moe.errors import LibraryError


def on_npu(tensor: torch.Tensor) -> bool:
    """True when ``tensor`` lives on an NPU, so that torch_npu has to do the work."""
    return tensor.device.type == "npu"


def missing_library(error: BaseException) -> str:
    """The file name of the shared library that the loader did not find, or nothing."""
    found = re.search(r"(lib[^\s/:]+\.so[^\s/:]*): cannot open shared object file", str(error))
    return found[1] if found else ""


def fix_of_library(name: str) -> str:
    """What brings a missing library of CANN. Those of torch and torch_npu come with their wheels."""
    if re.match(r"lib(torch|c10)", name):
        return "install the torch_npu that matches this torch"
    return (
        f"{name} is CANN's and was not found: source CANN's set_env.sh, or, without an NPU, start the "
        "program with `ascend-moe vnpu -- `"
    )


def import_torch_npu(subject: str) -> Any:
    """The module torch_npu.

    Raises:
        LibraryError: ``subject`` cannot be imported, why, and the fix: the wheel's or CANN's.
    """
    try:
        return importlib.import_module("torch_npu")
    except (ImportError, RuntimeError) as error:  # torch's own words for a backend that fails are the latter
        library = missing_library(error)
        fix = fix_of_library(library) if library else "install the torch_npu that matches this torch"
        why = str(error).strip().partition("\n")[0]
        raise LibraryError(f"{subject} cannot be imported ({why}); {fix}") from error


def call_torch_npu(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call ``torch_npu.<name>``; keyword arguments that are None are left out.

    Leaving them out keeps one call valid for every torch_npu version: an older one does not know the
    newest keywords, and None is the default of each.

    Raises:
        LibraryError: torch_npu cannot be imported, or its version has no operator of that name.
    """
    torch_npu = import_torch_npu(f"{name}: a tensor on an NPU needs torch_npu, which")
    operator = getattr(torch_npu, name, None)
    if operator is None:
        version = getattr(torch_npu, "__version__", "of unknown version")
        raise LibraryError(f"torch_npu {version} has no {name}; install a newer torch_npu")
    return operator(*args, **{key: value for key, value in kwargs.items() if value is not None})
