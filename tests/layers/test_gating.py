"""torch_npu's routers choose as scalar loops and as transformers do."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from bad_arguments import refused

from ascend_moe.native import torch_npu as _torch_npu
from ascend_moe.native.torch_npu import OLDER
from ascend_moe.routers import (
    deepseek_v4,
    gating,
    npu_moe_gating_top_k,
    npu_moe_gating_top_k_softmax,
    npu_moe_gating_top_k_softmax_v2,
    sigmoid_of_topk,
    sparsemixer,
)

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def logits_of(tokens: int, experts: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    # Distinct multiples of 1/64 in a row: exact in every type, and no accidental ties.
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(experts, generator=generator) for _ in range(tokens)]
    return ((torch.stack(rows) - experts // 2) / 64).to(dtype)


def routed_by_hand(
    logits: list[float], bias: list[float], k: int, groups: tuple[int, int, int], norm_type: int, divide: bool
) -> tuple[list[int], list[float]]:
    """One token, in Python floats: ids by falling biased score, unbiased weights."""
    if norm_type == 1:
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    elif norm_type == 2:
        scores = [math.sqrt(math.log1p(math.exp(v))) for v in logits]
    else:
        total = sum(math.exp(v) for v in logits)
        scores = [math.exp(v) / total for v in logits]
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    number, kept, mode = groups
    size = len(logits) // number
    ranked = []
    for group in range(number):
        best = sorted(choice[group * size : (group + 1) * size], reverse=True)
        ranked.append((-sum(best[: mode + 1]), group))
    alive = {group for _, group in sorted(ranked)[:kept]}
    ids = sorted((e for e in range(len(logits)) if e // size in alive), key=lambda e: (-choice[e], e))[:k]
    weights = [scores[e] for e in ids]
    return ids, [w / sum(weights) for w in weights] if divide else weights


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("groups", [(1, 1, 0), (8, 3, 0), (8, 3, 1), (4, 4, 1), (16, 5, 1)])
@pytest.mark.parametrize(("norm_type", "renorm"), [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)])
def test_gating_top_k_is_the_scalar_loop(
    dtype: torch.dtype, groups: tuple[int, int, int], norm_type: int, renorm: int
) -> None:
    tokens, experts, k = 9, 64, 6
    number, kept, mode = groups
    x = logits_of(tokens, experts, 1, dtype)
    for bias in (None, logits_of(1, experts, 2, dtype)[0] - 1):  # scores that fall below 0
        weights, ids, scores = npu_moe_gating_top_k(
            x, k, bias=bias, k_group=kept, group_count=number, group_select_mode=mode, renorm=renorm,
            norm_type=norm_type, out_flag=True, routed_scaling_factor=2.5,
        )  # fmt: skip
        assert weights.dtype == dtype and ids.dtype == torch.int32 and scores.dtype == torch.float32
        assert weights.shape == ids.shape == (tokens, k) and scores.shape == (tokens, experts)
        added, divide = [0.0] * experts if bias is None else bias.tolist(), norm_type != 0 or renorm == 1
        for token, logits in enumerate(x.tolist()):
            expected_ids, expected = routed_by_hand(logits, added, k, groups, norm_type, divide)
            assert ids[token].tolist() == expected_ids
            tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
            expected_weights = 2.5 * torch.tensor(expected, dtype=torch.float64)
            assert torch.allclose(weights[token].double(), expected_weights, rtol=tolerance)
        float32 = x.float()
        normalised = (float32.softmax(-1), float32.sigmoid(), (1 + float32.exp()).log().sqrt())[norm_type]
        assert torch.allclose(scores, normalised)


def test_ties_go_to_the_lower_expert_and_nan_comes_last() -> None:
    x = torch.zeros(2, 64)
    x[1, 40:] = 1.0
    for norm_type in (0, 1, 2):
        ids = npu_moe_gating_top_k(x, 5, norm_type=norm_type)[1]
        assert ids.tolist() == [[0, 1, 2, 3, 4], [40, 41, 42, 43, 44]]
        ids = npu_moe_gating_top_k(x, 5, norm_type=norm_type, group_count=8, k_group=2)[1]
        assert ids.tolist() == [[0, 1, 2, 3, 4], [40, 41, 42, 43, 44]]
    assert npu_moe_gating_top_k_softmax(x, None, 3)[1].tolist() == [[0, 1, 2], [40, 41, 42]]
    assert sigmoid_of_topk(x, 3)[1].tolist() == [[0, 1, 2], [40, 41, 42]]
    x[0, :3] = torch.nan
    assert npu_moe_gating_top_k(x, 4, norm_type=1)[1][0].tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize("norm_type", [0, 1, 2])
def test_ids_from_a_table(norm_type: int) -> None:
    x, table = logits_of(5, 16, 7), torch.tensor([[3, 0], [15, 3], [7, 7]], dtype=torch.int32)
    tokens = torch.tensor([2, 0, 1, 1, 0])
    weights, ids, scores = npu_moe_gating_top_k(
        x, 2, input_ids=tokens, tid2eid=table, norm_type=norm_type, routed_scaling_factor=1.5, out_flag=True
    )
    assert torch.equal(ids, table[tokens])
    chosen = scores.gather(1, ids.long())
    expected = chosen / chosen.sum(-1, keepdim=True) if norm_type else chosen
    assert torch.allclose(weights, 1.5 * expected)
    for wrong, name in (
        ({"tid2eid": None}, "input_ids"),
        ({"input_ids": None}, "tid2eid"),
        ({"input_ids": tokens[:4]}, "input_ids"),
        ({"input_ids": tokens + 1}, "input_ids"),
        ({"tid2eid": table + 1}, "tid2eid"),
        ({"tid2eid": table[:, :1]}, "tid2eid"),
        ({"renorm": 1}, "renorm"),
    ):
        refused(name, npu_moe_gating_top_k, x, 2, **{"input_ids": tokens, "tid2eid": table, **wrong})


def test_eps_keeps_vanishing_sigmoids_finite() -> None:
    weights, _, _ = npu_moe_gating_top_k(torch.full((1, 8), -200.0), 2, norm_type=1)
    assert torch.equal(weights, torch.zeros(1, 2))
    weights, _, _ = npu_moe_gating_top_k(torch.zeros(1, 8), 2, norm_type=1, eps=1.0)
    assert torch.equal(weights, torch.full((1, 2), 0.25))


@pytest.mark.parametrize("norm_type", [0, 1, 2])
def test_weights_are_differentiable(norm_type: int) -> None:
    def weights(logits: torch.Tensor) -> torch.Tensor:
        return npu_moe_gating_top_k(logits.float(), 3, norm_type=norm_type, renorm=1)[0].double()

    x = logits_of(4, 16, 5).double().requires_grad_()
    assert torch.autograd.gradcheck(weights, (x,), eps=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(7, 16), (2, 4, 16), (0, 16)])
def test_softmax_routers_are_the_scalar_loop(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Weights of all experts or of the chosen; a finished row has no expert; entry j of token t is row j * T + t."""
    tokens, k = math.prod(shape[:-1]), 3
    x = logits_of(max(tokens, 1), 16, 3, dtype)[:tokens].reshape(shape)
    finished = torch.arange(tokens).reshape(shape[:-1]) % 3 == 1
    best = x.float().reshape(-1, 16).argsort(-1, descending=True)[:, :k]
    ids = best.masked_fill(finished.reshape(-1, 1), 16).int().reshape(*shape[:-1], k)
    whole = x.float().softmax(-1)
    of_all = whole.reshape(-1, 16).gather(1, best).to(dtype).reshape(ids.shape)
    of_chosen = x.float().reshape(-1, 16).gather(1, best).softmax(-1).to(dtype).reshape(ids.shape)
    weights, found, rows = npu_moe_gating_top_k_softmax(x, finished, k)
    assert torch.equal(weights, of_all) and torch.equal(found, ids) and rows.dtype == torch.int32
    assert rows.reshape(tokens, k).tolist() == [[j * tokens + t for j in range(k)] for t in range(tokens)]
    for renorm, output in itertools.product((0, 1), (False, True)):
        weights, found, softmax = npu_moe_gating_top_k_softmax_v2(
            x, k=k, finished=finished, renorm=renorm, output_softmax=output
        )
        assert torch.equal(weights, of_chosen if renorm else of_all) and torch.equal(found, ids)
        assert torch.equal(softmax, whole) if output and not renorm else softmax.shape == (0,)
    assert npu_moe_gating_top_k_softmax(x, None, 0)[1].shape == (*shape[:-1], 0)


