"""Megatron-LM's MoE: the layer on 1, 2 and 4 ranks against one process; M1 to M19 by name. Functions of routing alone
have their tests (M3, M5 to M7) in layers/test_routing.py."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from gloo_ranks import run_processes, threads
from routed_tokens import randn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_moe.errors import AscendMoeError
from ascend_moe.interop.megatron import (
    GroupedMLP,
    Handle,
    MC2Manager,
    MoEAuxLossAutoScaler,
    MoELayer,
    RouterConfig,
    SharedExpertMLP,
    TokenDispatcher,
    TopKRouter,
    apply_router_token_dropping,
    compute_routing_scores_for_aux_loss,
    folded_groups,
    get_capacity,
    permute,
    rank_groups,
    sort_chunks_by_idxs,
    switch_load_balancing_loss_func,
    topk_routing_with_score_function,
    unpermute,
)
from ascend_moe.interop.megatron.carriers import Carrier, Windows

FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16
E, K, H, F = 8, 3, 32, 16
LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]  # ranks, etp
KINDS = ["mc2", "alltoall", "allgather"]
ROUTINGS = ["random", "one expert", "an expert without tokens"]
Body = Callable[[int, Any], Any]


def close(found: Tensor, expected: Tensor, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


# ---- one layer on any ranks, and the same layer as a loop in one process


def logits_of(tokens: int, seed: int, routing: str = "random") -> Tensor:
    logits = randn(tokens, E, seed=seed)
    if routing == "one expert":
        logits[:, 1] += 20
    if routing == "an expert without tokens":
        logits[:, 0] -= 50
    return logits


class Case:
    """Tokens and logits of all ranks, and the experts of all of them."""

    def __init__(self, world: int, sizes: list[int] | None = None, routing: str = "random", dtype: Any = FP32) -> None:
        self.sizes = sizes or [5] * world
        self.uneven = len(set(self.sizes)) > 1
        self.topk = 1 if routing == "one expert" else K
        self.x = [randn(size, H, seed=10 + rank).to(dtype) for rank, size in enumerate(self.sizes)]
        self.logits = [logits_of(size, 30 + rank, routing) for rank, size in enumerate(self.sizes)]
        self.w1 = (randn(E, H, 2 * F, seed=1) / math.sqrt(H)).to(dtype)
        self.w2 = (randn(E, F, H, seed=2) / math.sqrt(F)).to(dtype)

    def options(self) -> dict[str, Any]:
        return {"max_tokens": max(self.sizes)} if self.uneven else {}

    def expected(self) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor, Tensor]:
        """Results, gradients of x and of logits by rank, gradients of w1 and w2, in float64."""
        x, logits = ([each.double().requires_grad_() for each in every] for every in (self.x, self.logits))
        w1, w2 = self.w1.double().requires_grad_(), self.w2.double().requires_grad_()
        results = []
        for tokens, scores in zip(x, logits, strict=True):
            out = []
            for token, row in zip(tokens, scores, strict=True):
                ids = row.argsort(descending=True)[: self.topk]
                weights = row[ids].softmax(0)
                out.append(sum((mlp(token, w1[e], w2[e]) * w for e, w in zip(ids, weights, strict=True)), 0 * token))
            results.append(torch.stack(out) if out else tokens * 1)
        sum(loss_of(each) for each in results).backward()  # type: ignore[union-attr]
        assert w1.grad is not None and w2.grad is not None
        gx, glogits = ([torch.zeros_like(t) if t.grad is None else t.grad for t in every] for every in (x, logits))
        return [each.detach() for each in results], gx, glogits, w1.grad, w2.grad


def mlp(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    gate, up = (x @ w1).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up @ w2


def loss_of(y: Tensor) -> Tensor:
    return (y * (1 + torch.arange(y.numel()).view(y.shape) % 5)).sum()


def on_ranks(kind: str, world: int, clusters: Any, body: Body) -> list[Any]:
    """body(rank, group) on every rank; the group fits the kind."""
    if kind == "mc2":
        found: list[Any] = clusters[world].run(body)
        return found
    return threads(world).run(body)


def dispatcher(kind: str, case: Case, etp: int, rank: int, group: Any, **options: Any) -> TokenDispatcher:
    place = {"world_size": len(case.sizes), "rank": rank} if isinstance(group, str) else {}
    options = case.options() | options
    return TokenDispatcher(kind, group, E, case.topk, etp_size=etp, **place, **options)


def experts_of(case: Case, carrier: TokenDispatcher) -> GroupedMLP:
    first, local = carrier.ep_rank * carrier.local_experts, carrier.local_experts
    shard = {"etp_size": carrier.etp_size, "etp_rank": carrier.etp_rank, "dtype": case.w1.dtype}
    experts = GroupedMLP(local, H, F, **shard)
    return experts.load_experts(case.w1[first : first + local], case.w2[first : first + local])


def six_phases(
    carrier: TokenDispatcher, experts: GroupedMLP, x: Tensor, chosen: Tensor, probs: Tensor, mask: Tensor | None = None
) -> Iterator[Any]:
    """Yields the handle behind the dispatch, then the result."""
    tokens, slots, handle = carrier.dispatch_preprocess(x, chosen, probs, mask)
    rows, counts, row_probs = carrier.dispatch_postprocess(*carrier.token_dispatch(tokens, slots, handle), handle)
    yield handle
    out, _ = experts(rows, counts, row_probs)
    home = carrier.token_combine(carrier.combine_preprocess(out, handle), handle)
    yield carrier.combine_postprocess(home, handle)


def trained(kind: str, case: Case, etp: int, rank: int, group: Any, **options: Any) -> list[Tensor]:
    """Result and gradients of x, logits, w1 and w2 on a rank."""
    carrier = dispatcher(kind, case, etp, rank, group, **options)
    experts = experts_of(case, carrier)
    x, logits = (every[rank].clone().requires_grad_() for every in (case.x, case.logits))
    probs, chosen = topk_routing_with_score_function(logits, case.topk)
    y = list(six_phases(carrier, experts, x, chosen, probs))[1]
    loss_of(y.float()).backward()
    return [y.detach(), x.grad, logits.grad, *grads_of(experts)]  # type: ignore[list-item]


def grads_of(experts: GroupedMLP) -> tuple[Tensor, Tensor]:
    """As (L, H, 2F') and (L, F', H)."""
    assert experts.weight1.grad is not None and experts.weight2.grad is not None
    return experts.weight1.grad.view_as(experts.w1), experts.weight2.grad.view_as(experts.w2)


# ---- M1, M2: layouts


def layer_of(
    case: Case, kind: str, rank: int, group: Any, etp: int = 1, shared: Any = None, **options: Any
) -> MoELayer:
    config = RouterConfig(E, H, case.topk, **options.pop("router", {}))
    router = TopKRouter(config)
    router.weight.data = randn(E, H, seed=5) / math.sqrt(H)
    given = {name: options.pop(name) for name in ("tensor_model_parallel_size", "sequence_parallel") if name in options}
    carrier = dispatcher(kind, case, etp, rank, group, **options)
    return MoELayer(router, carrier, experts_of(case, carrier), shared, **given)


def test_m1_shapes_in_five_dimensional_parallelism(clusters: Any) -> None:
    """Attention gives (S / cp / tp, B, H); training with tp needs sequence parallelism."""
    case = Case(1)

    def run(rank: int, group: str) -> None:
        x = randn(6, 2, H)
        layer = layer_of(case, "mc2", rank, group, tensor_model_parallel_size=2)
        with pytest.raises(ValueError, match="sequence_parallel is False in training with tp 2"):
            layer(x)
        assert layer.eval()(x)[0].shape == x.shape
        found, bias = layer_of(case, "mc2", rank, group, tensor_model_parallel_size=2, sequence_parallel=True)(x)
        assert found.shape == x.shape and found.dtype == x.dtype and bias is None

    clusters[1].run(run)


def groups_by_loop(order: str, sizes: dict[str, int], token: str) -> list[list[int]]:
    """Ranks that differ in the axes of the token only."""
    axes = order.split("-")
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(sizes.values())):
        rest, place = rank, {}
        for axis in axes:
            rest, place[axis] = divmod(rest, sizes.get(axis, 1))
        found.setdefault(tuple(place[axis] for axis in axes if axis not in token.split("-")), []).append(rank)
    return list(found.values())


@pytest.mark.parametrize(
    "order, sizes",
    [
        ("tp-cp-ep-dp-pp", {"tp": 2, "cp": 2, "dp": 2}),
        ("tp-cp-ep-dp-pp", {"tp": 1, "ep": 8}),
        ("tp-cp-ep-dp-pp", {"tp": 2, "ep": 2, "dp": 2}),
        ("tp-cp-ep-dp-pp", {"tp": 2, "ep": 2, "dp": 2, "pp": 2}),
        ("tp-cp-ep-dp-pp", {"tp": 2, "cp": 2, "dp": 3, "pp": 2}),
        ("tp-cp-ep-pp-dp", {"tp": 2, "ep": 2, "pp": 2, "dp": 2}),
        ("dp-tp-ep-cp-pp", {"tp": 3, "dp": 2, "cp": 2}),
        ("pp-dp-cp-ep-tp", {"pp": 2, "dp": 2, "ep": 2, "tp": 2}),
    ],
)
def test_m2_rank_groups(order: str, sizes: dict[str, int]) -> None:
    found = rank_groups(order, sizes)
    assert len(found) == 2 ** len(order.split("-")) - 1
    for token, groups in found.items():
        assert sorted(groups) == sorted(groups_by_loop(order, sizes, token)), token
        assert groups == sorted(groups) or order != "tp-cp-ep-dp-pp"


def test_m2_parallel_folding() -> None:
    order = "tp-cp-ep-dp-pp"
    dense, experts = folded_groups(order, 8, tp=2, cp=2, ep=8)
    assert experts["ep"] == [list(range(8))] and dense["tp-cp"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    dense, experts = folded_groups(order, 8, tp=4, etp=2, ep=2)
    assert experts["tp"] == [[0, 1], [2, 3], [4, 5], [6, 7]] and dense["tp"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert experts["ep"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert experts["tp-ep"] == [[0, 1, 2, 3], [4, 5, 6, 7]] and experts["dp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    dense, experts = folded_groups(order, 16, tp=2, cp=2, ep=4, pp=2)
    assert dense["pp"] == experts["pp"] == [[rank, rank + 8] for rank in range(8)]
    with pytest.raises(ValueError, match="different pipeline groups; end it with pp"):
        folded_groups("tp-cp-ep-pp-dp", 16, tp=2, ep=4, pp=2)
    with pytest.raises(ValueError, match=r"world is 8; it must be a multiple of etp \* ep \* pp = 3"):
        folded_groups(order, 8, ep=3)
    with pytest.raises(ValueError, match="is no axis"):
        rank_groups(order, {"etp": 2})


# ---- M3 to M5: choice


def test_m3_what_the_router_refuses() -> None:
    for kind in ("sinkhorn", "quantile_balancing"):
        with pytest.raises(ValueError, match=f"is '{kind}', which is not offered"):
            TopKRouter(RouterConfig(E, H, moe_router_load_balancing_type=kind))


def test_m3_router_keeps_the_bias_in_float32_and_counts_active_tokens_once() -> None:
    config = RouterConfig(E, H, K, "none", moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    router = TopKRouter(config)
    router.weight.data = randn(E, H)
    router = router.to(BF16)
    assert router.weight.dtype == BF16 and router.expert_bias is not None and router.expert_bias.dtype == FP32
    x, mask = randn(4, 2, H).to(BF16), torch.arange(8).view(4, 2) % 3 > 0
    probs, chosen = router(x, mask)
    assert probs.shape == chosen.shape == (8, E) and router.local_tokens_per_expert is not None
    assert torch.equal(router.local_tokens_per_expert, chosen[mask.view(-1)].sum(0).float())
    with torch.no_grad():
        router(x, mask)  # a recomputation, or evaluation
    counted = router.local_tokens_per_expert.clone()
    assert float(counted.sum()) == K * int(mask.sum())
    router.update_expert_bias()
    close(router.expert_bias, config.moe_router_bias_update_rate * torch.sign(counted.mean() - counted))
    assert not router.local_tokens_per_expert.any()


@pytest.mark.parametrize("moe_router_dtype", [None, "fp32", "fp64"])
def test_m3_logits_are_computed_in_the_routers_dtype(moe_router_dtype: str | None) -> None:
    """From input and weights of another, with the bias."""
    config = RouterConfig(E, H, K, "none", moe_router_dtype=moe_router_dtype, add_bias_linear=True, params_dtype=BF16)
    router = TopKRouter(config)
    assert router.bias is not None
    router.weight.data, router.bias.data = randn(E, H).to(BF16), randn(E, seed=1).to(BF16)
    x = randn(6, 1, H, seed=2).to(BF16)
    dtype = {None: BF16, "fp32": FP32, "fp64": FP64}[moe_router_dtype]
    expected = torch.nn.functional.linear(x.to(dtype), router.weight.to(dtype), router.bias.to(dtype))
    found = router.gating(x)
    assert found.dtype == dtype and torch.equal(found, expected)
    assert router(x)[0].dtype == dtype
    with pytest.raises(ValueError, match="moe_router_dtype is 'fp16'"):
        TopKRouter(RouterConfig(E, H, K, moe_router_dtype="fp16")).gating(x)


class Drawn(NamedTuple):
    """A router's input and configuration by chance."""

    x: Tensor
    mask: Tensor
    weight: Tensor
    config: dict[str, Any]


