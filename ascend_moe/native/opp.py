"""Looks for operator packages where CANN does: the trees of ASCEND_CUSTOM_OPP_PATH, then the vendors' below its own.

A tree holds ``op_api/lib/libcust_opapi.so``, the functions that torch_npu calls, and a JSON file a SoC with the
operator types that it has kernels for. Of two trees with one type the first wins.
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
    """Every folder of an operator package that there is, the one that wins first."""
    folders = [Path(folder) for folder in os.environ.get("ASCEND_CUSTOM_OPP_PATH", "").split(":") if folder]
    opp = os.environ.get("ASCEND_OPP_PATH", "")
    if opp:
        folders += sorted((Path(opp) / "vendors").glob("*"))
    return [folder for folder in folders if folder.is_dir()]


def libraries() -> list[Path]:
    """Every libcust_opapi.so that torch_npu would look into, in its order."""
    return [path for tree in trees() if (path := tree / _LIBRARY).is_file()]


def ours() -> Path | None:
    """The first library with this package's operators."""
    return next((path for path in libraries() if all(name in path.read_bytes() for name in SYMBOLS)), None)


def op_types(tree: Path) -> set[str]:
    """The operator types of which a tree has kernels, for any SoC; what cannot be read has none."""
    types = set[str]()
    for path in tree.glob(_OPS_INFO):
        try:
            described = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        types |= described.keys() if isinstance(described, Mapping) else set()
    return types


def owners() -> dict[str, list[Path]]:
    """By operator type, every tree that has it: the first one wins, the others are never asked."""
    found = dict[str, list[Path]]()
    for tree in trees():
        for op in op_types(tree):
            found.setdefault(op, []).append(tree)
    return found
