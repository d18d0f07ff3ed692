"""Routers against scalar loops and transformers' own; Megatron-LM's functions, their losses and capacities."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gloo_ranks import threads
from routed_tokens import randn
from torch import Tensor

from ascend_moe.errors import ArgumentError
from ascend_moe.routing import (
    MoEAuxLossAutoScaler,
    apply_router_token_dropping,
    compute_routing_scores_for_aux_loss,
    deepseek_v2,
    deepseek_v3,
    get_capacity,
    get_tokens_per_expert_and_token_count,
    get_updated_expert_bias,
    group_limited_topk,
    npu_moe_gating_top_k,
    npu_moe_gating_top_k_softmax,
    npu_moe_gating_top_k_softmax_v2,
    softmax_topk,
    switch_load_balancing_loss_func,
    topk_routing_with_score_function,
    z_loss_func,
)

FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
E, K = 8, 3


def close(found: Tensor, expected: Tensor, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


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
    for bias in (None, logits_of(1, experts, 2, dtype)[0]):
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


def transformers_router(model: str, name: str, **config: Any) -> Any:
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    kind = name.replace("TopKRouter", "").replace("TopkRouter", "")
    router = getattr(module, name)(getattr(module, f"{kind}Config")(hidden_size=16, **config))
    torch.nn.init.normal_(router.weight, std=0.5)
    return router


def assert_same_choice(ours: tuple[torch.Tensor, torch.Tensor], theirs: tuple[Any, Any, Any]) -> None:
    """Both choose the same experts with the same weights, in whatever order."""
    (our_ids, our_order), (their_ids, their_order) = ours[1].long().sort(-1), theirs[2].long().sort(-1)
    assert torch.equal(our_ids, their_ids)
    weights = theirs[1].float().gather(1, their_order)
    assert torch.allclose(ours[0].gather(1, our_order), weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (8, 3)])
def test_routers_choose_as_transformers_do(norm: bool, groups: int, kept: int) -> None:
    torch.manual_seed(7)
    x = torch.randn(50, 16)
    mixtral = transformers_router("mixtral", "MixtralTopKRouter", num_local_experts=8, num_experts_per_tok=2)
    theirs = mixtral(x)
    assert_same_choice(softmax_topk(theirs[0], 2, True), theirs)
    qwen = {"num_experts": 12, "num_experts_per_tok": 4, "norm_topk_prob": norm}
    theirs = transformers_router("qwen3_moe", "Qwen3MoeTopKRouter", **qwen)(x)
    assert_same_choice(softmax_topk(theirs[0], 4, norm), theirs)
    shape = {"n_routed_experts": 32, "num_experts_per_tok": 3, "n_group": groups, "topk_group": kept}
    scaled = shape | {"norm_topk_prob": norm, "routed_scaling_factor": 2.5}
    v3 = transformers_router("deepseek_v3", "DeepseekV3TopkRouter", **scaled)
    v3.e_score_correction_bias.copy_(torch.randn(32))
    theirs = v3(x)
    ours = deepseek_v3(theirs[0], v3.e_score_correction_bias, 3, groups, kept, norm, 2.5)
    assert_same_choice(ours, theirs)
    unbiased = deepseek_v3(theirs[0], None, 3, groups, kept, norm, 2.5)
    assert not torch.equal(unbiased[1], ours[1]), "the bias decided something"
    method = "greedy" if groups == 1 else "group_limited_greedy"
    other = {"topk_method": method, "routed_scaling_factor": 1.5, "num_attention_heads": 4}
    theirs = transformers_router("deepseek_v2", "DeepseekV2TopkRouter", **shape, **other)(x)
    assert_same_choice(deepseek_v2(theirs[0], 3, groups, kept, 1.5), theirs)


def test_ties_go_to_the_lower_expert_and_nan_comes_last() -> None:
    x = torch.zeros(2, 64)
    x[1, 40:] = 1.0
    for norm_type in (0, 1, 2):
        ids = npu_moe_gating_top_k(x, 5, norm_type=norm_type)[1]
        assert ids.tolist() == [[0, 1, 2, 3, 4], [40, 41, 42, 43, 44]]
        ids = npu_moe_gating_top_k(x, 5, norm_type=norm_type, group_count=8, k_group=2)[1]
        assert ids.tolist() == [[0, 1, 2, 3, 4], [40, 41, 42, 43, 44]]
    assert npu_moe_gating_top_k_softmax(x, None, 3)[1].tolist() == [[0, 1, 2], [40, 41, 42]]
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
        with pytest.raises(ArgumentError, match=name):
            npu_moe_gating_top_k(x, 2, **{"input_ids": tokens, "tid2eid": table, **wrong})


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


# ---- torch_npu's softmax routers


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


def test_scores_are_there_where_they_are_asked_for() -> None:
    x = logits_of(3, 16, 4)
    assert not npu_moe_gating_top_k(x, 2)[2].any() and bool(npu_moe_gating_top_k(x, 2, out_flag=True)[2].all())


# ---- Megatron-LM's choice


def choose_by_loop(
    logits: Tensor, topk: int, pre: bool, groups: tuple[int, int] | None, scale: float, function: str, bias: Any
) -> tuple[Tensor, Tensor]:
    """Weights and ids of one token."""
    wide = logits.float()
    scores = {
        "softmax": wide.softmax(0),
        "sigmoid": wide.sigmoid(),
        "sqrtsoftplus": (1 + wide.exp()).log().sqrt(),
    }[function]
    choice = wide if function == "softmax" and not pre else scores
    if bias is not None and function != "softmax":
        choice = choice + bias
    allowed = list(range(len(logits)))
    if groups is not None:
        number, kept = groups
        size = len(logits) // number
        heads = [sum(sorted(choice[g * size : (g + 1) * size].tolist())[::-1][: topk // kept]) for g in range(number)]
        best = sorted(range(number), key=lambda group: -heads[group])[:kept]
        allowed = [expert for expert in allowed if expert // size in best]
    ids = torch.tensor(sorted(allowed, key=lambda expert: -float(choice[expert].detach()))[:topk])
    weights = scores[ids]
    if function == "softmax" and not pre:
        weights = wide[ids].softmax(0)
    elif function != "softmax" and topk > 1:
        weights = weights / (weights.sum() + 1e-20)
    return (weights * scale if scale else weights), ids


@pytest.mark.parametrize(
    "function, pre", [("softmax", False), ("softmax", True), ("sigmoid", False), ("sqrtsoftplus", False)]
)
@pytest.mark.parametrize("topk, groups", [(1, None), (3, None), (4, (4, 2)), (2, (2, 1))])
@pytest.mark.parametrize("dtype", [FP32, FP64, BF16])
def test_scores_and_choice_are_those_of_a_loop(function: str, pre: bool, topk: int, groups: Any, dtype: Any) -> None:
    for tokens, bias, scale in itertools.product((0, 9), (None, randn(E, seed=3)), (0.0, 2.5)):
        logits = randn(tokens, E, seed=4).to(dtype).requires_grad_()
        number, kept = groups or (None, None)
        given = {"use_pre_softmax": pre, "num_groups": number, "group_topk": kept, "scaling_factor": scale}
        options: dict[str, Any] = given | {"score_function": function, "expert_bias": bias}
        weights, ids = topk_routing_with_score_function(logits, topk, dense_output=True, **options)
        probs, chosen = topk_routing_with_score_function(logits, topk, **options)
        assert probs.dtype == weights.dtype == dtype and ids.shape == weights.shape == (tokens, topk)
        assert torch.equal(probs.gather(1, ids), weights) and torch.equal(chosen, (probs != 0))
        (weights * torch.arange(1, topk + 1)).sum().backward()
        own = logits.detach().clone().requires_grad_()
        for token in range(tokens):
            expected, numbers = choose_by_loop(own[token], topk, pre, groups, scale, function, bias)
            assert ids[token].tolist() == numbers.tolist()
            tolerance = 2**-8 if dtype == BF16 else 1e-5
            close(weights[token].double(), expected.double(), rtol=tolerance)
            (expected * torch.arange(1, topk + 1)).sum().backward()
            assert logits.grad is not None and own.grad is not None
            close(
                logits.grad[token].double(),
                own.grad[token].double(),
                rtol=tolerance,
                atol=2e-3 if dtype == BF16 else 1e-6,
            )


def test_ids_that_are_given_and_what_is_refused() -> None:
    logits = randn(6, E)
    ids = logits.argsort(1)[:, :2]
    probs, chosen = topk_routing_with_score_function(logits, 2, precomputed_indices=ids)
    assert torch.equal(chosen, torch.zeros(6, E).scatter(1, ids, 1).bool())
    close(probs.gather(1, ids), logits.gather(1, ids).softmax(1))

    class Replay:
        def get_replay_topk(self, scores: Tensor, topk: int, groups: Any, kept: Any, compute: Any) -> Any:
            assert torch.equal(compute(scores, topk, groups, kept)[1], scores.argsort(1, descending=True)[:, :topk])
            return scores.gather(1, ids), ids

    replayed = topk_routing_with_score_function(logits, 2, router_replay=Replay())
    assert torch.equal(replayed[0], probs) and torch.equal(replayed[1], chosen)
    with pytest.raises(ValueError, match="score_function is 'tanh'"):
        topk_routing_with_score_function(logits, 2, score_function="tanh")
    with pytest.raises(ValueError, match="topk is 9"):
        topk_routing_with_score_function(logits, 9)


def test_a_choice_without_any_score_has_weights_of_zero() -> None:
    """Sigmoids vanish; a bias may be negative; a scale of 0 is none."""
    weights, _ = topk_routing_with_score_function(
        torch.full((2, E), -200.0), 2, score_function="sigmoid", dense_output=True
    )
    assert torch.equal(weights, torch.zeros(2, 2))
    bias = torch.zeros(E)
    bias[:6] = -1.0
    chosen = topk_routing_with_score_function(torch.zeros(1, E), 2, score_function="sigmoid", expert_bias=bias)[1]
    assert chosen[0].nonzero().flatten().tolist() == [6, 7]


@pytest.mark.parametrize("topk, groups, kept", [(4, 4, 2), (2, 2, 1), (4, 2, 2), (6, 4, 3), (4, 8, 4)])
def test_group_limited_topk(topk: int, groups: int, kept: int) -> None:
    scores = randn(20, E, seed=6)
    values, ids = group_limited_topk(scores, topk, 20, E, groups, kept)
    size = E // groups
    for token in range(20):
        row = scores[token]
        heads = [sum(sorted(row[g * size : (g + 1) * size].tolist())[::-1][: topk // kept]) for g in range(groups)]
        best = sorted(range(groups), key=lambda group: -heads[group])[:kept]
        allowed = sorted((e for e in range(E) if e // size in best), key=lambda e: -float(row[e]))[:topk]
        assert ids[token].tolist() == allowed and torch.equal(values[token], row[allowed])
    assert group_limited_topk(scores[:0], topk, 0, E, groups, kept)[1].shape == (0, topk)
    for wrong in ((4, 3, 1), (4, 4, 5), (6, 4, 2), (1, 4, 2)):
        with pytest.raises(ValueError):
            group_limited_topk(scores, wrong[0], 20, E, *wrong[1:])


def test_groups_with_negative_scores_are_left_out() -> None:
    scores = torch.tensor([[-1.0, -2.0, -9.0, -9.0]])
    assert group_limited_topk(scores, 2, 1, 4, 2, 1)[1].tolist() == [[0, 1]]


# ---- capacity


def dropped_by_loop(
    probs: Tensor, chosen: Tensor, capacity: int, policy: str, pad: bool, mask: Tensor | None = None
) -> Tensor:
    kept = torch.zeros_like(chosen)
    active = [True] * len(probs) if mask is None else mask.tolist()
    for expert in range(probs.shape[1]):
        own = [token for token in range(len(probs)) if active[token] and chosen[token, expert]]
        if policy == "probs":
            own.sort(key=lambda token: -float(probs[token, expert].detach()))
        others = [token for token in range(len(probs)) if active[token] and not chosen[token, expert]]
        kept[(own + (others if pad else []))[:capacity], expert] = True
    return kept


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5])
def test_capacity(policy: str, factor: float) -> None:
    for tokens in (0, 1, 16):
        probs, chosen = topk_routing_with_score_function(randn(tokens, E, seed=7), K)
        capacity = get_capacity(tokens * K, E, factor)
        assert capacity == math.ceil(tokens * K / E * factor)
        for pad in (False, True):
            found, kept = apply_router_token_dropping(probs, chosen, K, factor, policy, pad)
            assert torch.equal(kept, dropped_by_loop(probs, chosen, capacity, policy, pad))
            assert torch.equal(found, torch.where(kept, probs, 0))
            assert not pad or (kept.sum(0) == capacity).all()
    assert get_capacity(4, E, 1.0, 3) == 3
    probs, chosen = topk_routing_with_score_function(randn(4, E, seed=7), K)
    for pad in (False, True):  # C = 6 is more than T: nothing is dropped, padding is all T
        found, kept = apply_router_token_dropping(probs, chosen, K, 4.0, policy, pad)
        assert torch.equal(found, probs) and torch.equal(kept, torch.ones_like(kept) if pad else chosen)
    with pytest.raises(ValueError, match="drop_policy is 'first'"):
        apply_router_token_dropping(probs, chosen, K, 1.0, "first")


def test_the_map_says_who_takes_a_place() -> None:
    """Not the probabilities of tokens that the map does not have; a probability of 0 is one."""
    probs = torch.tensor([[0.9, 0.1], [0.5, 0.0], [0.4, 0.2], [0.8, 0.0]])
    chosen = torch.tensor([[False, True], [True, True], [True, False], [False, True]])
    found, final = apply_router_token_dropping(probs, chosen, 1, 1.0)  # C = 2
    assert final.tolist() == [[False, True], [True, True], [True, False], [False, False]]
    assert torch.equal(found, probs * final)


@pytest.mark.parametrize("seed", range(12))
def test_inactive_tokens_take_no_place(seed: int) -> None:
    """Of drawn sizes, whatever the inactive rows hold; the capacity stays that of all tokens."""
    draw = random.Random(seed)
    tokens, experts = draw.choice([1, 4, 9, 17]), draw.choice([2, 4, 8])
    topk, factor = draw.randint(1, experts), draw.choice([0.25, 0.5, 1.0, 1.5, 4.0])
    logits, mask = randn(tokens, experts, seed=seed), randn(tokens, seed=seed + 50) < draw.choice([-0.5, 0.0, 0.8])
    probs, chosen = topk_routing_with_score_function(logits, topk, score_function=draw.choice(["softmax", "sigmoid"]))
    probs = torch.where(mask[:, None], probs, draw.choice([0.0, 100.0, math.nan])).requires_grad_()
    capacity = get_capacity(tokens * topk, experts, factor)
    for policy, pad in itertools.product(("probs", "position"), (False, True)):
        found, kept = apply_router_token_dropping(probs, chosen, topk, factor, policy, pad, mask=mask)
        assert torch.equal(kept, dropped_by_loop(probs, chosen, capacity, policy, pad, mask))
        assert torch.equal(found, torch.where(kept, probs, 0))
        (gradient,) = torch.autograd.grad(found.sum(), probs)
        assert torch.equal(gradient, kept.float())
        if mask.all():
            assert torch.equal(kept, apply_router_token_dropping(probs, chosen, topk, factor, policy, pad)[1])
    with pytest.raises(ArgumentError, match="mask is"):
        apply_router_token_dropping(probs, chosen, topk, factor, mask=mask[1:])


# ---- losses, and the bias


def test_z_loss_and_expert_bias() -> None:
    logits = randn(7, E).requires_grad_()
    mask = torch.tensor([True, False, True, True, False, True, False])
    expected = sum(float(row.exp().sum().log()) ** 2 for row in logits.detach())
    close(z_loss_func(logits, 0.1), torch.tensor(0.1 * expected / 7))
    kept = sum(float(row.exp().sum().log()) ** 2 for row in logits.detach()[mask])
    close(z_loss_func(logits, 0.1, mask=mask), torch.tensor(0.1 * kept / 4))
    assert torch.equal(z_loss_func(logits, 0.1, padding_mask=~mask), z_loss_func(logits, 0.1, mask=mask))
    assert float(z_loss_func(logits[:0].detach(), 0.1)) == 0.0
    with pytest.raises(ValueError, match="mask and padding_mask are given"):
        z_loss_func(logits, 0.1, mask, mask=mask)
    counts = [torch.tensor([3.0, 1, 0, 4]), torch.tensor([1.0, 3, 2, 2])]
    bias = torch.tensor([0.5, -0.5, 0.0, 1.0])

    def run(rank: int, group: Any) -> Tensor:
        before = counts[rank].clone()
        new = get_updated_expert_bias(counts[rank], bias, 0.1, group)
        assert torch.equal(counts[rank], before)
        return new

    for found in threads(2).run(run):  # sums 4 4 2 6, mean 4
        close(found, torch.tensor([0.5, -0.5, 0.1, 0.9]))


def test_each_layer_has_a_mean_of_its_own() -> None:
    """The bias of several layers at once; counts of halves and large ones are not rounded."""
    counts = torch.tensor([[3.0, 1, 0, 4], [100.0, 300, 200, 200], [0.25, 0.5, 0.5, 0.75]])
    bias = torch.zeros(3, 4)
    found = get_updated_expert_bias(counts, bias, 0.5)
    assert found.tolist() == [[-0.5, 0.5, 0.5, -0.5], [0.5, -0.5, 0.0, 0.0], [0.5, 0.0, 0.0, -0.5]]
    large = torch.tensor([2**24 + 1, 2**24, 2**24, 2**24 - 1])
    assert torch.equal(get_updated_expert_bias(large, torch.zeros(4), 1.0).sign(), torch.tensor([-1.0, 0, 0, 1]))


def switch_by_loop(scores: Tensor, rows: Tensor, tokens: int, topk: int, coeff: float) -> Tensor:
    total = sum(float(rows[e]) * float(scores[:, e].double().sum()) for e in range(scores.shape[1]))
    return torch.tensor(scores.shape[1] * coeff / (topk * tokens**2) * total)


def test_switch_loss_is_the_formula_in_float32() -> None:
    scores, mask = randn(300, E, seed=12).softmax(1), torch.arange(300) % 3 > 0
    rows = torch.arange(1.0, E + 1)
    for given in (scores, scores.bfloat16()):
        for options, used in (({}, given), ({"mask": mask}, given[mask]), ({"padding_mask": mask}, given[mask])):
            found = switch_load_balancing_loss_func(given, rows, 250, K, E, 0.3, **options)
            assert found.dtype == FP32
            close(found, switch_by_loop(used, rows, 250, K, 0.3))
    with_nan = scores.clone()
    with_nan[~mask] = torch.nan
    close(
        switch_load_balancing_loss_func(with_nan, rows, 250, K, E, 0.3, mask=mask),
        switch_by_loop(scores[mask], rows, 250, K, 0.3),
    )
    for tokens in (0, torch.tensor(0)):
        assert float(switch_load_balancing_loss_func(scores[:0], rows, tokens, K, E, 0.3)) == 0.0


def test_z_loss_is_in_float32_and_of_no_token_0() -> None:
    logits = (20 + randn(40, E, seed=13)).bfloat16()
    expected = logits.double().logsumexp(1).square()
    close(z_loss_func(logits, 0.1), (expected.mean() * 0.1).float())
    mask = torch.arange(40) % 4 > 0
    close(z_loss_func(logits, 0.1, mask=mask), (expected[mask].mean() * 0.1).float())
    assert float(z_loss_func(logits, 0.1, mask=torch.zeros(40, dtype=torch.bool))) == 0.0


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_what_a_balancing_loss_looks_at(function: str) -> None:
    """Scores that sum up to 1, without bias; neither map nor scores have tokens that do not count."""
    logits, mask = randn(9, E, seed=14), torch.arange(9) % 3 > 0
    plain = {"softmax": logits.softmax(1), "sigmoid": logits.sigmoid(), "sqrtsoftplus": logits.exp().log1p().sqrt()}
    scores = plain[function] / plain[function].sum(1, keepdim=True)
    chosen = torch.zeros(9, E).scatter(1, logits.argsort(1, descending=True)[:, :K], 1).bool()
    for options, active in (({}, mask | True), ({"mask": mask}, mask), ({"padding_mask": ~mask}, mask)):
        found, weights = compute_routing_scores_for_aux_loss(logits, K, function, **options)
        assert torch.equal(found, chosen & active[:, None])
        close(weights, torch.where(active[:, None], scores, 0))


def test_counts_of_a_group_of_ranks() -> None:
    """Rows and tokens of all ranks, tokens of this rank alone, with masks and without; the map stays as it is."""
    maps = [randn(tokens, E, seed=80 + tokens) > 0.5 for tokens in (4, 6)]
    maps = [torch.zeros_like(each).scatter(1, each.float().argsort(1)[:, :K], True) for each in maps]
    maps[1][2:4] = False  # inactive

    def run(rank: int, group: Any) -> None:
        rows = (maps[0].sum(0) + maps[1].sum(0)).tolist()
        found, here, total = get_tokens_per_expert_and_token_count(maps[rank], group, K, True)
        assert found.tolist() == rows and float(here) == (4, 4)[rank] and float(total) == 8
        found, here, total = get_tokens_per_expert_and_token_count(maps[rank], group, K)
        assert found.tolist() == rows and here == (4, 6)[rank] and float(total) == 8
        found, here, total = get_tokens_per_expert_and_token_count(maps[0], group)
        assert found.tolist() == (2 * maps[0].sum(0)).tolist() and (here, total) == (4, 8)
        with pytest.raises(ArgumentError, match="topk is None; with_padding_mask needs it"):
            get_tokens_per_expert_and_token_count(maps[rank], group, with_padding_mask=True)

    threads(2).run(run)
    found, here, total = get_tokens_per_expert_and_token_count(maps[1], None, K, True)
    assert found.tolist() == maps[1].sum(0).tolist() and float(here) == float(total) == 4


@pytest.fixture
def loss_scale(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], None]:
    """Sets the scale of this test's losses; 1 until then."""
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    return MoEAuxLossAutoScaler.set_loss_scale