def drawn(seed: int) -> Drawn:
    draw = random.Random(seed)
    sequence, batch = draw.choice([3, 6]), draw.choice([1, 2])
    config: dict[str, Any] = {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.1, 0.2, 0.3],
        "moe_z_loss_coeff": 0.5,
        "moe_router_score_function": draw.choice(["softmax", "sigmoid"]),
        "calculate_per_token_loss": draw.random() < 0.5,
    }
    config["moe_router_enable_expert_bias"] = config["moe_router_score_function"] == "sigmoid"
    config["moe_token_drop_policy"] = policy = draw.choice(["probs", "position"])
    config["moe_pad_expert_input_to_capacity"] = pad = draw.random() < 0.5
    batch = 1 if pad or policy == "position" else batch  # the active tokens then keep their order
    # In front, behind and in between: the same number in every sequence, whose losses are then those of the rest.
    kept = draw.randint(1, sequence - 1)
    mask = torch.stack([torch.randperm(sequence, generator=torch.Generator().manual_seed(seed + b)) < kept
                        for b in range(batch)], 1)  # fmt: skip
    return Drawn(randn(sequence, batch, H, seed=seed), mask, randn(E, H, seed=seed + 100) / 4, config)


@pytest.mark.parametrize("factor", [None, 0.75, 1.5])
@pytest.mark.parametrize("seed", range(8))
def test_m6_a_router_does_not_see_inactive_tokens(seed: int, factor: float | None, loss_scale_of_1: None) -> None:
    """Places, losses, counts and gradients are those of the active tokens alone, whatever the others hold."""
    x, mask, weight, given = drawn(seed)
    sequence, batch = mask.shape
    # The active tokens of each sequence, by sequence place and batch.
    order = torch.stack([mask[:, b].nonzero().squeeze(1) * batch + b for b in range(batch)], 1).reshape(-1)
    capacity = 0 if factor is None else get_capacity(sequence * batch * K, E, factor)
    found = []
    for whole in (True, False):
        alone = None if factor is None else capacity * E / (len(order) * K)  # the same C, which is that of all tokens
        config = RouterConfig(E, H, K, **given, moe_expert_capacity_factor=factor if whole else alone)
        router = TopKRouter(config)
        router.weight.data = weight.clone()
        own = x.masked_fill(~mask.unsqueeze(-1), (0.0, 1e4, math.nan, math.inf)[seed % 4])
        own = own if whole else own.reshape(-1, H)[order].view(-1, batch, H)
        own.requires_grad_()
        probs, chosen = router(own, mask if whole else None)
        (probs * torch.arange(1, E + 1)).sum().backward()
        assert own.grad is not None and router.weight.grad is not None
        gradient = own.grad.reshape(-1, H)
        if whole:
            rest = ~mask.reshape(-1)
            assert not probs[rest].any() and not chosen[rest].any() and not gradient[rest].any()
            probs, chosen, gradient = probs[order], chosen[order], gradient[order]
        counted = router.local_tokens_per_expert
        found.append([probs.detach(), chosen.float(), gradient, router.weight.grad, *router.losses.values()])
        found[-1] += [] if counted is None else [counted]
    assert len(found[0]) == len(found[1]) >= 8
    for one, other in zip(*found, strict=True):
        close(one, other, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_m7_losses_a_token_are_multiplied_by_the_tokens(world: int, masked: bool, loss_scale_of_1: None) -> None:
    """calculate_per_token_loss: by this rank's active tokens times tp x cp, which the caller divides by later."""
    mask = (torch.arange(8) % 4 > 0).view(8, 1) if masked else None

    def run(rank: int, group: Any) -> None:
        found = []
        for per_token in (False, True):
            kinds = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.5}
            config = RouterConfig(E, H, K, **kinds, calculate_per_token_loss=per_token)
            router = TopKRouter(config, SimpleNamespace(tp_cp=group))
            leaf = randn(8, 1, E, seed=9 + rank).requires_grad_()
            probs, _ = router.routing(leaf, mask)
            (probs * 0).sum().backward()
            found.append([leaf.grad, *router.losses.values()])
        close(found[1][0], found[0][0] * (6 if masked else 8) * world)
        assert all(torch.equal(one, other) for one, other in zip(found[0][1:], found[1][1:], strict=True))
        # z loss: the mean over the ranks of tp x cp, not their sum.
        logits = randn(8, 1, E, seed=9 + rank).requires_grad_()
        loss = logits.reshape(-1, E)[slice(None) if mask is None else mask.view(-1)].logsumexp(1).square().mean()
        close(found[0][1], loss.detach())
        (loss * 0.5 / world).backward()
        leaf = logits.detach().clone().requires_grad_()
        router = TopKRouter(RouterConfig(E, H, K, "none", moe_z_loss_coeff=0.5), SimpleNamespace(tp_cp=group))
        (router.routing(leaf, mask)[0] * 0).sum().backward()
        assert leaf.grad is not None and logits.grad is not None
        close(leaf.grad, logits.grad)

    threads(world).run(run)


