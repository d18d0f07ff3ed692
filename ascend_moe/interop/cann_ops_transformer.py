"""CANN's newest Python front end, ``cann_ops_transformer.ops``: mega_moe and its buffer of `ascend_moe.layer_ops`."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from ascend_moe.errors import AscendMoeError
from ascend_moe.layer_ops import SymmBuffer, get_symm_buffer_for_mega_moe, mega_moe

__all__ = ["SymmBuffer", "get_symm_buffer_for_mega_moe", "install", "mega_moe", "uninstall"]

_NAME = "cann_ops_transformer"


def install() -> ModuleType:
    """Make ``cann_ops_transformer.ops`` importable, with the two functions of MegaMoe and SymmBuffer; idempotent.

    Returns the module ``cann_ops_transformer``. Raises AscendMoeError if CANN's own package is installed; use that.
    """
    installed = sys.modules.get(_NAME)
    if installed is not None and _is_ours(installed):
        return installed
    if installed is not None or importlib.util.find_spec(_NAME) is not None:
        raise AscendMoeError(f"{_NAME} is installed, so it is not replaced: use it, or uninstall it")
    whole, ops = ModuleType(_NAME), ModuleType(f"{_NAME}.ops")
    for module in (whole, ops):
        module.__doc__ = f"Stands in for CANN's {module.__name__}: ascend_moe.interop.cann_ops_transformer."
        module.__spec__ = importlib.util.spec_from_loader(module.__name__, None, is_package=module is whole)
    whole.__path__ = []
    for name in ("SymmBuffer", "get_symm_buffer_for_mega_moe", "mega_moe"):
        setattr(ops, name, globals()[name])
    whole.ops = ops  # type: ignore[attr-defined]
    sys.modules[_NAME], sys.modules[f"{_NAME}.ops"] = whole, ops
    return whole


def uninstall() -> None:
    """Remove the modules that `install` has added; do nothing if there are none."""
    installed = sys.modules.get(_NAME)
    if installed is not None and _is_ours(installed):
        del sys.modules[_NAME], sys.modules[f"{_NAME}.ops"]


def _is_ours(module: ModuleType) -> bool:
    return getattr(getattr(module, "ops", None), "mega_moe", None) is mega_moe
