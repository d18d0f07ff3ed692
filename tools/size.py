#!/usr/bin/env python3
"""Files and lines of the repository by folder, and whether its aims are kept. Prints, writes nothing.

    python tools/size.py            of what git tracks here
    python tools/size.py COMMIT     and the difference to COMMIT

Lines of code are lines of C++ and Python that are not blank. Exit code 1: an aim is missed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
CODE = (".h", ".cpp", ".inc", ".S", ".py", ".pyi")
SPLIT = ("ascend_moe", "op_kernel", "op_host", "csrc", "twin", "vnpu", "tests")  # shown by their folders
SMALL = 60


def git(*words: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True).stdout


def tree_here() -> Iterator[tuple[str, bytes]]:
    for name in git("ls-files", "-z").decode().split("\0"):
        path = ROOT / name
        if name and path.is_file():
            yield name, path.read_bytes()


def tree_at(commit: str) -> Iterator[tuple[str, bytes]]:
    """Every file of a commit, through one `git cat-file`."""
    entries = [line.split("\t", 1) for line in git("ls-tree", "-rz", commit).decode().split("\0") if line]
    blobs = [(head.split()[2], name) for head, name in entries if head.split()[1] == "blob"]
    command = ["git", "-C", str(ROOT), "cat-file", "--batch"]
    question = "".join(f"{blob}\n" for blob, _ in blobs).encode()
    answer = subprocess.run(command, input=question, check=True, capture_output=True).stdout
    at = 0
    for _, name in blobs:
        end = answer.index(b"\n", at)
        length = int(answer[at:end].split()[2])
        yield name, answer[end + 1 : end + 1 + length]
        at = end + length + 2


def lines_of(name: str, content: bytes) -> int:
    if PurePosixPath(name).suffix not in CODE:
        return 0
    return sum(1 for line in content.splitlines() if line.strip())


def folder_of(name: str) -> str:
    parts = PurePosixPath(name).parts
    if len(parts) == 1:
        return "."
    return "/".join(parts[:2]) if parts[0] in SPLIT and len(parts) > 2 else parts[0]


def sizes(tree: dict[str, int]) -> dict[str, Counter[str]]:
    """By folder, and of all: files, lines of code, of tests."""
    found: dict[str, Counter[str]] = {}
    for name, lines in tree.items():
        for folder in (folder_of(name), "all"):
            kind = "tests" if name.startswith("tests/") else "code"
            found.setdefault(folder, Counter()).update({"files": 1, kind: lines})
    return found


def aims(tree: dict[str, int], raw: dict[str, int]) -> list[tuple[str, int, int]]:
    """What is counted, how many, at most how many. ``raw``: lines with the blank ones, of files of code."""
    small = [name for name, lines in raw.items() if lines < SMALL and not name.startswith("tests/")]
    headers = [name for name in tree if name.startswith("op_kernel/") and name.endswith(".h")]
    root = [name for name in tree if PurePosixPath(name).match("ascend_moe/*.py") and name.count("/") == 1]
    return [
        ("lines of C++ and Python", sum(raw.values()), 80_000),
        (f"files under {SMALL} lines outside tests", len(small), 40),
        ("headers in op_kernel", len(headers), 30),
        ("modules in the root of the package", len(root), 12),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Files and lines by folder, and the aims.")
    parser.add_argument("since", nargs="?", help="a commit: adds the difference to it")
    since = parser.parse_args().since
    files = dict(tree_here())
    tree = {name: lines_of(name, content) for name, content in files.items()}
    raw = {
        name: len(content.splitlines())
        for name, content in files.items()
        if PurePosixPath(name).suffix in CODE
    }
    here, before = sizes(tree), dict[str, Counter[str]]()
    if since:
        try:
            before = sizes({name: lines_of(name, content) for name, content in tree_at(since)})
        except subprocess.CalledProcessError as error:
            print(f"size: {since} is no commit here: {error.stderr.decode().strip()}", file=sys.stderr)
            return 2
    head = ["files", "code", "tests"]
    rows = [["folder", *head, *(f"{word} since" for word in head if since)]]
    for folder in [*sorted((here.keys() | before.keys()) - {"all"}), "all"]:
        now, then = here.get(folder, Counter()), before.get(folder, Counter())
        rows.append([folder, *(f"{now[word]:,}" for word in head)])
        rows[-1] += [f"{now[word] - then[word]:+,}" for word in head if since]
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    for name, *cells in rows:
        print("  ".join([name.ljust(first), *map(str.rjust, cells, widths)]))
    print()
    missed = False
    for what, count, most in aims(tree, raw):
        missed |= count > most
        print(f"{'missed' if count > most else 'kept':6}  {what}: {count:,}, aim at most {most:,}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
