"""Installed packages of an environment, read from metadata without imports. Runs in any Python, also by ``-c``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
from typing import Any


def wheel(name: str) -> list[str] | None:
    """Return the version, folder and dist-info folder of the distribution ``name``, or None if it is not installed."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return [found.version, str(found.locate_file("")), str(getattr(found, "_path", ""))]


def vllm_ascend_device() -> str:
    """Return the series that the installed vllm-ascend was built for, "A2", "A3", ...; "" if that is not known."""
    try:
        spec = importlib.util.find_spec("vllm_ascend")
    except (ImportError, ValueError):
        return ""
    for folder in (spec and spec.submodule_search_locations) or ():
        path = os.path.join(folder, "_build_info.py")
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                named = re.findall(r"""^__(?:device_type|soc_version)__ *= *['"](\w+)['"]""", file.read(), re.M)
            # up to 0.11 the name of a SoC: ASCEND910B1, ascend910_9391
            family = re.sub("(?i)^ascend910b.*", "A2", named[0]) if named else ""
            return re.sub("(?i)^ascend910_93.*", "A3", family)
    return ""


def installed() -> dict[str, Any]:
    """Return the results of `wheel` for torch, torch_npu and vllm_ascend, and of `vllm_ascend_device`, by name."""
    names = ("torch", "torch_npu", "vllm_ascend")
    return {**{name: wheel(name) for name in names}, "vllm_ascend_device": vllm_ascend_device()}


if __name__ == "__main__":
    print(json.dumps(installed()))
