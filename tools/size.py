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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
CODE = (".h", ".cpp", ".inc", ".S", ".py", ".pyi")
SPLIT = ("ascend_moe", "op_kernel", "op_host", "csrc", "twin", "vnpu", "tests")  # shown by their folders
SMALL = 60


@dataclass
class Size:
    files: int = 0
    code: int = 0
    tests: int = 0

    def add(self, other: Size, sign: int = 1) -> None:
        self.files += sign * other.files
        self.code += sign * other.code
        self.tests += sign * other.tests

    def row(self, signed: bool) -> list[str]:
        return [f"{number:+,}" if signed else f"{number:,}" for number in (self.files, self.code, self.tests)]


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


def sizes(tree: dict[str, int]) -> dict[str, Size]:
    by_folder: dict[str, Size] = {}
    for name, lines in tree.items():
        is_test = name.startswith("tests/")
        by_folder.setdefault(folder_of(name), Size()).add(
            Size(1, 0 if is_test else lines, lines if is_test else 0)
        )
    return by_folder


def total(by_folder: dict[str, Size]) -> Size:
    result = Size()
    for size in by_folder.values():
        result.add(size)
    return result


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


def columns(row: list[str], widths: list[int]) -> Iterator[tuple[int, tuple[str, int]]]:
    return enumerate(zip(row, widths, strict=True))


def table(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width) for at, (cell, width) in columns(row, widths)
        )
        for row in rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Files and lines by folder, and the aims.")
    parser.add_argument("since", nargs="?", help="a commit: adds the difference to it")
    since = parser.parse_args().since
    tree, raw = {}, {}
    for name, content in tree_here():
        tree[name] = lines_of(name, content)
        if PurePosixPath(name).suffix in CODE:
            raw[name] = len(content.splitlines())
    here = sizes(tree)
    before: dict[str, Size] = {}
    if since:
        try:
            before = sizes({name: lines_of(name, content) for name, content in tree_at(since)})
        except subprocess.CalledProcessError as error:
            print(f"size: {since} is no commit here: {error.stderr.decode().strip()}", file=sys.stderr)
            return 2
    head = ["folder", "files", "code", "tests"]
    rows = [head + [f"{word} since" for word in head[1:]] if since else head]
    for folder in [*sorted(here.keys() | before.keys()), "all"]:
        now = total(here) if folder == "all" else here.get(folder, Size())
        then = total(before) if folder == "all" else before.get(folder, Size())
        row = [folder, *now.row(False)]
        if since:
            change = Size(now.files, now.code, now.tests)
            change.add(then, -1)
            row += change.row(True)
        rows.append(row)
    print(table(rows) + "\n")
    missed = False
    for what, count, most in aims(tree, raw):
        missed |= count > most
        print(f"{'missed' if count > most else 'kept':6}  {what}: {count:,}, aim at most {most:,}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
