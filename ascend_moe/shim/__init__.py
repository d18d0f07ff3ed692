"""Stands in for torch_npu where its wheel is not installed: CPU tensors under an NPU's names, no CANN, no device.

`torch_npu` is the module itself with ``install`` and ``uninstall``, `npu` and `profiler` are what it shows under those
names, `launch` starts a command whose processes have it from their first line on (``ascend-moe shim``, by
``site/sitecustomize.py``). docs/vnpu.md says when to take it and when the virtual NPU, which runs the real wheel.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ascend_moe._text import installed_version
from ascend_moe.errors import ArgumentError
from ascend_vnpu.wheels import ask, interpreter_of

ABOUT = "a shim of torch_npu by ascend_moe: CPU tensors and gloo, no Ascend device; times mean nothing"
VERSION = f"{installed_version('torch').partition('+')[0]}+ascend.moe.shim"
SITE = Path(__file__).resolve().parent / "site"  # its sitecustomize installs the shim
_QUERY = """
import importlib.util, json
print(json.dumps([name for name in ("torch", "ascend_moe", "torch_npu") if importlib.util.find_spec(name)]))
"""


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """``base`` (default: this process's environment) changed so that child processes have the shim."""
    result = dict(os.environ if base is None else base)
    others = [entry for entry in result.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != str(SITE)]
    result["PYTHONPATH"] = os.pathsep.join([str(SITE), *others])
    return result


def launch(command: Sequence[str], quiet: bool = False) -> NoReturn:
    """Become ``command``, with the shim of torch_npu. Does not return.

    Args:
        command: a Python, a Python script, or a console script such as torchrun or pytest, and its arguments.
        quiet: no line about it on stderr.

    Raises:
        ArgumentError: no such command; its Python has torch_npu, or lacks torch or ascend_moe.
    """
    _check(interpreter_of(command[0]))
    if not quiet:
        print(f"ascend-moe shim: torch_npu {VERSION} is {ABOUT}", file=sys.stderr, flush=True)
    os.execvpe(command[0], list(command), environment())


def _check(interpreter: str) -> None:
    without = {**os.environ, "PYTHONPATH": environment()["PYTHONPATH"].partition(os.pathsep)[2]}
    found = ask(interpreter, _QUERY, without)
    for name in ("torch", "ascend_moe"):
        if name not in found:
            raise ArgumentError(f"{interpreter} has no {name}: {interpreter} -m pip install {name}", argument="command")
    if "torch_npu" in found:
        raise ArgumentError(
            f"{interpreter} has torch_npu: the shim is for machines without it; run `ascend-moe vnpu -- ` instead",
            argument="command",
        )
