"""Schedules that the checked twin recorded are schedules of the protocol's model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ascend_moe.explore import Options, Program, World, parse

MODEL = Path(__file__).resolve().parents[2] / "model"
pytestmark = [
    pytest.mark.skipif(not MODEL.is_dir(), reason="not in a source tree"),
    pytest.mark.skipif(shutil.which("spin") is None, reason="spin is not installed"),
]
CASES = [
    "w2,c1,l1,k1,b1,u1,DC",
    "w2,c2,l2,k2,b2,u1,DCDC",
    "w3,c2,l2,k2,b1,u1,DDCC",
    "w2,c2,l5,k2,b2,u1,v2,DC",
]


def record(case: Program, seed: int, path: Path) -> None:
    with World(case.world) as world:
        world.load(case)
        run = world.run(seed, 1, Options(policy="random", trace=True, vary_epoch=False))
        assert not run.failed, run.message
        world.write_trace(path)


def replay(*traces: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(MODEL / "replay.py"), *map(str, traces)]
    return subprocess.run(command, capture_output=True, text=True, timeout=250)


def test_recorded_schedules_are_accepted(tmp_path: Path) -> None:
    traces = []
    for number, text in enumerate(CASES):
        traces.append(tmp_path / f"{number}.jsonl")
        record(parse(text), number, traces[-1])
    done = replay(*traces)
    assert done.returncode == 0 and done.stdout.count("ACCEPTED") == len(traces), done.stdout + done.stderr


def test_a_flag_that_lands_before_its_row_is_rejected(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    record(parse("w2,c1,l1,k1,b1,u1,equal,DC"), 0, good)
    head, *events = good.read_text().splitlines()
    seen = [json.loads(line) for line in events]
    row = next(
        at
        for at, e in enumerate(seen)
        if e["event"] == "land" and e["area"] == "data" and e["target"] != e["rank"]
    )
    mine = seen[row]
    # The row's landing moves behind the last status block that its sender lands in this launch.
    later = max(
        at
        for at, e in enumerate(seen)
        if e["event"] == "land"
        and e["area"] == "state"
        and (e["rank"], e["launch"], e["target"]) == (mine["rank"], mine["launch"], mine["target"])
    )
    assert later > row
    events.insert(later, events.pop(row))
    bad.write_text("\n".join([head, *events]) + "\n")
    done = replay(good, bad)
    assert done.returncode == 1 and done.stdout.count("ACCEPTED") == 1, done.stdout + done.stderr
