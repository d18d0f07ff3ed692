"""DeepEP with its own names: `Buffer`, `Config`, `EventOverlap`, `EventHandle`; `install()` is `import deep_ep`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ascend_moe.errors import need_one_of
from ascend_moe.interop.deep_ep.ascend import AscendBuffer
from ascend_moe.interop.deep_ep.buffer import Buffer
from ascend_moe.interop.deep_ep.events import EventHandle, EventOverlap
from ascend_moe.interop.deep_ep.layout import Config
from ascend_moe.interop.deep_ep.names import CPP, OURS, REFUSED

__all__ = ["AscendBuffer", "Buffer", "Config", "EventHandle", "EventOverlap", "install", "uninstall"]

_MISSING: Any = object()
_before: dict[str, Any] = {}


def install(flavour: str = "deepep", *, package: bool = True) -> None:
    """Make ``import deep_ep`` this package, and ``import deep_ep_cpp`` what sgl-kernel-npu compiles.

    Args:
        flavour: whose ``deep_ep`` it is: DeepEP's, or "ascend", sgl-kernel-npu's. ``names.OURS`` lists its modules.
        package: False: only deep_ep_cpp, for sgl-kernel-npu's own Python package over it.

    A second call changes the choice. Modules of these names that were imported before stand aside until ``uninstall``.
    A public name of theirs that is not here raises ImportError with the reason where it is imported.

    Raises:
        ArgumentError: flavour is none.
    """
    need_one_of("flavour", flavour, OURS)
    uninstall()
    _add("deep_ep_cpp", CPP)
    if not package:
        return
    for name in [name for name in sys.modules if name.split(".")[0] == "deep_ep"]:
        _before[name] = sys.modules.pop(name)
    for name, names in OURS[flavour].items():
        _add(name, {**names, "__path__": []})
    for name in OURS[flavour]:
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, sys.modules[name])
    sys.meta_path.insert(0, _Refusals(REFUSED[flavour]))


def uninstall() -> None:
    """Undo ``install``. Objects that were made meanwhile live on. Without it nothing is done."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Refusals)]
    while _before:
        name, module = _before.popitem()
        if module is _MISSING:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module


class _Refusals:
    """Where ``import`` and ``from deep_ep import`` look for what no module has: says why it is not here."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self._reasons = reasons

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> None:
        """Nothing is found here. Raises ImportError for a name of the list."""
        if name in self._reasons:
            raise ImportError(f"{name} is not in ascend_moe.interop.deep_ep: {self._reasons[name]}", name=name)


def _add(name: str, names: Mapping[str, Any]) -> None:
    module = ModuleType(name, "ascend_moe.interop.deep_ep under this name.")
    vars(module).update(names)
    module.__spec__ = ModuleSpec(name, None, origin=__name__, is_package="__path__" in names)
    _before.setdefault(name, sys.modules.get(name, _MISSING))
    sys.modules[name] = module
