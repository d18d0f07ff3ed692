"""The table of mutants agrees with the kernels' header, and a kernel without the macro has none of them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import mutant_cases
import pytest
from mutant_cases import CANARY, CLASSIC, MUTANTS, QUICK
from mutant_elision import elide

from ascend_moe.native import library

ROOT = library.native_source_root()
HEADER = ROOT / "op_kernel" / "common" / "mutant.h"
COMPILER = shutil.which("g++") or shutil.which("c++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def asked_for(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("mutants") and "mutants" not in request.config.getoption("-m"):
        pytest.skip("takes minutes: pytest -m mutants")


def test_the_table_is_the_headers() -> None:
    assert {case.name: case.number for case in [*MUTANTS, CANARY]} == mutant_cases.numbers_in(HEADER)
    assert sorted(case.number for case in [*MUTANTS, CANARY]) == list(range(1, len(MUTANTS) + 2))


def test_there_are_enough_and_they_are_no_strawmen() -> None:
    names = {case.name for case in MUTANTS}
    assert len(MUTANTS) >= 20 and len(set(CLASSIC)) == 14
    assert sum(case.passes_fast_suite for case in MUTANTS) * 14 >= 10 * len(MUTANTS) or (
        sum(case.passes_fast_suite for case in MUTANTS) >= 14
    )
    assert set(CLASSIC.values()) <= names and len(set(CLASSIC.values())) == 14
    assert set(QUICK) <= names and len(set(QUICK)) == 6
    assert not CANARY.passes_fast_suite


def test_every_mutant_is_in_a_kernel() -> None:
    text = "".join(path.read_text() for path in (ROOT / "op_kernel").glob("*.h") if path != HEADER)
    helpers = HEADER.read_text().split("MOE_FN bool IsMutant")[1]
    used = set(re.findall(r"Mutant::k(\w+)", text + helpers))
    enumerators = set(re.findall(r"^    k(\w+) = [1-9]", HEADER.read_text(), re.MULTILINE))
    assert used == enumerators


@needs_compiler
@pytest.mark.parametrize(
    "number, legal", [("0", True), ("1", True), ("99", False), ("-1", False), ("x", False)]
)
def test_an_unknown_number_does_not_compile(number: str, legal: bool) -> None:
    command = [str(COMPILER), "-std=c++17", "-fsyntax-only", f"-DASCEND_MOE_MUTANT={number}", "-x", "c++"]
    done = subprocess.run([*command, str(HEADER)], capture_output=True, text=True)
    assert (done.returncode == 0) == legal, done.stderr
    assert legal or "ASCEND_MOE_MUTANT" in done.stderr


def test_elision() -> None:
    source = """a;
if constexpr (!IsMutant(Mutant::kA)) b(c);
if constexpr (IsMutant(Mutant::kA) || IsMutant(Mutant::kB)) {
    d;
} else if constexpr (!IsMutant(Mutant::kB)) {
    if (e) f;
}
Meet<IsMutant(Mutant::kC)>(g);
"""
    assert elide(source) == "a;\nb(c);\n\n\n{\n    if (e) f;\n}\nMeet<false>(g);\n"


@needs_compiler
@pytest.mark.mutants
@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_without_the_macro_the_object_is_that_of_sources_without_mutants(op: str, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(ROOT / "op_kernel", plain)
    for path in plain.glob("*.h"):
        if path.name != HEADER.name:
            path.write_text(elide(path.read_text()))
            assert "constexpr (IsMutant" not in path.read_text()
    code = [_object(folder, op, tmp_path) for folder in (ROOT / "op_kernel", plain)]
    assert code[0] == code[1] and len(code[0]) > 10_000
    assert _object(ROOT / "op_kernel", op, tmp_path, "-DASCEND_MOE_MUTANT=1") != code[0]


def _object(folder: Path, op: str, tmp_path: Path, *more: str) -> bytes:
    """All code and data of a kernel's object. Line numbers are the same; file names are not compared."""
    made = tmp_path / "kernel.o"
    entry = f"ascend_moe_distribute_{op}.cpp"
    include = str(ROOT / "twin" / "include")
    flags = [
        "-std=c++17",
        "-O3",
        "-fPIC",
        "-w",
        "-fno-strict-aliasing",
        "-DDTYPE_X=bfloat16_t",
        "-I",
        include,
    ]
    command = [str(COMPILER), *flags, *more, "-I.", "-c", entry, "-o", str(made)]
    subprocess.run(command, cwd=folder, check=True)
    return made.read_bytes()
