"""Routing operators against scalar loops: expanding, gating, counting, moving rows and back, balancing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from vendor_calls import ids, values

from ascend_moe.errors import ArgumentError
from ascend_moe.npu import (
    npu_moe_compute_expert_tokens,
    npu_moe_finalize_routing,
    npu_moe_gating_top_k_softmax,
    npu_moe_gating_top_k_softmax_v2,
    npu_moe_init_routing,
    npu_moe_init_routing_v2,
    npu_moe_re_routing,
    npu_moe_token_permute,
    npu_moe_token_unpermute,
    npu_moe_update_expert,
)

HIDDEN = 8


def f32(value: float | np.ndarray) -> Any:
    return np.asarray(value, dtype=np.float32)


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


def quantised(x: np.ndarray, mode: int, scale: Any, offset: Any, expert: int) -> tuple[np.ndarray, float]:
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
                scale = call["scale"]
                out[place], scales[place] = quantised(
                    x[pair // topk], mode, scale, call["offset"], expert - first
                )
                if mode == -1 and scale is not None:
                    scales[place] = scale[pair // topk]
    if call["row_idx_type"] == 1:
        index = np.array(order + [-1] * (tokens * topk - len(order)))
    counts = [len(members) for members in lists.values()]
    return out, index, counted(counts, first, call), scales


def counted(counts: list[int], first: int, call: dict[str, Any]) -> list[Any]:
    kind = call["expert_tokens_num_type"]
    if kind == 2:
        pairs = [[first + e, count] for e, count in enumerate(counts) if count]
        return pairs + [[0, 0]] * (call["expert_num"] - len(pairs))
    return list(np.cumsum(counts)) if kind == 0 else counts


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
        assert found[2].dtype == torch.int64 and found[2].tolist() == [
            list(pair) if isinstance(pair, list) else pair for pair in tokens
        ]
        assert np.array_equal(found[3].double().numpy(), scales)


def test_init_routing_v2_moves_int8_as_it_is() -> None:
    x = torch.arange(-20, 20, dtype=torch.int8).reshape(5, 8)
    chosen = ids(5, 2, top=3)
    rows, places, tokens, _ = npu_moe_init_routing_v2(x, chosen, expert_num=3)
    assert rows.dtype == torch.int8 and tokens.tolist() == [0] * 3  # not asked for
    for pair, place in enumerate(places.tolist()):
        assert torch.equal(rows[place], x[pair // 2])
    with pytest.raises(ArgumentError, match=r"x is torch\.int8"):
        npu_moe_init_routing_v2(x, chosen, expert_num=3, quant_mode=1)


# ---- npu_moe_compute_expert_tokens


@pytest.mark.parametrize("rows", [[], [0], [0, 0, 0, 1, 1, 2], [2, 2, 2], [0, 3, 4, 4]])
def test_expert_tokens_are_running_sums(rows: list[int]) -> None:
    found = npu_moe_compute_expert_tokens(torch.tensor(rows, dtype=torch.int32), 4)
    assert found.dtype == torch.int32
    assert found.tolist() == [sum(1 for row in rows if row <= expert) for expert in range(4)]


# ---- npu_moe_gating_top_k_softmax_v2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("renorm", [0, 1])
@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6)])
def test_softmax_v2_is_the_formula(shape: tuple[int, ...], renorm: int, dtype: torch.dtype) -> None:
    x, topk = values(*shape, dtype=dtype), 3
    x.view(-1, 6)[1, 2:4] = 2.0  # a tie
    finished = torch.zeros(shape[:-1], dtype=torch.bool)
    finished.view(-1)[2] = True
    weights, chosen, softmax = npu_moe_gating_top_k_softmax_v2(
        x, k=topk, finished=finished, renorm=renorm, output_softmax=True
    )
    assert weights.dtype == dtype and chosen.dtype == torch.int32 and softmax.dtype == torch.float32
    assert weights.shape == chosen.shape == (*shape[:-1], topk)
    rounding = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for row, logits in enumerate(x.reshape(-1, 6).float().tolist()):
        best = sorted(range(6), key=lambda e: (-logits[e], e))[:topk]
        over = best if renorm else range(6)
        total = sum(math.exp(logits[e]) for e in over)
        expected = [math.exp(logits[e]) / total for e in best]
        assert weights.view(-1, topk)[row].tolist() == pytest.approx(expected, rel=rounding)
        assert chosen.view(-1, topk)[row].tolist() == ([6] * topk if row == 2 else best)
        if not renorm:
            whole = [math.exp(logit) / total for logit in logits]
            assert softmax.view(-1, 6)[row].tolist() == pytest.approx(whole, rel=1e-5)
    assert softmax.shape == ((0,) if renorm else shape)


def test_softmax_v2_chooses_by_the_logits_where_softmax_cannot_tell_them_apart() -> None:
    x = torch.tensor([[0.0, -200.0, -190.0, -199.0]])  # their softmax is 0 in float32
    weights, chosen, _ = npu_moe_gating_top_k_softmax_v2(x, k=3, renorm=1)
    assert chosen.tolist() == [[0, 2, 3]] and weights.tolist() == [[1.0, 0.0, 0.0]]


# ---- permute


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
    assert found.dtype == dtype
    for t in range(tokens):
        total = np.zeros(HIDDEN, np.float32)
        for j in range(topk):
            place = int(places[t * topk + j])
            if 0 <= place < len(rows):
                weight = 1.0 if probs is None else probs[t, j].item()
                total = f32(total + f32(rows[place].float().numpy()) * f32(weight))
        assert torch.equal(found[t], torch.from_numpy(total).to(dtype))


def test_unpermute_takes_nothing_from_a_row_of_weight_zero() -> None:
    rows = torch.tensor([[float("nan")] * 2, [1.0, 2.0], [float("inf")] * 2])
    found = npu_moe_token_unpermute(
        rows, torch.tensor([0, 1, 1, 2], dtype=torch.int32), torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    )
    assert found.tolist() == [[2.0, 4.0], [3.0, 6.0]]
    nan = npu_moe_token_unpermute(rows, torch.tensor([0], dtype=torch.int32), torch.tensor([[1.0]]))
    assert bool(nan.isnan().all())


# ---- finalize


def finalized(
    rows: np.ndarray, places: np.ndarray, scales: Any, skips: list[Any], bias: Any, experts: Any, mode: int
) -> np.ndarray:
    """The formula of torch_npu's documents, element by element in float32. places is (T, K)."""
    tokens, topk = places.shape
    out = f32(np.zeros((tokens, rows.shape[-1])))
    for t in range(tokens):
        for h in range(rows.shape[-1]):
            total = f32(0)
            for skip in skips:
                total = total if skip is None else f32(total + skip[t, h])
            for j in range(topk):
                value = f32(0) if places[t, j] < 0 else f32(rows[places[t, j], h])
                if bias is not None:
                    value = f32(value + bias[experts[t, j], h])
                total = f32(total + (value if scales is None else f32(value * scales[t, j])))
            out[t, h] = total
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extras", ["none", "scales", "skip1", "all"])
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_finalize_routing_is_the_formula(mode: int, extras: str, dtype: torch.dtype) -> None:
    tokens, topk, experts, capacity = 5, 2, 3, 4
    count = experts * capacity if mode % 2 else tokens * topk
    rows = values(count, HIDDEN, dtype=dtype)
    flat = torch.randint(
        -1 if mode else 0, count, (tokens * topk,), generator=torch.Generator().manual_seed(3)
    )
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
    wide = [None if one is None else one.float().numpy() for one in (scales, skip1, skip2, bias)]
    expected = finalized(
        rows.float().numpy(), places.numpy(), wide[0], wide[1:3], wide[3], chosen.numpy(), mode
    )
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
    source: dict[tuple[int, int], list[int]] = {}
    row = 0
    for rank in range(shape[0]):
        for expert in range(shape[1]):
            source[expert, rank] = list(range(row, row + int(counts[rank, expert])))
            row += int(counts[rank, expert])
    order = [row for key in sorted(source) for row in source[key]]
    assert index.dtype == torch.int32 and index.tolist() == order + [0] * tail
    assert torch.equal(found[:total], tokens[order]) and torch.equal(moved[:total], scales[order])
    assert not found[total:].any() and not moved[total:].any()
    assert sums.dtype == counts.dtype and sums.tolist() == counts.sum(0).tolist()
    plain = npu_moe_re_routing(tokens, counts)
    assert torch.equal(plain[0], found) and plain[1].shape == (len(tokens),)


