"""The protocol model: its constants are the headers', its runs pass, its mutants fail, traces replay in it.

`make model` has all runs. Here is what takes seconds; without spin only what needs no more than a compiler.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from ascend_moe.explore import Options, World, parse

MODEL = Path(__file__).resolve().parents[2] / "model"
if not (MODEL / "window.pml").is_file() or shutil.which("g++") is None:
    pytest.skip("needs model/ beside the tests, and g++", allow_module_level=True)
sys.path.insert(0, str(MODEL))

import constants  # noqa: E402
import replay as replayer  # noqa: E402
import run as runner  # noqa: E402
from cases import CASES  # noqa: E402
from constants import Shape  # noqa: E402
from header import INCLUDES, Header, Layout  # noqa: E402

Json = dict[str, Any]
needs_spin = pytest.mark.skipif(
    runner.missing() is not None, reason=f"{runner.missing()} is not installed (apt-get install spin gcc g++)"
)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def header(build: Path) -> Header:
    return Header(build)


# ---- constants


def test_a_changed_header_changes_the_model(header: Header, tmp_path: Path) -> None:
    shutil.copytree(INCLUDES[0], tmp_path / "op_kernel")
    for name, old, new in [
        ("protocol/window", "kCountsPerBlock = 4;", "kCountsPerBlock = 2;"),
        ("protocol/window", "kHeaderBlocks = 2;", "kHeaderBlocks = 3;"),
        ("protocol/window", "? 2u : epoch + 1", "? 1u : epoch + 1"),
        ("protocol/window", "return epoch & 1;", "return epoch >> 1 & 1;"),
        ("protocol/window", "kCoreBarrierRounds = 3;", "kCoreBarrierRounds = 4;"),
        ("common/core_barrier", "kBatchesDiffer : 32;", "kBatchesDiffer : 34;"),
    ]:
        path = tmp_path / "op_kernel" / f"{name}.h"
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
    changed = Header(tmp_path, (tmp_path / "op_kernel", *INCLUDES[1:]))
    shape = Shape(local_experts=4)
    lines = [constants.render(source, shape).splitlines() for source in (header, changed)]
    defined = [{line.split()[1]: line for line in text if line.startswith("#define")} for text in lines]
    different = {name for name in defined[0] if defined[0][name] != defined[1][name]}
    assert different >= {"B", "COUNTS_COMPLETE(at,", "N", "PARITY(i)", "ROUNDS", "SEVERITY(code)"}


# ---- runs


def test_every_run_has_a_mutant_and_every_mutant_a_name_in_the_model() -> None:
    text = "".join(path.read_text() for path in MODEL.glob("*.pml"))
    known = set(re.findall(r"\bM_(\w+)", text)) - {"mutant"}
    used = {mutant.name for case in CASES for mutant in case.mutants if not mutant.broken}
    assert all(case.mutants for case in CASES)
    assert used == known
    assert all(f"`{name}`" in (MODEL / "README.md").read_text() for name in used)


# ---- schedules that the checked twin recorded


def recorded(text: str, seed: int, path: Path) -> list[Json]:
    """The lines of a trace."""
    with World(parse(text).world) as world:
        world.load(parse(text))
        run = world.run(seed, 1, Options(policy="random", trace=True, vary_epoch=False))
        assert not run.failed, run.message
        world.write_trace(path)
    return [json.loads(line) for line in path.read_text().splitlines()]


def replayed(lines: list[Json], build: Path) -> replayer.ReplayResult:
    path = build / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return replayer.replay(path, build)


@needs_spin
@pytest.mark.nightly
@pytest.mark.parametrize(
    "text", ["w2,c1,l1,k1,b1,u1,DC", "w2,c2,l2,k2,b2,u1,DCDC", "w3,c2,l2,k2,b1,u1,DDCC", "w2,c2,l5,k2,b2,u1,v2,D"]
)
def test_a_trace_replays(text: str, build: Path) -> None:
    outcome = replayed(recorded(text, 1, build / "recorded.jsonl"), build)
    assert outcome.refused is None and outcome.events > 50


def row_behind_its_flag(lines: list[Json], layout: Layout) -> tuple[str, list[Json]]:
    """A row lands behind the last status block that its sender lands at its owner in this launch."""
    row = index_of(lines, lambda line: line["target"] != line["rank"], event="land", area="data")
    same = {key: lines[row][key] for key in ("rank", "launch", "target")}
    flags = [at for at, line in enumerate(lines) if line.items() >= {"event": "land", **same}.items()]
    last = max(at for at in flags if lines[at]["area"] == "state")
    assert last > row
    return "SYNC", [*lines[:row], *lines[row + 1 : last + 1], lines[row], *lines[last + 1 :]]


def row_read_before_the_wait(lines: list[Json], layout: Layout) -> tuple[str, list[Json]]:
    """A core reads a row before it has passed the barrier after the wait."""
    read = index_of(lines, lambda line: True, event="load", area="data")
    who = {key: lines[read][key] for key in ("rank", "core", "launch")}
    looks = [at for at in range(read) if lines[at].items() >= {**who, "event": "load", "area": "state"}.items()]
    barrier = max(at for at in looks if layout.place(lines[at]["offset"]).what == "core barrier")
    return "LOAD_ROW", [*lines[:barrier], lines[read], *lines[barrier:read], *lines[read + 1 :]]


def block_of_another_epoch(lines: list[Json], layout: Layout) -> tuple[str, list[Json]]:
    def header1(line: Json) -> bool:
        place = layout.place(line["offset"])
        return place.what == "status" and place.block == 1

    at = index_of(lines, header1, event="land", area="state")
    words = lines[at]["words"].split()
    changed = {**lines[at], "words": " ".join(["12345678", *words[1:]])}
    return "NONE", [*lines[:at], changed, *lines[at + 1 :]]


def index_of(lines: list[Json], wanted: Any, **fields: Any) -> int:
    return next(at for at, line in enumerate(lines) if line.items() >= fields.items() and wanted(line))


@needs_spin
@pytest.mark.parametrize(
    "spoil",
    [
        row_behind_its_flag,
        pytest.param(row_read_before_the_wait, marks=pytest.mark.nightly),
        pytest.param(block_of_another_epoch, marks=pytest.mark.nightly),
    ],
)
def test_a_corrupted_trace_is_rejected(spoil: Any, build: Path, header: Header) -> None:
    lines = recorded("w2,c2,l1,k2,b1,u1,ids:distinct,equal,DC", 0, build / "recorded.jsonl")
    kind, corrupted = spoil(lines, Layout(header, 2, 1, int(lines[0]["data_bytes"])))
    outcome = replayed(corrupted, build)
    assert outcome.refused is not None and outcome.refused.kind == kind, outcome
