"""Routing operators against scalar loops: expanding, gating, counting, moving rows and back, balancing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch_npu_calls import ids, values

from ascend_moe.errors import ArgumentError
from ascend_moe.npu import (
    npu_moe_compute_expert_tokens,
    npu_moe_finalize_routing,
    npu_moe_gating_top_k_softmax,
    npu_moe_init_routing,
    npu_moe_init_routing_v2,
    npu_moe_re_routing,
    npu_moe_token_permute,
    npu_moe_token_unpermute,
    npu_moe_update_expert,
)

HIDDEN = 8


# ---- npu_moe_init_routing


@pytest.mark.parametrize("active", [0, 2, 6, 99])
@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_init_routing_is_the_formula(tokens: int, active: int) -> None:
    topk = 3
    x, chosen = values(tokens, HIDDEN, dtype=torch.bfloat16), ids(tokens, topk, top=4)
    _, _, names = npu_moe_gating_top_k_softmax(values(tokens, 4), None, topk)
    rows, places, experts = npu_moe_init_routing(x, names, chosen, active)
    pairs = sorted((int(chosen[t, j]), t * topk + j, t, j) for t in range(tokens) for j in range(topk))
    assert experts.tolist() == [expert for expert, *_ in pairs]
    assert rows.shape == (min(tokens, active) * topk, HIDDEN) and rows.dtype == torch.bfloat16
    for place, (_, _, t, j) in enumerate(pairs):
        assert places[j * tokens + t] == place  # named by columns
        if place < len(rows):
            assert torch.equal(rows[place], x[t])


# ---- npu_moe_init_routing_v2


def half(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float16)


def quantized(x: np.ndarray, mode: int, scale: Any, offset: Any, expert: int) -> tuple[np.ndarray, float]:
    """A row's codes and scale."""
    if mode == -1:
        return x, 0.0
    if mode == 0:
        value = half(half(x) * half(scale)[0])
        value = value if offset is None else half(value + half(offset)[0])
        return np.clip(np.rint(value), -128, 127), 0.0
    value = x.astype(np.float32)
    if scale is not None:
        value = value * scale[0 if len(scale) == 1 else expert]
    found = np.abs(value).max() / np.float32(127)
    return np.rint(value / found), float(found)


