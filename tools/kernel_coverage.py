#!/usr/bin/env python3
"""Lines of op_kernel/ that the tests reach, by gcov. BUILD is a build with ASCEND_MOE_COVERAGE.

    python tools/kernel_coverage.py --run NAME BUILD COMMAND...    runs a command on BUILD's engines
    python tools/kernel_coverage.py BUILD                          prints what all runs together have reached

A line counts as reached when any instance of its template ran it, for any dtype and on either engine, fast or
checked. Every line that no run reached is printed: a case to add, or a line to delete. A killed process leaves no
counts. The probe kernel is not among the files: the tests compile it themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "op_kernel"
# Python's os._exit, by which forked processes end, would leave no counts.
AT_EXIT = """import ctypes, os
leave = os._exit
def dump_and_leave(code):
    for name in ("libascend_moe.so", "libascend_moe_checked.so"):
        try:
            ctypes.CDLL(os.path.join({build!r}, name), os.RTLD_NOLOAD).am_coverage_dump()
        except OSError:  # this process has not loaded it
            pass
    leave(code)
os._exit = dump_and_leave
"""
Lines = dict[str, dict[int, set[str]]]  # of a file, by number: the runs that reached the line


def run(build: Path, name: str, command: list[str]) -> int:
    """Run a command with counts in ``BUILD/runs/NAME``; return its exit code."""
    hook = build / "at_exit"
    hook.mkdir(exist_ok=True)
    (hook / "sitecustomize.py").write_text(AT_EXIT.format(build=str(build)))
    environment = {
        **os.environ,
        "ASCEND_MOE_LIBRARY": str(build / "libascend_moe.so"),  # the checked engine's lies beside it
        "GCOV_PREFIX": str(build / "runs" / name),
        "GCOV_PREFIX_STRIP": str(len(build.parts) - 1),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(hook), os.environ.get("PYTHONPATH")))),
    }
    return subprocess.run(command, env=environment).returncode


def gcov(counters: Path, notes: Path) -> Any:
    """Return gcov's words on an object: ``counters``, its .gcda of a run, ``notes``, the .gcno of its compilation."""
    with tempfile.TemporaryDirectory(prefix="kernel-coverage-") as scratch:
        for file in (counters, notes):  # gcov wants them side by side
            (Path(scratch) / file.name).symlink_to(file.resolve())
        command = ["gcov", "--json-format", "--stdout", counters.name]
        result = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


def add(lines: Lines, run: str, report: Any) -> None:
    """Add one object's report; files outside op_kernel/ are left out."""
    for file in report["files"]:
        path = Path(report["current_working_directory"], file["file"]).resolve()
        if not path.is_relative_to(KERNELS):
            continue
        reached = lines[str(path.relative_to(KERNELS))]
        for line in file["lines"]:
            runs = reached.setdefault(line["line_number"], set())
            if line["count"]:
                runs.add(run)


def table(lines: Mapping[str, Mapping[int, set[str]]], runs: list[str]) -> Iterator[str]:
    """A row a file: how many lines any run and each run reached; then every line that none did, with its text."""
    names = ["lines", "covered", *runs]
    yield f"{'op_kernel/':40}" + "".join(f"{name:>10}" for name in names)
    total = [0] * len(names)
    for file, reached in sorted(lines.items()):
        counts = [len(reached), sum(map(bool, reached.values()))]
        counts += [sum(run in by for by in reached.values()) for run in runs]
        total = [a + b for a, b in zip(total, counts, strict=True)]
        yield f"{file:40}" + "".join(f"{count:10}" for count in counts)
    yield f"{'all':40}" + "".join(f"{count:10}" for count in total)
    for file, reached in sorted(lines.items()):
        text = (KERNELS / file).read_text().splitlines()
        yield from (f"{file}:{number}: {text[number - 1].strip()}" for number, by in sorted(reached.items()) if not by)


def main() -> int:
    """Run the command line; return the command's exit code, or 1 without counts."""
    parser = argparse.ArgumentParser(description="Which lines of op_kernel/ the tests reach.")
    parser.add_argument("build", type=Path, help="a build with ASCEND_MOE_COVERAGE")
    parser.add_argument("--run", metavar="NAME", help="run a command, and keep its counts by this name")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    build = options.build.resolve()
    if options.run:
        return run(build, options.run, options.command)
    runs = sorted(folder.name for folder in (build / "runs").glob("*"))
    lines: Lines = defaultdict(dict)
    for name in runs:
        for counters in sorted((build / "runs" / name).rglob("*.gcda")):
            notes = build / counters.relative_to(build / "runs" / name).with_suffix(".gcno")
            add(lines, name, gcov(counters, notes))
    if not lines:
        print(f"kernel-coverage: no counts in {build / 'runs'}: run `make kernel-coverage`", file=sys.stderr)
        return 1
    print(*table(lines, runs), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
