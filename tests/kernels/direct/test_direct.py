"""comm_alg="direct": every output bit for bit that of "window" and of the reference."""

from __future__ import annotations

from dataclasses import replace

import op_runs
import pytest
import torch
from op_runs import Clusters, RankRun

import ascend_moe.reference as ref
from ascend_moe.reference.cases import Case, draw

PART = 60  # cases a test
CORES = (1, 2, 3, 5, 8, 13, 24, 48)
MANY_CORES = 8  # from here on a row is read once for all experts of its owner


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_COMM_ALG", "direct")


def drawn(seed: int) -> Case:
    """Any legal call, the collectively wrong ones included."""
    return draw(
        seed,
        world=(1, 2, 3, 4, 5, 8),
        units=(1, 2, 3, 20, 70),
        batch=(0, 1, 3, 6, 17),
        cores=CORES,
        ids=("distinct", "any", "minus", "hot", "mixed", "duplicates", "overflow", "bad"),
    )


def check_traffic(case: Case, runs: list[RankRun]) -> None:
    """A token's row is written once, or once a pair with smooth scales; rows are read once by their owner."""
    size = case.inputs[0].x.element_size()
    hidden = case.inputs[0].x.shape[1]
    wire = -(-hidden // 32) * 32 + 32 if case.quant_mode else hidden * size
    for rank, (one, given) in enumerate(zip(runs, case.inputs, strict=True)):
        routed = _routed(given)
        pairs, smooth = int(routed.sum()), given.scales is not None
        rows = int(one.dispatched[4][case.experts - 1])
        published = pairs if smooth else int(routed.any(1).sum())
        moved = one.traffic[0]
        assert moved["written_window_data"] == published * wire + 4 * pairs, f"dispatch on rank {rank}"
        read = moved["read_window_data"]
        if case.cores < MANY_CORES or smooth or case.experts == case.world or given.expert_ids.shape[1] == 1:
            assert read == rows * (wire + 4), f"dispatch on rank {rank}"
        else:  # a row once for all experts, a list by some cores
            tokens = sum(int((_routed(of) & (_owner(case, of) == rank)).any(1).sum()) for of in case.inputs)
            least = tokens * wire + 4 * rows
            assert least <= read <= least + 4 * rows * (case.cores - 1), f"dispatch on rank {rank}"
        moved = one.traffic[1]
        # A rank's own rows are summed from expand_x.
        own = int((routed & (_owner(case, given) == rank)).sum())
        assert moved["written_window_data"] == (rows - own) * hidden * size, f"combine on rank {rank}"
        assert moved["read_window_data"] == (pairs - own) * hidden * size, f"combine on rank {rank}"


def _owner(case: Case, given: ref.RankInput) -> torch.Tensor:
    return given.expert_ids // (case.experts // case.world)


def _routed(given: ref.RankInput) -> torch.Tensor:
    live = given.expert_ids >= 0
    mask = given.x_active_mask
    return live if mask is None else live & (mask if mask.dim() == 2 else mask[:, None])


@pytest.mark.parametrize("first", range(0, 5 * PART, PART))
def test_equals_the_reference(clusters: Clusters, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_runs, "check_traffic", check_traffic)
    for seed in range(first, first + PART):
        case = drawn(seed)
        op_runs.check(case, op_runs.run(clusters[case.world], case))


@pytest.mark.parametrize("first", range(1000, 1000 + 3 * PART, PART))
def test_equals_window(clusters: Clusters, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(first, first + PART):
        case = drawn(seed)
        monkeypatch.setenv("ASCEND_MOE_COMM_ALG", "direct")
        direct = op_runs.run(clusters[case.world], case)
        monkeypatch.setenv("ASCEND_MOE_COMM_ALG", "window")
        window = op_runs.run(clusters[case.world], case)
        for one, other in zip(direct, window, strict=True):
            if not isinstance(one, RankRun) or not isinstance(other, RankRun):
                assert type(one) is type(other), (seed, one, other)
                assert str(one) == str(other)
                continue
            assert ref.same_bits(one.result, other.result), seed
            for got, want in zip(_defined(case, one), _defined(case, other), strict=True):
                assert ref.same_bits(got, want), seed


def _defined(case: Case, run: RankRun) -> list[torch.Tensor]:
    """What dispatch's outputs hold, without what is undefined behind it."""
    rows = int(run.dispatched[4][case.experts - 1])
    index = rows * 3 if case.contract == 2 else run.dispatched[2].numel()
    scales = rows if case.quant_mode else 0
    return [
        run.dispatched[0][:rows],
        run.dispatched[1][:scales],
        run.dispatched[2][:index],
        run.dispatched[3],
        run.dispatched[4][: case.experts],
        run.dispatched[5],
    ]


@pytest.mark.parametrize("algorithm", ["window", "direct"])
@pytest.mark.parametrize("cores", [1, 3, 16])
@pytest.mark.parametrize("quant", ["none", "int8"])
def test_a_row_of_x_is_read_once(
    clusters: Clusters, algorithm: str, cores: int, quant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever K and the owners of its experts, as long as every core has a token."""
    monkeypatch.setenv("ASCEND_MOE_COMM_ALG", algorithm)
    spec = Case(world=3, local=4, topk=6, units=256, batch=16, quant=quant, ids="distinct", cores=cores)
    case = replace(spec)
    row = case.inputs[0].x[0].numel() * case.inputs[0].x.element_size()
    for rank, one in enumerate(op_runs.run(clusters[3], case)):
        assert isinstance(one, RankRun), one
        rows = case.inputs[rank].x.shape[0]
        assert rows * row <= one.traffic[0]["read_tensor"] < (rows + 1) * row, rank
