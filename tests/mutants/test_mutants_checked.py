"""Deliberate bugs of protocol and synchronisation in the kernels: explore mode soon finds each, by class.

The clean kernels pass the same cases, settings and seeds, and a kernel that is always wrong is reported. Six
mutants in every run of the suite, all of them with `pytest -m mutants`.
"""

from __future__ import annotations

import statistics

import mutant_cases
import pytest
from mutant_builds import BuildError, MutantBuilds
from mutant_cases import CANARY, MUTANTS, QUICK, MutantCase
from mutant_search import DTYPE, LIMIT, PATIENCE, SEEDS, Found, search

ELSEWHERE = ("direct", "failing", "lent", "roles", "once")  # test_direct_explore, test_roles, test_once
ALL = [case for case in MUTANTS if case.name not in QUICK and case.where not in ELSEWHERE]


@pytest.fixture(autouse=True)
def asked_for(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("mutants") and "mutants" not in request.config.getoption("-m"):
        pytest.skip("takes minutes: pytest -m mutants")


@pytest.fixture(scope="module")
def builds() -> MutantBuilds:
    try:
        made = MutantBuilds()
        made.clean("checked")
    except BuildError as error:
        if "are needed" in str(error):
            pytest.skip(str(error))
        raise
    return made


def find(builds: MutantBuilds, case: MutantCase) -> list[Found]:
    """One search a seed, each of which must end with a finding of a right class."""
    library = builds.mutant(case.number, "checked", (DTYPE,))
    found = [search(library, seed, where=case.where) for seed in SEEDS]
    needed = [one.schedules for one in found]
    kinds = sorted({str(one.kind) for one in found})
    median, worst = statistics.median(needed), max(needed)
    print(f"{case.number:2} {case.name:28} median {median:g}, worst {worst} schedules: {', '.join(kinds)}")
    for one in found:
        assert one.kind in case.finds, one.line or f"{case.name} is not found in {one.schedules} schedules"
    return found


@pytest.mark.parametrize("name", QUICK)
def test_a_mutant_of_each_kind_is_found(builds: MutantBuilds, name: str) -> None:
    found = find(builds, mutant_cases.by_name(name))
    assert statistics.median(one.schedules for one in found) <= LIMIT


def test_the_canary_is_reported(builds: MutantBuilds) -> None:
    """Wrong data and nothing else: the comparison with the reference works."""
    find(builds, CANARY)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_clean_kernels_pass_the_same_runs(builds: MutantBuilds, seed: int) -> None:
    found = search(builds.clean("checked"), seed, LIMIT)
    assert found.kind is None, found.line
    assert found.schedules == LIMIT


@pytest.mark.mutants
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_every_mutant_is_found(builds: MutantBuilds, case: MutantCase) -> None:
    found = find(builds, case)
    assert statistics.median(one.schedules for one in found) <= LIMIT


@pytest.mark.mutants
@pytest.mark.parametrize("seed", SEEDS)
def test_the_clean_kernels_pass_for_as_long_as_is_searched(builds: MutantBuilds, seed: int) -> None:
    found = search(builds.clean("checked"), seed, PATIENCE)
    assert found.kind is None, found.line
