"""Compilation of the torch_npu adapter. Usable by CMake on its own: imports neither torch nor torch_npu.

torch_npu's wheel contains every header the adapter needs; CANN is not used.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

LIBRARY = "libascend_moe_npu.so"
KEY_SUFFIX = ".key"  # file next to the library that identifies what it was built from
_TIMEOUT_S = 1800
# Headers that define a launch and the positions of its arguments.
_RULES = tuple(f"op_host/rules/{name}.h" for name in ("op", "op_tables", "args"))
_ARGUMENTS = ("csrc/torch/api.h", *_RULES, "op_kernel/protocol/tiling.h")


class BuildError(Exception):
    """Building is impossible or has failed: names the missing tool and its fix, or contains the compiler's output."""


def package_folder(name: str) -> Path:
    """Return the folder of an installed package, without importing it. Raises BuildError if it is not installed."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.origin:
        fix = "pip install torch"
        if name == "torch_npu":
            fix = "install the one for torch's version, and CANN, without which importing torch would fail"
        raise BuildError(f"{name} is not installed for {sys.executable}: {fix}")
    return Path(spec.origin).parent


def versions() -> tuple[str, str]:
    """Return the installed versions of torch and torch_npu. Raises BuildError if one is missing."""
    found = []
    for name in ("torch", "torch_npu"):
        package_folder(name)
        try:
            found.append(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            raise BuildError(f"{name} has no metadata: reinstall it with pip") from None
    return found[0], found[1]


def compiler() -> str:
    """Return the path of the C++ compiler: $CXX if set, else g++, else c++. Raises BuildError if there is none."""
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("g++", "c++"):
        found = shutil.which(name)
        if found is not None:
            return found
    raise BuildError(f"no C++ compiler ({wanted or 'g++, c++'}): install g++ 11 or newer, or set CXX")


def sources(root: Path) -> list[Path]:
    """Return the adapter's C++ files under the source root. Raises BuildError if there are none."""
    found = sorted((root / "csrc" / "npu").glob("*.cpp"))
    if not found:
        raise BuildError(f"no sources in {root / 'csrc/npu'}: install ascend_moe again")
    return found


def command(root: Path, target: Path) -> list[str]:
    """Return the command that compiles the sources of ``root`` to ``target``. Raises BuildError if one is missing."""
    torch_folder, npu_folder = package_folder("torch"), package_folder("torch_npu")
    minor = re.match(r"\d+\.(\d+)", versions()[0])
    if minor is None:
        raise BuildError(f"torch's version {versions()[0]} is not a release: install a release of torch")
    # torch_npu's headers come first: those of some CANN releases lack parts that they use.
    third = npu_folder / "include" / "third_party"
    includes = [npu_folder / "include", third / "acl" / "inc", third / "hccl" / "inc", third / "op-plugin"]
    includes += [torch_folder / "include", torch_folder / "include" / "torch" / "csrc" / "api" / "include"]
    for path in includes:
        if not path.is_dir():
            raise BuildError(f"{path} is missing: install torch and torch_npu again, from wheels")
    python = Path(sysconfig.get_path("include"))  # torch_npu's headers include it
    if not (python / "Python.h").is_file():
        raise BuildError(f"{python / 'Python.h'} is missing: install the development files of this Python")
    includes.append(python)
    own = [flag for folder in ("csrc", "op_host", "op_kernel") for flag in ("-I", str(root / folder))]
    config = torch_folder / "share" / "cmake" / "Torch" / "TorchConfig.cmake"
    abi = re.search(r"_GLIBCXX_USE_CXX11_ABI=(\d)", config.read_text() if config.is_file() else "")
    flags = ["-std=c++17", "-O2", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi[1] if abi else 1}"]
    # op-plugin's headers distinguish torch versions by this number.
    flags += [f"-DCURRENT_VERSION={int(minor[1]) - 1}"]
    flags += [part for path in includes for part in ("-isystem", str(path))]
    libraries = [f"-L{npu_folder / 'lib'}", "-ltorch_npu", f"-L{torch_folder / 'lib'}"]
    libraries += ["-ltorch", "-ltorch_cpu", "-lc10", "-Wl,--allow-shlib-undefined"]
    units = [str(path) for path in sources(root)]
    return [compiler(), *flags, *own, "-Wall", "-Wextra", *units, *libraries, "-o", str(target)]


def key(root: Path) -> str:
    """Return the identifier of a build from ``root``: versions of torch and torch_npu, and a hash of the sources."""
    digest = hashlib.sha256(f"{sys.implementation.cache_tag}\0".encode())
    headers = [*sorted((root / "csrc" / "npu").glob("*.h")), *(root / path for path in _ARGUMENTS)]
    for path in (*sources(root), *headers, Path(__file__)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"torch-{versions()[0]}-torch_npu-{versions()[1]}-{digest.hexdigest()[:24]}"


def build(root: Path, target: Path) -> None:
    """Compile the adapter under ``root`` to ``target``, and write `key` next to it. Raises BuildError."""
    words = command(root, target)
    try:
        result = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{words[0]} did not finish within {_TIMEOUT_S} s; try by hand: {shlex.join(words)}") from None
    if result.returncode != 0:
        found = re.findall(r"^(.*?(?:fatal )?error: .*)$", result.stderr, flags=re.MULTILINE)
        first = found[0] if found else f"{words[0]} ended with code {result.returncode}"
        raise BuildError(
            f"compiling the torch_npu adapter against torch {versions()[0]} and torch_npu "
            f"{versions()[1]} failed: {first}\n{shlex.join(words)}\n{result.stderr.rstrip()}"
        )
    target.with_name(target.name + KEY_SUFFIX).write_text(key(root) + "\n")


def main() -> int:
    """Run ``npu_adapter_build.py ROOT TARGET`` (``--check``: report whether building is possible); return 0 or 1."""
    try:
        if sys.argv[1:] == ["--check"]:
            print(" ".join((*versions(), compiler())))
        else:
            build(Path(sys.argv[1]), Path(sys.argv[2]))
    except BuildError as error:
        print(f"ascend_moe: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
