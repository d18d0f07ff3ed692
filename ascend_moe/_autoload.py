"""Let torch be imported where torch_npu is installed but CANN is not.

torch loads every installed backend on import, and torch_npu's needs CANN's libascendcl.so. Importing this module before
torch disables that autoload if the library is missing; it changes nothing if CANN or the virtual NPU is present or the
user has set the variable.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_LIBRARY = "libascendcl.so"
_PROGRAMS = ("ascend-moe", "ascend_moe")  # as a script, as a module


def prepare() -> None:
    """Set TORCH_DEVICE_BACKEND_AUTOLOAD=0 if torch could not load torch_npu, and for `doctor`. Imports nothing."""
    if VARIABLE in os.environ or "torch" in sys.modules:
        return
    if _installed("torch_npu") and (command() == "doctor" or not _library_found()):
        os.environ[VARIABLE] = "0"  # doctor must run without torch_npu and tries it in a child process


def command() -> str | None:
    """Return the subcommand of `ascend-moe` or `python -m ascend_moe`, "" without one, None in other programs."""
    words = iter(sys.orig_argv[1:])
    for word in words:
        if word == "-m" or not word.startswith("-"):
            program = next(words, "") if word == "-m" else os.path.basename(word)
            return next(words, "") if program == _PROGRAMS[word == "-m"] else None
        if word in ("-X", "-W"):  # they have a value
            next(words, "")
    return None


def in_command() -> bool:
    """Return whether this process runs the command `ascend-moe` and has not imported torch."""
    return command() is not None and "torch" not in sys.modules


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _library_found() -> bool:
    """Whether the loader finds libascendcl.so; with ASCEND_HOME_PATH set it is assumed and CANN reports failures."""
    if os.environ.get("ASCEND_HOME_PATH"):
        return True
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    if any(folder and Path(folder, _LIBRARY).exists() for folder in folders):
        return True
    try:
        return _LIBRARY.encode() in Path("/etc/ld.so.cache").read_bytes()
    except OSError:
        return False


prepare()
