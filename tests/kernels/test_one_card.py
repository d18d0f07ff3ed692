"""Several ranks in one launch: results on the fast engine, schedules of the checked one, and the command."""

from __future__ import annotations

import json

import pytest
import torch
from commands import said
from explored_programs import OPS, SMALL, assert_nothing_found, program, programs

from ascend_moe import explore
from ascend_moe.errors import ArgumentError, ConfigMismatch
from ascend_moe.explore import parse
from ascend_moe.reference.cases import Case
from ascend_moe.validate import one_card
from ascend_moe.validate.one_card import OneCard

CPU = torch.device("cpu")


@pytest.mark.parametrize(("contract", "algorithm"), OPS)
def test_ranks_of_one_launch_equal_the_reference(contract: int, algorithm: str) -> None:
    """Two ops on the same windows, with other ids and int8 rows."""
    share = 2 if algorithm == "hierarchy" else 0
    card = OneCard(4, 3, algorithm, CPU, share)
    sizes = {"local": 2, "topk": 2, "batch": 5, "units": 4, "contract": contract, "share": share}
    sizes |= {"weights": True} if share else {}
    for case in (Case("bf16", 4, **sizes), Case("int8", 4, ids="mixed", quant_mode=2, comm_quant_mode=2, **sizes)):
        results = list(one_card.run_case(card, case))
        assert len(results) == 8 and all(result.ok for result in results), results


def test_a_rank_that_fails_raises_its_error() -> None:
    card = OneCard(2, 2, "window", CPU)
    for place, hidden in zip(card.places(), (64, 128), strict=True):
        values = {"x": torch.ones(2, hidden, dtype=torch.bfloat16), "expert_ids": torch.zeros(2, 1, dtype=torch.int32)}
        card.prepare("dispatch", place, Case("other H", 2), values | place.arguments(moe_expert_num=2))
    with pytest.raises(ConfigMismatch, match="128"):
        card.launch()


@pytest.mark.parametrize("barrier", ["blocks", "syncall"])  # which every op runs several times
@pytest.mark.parametrize(
    "case", [program(2, 8, 2, "direct"), program(8, 2, 1, "window"), SMALL[0], *SMALL[2:]], ids=str
)
def test_schedules_of_one_launch_have_no_finding(
    case: explore.Program, barrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_MOE_CORE_BARRIER", barrier)
    assert_nothing_found(explore.explore(case, 12))


@pytest.mark.nightly
def test_two_thousand_schedules_of_one_launch_have_no_finding() -> None:
    """Every W over 8 cores each and over 48 / W; more schedules with fewer cores."""
    groups = ((programs(lambda world: (8, 48 // world)), 2), (programs(lambda world: (2, 3)), 7), (SMALL, 415))
    results = [explore.campaign(chosen, len(chosen) * count, a_case=count) for chosen, count in groups]
    for result in results:
        assert_nothing_found(result)
    assert sum(result.schedules for result in results) >= 2000


@pytest.mark.parametrize("text", ["w2,c33,one_card", "w2,fp16,one_card", "w2,direct,registered,one_card"])
def test_a_program_that_one_launch_cannot_run_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="one_card"):
        parse(text)


@pytest.mark.nightly
@pytest.mark.parametrize("world", one_card.RANKS)
def test_the_command_passes(world: int) -> None:
    done = said("validate", "--one-card", str(world), "--extra", "4", "--device", "cpu", "--json")
    found = json.loads(done.out)
    assert done.code == 0 and found["ok"] and found["world"] == world
    assert len(found["counts"]) == (24 if world == 2 else 30)


def test_the_command_takes_2_4_or_8_ranks() -> None:
    """Each with 8 cores a rank, and with a share of the NPU's."""
    assert [one_card.cores_of(world, CPU) for world in one_card.RANKS] == [[8, 24], [8, 12], [6, 8]]
    done = said("validate", "--one-card", "3", "--device", "cpu")
    assert done.code == 2 and "--one-card is 3; it must be 2, 4 or 8 ranks" in done.err, done.err
