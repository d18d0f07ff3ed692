"""Every mutant of the table is found by who is said to find it, and the clean kernels pass the same.

`make mutants`, half an hour. Every run of the suite asks whether the patches still fit the kernels.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import detectors
import pytest
from builds import MutantBuilds, applied, compile_errors
from detectors import LIMIT, MOST_SCHEDULES, PARTS, SEARCHES, SEEDS, first_failure, first_failure_of_part
from table import DRAWN, FAULTS, LARGE, LONG_LISTS, MUTANTS, SERVERS, SHARED_ROWS, WINDOW, Mutant

from ascend_moe.native import library

HERE = Path(__file__).resolve().parent
ROOT = library.native_source_root()
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
UNSEEN = [mutant for mutant in MUTANTS if mutant.passes_fast_suite is True]
SEEN = [mutant for mutant in MUTANTS if mutant.passes_fast_suite is False]
APART = ("publish_epoch_too_early",)  # another one edits its lines, too
# Every file whose tests run our kernels on the library that ASCEND_MOE_LIBRARY names.
FAST_SUITE = [
    "kernels/test_twin_reference.py",
    "kernels/test_quantized_rows.py",
    "kernels/test_sequences.py",
    "kernels/test_failures.py",
    "kernels/test_failures_collective.py",
    "kernels/test_failures_corrupt.py",
    "kernels/test_borders.py",
    "kernels/test_contexts.py",
    "kernels/test_op_shapes.py",
    "torch/test_torch_ops.py",
    "layers/test_layer.py",
    "layers/test_dispatchers.py",
    "comm/test_local_cluster.py",
    "kernels/test_processes.py",
    "torch/test_torch_compile.py",
    "tools/test_cli.py",
    "tools/test_examples.py",
    "torch/test_bad_arguments.py",
    "kernels/direct",
    "kernels/test_algorithms.py",
]
FAST_SECONDS = 1800  # a mutant that hangs fails as well


def unseen_in_one_library() -> list[Mutant]:
    """All of UNSEEN: one patch of most of them, and those of APART alone."""
    edits = [edit for mutant in UNSEEN if mutant.name not in APART for edit in mutant.edits]
    return [Mutant("unseen", "all at once", tuple(edits), ()), *(BY_NAME[name] for name in APART)]


ROWS = [*MUTANTS, unseen_in_one_library()[0]]


# ---- the table


def test_the_page_counts_them() -> None:
    """docs/reliability.md has the number of each detector's mutants, and that of all."""
    page = (Path(__file__).resolve().parents[2] / "docs/reliability.md").read_text()
    table = page.split("| detector | tests | mutants |\n")[1].split("\n\n")[0]
    counts = {row.split(" | ")[0]: int(row.split(" | ")[2]) for row in re.findall(r"^\| (.+) \|$", table, re.MULTILINE)}
    assert counts == Counter(", ".join(mutant.detectors) for mutant in MUTANTS)
    assert f"`make mutants` runs {len(MUTANTS)} kernels with a bug each" in page


def test_every_patch_fits_and_changes_the_kernels() -> None:
    for mutant in ROWS:
        before = {edit.file: (ROOT / edit.file).read_text() for edit in mutant.edits}
        after = applied(mutant, before)
        assert before and all(after[file] != text for file, text in before.items()), mutant.name
    assert all(mutant.detectors for mutant in MUTANTS)


def test_every_mutant_compiles(tmp_path: Path) -> None:
    """Most of them in one text; if that does not compile, one by one."""
    if text := compile_errors(ROWS, tmp_path / "all"):
        alone = {mutant.name: compile_errors([mutant], tmp_path / str(at)) for at, mutant in enumerate(ROWS)}
        pytest.fail(next((f"{name}: {error}" for name, error in alone.items() if error), text))


def test_there_are_enough_and_they_are_no_strawmen() -> None:
    assert len(BY_NAME) == len(MUTANTS) >= 88, "names are unique"
    assert sum(mutant.passes_fast_suite is True for mutant in MUTANTS) >= 10
    models = re.findall(r'Mutant\("(\w+)"', (HERE.parents[1] / "model" / "cases.py").read_text())
    assert {mutant.name for mutant in MUTANTS if mutant.model} <= set(models)


# ---- their builds


@pytest.fixture(scope="module")
def builds() -> MutantBuilds:
    return MutantBuilds(ROWS)


FOUND = [(mutant.name, detector) for mutant in MUTANTS for detector in mutant.detectors]


@pytest.mark.mutants
@pytest.mark.parametrize(("name", "detector"), FOUND)
def test_a_mutant_is_found(builds: MutantBuilds, name: str, detector: str) -> None:
    print(f"{name}: {detectors.check(BY_NAME[name], detector, builds)}")


@pytest.mark.mutants
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("detector", SEARCHES)
def test_the_clean_kernels_pass_the_same_search(builds: MutantBuilds, detector: str, seed: int) -> None:
    schedules = MOST_SCHEDULES if detector == WINDOW else LIMIT
    result = detectors.search(builds.library("checked"), seed, detector, schedules)
    assert result.finding is None and result.schedules == schedules, result


@pytest.mark.mutants
def test_the_clean_kernels_pass_the_rest(builds: MutantBuilds) -> None:
    """The special cases, and the whole fast suite, which the part of it belongs to."""
    for detector in (DRAWN, LARGE, LONG_LISTS, SHARED_ROWS, FAULTS):
        result = detectors.special(builds.library("checked"), detector)
        assert result.finding is None, result
    for programs, finds in detectors.FORGERY.values():
        assert not detectors.forged(builds.library("checked"), programs, finds)
    library = builds.library("fast")
    assert all(first_failure_of_part(library, detector) is None for detector in PARTS)
    assert first_failure(library, FAST_SUITE, FAST_SECONDS) is None


@pytest.mark.mutants
@pytest.mark.parametrize("name", [mutant.name for mutant in MUTANTS if SERVERS in mutant.detectors])
def test_one_server_has_none_of_the_transports(builds: MutantBuilds, name: str) -> None:
    """Stores take none of the transport's ways: what breaks it changes nothing within a server."""
    result = detectors.search(builds.library("checked", BY_NAME[name]), SEEDS[0], WINDOW, 100)
    assert result.finding is None, result


@pytest.mark.mutants
@pytest.mark.parametrize("mutant", unseen_in_one_library(), ids=lambda mutant: mutant.name)
def test_the_fast_suite_does_not_see_what_the_table_says(builds: MutantBuilds, mutant: Mutant) -> None:
    """Program order is execution order there, and there is no data cache: a missing edge changes nothing."""
    assert first_failure(builds.library("fast", mutant), FAST_SUITE, FAST_SECONDS) is None


@pytest.mark.mutants
@pytest.mark.parametrize("mutant", SEEN, ids=lambda mutant: mutant.name)
def test_the_fast_suite_sees_what_the_table_says(builds: MutantBuilds, mutant: Mutant) -> None:
    assert first_failure(builds.library("fast", mutant), FAST_SUITE, FAST_SECONDS) is not None
