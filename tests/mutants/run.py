"""Checks what finds which mutants: a line each, in some seconds a mutant.

    python tests/mutants/run.py                                      # all of the table, by explore mode
    python tests/mutants/run.py --rows 'triple|row' --tests kernels/test_borders.py
    python tests/mutants/run.py --file planted.txt --tests kernels   # of a file in the language of the table

Explore mode has ``-n`` schedules. Tests run to the first failure, and only where explore mode finds nothing, or --all.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from builds import Build, MutantBuilds
from detectors import first_failure
from table import MUTANTS, Mutant, read

from ascend_moe import explore

FORK = multiprocessing.get_context("fork")
MARKS = ("-m", "not npu and not nightly and not mutants")  # the tests of every change
LIMIT_S = 600  # of explore mode
TESTS_LIMIT_S = 1800


def hunted(build: Build, schedules: int) -> str:
    """What explore mode finds first, in a process of its own, which a mutant may end; empty: nothing."""
    reader, writer = FORK.Pipe(duplex=False)

    def look() -> None:
        torch.set_num_threads(1)
        finding = explore.campaign(schedules=schedules, library=build.checked()).finding
        writer.send(finding.line()[:200] if finding else "")

    child = FORK.Process(target=look)
    child.start()
    writer.close()
    try:
        text = str(reader.recv()) if reader.poll(LIMIT_S) else "no end"
    except EOFError:
        child.join()
        text = f"exit code {child.exitcode}"
    child.kill()
    child.join()
    return text


def tested(builds: MutantBuilds, mutant: Mutant, tests: Sequence[str]) -> str | None:
    """The first test that fails, or None."""
    checked = str(builds.library("checked", mutant).path)
    return first_failure(
        builds.library("fast", mutant), [*MARKS, *tests], TESTS_LIMIT_S, ASCEND_MOE_CHECKED_LIBRARY=checked
    )


def main() -> None:
    """Prints a line a mutant, then those that nothing found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", metavar="REGEX", help="only mutants whose name has it")
    parser.add_argument("--file", type=Path, help="of mutants that are not in the table")
    parser.add_argument("-n", type=int, default=2000, help="schedules of explore mode; 0: none")
    parser.add_argument("--tests", nargs="*", default=[], help="of tests/, as pytest takes them")
    parser.add_argument("--all", action="store_true", help="tests also for what explore mode finds")
    given = parser.parse_args()
    mutants = read(given.file.read_text()) if given.file else MUTANTS
    builds = MutantBuilds(mutants)
    chosen = [mutant for mutant in mutants if re.search(given.rows, mutant.name)]
    survivors = []
    for mutant in chosen:
        texts: list[str | None] = [hunted(builds.library("checked", mutant), given.n) if given.n else ""]
        if given.tests and (given.all or not texts[0]):
            texts.append(tested(builds, mutant, given.tests))
        text = " | ".join(part for part in texts if part)
        survivors += [] if text else [mutant.name]
        print(f"{mutant.name}: {text or 'NOT FOUND'}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} found" + "".join(f"\n  {name}" for name in survivors))


if __name__ == "__main__":
    main()
