"""Options together: every two values that can meet do, with the reference's bits; the others are refused as the page
says, docs/operators.md, "Options that do not go together"."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import begin_ranks
import op_runs
import option_sets
import pytest
import torch
from option_sets import ALL, HIERARCHY, OptionSet, Worlds

import ascend_moe
from ascend_moe import LocalCluster
from ascend_moe.reference.cases import Case
from ascend_moe.validate import run as validate_run
from ascend_moe.validate.run import DevicePlace

LEAST_EACH = 5
worlds = pytest.fixture(scope="module")(option_sets.worlds)


def check(worlds: Worlds, sets: list[OptionSet], least: int) -> None:
    met = Counter(frozenset(pair) for each in sets for pair in each.pairs)
    legal = {frozenset(pair) for pair in option_sets.legal_pairs()}
    assert set(met) == legal, "a pair is drawn that is refused, or never"
    assert min(met.values()) >= least, met.most_common()[-3:]
    for options in sets:
        try:
            worlds.run(options)
        except Exception as error:
            raise AssertionError(f"{options}") from error


def test_every_pair_of_values(worlds: Worlds) -> None:
    """Some sets in which each pair meets."""
    sets = option_sets.covering([option_sets.draw(seed) for seed in range(150)])
    assert len(sets) < 40
    check(worlds, sets, 1)


@pytest.mark.nightly
def test_every_pair_of_values_often(worlds: Worlds) -> None:
    check(worlds, [option_sets.draw(seed) for seed in range(ALL)], LEAST_EACH)


# ---- what is refused
SMALL = Case(world=2, contract=2, ids="distinct", cores=2)
FIRST = replace(SMALL, contract=1)
#: Two servers of two ranks, and algorithm hierarchy.
FAR = Case(world=4, contract=2, ids="distinct", cores=2, share=2, weights=True)


def dispatch(case: Case, **changes: Any) -> Callable[[DevicePlace], Any]:
    return lambda place: validate_run.dispatch(place, case, **changes)


def combine(case: Case, **changes: Any) -> Callable[[DevicePlace], Any]:
    """Behind a dispatch of the same."""

    def call(place: DevicePlace) -> Any:
        sent = op_runs.dispatch(case, place.rank, place.group_ep)
        rows = op_runs.expert_rows(case, place.rank, sent)
        values = {name: value(place, rows) if callable(value) else value for name, value in changes.items()}
        return validate_run.combine(place, case, values.pop("expand_x", rows), sent, **values)

    return call


def registered(place: DevicePlace, rows: torch.Tensor) -> torch.Tensor:
    return ascend_moe.window_empty(tuple(rows.shape), dtype=rows.dtype, **place.arguments())


def started(place: DevicePlace) -> Any:
    ops = begin_ranks.TwoLaunches(place, FIRST)
    sent = op_runs.dispatch(FIRST, place.rank, place.group_ep)
    return ops.combine(sent[0], sent)


#: Calls that must raise, by the first two columns of the page's list.
CALLS: dict[tuple[str, str], Callable[[DevicePlace], Any]] = {
    ("algorithm `direct`", "ranks on several servers"): dispatch(SMALL, comm_alg="direct"),
    (HIERARCHY, "V1's functions"): dispatch(replace(FAR, contract=1, share=0, weights=False)),
    (HIERARCHY, "`scales`"): dispatch(replace(FAR, quant_mode=2), scales=torch.ones(FAR.experts, FAR.hidden)),
    (HIERARCHY, "dispatch without `expert_scales`"): dispatch(replace(FAR, weights=False)),
    (HIERARCHY, "combine with empty `expert_scales`"): combine(FAR, expert_scales=torch.empty(0)),
    (HIERARCHY, "`performance_info`"): dispatch(FAR, performance_info=torch.zeros(4, dtype=torch.int64)),
    (HIERARCHY, "`ASCEND_MOE_RDMA_FLAGS=1`"): dispatch(FAR),
    (HIERARCHY, "a rank a server, or servers of different sizes"): dispatch(FAR),
    (HIERARCHY, "gradients"): combine(FAR, expand_x=lambda place, rows: rows.requires_grad_()),
    ("`scales`", "`quant_mode` 0"): dispatch(SMALL, scales=torch.ones(4, SMALL.hidden)),
    ("`zero_expert_num`", "V1's functions"): dispatch(FIRST, zero_expert_num=1),
    ("`copy_expert_num`", "V1's functions"): dispatch(FIRST, copy_expert_num=1),
    ("`const_expert_num`", "V1's functions"): dispatch(FIRST, const_expert_num=1),
    ("`shared_expert_x`", "V1's functions"): combine(
        FIRST, shared_expert_x=torch.ones(SMALL.batch, SMALL.hidden, dtype=SMALL.torch_dtype)
    ),
    ("`begin_combine`", "V1's tensors"): started,
    ("`comm_quant_mode` 2", "float32 rows"): combine(replace(SMALL, dtype="fp32"), comm_quant_mode=2),
    ("`comm_quant_mode` 2", "a tensor of `window_empty`"): combine(SMALL, comm_quant_mode=2, expand_x=registered),
    ("`comm_quant_mode` 2", "gradients of expand_x or expert_scales"): combine(
        SMALL, comm_quant_mode=2, expand_x=lambda place, rows: rows.requires_grad_()
    ),
}


#: What refuses every call of a group, by the variables that its ranks have.
OF_THE_GROUP = {
    "`ASCEND_MOE_RDMA_FLAGS=1`": {"ASCEND_MOE_RDMA_FLAGS": "1"},
    "a rank a server, or servers of different sizes": {"ASCEND_MOE_RANKS_PER_SERVER": "1"},
}


def environment(option: str, other: str) -> dict[str, str]:
    """The variables of a row's group."""
    if option != HIERARCHY:
        return {"ASCEND_MOE_RANKS_PER_SERVER": "1"} if other == "ranks on several servers" else {}
    two = {"ASCEND_MOE_CONTEXT": "a2", "ASCEND_MOE_RANKS_PER_SERVER": "2", "ASCEND_MOE_COMM_ALG": "hierarchy"}
    return two | OF_THE_GROUP.get(other, {})


