"""Who finds a mutant: `check(mutant, detector, builds)` builds its library and runs that detector on it."""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import table
from builds import Build, MutantBuilds
from explored_programs import LARGE_SHARES, SMALL, WRONG_INPUTS, faulty, long_faulty
from explored_programs import LONG as LONG_SHARES
from table import Mutant

from ascend_moe import explore

SEEDS = (11, 22_000, 33_000, 44_000, 55_000)
LIMIT = 250  # schedules, on the median over the seeds
MOST_SCHEDULES = 2000  # schedules after which a seed has not found it
DTYPE = "bf16"  # of the cases that are searched
SEARCHES = (table.WINDOW, table.SERVERS, table.FLAGS, table.DIRECT, table.REGISTERED, table.ROLES, table.TWO_LAUNCHES)

# Ranks of which not all messages are in UB together.
IN_PARTS_CASE = "w65,c2,l15,k1,b1,u1,v2,none,D,direct"

# Cases of direct dispatch in which a bug shows that drawn cases do not reach.
LONG = explore.parse("w1,c3,l2,k2,b64,u1,v1,m2,bf16,none,mask:none,ids:hot,D,direct")
SHARED = [
    explore.parse(f"{sizes},l8,u1,bf16,ids:any,equal,DC,direct")
    for sizes in (
        "w2,c8,k3,b4,v2,m2,int8,mask:none,s0",
        "w2,c9,k4,b5,v2,m1,int8,mask:pair,s2",
        "w1,c8,k3,b9,v2,m2,none,mask:none,s3",
    )
]

# Cases of direct in which a core reads by counts that core 0 has not checked yet.
FORGED_CASES = [
    explore.parse(f"w2,u1,equal,ids:distinct,direct,{text}")
    for text in (
        "c3,l3,k3,b4,v2,weights,D",
        "c8,l4,k4,b6,v2,m2,D",
        "c8,l8,k2,b24,v2,m2,D",
        "c3,l3,k3,b4,v1,DC",
        "c3,l3,k3,b4,v1,DC,registered",
    )
]
SUMS_CASES = [explore.parse("w2,c3,l3,k3,b4,u1,v2,equal,ids:distinct,DC,window"), FORGED_CASES[3]]
OUTSIDE = {"out of bounds", "wrong part of a window"}

FORGERY = {table.FORGED: (FORGED_CASES, OUTSIDE), table.SUMS: (SUMS_CASES, {"wrong result"})}

TESTS = Path(__file__).resolve().parents[1]
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:xdist", "-p", "no:randomly")
HANGS = ("--timeout=120", "--timeout-method=thread")  # a test that takes so long ends the run with code 1
#: Tests on the fast engine, by detector.
PARTS = {
    table.SUITE: [
        "kernels/test_twin_reference.py::test_equal_to_reference",
        "kernels/test_twin_reference.py::test_special_values",
        "kernels/test_twin_reference.py::test_masked_ids_are_not_looked_at",
        "kernels/test_failures_collective.py::test_every_rank_reports_the_global_bs_of_the_largest_batch",
        "torch/test_bad_arguments.py",
        "kernels/test_special_experts.py",
        "kernels/test_quantized_rows.py",
        "kernels/test_row_alignment.py",
        "kernels/test_failures_corrupt.py::test_another_alignment_of_rows_is_a_mismatch",
        "kernels/test_sequences.py",
    ],
    table.ZERO_COPY: ["kernels/direct/test_combine.py"],
    table.BORDERS: [
        "kernels/test_borders.py",
        "kernels/test_returned_rows.py",
        "kernels/test_failures_corrupt.py::test_counts_of_a_whole_message_up_to_the_capacity",
        "kernels/test_failures_corrupt.py::test_wrong_counts_of_direct_combine_are_named",
        "kernels/test_failures_corrupt.py::test_a_list_of_anything_names_no_place_outside",
        "kernels/test_contexts.py::test_a_record_keeps_the_first_failure_until_a_fatal_one",
    ],
    table.MANY_RANKS: ["kernels/test_many_ranks.py"],
    table.TIMES: ["kernels/test_wait_times.py"],
    table.LEVELS: [f"kernels/hierarchy/test_{name}.py" for name in ("results", "relay_failures", "bytes")],
    table.LEVELS_EXPLORED: [
        "kernels/hierarchy/test_schedules.py",
        "kernels/test_explore_faults.py::test_rank_that_hangs_at_any_step_between_servers",
    ],
    table.FAILURES: [
        "kernels/test_failures.py::test_rank_that_never_calls",
        "kernels/test_failures_reported.py",
        "kernels/test_failures_corrupt.py",
        "kernels/test_failures_collective.py",
    ],
}


