"""comm_alg="direct" gives every output bit for bit as the reference, and reads each row of x once."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import op_runs
import pytest
from direct_cases import MANY_EXPERTS, drawn
from op_runs import Clusters, RankRun

from ascend_moe.reference.cases import BATCHES, QUANTS, Case, draw


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


@pytest.mark.parametrize("algorithm", ["window", "direct"])
@pytest.mark.parametrize("cores", [1, 3, 16])
@pytest.mark.parametrize("quant", ["none", "int8"])
def test_a_row_of_x_is_read_once(
    clusters: Clusters, algorithm: str, cores: int, quant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever K and the owners of its experts, as long as every core has a token."""
    monkeypatch.setenv("ASCEND_MOE_COMM_ALG", algorithm)
    case = Case(world=3, local=4, topk=6, units=256, batch=16, **QUANTS[quant], ids="distinct", cores=cores)
    row = case.hidden * case.torch_dtype.itemsize
    for rank, one in enumerate(op_runs.run(clusters[3], case)):
        assert isinstance(one, RankRun), one
        rows = case.inputs[rank].x.shape[0]
        assert rows * row <= one.traffic[0]["read_tensor"] < (rows + 1) * row, rank
