"""vLLM's FusedMoE over aligned blocks: blocks equal loops, the layer equals dispatch and combine."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import threads
from host_reads import no_host_reads
from routed_tokens import ROUTED, randn, routed

from ascend_moe import LocalCluster
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.errors import ArgumentError
from ascend_moe.experts import Activation, grouped_mlp
from ascend_moe.interop.fused_moe import (
    all_reduce_dp,
    all_reduce_tp,
    batched_moe_align_block_size,
    fused_experts,
    moe_align_block_size,
    moe_sum,
    naive_multicast,
)
from ascend_moe.interop.vllm import int8_w8a8_moe_quant_config
from ascend_moe.placement import ExpertPlacement

FP32, BF16, NAN = torch.float32, torch.bfloat16, float("nan")
E, K, H, F = 8, 3, 32, 16


def running_sums(counts: list[int]) -> torch.Tensor:
    return torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32)


def on_ranks(world: int, body: Callable[[int, dist.ProcessGroup], Any]) -> list[Any]:
    return threads(world).run(body)


BATCHES = {1: [[5], [0]], 2: [[5, 2], [0, 3], [0, 0]], 4: [[3, 0, 5, 1], [0, 0, 0, 7]]}
WORLDS = [(world, counts) for world, cases in BATCHES.items() for counts in cases]


def test_multicast_refuses_counts_that_do_not_fit() -> None:
    group = threads(2).groups[0]
    for ends, rule in (
        (torch.tensor([2, 3]), r"x has 4 tokens, but cu_tokens_across_dp 2 for rank 0"),
        (torch.tensor([4, 3]), r"which never decrease"),
        (torch.tensor([4]), r"cu_tokens_across_dp is \(1,\)"),
    ):
        with pytest.raises(ArgumentError, match=rule):
            naive_multicast(torch.zeros(4, 2), ends, group)


def test_alignment_reads_nothing_on_the_host() -> None:
    ids, expert_map = routed(5, E, K), torch.arange(E, dtype=torch.int32) - 4
    with no_host_reads():
        moe_align_block_size(ids, 4, E)
        moe_align_block_size(ids, 4, E, expert_map.clamp(min=-1), True, True)
        batched_moe_align_block_size(5, 4, torch.tensor([1, 5, 0]))


@functools.cache
def weights(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    w1 = randn(E, 2 * F, H, seed=3) / H**0.5
    return w1.to(dtype), (randn(E, H, F, seed=4) / F**0.5).to(dtype)


def dispatched(x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """The same layer by dispatch, experts and combine, on one rank."""
    w1, w2 = weights(x.dtype)

    def body(rank: int, group_ep: str) -> torch.Tensor:
        dispatcher = MC2Dispatcher(group_ep, 1, 0, E)
        sent = dispatcher.dispatch(x, ids)
        rows = grouped_mlp(sent.expand_x, w1.transpose(1, 2), w2.transpose(1, 2), sent.expert_token_nums)
        return dispatcher.combine(rows, sent, probs)

    with LocalCluster(1) as cluster:
        return cluster.run(body)[0]


def assert_one_rounding(found: torch.Tensor, expected: torch.Tensor) -> None:
    rtol, atol = (1e-5, 1e-6) if found.dtype == FP32 else (2**-8, 2**-12)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN."""
    for place, name in ((torch, "empty"), (torch.Tensor, "new_empty"), (torch, "empty_like")):
        plain = getattr(place, name)

        def fill(*args: Any, plain: Callable[..., torch.Tensor] = plain, **kwargs: Any) -> torch.Tensor:
            made = plain(*args, **kwargs)
            return made.fill_(NAN) if made.is_floating_point() else made

        monkeypatch.setattr(place, name, fill)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("ignore", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("tokens", "kind"), ROUTED)
