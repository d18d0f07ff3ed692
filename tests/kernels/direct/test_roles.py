"""Direct dispatch with roles, some cores making lists while others publish rows: always the same bits."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, replace

import op_runs
import pytest
import test_direct
import torch
from mutant_builds import MutantBuilds
from mutant_cases import MUTANTS, MutantCase
from mutant_search import DTYPE, LIMIT, SEEDS, search
from op_runs import Clusters
from test_direct_explore import drawn

import ascend_moe.reference as ref
from ascend_moe import explore, plan, tuning
from ascend_moe.explore import Options, Program
from ascend_moe.ops import calls, compiled
from ascend_moe.plan import Request
from ascend_moe.reference.cases import MASKS, Case, legal
from ascend_moe.timed import predict
from ascend_moe.timed.costs import cost_table
from ascend_moe.timed.world import TimedWorld
from ascend_moe.tuning import Entry, Facts, Table

PART = 40  # cases a test
COSTS = {name: one.value for name, one in cost_table("Ascend910_9391").items()}


@dataclass(frozen=True)
class ForAll(Table):
    """A table that says the same of every dispatch."""

    list_cores: int = 0

    def lookup(self, facts: Facts, comm_alg: str) -> Entry | None:
        lists = self.list_cores if facts.op == "dispatch" else 0
        shape = (facts.ranks, facts.experts, facts.topk, facts.hidden, facts.max_bs)
        return Entry(facts.op, facts.soc, *shape, list_cores=lists)


@pytest.mark.parametrize("first", range(20_000, 20_000 + 4 * PART, PART))
def test_equals_the_reference(clusters: Clusters, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any legal call and the collectively wrong ones; no row is published twice, none is left out."""
    monkeypatch.setenv("ASCEND_MOE_COMM_ALG", "direct")
    monkeypatch.setattr(op_runs, "check_traffic", test_direct.check_traffic)
    taken = []
    with compiled.paused():
        for seed in range(first, first + PART):
            case = test_direct.drawn(seed)
            case = replace(case, cores=max(2, case.cores))
            table = ForAll((), list_cores=random.Random(seed).randrange(1, case.cores + 2))
            monkeypatch.setattr(tuning, "current", lambda table=table: table)
            calls._plans.clear()
            op_runs.check(case, op_runs.run(clusters[case.world], case))
            plans = [made for places in calls._plans.values() for made in places.values()]
            taken += [plan.tiling_of(made).get("list_cores", 0) for made in plans]
    calls._plans.clear()
    assert sum(lists > 0 for lists in taken) >= PART


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
    request = Request(ranks=2, experts=16, topk=8, hidden=64, batch=batch, cores=8)

    def list_cores(cores: int) -> int:
        made = plan.describe("dispatch", replace(request, cores=cores), "direct")
        return plan.tiling_of(calls.Plan("dispatch", made))["list_cores"]

    assert [list_cores(cores) for cores in (1, 7, 8)] == [0, 0, lists]
    spec = Case(world=2, local=8, topk=8, units=1, batch=batch, ids="any", contract=1, cores=8)
    case = legal(spec)
    op_runs.check(case, op_runs.run(clusters[2], case))


@pytest.mark.parametrize("quant", [False, True])
@pytest.mark.parametrize("contract", ["v1", "v2"])
def test_any_number_of_list_cores_gives_the_same_outputs(contract: str, quant: bool) -> None:
    request = Request(
        ranks=4, experts=16, topk=4, hidden=2048, batch=9, quant=quant, contract=contract, cores=6
    )
    found: list[list[list[torch.Tensor]]] = []
    for lists in range(8):
        with TimedWorld(request, "direct", 0, 0, 3, True, lists) as world:
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
    both = predict(request, algorithm="direct", events=1_000_000)
    split = predict(request, algorithm="direct", list_cores=8, events=1_000_000)
    by_step: dict[str, set[int]] = {}
    for event in split.dispatch.events:
        if event.pipe != "S":
            by_step.setdefault(event.phase, set()).add(event.core)
    assert by_step["PublishRows"] == set(range(16))
    assert by_step["PublishLists"] == set(range(16, 24))
    assert split.dispatch_us != both.dispatch_us
    assert split.combine_us == both.combine_us
    cut = predict(request, algorithm="direct", list_cores=200)
    assert cut.dispatch_us == predict(request, algorithm="direct", list_cores=23).dispatch_us
    window = (predict(request, list_cores=n).dispatch_us for n in (0, 8))
    assert len(set(window)) == 1, "window has no such roles"


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


# ---- its bugs

LONG = {"positions_turned_before_sent": "w1,c3,l2,k2,b64,u1,v1,m2,bf16,none,mask:none,ids:hot,D,direct"}


@pytest.mark.mutants
@pytest.mark.parametrize(
    "case", [case for case in MUTANTS if case.where == "roles"], ids=lambda case: case.name
)
def test_a_mutant_of_roles_is_found(builds: MutantBuilds, case: MutantCase) -> None:
    library = builds.mutant(case.number, "checked", (DTYPE,))
    if case.name in LONG:
        made = [replace(explore.parse(LONG[case.name]), seed=seed) for seed in range(40)]
        clean = explore.campaign(
            made, 40, 1, library=explore.checked_library(builds.clean("checked")), a_case=1
        )
        assert clean.finding is None, clean.finding.line()
        result = explore.campaign(made, 40, 1, library=explore.checked_library(library), a_case=1)
        assert result.finding is not None and result.finding.kind in case.finds, result.finding
        return
    found = [search(library, seed, where="roles") for seed in SEEDS]
    assert all(one.kind in case.finds for one in found), found
    assert statistics.median(one.schedules for one in found) <= LIMIT


@pytest.mark.mutants
@pytest.mark.parametrize("seed", SEEDS)
def test_the_clean_kernels_pass_the_same_search(builds: MutantBuilds, seed: int) -> None:
    found = search(builds.clean("checked"), seed, LIMIT, where="roles")
    assert found.kind is None and found.schedules == LIMIT, found.line