# ---- npu_moe_update_expert


def updated(chosen: Any, table: Any, mode: int, rank: int, world: int) -> list[list[int]]:
    found = []
    for t, row in enumerate(chosen):
        out = []
        for expert in row:
            count = table[expert][0] if expert >= 0 else 0
            if expert < 0:
                out.append(-1)
            elif count == 1:
                out.append(table[expert][1])
            elif mode == 0:
                out.append(table[expert][1 + rank // math.ceil(world / count)])
            else:
                out.append(table[expert][1 + t % count])
        found.append(out)
    return found


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
        found, mask = npu_moe_update_expert(
            chosen, table, local_rank_id=rank, world_size=world, balance_mode=mode
        )
        assert found.dtype == dtype and mask.dtype == torch.bool and bool(mask.all())
        assert found.tolist() == updated(chosen.tolist(), TABLE, mode, rank, world)
        used |= set(found.flatten().tolist())
    if mode == 1:
        assert used == {-1, *range(10)}  # every copy of every expert gets tokens


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_update_expert_prunes_by_a_share_of_the_sum(dtype: torch.dtype, masked: bool) -> None:
    batch, topk = 13, 4
    scales = values(batch, topk).abs().sort(descending=True).values.to(dtype)
    threshold = torch.tensor([0.0, 0.25, 0.2, 0.1])
    active = torch.arange(batch) < 9 if masked else None
    _, mask = npu_moe_update_expert(
        ids(batch, topk, top=4), torch.tensor(TABLE, dtype=torch.int32), expert_scales=scales,
        pruning_threshold=threshold.reshape(1, -1) if masked else threshold, active_mask=active,
        balance_mode=1,
    )  # fmt: skip
    for t in range(batch):
        total = np.float32(0)
        for k in range(topk):
            total = np.float32(total + np.float32(scales[t, k].item()))
        for k in range(topk):
            kept = np.float32(scales[t, k].item()) >= np.float32(threshold[k].item()) * total
            assert bool(mask[t, k]) == bool(kept and (not masked or t < 9)), (t, k)
    assert bool(mask.any()) and not bool(mask.all())


def test_update_expert_keeps_a_pair_exactly_at_the_threshold() -> None:
    scales = torch.tensor([[0.5, 0.25, 0.25]])
    threshold = torch.tensor([0.5, 0.25, 0.250001])
    table = torch.tensor(TABLE, dtype=torch.int32)
    _, mask = npu_moe_update_expert(
        ids(1, 3, top=4), table, expert_scales=scales, pruning_threshold=threshold, balance_mode=1
    )
    assert mask.tolist() == [[True, True, False]]