def first_failure(build: Build, suite: Sequence[str], seconds: float, **environment: str) -> str | None:
    """Returns what of the suite fails first with a library, or 'hangs' or 'signal N'; None when all pass.

    Raises:
        AssertionError: pytest ended neither with passed nor with failed tests.
    """
    settings = {**os.environ, **build.environment(), **environment}
    command = [*PYTEST, *HANGS, *suite]
    try:
        done = subprocess.run(command, cwd=TESTS, env=settings, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "hangs"
    if done.returncode < 0:
        return f"signal {-done.returncode}"
    assert done.returncode in (0, 1), (done.stdout + done.stderr)[-3000:]
    if done.returncode == 0:
        return None
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR ")) and "::" in line]
    return (failed or ["hangs"])[0].removeprefix("FAILED ")[:160]


def first_failure_of_part(build: Build, detector: str, **environment: str) -> str | None:
    """What ``first_failure`` returns of a detector's tests."""
    if detector == table.SUITE:
        environment |= {"ASCEND_MOE_TIMEOUT_S": "3", "ASCEND_MOE_COMM_ALG": "window"}
    return first_failure(build, PARTS[detector], 300, **environment)


def cases(seed: int, detector: str) -> Iterator[explore.Program]:
    """Small cases of every mode, a new one a schedule: those in which mutants of this detector show."""
    while True:
        direct = detector in (table.DIRECT, table.REGISTERED, table.ROLES)
        drawn = replace(explore.draw(seed), dtype=DTYPE, algorithm="direct" if direct else "window")
        if detector == table.ROLES:
            drawn = replace(drawn, cores=drawn.cores + 1, list_cores=1 + seed % drawn.cores)
        if detector == table.TWO_LAUNCHES:
            drawn = replace(drawn, contract=2, sequence="dcdc")
        rows = "registered" if detector == table.REGISTERED else "own"
        returned = drawn.comm_quant_mode if rows == "own" else 0
        if detector == table.FLAGS:  # rows of several blocks
            drawn = replace(drawn, flags=True, world=max(2, drawn.world), units=drawn.units + 30)
        servers = 1 + seed % 2 if detector in (table.SERVERS, table.FLAGS) else 0
        yield replace(drawn, servers=servers, rows=rows, comm_quant_mode=returned)
        seed += 1


def search(build: Build, seed: int, detector: str, schedules: int = MOST_SCHEDULES) -> explore.Result:
    """Schedules from this seed on, of mixed policies, to the first finding."""
    return _campaign(build, cases(seed, detector), schedules, seed, a_case=1)


def special(build: Build, detector: str) -> explore.Result:
    """The same for the detectors that have cases of their own."""
    if detector == table.DRAWN:  # of every kind, as `ascend-moe explore` does
        return explore.campaign(schedules=MOST_SCHEDULES, library=build.checked())
    if detector == table.LARGE:
        return _campaign(build, map(explore.parse, LARGE_SHARES), 2 * len(LARGE_SHARES), 1, a_case=2)
    if detector == table.ONE_CARD:
        return _campaign(build, [case for _ in range(LIMIT) for case in SMALL], LIMIT, 1, a_case=1)
    if detector == table.IN_PARTS:
        return _campaign(build, [explore.parse(IN_PARTS_CASE)], 1, 1, a_case=1)
    if detector == table.LONG_LISTS:
        return _campaign(build, [replace(LONG, seed=seed) for seed in range(40)], 40, 1, a_case=1)
    if detector == table.FAULTS:  # what `make test` plays of ranks that die, call no more, or have wrong inputs
        programs = [each for fault in ("kill", "ended", "absent", "corrupted") for each in faulty(range(60), [fault])]
        programs += faulty(range(140), WRONG_INPUTS)
        programs += long_faulty(range(4 * len(LONG_SHARES)))
        return _campaign(build, programs, len(programs), 0, a_case=1)
    assert detector == table.SHARED_ROWS, detector
    return _campaign(build, SHARED, 60, 1, a_case=10)


def _campaign(
    build: Build, programs: Iterable[explore.Program], schedules: int, seed: int, a_case: int
) -> explore.Result:
    return explore.campaign(programs, schedules, seed, library=build.checked(), a_case=a_case)


def forged(build: Build, programs: Sequence[explore.Program], finds: set[str]) -> set[str]:
    """Which of these classes show where a word of the counts in a message is another one."""
    kinds, plain = set(), explore.Options(policy="random", hang_is_finding=False)
    for case in programs:
        with explore.World(case.world, library=build.checked()) as world:
            world.load(case, accepted=0xFFFFFFFF, compare=False)
            blocks = range(1, world.run(0, 1, plain).status_blocks + 1)
            for block, word, bits in itertools.product(blocks, (2, 3, 4, 5), (1, 1 << 10, 1 << 31)):
                faults = explore.Faults(corrupt_block=block, corrupt_word=word, corrupt_xor=bits)
                run = world.run(0, 1, replace(plain, faults=faults))
                kinds |= {run.kind.decode()} if run.failed else set()
    return kinds & finds


def check(mutant: Mutant, detector: str, builds: MutantBuilds) -> str:
    """How the detector finds the mutant; AssertionError when it does not."""
    build = builds.library("fast" if detector in PARTS else "checked", mutant)
    if detector in PARTS:
        checked = {}
        if detector == table.LEVELS_EXPLORED:
            checked = {"ASCEND_MOE_CHECKED_LIBRARY": str(builds.library("checked", mutant).path)}
        failure = first_failure_of_part(build, detector, **checked)
        assert failure is not None, f"no test of the {detector} sees {mutant.name}"
        return failure
    if detector in FORGERY:
        kinds = forged(build, *FORGERY[detector])
        assert kinds, f"forged counts do not show {mutant.name}"
        return ", ".join(sorted(kinds))
    if detector in SEARCHES:
        results = [search(build, seed, detector) for seed in SEEDS]
    else:
        results = [special(build, detector)]
    needed = [result.schedules for result in results]
    kinds = {result.finding.kind for result in results if result.finding is not None}
    assert all(result.finding for result in results) and (detector == table.DRAWN or kinds <= {*mutant.finds}), results
    assert detector in (table.DRAWN, table.FAULTS) or statistics.median(needed) <= LIMIT, results
    return f"median {statistics.median(needed):g}, worst {max(needed)} schedules: {', '.join(sorted(kinds))}"
