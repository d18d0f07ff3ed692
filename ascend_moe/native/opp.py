"""Operator packages in CANN's search order: the trees in ASCEND_CUSTOM_OPP_PATH, then the vendors' in CANN's own.

A tree contains ``op_api/lib/libcust_opapi.so``, the functions that torch_npu calls, and one JSON file per SoC with the
operator types that it has kernels for. If two trees have the same type, the first one is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

OURS = ("AscendMoeDistributeDispatch", "AscendMoeDistributeCombine")
SYMBOLS = tuple(f"aclnn{op}GetWorkspaceSize".encode() for op in OURS)
_LIBRARY = Path("op_api", "lib", "libcust_opapi.so")
_OPS_INFO = "op_impl/ai_core/tbe/config/*/aic-*-ops-info.json"


def trees() -> list[Path]:
    """Return the existing folders of operator packages, highest precedence first."""
    folders = [Path(folder) for folder in os.environ.get("ASCEND_CUSTOM_OPP_PATH", "").split(":") if folder]
    opp = os.environ.get("ASCEND_OPP_PATH", "")
    if opp:
        folders += sorted((Path(opp) / "vendors").glob("*"))
    return [folder for folder in folders if folder.is_dir()]


def libraries() -> list[Path]:
    """Return every libcust_opapi.so that torch_npu searches, in its order."""
    return [path for tree in trees() if (path := tree / _LIBRARY).is_file()]


def ours() -> Path | None:
    """Return the first library with this package's operators, or None."""
    return next((path for path in libraries() if all(name in path.read_bytes() for name in SYMBOLS)), None)


def op_types(tree: Path) -> set[str]:
    """Return the operator types for which a tree has kernels, for any SoC; empty if it cannot be read."""
    types = set[str]()
    for path in tree.glob(_OPS_INFO):
        try:
            described = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        types |= described.keys() if isinstance(described, Mapping) else set()
    return types


def owners() -> dict[str, list[Path]]:
    """Return the trees of each operator type; only the first is used."""
    found = dict[str, list[Path]]()
    for tree in trees():
        for op in op_types(tree):
            found.setdefault(op, []).append(tree)
    return found
