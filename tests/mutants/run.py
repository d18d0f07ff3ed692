"""Checks what finds which mutants: a line each, in about a second a mutant.

    python tests/mutants/run.py                                      # all of the table, by explore mode
    python tests/mutants/run.py --rows 'triple|row' --tests kernels/test_borders.py
    python tests/mutants/run.py --file planted.txt --tests kernels   # of a file in the language of the table

Explore mode has ``-n`` schedules. Tests run to the first failure, and only where explore mode finds nothing, or --all.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import re
import sys
import time
from collections.abc import Sequence
from ctypes import c_int
from multiprocessing.connection import Connection
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from builds import Build, MutantBuilds
from finders import first_failure
from table import MUTANTS, Mutant, read

from ascend_moe import explore
from ascend_moe.explore import draws, window_mib

FORK = multiprocessing.get_context("fork")
MARKS = ("-m", "not npu and not nightly and not mutants")  # the tests of every change
LIMIT_S = 300  # of one case of explore mode
TESTS_LIMIT_S = 1800


class Hunt:
    """The cases and schedules of `ascend-moe explore -n`, for many mutants of one library at a time.

    A case is made once for all of them. A process of its own looks, because a mutant may end it; the next process goes
    on behind that mutant.
    """

    def __init__(self, builds: Sequence[Build], schedules: int) -> None:
        self.builds, self.schedules = {build.number: build for build in builds}, schedules
        self.found: dict[int, str] = {}
        self._case, self._number = FORK.Value(c_int, 0), FORK.Value(c_int, -1)  # that are being looked at

    def run(self) -> dict[int, str]:
        """Returns what is found, by the mutant's number."""
        while self.builds:
            reader, writer = FORK.Pipe(duplex=False)
            child = FORK.Process(target=self._look, args=(writer,))
            child.start()
            writer.close()
            ended = self._listen(reader)
            child.kill()
            child.join()
            if ended is None:
                break
            number = self._number.value
            self._take(number, f"case {self._case.value + 1}: {ended or f'exit code {child.exitcode}'}")
        return self.found

    def _listen(self, reader: Connection) -> str | None:
        """None: the process has looked at all. Else what it died of, if that is known."""
        try:
            while reader.poll(LIMIT_S):
                said = reader.recv()
                if said is None:
                    return None
                number, text = said
                if text:
                    self._take(number, text)
        except EOFError:
            return ""
        return "no end"

    def _take(self, number: int, text: str) -> None:
        self.found[number] = text
        del self.builds[number]

    def _look(self, writer: Connection) -> None:
        torch.set_num_threads(1)
        left, first, behind, done = dict(self.builds), self._case.value, self._number.value, 0
        for place in itertools.count():
            case, count = draws.draw_for(place)
            count = min(count, self.schedules - done)
            if count <= 0 or not left:
                break
            if place >= first:
                self._case.value = place
                with explore.World(case.world, next(iter(left.values())).checked(), window_mib(case)) as world:
                    world.load(case)
                    for number in [number for number in left if place > first or number > behind]:
                        self._number.value = number
                        left[number].checked()
                        run = world.run(done, count)
                        if run.failed:
                            text = f"{run.kind.decode()}: {run.message.decode()[:160]} | {case}"
                            writer.send((number, f"case {place + 1}: {text}"))
                            del left[number]
                writer.send((-1, ""))  # it goes on
            done += count
        writer.send(None)


def tested(builds: MutantBuilds, mutant: Mutant, tests: Sequence[str]) -> str | None:
    """The first test that fails, or None."""
    checked = str(builds.library("checked", mutant).path)
    return first_failure(
        builds.library("fast", mutant), [*MARKS, *tests], TESTS_LIMIT_S, ASCEND_MOE_CHECKED_LIBRARY=checked
    )


def explored(builds: MutantBuilds, mutants: Sequence[Mutant], schedules: int) -> dict[str, str]:
    """Returns what explore mode finds first, by name of the mutant."""
    found = {}
    together = [mutant for mutant in mutants if mutant.name in builds.sources.number_of]
    groups = [together, *([mutant] for mutant in mutants if mutant not in together)]
    for group in filter(None, groups):
        libraries = {mutant.name: builds.library("checked", mutant) for mutant in group}
        texts = Hunt(list(libraries.values()), schedules).run()
        found |= {name: texts[build.number] for name, build in libraries.items() if build.number in texts}
    return found


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
    builds, start = MutantBuilds(mutants), time.monotonic()
    chosen = [mutant for mutant in mutants if re.search(given.rows, mutant.name)]
    found = explored(builds, chosen, given.n) if given.n else {}
    print(f"explore -n {given.n} finds {len(found)} of {len(chosen)} in {time.monotonic() - start:.0f} s", flush=True)
    survivors = []
    for mutant in chosen:
        texts = [found.get(mutant.name)]
        if given.tests and (given.all or not found.get(mutant.name)):
            texts.append(tested(builds, mutant, given.tests))
        text = " | ".join(part for part in texts if part)
        survivors += [] if text else [mutant.name]
        print(f"{mutant.name}: {text or 'NOT FOUND'}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} found" + "".join(f"\n  {name}" for name in survivors))


if __name__ == "__main__":
    main()
