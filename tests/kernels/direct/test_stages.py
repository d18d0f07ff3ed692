"""Direct combine with rows that come in stages, copied by some cores while others sum: the same bits."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, replace

import failure_cases
import op_runs
import pytest
import test_direct
import torch
from error_codes import CORRUPT, PEER_LOST, TIMEOUT
from failure_cases import LOCAL, MAX_BS, TOPK
from mutant_builds import MutantBuilds
from mutant_cases import MUTANTS, MutantCase
from mutant_search import DTYPE, LIMIT, SEEDS, search
from op_runs import Clusters
from test_direct_explore import drawn

import ascend_moe.reference as ref
from ascend_moe import LocalCluster, explore, plan, tuning
from ascend_moe.errors import RoutingMismatch
from ascend_moe.explore import Faults, Options, Program, World
from ascend_moe.ops import calls, compiled
from ascend_moe.plan import Request
from ascend_moe.reference.cases import Place
from ascend_moe.timed import predict
from ascend_moe.timed.costs import cost_table
from ascend_moe.timed.world import TimedWorld
from ascend_moe.tuning import Entry, Facts, Table

PART = 40  # cases a test
COSTS = {name: one.value for name, one in cost_table("Ascend910_9391").items()}


@dataclass(frozen=True)
class ForAll(Table):
    """A table that says the same of every combine."""

    copy_cores: int = 0

    def lookup(self, facts: Facts, comm_alg: str) -> Entry | None:
        copies = self.copy_cores if facts.op == "combine" else 0
        shape = (facts.ranks, facts.experts, facts.topk, facts.hidden, facts.max_bs)
        return Entry(facts.op, facts.soc, *shape, copy_cores=copies)


@pytest.mark.parametrize("first", range(30_000, 30_000 + 4 * PART, PART))
def test_equals_the_reference(clusters: Clusters, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any legal call and the collectively wrong ones; every byte is copied once and read once."""
    monkeypatch.setenv("ASCEND_MOE_COMM_ALG", "direct")
    monkeypatch.setattr(op_runs, "check_traffic", test_direct.check_traffic)
    taken = []
    with compiled.paused():
        for seed in range(first, first + PART):
            case = test_direct.drawn(seed)
            table = ForAll((), copy_cores=random.Random(seed).randrange(1, case.cores + 2))
            monkeypatch.setattr(tuning, "current", lambda table=table: table)
            calls._plans.clear()
            op_runs.check(case, op_runs.run(clusters[case.world], case))
            plans = [made for places in calls._plans.values() for made in places.values()]
            taken += [plan.tiling_of(made).get("copy_cores", 0) for made in plans]
    calls._plans.clear()
    assert sum(copies > 0 for copies in taken) >= PART // 2


@pytest.mark.parametrize("contract", ["v1", "v2"])
@pytest.mark.parametrize(("dtype", "hidden"), [("bf16", 1024), ("fp32", 8192), ("fp16", 4128)])
def test_any_number_of_copying_cores_gives_the_same_sums(contract: str, dtype: str, hidden: int) -> None:
    """Up to all of them; with fewer than 8 cores none are the tiling's choice."""
    request = Request(
        ranks=3, experts=12, topk=4, hidden=hidden, batch=9, contract=contract, cores=6, dtype=dtype
    )
    found = []
    for copies in range(8):
        with TimedWorld(request, "direct", 0, 0, 3, True, 0, copies) as world:
            world.run("dispatch", COSTS)
            world.run("combine", COSTS)
            found.append([one[0].clone() for one in world.outputs["combine"]])
    assert all(float(x.abs().sum()) > 0 for x in found[0])
    for other in found[1:]:
        assert all(ref.same_bits(a, b) for a, b in zip(found[0], other, strict=True))


def test_the_roles_are_kept_and_matter() -> None:
    """The last cores copy, four tell the peers, core 0 sees to the waits, the others sum."""
    request = Request(ranks=8, experts=64, topk=8, hidden=7168, batch=96, quant=True, cores=48)
    own, asked = (predict(request, algorithm="direct", copy_cores=n, events=3_000_000) for n in (0, 20))
    assert asked.combine_us != own.combine_us
    for made, copies in ((own, 16), (asked, 20)):
        by_step: dict[str, set[int]] = {}
        for event in made.combine.events:
            if event.pipe != "S":
                by_step.setdefault(event.phase, set()).add(event.core)
        assert by_step["StoreStages"] == set(range(48 - copies, 48))
        assert by_step["TellPeers"] == {1, 2, 3, 4}
        assert by_step["SumRows"] >= set(range(5, 48)) and not {1, 2, 3, 4} & by_step["SumRows"]


