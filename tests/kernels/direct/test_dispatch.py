"""Direct dispatch: a row of x is read once and crosses the links once for all experts of one owner; who makes lists."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import op_runs
import pytest
from op_runs import Clusters, RankRun

from ascend_moe import plan
from ascend_moe.ops import calls
from ascend_moe.plan import Request
from ascend_moe.predict import predict
from ascend_moe.reference.cases import QUANTS, Case, legal

SETTINGS = {"ASCEND_MOE_COMM_ALG": "direct"}
MANY_EXPERTS = 8  # of an owner


def test_a_row_is_read_once_by_its_owner(clusters: Clusters) -> None:
    spec = Case(world=2, local=MANY_EXPERTS, topk=8, units=64, batch=30, quant_mode=2, contract=2)
    for cores, once in ((8, True), (48, True), (7, False)):
        case = legal(replace(spec, cores=cores, ids="distinct"))
        wire = case.hidden + 32
        for rank, run in enumerate(op_runs.run(clusters[2], case)):
            assert isinstance(run, RankRun), run
            owners = [given.expert_ids // MANY_EXPERTS == rank for given in case.inputs]
            pairs = sum(int(own.sum()) for own in owners)
            rows = sum(int(own.any(1).sum()) for own in owners)
            # The cores that share the rows of a source each read its list.
            readers = cores if once else 1
            read = run.traffic[0]["read_window_data"]
            assert read == (rows if once else pairs) * wire + readers * 4 * pairs, (cores, rank)
            assert rows < pairs


@pytest.mark.parametrize("topk", range(2, 33))
def test_the_factor_by_which_shared_rows_find_tokens(topk: int) -> None:
    """The kernel multiplies the numbers of pairs by 1 / K in fp32: exact to the token for all pairs that it takes."""
    pairs = np.arange(1 << 19, dtype=np.int32)  # kMostPairs of op_host/rules/rings.h
    tokens = np.floor(pairs.astype(np.float32) * (np.float32(1) / np.float32(topk)))
    assert (tokens == pairs // topk).all()


@pytest.mark.parametrize("algorithm", ["window", "direct"])
@pytest.mark.parametrize("cores", [1, 3, 16])
@pytest.mark.parametrize("quant", ["none", "int8"])
def test_a_row_of_x_is_read_once(clusters: Clusters, cores: int, quant: str) -> None:
    """Whatever K and the owners of its experts, as long as every core has a token."""
    case = Case(world=3, local=4, topk=6, units=256, batch=16, **QUANTS[quant], ids="distinct", cores=cores)
    row = case.hidden * case.torch_dtype.itemsize
    for rank, one in enumerate(op_runs.run(clusters[3], case)):
        assert isinstance(one, RankRun), one
        rows = case.inputs[rank].x.shape[0]
        assert rows * row <= one.traffic[0]["read_tensor"] < (rows + 1) * row, rank


# ---- lists of pairs, made by some cores while others publish rows, or by all cores


def list_cores(case: Case, ub_bytes: int = 0) -> int:
    """How many cores of a rank make lists."""
    request = Request(
        ranks=case.world, experts=case.experts, topk=case.topk, hidden=64, batch=max(1, case.batch), cores=case.cores
    )
    made = plan.describe("dispatch", request, "direct")
    made.ub_bytes = ub_bytes
    return plan.tiling_of(calls.Plan("dispatch", made))["list_cores"]


def test_lists_that_do_not_fit_in_ub_are_made_by_all_cores() -> None:
    case = Case(world=2, local=512, topk=8, units=1, batch=1024, contract=1, cores=8)
    assert [list_cores(case, ub) for ub in (0, 172_000, 168_000)] == [1, 1, 0]


@pytest.mark.parametrize(("batch", "lists"), [(8, 2), (1023, 1), (1024, 1), (1025, 0)])
def test_pairs_that_do_not_fit_are_listed_by_all_cores(clusters: Clusters, batch: int, lists: int) -> None:
    case = Case(world=2, local=8, topk=8, units=1, batch=batch, contract=1, cores=8)
    assert [list_cores(replace(case, cores=cores)) for cores in (1, 7, 8)] == [0, 0, lists]
    op_runs.check(case, op_runs.run(clusters[2], case))


def test_the_roles_are_kept() -> None:
    """Cores below the split make no lists, those above publish no rows."""
    request = Request(ranks=4, experts=64, topk=8, hidden=7168, batch=96, quant_mode=2, cores=24)
    by_step: dict[str, set[int]] = {}
    for event in predict(request, algorithm="direct", events=1_000_000).dispatch.events:
        if event.pipe != "S":
            by_step.setdefault(event.phase, set()).add(event.core)
    assert by_step["PublishRows"] == set(range(18))
    assert by_step["PublishLists"] == set(range(18, 24))
