"""The search of tuning tables, on made-up models and on the timed engine, and its command."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from ascend_moe import tuning
from ascend_moe.plan import Request
from ascend_moe.tune_plan import cut, largest
from ascend_moe.tune_search import (
    LEAST_GAIN,
    OTHER,
    OWN,
    SEARCHED,
    Choice,
    Search,
    Setting,
    entries_of,
    model,
)
from ascend_moe.tuning import Table

SHAPE = Request(ranks=2, experts=16, topk=4, hidden=2048, batch=64, soc="Ascend910_9391", cores=48)


@dataclass(frozen=True)
class Made:
    dispatch_us: float
    combine_us: float


def bowl(shape: Request, algorithm: str, setting: Setting, seed: int) -> Made:
    """Best at 24 cores for dispatch and at 36 with 2 rows for combine."""
    cores, rows = setting.cores or shape.cores, setting.rows or 14
    return Made(50 + abs(cores - 24), 60 + abs(cores - 36) + abs(rows - 2) / 2)


def test_the_search_finds_the_bottom_of_a_bowl() -> None:
    search = Search(SHAPE, "window", 100, bowl)
    dispatch, combine = search.run()
    assert (dispatch.setting.cores, dispatch.own_us, dispatch.tuned_us) == (24, 74, 50)
    assert (combine.setting.cores, combine.setting.rows, combine.tuned_us) == (36, 2, 60)
    assert dispatch.setting.ring == combine.setting.ring == 0, "what does not matter is not asked for"
    assert search.evaluations == len(search._known)


def roles(shape: Request, algorithm: str, setting: Setting, seed: int) -> Made:
    """Best for dispatch with a third of 36 cores on lists; combine with 6 that copy."""
    cores = setting.cores or shape.cores
    return Made(
        50 + abs(cores - 36) + abs(setting.role_cores - 12),
        60 + abs(cores - 36) + abs(setting.role_cores - 6),
    )


def test_the_search_splits_roles_of_direct() -> None:
    dispatch, combine = Search(SHAPE, "direct", 200, roles).run()
    assert (dispatch.setting.cores, dispatch.setting.role_cores, dispatch.tuned_us) == (36, 12, 50)
    assert (combine.entry(SHAPE).list_cores, combine.entry(SHAPE).copy_cores) == (0, 6)
    assert (dispatch.entry(SHAPE).list_cores, dispatch.entry(SHAPE).copy_cores) == (12, 0)
    dispatch, _ = Search(SHAPE, "window", 200, roles).run()
    assert dispatch.setting.role_cores == 0, "window has no such roles"


def test_roles_are_searched_on_the_timed_engine() -> None:
    shape = Request(ranks=4, experts=64, topk=8, hidden=2048, batch=32, soc="Ascend910_9391", cores=16)
    search = Search(shape, "direct", 14)
    dispatch, _ = search.run()
    by_roles = {
        setting.role_cores: us["dispatch"]
        for (setting, seed), us in search._known.items()
        if seed == SEARCHED and replace(setting, role_cores=0) == replace(dispatch.setting, role_cores=0)
    }
    assert len(by_roles) > 3 and len(set(by_roles.values())) > 3
    assert dispatch.tuned_us == by_roles[dispatch.setting.role_cores]


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_the_search_keeps_its_limit(limit: int) -> None:
    search = Search(SHAPE, "window", limit, bowl)
    choices = search.run()
    assert search.evaluations <= limit + 3  # those on the other routing: the own choice and the two found
    assert all(one.tuned_us <= one.own_us for one in choices)


def worse_elsewhere(shape: Request, algorithm: str, setting: Setting, seed: int) -> Made:
    """Any change looks better on the routing that is searched, and is worse on another."""
    if setting == OWN:
        return Made(100, 100)
    return Made(120, 120) if seed == OTHER else Made(50, 50)


def hardly(shape: Request, algorithm: str, setting: Setting, seed: int) -> Made:
    gain = 0 if setting == OWN else 100 * LEAST_GAIN / 2
    return Made(100 - gain, 100 - gain)


@pytest.mark.parametrize("times", [worse_elsewhere, hardly])
def test_what_is_no_gain_is_not_taken(times: object) -> None:
    for choice in Search(SHAPE, "direct", 30, times).run():  # type: ignore[arg-type]
        assert choice.setting == OWN and choice.tuned_us == choice.own_us == 100


def test_the_fastest_algorithm_comes_first() -> None:
    choices = [
        Choice("combine", "direct", Setting(8), 9, 8, 9, 8),
        Choice("combine", "window", OWN, 7, 7, 7, 7),
        Choice("dispatch", "window", OWN, 5, 5, 5, 5),
        Choice("dispatch", "direct", Setting(0, 2, 3), 4, 3, 4, 3),
    ]
    entries = entries_of(SHAPE, choices)
    said = [(one.op, one.algorithm, one.cores, one.ring, one.rows, one.tuned_us) for one in entries]
    assert said == [
        ("dispatch", "direct", 0, 2, 3, 3),
        ("dispatch", "window", 0, 0, 0, 5),
        ("combine", "window", 0, 0, 0, 7),
        ("combine", "direct", 8, 0, 0, 8),
    ]
    facts = tuning.Facts("combine", SHAPE.soc, 2, 16, 4, 2048, 60, "bf16", False, 200)
    found = Table(tuple(entries)).lookup(facts, "auto")
    assert found is not None and found.algorithm == "window"


def test_on_the_timed_engine_nothing_is_slower_than_the_own_choice() -> None:
    search = Search(SHAPE, "direct", 8)
    for choice in search.run():
        assert 0 < choice.tuned_us <= choice.own_us and choice.other_tuned_us <= choice.other_own_us
        again = model(SHAPE, "direct", choice.setting, 0)
        us = again.dispatch_us if choice.op == "dispatch" else again.combine_us
        assert us == choice.tuned_us, "the model says the same twice"
        assert cut(choice.entry(SHAPE)) == [], "nothing is asked for that does not fit"


def test_the_ring_matters_on_the_timed_engine() -> None:
    """Copies in and out overlap when there is more than one buffer."""
    shape = Request(ranks=2, experts=16, topk=4, hidden=7168, batch=128, soc="Ascend910_9391", cores=8)
    one, own = (model(shape, "window", setting, 0) for setting in (Setting(ring=1), OWN))
    assert own.combine_us < one.combine_us


def test_largest_is_what_the_tiling_takes() -> None:
    entries = [Choice(op, "window", OWN, 0, 0, 0, 0).entry(SHAPE) for op in tuning.OPS]
    most = largest(entries)
    assert most["cores"] == 48 and 1 <= most["ring"] <= 255 and 1 <= most["rows"] <= 65535