def test_m8_a_mask_of_tokens_without_sequences() -> None:
    router = TopKRouter(RouterConfig(E, H, K, "none"))
    router.weight.data = randn(E, H)
    x, mask = randn(6, H, seed=2), torch.arange(6) % 2 > 0
    for found, expected in zip(router(x, mask), router(x.view(6, 1, H), mask.view(6, 1)), strict=True):
        assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="mask is"):
        router(x, mask[1:])


def test_m9_losses_of_a_layer_that_is_not_trained() -> None:
    """None in evaluation, none without gradients: a recomputation would count twice."""
    router = TopKRouter(RouterConfig(E, H, K, "global_aux_loss", 0.5))
    logits = randn(5, 1, E)
    for training, enabled in ((False, True), (True, False), (True, True)):
        router.train(training)
        with torch.set_grad_enabled(enabled):
            router.routing(logits)
        assert router.ga_steps is not None and bool(router.losses) == (training and enabled)
        assert float(router.ga_steps) == (training and enabled)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_m4_input_jitter(dtype: Any) -> None:
    router = TopKRouter(RouterConfig(E, H, moe_input_jitter_eps=0.1))
    x = torch.full((400, H), 2.0, dtype=dtype)
    noisy = router.apply_input_jitter(x)
    assert noisy.dtype == dtype and 1.78 < float(noisy.min()) < 1.85 and 2.15 < float(noisy.max()) < 2.22
    assert abs(float(noisy.float().mean()) - 2.0) < 0.01 and len(noisy.unique()) > 8
    assert TopKRouter(RouterConfig(E, H)).apply_input_jitter(x) is x


# ---- M6: capacity


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world, etp", [(1, 1), (2, 1), (4, 2)])
@pytest.mark.parametrize("factor", [0.5, 6.0])
def test_m6_padding_changes_nothing(kind: str, world: int, etp: int, factor: float, clusters: Any) -> None:
    case = Case(world, [6] * world)

    def run(rank: int, group: Any) -> list[Tensor]:
        found = []
        for pad in (False, True):
            carrier = dispatcher(kind, case, etp, rank, group, capacity_factor=factor, pad_to_capacity=pad)
            experts = experts_of(case, carrier)
            x, logits = (every[rank].clone().requires_grad_() for every in (case.x, case.logits))
            probs, chosen = topk_routing_with_score_function(logits, K)
            probs, chosen = apply_router_token_dropping(probs, chosen, K, factor, pad_to_capacity=pad)
            y = list(six_phases(carrier, experts, x, chosen, probs))[1]
            loss_of(y).backward()
            found.append([y.detach(), x.grad, logits.grad, *grads_of(experts)])
        for one, other in zip(*found, strict=True):
            close(one, other)
        return found[0][0]

    every = on_ranks(kind, world, clusters, run)
    assert all(bool(y.isfinite().all()) for y in every)


# ---- M7 to M9, M19: losses


@pytest.fixture
def loss_scale_of_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)


def aux_by_loop(logits: Tensor, topk: int, coeff: float, function: str = "softmax") -> Tensor:
    """The balancing loss of one set of tokens: coeff * E * sum over experts of share of rows * mean score."""
    scores = logits.softmax(1) if function == "softmax" else logits.sigmoid()
    if function == "sigmoid":
        scores = scores / scores.sum(1, keepdim=True)
    counts = [0] * logits.shape[1]
    for row in scores:
        for expert in row.argsort(descending=True)[:topk].tolist():
            counts[expert] += 1
    tokens = len(logits)
    return sum((coeff * E * counts[e] / (topk * tokens) * scores[:, e].mean() for e in range(E)), torch.zeros(()))


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_m8_seq_aux_loss_is_the_mean_over_sequences(function: str) -> None:
    sequence, batch, coeff = 6, 3, 0.2
    logits = randn(sequence, batch, E, seed=8)
    config = RouterConfig(E, H, K, "seq_aux_loss", coeff, moe_router_score_function=function)
    router = TopKRouter(config)
    leaf, own = (logits.clone().requires_grad_() for _ in range(2))
    probs, _ = router.routing(leaf)
    expected = sum(aux_by_loop(own[:, b], K, coeff, function) for b in range(batch)) / batch
    close(router.losses["seq_load_balancing_loss"] * coeff, expected.detach())  # type: ignore[union-attr]
    (probs * 0).sum().backward()
    expected.backward()  # type: ignore[union-attr]
    assert leaf.grad is not None and own.grad is not None
    close(leaf.grad, own.grad)
    # One sequence: the loss of a micro-batch.
    chosen, scores = compute_routing_scores_for_aux_loss(logits[:, 0], K, function)
    loss = switch_load_balancing_loss_func(scores, chosen.sum(0), sequence, K, E, coeff)
    close(loss, aux_by_loop(logits[:, 0], K, coeff, function))


