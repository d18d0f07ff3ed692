"""``import deep_ep`` and ``import deep_ep_cpp`` are this package."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from ascend_moe.errors import need_one_of
from ascend_moe.interop.deep_ep.ascend import AscendBuffer, FuseMode, LowLatencyStrategy, NormalStrategy
from ascend_moe.interop.deep_ep.buffer import FLAVOURS, Buffer
from ascend_moe.interop.deep_ep.events import EventHandle, EventOverlap
from ascend_moe.interop.deep_ep.layout import Config, get_low_latency_rdma_size_hint
from ascend_moe.interop.deep_ep.runtime import Runtime

_MISSING: Any = object()
_before: dict[str, Any] = {}


def install(flavour: str = "deepep", *, package: bool = True) -> None:
    """Make ``import deep_ep`` this package, and ``import deep_ep_cpp`` what sgl-kernel-npu compiles.

    Args:
        flavour: of ``deep_ep.Buffer`` where it is not told.
        package: False: only deep_ep_cpp, for sgl-kernel-npu's own Python package over it.

    A second call changes the choice. Modules of these names that were imported before stand aside until ``uninstall``.

    Raises:
        ArgumentError: flavour is none.
    """
    need_one_of("flavour", flavour, FLAVOURS)
    uninstall()
    compiled = {"Buffer": Runtime, "Config": Config, "EventHandle": EventHandle}
    _add("deep_ep_cpp", {**compiled, "get_low_latency_rdma_size_hint": get_low_latency_rdma_size_hint})
    if not package:
        return
    names: dict[str, Any] = {"Config": Config, "EventHandle": EventHandle, "EventOverlap": EventOverlap}
    names["Buffer"] = AscendBuffer if flavour == "ascend" else Buffer
    names |= {"NormalStrategy": NormalStrategy, "LowLatencyStrategy": LowLatencyStrategy}
    names["topk_idx_t"] = torch.int64
    _add("deep_ep", {**names, "__path__": []})
    _add("deep_ep.utils", {"EventOverlap": EventOverlap, "EventHandle": EventHandle})
    _add("deep_ep.buffer", {**names, "FuseMode": FuseMode})
    vars(sys.modules["deep_ep"]).update(utils=sys.modules["deep_ep.utils"], buffer=sys.modules["deep_ep.buffer"])


def uninstall() -> None:
    """Undo ``install``. Objects that were made meanwhile live on. Without it nothing is done."""
    while _before:
        name, module = _before.popitem()
        if module is _MISSING:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module


def _add(name: str, names: dict[str, Any]) -> None:
    module = ModuleType(name, "ascend_moe.interop.deep_ep under this name.")
    vars(module).update(names)
    module.__spec__ = ModuleSpec(name, None, origin=__name__, is_package="__path__" in names)
    _before[name] = sys.modules.get(name, _MISSING)
    sys.modules[name] = module
