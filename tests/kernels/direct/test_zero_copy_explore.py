"""Rows in lent memory on the checked engine: no schedule reads them late; lent too early they are found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ascend_moe import explore
from ascend_moe.explore import Options, Program, World
from ascend_moe.explore.program import SEQUENCES

DIRECT = Program(world=2, cores=2, local=2, topk=2, batch=3, algorithm="direct", rows="lent", ids="distinct")
PHASE_LENT, OP_COMBINE = 3, 2


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize("rows", ["lent", "partly"])
def test_sequences(sequence: str, contract: int, rows: str) -> None:
    case = replace(DIRECT, sequence=sequence, contract=contract, rows=rows, seed=5)
    result = explore.explore(case, 25)
    assert result.finding is None, result.finding.line()


def test_random_cases_and_schedules_have_no_finding() -> None:
    cases = (
        replace(
            case, rows="lent" if case.seed % 2 else "partly", algorithm="direct" if case.seed % 3 else "mixed"
        )
        for case in map(explore.draw, range(7000, 7100))
    )
    result = explore.campaign(cases, 600, 7000, a_case=6)
    assert result.finding is None, result.finding.line()
    assert result.schedules == 600 and 2 * result.distinct >= result.schedules


@pytest.mark.parametrize("sequence", ["DDCC", "DCDC", "DDDCCC"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_memory_that_is_lent_one_op_too_early_is_found(sequence: str, seed: int) -> None:
    """The positive control: C1 has returned here, C2's rows are put where other ranks still read C1's."""
    case = replace(DIRECT, sequence=sequence, rows="early", seed=seed, batches="equal")
    result = explore.explore(case, 200)
    if "CC" in sequence:
        assert result.finding is not None, "no schedule has found it"
        assert result.finding.kind == "race between ranks", result.finding.line()
        assert "write of the host" in result.finding.line()
    else:  # an op lies between: the same memory again is lawful
        assert result.finding is None, result.finding.line()


def test_a_run_says_where_its_rows_lie(tmp_path: Path) -> None:
    """Phase, place and generation of the block in header 1, and loads of the peer's lent area."""
    with World(2) as world:
        world.load(replace(DIRECT, sequence="DCDDCC", batches="equal"))
        run = world.run(0, 1, Options(trace=True, vary_epoch=False))
        assert not run.failed, run.message
        world.write_trace(tmp_path / "trace.jsonl")
    events = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()[1:]]
    places: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
    for event in events:
        if event["event"] != "land" or event.get("area") != "state":
            continue
        words = [int(word, 16) for word in event["words"].split()]
        op, phase, tail = words[1] >> 24, words[1] >> 16 & 0xFF, words[1] & 0xFFFF
        if op == OP_COMBINE and phase == PHASE_LENT and tail == 0xFFFE:
            places[event["rank"]].append((words[6], words[7]))
    for rank in (0, 1):
        seen = sorted(set(places[rank]), key=lambda place: place[1])
        assert [generation for _, generation in seen] == [1, 2, 3]
        # C1's block is free when D2 has come back: C2 has it again; C3's rows may not lie there.
        assert seen[0][0] == seen[1][0] == 0 and seen[2][0] > 0
    loads = [event for event in events if event["event"] == "load" and event.get("area") == "lent"]
    assert {(event["rank"], event["target"]) for event in loads} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_rows_are_part_of_a_cases_text() -> None:
    assert explore.parse(str(DIRECT)) == DIRECT and str(DIRECT).endswith("direct,lent")
    assert explore.parse("partly").rows == "partly" and explore.parse("").rows == "own"
