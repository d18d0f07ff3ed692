"""vLLM's TopKWeightAndReduce weighs and sums rows, or leaves that to another."""

from __future__ import annotations

import pytest
import torch
from op_runs import Clusters
from routed_tokens import randn, routed
from vllm_parts import BF16, FP32, E, H, K, computed, impl_of, pair, part_of, prepared, three_calls

from ascend_moe.errors import ArgumentError


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("tokens", [0, 5])
def test_weights_and_sums(tokens: int, on_input: bool, dtype: torch.dtype) -> None:
    ids, weights = routed(tokens, E, K), randn(tokens, K, seed=1)
    rows = randn(tokens, K, H).to(dtype)
    expected, whole = torch.zeros(tokens, H), torch.ones(tokens, K) if on_input else weights
    for k in range(K):
        expected = expected + rows[:, k].float() * whole[:, k, None]
    contiguous = impl_of("Contiguous")
    for shape in ((tokens, K, H), (tokens * K, H)):
        assert torch.equal(contiguous.apply(None, rows.reshape(shape), weights, ids, on_input), expected.to(dtype))
    output = torch.empty(tokens, H, dtype=dtype)
    assert contiguous.apply(output, rows, weights, ids, on_input) is output and torch.equal(output, expected.to(dtype))
    parts = []
    for rank in range(2):
        batched = torch.full((E // 2, 9, H), float("nan"), dtype=dtype)
        used = [0] * E
        for token in range(tokens):
            for k, expert in enumerate(ids[token].tolist()):
                if expert // (E // 2) == rank:
                    batched[expert % (E // 2), used[expert]] = rows[token, k]
                    used[expert] += 1
        parts.append(impl_of("NaiveBatched", rank).apply(None, batched.nan_to_num(7.0), weights, ids, on_input))
    torch.testing.assert_close(parts[0] + parts[1], expected.to(dtype), rtol=1e-2, atol=1e-2)
    no_op = impl_of("NoOP")
    assert no_op.apply(None, rows, weights, ids, on_input) is rows
    copy = torch.empty_like(rows)
    assert no_op.apply(copy, rows, weights, ids, on_input) is copy and torch.equal(copy, rows)


def test_delegate_leaves_the_choice_and_classes_compare() -> None:
    delegate = impl_of("Delegate")
    with pytest.raises(ArgumentError, match="leaves the choice to finalize"):
        delegate.apply(None, torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), False)
    assert delegate == impl_of("Delegate") != impl_of("NoOP")
    assert impl_of("NaiveBatched", 1) == impl_of("NaiveBatched", 1) != impl_of("NaiveBatched", 2)
    assert len({delegate, impl_of("Delegate"), impl_of("Contiguous")}) == 2


@pytest.mark.parametrize("name", ["NoOP", "Contiguous"])
def test_standard_rows_take_any_of_them(clusters: Clusters, name: str) -> None:
    """A row is a token of one expert with weight 1 there."""

    def run(rank: int, group: str) -> None:
        part = part_of(0, 1, 4)
        way, experts = pair("mc2", 0, 1, group)
        came, made = prepared(way, part), torch.empty_like(part.x)
        way.finalize(made, computed(experts, part, came), came[4], came[3], False, impl_of(name))
        assert torch.equal(made, three_calls(part, 0, 1, group, 4))

    clusters[1].run(run)