def test_aux_loss_enters_by_the_gradient(loss_scale: Callable[[Tensor], None]) -> None:
    for scale in (None, 8.0, 0.25):
        if scale is not None:
            loss_scale(torch.tensor(scale))
        probs, aux = randn(4, E).requires_grad_(), randn(3).requires_grad_()
        out = MoEAuxLossAutoScaler.apply(probs, aux.sum())
        assert torch.equal(out, probs)
        (out * 2).sum().backward()
        assert probs.grad is not None and bool((probs.grad == 2).all())
        assert aux.grad is not None and aux.grad.tolist() == [scale or 1.0] * 3


def test_the_scale_stays_in_its_memory(loss_scale: Callable[[Tensor], None]) -> None:
    """A captured graph reads it there; and it is no tensor of the caller's."""
    first = torch.tensor(2.0)
    loss_scale(first)
    held = MoEAuxLossAutoScaler.main_loss_backward_scale
    assert held is not None and held.data_ptr() != first.data_ptr()
    first.fill_(9.0)
    assert float(held) == 2.0
    loss_scale(torch.tensor(3.0))
    assert MoEAuxLossAutoScaler.main_loss_backward_scale is held and float(held) == 3.0
    with_graph = torch.tensor(4.0, requires_grad=True) * 1
    loss_scale(with_graph)
    assert float(held) == 4.0 and not held.requires_grad
    loss_scale(torch.tensor([5.0]))  # of another shape
    aux = torch.ones(1, requires_grad=True)
    MoEAuxLossAutoScaler.apply(torch.ones(2, requires_grad=True), aux).sum().backward()
    assert aux.grad is not None and aux.grad.tolist() == [5.0]
