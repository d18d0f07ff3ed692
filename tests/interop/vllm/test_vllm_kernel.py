"""vLLM's modular kernel gives with every pair of parts what the three calls and MoELayer give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_runs import Clusters
from vllm_parts import (
    BF16,
    FP32,
    KINDS,
    E,
    H,
    K,
    computed,
    each_kind,
    expert_map,
    pair,
    part_of,
    prepared,
    three_calls,
    windows,
)

from ascend_moe.errors import ConfigMismatch
from ascend_moe.interop import vllm
from ascend_moe.interop.vllm import experts as experts_module
from ascend_moe.interop.vllm import prepare_finalize


@each_kind
@pytest.mark.parametrize("dtype, w8a8", [(BF16, False), (BF16, True), (FP32, False)], ids=["bf16", "w8a8", "fp32"])
@pytest.mark.parametrize(
    "counts, ids",
    [
        *(([5], ids) for ids in ("random", "one expert", "-1")),
        ([5, 0], "random"),
        ([3, 7], "an expert without tokens"),
        ([3, 0, 5, 1], "random"),
        ([3, 0, 5, 1], "one expert"),
        ([0, 0], "random"),
    ],
    ids=str,
)
def test_a_pair_equals_the_three_calls(
    clusters: Clusters, counts: list[int], ids: str, dtype: torch.dtype, w8a8: bool, kind: str
) -> None:
    world = len(counts)

    def run(rank: int, group: str) -> None:
        part = part_of(rank, world, counts[rank], ids, dtype, w8a8, topk=1 if ids == "one expert" else K)
        expected = three_calls(part, rank, world, group, max(counts))
        kernel = vllm.FusedMoEModularKernel(*pair(kind, rank, world, group, part.config))
        assert torch.equal(kernel(*part.inputs()), expected)
        wide, x = part.ids.long(), part.x.clone()
        given = {"global_num_experts": E, "expert_map": expert_map(rank, world), "inplace": True}
        assert kernel(x, part.w1, part.w2, part.weights, wide, **given) is x and torch.equal(x, expected)

    clusters[world].run(run)


def test_shared_experts_and_weights_on_the_input(clusters: Clusters) -> None:
    def run(rank: int, group: str) -> None:
        part = part_of(rank, 2, 4, dtype=FP32, topk=1)
        part = part._replace(weights=part.weights * torch.tensor([[0.5], [1.5], [2.0], [-1.0]]))
        shared = torch.nn.Linear(H, H)
        for kind in KINDS:
            kernel = vllm.FusedMoEModularKernel(*pair(kind, rank, 2, group), shared)
            both = kernel(*part.inputs(), inplace=True, apply_router_weight_on_input=True)
            assert torch.equal(both[0], shared(part.x))
            weighted = part._replace(x=part.x * part.weights, weights=torch.ones(4, 1))
            assert torch.equal(both[1], three_calls(weighted, rank, 2, group, 4))

    clusters[2].run(run)


def test_windows_read_nothing_on_the_host(clusters: Clusters, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph can hold prepare and finalize of standard rows; the map is looked at once."""

    def run(rank: int, group: str) -> None:
        part, given = part_of(0, 1, 3), expert_map(0, 1)
        way, experts = pair("mc2", 0, 1, group)

        def prepare() -> Any:
            return way.prepare(part.x, part.weights, part.ids, E, given, False, None)

        def finalize(came: Any, rows: torch.Tensor) -> torch.Tensor:
            made = torch.empty_like(part.x)
            way.finalize(made, rows, came[4], came[3], False, experts.finalize_weight_and_reduce_impl())
            return made

        came = prepare()
        rows = computed(experts, part, came)
        first = finalize(came, rows)
        with monkeypatch.context() as patch:
            for name in ("item", "cpu", "tolist", "numpy", "__bool__", "__int__", "__index__"):
                patch.setattr(torch.Tensor, name, property())
            second = finalize(prepare(), rows)
        assert torch.equal(first, second)

    clusters[1].run(run)


@windows
def test_shapes_stay_as_on_an_npu(clusters: Clusters, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Where rows in use are not counted on the host, the same bits."""
    for module in (prepare_finalize, experts_module):
        monkeypatch.setattr(module, "on_npu", lambda tensor: True)

    def run(rank: int, group: str) -> None:
        part = part_of(rank, 2, 5 * rank)
        kernel = vllm.FusedMoEModularKernel(*pair(kind, rank, 2, group))
        assert torch.equal(kernel(*part.inputs()), three_calls(part, rank, 2, group, 5))

    clusters[2].run(run)


def test_ranks_with_different_limits_are_refused(clusters: Clusters) -> None:
    def run(rank: int, group: str) -> None:
        way, _ = pair("mc2", rank, 2, group, max_num_tokens=16 + rank)
        with pytest.raises(ConfigMismatch, match="global_bs is"):
            prepared(way, part_of(rank, 2, 3))

    clusters[2].run(run)