def test_parts_of_all_ranks_are_the_layer(tokens: int, kind: str, dtype: torch.dtype, world: int, ignore: bool) -> None:
    x, ids, probs = randn(tokens, H).to(dtype), routed(tokens, E, K, kind), randn(tokens, K, seed=6).softmax(1)
    (w1, w2), placement = weights(dtype), ExpertPlacement.contiguous(E, world)
    whole = dispatched(x, ids, probs)

    def part(rank: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        first, last = placement.range_of(rank)
        given = {"expert_map": placement.expert_map(rank), "global_num_experts": E, "ignore_invalid_experts": ignore}
        mine = (x, w1[first : last + 1], w2[first : last + 1], probs, ids)
        partial = fused_experts(*mine, **given, out_dtype=FP32, block_size=4)
        away = ~((ids >= first) & (ids <= last)).any(1)
        assert not partial[away].any()  # a token without a local expert
        assert torch.equal(fused_experts(*mine, **given, block_size=4), partial.to(dtype))
        return partial, all_reduce_tp(partial, group).to(dtype)

    for _, found in on_ranks(world, part):
        assert_one_rounding(found, whole)
    assert bool(whole.isfinite().all())


def test_weights_may_be_on_the_input_and_results_in_place() -> None:
    x, ids, probs = randn(9, H), routed(9, E, 1), torch.rand(9, 1)
    w1, w2 = weights(FP32)
    found = fused_experts(x, w1, w2, probs, ids, apply_router_weight_on_input=True)
    assert_one_rounding(found, dispatched(x * probs, ids, torch.ones(9, 1)))
    half, (h1, h2) = x.to(BF16), weights(BF16)
    rounded = (half.float() * probs).to(BF16)  # once
    found = fused_experts(half, h1, h2, probs, ids, apply_router_weight_on_input=True)
    assert torch.equal(found, fused_experts(rounded, h1, h2, torch.ones(9, 1), ids))
    expected, memory = fused_experts(x, w1, w2, probs, ids), x.clone()
    assert fused_experts(memory, w1, w2, probs, ids, inplace=True) is memory
    assert torch.equal(memory, expected) and not torch.equal(memory, x)
    gelu = fused_experts(x, w1, w2, probs, ids, activation="gelu")
    for inplace in ((), (False,)):
        assert torch.equal(fused_experts(x, w1, w2, probs, ids, *inplace, "gelu"), gelu)


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"activation": "mish"}, r"'mish'"),
        ({"activation": Activation("situ")}, r"which has no gate"),
        ({"activation": "situ"}, r"activation is 'situ', which needs activation_situ_beta in make_experts"),
        ({"quant_config": int8_w8a8_moe_quant_config(*[torch.ones(1)] * 2)}, r"quant_config has int8 rows"),
        ({"apply_router_weight_on_input": True}, r"needs K = 1; topk_ids has K = 3"),
        ({"global_num_experts": 16}, r"global_num_experts is 16; without expert_map"),
        ({"expert_map": torch.zeros(3, dtype=torch.int32)}, r"expert_map is \(3,\); it must be \(8,\)"),
        ({"topk_ids": torch.zeros(4, K, dtype=torch.int32)}, r"topk_ids is \(4, 3\) for 5 tokens"),
        ({"topk_weights": torch.zeros(5, 1)}, r"topk_weights is \(5, 1\); it must be \(5, 3\)"),
        ({"w1": torch.zeros(E, 2 * F, H + 1)}, r"w1 is \(8, 32, 33\)"),
        ({"w2": torch.zeros(E, H, F, dtype=BF16)}, r"w2 is torch.bfloat16"),
        ({"inplace": True, "out_dtype": BF16}, r"inplace needs out_dtype"),
        ({"block_size": 0}, r"block_size is 0"),
    ],
)
def test_wrong_arguments_are_refused(changed: dict[str, Any], rule: str) -> None:
    w1, w2 = weights(FP32)
    given: dict[str, Any] = {"hidden_states": randn(5, H), "w1": w1, "w2": w2}
    given |= {"topk_weights": torch.ones(5, K), "topk_ids": routed(5, E, K), **changed}
    with pytest.raises(ArgumentError, match=rule):
        fused_experts(**given)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("tokens", [0, 7])
def test_moe_sum_adds_in_order_in_float32(tokens: int, dtype: torch.dtype) -> None:
    x = randn(tokens, K, H).to(dtype)
    expected = torch.zeros(tokens, H)
    for k in range(K):
        expected = expected + x[:, k].float()
    assert torch.equal(moe_sum(x), expected.to(dtype))
    out = torch.full((tokens, H), NAN)
    assert moe_sum(x, out) is out and torch.equal(out, expected)
    with pytest.raises(ArgumentError, match=r"output is \(1, 32\)"):
        moe_sum(x, torch.empty(1, H))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("world", "counts"), WORLDS)
def test_a_slice_equals_dispatch_and_combine_of_its_tokens(world: int, counts: list[int], dtype: torch.dtype) -> None:
    """Every rank's slice equals dispatch and combine of its own tokens; an empty rank gets (0, H)."""
    total, ends, placement = sum(counts), running_sums(counts), ExpertPlacement.contiguous(E, world)
    x, ids, probs = randn(total, H).to(dtype), routed(total, E, K), randn(total, K, seed=6).softmax(1)
    w1, w2 = weights(dtype)
    mine = [part.split(counts) for part in (x, ids, probs)]

    def body(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        first, last = placement.range_of(rank)
        own = slice(first, last + 1)
        rows, chosen, scales = (naive_multicast(part[rank], ends, group) for part in mine)
        partial = fused_experts(
            rows, w1[own], w2[own], scales, chosen, expert_map=placement.expert_map(rank), global_num_experts=E,
            out_dtype=FP32,
        )  # fmt: skip
        before = partial.clone()
        found = all_reduce_dp(partial, ends, group)
        assert torch.equal(partial, before)
        return found.to(dtype)

    for rank, found in enumerate(on_ranks(world, body)):
        assert found.shape == (counts[rank], H)
        assert_one_rounding(found, dispatched(*(part[rank] for part in mine)))


def test_all_reduces_round_once() -> None:
    """Three parts of 2**-8 beside a 1: rounded one after the other they would vanish."""
    parts = [torch.full((2, 2), value, dtype=BF16) for value in (1.0, 2**-8, 2**-8, 2**-8)]
    ends = torch.tensor([0, 1, 1, 2])
    for rank, found in enumerate(on_ranks(4, lambda rank, group: all_reduce_dp(parts[rank], ends, group))):
        assert found.shape == (int(rank in (1, 3)), 2) and bool((found == torch.tensor(1 + 3 * 2**-8).bfloat16()).all())
    with pytest.raises(ArgumentError, match=r"it must have the 2 tokens of cu_tokens_across_dp"):
        all_reduce_dp(parts[0][:1], ends, threads(4).groups[0])
