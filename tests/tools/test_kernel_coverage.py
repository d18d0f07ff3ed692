"""`make kernel-coverage`: what its report says of gcov's numbers, and how it keeps those of a process."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import kernel_coverage


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "op_kernel"
    folder.mkdir()
    monkeypatch.setattr(kernel_coverage, "KERNELS", folder)
    (folder / "a.h").write_text("// head\n  one();\n  two();\n  three();\n")
    return folder


def report(folder: Path, **counts: list[tuple[int, int]]) -> Any:
    files = [
        {
            "file": f"../op_kernel/{name}.h",
            "lines": [{"line_number": line, "count": count} for line, count in counts[name]],
        }
        for name in counts
    ]
    outside = {"file": "/usr/include/c++/vector", "lines": [{"line_number": 1, "count": 0}]}
    return {"current_working_directory": str(folder.parent / "build"), "files": [*files, outside]}


def test_a_line_is_reached_by_any_instance_in_any_run(kernels: Path) -> None:
    lines: kernel_coverage.Lines = defaultdict(dict)
    kernel_coverage.add(lines, "tests", report(kernels, a=[(2, 0), (3, 0), (2, 7), (3, 0), (4, 0)]))
    kernel_coverage.add(lines, "campaign", report(kernels, a=[(2, 0), (4, 1)]))
    head, row, total, *missing = kernel_coverage.table(lines, ["campaign", "tests"])
    assert head.split() == ["op_kernel/", "lines", "covered", "campaign", "tests"]
    assert row.split() == ["a.h", "3", "2", "1", "1"] and total.split() == ["all", "3", "2", "1", "1"]
    assert missing == ["a.h:3: two();"]


def test_a_process_that_leaves_by_exit_dumps_its_counts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # What stands in for the loader says that the fast engine is there and the checked one is not.
    program = """
import ctypes, os
class Library:
    def __init__(self, path, mode):
        assert mode == os.RTLD_NOLOAD
        if "checked" in path: raise OSError
        self.path = path
    def am_coverage_dump(self):
        print(os.path.basename(self.path), os.environ["GCOV_PREFIX"], os.environ["GCOV_PREFIX_STRIP"], flush=True)
ctypes.CDLL = Library
os._exit(3)
"""
    assert kernel_coverage.run(tmp_path, "mine", [sys.executable, "-c", program]) == 3
    name, prefix, strip = capfd.readouterr().out.split()
    assert (name, prefix) == ("libascend_moe.so", str(tmp_path / "runs/mine"))
    assert int(strip) == len([part for part in str(tmp_path).split(os.sep) if part])
