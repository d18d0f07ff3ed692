#!/usr/bin/env python3
"""Shows that one wheel serves several versions of torch and Python: pip install and tests/test_tiny.py in a
clean environment for each pair.

    python tools/wheel_check.py dist/ascend_moe-0.1.0-py3-none-linux_x86_64.whl
           [--torch 2.10.0,2.13.0] [--python python3.11,python3.12] [--index-url URL]

A Python is the first of its name on PATH that runs, or else a version that pyenv has; its full path may be
given, and one that does not run is an error. torch is installed with what it needs on a CPU; where it cannot
be imported so, because the index has a build for CUDA, with gigabytes of CUDA.
Exit code 1: a pair failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED_BY_TORCH = ("filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions", "setuptools")
NEEDED_BY_TEST = ("numpy", "typer", "rich", "pytest", "pytest-timeout")
SECONDS = 1800


class CheckError(Exception):
    """A step of one environment failed; the text has its output."""


def run(command: list[str], folder: Path, env: dict[str, str]) -> str:
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=folder, env=env, timeout=SECONDS, text=True, errors="replace", **both)
    if done.returncode != 0:
        raise CheckError(f"{' '.join(command[:6])} ...\n{done.stdout[-3000:]}")
    return done.stdout


def program(name: str) -> str:
    """The first of this name that runs. A shim of pyenv whose version is not set does not."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    folders += [str(folder) for folder in sorted(versions.glob("*/bin"))]
    for folder in dict.fromkeys(folders):
        found = shutil.which(name, path=folder)
        if found and subprocess.run([found, "-c", ""], capture_output=True, timeout=SECONDS).returncode == 0:
            return found
    raise CheckError(f"no {name} on PATH runs; --python takes paths too")


def check(wheel: Path, python: str, torch: str, index: list[str]) -> str:
    """The last line of the tests in a new environment of this Python with this torch."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ASCEND"))}
    with tempfile.TemporaryDirectory(prefix="wheel-check-") as name:
        folder = Path(name)
        run([python, "-m", "venv", str(folder / "venv")], folder, settings)
        settings["ASCEND_MOE_CACHE"] = str(folder / "cache")
        settings["ASCEND_MOE_TEST_INSTALLED"] = "1"
        inside = str(folder / "venv" / "bin" / "python")
        pip = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*pip, "--no-deps", *index, f"torch=={torch}"], folder, settings)
        run([*pip, *NEEDED_BY_TORCH, *NEEDED_BY_TEST], folder, settings)
        try:
            run([inside, "-c", "import torch"], folder, settings)
        except CheckError:
            run([*pip, *index, f"torch=={torch}"], folder, settings)
        run([*pip, "--no-deps", str(wheel)], folder, settings)
        shutil.copy(ROOT / "tests" / "test_tiny.py", folder)
        tests = [inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=300", "test_tiny.py"]
        return run(tests, folder, settings).strip().splitlines()[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description="One wheel, several torch versions, several Pythons.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", default="2.10.0,2.13.0")
    parser.add_argument("--python", default="python3.11,python3.12")
    parser.add_argument("--index-url", help="of torch's wheels, e.g. https://download.pytorch.org/whl/cpu")
    options = parser.parse_args()
    if "-py3-none-linux_" not in options.wheel.name:
        print(f"wheel-check: FAIL: {options.wheel.name} is not a wheel for every Python", file=sys.stderr)
        return 1
    index = ["--index-url", options.index_url] if options.index_url else []
    failed = False
    for python in options.python.split(","):
        for torch in options.torch.split(","):
            try:
                outcome = "PASS: " + check(options.wheel.resolve(), program(python), torch, index)
            except (CheckError, subprocess.TimeoutExpired) as error:
                failed, outcome = True, f"FAIL: {error}"
            print(f"wheel-check: {python}, torch {torch}: {outcome}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
