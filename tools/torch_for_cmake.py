"""Tells CMake the folder of the torch that is installed beside this Python.

Torch is not imported. Standard library only. Exit code 1 and one line: there is none to build against.
"""

import importlib.util
import re
import sys
from pathlib import Path

OLDEST = (2, 10)


def folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        raise FileNotFoundError(f"torch is not installed for {sys.executable}")
    path = Path(spec.origin).parent
    version = re.search(r"^__version__ = '((\d+)\.(\d+)[^']*)'", (path / "version.py").read_text(), re.M)
    if version is None:
        raise FileNotFoundError(f"{path / 'version.py'} names no version")
    if (int(version[2]), int(version[3])) < OLDEST:
        raise FileNotFoundError(f"torch {version[1]} of {sys.executable} is older than 2.10")
    for part in ("include/torch/csrc/stable/c/shim.h", "lib/libtorch_cpu.so"):
        if not (path / part).is_file():
            raise FileNotFoundError(f"torch {version[1]} of {sys.executable} has no {part}")
    return path


def main() -> int:
    try:
        print(folder())
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
