#!/usr/bin/env python3
"""Files and lines of the repository by folder, and the limits of tools/size_limits.toml. Prints, writes nothing.

    python tools/size.py            of what git tracks here
    python tools/size.py COMMIT     and the difference to COMMIT

Lines are lines of C++ and Python, blank ones included; words are those of `wc -w`. Exit code 1: a limit is exceeded. It
needs Python 3.11 or later.
"""

from __future__ import annotations

import argparse
import io
import signal
import subprocess
import sys
import tarfile
from collections import Counter, defaultdict
from pathlib import Path, PurePosixPath

import tomllib

ROOT = Path(__file__).resolve().parent.parent
LIMITS = ROOT / "tools" / "size_limits.toml"
CODE = (".h", ".cpp", ".inc", ".S", ".py", ".pyi")
SPLIT = ("ascend_moe", "op_kernel", "op_host", "csrc", "twin", "vnpu", "tests")  # shown by their folders
SMALL = 60
TESTS = "tests"  # of the operator package, and those beside the products that they test


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
    return len(content.splitlines()) if name.endswith(CODE) else 0


def is_test(name: str) -> bool:
    return TESTS in PurePosixPath(name).parts[:-1]


def folder_of(name: str) -> str:
    parts = PurePosixPath(name).parts
    if len(parts) == 1:
        return "."
    return "/".join(parts[:2]) if parts[0] in SPLIT and len(parts) > 2 else parts[0]


def sizes(files: dict[str, bytes]) -> dict[str, Counter[str]]:
    """Return the files, lines of code and lines of tests by folder, and of "all"."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for name, content in files.items():
        kind = "tests" if is_test(name) else "code"
        for folder in (folder_of(name), "all"):
            found[folder].update({"files": 1, kind: lines_of(name, content)})
    return found


def limited_folder(name: str) -> str:
    """Return the top-level folder whose limit applies to a file; tests count together in every folder."""
    parts = PurePosixPath(name).parts
    return TESTS if is_test(name) else parts[0] if len(parts) > 1 else "."


def counts(files: dict[str, bytes]) -> dict[str, Counter[str]]:
    """Return the counts for the tables of limits, by table name."""
    lines = {name: lines_of(name, content) for name, content in files.items() if name.endswith(CODE)}
    by_folder: Counter[str] = Counter({"total": sum(lines.values())})
    for name, count in lines.items():
        by_folder[limited_folder(name)] += count
        if name.startswith("ascend_moe/interop/"):
            by_folder["ascend_moe/interop"] += count
    headers = [count for name, count in lines.items() if name.startswith("op_kernel/") and name.endswith(".h")]
    files_of = Counter(
        {
            "op_kernel headers": len(headers),
            "modules in the root of ascend_moe": sum(
                PurePosixPath(name).match("ascend_moe/*.py") and name.count("/") == 1 for name in lines
            ),
            f"files under {SMALL} lines outside tests": sum(
                count < SMALL and not is_test(name) for name, count in lines.items()
            ),
        }
    )
    pages = [text for name, text in files.items() if name == "README.md" or PurePosixPath(name).match("docs/*.md")]
    words = Counter({"README.md and docs/*.md": sum(len(text.split()) for text in pages)})
    longest = Counter({"op_kernel header": max(headers, default=0)})
    return {"lines": by_folder, "files": files_of, "longest": longest, "words": words}


def exceeded(files: dict[str, bytes], before: dict[str, bytes]) -> bool:
    """Print each count beside its limit. Returns whether one is exceeded, or a folder has none."""
    limits, now, then = tomllib.loads(LIMITS.read_text()), counts(files), counts(before)
    bad = False
    for table, found in now.items():
        print(f"\n{table:36}{'now':>9}{'limit':>9}{'left':>9}" + "   change" * bool(before))
        for what in sorted(limits[table].keys() | found.keys(), key=lambda key: (key == "total", key)):
            most = limits[table].get(what, 0)
            over = found[what] > most
            bad |= over
            line = f"{what:36}{found[what]:>9,}{most:>9,}{most - found[what]:>9,}"
            print(line + (f"{found[what] - then[table][what]:>+9,}" if before else "") + "  exceeded" * over)
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description="Files and lines by folder, and the limits.")
    parser.add_argument("since", nargs="?", help="a commit: adds the difference to it")
    since, files = parser.parse_args().since, tree_here()
    try:
        before = tree_at(since) if since else {}
    except subprocess.CalledProcessError as error:
        print(f"size: {since} is no commit here: {error.stderr.decode().strip()}", file=sys.stderr)
        return 2
    columns = ("files", "code", "tests")
    print(f"{'folder':24}" + "".join(f"{column:>9}" for column in columns) + f"  since {since}" * bool(since))
    here, there = sizes(files), sizes(before)
    for folder in [*sorted((here.keys() | there.keys()) - {"all"}), "all"]:
        now, then = here.get(folder, Counter()), there.get(folder, Counter())
        line = f"{folder:24}" + "".join(f"{now[column]:>9,}" for column in columns)
        print(line + "".join(f"{now[column] - then[column]:>+9,}" for column in columns if since))
    if exceeded(files, before):
        print(
            f"size: a limit of {LIMITS.name} is exceeded: make something smaller, or raise it in a commit that says why"
        )
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    sys.exit(main())
