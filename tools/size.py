#!/usr/bin/env python3
"""Files and lines of the repository by folder, and whether its aims are kept. Prints, writes nothing.

    python tools/size.py            of what git tracks here
    python tools/size.py COMMIT     and the difference to COMMIT

Lines of code are lines of C++ and Python that are not blank. Exit code 1: an aim is missed.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tarfile
from collections import Counter, defaultdict
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
CODE = (".h", ".cpp", ".inc", ".S", ".py", ".pyi")
SPLIT = ("ascend_moe", "op_kernel", "op_host", "csrc", "twin", "vnpu", "tests")  # shown by their folders
SMALL = 60


def git(*words: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True).stdout


def tree_here() -> dict[str, bytes]:
    paths = {name: ROOT / name for name in git("ls-files", "-z").decode().split("\0") if name}
    return {name: path.read_bytes() for name, path in paths.items() if path.is_file()}


def tree_at(commit: str) -> dict[str, bytes]:
    """Every file of a commit."""
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}  # type: ignore[union-attr]


def lines_of(name: str, content: bytes) -> int:
    return sum(bool(line.strip()) for line in content.splitlines()) if name.endswith(CODE) else 0


def folder_of(name: str) -> str:
    parts = PurePosixPath(name).parts
    if len(parts) == 1:
        return "."
    return "/".join(parts[:2]) if parts[0] in SPLIT and len(parts) > 2 else parts[0]


def sizes(files: dict[str, bytes]) -> dict[str, Counter[str]]:
    """By folder, and of all: files, lines of code, of tests."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for name, content in files.items():
        kind = "tests" if name.startswith("tests/") else "code"
        for folder in (folder_of(name), "all"):
            found[folder].update({"files": 1, kind: lines_of(name, content)})
    return found


def aims(files: dict[str, bytes]) -> list[tuple[str, int, int]]:
    """Returns what is counted, how many, at most how many. Lines with the blank ones."""
    lines = {name: len(content.splitlines()) for name, content in files.items() if name.endswith(CODE)}
    small = [name for name, count in lines.items() if count < SMALL and not name.startswith("tests/")]
    headers = [name for name in files if name.startswith("op_kernel/") and name.endswith(".h")]
    root = [name for name in files if PurePosixPath(name).match("ascend_moe/*.py") and name.count("/") == 1]
    return [
        ("lines of C++ and Python", sum(lines.values()), 108_000),
        (f"files under {SMALL} lines outside tests", len(small), 40),
        ("headers in op_kernel", len(headers), 30),
        ("modules in the root of the package", len(root), 12),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Files and lines by folder, and the aims.")
    parser.add_argument("since", nargs="?", help="a commit: adds the difference to it")
    since, files = parser.parse_args().since, tree_here()
    try:
        here, before = sizes(files), sizes(tree_at(since) if since else {})
    except subprocess.CalledProcessError as error:
        print(f"size: {since} is no commit here: {error.stderr.decode().strip()}", file=sys.stderr)
        return 2
    columns = ("files", "code", "tests")
    print(f"{'folder':24}" + "".join(f"{column:>9}" for column in columns) + f"  since {since}" * bool(since))
    for folder in [*sorted((here.keys() | before.keys()) - {"all"}), "all"]:
        now, then = here.get(folder, Counter()), before.get(folder, Counter())
        line = f"{folder:24}" + "".join(f"{now[column]:>9,}" for column in columns)
        print(line + "".join(f"{now[column] - then[column]:>+9,}" for column in columns if since))
    print()
    missed = False
    for what, count, most in aims(files):
        missed |= count > most
        print(f"{'missed' if count > most else 'kept':6}  {what}: {count:,}, aim at most {most:,}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
