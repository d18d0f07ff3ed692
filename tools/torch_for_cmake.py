"""Tells CMake about the torch that is installed beside this Python, and about it:

version;folder;C++ ABI;c10d;headers;suffix

The last two are of this Python: the folder of Python.h, or NO, and how its extension modules' names end.

Torch is not imported. Standard library only. Exit code 1 and one line: there is none to build against.
"""

import importlib.util
import re
import sys
import sysconfig
from pathlib import Path


def found() -> "tuple[str, Path, str, str]":
    """Version, folder, _GLIBCXX_USE_CXX11_ABI, whether it has process groups (ON or OFF)."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        raise FileNotFoundError(f"torch is not installed for {sys.executable}")
    folder = Path(spec.origin).parent
    # Its wheels' metadata may leave out the local part (+cpu), which torch.__version__ has.
    said = re.search(r"^__version__ = '([^']+)'", (folder / "version.py").read_text(), re.MULTILINE)
    if said is None:
        raise FileNotFoundError(f"{folder / 'version.py'} names no version")
    for part in ("include/torch/library.h", "lib/libtorch_cpu.so", "lib/libc10.so"):
        if not (folder / part).is_file():
            raise FileNotFoundError(f"torch {said[1]} of {sys.executable} has no {part}")
    abi = re.search(r"_GLIBCXX_USE_CXX11_ABI=(\d)", cmake_text(folder, "Torch/TorchConfig.cmake"))
    c10d = "USE_DISTRIBUTED" in cmake_text(folder, "Caffe2/Caffe2Targets.cmake")
    return said[1], folder, abi[1] if abi else "1", "ON" if c10d else "OFF"


def cmake_text(folder: Path, name: str) -> str:
    path = folder / "share" / "cmake" / name
    return path.read_text() if path.is_file() else ""


def python() -> "tuple[str, str]":
    headers = sysconfig.get_path("include")
    return headers if Path(headers, "Python.h").is_file() else "NO", sysconfig.get_config_var("EXT_SUFFIX")


def main() -> int:
    try:
        print(";".join(str(part) for part in (*found(), *python())))
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
