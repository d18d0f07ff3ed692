"""A shim of torch_npu for machines without its wheel: CPU tensors under the names of NPUs, without CANN or a device.

`torch_npu` contains ``install`` and ``uninstall``, `npu` and `profiler` are its submodules, and `launch` starts a
command with the shim in all its processes (``ascend-moe shim``, by ``site/sitecustomize.py``). docs/vnpu.md compares it
with the virtual NPU, which runs the real wheel.
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

ABOUT = "a shim of torch_npu by ascend_moe: CPU tensors and gloo, no Ascend device; times are not meaningful"
VERSION = f"{installed_version('torch').partition('+')[0]}+ascend.moe.shim"
SITE = Path(__file__).resolve().parent / "site"  # its sitecustomize installs the shim
_QUERY = """
import importlib.util, json
print(json.dumps([name for name in ("torch", "ascend_moe", "torch_npu") if importlib.util.find_spec(name)]))
"""


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a copy of ``base`` (None: this process's environment) in which Python processes use the shim."""
    result = dict(os.environ if base is None else base)
    others = [entry for entry in result.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != str(SITE)]
    result["PYTHONPATH"] = os.pathsep.join([str(SITE), *others])
    return result


def launch(command: Sequence[str], quiet: bool = False) -> NoReturn:
    """Replace this process by ``command`` with the shim of torch_npu. Does not return.

    Args:
        command: a Python interpreter, a Python script, or a console script such as torchrun, and its arguments.
        quiet: print no line about the shim on stderr.

    Raises:
        ArgumentError: the command does not exist, or its Python has torch_npu, or lacks torch or ascend_moe.
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
            text = f"{interpreter} has no {name}: run `{interpreter} -m pip install {name}`"
            raise ArgumentError(text, argument="command")
    if "torch_npu" in found:
        raise ArgumentError(
            f"{interpreter} has torch_npu: the shim is for machines without it; run `ascend-moe vnpu -- ` instead",
            argument="command",
        )
