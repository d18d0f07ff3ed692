"""What finds which mutants: a line each, in seconds a row.

    python tests/mutants/run.py                                      # all rows of the table, by explore mode
    python tests/mutants/run.py --rows 'triple|row' --tests kernels/test_borders.py
    python tests/mutants/run.py --file planted.txt --tests kernels   # rows that are not in the table, in its language

Explore mode has ``-n`` schedules. Tests run to the first failure, and only where explore mode finds nothing, or --all.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from builds import Build, MutantBuilds
from finders import first_failure
from table import MUTANTS, Mutant, read

from ascend_moe import explore

FORK = multiprocessing.get_context("fork")

MARKS = ("-m", "not npu and not nightly and not mutants")  # the tests of every change
LIMIT_S = 240  # of explore mode
TESTS_LIMIT_S = 1800


def explored(builds: MutantBuilds, mutant: Mutant, schedules: int) -> str | None:
    """What explore mode finds first, or None. A process of its own looks, since a mutant may end it."""
    build = builds.library("checked", mutant)
    reader, writer = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_explore, args=(build, schedules, writer))
    child.start()
    writer.close()
    try:
        found: str | None = reader.recv() if reader.poll(LIMIT_S) else "explore takes too long"
    except EOFError:
        child.join()
        found = f"explore: signal {-(child.exitcode or 0)}"
    child.kill()
    child.join()
    return found


def _explore(build: Build, schedules: int, said: Connection) -> None:
    torch.set_num_threads(1)
    result = explore.campaign(schedules=schedules, library=build.checked())
    found = result.finding
    said.send(found and f"explore, case {result.cases}: {found.message[:160]} | {found.case}")


def tested(builds: MutantBuilds, mutant: Mutant, tests: Sequence[str]) -> str | None:
    """The first test that fails, or None."""
    checked = str(builds.library("checked", mutant).path)
    return first_failure(
        builds.library("fast", mutant), [*MARKS, *tests], TESTS_LIMIT_S, ASCEND_MOE_CHECKED_LIBRARY=checked
    )


def main() -> None:
    """Prints a line a mutant, then how many nothing found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", metavar="REGEX", help="only rows whose name has it")
    parser.add_argument("--file", type=Path, help="rows that are not in the table")
    parser.add_argument("-n", type=int, default=2000, help="schedules of explore mode; 0: none")
    parser.add_argument("--tests", nargs="*", default=[], help="of tests/, as pytest takes them")
    parser.add_argument("--all", action="store_true", help="tests also for what explore mode finds")
    given = parser.parse_args()
    rows = read(given.file.read_text()) if given.file else MUTANTS
    builds, survivors = MutantBuilds(rows), list[str]()
    chosen = [mutant for mutant in rows if re.search(given.rows, mutant.name)]
    for mutant in chosen:
        start = time.monotonic()
        found = [explored(builds, mutant, given.n)] if given.n else []
        if given.tests and (given.all or not any(found)):
            found.append(tested(builds, mutant, given.tests))
        text = " | ".join(one for one in found if one)
        survivors += [] if text else [mutant.name]
        print(f"{time.monotonic() - start:6.1f} s  {mutant.name}: {text or 'NOT FOUND'}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} found" + "".join(f"\n  {name}" for name in survivors))


if __name__ == "__main__":
    main()
