"""Combine publishes rows of window tensors in place: every bit is the reference's, on any mix of ranks."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import op_runs
import pytest
import torch
from op_runs import Clusters
from zero_copy_runs import check_traffic, drawn, registering

import ascend_moe
from ascend_moe.comm import lookup
from ascend_moe.ops import calls

SETTINGS = {"ASCEND_MOE_COMM_ALG": "direct"}
DOC = Path(__file__).resolve().parents[3] / "docs" / "layers.md"


@pytest.mark.parametrize(
    ("first", "share"),
    [
        (0, 1.0),
        (5000, 0.5),
        *(pytest.param(first, 1.0, marks=pytest.mark.nightly) for first in range(50, 300, 50)),
        *(pytest.param(first, 0.5, marks=pytest.mark.nightly) for first in range(5050, 5200, 50)),
    ],
)
def test_rows_in_place_equal_the_reference(clusters: Clusters, first: int, share: float) -> None:
    sound = 0
    for seed in range(first, first + 50):
        case, rng = replace(drawn(seed), comm_quant_mode=0), random.Random(seed)
        registers = [rng.random() < share for _ in range(case.world)]
        runs = op_runs.run(clusters[case.world], case, registering(registers))
        sound += op_runs.check(case, runs, functools.partial(check_traffic, registers))
    assert sound > 25


def test_the_example_of_the_page_gives_what_the_copying_combine_gives() -> None:
    world, experts, hidden, inner = 2, 4, 64, 32
    (code,) = [code for code in DOC.read_text().split("```") if code.startswith("python\n") and "window_empty" in code]
    names: dict[str, Any] = {}
    exec(compile(code.removeprefix("python"), str(DOC), "exec"), names)

    def work(rank: int, group: str) -> tuple[torch.Tensor, int, int]:
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(8, hidden, generator=generator).bfloat16()
        ids = torch.randint(0, experts, (8, 2), generator=generator, dtype=torch.int32)
        weights = torch.rand(8, 2, generator=generator)
        gate_up = torch.randn(2, hidden, 2 * inner, generator=generator).bfloat16()
        down = torch.randn(2, inner, hidden, generator=generator).bfloat16()
        place = {"group_ep": group, "ep_world_size": world, "ep_rank_id": rank}
        result = names["moe"](x, ids, weights, gate_up, down, **place)
        moved = calls.traffic(lookup(group, world, rank))
        return result, moved["written_window_data"], moved["read_window_registered"]

    with ascend_moe.LocalCluster(world, window_mib=1) as cluster:
        registered = cluster.run(work)
        # The package with tensors of torch in the place of window tensors.
        plain = {"window_empty": lambda shape, dtype, **_: torch.empty(shape, dtype=dtype)}
        names["ascend_moe"] = SimpleNamespace(**{**vars(ascend_moe), **plain})
        copied = cluster.run(work)
    for one, two in zip(registered, copied, strict=True):
        assert torch.equal(one[0], two[0]) and one[0].any()
        assert one[1] < 256 and one[2] == 8 * 2 * hidden * 2  # a table; a row a pair
        assert two[1] > 4 * hidden * 2 and two[2] == 0