def test_renormalised_weights_choose_by_the_logits_where_softmax_rounds_them_to_one() -> None:
    x = torch.tensor([[0.0, 100.0, 1e-6, -3.0], [2e-6, 0.0, 100.0, 1e-6]])
    assert npu_moe_gating_top_k_softmax_v2(x, k=3, renorm=1)[1].tolist() == [[1, 2, 0], [2, 0, 3]]


# ---- routers of single models


def test_the_sparse_mixer_is_transformers_own() -> None:
    from transformers.models.phimoe.modeling_phimoe import sparsemixer as theirs

    for eps, seed in ((0.01, 1), (0.3, 2), (0.9, 3)):
        logits = torch.randn(200, 8, generator=torch.Generator().manual_seed(seed)) - 1
        weights, ids = sparsemixer(logits, 2, eps)
        wanted, chosen = theirs(logits, eps, training=False)
        assert torch.equal(ids.long(), chosen) and ids.dtype == torch.int32
        torch.testing.assert_close(weights, wanted)
    assert not torch.equal(weights.sum(1), torch.ones(200))
    refused("k", sparsemixer, logits, 3, says="k is 3; the sparse mixer chooses 2 experts")


def test_a_table_is_looked_up_where_an_older_torch_npu_knows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operator is not called with arguments that it lacks; torch's own operators give the same."""
    logits, table = logits_of(9, 16, 8), torch.rand(20, 3, generator=torch.Generator().manual_seed(1)).argsort(1)
    given = {"input_ids": torch.arange(9) * 2, "tid2eid": table}
    wanted = deepseek_v4(logits, 3, scaling=1.5, **given)
    monkeypatch.setattr(gating, "on_npu", lambda tensor: True)
    monkeypatch.setattr(_torch_npu, "operators", lambda: OLDER)
    monkeypatch.setattr(gating, "npu_moe_gating_top_k", None)
    assert all(torch.equal(a, b) for a, b in zip(deepseek_v4(logits, 3, scaling=1.5, **given), wanted, strict=True))
