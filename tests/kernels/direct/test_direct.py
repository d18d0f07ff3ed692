"""comm_alg="direct": every output bit for bit the reference, and no more bytes moved than it needs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import op_runs
import pytest
import torch
from op_runs import Clusters, RankRun

import ascend_moe.reference as ref
from ascend_moe import plan
from ascend_moe.ops import calls
from ascend_moe.plan import Request
from ascend_moe.plan.soc import cost_table
from ascend_moe.predict import predict
from ascend_moe.reference.cases import BATCHES, MASKS, Case, draw, legal

MANY_CORES = 8  # from here on a row is read once for all experts of its owner
MANY_EXPERTS = 8  # of an owner
COSTS = {name: one.value for name, one in cost_table("Ascend910_9391").items()}


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_COMM_ALG", "direct")


# ---- drawn cases


def drawn(seed: int) -> Case:
    """Any legal call, the collectively wrong ones included."""
    return draw(
        seed,
        world=(1, 2, 3, 4, 5, 8),
        units=(1, 2, 3, 20, 70),
        batch=(0, 1, 3, 6, 17),
        cores=(1, 2, 3, 5, 8, 13, 24, 48),
        ids=("distinct", "any", "minus", "hot", "mixed", "duplicates", "overflow", "bad"),
    )


def many_cores(seed: int) -> Case:
    """Some cores make lists while others publish rows."""
    return replace(drawn(seed), cores=random.Random(seed).choice([8, 9, 13, 17, 24, 33, 48]))


def many_experts(seed: int) -> Case:
    """A row crosses the links once for all experts of its owner."""
    return draw(
        seed,
        world=(1, 2, 3, 4, 8),
        local=(2, 4, MANY_EXPERTS, 17, 32),
        topk=(1, 2, 3, 8),
        units=(1, 2, 20),
        batch=(1, 3, 6, 17, 40),
        quant=("none", "int8", "int8", "smooth"),
        batches=("equal", "equal", *BATCHES),
        ids=("distinct", "any", "minus", "hot", "mixed", "bad"),
        cores=(7, 8, 13, 24, 48),
    )


def routed(given: ref.RankInput) -> torch.Tensor:
    live = given.expert_ids >= 0
    mask = given.x_active_mask
    return live if mask is None else live & (mask if mask.dim() == 2 else mask[:, None])


@pytest.mark.parametrize(
    ("make", "first"),
    [
        (drawn, 0),
        (many_cores, 20_000),
        (many_experts, 0),
        pytest.param(drawn, 60, marks=pytest.mark.nightly),
        pytest.param(drawn, 120, marks=pytest.mark.nightly),
        pytest.param(many_cores, 20_060, marks=pytest.mark.nightly),
        pytest.param(many_experts, 60, marks=pytest.mark.nightly),
    ],
)
def test_equals_the_reference(clusters: Clusters, make: Callable[[int], Case], first: int) -> None:
    for seed in range(first, first + 60):
        case = make(seed)
        op_runs.check(case, op_runs.run(clusters[case.world], case))


# ---- bytes


@pytest.mark.parametrize("algorithm", ["window", "direct"])
@pytest.mark.parametrize("cores", [1, 3, 16])
@pytest.mark.parametrize("quant", ["none", "int8"])
def test_a_row_of_x_is_read_once(
    clusters: Clusters, algorithm: str, cores: int, quant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever K and the owners of its experts, as long as every core has a token."""
    monkeypatch.setenv("ASCEND_MOE_COMM_ALG", algorithm)
    case = Case(world=3, local=4, topk=6, units=256, batch=16, quant=quant, ids="distinct", cores=cores)
    row = case.hidden * case.torch_dtype.itemsize
    for rank, one in enumerate(op_runs.run(clusters[3], case)):
        assert isinstance(one, RankRun), one
        rows = case.inputs[rank].x.shape[0]
        assert rows * row <= one.traffic[0]["read_tensor"] < (rows + 1) * row, rank


def test_a_row_is_read_once_by_its_owner(clusters: Clusters) -> None:
    spec = Case(world=2, local=MANY_EXPERTS, topk=8, units=64, batch=30, quant="int8", contract=2)
    for cores, once in ((8, True), (48, True), (7, False)):
        case = legal(replace(spec, cores=cores, ids="distinct"))
        wire = case.hidden + 32
        for rank, run in enumerate(op_runs.run(clusters[2], case)):
            assert isinstance(run, RankRun), run
            owners = [one.expert_ids // MANY_EXPERTS == rank for one in case.inputs]
            pairs = sum(int(own.sum()) for own in owners)
            rows = sum(int(own.any(1).sum()) for own in owners)
            # The cores that share the rows of a source each read its list.
            readers = cores if once else 1
            read = run.traffic[0]["read_window_data"]
            assert read == (rows if once else pairs) * wire + readers * 4 * pairs, (cores, rank)
            assert rows < pairs


# ---- roles: some cores make lists while others publish rows


def list_cores(case: Case) -> int:
    """How many cores of a rank make lists."""
    request = Request(
        ranks=case.world,
        experts=case.experts,
        topk=case.topk,
        hidden=64,
        batch=max(1, case.batch),
        cores=case.cores,
    )
    made = plan.describe("dispatch", request, "direct")
    return plan.tiling_of(calls.Plan("dispatch", made))["list_cores"]


@pytest.mark.nightly
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("ids", ["distinct", "hot", "minus", "overflow", "bad"])
def test_many_pairs_on_many_cores(clusters: Clusters, ids: str, mask: str) -> None:
    """More pairs of an expert than the table of positions holds, and owners whose experts cores share."""
    for contract, cores, local in ((1, 24, 5), (2, 48, 3), (1, 8, 1), (2, 13, 16)):
        spec = Case(world=2, local=local, topk=min(8, 2 * local), units=1, batch=300, ids=ids, mask=mask)
        case = legal(replace(spec, contract=contract, cores=cores, seed=cores, quant="int8"))
        op_runs.check(case, op_runs.run(clusters[2], case))


@pytest.mark.parametrize(("batch", "lists"), [(8, 2), (1023, 1), (1024, 1), (1025, 0)])
def test_pairs_that_do_not_fit_are_listed_by_all_cores(clusters: Clusters, batch: int, lists: int) -> None:
    case = Case(world=2, local=8, topk=8, units=1, batch=batch, contract=1, cores=8)
    assert [list_cores(replace(case, cores=cores)) for cores in (1, 7, 8)] == [0, 0, lists]
    op_runs.check(case, op_runs.run(clusters[2], case))


def test_the_roles_are_kept() -> None:
    """Cores below the split make no lists, those above publish no rows."""
    request = Request(ranks=4, experts=64, topk=8, hidden=7168, batch=96, quant=True, cores=24)
    by_step: dict[str, set[int]] = {}
    for event in predict(request, algorithm="direct", events=1_000_000).dispatch.events:
        if event.pipe != "S":
            by_step.setdefault(event.phase, set()).add(event.core)
    assert by_step["PublishRows"] == set(range(18))
    assert by_step["PublishLists"] == set(range(18, 24))
