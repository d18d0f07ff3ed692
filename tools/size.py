#!/usr/bin/env python3
"""Files and lines of what git tracks here, by folder, and whether the aims are kept. Prints, writes nothing.

Lines of code are lines of C++ and Python that are not blank. Exit code 1: an aim is missed.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
CODE = (".h", ".cpp", ".inc", ".S", ".py", ".pyi")
SPLIT = ("ascend_moe", "op_kernel", "op_host", "csrc", "twin", "vnpu", "tests")  # shown by their folders
SMALL = 60


def folder_of(name: str) -> str:
    parts = PurePosixPath(name).parts
    if len(parts) == 1:
        return "."
    return "/".join(parts[:2]) if parts[0] in SPLIT and len(parts) > 2 else parts[0]


def main() -> int:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], check=True, capture_output=True, text=True
    )
    names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    lines = {name: (ROOT / name).read_bytes().splitlines() for name in names if name.endswith(CODE)}
    sizes: dict[str, Counter[str]] = defaultdict(Counter)
    for name in names:
        kind = "tests" if name.startswith("tests/") else "code"
        for folder in (folder_of(name), "~ all"):
            sizes[folder].update({"files": 1, kind: sum(bool(line.strip()) for line in lines.get(name, ()))})
    for folder, counts in sorted(sizes.items()):
        print(f"{folder:24}" + "".join(f"{counts[kind]:>9,} {kind}" for kind in ("files", "code", "tests")))
    small = [name for name, found in lines.items() if len(found) < SMALL and not name.startswith("tests/")]
    headers = [name for name in names if name.startswith("op_kernel/") and name.endswith(".h")]
    root = [name for name in names if PurePosixPath(name).match("ascend_moe/*.py") and name.count("/") == 1]
    missed = False
    for what, count, most in (
        ("lines of C++ and Python, blank ones too", sum(map(len, lines.values())), 80_000),
        (f"files under {SMALL} lines outside tests", len(small), 40),
        ("headers in op_kernel", len(headers), 30),
        ("modules in the root of the package", len(root), 12),
    ):
        missed |= count > most
        print(f"{'missed' if count > most else 'kept':6}  {what}: {count:,}, aim at most {most:,}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