def test_m8_inactive_tokens_count_nothing_in_any_loss() -> None:
    logits, mask = randn(8, 1, E, seed=9), torch.arange(8).view(8, 1) < 5
    kinds = ["aux_loss", "seq_aux_loss", "global_aux_loss"]
    found = []
    for given, active in ((logits, mask), (logits[:5], None)):
        router = TopKRouter(RouterConfig(E, H, K, kinds, [0.1, 0.2, 0.3], moe_z_loss_coeff=0.5))
        leaf = given.clone().requires_grad_()
        probs, _ = router.routing(leaf, active)
        (probs * 0).sum().backward()
        assert leaf.grad is not None and not leaf.grad[5:].any()
        found.append([*router.losses.values(), leaf.grad[:5]])
    assert len(found[0]) == 5
    for one, other in zip(*found, strict=True):
        close(one, other)
    router.eval()
    assert router.routing(logits)[0].shape == (8, E) and router.losses == {}


def test_m9_global_aux_loss_averages_over_steps() -> None:
    """Two ranks, two steps: counts are summed over ranks and averaged over steps, scores are this rank's."""
    steps = [[randn(5, 1, E, seed=40 + 10 * step + rank) for rank in range(2)] for step in range(2)]

    def counts(logits: Tensor) -> Tensor:
        return torch.bincount(logits.view(-1, E).argsort(1, descending=True)[:, :K].reshape(-1), minlength=E)

    def run(rank: int, group: Any) -> None:
        router = TopKRouter(RouterConfig(E, H, K, "global_aux_loss", 0.5), SimpleNamespace(tp_dp_cp=group, tp_cp=None))
        for _ in range(2):  # the second time behind a reset
            total = torch.zeros(E)
            for number, step in enumerate(steps):
                router.routing(step[rank])
                total = total + counts(step[0]) + counts(step[1])
                scores = step[rank].view(5, E).softmax(1).sum(0)
                expected = E / (K * 10**2) * (scores * total / (number + 1)).sum()
                close(router.losses["global_load_balancing_loss"], expected)
            assert router.ga_steps is not None and float(router.ga_steps) == 2
            router.reset_global_aux_loss_tracker()
            assert router.global_tokens_per_expert is not None and not router.global_tokens_per_expert.any()

    threads(2).run(run)


def test_m19_aux_loss_is_of_a_micro_batch_and_global_aux_loss_spans_replicas() -> None:
    """4 ranks, tp_cp 2 by dp 2. The parts of the ranks add up to the loss of their micro-batch, or of all."""
    logits = [randn(size, 1, E, seed=60 + rank) for rank, size in enumerate((4, 5, 0, 6))]
    pairs = [threads(2), None]
    assert pairs[0] is not None
    alone = [aux_by_loop(torch.cat([logits[2 * d], logits[2 * d + 1]]).view(-1, E), K, 1.0) for d in range(2)]

    def micro(replica: int) -> list[Tensor]:
        def run(rank: int, group: Any) -> Tensor:
            router = TopKRouter(RouterConfig(E, H, K, "aux_loss", 1.0), SimpleNamespace(tp_cp=group))
            router.routing(logits[2 * replica + rank])
            return router.losses["load_balancing_loss"]

        return threads(2).run(run)

    for replica in range(2):
        close(sum(micro(replica), torch.zeros(())), alone[replica])

    def whole(rank: int, group: Any) -> Tensor:
        router = TopKRouter(RouterConfig(E, H, K, "global_aux_loss", 1.0), SimpleNamespace(tp_dp_cp=group))
        router.routing(logits[rank])
        return router.losses["global_load_balancing_loss"]

    everything = aux_by_loop(torch.cat(logits).view(-1, E), K, 1.0)
    close(sum(threads(4).run(whole), torch.zeros(())), everything)
    assert abs(float(everything - sum(alone) / 2)) > 1e-4


# ---- M10 to M13: the way of the rows


