"""Zero, copy and const experts: no row travels to them, and combine adds their terms at their place in k."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import op_runs
import pytest
import torch
from op_runs import Clusters
from torch_calls import local_addends

import ascend_moe.reference as ref
from ascend_moe.call import SpecialExperts
from ascend_moe.reference import cases
from ascend_moe.reference.cases import Case

pytestmark = pytest.mark.parametrize("algorithm", ["window", "direct"])
BASE = Case(contract=2, local=2, topk=4, batch=9, cores=5, shared=2, batches="zero rank", ids="mixed")


def case_with(*special: int, **changes: Any) -> Case:
    """``BASE`` with these zero, copy and const experts, and other changes."""
    return replace(BASE, **SpecialExperts(*special)._asdict(), **changes)


def run(clusters: Clusters, case: Case) -> list[Any]:
    """Runs a case, and compares every bit and every byte moved with the reference."""
    case = cases.legal(case)
    runs = op_runs.run(clusters[case.world], case)
    op_runs.check(case, runs)
    return runs


def test_rows_in_parts(clusters: Clusters) -> None:
    """Cores that share H find the same factors; rows of 300 elements end within a chunk of a dot product."""
    for width in (304, 2560, 7168):
        for cores in (1, 3, 24, 48):
            run(clusters, case_with(1, 1, 3, alphas=2, width=width, cores=cores, batch=3, seed=cores))


def test_more_picks_than_experts(clusters: Clusters) -> None:
    """K is 12, E is 4; and 32, which is the most, of 2 and 1024 of each other kind."""
    run(clusters, case_with(4, 4, 0, topk=12, ids="distinct"))
    run(clusters, case_with(1024, 1024, 1024, local=1, topk=32, ids="distinct", alphas=1))


def test_inputs_may_share_memory(clusters: Clusters) -> None:
    """They begin at one address with unequal lengths, or overlap."""
    table = torch.linspace(-2, 2, 6 * 32).reshape(6, 32)
    ids = torch.tensor([[0, 2, 4], [1, 3, 5], [3, 0, 5]], dtype=torch.int32)  # 2: zero, 3: copy, 4 and 5: const
    threes, twos = [table[:3], table[1:4], table[2:5]], [table[:2], table[1:3]]
    for ori_x, shared, consts, alphas in itertools.product(threes, threes, twos, twos):
        own = {"ori_x": ori_x, "const_expert_v": consts, **local_addends(shared)}
        own |= {"const_expert_alpha_1": alphas, "const_expert_alpha_2": alphas}
        given = ref.RankInput(table[:3], ids, expert_scales=torch.ones(3, 3), **own)
        run(clusters, Case.of([given, given], 2, contract=2, **SpecialExperts(1, 1, 2).given))


def test_an_id_behind_the_last(clusters: Clusters) -> None:
    """The message says which ids there are: with a core that makes lists, and without."""
    for cores in (2, 16):
        case = cases.legal(case_with(2, 1, 2, ids="bad", cores=cores, batches="equal", seed=1))
        runs = op_runs.run(clusters[case.world], case)
        op_runs.check(case, runs)
        assert "0..8" in str(runs[0]), runs[0]