def listed() -> dict[tuple[str, str], tuple[str, str]]:
    """The page's list: error and text by the first two columns."""
    page = (Path(__file__).resolve().parents[2] / "docs/operators.md").read_text()
    section = page.split("## Options that do not go together\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:2] == "| "]
    texts = {}
    for option, other, said, reason in rows[1:]:
        match = re.fullmatch(r"`(\w+)`: `([^`]+)`", said)
        assert match and len(reason) > 20, said
        texts[option, other] = (match[1], match[2])
    return texts


def test_the_page_lists_every_refused_pair() -> None:
    assert set(listed()) == set(CALLS) >= set(option_sets.REFUSED)


@pytest.mark.parametrize(("option", "other"), CALLS)
def test_refused_as_the_page_says(option: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank raises it; the group stays usable."""
    error, text = listed()[option, other]
    case = FAR if option == HIERARCHY else SMALL
    for name, value in environment(option, other).items():
        monkeypatch.setenv(name, value)

    def body(rank: int, group_ep: str) -> None:
        with pytest.raises(Exception, match=re.escape(text)) as raised:
            CALLS[option, other](DevicePlace(group_ep, case.world, rank))
        assert type(raised.value).__name__ == error

    with LocalCluster(case.world, window_mib=8) as cluster:
        cluster.run(body)
        if other in OF_THE_GROUP:  # no call of this group with this algorithm is right
            monkeypatch.setenv("ASCEND_MOE_COMM_ALG", "window")
            case = replace(case, share=0, weights=False)
        op_runs.check(case, op_runs.run(cluster, case))