def expanded(x: np.ndarray, chosen: np.ndarray, call: dict[str, Any]) -> tuple[Any, ...]:
    """One pair after the other, into lists an expert."""
    tokens, topk = chosen.shape
    first, stop = call["active_expert_range"] or (0, call["expert_num"])
    mode, capacity = call["quant_mode"], call["expert_capacity"]
    lists: dict[int, list[int]] = {expert: [] for expert in range(first, stop)}
    for pair in range(tokens * topk):
        if first <= chosen.flat[pair] < stop:
            lists[int(chosen.flat[pair])].append(pair)
    drop = call["drop_pad_mode"] == 1
    limit = tokens * topk if call["active_num"] <= 0 else min(call["active_num"], tokens * topk)
    rows = call["expert_num"] * capacity if drop else limit
    out, scales = np.zeros((rows, x.shape[1])), np.zeros(rows)
    index = np.full(tokens * topk, -1)
    row, order = 0, []
    for expert, members in lists.items():
        for position, pair in enumerate(members):
            order.append(pair)
            place = expert * capacity + position if drop else row
            row += 1
            if drop and position >= capacity:
                continue
            index[pair] = place
            if place < rows:
                scale, value = call["scale"], x[pair // topk]
                out[place], scales[place] = quantized(value, mode, scale, call["offset"], expert - first)
                if mode == -1 and scale is not None:
                    scales[place] = scale[pair // topk]
    if call["row_idx_type"] == 1:
        index = np.array(order + [-1] * (tokens * topk - len(order)))
    counts = [len(members) for members in lists.values()]
    pairs = [[expert, len(members)] for expert, members in lists.items() if members]
    pairs += [[0, 0]] * (call["expert_num"] - len(pairs))
    tokens_of = np.cumsum(counts).tolist(), counts, pairs
    return out, index, tokens_of[call["expert_tokens_num_type"]], scales


BASE: dict[str, Any] = {
    "scale": None, "offset": None, "active_num": -1, "expert_capacity": -1, "expert_num": 6,
    "drop_pad_mode": 0, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True, "quant_mode": -1,
    "active_expert_range": [], "row_idx_type": 0,
}  # fmt: skip
ONE = torch.tensor([30.0])
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "with scales": {"scale": values(9, seed=5)},
    "static": {"quant_mode": 0, "scale": ONE},
    "static with offset": {"quant_mode": 0, "scale": ONE * 3, "offset": -ONE},
    "dynamic": {"quant_mode": 1},
    "dynamic, one smoothing row": {"quant_mode": 1, "scale": values(1, HIDDEN, seed=6).abs()},
    "dynamic, a smoothing row an expert": {"quant_mode": 1, "scale": values(6, HIDDEN, seed=6).abs()},
}
FORMS: dict[str, dict[str, Any]] = {
    "all": {},
    "running sums": {"expert_tokens_num_type": 0},
    "pairs": {"expert_tokens_num_type": 2, "active_expert_range": [1, 5]},
    "scatter": {"row_idx_type": 1, "active_expert_range": [2, 6]},
    "a range": {"active_expert_range": [2, 4]},
    "an empty range": {"active_expert_range": [5, 6]},
    "few rows": {"active_num": 4, "active_expert_range": [0, 5]},
    "all rows": {"active_num": 99},
    "dropped": {"drop_pad_mode": 1, "expert_capacity": 2},
    "padded": {"drop_pad_mode": 1, "expert_capacity": 20},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", MODES)
def test_init_routing_v2_is_a_loop_over_pairs(mode: str, form: str) -> None:
    call = BASE | MODES[mode] | FORMS[form]
    if mode.endswith("an expert") and call["active_expert_range"]:
        call["scale"] = call["scale"][slice(*call["active_expert_range"])]
    for seed, dtype in ((0, torch.float32), (1, torch.bfloat16), (2, torch.float16)):
        x, chosen = values(9, HIDDEN, dtype=dtype, seed=seed), ids(9, 3, seed=seed, top=5)
        chosen[seed, 1] = -1
        chosen[3, 2] = 5 if seed == 1 else 99
        numpied = {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in call.items()}
        found = npu_moe_init_routing_v2(x, chosen, **call)
        rows, index, tokens, scales = expanded(x.float().numpy(), chosen.numpy(), numpied)
        assert found[0].dtype == (dtype if call["quant_mode"] == -1 else torch.int8)
        assert np.array_equal(found[0].reshape(len(rows), HIDDEN).float().numpy(), rows)
        assert found[1].dtype == torch.int32 and found[1].tolist() == index.tolist()
        assert found[2].dtype == torch.int64 and found[2].tolist() == tokens
        assert np.array_equal(found[3].double().numpy(), scales)


def test_init_routing_v2_moves_int8_as_it_is() -> None:
    x = torch.arange(-20, 20, dtype=torch.int8).reshape(5, 8)
    chosen = ids(5, 2, top=3)
    rows, places, tokens, _ = npu_moe_init_routing_v2(x, chosen, expert_num=3)
    assert rows.dtype == torch.int8 and tokens.tolist() == [0] * 3  # not asked for
    for pair, place in enumerate(places.tolist()):
        assert torch.equal(rows[place], x[pair // 2])
    for own in (torch.int8, 1, 258):  # as vllm-ascend passes it; torch's number, torch_npu's number
        assert torch.equal(npu_moe_init_routing_v2(x, chosen, expert_num=3, x_dtype=own)[0], rows)
    with pytest.raises(ArgumentError, match=r"x_dtype is torch\.int32; off the NPU it must be x's own, torch\.int8"):
        npu_moe_init_routing_v2(x, chosen, expert_num=3, x_dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"x is torch\.int8"):
        npu_moe_init_routing_v2(x, chosen, expert_num=3, quant_mode=1)


# ---- npu_moe_compute_expert_tokens


@pytest.mark.parametrize("rows", [[], [0], [0, 0, 0, 1, 1, 2], [2, 2, 2], [0, 3, 4, 4]])
def test_expert_tokens_are_running_sums(rows: list[int]) -> None:
    found = npu_moe_compute_expert_tokens(torch.tensor(rows, dtype=torch.int32), 4)
    assert found.dtype == torch.int32
    assert found.tolist() == [sum(1 for row in rows if row <= expert) for expert in range(4)]


# ---- permute


def finalized(
    rows: np.ndarray, places: np.ndarray, scales: Any, skips: Sequence[Any], bias: Any, experts: Any
) -> np.ndarray:
    """The formula of torch_npu's documents in float32, one k after the other. places is (T, K)."""
    out = np.zeros((len(places), rows.shape[-1]), np.float32)
    for skip in skips:
        out = out if skip is None else out + skip
    for k in range(places.shape[1]):
        value = np.where(places[:, k, None] < 0, np.float32(0), rows[places[:, k]])
        value = value if bias is None else value + bias[experts[:, k]]
        out = out + (value if scales is None else value * scales[:, k, None])
    return out


@pytest.mark.parametrize("wanted", [None, 0, 4, 99, -3])
@pytest.mark.parametrize("topk", [0, 1, 3])  # 0: one dimension
@pytest.mark.parametrize("tokens", [3, 6])
def test_permute_is_a_stable_sort(tokens: int, topk: int, wanted: int | None) -> None:
    x = values(tokens, HIDDEN, dtype=torch.bfloat16)
    chosen = ids(*((tokens, topk) if topk else (tokens,)), top=3)
    rows, places = npu_moe_token_permute(x, chosen, wanted)
    flat = chosen.flatten().tolist()
    order = sorted(range(len(flat)), key=lambda pair: (flat[pair], pair))
    kept = order if not wanted else order[:wanted] if wanted > 0 else order[: len(order) + wanted]
    assert rows.shape == (len(kept), HIDDEN) and rows.dtype == torch.bfloat16
    for place, pair in enumerate(order):
        assert places[pair] == place
        if place < len(kept):
            assert torch.equal(rows[place], x[pair // max(topk, 1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weighted", [False, True])
def test_unpermute_sums_in_float32_in_the_order_of_k(dtype: torch.dtype, weighted: bool) -> None:
    tokens, topk = 6, 3 if weighted else 1
    rows = values(tokens * topk - 2, HIDDEN, dtype=dtype)
    places = torch.randperm(tokens * topk, generator=torch.Generator().manual_seed(1)).int()
    places[0] = -1  # no row, as the two places behind the last one
    probs = values(tokens, topk, seed=2, dtype=dtype) if weighted else None
    found = npu_moe_token_unpermute(rows, places, probs)
    known = torch.where(places < len(rows), places, -1).reshape(tokens, topk).numpy()
    weights = None if probs is None else probs.float().numpy()
    expected = finalized(rows.float().numpy(), known, weights, (), None, None)
    assert found.dtype == dtype and torch.equal(found, torch.from_numpy(expected).to(dtype))
    # vllm-ascend passes it always; it counts in padded mode only.
    assert torch.equal(npu_moe_token_unpermute(rows, places, probs, restore_shape=[tokens, HIDDEN]), found)


# ---- finalize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extras", ["none", "scales", "skip1", "all"])
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_finalize_routing_is_the_formula(mode: int, extras: str, dtype: torch.dtype) -> None:
    tokens, topk, experts, capacity = 5, 2, 3, 4
    count = experts * capacity if mode % 2 else tokens * topk
    rows = values(count, HIDDEN, dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    flat = torch.randint(-1 if mode else 0, count, (tokens * topk,), generator=generator)
    chosen = ids(tokens, topk, top=experts)
    everything = extras == "all"
    scales = values(tokens, topk, dtype=dtype, seed=4) if extras in ("scales", "all") else None
    skip1 = values(tokens, HIDDEN, dtype=dtype, seed=5) if extras in ("skip1", "all") else None
    skip2 = values(tokens, HIDDEN, dtype=dtype, seed=6) if everything else None
    bias = values(experts, HIDDEN, dtype=dtype, seed=7) if everything else None
    given = rows.reshape(experts, capacity, HIDDEN) if mode % 2 else rows
    found = npu_moe_finalize_routing(
        given, skip1, skip2, bias, scales, flat.int(), chosen if everything else None, mode, topk
    )
    places = flat.reshape(tokens, topk) if mode >= 2 else flat.reshape(topk, tokens).t()
    wide = [None if tensor is None else tensor.float().numpy() for tensor in (scales, skip1, skip2, bias)]
    expected = finalized(rows.float().numpy(), places.numpy(), wide[0], wide[1:3], wide[3], chosen.numpy())
    assert found.dtype == dtype and torch.equal(found, torch.from_numpy(expected).to(dtype))


# ---- re-routing


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (4, 1), (1, 5)])
def test_re_routing_is_a_loop_over_ranks(shape: tuple[int, int], tail: int, dtype: torch.dtype) -> None:
    counts = ids(*shape, top=4)
    counts[0, 0] = 0 if shape != (1, 1) else 2
    total = int(counts.sum())
    tokens = (values(total + tail, HIDDEN) * 9).to(dtype)
    scales = values(total + tail, seed=3)
    found, moved, index, sums = npu_moe_re_routing(tokens, counts, per_token_scales=scales)
    # Rows come by rank, then expert, and leave by expert, then rank.
    numbers = counts.flatten().tolist()
    blocks = np.split(np.arange(total), np.cumsum(numbers)[:-1])
    order = [int(row) for expert in range(shape[1]) for block in blocks[expert :: shape[1]] for row in block]
    assert index.dtype == torch.int32 and index.tolist() == order + [0] * tail
    assert torch.equal(found[:total], tokens[order]) and torch.equal(moved[:total], scales[order])
    assert not found[total:].any() and not moved[total:].any()
    assert sums.dtype == counts.dtype and sums.tolist() == counts.sum(0).tolist()
    plain = npu_moe_re_routing(tokens, counts)
    assert torch.equal(plain[0], found) and plain[1].shape == (len(tokens),)


# ---- npu_moe_update_expert


def updated(chosen: Any, table: Any, mode: int, rank: int, world: int) -> list[list[int]]:
    def copy_of(expert: int, token: int) -> int:
        if expert < 0:
            return -1
        count, *places = table[expert]
        return int(places[token % count if mode else rank // math.ceil(world / count)])

    return [[copy_of(expert, token) for expert in row] for token, row in enumerate(chosen)]


TABLE = [[1, 7, 0, 0, 0], [4, 0, 2, 4, 6], [2, 1, 3, 0, 0], [3, 5, 8, 9, 0]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("world", [1, 4, 6, 7])
@pytest.mark.parametrize("mode", [0, 1])
def test_update_expert_is_a_loop(mode: int, world: int, dtype: torch.dtype) -> None:
    table = torch.tensor(TABLE, dtype=torch.int32)
    used = set()
    for rank in range(world):
        chosen = ids(11, 3, seed=rank, top=4).to(dtype)
        chosen[rank, 0] = -1
        found, mask = npu_moe_update_expert(chosen, table, local_rank_id=rank, world_size=world, balance_mode=mode)
        assert found.dtype == dtype and mask.dtype == torch.bool and bool(mask.all())
        assert found.tolist() == updated(chosen.tolist(), TABLE, mode, rank, world)
        used |= set(found.flatten().tolist())
    if mode == 1:
        assert used == {-1, *range(10)}  # every copy of every expert gets tokens


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_update_expert_prunes_by_a_share_of_the_sum(dtype: torch.dtype, masked: bool) -> None:
    batch, topk, table = 13, 4, torch.tensor(TABLE, dtype=torch.int32)
    scales = values(batch, topk).abs().sort(descending=True).values.to(dtype)
    threshold = torch.tensor([0.0, 0.25, 0.2, 0.1])
    active = torch.arange(batch) < 9 if masked else None
    given = {"expert_scales": scales, "balance_mode": 1, "active_mask": active}
    given["pruning_threshold"] = threshold.reshape(1, -1) if masked else threshold
    _, mask = npu_moe_update_expert(ids(batch, topk, top=4), table, **given)
    wide, total = scales.float().numpy(), np.zeros((batch, 1), np.float32)
    for k in range(topk):
        total += wide[:, k, None]
    kept = (wide >= threshold.numpy() * total) & (not masked or active.numpy()[:, None])
    assert np.array_equal(mask.numpy(), kept) and 0 < kept.sum() < kept.size
    # A pair exactly at the threshold is kept.
    given = {"expert_scales": torch.tensor([[0.5, 0.25, 0.25]]), "balance_mode": 1}
    given["pruning_threshold"] = torch.tensor([0.5, 0.25, 0.250001])
    assert npu_moe_update_expert(ids(1, 3, top=4), table, **given)[1].tolist() == [[True, True, False]]
