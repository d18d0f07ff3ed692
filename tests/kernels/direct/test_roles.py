"""Direct dispatch with roles, some cores making lists while others publish rows: always the same bits."""

from __future__ import annotations

import random
from dataclasses import replace

import op_runs
import pytest
import test_direct
import torch
from op_runs import Clusters
from test_direct_explore import drawn

import ascend_moe.reference as ref
from ascend_moe import explore, plan
from ascend_moe.explore import Options, Program
from ascend_moe.ops import calls
from ascend_moe.plan import Request
from ascend_moe.reference.cases import MASKS, Case, legal
from ascend_moe.timed import predict
from ascend_moe.timed.costs import cost_table
from ascend_moe.timed.world import TimedWorld

PART = 40  # cases a test
COSTS = {name: one.value for name, one in cost_table("Ascend910_9391").items()}


def list_cores(ranks: int, experts: int, topk: int, batch: int, cores: int) -> int:
    """How many cores of a rank with so many tokens make lists."""
    request = Request(ranks=ranks, experts=experts, topk=topk, hidden=64, batch=batch, cores=cores)
    made = plan.describe("dispatch", request, "direct")
    return plan.tiling_of(calls.Plan("dispatch", made))["list_cores"]


@pytest.mark.parametrize("first", range(20_000, 20_000 + 4 * PART, PART))
def test_equals_the_reference(clusters: Clusters, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any legal call and the collectively wrong ones; no row is published twice, none is left out."""
    monkeypatch.setenv("ASCEND_MOE_COMM_ALG", "direct")
    monkeypatch.setattr(op_runs, "check_traffic", test_direct.check_traffic)
    taken = []
    for seed in range(first, first + PART):
        cores = random.Random(seed).choice([8, 9, 13, 17, 24, 33, 48])
        case = replace(test_direct.drawn(seed), cores=cores)
        op_runs.check(case, op_runs.run(clusters[case.world], case))
        tokens, topk = case.inputs[0].expert_ids.shape
        taken.append(list_cores(case.world, case.experts, topk, max(1, tokens), case.cores))
    assert min(taken) >= 1 and max(taken) >= 12


@pytest.mark.nightly
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("ids", ["distinct", "hot", "minus", "overflow", "bad"])
def test_many_pairs_on_many_cores(
    clusters: Clusters, ids: str, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More pairs of an expert than the table of positions holds, and owners whose experts cores share."""
    monkeypatch.setenv("ASCEND_MOE_COMM_ALG", "direct")
    monkeypatch.setattr(op_runs, "check_traffic", test_direct.check_traffic)
    for contract, cores, local in ((1, 24, 5), (2, 48, 3), (1, 8, 1), (2, 13, 16)):
        spec = Case(world=2, local=local, topk=min(8, 2 * local), units=1, batch=300, ids=ids, mask=mask)
        case = legal(replace(spec, contract=contract, cores=cores, seed=cores, quant="int8"))
        op_runs.check(case, op_runs.run(clusters[2], case))


@pytest.mark.parametrize(("batch", "lists"), [(8, 2), (1023, 1), (1024, 1), (1025, 0)])
def test_pairs_that_do_not_fit_are_listed_by_all_cores(
    clusters: Clusters, batch: int, lists: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_MOE_COMM_ALG", "direct")
    monkeypatch.setattr(op_runs, "check_traffic", lambda *_: None)  # entries are read twice where many
    assert [list_cores(2, 16, 8, batch, cores) for cores in (1, 7, 8)] == [0, 0, lists]
    case = Case(world=2, local=8, topk=8, units=1, batch=batch, contract=1, cores=8)
    op_runs.check(case, op_runs.run(clusters[2], case))


@pytest.mark.parametrize("quant", [False, True])
@pytest.mark.parametrize("contract", ["v1", "v2"])
def test_any_number_of_list_cores_gives_the_same_outputs(contract: str, quant: bool) -> None:
    request = Request(
        ranks=4, experts=16, topk=4, hidden=2048, batch=9, quant=quant, contract=contract, cores=6
    )
    found: list[list[list[torch.Tensor]]] = []
    for lists in range(8):
        with TimedWorld(request, "direct", 3, True, lists) as world:
            world.run("dispatch", COSTS)
            ends = [int(one[4][-1]) for one in world.outputs["dispatch"]]
            found.append(
                [
                    [one[0][:end], one[1][: end if quant else 0], *one[2:5]]
                    for one, end in zip(world.outputs["dispatch"], ends, strict=True)
                ]
            )
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            for at, (a, b) in enumerate(zip(one, two, strict=True)):
                rows = len(one[0])
                defined = slice(0, 3 * rows) if at == 2 and contract == "v2" else slice(None)
                assert ref.same_bits(a[defined], b[defined]), at


def test_the_roles_are_kept_and_matter() -> None:
    """Cores below the split make no lists, those above publish no rows; the time is another."""
    request = Request(ranks=4, experts=64, topk=8, hidden=7168, batch=96, quant=True, cores=24)
    split = predict(request, algorithm="direct", events=1_000_000)
    by_step: dict[str, set[int]] = {}
    for event in split.dispatch.events:
        if event.pipe != "S":
            by_step.setdefault(event.phase, set()).add(event.core)
    assert by_step["PublishRows"] == set(range(18))
    assert by_step["PublishLists"] == set(range(18, 24))
    times = []
    for lists in (0, 6, 8, 23, 200):
        with TimedWorld(request, "direct", 0, False, lists) as world:
            times.append(world.run("dispatch", COSTS).total_ns)
    assert times[0] == times[1] != times[2], "the rules take a quarter of the cores"
    assert times[3] == times[4], "one core is left for the rows"
    times.clear()
    for lists in (0, 8):
        with TimedWorld(request, "window", 0, False, lists) as world:
            times.append(world.run("dispatch", COSTS).total_ns)
    assert times[0] == times[1], "window has no such roles"


@pytest.mark.parametrize("algorithm", ["direct", "mixed"])
def test_no_schedule_has_a_finding(algorithm: str) -> None:
    cases = [
        replace(case, cores=case.cores + 1, list_cores=1 + case.seed % case.cores)
        for case in drawn(90_000, 60, algorithm)
    ]
    assert {case.list_cores for case in cases} >= {1, 2, 3}
    result = explore.campaign(cases, schedules=480, seed=1, a_case=8)
    assert result.finding is None, result.finding.line()
    assert result.schedules == 480


@pytest.mark.parametrize("policy", ["late", "random", "lazy", "pct"])
def test_every_policy(policy: str) -> None:
    case = Program(
        world=2, cores=4, local=2, sequence="DDCC", quant="int8", seed=3, algorithm="direct", list_cores=2
    )
    assert explore.parse(str(case)) == case
    result = explore.explore(case, 20, 7, Options(policy=policy))
    assert result.finding is None, result.finding.line()