@pytest.mark.parametrize(("cores", "batch", "copies"), [(7, 128, 0), (8, 128, 2), (48, 128, 16), (48, 1, 0)])
def test_the_tiling_takes_stages_where_they_pay(cores: int, batch: int, copies: int) -> None:
    request = Request(ranks=8, experts=64, topk=8, hidden=7168, batch=batch, cores=cores)
    made = calls.Plan("combine", plan.describe("combine", request, "direct"))
    assert plan.tiling_of(made)["copy_cores"] == copies


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("contract", [1, 2])
def test_an_error_of_one_rank_does_not_keep_the_others_waiting(
    contract: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank whose mask differs raises; the others get its rows to the last stage, and the next op runs."""
    monkeypatch.setenv("ASCEND_MOE_COMM_ALG", "direct")
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "5")
    monkeypatch.setenv("ASCEND_MOE_AIV_CORES", "3")
    monkeypatch.setattr(tuning, "current", lambda: ForAll((), copy_cores=copies))
    calls._plans.clear()

    def body(place: Place) -> str:
        ids = torch.arange(MAX_BS * TOPK, dtype=torch.int32).view(MAX_BS, TOPK) % (place.world * LOCAL)
        x = torch.full((MAX_BS, 512), 1.0 + place.rank, dtype=torch.bfloat16)
        for odd in (True, False):
            mask = torch.tensor([True, False, True, True]) if odd and place.rank == 1 else None
            sent = failure_cases.DISPATCH[contract](x=x, expert_ids=ids, **failure_cases.arguments(place))
            index = "expand_idx" if contract == 1 else "assist_info_for_combine"
            back = {"expand_x": sent[0], "expert_ids": ids, index: sent[2], "ep_send_counts": sent[4]}
            weights = torch.ones(MAX_BS, TOPK)
            try:
                result = failure_cases.COMBINE[contract](
                    **back, expert_scales=weights, x_active_mask=mask, **failure_cases.arguments(place)
                )
            except RoutingMismatch as error:
                assert odd and place.rank == 1 == error.rank
                continue
            assert torch.equal(result, x * TOPK)
            assert not (odd and place.rank == 1)
        return "right"

    with compiled.paused(), LocalCluster(3) as cluster:
        ended = cluster.run(lambda rank, name: failure_cases.caught(body, Place(rank, 3, name)))
    calls._plans.clear()
    assert [one.value for one in ended] == ["right"] * 3, [one.error for one in ended]


# ---- schedules


def staged(cases: list[Program]) -> list[Program]:
    return [replace(case, units=6 + case.seed % 11, copy_cores=1 + case.seed % case.cores) for case in cases]


@pytest.mark.parametrize("algorithm", ["direct", "mixed"])
@pytest.mark.parametrize("rows", ["own", "partly"])
def test_no_schedule_has_a_finding(algorithm: str, rows: str) -> None:
    cases = [replace(case, rows=rows) for case in staged(drawn(70_000, 60, algorithm))]
    assert {case.copy_cores for case in cases} >= {1, 2, 3}
    result = explore.campaign(cases, schedules=480, seed=1, a_case=8)
    assert result.finding is None, result.finding.line()
    assert result.schedules == 480


@pytest.mark.parametrize("policy", ["late", "random", "lazy", "pct"])
@pytest.mark.parametrize("stores", ["fifo", "unordered"])
def test_every_policy_and_order_of_stores(policy: str, stores: str) -> None:
    case = Program(
        world=2, cores=4, local=2, units=12, sequence="DDCC", seed=3, algorithm="direct", copy_cores=2
    )
    assert explore.parse(str(case)) == case
    result = explore.explore(case, 20, 7, Options(policy=policy, store_order=stores))
    assert result.finding is None, result.finding.line()


def test_a_killed_rank_is_missed_by_name() -> None:
    """Wherever it stops, also between its run and its late blocks: nobody waits for good."""
    case = Program(world=3, cores=3, units=12, sequence="DDCC", seed=4, algorithm="direct", copy_cores=2)
    lost = finished = 0
    with World(case.world) as world:
        program = world.load(case, accepted=1 | 1 << PEER_LOST | 1 << TIMEOUT)
        for step in range(0, 1500, 25):
            faults = Faults(kill_rank=case.world - 1, kill_step=step)
            run = world.run(step, 1, Options(hang_is_finding=False, faults=faults))
            assert not run.failed, run.message
            for call, (code, text) in zip(program.calls, world.errors(), strict=True):
                if call.rank == case.world - 1:
                    continue
                assert code in (0, PEER_LOST), (step, code, text)
                lost += code == PEER_LOST
                finished += code == 0
    assert lost > 10 and finished > 5


def test_a_turned_bit_of_a_status_block_is_never_accepted() -> None:
    """Of runs, copy blocks, late blocks and the stages that core 0 posts."""
    case = Program(world=2, cores=2, units=12, sequence="DC", seed=9, algorithm="direct", copy_cores=1)
    codes = (CORRUPT, TIMEOUT, PEER_LOST, *range(1, 7))
    raised = 0
    with World(case.world) as world:
        world.load(case, accepted=1 | sum(1 << code for code in codes))
        for block in range(1, 30):
            for word in range(4):
                faults = Faults(
                    corrupt_block=block, corrupt_word=word, corrupt_xor=1 << (block * 5 + word) % 32
                )
                run = world.run(block, 1, Options(hang_is_finding=False, faults=faults, vary_epoch=False))
                assert not run.failed, (block, word, run.message)
                raised += any(code > 0 for code, _ in world.errors())
    assert raised > 60


# ---- its bugs


@pytest.mark.mutants
@pytest.mark.parametrize(
    "case", [case for case in MUTANTS if case.where == "stages"], ids=lambda case: case.name
)
def test_a_mutant_of_stages_is_found(builds: MutantBuilds, case: MutantCase) -> None:
    library = builds.mutant(case.number, "checked", (DTYPE,))
    found = [search(library, seed, where="stages") for seed in SEEDS]
    assert all(one.kind in case.finds for one in found), found
    assert statistics.median(one.schedules for one in found) <= LIMIT


@pytest.mark.mutants
@pytest.mark.parametrize("seed", SEEDS)
def test_the_clean_kernels_pass_the_same_search(builds: MutantBuilds, seed: int) -> None:
    found = search(builds.clean("checked"), seed, LIMIT, where="stages")
    assert found.kind is None and found.schedules == LIMIT, found.line
