"""Numbers of kernels that become fields of 8 or 16 bits: in one place, with a bound. Read and compiled.

A repeat of 256 becomes 0, and a comparison that repeats 0 times finds all words equal.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from twin_oracle import compiler

from ascend_moe.native import library

ROOT = library.native_source_root()
HOME = "common/base.h"  # of Narrow, Repeats, Ring, Padding, Pieces
NARROW = r"uint(?:8|16)_t"  # of fields; signed ones are elements of tensors
CAST = re.compile(rf"static_cast<{NARROW}>|\({NARROW}\)|\b{NARROW}[({{]")
# What g++ calls them.
IMPLICIT = re.compile(
    r"(op_kernel/\S+?):\d+.*conversion from .* to ‘(?:AscendC::)?(?:u?int(?:8|16)_t|(?:unsigned |signed )?char|"
    r"short(?: unsigned)?(?: int)?)’"
)
ENTRIES = [f"ascend_moe_{name}.cpp" for name in ("distribute_dispatch", "distribute_combine", "probe", "one_card")]


def casts(folder: Path) -> list[str]:
    """Places that narrow without a bound: file and line."""
    found = []
    for path in sorted(folder.rglob("*.h")) + sorted(folder.rglob("*.cpp")):
        name = path.relative_to(folder).as_posix()
        lines = enumerate(path.read_text().splitlines(), 1)
        found += [f"{name}:{at}" for at, line in lines if name != HOME and CAST.search(line.partition("//")[0])]
    return found


def implicit(folder: Path) -> set[str]:
    """Files in which a number becomes a narrower field without a cast, as the compiler sees it."""
    text = "".join(f'#define DTYPE_X bfloat16_t\n#include "{entry}"\n#undef DTYPE_X\n' for entry in ENTRIES)
    command = [compiler(), "-std=c++17", "-fsyntax-only", "-Wconversion", "-Wno-sign-conversion", "-x", "c++", "-"]
    includes = [f"-I{ROOT / 'twin' / 'include'}", f"-I{folder}"]
    done = subprocess.run([*command, *includes], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {Path(match[1]).name for match in IMPLICIT.finditer(done.stderr)}


def test_no_number_is_narrowed_without_a_bound() -> None:
    assert casts(ROOT / "op_kernel") == []
    assert implicit(ROOT / "op_kernel") == set()


@pytest.mark.parametrize(
    ("file", "old", "new", "cast"),
    [
        ("direct/publish.h", "Ring(ub.ring)", "static_cast<uint8_t>(ub.ring)", True),
        ("common/segments.h", "const uint8_t stride = Repeats(", "const uint8_t stride = uint8_t(", True),
        ("direct/publish.h", "Ring(ub.ring)", "ub.ring", False),
        ("common/segments.h", "Repeats(Min(kMostRepeats, count - first))", "count - first", False),
    ],
)
def test_a_new_one_is_found(file: str, old: str, new: str, cast: bool, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "op_kernel", tmp_path / "op_kernel")
    path = tmp_path / "op_kernel" / file
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    if cast:
        assert [place.partition(":")[0] for place in casts(tmp_path / "op_kernel")] == [file]
    else:
        assert implicit(tmp_path / "op_kernel") == {path.name}
