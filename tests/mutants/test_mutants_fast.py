"""What the fast engine sees of the mutants: most pass every test that runs kernels on it.

An hour and more: `pytest -m mutants test_mutants_fast.py`. It keeps `passes_fast_suite` of the table true.
"""

from __future__ import annotations

import pytest
from mutant_builds import BuildError, MutantBuilds
from mutant_cases import MUTANTS, MutantCase
from pytest_runs import first_failure

pytestmark = pytest.mark.mutants

# Every file whose tests run our kernels on the library that ASCEND_MOE_LIBRARY names.
SUITE = [
    "kernels/test_seed_example.py",
    "kernels/test_twin_reference.py",
    "kernels/test_sequences.py",
    "twin/test_twin_errors.py",
    "kernels/test_failures.py",
    "kernels/test_failures_collective.py",
    "kernels/test_failures_corrupt.py",
    "kernels/test_failures_threads.py",
    "kernels/test_op_shapes.py",
    "torch/test_torch_ops.py",
    "layers/test_layer.py",
    "layers/test_dispatchers.py",
    "comm/test_local_cluster.py",
    "kernels/test_processes.py",
    "torch/test_torch_compile.py",
    "tools/test_cli.py",
    "tools/test_demo.py",
    "tools/test_examples.py",
    "torch/test_bad_arguments.py",
    "kernels/direct/test_direct.py",
    "kernels/direct/test_direct_inputs.py",
    "kernels/direct/test_zero_copy.py",
]
SECONDS = 1800  # a mutant that hangs fails as well


@pytest.fixture(scope="module")
def builds(request: pytest.FixtureRequest) -> MutantBuilds:
    if "mutants" not in request.config.getoption("-m"):
        pytest.skip("takes an hour: pytest -m mutants test_mutants_fast.py")
    try:
        made = MutantBuilds()
        made.clean("fast")
    except BuildError as error:
        if "are needed" in str(error):
            pytest.skip(str(error))
        raise
    return made


def test_the_clean_kernels_pass(builds: MutantBuilds) -> None:
    assert first_failure(builds.clean("fast"), SUITE, SECONDS) is None


@pytest.mark.parametrize("case", MUTANTS, ids=lambda case: case.name)
def test_the_fast_suite_sees_what_the_table_says(builds: MutantBuilds, case: MutantCase) -> None:
    failure = first_failure(builds.mutant(case.number, "fast"), SUITE, SECONDS)
    print(f"{case.number:2} {case.name:28} {failure or 'passes'}")
    assert (failure is None) == case.passes_fast_suite
