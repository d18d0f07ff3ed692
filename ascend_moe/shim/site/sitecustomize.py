"""Run by Python at startup if `ascend-moe shim` has put this folder on PYTHONPATH.

It waits for the import of torch, ascend_moe or torch_npu, whichever comes first, and then installs the shim of
torch_npu and that of CANN's ``cann_ops_transformer``. Programs that import none of them lose no time. Another
sitecustomize of the environment runs too.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
SHIM = "ascend_moe.shim.torch_npu"
CANN_FRONT_END = "cann_ops_transformer"  # which programs for torch_npu import beside it


def _finished(name: str) -> bool:
    """Whether the import of a module has finished."""
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def _install() -> None:
    """Install the shim; while one of the two packages is being imported, its end does."""
    if _finished("torch") and (_finished("ascend_moe") or "ascend_moe" not in sys.modules):
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not FINDER]
        importlib.import_module(SHIM).install(quiet=True)
        if CANN_FRONT_END not in sys.modules:
            importlib.import_module(f"ascend_moe.interop.{CANN_FRONT_END}").install()


class Finder:
    """Import hook that delegates to the later hooks, and installs the shim once torch or ascend_moe is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if name == "torch_npu":
            importlib.import_module("torch")  # which installs it
            return getattr(sys.modules.get(name), "__spec__", None)
        if name not in ("torch", "ascend_moe"):
            return None
        for finder in sys.meta_path:
            spec: Any = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                self._watch(spec)
                return spec
        return None

    @staticmethod
    def _watch(spec: Any) -> None:
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            spec._initializing = False
            _install()

        spec.loader.exec_module = exec_module


FINDER: Any = Finder()


def _run_next() -> None:
    """Run the environment's own sitecustomize, which this one hides."""
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, FINDER)
with contextlib.suppress(ImportError):
    _run_next()
