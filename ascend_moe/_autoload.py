"""torch loads every installed backend when it is imported; torch_npu's loading needs CANN's libascendcl.so.

Where torch_npu is installed and CANN is not, ``import torch`` would fail: importing this module, before
torch, then asks torch not to load backends. Nothing is done where CANN or the virtual NPU is, or where the
user has decided.
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
    """Sets TORCH_DEVICE_BACKEND_AUTOLOAD=0 when torch could not be imported otherwise. Imports nothing."""
    if VARIABLE in os.environ or "torch" in sys.modules:
        return
    if _installed("torch_npu") and (command() == "doctor" or not _library_found()):
        os.environ[VARIABLE] = "0"  # doctor runs just where torch_npu cannot be loaded, and tries that elsewhere


def command() -> str | None:
    """The word after `ascend-moe` or `python -m ascend_moe`, "" without one; None in another program's process."""
    words = iter(sys.orig_argv[1:])
    for word in words:
        if word == "-m" or not word.startswith("-"):
            program = next(words, "") if word == "-m" else os.path.basename(word)
            return next(words, "") if program == _PROGRAMS[word == "-m"] else None
        if word in ("-X", "-W"):  # they have a value
            next(words, "")
    return None


def in_command() -> bool:
    """Whether this process is one of the command `ascend-moe`, before torch is imported."""
    return command() is not None and "torch" not in sys.modules


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _library_found() -> bool:
    """Whether the loader has a libascendcl.so. With ASCEND_HOME_PATH set, a failure is CANN's to explain."""
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
