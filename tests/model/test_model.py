"""The protocol model: its constants are the headers', its runs pass, its mutants fail, traces replay in it.

`make model` has all runs. Here is what takes seconds; without spin only what needs no more than a compiler.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODEL = Path(__file__).resolve().parents[2] / "model"
if not (MODEL / "window.pml").is_file():
    pytest.skip("no model/ beside the tests", allow_module_level=True)
if shutil.which("g++") is None:
    pytest.skip("the model's constants need g++", allow_module_level=True)
sys.path.insert(0, str(MODEL))

import constants  # noqa: E402
import replay as replayer  # noqa: E402
import run as runner  # noqa: E402
import synthetic  # noqa: E402
from cases import CASES, Case, Mutant  # noqa: E402
from constants import INCLUDES, Shape  # noqa: E402
from geometry import Header, Layout  # noqa: E402

needs_spin = pytest.mark.skipif(
    runner.missing() is not None, reason=f"{runner.missing()} is not installed (apt-get install spin gcc g++)"
)
TESTED = [(case, mutant) for case in CASES for mutant in (None, *case.mutants) if case.is_tested(mutant)]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def probe(build: Path) -> Path:
    return constants.compile_probe(build)


@pytest.fixture(scope="module")
def header(build: Path) -> Header:
    return Header(build)


# ---- constants


@pytest.mark.parametrize(("local_experts", "blocks"), [(1, 3), (2, 3), (4, 3), (5, 4), (9, 5)])
def test_blocks_of_a_run(probe: Path, local_experts: int, blocks: int) -> None:
    shape = Shape(local_experts=local_experts)
    assert f"#define B {blocks} " in constants.render(constants.probe(probe, shape), shape)


def test_epochs_across_the_wrap(probe: Path) -> None:
    epochs = constants.probe(probe, Shape(epochs=5))["epochs"]
    assert [entry["epoch"] for entry in epochs] == [0xFFFFFFFD, 0xFFFFFFFE, 0xFFFFFFFF, 2, 3, 4]
    assert [entry["parity"] for entry in epochs] == [1, 0, 1, 0, 1, 0]
    # Two ops ago, or a fresh slot (index 0), and nothing else.
    assert [entry["stale"] for entry in epochs] == [
        [int(j in (0, i - 2)) for j in range(7)] for i in range(1, 7)
    ]


def test_ring_has_no_seam(probe: Path) -> None:
    epochs = constants.probe(probe, Shape(epochs=0))["epochs"]
    n = len(epochs)
    assert n % 2 == 0 and [entry["parity"] for entry in epochs] == [i % 2 for i in range(1, n + 1)]
    for i, entry in enumerate(epochs, start=1):
        assert [j for j, stale in enumerate(entry["stale"]) if stale] == sorted({0, (i - 3) % n + 1})


CHANGES: list[tuple[str, str, str, Callable[[dict[str, Any]], Any]]] = [
    ("protocol/window", "kCountsPerBlock = 4;", "kCountsPerBlock = 2;", lambda facts: facts["count_blocks"]),
    ("protocol/window", "kHeaderBlocks = 2;", "kHeaderBlocks = 3;", lambda facts: facts["header_blocks"]),
    ("protocol/window", "? 2u : epoch + 1", "? 1u : epoch + 1", lambda facts: facts["epochs"][3]["epoch"]),
    (
        "protocol/window",
        "return epoch & 1;",
        "return epoch >> 1 & 1;",
        lambda facts: facts["epochs"][0]["parity"],
    ),
    ("protocol/tiling", "kVerdictRounds = 3;", "kVerdictRounds = 4;", lambda facts: facts["rounds"]),
    ("common/verdict", "return 32;", "return 33;", lambda facts: facts["severity"]["CONFIG"]),
]


@pytest.mark.parametrize(("name", "old", "new", "fact"), CHANGES, ids=[change[2] for change in CHANGES])
def test_a_changed_header_changes_the_model(
    probe: Path, tmp_path: Path, name: str, old: str, new: str, fact: Callable[[dict[str, Any]], Any]
) -> None:
    shutil.copytree(INCLUDES[0], tmp_path / "op_kernel")
    path = tmp_path / "op_kernel" / f"{name}.h"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    changed = constants.compile_probe(tmp_path, (tmp_path / "op_kernel", *INCLUDES[1:]))
    shape = Shape(local_experts=4)
    assert fact(constants.probe(changed, shape)) != fact(constants.probe(probe, shape))


def test_every_block_has_one_place(header: Header) -> None:
    layout = Layout(header, 3, 5, 1 << 20)
    for parity in (0, 1):
        for source in range(3):
            for block in range(layout.blocks):
                place = layout.place(layout.status(parity, source, block))
                assert (place.what, place.parity, place.source, place.block) == (
                    "status",
                    parity,
                    source,
                    block,
                )
    assert [layout.place(layout.abort(source)).source for source in range(3)] == [0, 1, 2]
    assert layout.place(header("control_offset")).what == "control"
    assert layout.place(layout.status(0, 0, layout.blocks)).what == "other"


# ---- runs


def test_every_run_has_a_mutant_and_every_mutant_a_name_in_the_model() -> None:
    text = "".join(path.read_text() for path in MODEL.glob("*.pml"))
    known = set(re.findall(r"\bM_(\w+)", text)) - {"mutant"}
    used = {mutant.name for case in CASES for mutant in case.mutants if not mutant.broken}
    assert all(case.mutants for case in CASES)
    assert used == known
    assert all(f"`{name}`" in (MODEL / "README.md").read_text() for name in used)


@needs_spin
@pytest.mark.parametrize(
    ("case", "mutant"), TESTED, ids=[f"{c.name}-{m.name if m else 'passes'}" for c, m in TESTED]
)
def test_run(case: Case, mutant: Mutant | None, build: Path, probe: Path) -> None:
    outcome = runner.check(case, mutant, build, probe)
    if mutant is None:
        assert outcome.symptom == "" and outcome.complete and outcome.states > 10_000
    else:
        assert outcome.symptom in mutant.finds


# ---- traces


def replayed(lines: list[dict[str, Any]], build: Path) -> replayer.Verdict:
    return replayer.replay(synthetic.write_lines(lines, build / "trace.jsonl"), build)


@needs_spin
def test_a_trace_replays(build: Path, header: Header) -> None:
    verdict = replayed(synthetic.trace(synthetic.Plan(seed=5), header), build)
    assert verdict.refused is None and verdict.events > 200


@needs_spin
def test_a_flag_before_its_row_is_rejected(build: Path, header: Header) -> None:
    plan = synthetic.Plan(cores=1, seed=6)
    layout = Layout(header, plan.world, plan.local_experts, plan.data_bytes)
    lines = synthetic.late_rows(synthetic.trace(plan, header), layout)
    verdict = replayed(lines, build)
    # The core cannot have passed the meeting before its flags while the row is under way.
    assert verdict.refused is not None and (verdict.refused.kind, verdict.refused.x) == ("SYNC", 1)


@needs_spin
def test_a_read_before_the_wait_is_rejected(build: Path, header: Header) -> None:
    verdict = replayed(synthetic.early_read(synthetic.trace(synthetic.Plan(seed=7), header)), build)
    assert verdict.refused is not None and verdict.refused.kind == "LOAD_ROW"


@needs_spin
def test_a_status_block_of_another_epoch_is_rejected(build: Path, header: Header) -> None:
    lines = synthetic.trace(synthetic.Plan(cores=1, seed=8), header)
    layout = Layout(header, 2, 2, 1 << 20)
    at = next(
        i
        for i, line in enumerate(lines)
        if line.get("event") == "land" and line["area"] == "state" and layout.place(line["offset"]).block == 1
    )
    lines[at] = {**lines[at], "words": f"{0x12345678:08x}" + lines[at]["words"][8:]}
    verdict = replayed(lines, build)
    assert (
        verdict.refused is not None and verdict.refused.line == at + 1 and "epoch" in verdict.refused.reason
    )
