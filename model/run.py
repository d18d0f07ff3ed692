#!/usr/bin/env python3
"""Checks the window protocol with spin: a table of runs that must pass and of mutants that must fail.

    python model/run.py            W = 2
    python model/run.py --full     W = 3 too, and more runs with two cores a rank
    python model/run.py --case "w2 l1"

Exits with 1 on any surprise: a run that fails, a mutant that passes, or one that fails for another reason.
Needs spin and a C compiler; a run takes at most 4 GB.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from cases import CASES, HANG, Case, Mutant
from constants import write
from header import ROOT, Header, ModelError, run

HERE = Path(__file__).resolve().parent
MEMORY_MB = 4000
COMPILE = ["-w", "-DSAFETY", "-DCOLLAPSE", "-DNOFAIR", "-DPRINTF", "-DVECTORSZ=4096", f"-DMEMLIM={MEMORY_MB}"]


@dataclass(frozen=True)
class SearchResult:
    """Result of a run of spin. ``symptom``: the error, or ""."""

    symptom: str
    states: int
    seconds: float
    complete: bool  # the search has seen all states


def missing() -> str | None:
    """The tool that is not there, if any."""
    return next((tool for tool in ("spin", "gcc", "g++") if shutil.which(tool) is None), None)


def check(case: Case, mutant: Mutant | None, build: Path, header: Header) -> SearchResult:
    """Run one case, or one mutant of it, in a folder of its own."""
    label = case.name if mutant is None else f"{case.name} {mutant.name}"
    folder = build / re.sub(r"\W+", "_", label)
    shutil.rmtree(folder, ignore_errors=True)
    shape, macros = case.shape, [f"-D{macro}" for macro in case.macros]
    if mutant is not None:
        shape = replace(shape, broken=mutant.broken)
        macros += [] if mutant.broken else [f"-DM_{mutant.name}"]
    write(header, shape, folder)
    for name in (case.model, "memory.pml"):
        shutil.copy(HERE / name, folder)
    run(["spin", *macros, "-a", case.model], cwd=folder)
    # A mutant ends at its first error, its compiler takes longer than it does.
    run(["gcc", "-O2" if mutant is None else "-O0", *COMPILE, "pan.c", "-o", "pan"], cwd=folder)
    start = os.times()
    done = subprocess.run(["./pan", f"-m{case.depth}", "-w22"], cwd=folder, capture_output=True, text=True, check=False)
    end = os.times()
    # Processor time: the same whatever else the machine does.
    seconds = end.children_user + end.children_system - start.children_user - start.children_system
    (folder / "pan.out").write_text(done.stdout + done.stderr)
    return read(done.stdout, seconds)


def read(text: str, seconds: float) -> SearchResult:
    """Parse the output of a verifier."""
    stored = re.search(r"([\d.e+]+) states, stored", text)
    errors = re.search(r"errors: (\d+)", text)
    if stored is None or errors is None:
        raise ModelError(f"the verifier gave up:\n{text[-2000:]}")
    symptom = ""
    if errors.group(1) != "0":
        violated = re.findall(r"violated: (.*)", text)
        hangs = "invalid end state" in text.split("(Spin")[0]
        symptom = HANG if hangs else violated[-1] if violated else text[:300]
    complete = "Search not completed" not in text and "max search depth too small" not in text
    return SearchResult(symptom, int(float(stored.group(1))), seconds, complete)


def assess(outcome: SearchResult, mutant: Mutant | None) -> tuple[str, bool]:
    """Return the text for the table, and whether the result is as expected."""
    if mutant is not None:
        return outcome.symptom or "passes", outcome.symptom in mutant.finds
    if outcome.complete or outcome.symptom:
        return outcome.symptom or "no errors", not outcome.symptom
    return "search cut short", False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="W = 3 too, and more runs with two cores")
    names = [case.name for case in CASES]
    parser.add_argument("--case", metavar="NAME", choices=names, help="only this run and its mutants")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "model", help="for what is generated")
    args = parser.parse_args()
    tool = missing()
    if tool is not None:
        print(f"model: {tool} is not there (Debian, Ubuntu: apt-get install spin gcc g++)", file=sys.stderr)
        return 2
    surprises, started = 0, time.monotonic()
    try:
        header = Header(args.build)
        print(f"{'run':<58} {'states':>11} {'seconds':>8}  result")
        for case in CASES:
            if case.name != args.case and (args.case or (case.full and not args.full)):
                continue
            for mutant in (None, *case.mutants):
                outcome = check(case, mutant, args.build, header)
                text, expected = assess(outcome, mutant)
                label = case.name if mutant is None else f"    {mutant.name}"
                if not expected:
                    surprises += 1
                    text += "   SURPRISE, expected: "
                    text += "no errors" if mutant is None else " or ".join(mutant.finds)
                print(f"{label:<58} {outcome.states:>11,} {outcome.seconds:>8.1f}  {text}", flush=True)
    except ModelError as error:
        print(f"model: {error}", file=sys.stderr)
        return 2
    print(f"{surprises} surprises in {time.monotonic() - started:.0f} s")
    return 1 if surprises else 0


if __name__ == "__main__":
    os.nice(5)
    sys.exit(main())
