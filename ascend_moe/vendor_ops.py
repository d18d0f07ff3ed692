"""The way to torch_npu's own operators, taken for tensors that live on an NPU."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ascend_moe.errors import LibraryError


def on_npu(tensor: torch.Tensor) -> bool:
    """True when ``tensor`` lives on an NPU, so that torch_npu has to do the work."""
    return tensor.device.type == "npu"


def call_torch_npu(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call ``torch_npu.<name>``; keyword arguments that are None are left out.

    Leaving them out keeps one call valid for every torch_npu version: an older one does not know the
    newest keywords, and None is the default of each.

    Raises:
        LibraryError: torch_npu cannot be imported, or its version has no operator of that name.
    """
    try:
        torch_npu = importlib.import_module("torch_npu")
    except ImportError as error:
        raise LibraryError(
            f"{name}: a tensor on an NPU needs torch_npu, which cannot be imported ({error}); "
            "install the torch_npu that matches this torch"
        ) from error
    operator = getattr(torch_npu, name, None)
    if operator is None:
        version = getattr(torch_npu, "__version__", "of unknown version")
        raise LibraryError(f"torch_npu {version} has no {name}; install a newer torch_npu")
    return operator(*args, **{key: value for key, value in kwargs.items() if value is not None})