@pytest.mark.parametrize("world, etp", LAYOUTS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_m10_dispatchers_against_one_process(world: int, etp: int, routing: str, clusters: Any) -> None:
    """All kinds, uneven T with a rank without tokens: results and gradients; the kinds have the same bits."""
    case = Case(world, [5, 0, 3, 7][:world], routing)
    y, gx, glogits, _, _ = case.expected()
    every = {
        k: on_ranks(k, world, clusters, lambda rank, group, k=k: trained(k, case, etp, rank, group)) for k in KINDS
    }
    for rank in range(world):
        for found, expected in zip(every["mc2"][rank], (y[rank], gx[rank], glogits[rank]), strict=False):
            close(found.double(), expected, atol=1e-5)
        for kind in KINDS[1:]:
            assert all(torch.equal(a, b) for a, b in zip(every["mc2"][rank], every[kind][rank], strict=True)), kind


@pytest.mark.parametrize("world, etp", [(1, 1), (4, 2)])
def test_m10_bf16(world: int, etp: int, clusters: Any) -> None:
    case = Case(world, dtype=BF16)
    y, gx = case.expected()[:2]
    for rank, found in enumerate(clusters[world].run(lambda rank, group: trained("mc2", case, etp, rank, group))):
        assert found[0].dtype == BF16
        for one, other in zip(found, (y[rank], gx[rank]), strict=False):
            close(one.double(), other, rtol=2**-5, atol=2**-5 * float(other.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_m10_two_micro_batches_and_a_mask(kind: str, clusters: Any) -> None:
    """Dispatch, dispatch, combine, combine through one dispatcher; inactive tokens give and get zeros."""
    case = Case(2)

    def run(rank: int, group: Any) -> None:
        carrier = dispatcher(kind, case, 1, rank, group)
        experts = experts_of(case, carrier)
        mask = torch.arange(5) != 2

        def steps(number: int, active: Tensor | None) -> Iterator[Any]:
            x = (case.x[rank] * (number + 1)).requires_grad_()
            probs, chosen = topk_routing_with_score_function(logits_of(5, 70 + rank + number), K)
            forward = six_phases(carrier, experts, x, chosen, probs, active)
            yield next(forward)
            y = next(forward)
            y.square().sum().backward()
            yield y.detach(), x.grad

        expected = [list(steps(0, None))[1], list(steps(1, mask))[1]]
        first, second = steps(0, None), steps(1, mask)
        handles = next(first), next(second)
        assert all(isinstance(handle, Handle) for handle in handles)
        for found, wanted in zip((next(first), next(second)), expected, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        assert not any(each[2].any() for each in expected[1]) and all(each[~mask].numel() for each in expected[1])
        assert bool(expected[0][0][2].any())

    on_ranks(kind, 2, clusters, run)


@pytest.mark.parametrize("etp", [1, 2, 8])
def test_m10_eight_ranks(etp: int, clusters: Any) -> None:
    """Dispatch's ep_recv_counts are longer there."""
    case = Case(8, [5, 0, 3, 7, 1, 2, 4, 6])
    y, gx, glogits, _, _ = case.expected()
    for rank, found in enumerate(clusters[8].run(lambda rank, group: trained("mc2", case, etp, rank, group))):
        for one, other in zip(found, (y[rank], gx[rank], glogits[rank]), strict=False):
            close(one.double(), other, atol=1e-5)


def in_a_process(rank: int) -> list[Tensor]:
    found = trained("mc2", Case(2), 2, rank, torch.distributed.group.WORLD)
    assert all(map(torch.equal, found, trained("alltoall", Case(2), 2, rank, None)))
    return found


def test_m10_process_groups(tmp_path: Path, clusters: Any) -> None:
    """From a process group, in processes: the bits of the threads of a LocalCluster."""
    expected = clusters[2].run(lambda rank, group: trained("mc2", Case(2), 2, rank, group))
    for found, wanted in zip(run_processes(2, in_a_process, tmp_path), expected, strict=True):
        assert all(map(torch.equal, found, wanted))


def test_m10_wrong_calls_are_refused(clusters: Any) -> None:
    case = Case(1)

    def run(rank: int, group: str) -> None:
        carrier = dispatcher("mc2", case, 1, rank, group)
        probs, chosen = topk_routing_with_score_function(case.logits[0], K)
        _, _, handle = carrier.dispatch_preprocess(case.x[0], chosen, probs)
        with pytest.raises(ValueError, match="handle has no rows yet: call token_dispatch before token_combine"):
            carrier.token_combine(case.x[0], handle)
        with pytest.raises(ValueError, match="more than 3 experts"):
            carrier.dispatch_preprocess(case.x[0], torch.ones_like(chosen), probs)
        with pytest.raises(ValueError, match=r"routing_map is \(5, 4\)"):
            carrier.dispatch_preprocess(case.x[0], chosen[:, :4], probs)
        for wrong, message in (
            ({"etp_size": 2}, "etp_size is 2; it must divide the 1 ranks"),
            ({"probs_on": "router"}, "probs_on is 'router'"),
            ({"pad_to_capacity": True}, "needs a capacity_factor"),
            ({"pad_to_capacity": True, "capacity_factor": 1.0, "max_tokens": 4}, "must have the same T then"),
        ):
            with pytest.raises(ValueError, match=message):
                TokenDispatcher("mc2", group, E, K, world_size=1, rank=0, **wrong)
        with pytest.raises(ValueError, match="kind is 'flex'"):
            TokenDispatcher("flex", group, E, K, world_size=1, rank=0)
        with pytest.raises(ValueError, match="kind 'alltoall' needs a process group"):
            TokenDispatcher("alltoall", group, E, K, world_size=1, rank=0)
        with pytest.raises(ValueError, match="is a name: give world_size and rank too"):
            TokenDispatcher("mc2", group, E, K)
        with pytest.raises(ValueError, match="call setup_metadata first"):
            MC2Manager(group, E, K, E, world_size=1, rank=0).dispatch(case.x[0])
        with pytest.raises(ValueError, match="moe_router_padding_for_quantization is set"):
            config = SimpleNamespace(moe_router_padding_for_quantization=True)
            MC2Manager(group, E, K, E, config, world_size=1, rank=0)

    clusters[1].run(run)


@pytest.mark.parametrize("world, etp", LAYOUTS)
@pytest.mark.parametrize("static, overlapped", [(False, False), (True, False), (False, True)])
def test_m10_manager_of_the_flex_dispatcher(
    world: int, etp: int, static: bool, overlapped: bool, clusters: Any
) -> None:
    """The calls of Megatron-LM's MoEFlexTokenDispatcher: the bits of the six phases."""
    case = Case(world, [5, 0, 3, 7][:world])

    def run(rank: int, group: str) -> list[Tensor]:
        place, local = {"world_size": world, "rank": rank}, E // (world // etp)
        manager = MC2Manager(group, local, K * etp, E * etp, **place, max_tokens=7, static=static)
        experts = experts_of(case, dispatcher("mc2", case, etp, rank, group))
        x, logits = (every[rank].clone().requires_grad_() for every in (case.x, case.logits))
        probs, chosen = topk_routing_with_score_function(logits, K)
        tokens = len(x)
        spread = [
            each.reshape(tokens, world // etp, 1, local).expand(-1, -1, etp, -1).reshape(tokens, world, local)
            for each in (chosen, probs)
        ]
        manager.setup_metadata(*spread)
        assert manager.token_probs.shape == (tokens, K * etp)
        assert torch.equal(manager.token_indices >= 0, manager.token_probs > 0)
        before: list[tuple[Tensor, Tensor]] = []  # what was cut off, and the leaf in its place

        def cut(tensor: Tensor) -> Tensor:
            """The overlapped schedule runs the backward of each phase by itself."""
            before.append((tensor, tensor.detach().requires_grad_() if overlapped else tensor))
            return before[-1][1]

        manager.token_probs = cut(manager.token_probs)
        rows = cut(manager.dispatch(x, True, True))
        manager.dispatched_probs = cut(manager.dispatched_probs)
        rows, row_probs = manager.get_permuted_hidden_states_by_experts(rows)
        counts = manager.get_number_of_tokens_per_expert()
        assert len(rows) == len(row_probs) and (static or len(rows) == int(counts.sum()))
        out, _ = experts(rows, counts, row_probs)
        y = manager.combine(manager.get_restored_hidden_states_by_experts(out), True, True)
        assert manager.handle is None
        loss_of(y).backward()
        for cuts in (before[1:], before[:1]) if overlapped else ():
            torch.autograd.backward([whole for whole, _ in cuts], [leaf.grad for _, leaf in cuts])
        return [y.detach(), x.grad, logits.grad, *grads_of(experts)]  # type: ignore[list-item]

    expected = clusters[world].run(lambda rank, group: trained("mc2", case, etp, rank, group))
    for found, wanted in zip(clusters[world].run(run), expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_m10_float64_probabilities_and_rows_without_weight(clusters: Any) -> None:
    """Probabilities come in the router's fp64; with a capacity the manager does not send a slot of probability 0."""
    case = Case(1)

    def run(rank: int, group: str) -> None:
        probs, chosen = topk_routing_with_score_function(case.logits[0].double(), K)
        probs = torch.where(torch.arange(E) == 2, 0, probs)
        carrier = dispatcher("mc2", case, 1, rank, group)
        tokens, slots, handle = carrier.dispatch_preprocess(case.x[0], chosen, probs)
        _, _, found = carrier.dispatch_postprocess(*carrier.token_dispatch(tokens, slots, handle), handle)
        assert found.dtype == FP64
        for factor in (None, 1.0):
            config = SimpleNamespace(moe_expert_capacity_factor=factor)
            manager = MC2Manager(group, E, K, E, config, world_size=1, rank=0)
            manager.setup_metadata(chosen, probs)
            rows = manager.dispatch(case.x[0])
            sent = chosen & (probs != 0) if factor else chosen
            assert manager.get_number_of_tokens_per_expert().tolist() == sent.sum(0).tolist()
            assert manager.get_permuted_hidden_states_by_experts(rows)[1].dtype == FP64
            manager.combine(rows)

    clusters[1].run(run)


def test_m10_the_algorithm_is_that_of_the_caller(clusters: Any) -> None:
    """Window or direct: the same bits by other ways, and an unknown one is refused by the op."""
    case = Case(2)
    results = []
    for comm_alg in ("window", "direct"):
        results.append(
            clusters[2].run(lambda rank, group, a=comm_alg: trained("mc2", case, 1, rank, group, comm_alg=a))
        )
    for one, other in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    def unknown(rank: int, group: str) -> None:
        with pytest.raises(ValueError, match="comm_alg"):
            trained("mc2", case, 1, rank, group, comm_alg="fastest")

    clusters[2].run(unknown)


def maps_of(case: Case) -> list[Tensor]:
    return [topk_routing_with_score_function(logits, case.topk)[1] for logits in case.logits]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world, etp", LAYOUTS)
def test_m11_six_results(kind: str, world: int, etp: int, clusters: Any) -> None:
    case = Case(world, [5, 0, 3, 7][:world])
    maps, ep = maps_of(case), world // etp
    local = E // ep

    def run(rank: int, group: Any) -> None:
        carrier = dispatcher(kind, case, etp, rank, group)
        tokens, slots, handle = carrier.dispatch_preprocess(case.x[rank], maps[rank], maps[rank] / K)
        rows, _ = carrier.token_dispatch(tokens, slots, handle)
        splits = handle.splits
        assert splits is not None
        ep_rank, etp_rank = divmod(rank, etp)
        first = ep_rank * local

        def rows_from(e: int, t: int, expert: int) -> int:
            return int(maps[e * etp + t][:, expert].sum())

        mine = range(first, first + local)
        sent = [sum(int(maps[rank][:, e * local + each].sum()) for each in range(local)) for e in range(ep)]
        assert splits.input_splits.tolist() == sent and int(splits.num_out_tokens) == sum(sent)
        came = [sum(rows_from(e, etp_rank, expert) for expert in mine) for e in range(ep)]
        assert splits.output_splits.tolist() == came
        by_place = [sum(rows_from(e, t, expert) for e in range(ep) for expert in mine) for t in range(etp)]
        assert splits.output_splits_tp.tolist() == by_place
        table = [[rows_from(e, t, expert) for expert in mine] for t in range(etp) for e in range(ep)]
        assert splits.num_global_tokens_per_local_expert.tolist() == table
        assert splits.tokens_per_expert.tolist() == [sum(column) for column in zip(*table, strict=True)]
        carrier.combine_postprocess(carrier.token_combine(rows, handle), handle)

    on_ranks(kind, world, clusters, run)


@pytest.mark.parametrize("sizes", [[3, 0, 2, 4], [0, 0, 0, 0], [1, 5, 0, 1], [7]])
def test_m12_sort_chunks(sizes: list[int]) -> None:
    rows, probs = randn(sum(sizes), 4).requires_grad_(), randn(sum(sizes))
    for order in itertools.permutations(range(len(sizes))):
        found, weights = sort_chunks_by_idxs(rows, torch.tensor(sizes), torch.tensor(order), probs)
        chunks, parts = rows.split(sizes), probs.split(sizes)
        assert torch.equal(found, torch.cat([chunks[i] for i in order])) and weights is not None
        assert torch.equal(weights, torch.cat([parts[i] for i in order]))
        back = torch.tensor(order).argsort()
        again, _ = sort_chunks_by_idxs(found, torch.tensor(sizes)[list(order)], back)
        assert torch.equal(again, rows)  # M13: the inverse
        (gradient,) = torch.autograd.grad(found.sum(), rows)
        assert bool((gradient == 1).all())


@pytest.mark.parametrize("tokens", [0, 9])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_m12_permute(tokens: int, routing: str) -> None:
    probs, chosen = topk_routing_with_score_function(logits_of(tokens, 11, routing), K)
    x = randn(tokens, H).requires_grad_()
    rows, weights, sources, _, counts = permute(x, chosen, probs, num_out_tokens=tokens * K)
    expected = [t for e in range(E) for t in range(tokens) if chosen[t, e]]
    assert sources.tolist() == expected and torch.equal(rows, x[expected]) and counts is None
    assert weights is not None
    assert weights.tolist() == [float(probs[t, e]) for e in range(E) for t in range(tokens) if chosen[t, e]]
    assert torch.equal(permute(x, chosen)[0], rows)
    close(unpermute(rows, sources, x.shape), K * x)
    close(unpermute(rows, sources, x.shape, probs, chosen), probs.sum(1, keepdim=True) * x)
    half = unpermute(rows.to(BF16), sources, x.shape, probs, chosen)
    assert half.dtype == BF16
    (gradient,) = torch.autograd.grad(rows.sum(), x)
    assert bool((gradient == K).all())
    factor = 1.0
    padded, mask = apply_router_token_dropping(probs, chosen, K, factor, pad_to_capacity=True)
    capacity = get_capacity(tokens * K, E, factor)
    rows, weights, sources, _, _ = permute(x, mask, padded, num_out_tokens=capacity * E, drop_and_pad=True)
    assert len(rows) == capacity * E
    places = [t for e in range(E) for t in range(tokens) if mask[t, e]]
    assert sources.tolist() == places and torch.equal(rows, x[places])
    close(unpermute(rows, sources, x.shape, padded, mask, drop_and_pad=True), padded.sum(1, keepdim=True) * x)
    with pytest.raises(ValueError, match="align_size is 16"):
        permute(x, chosen, align_size=16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world, etp", LAYOUTS)
def test_m12_rows_are_those_of_gather_over_etp_and_chunk_sort(kind: str, world: int, etp: int, clusters: Any) -> None:
    """Megatron-LM's all-to-all over ep, all-gather-v over etp and chunk sort, played in one process."""
    case = Case(world, [5, 0, 3, 7][:world])
    maps, ep = maps_of(case), world // etp
    local = E // ep

    def run(rank: int, group: Any) -> None:
        carrier = dispatcher(kind, case, etp, rank, group)
        tokens, slots, handle = carrier.dispatch_preprocess(case.x[rank], maps[rank], maps[rank] / K)
        rows, probs = carrier.token_dispatch(tokens, slots, handle)
        rows, counts, probs = carrier.dispatch_postprocess(rows, probs, handle)
        first = (rank // etp) * local
        # Place t of ETP has what the ranks (e, t) sent to it, by (e, expert); the gather puts place behind place.
        chunks = [
            case.x[e * etp + t][maps[e * etp + t][:, first + expert]]
            for t in range(etp) for e in range(ep) for expert in range(local)
        ]  # fmt: skip
        sizes = torch.tensor([len(chunk) for chunk in chunks])
        order = [(t * ep + e) * local + expert for expert in range(local) for e in range(ep) for t in range(etp)]
        expected, _ = sort_chunks_by_idxs(torch.cat(chunks), sizes, torch.tensor(order))
        used = int(counts.sum())
        assert used == len(expected) and torch.equal(rows[:used], expected)
        close(probs[:used], torch.full((used,), 1 / K))
        # M13: back, and over etp the parts add up.
        home = carrier.token_combine(carrier.combine_preprocess(rows, handle), handle)
        close(carrier.combine_postprocess(home, handle), case.x[rank] * K * etp)

    on_ranks(kind, world, clusters, run)


@pytest.mark.parametrize("world, etp", [(2, 2), (4, 2)])
def test_m13_parts_of_shards_are_summed_on_the_way_home(world: int, etp: int, clusters: Any) -> None:
    """Place t of ETP returns its share of a row's columns: home comes the whole row, k times."""
    case = Case(world)
    maps = maps_of(case)

    def run(rank: int, group: str) -> None:
        carrier = dispatcher("mc2", case, etp, rank, group)
        tokens, slots, handle = carrier.dispatch_preprocess(case.x[rank].view(5, 1, H), maps[rank], maps[rank] / K)
        rows, _ = carrier.token_dispatch(tokens, slots, handle)
        part = torch.arange(H) % etp == carrier.etp_rank
        home = carrier.token_combine(torch.where(part, rows, 0), handle)
        out = carrier.combine_postprocess(home, handle)
        assert out.shape == (5, 1, H)
        close(out.view(5, H), case.x[rank] * K)

    clusters[world].run(run)


# ---- M14 to M17: experts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world, etp", [(1, 1), (2, 1), (4, 2)])
def test_m14_probabilities_in_the_experts_or_in_combine(kind: str, world: int, etp: int, clusters: Any) -> None:
    case = Case(world, [5, 0, 3, 7][:world])
    inside, outside = (
        on_ranks(kind, world, clusters, lambda rank, group, on=on: trained(kind, case, etp, rank, group, probs_on=on))
        for on in ("experts", "combine")
    )
    for one, other in zip(inside, outside, strict=True):
        for found, expected in zip(one, other, strict=True):
            close(found, expected, atol=1e-5)


class NoHostReads(TorchDispatchMode):
    """Raises where a value leaves a tensor: item, int(), bool()."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value is read on the host"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_host_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("a host copy")

    for name in ("cpu", "item", "tolist"):
        monkeypatch.setattr(Tensor, name, refused)


@pytest.mark.parametrize("world, etp", LAYOUTS)
@pytest.mark.parametrize("pad", [False, True])
def test_m15_m16_a_forward_makes_no_host_copy(
    world: int, etp: int, pad: bool, clusters: Any, no_host_copies: None
) -> None:
    """Router with losses, dispatch, experts, shared expert, combine. Shapes do not depend on the routing."""
    capacity = {"capacity_factor": 1.0, "pad_to_capacity": True} if pad else {}
    losses = {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.1]}
    router: dict[str, Any] = losses | {"moe_z_loss_coeff": 0.1}
    router |= {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True} if pad else {}
    case = Case(world, [8] * world)

    def run(rank: int, group: str) -> tuple[Any, Tensor]:
        shared = SharedExpertMLP(H, F, dtype=FP32)
        layer = layer_of(case, "mc2", rank, group, etp, shared, router=dict(router), **capacity)
        shapes, kept = [], []
        original = layer.experts.forward
        layer.experts.forward = lambda *given: (shapes.append(given[0].shape), kept.append(given[1]), original(*given))[
            2
        ]  # type: ignore[method-assign,func-returns-value]
        for seed in (1, 2):
            with NoHostReads():
                layer(randn(8, 1, H, seed=seed + rank))
        assert shapes[0] == shapes[1]
        return shapes[0], kept[0]

    for shape, counts in clusters[world].run(run):
        if pad:  # C = 8 * 3 / 8 rows of every expert from every rank
            assert shape == (E // (world // etp) * world * 3, H) and bool((counts == 3 * world).all())


def test_m15_drop_and_pad_has_static_shapes(clusters: Any) -> None:
    """The same sizes whatever the routing is, by every kind; splits too."""
    for kind, routing in itertools.product(KINDS, ROUTINGS):
        case = Case(2, [8, 8], routing)

        def run(rank: int, group: Any, kind: str = kind, case: Case = case) -> None:
            carrier = dispatcher(kind, case, 1, rank, group, capacity_factor=1.0, pad_to_capacity=True)
            probs, chosen = topk_routing_with_score_function(case.logits[rank], case.topk)
            probs, chosen = apply_router_token_dropping(probs, chosen, case.topk, 1.0, pad_to_capacity=True)
            each = case.topk  # T * k / E
            tokens, slots, handle = carrier.dispatch_preprocess(case.x[rank], chosen, probs)
            rows, counts, row_probs = carrier.dispatch_postprocess(
                *carrier.token_dispatch(tokens, slots, handle), handle
            )
            assert rows.shape == (4 * 2 * each, H) and row_probs.shape == (4 * 2 * each,)
            splits = handle.splits
            assert counts.tolist() == [2 * each] * 4 and splits is not None
            assert splits.input_splits.tolist() == splits.output_splits.tolist() == [4 * each] * 2
            assert int(splits.num_out_tokens) == E * each
            out = carrier.combine_postprocess(
                carrier.token_combine(carrier.combine_preprocess(rows * row_probs[:, None], handle), handle), handle
            )
            close(out, case.x[rank] * probs.sum(1, keepdim=True))

        on_ranks(kind, 2, clusters, run)


@pytest.mark.parametrize("kind, most_rows", [*((kind, None) for kind in KINDS), ("mc2", 16), ("alltoall", 3)])
@pytest.mark.parametrize(
    "world, etp, factor, on", [(1, 1, 1.0, "experts"), (2, 1, 1.5, "combine"), (4, 2, 0.5, "experts")]
)
def test_m15_padding_is_rows_of_tokens_whose_probability_has_a_gradient(
    kind: str, most_rows: int | None, world: int, etp: int, factor: float, on: str, clusters: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As Megatron-LM's permute with drop_and_pad has it: what a row would have given, times the gradient of its token.

    Also where one call cannot take all rows; the last rank's tokens 0 and 3 are inactive.
    """
    if most_rows is not None:
        monkeypatch.setattr(Carrier, "most_rows", most_rows)
        monkeypatch.setattr(Windows, "most_rows", most_rows)
    case = Case(world, [6] * world)
    capacity = get_capacity(6 * K, E, factor)

    def run(rank: int, group: Any, kind: str = kind) -> list[Tensor]:
        options = {"capacity_factor": factor, "pad_to_capacity": True, "probs_on": on}
        carrier = dispatcher(kind, case, etp, rank, group, **options)
        experts = experts_of(case, carrier)
        mask = torch.ones(6, dtype=torch.bool)
        mask[[0, 3] if rank == world - 1 else []] = False
        x, chosen = case.x[rank].clone().requires_grad_(), topk_routing_with_score_function(case.logits[rank], K)
        probs, final = apply_router_token_dropping(*chosen, K, factor, pad_to_capacity=True, mask=mask)
        probs.requires_grad_()
        assert bool(((probs == 0) & final).any()) and not final[~mask].any()
        assert (final.sum(0) == min(capacity, int(mask.sum()))).all()
        tokens, slots, handle = carrier.dispatch_preprocess(x, final, probs, mask)
        rows, counts, row_probs = carrier.dispatch_postprocess(*carrier.token_dispatch(tokens, slots, handle), handle)
        assert counts.tolist() == [capacity * world] * carrier.local_experts
        out, _ = experts(rows, counts, row_probs if on == "experts" else None)
        y = carrier.combine_postprocess(carrier.token_combine(carrier.combine_preprocess(out, handle), handle), handle)
        loss_of(y).backward()
        own, leaf = case.x[rank].clone().requires_grad_(), probs.detach().clone().requires_grad_()
        dense = torch.stack([mlp(own, case.w1[e], case.w2[e]) for e in range(E)], 1)  # (T, E, H)
        expected = (dense * torch.where(final, leaf, 0).unsqueeze(-1)).sum(1)
        loss_of(expected).backward()
        assert leaf.grad is not None and probs.grad is not None and x.grad is not None and own.grad is not None
        close(y, expected, atol=1e-5)
        close(x.grad, own.grad, atol=1e-4)
        close(probs.grad, leaf.grad, atol=1e-4)
        assert bool((probs.grad[final & (probs == 0)] != 0).all())
        first = carrier.ep_rank * carrier.local_experts
        sources = permute(own, final, num_out_tokens=E * capacity, drop_and_pad=True)[2].view(E, capacity)[first]
        mine = rows.view(carrier.local_experts, world, capacity, H)[0, rank]
        assert torch.equal(mine, torch.where(final[sources, first, None], own[sources], 0))
        return [y.detach(), x.grad, probs.grad]

    found = on_ranks(kind, world, clusters, run)
    monkeypatch.undo()
    for one, other in zip(found, clusters[world].run(lambda rank, group: run(rank, group, "mc2")), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.nightly  # tracing takes seconds
def test_m16_a_compiler_keeps_the_layer_in_one_graph(clusters: Any, loss_scale_of_1: None) -> None:
    """A value that Python reads would break the graph: so none is read on an NPU either. With all losses, whose scale
    is set between a compiled forward and its backward."""
    case = Case(1)
    losses = {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.2]}

    def run(rank: int, group: str) -> None:
        shared = shared_expert(None, 0, 1, True, False)
        layer = layer_of(case, "mc2", rank, group, 1, shared, router=losses | {"moe_z_loss_coeff": 0.1})
        whole = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)
        found = []
        for call, scale in itertools.product((layer, whole), (2.0, 3.0)):
            layer.zero_grad()
            y, _ = call(case.x[0])
            MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(scale))
            loss_of(y).backward()
            found.append(
                [y.detach(), *(weight.grad.clone() for weight in layer.parameters() if weight.grad is not None)]
            )
        for one, other in zip(found[:2], found[2:], strict=True):
            assert len(one) > 4
            for expected, compiled in zip(one, other, strict=True):
                close(compiled, expected, rtol=1e-4, atol=1e-5)
        assert any(not torch.equal(first, second) for first, second in zip(*found[:2], strict=True))

    clusters[1].run(run)


def test_m16_a_host_copy_would_be_seen(no_host_copies: None) -> None:
    for read in (lambda t: t.item(), lambda t: t.cpu(), lambda t: t.tolist()):
        with pytest.raises(AssertionError, match="a host copy"):
            read(torch.ones(1))
    for read in (int, bool, float):
        with pytest.raises(AssertionError, match="read on the host"), NoHostReads():
            read(torch.ones(1))


@pytest.mark.parametrize("etp", [1, 2, 4])
def test_m17_shards_of_grouped_mlp(etp: int) -> None:
    """w1 [H, L * 2F / etp] and w2 [L * F / etp, H]; the shards' results add up to the whole."""
    w1, w2 = randn(3, H, 2 * F) / 5, randn(3, F, H) / 4
    rows, counts, probs = randn(9, H), torch.tensor([4, 0, 3]), torch.rand(9)
    total = torch.zeros(9, H)
    for rank in range(etp):
        mlps = GroupedMLP(3, H, F, etp_size=etp, etp_rank=rank, dtype=FP32).load_experts(w1, w2)
        assert mlps.weight1.shape == (H, 3 * 2 * F // etp) and mlps.weight2.shape == (3 * F // etp, H)
        part = F // etp
        gate, up = mlps.weight1.view(3, H, 2 * part).chunk(2, 2)
        columns = slice(rank * part, (rank + 1) * part)
        assert torch.equal(gate, w1[:, :, columns]) and torch.equal(up, w1[:, :, F:][:, :, columns])
        assert torch.equal(mlps.weight2.view(3, part, H), w2[:, columns])
        total += mlps(rows, counts, probs)[0].detach()
    owner = [0] * 4 + [2] * 3
    for row in range(7):
        gate, up = (rows[row] @ w1[owner[row]]).chunk(2)
        expected = (torch.nn.functional.silu(gate) * up * probs[row]) @ w2[owner[row]]
        close(total[row], expected, atol=1e-5)
    assert not total[7:].any()
    with pytest.raises(ValueError, match="ffn_hidden_size is 16; it must be a multiple of etp_size 3"):
        GroupedMLP(3, H, F, etp_size=3)


@pytest.mark.parametrize("world, etp", [(2, 2), (4, 2), (4, 4), (4, 1)])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_m17_weight_gradients_under_unbalanced_routing(world: int, etp: int, routing: str, clusters: Any) -> None:
    case = Case(world, [9, 1, 0, 4][:world], routing)
    *_, g1, g2 = case.expected()
    local, part = E // (world // etp), F // etp
    for rank, found in enumerate(clusters[world].run(lambda rank, group: trained("mc2", case, etp, rank, group))):
        ep_rank, place = divmod(rank, etp)
        mine, columns = slice(ep_rank * local, (ep_rank + 1) * local), slice(place * part, (place + 1) * part)
        gate, up = g1[mine].chunk(2, 2)
        close(found[3].double(), torch.cat([gate[:, :, columns], up[:, :, columns]], 2), atol=1e-4)
        close(found[4].double(), g2[mine, columns], atol=1e-4)


# ---- M18: the shared expert


def shared_expert(group: Any, rank: int, world: int, gate: bool, sequence: bool) -> SharedExpertMLP:
    """Rank's shard of one shared expert."""
    module = SharedExpertMLP(H, F, gate, tp_group=group, sequence_parallel=sequence, dtype=FP32)
    w1, w2, columns = (
        randn(2, F, H, seed=21) / 5,
        randn(H, F, seed=22) / 4,
        slice(rank * F // world, (rank + 1) * F // world),
    )
    module.linear_fc1.weight.data = w1[:, columns].reshape(-1, H).clone()
    module.linear_fc2.weight.data = w2[:, columns].clone()
    if module.gate_weight is not None:
        module.gate_weight.data = randn(1, H, seed=23)
    return module


def overlapped(module: SharedExpertMLP, x: Tensor) -> Tensor:
    module.pre_forward_comm(x)
    module.linear_fc1_forward_and_act()
    module.linear_fc2_forward()
    module.post_forward_comm()
    return module.get_output()


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_m18_shared_expert_overlapped_and_plain(world: int, gate: bool, sequence: bool) -> None:
    whole = randn(8, 2, H, seed=24)
    weights = (randn(2, F, H, seed=21) / 5).reshape(-1, H), randn(H, F, seed=22) / 4
    own = whole.clone().requires_grad_()
    expected = mlp(own, weights[0].t(), weights[1].t())
    expected = expected * torch.sigmoid(own @ randn(1, H, seed=23).t()) if gate else expected
    loss_of(expected).backward()
    weighing = (1 + torch.arange(whole.numel()).view(whole.shape) % 5).float()

    def run(rank: int, group: Any) -> None:
        module = shared_expert(group, rank, world, gate, sequence)
        share = slice(rank * 8 // world, (rank + 1) * 8 // world) if sequence else slice(None)
        found = []
        for call in (module, lambda x: overlapped(module, x)):
            module.zero_grad()
            x = whole[share].clone().requires_grad_()
            y = call(x)
            (y * weighing[share]).sum().backward()
            found.append([y.detach(), x.grad, module.linear_fc1.weight.grad, module.linear_fc2.weight.grad])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
        close(found[0][0], expected.detach()[share])
        assert own.grad is not None
        close(found[0][1], own.grad[share], atol=1e-5)

    threads(world).run(run)


def test_m18_steps_in_another_order_raise() -> None:
    x, module = randn(3, H), shared_expert(None, 0, 1, True, False)
    plain = module(x)
    with pytest.raises(AscendMoeError, match="linear_fc1_forward_and_act was called, next is pre_forward_comm"):
        module.linear_fc1_forward_and_act()
    module.wait_current_stream()
    module.pre_forward_comm(x, wait_current_stream=False)
    with pytest.raises(AscendMoeError, match="pre_forward_comm was called, next is linear_fc1_forward_and_act"):
        module.pre_forward_comm(x)
    with pytest.raises(AscendMoeError, match="get_output was called"):
        module.get_output()
    module.linear_fc1_forward_and_act()
    with pytest.raises(AscendMoeError, match="post_forward_comm was called, next is linear_fc2_forward"):
        module.post_forward_comm()
    module.linear_fc2_forward()
    module.post_forward_comm()
    assert torch.equal(module.get_output(), plain)
    assert torch.equal(overlapped(module, x), plain)
    call = module.begin()
    call.pre_forward_comm(x)
    assert torch.equal(overlapped(module, x), plain)  # two calls at once


@pytest.mark.parametrize("kind", KINDS)
def test_m18_shared_expert_between_the_phases(kind: str, clusters: Any) -> None:
    case = Case(2)

    def run(rank: int, group: Any) -> None:
        shared = shared_expert(None, 0, 1, True, False)
        x = case.x[rank].view(5, 1, H)
        without, _ = layer_of(case, kind, rank, group)(x)
        with_shared, _ = layer_of(case, kind, rank, group, shared=shared)(x)
        close(with_shared, without + shared(x))

    on_ranks(kind, 2, clusters, run)
