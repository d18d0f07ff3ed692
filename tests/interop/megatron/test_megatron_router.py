"""Megatron-LM's TopKRouter, its losses and its RouterReplay."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gloo_ranks import threads
from megatron_layers import BF16, FP32, FP64, E, H, K, close
from routed_tokens import randn
from torch import Tensor

from ascend_moe.interop.megatron import (
    RouterConfig,
    RouterReplay,
    RouterReplayAction,
    TopKRouter,
    get_capacity,
    sinkhorn,
)


def test_kinds_of_balancing_that_are_not_offered_are_refused() -> None:
    with pytest.raises(ValueError, match="is 'quantile_balancing', which is not supported"):
        TopKRouter(RouterConfig(E, H, moe_router_load_balancing_type="quantile_balancing"))
    with pytest.raises(ValueError, match="moe_router_load_balancing_type is 'sinkhorn'; need one of"):
        TopKRouter(RouterConfig(E, H, moe_router_load_balancing_type=["sinkhorn"], moe_aux_loss_coeff=[0.0]))
    for kinds, coeffs in ((["aux_loss"], 0.1), (["aux_loss", "seq_aux_loss"], [0.1]), ("aux_loss", [0.1])):
        with pytest.raises(ValueError, match=r"moe_aux_loss_coeff is .* for moe_router_load_balancing_type"):
            TopKRouter(RouterConfig(E, H, moe_router_load_balancing_type=kinds, moe_aux_loss_coeff=coeffs))
    for name, value in {
        "moe_aux_loss_coeff": 0.1, "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.0,
        "moe_router_group_topk": 2, "moe_enable_routing_replay": True, "moe_router_force_load_balancing": True,
    }.items():  # fmt: skip
        config = RouterConfig(E, H, moe_router_load_balancing_type="none" if "force" in name else "sinkhorn")
        vars(config)[name] = value
        with pytest.raises(ValueError, match=f"{name} is {value}, which (sinkhorn|TopKRouter) does not support"):
            TopKRouter(config)


def by_turns(logits: Tensor, tol: float = 1e-7) -> Tensor:
    """Rows add up to 1 / T and columns to 1 / E by turns: Sinkhorn's and Knopp's loop, in float64."""
    weights = np.exp(logits.double().numpy())
    scaled, factors, moved = weights, np.ones(weights.shape[1]), math.inf
    while moved > tol:
        scaled = scaled / (len(scaled) * scaled.sum(1, keepdims=True))
        scaled = scaled / (scaled.shape[1] * scaled.sum(0))
        before, factors = factors, np.divide(scaled, weights)[0]
        moved = abs(before / before[0] - factors / factors[0]).mean()
    return torch.from_numpy(scaled)


def test_sinkhorn_is_the_loop_by_turns_on_drawn_logits() -> None:
    """60 sizes and spreads: scores, and the experts of each token with and without masks and training."""
    draw = random.Random(4)
    for seed in range(60):
        tokens, experts, spread = draw.randint(2, 20), draw.randint(2, 9), draw.choice([0.1, 0.5, 1.5])
        logits, topk = randn(tokens, experts, seed=seed) * spread, draw.randint(1, 2)
        close(sinkhorn(logits).double(), by_turns(logits), rtol=1e-2)
        router = TopKRouter(RouterConfig(experts, H, topk, "sinkhorn"))
        mask = torch.tensor([draw.random() < 0.7 for _ in range(tokens)])
        wide = torch.where(mask[:, None], logits, math.nan)[:, None]  # what inactive tokens hold is not looked at
        weights = logits.sigmoid() if topk == 1 else logits.softmax(1)
        for training in (True, False):
            probs, chosen = router.train(training).routing(wide, mask[:, None])
            best = by_turns(logits[mask]) if training and mask.any() else weights[mask].double()
            assert torch.equal(chosen.sum(1), topk * mask) and torch.equal(probs, torch.where(chosen, weights, 0))
            # Of scores that are equal, but for rounding, any.
            close((best * chosen[mask]).sum(1), best.topk(topk, 1).values.sum(1), rtol=1e-2)


def test_sinkhorns_gradients_are_those_of_the_weights() -> None:
    """It ends with logits that float32 does not hold."""
    router = TopKRouter(RouterConfig(E, H, 1, "sinkhorn", moe_z_loss_coeff=1e-3))
    logits = (randn(64, 1, E) + 6 * torch.eye(E)[0]).requires_grad_()
    probs, chosen = router.routing(logits)
    (grad,) = torch.autograd.grad(probs.sum(), logits)
    with_loss = logits.detach().requires_grad_()
    z_loss = 1e-3 * with_loss.logsumexp(-1).square().mean()
    close(grad, torch.autograd.grad((with_loss.sigmoid()[:, 0] * chosen).sum() + z_loss, with_loss)[0])
    assert sinkhorn(torch.full((3, 4), 1000.0)).isnan().all() and sinkhorn(torch.zeros(0, 4)).shape == (0, 4)
    assert sinkhorn(randn(1, 8, seed=1) * 8).isfinite().all()  # whose factors never settle in float32


def test_router_keeps_the_bias_in_float32_and_counts_active_tokens_once() -> None:
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
def test_logits_are_computed_in_the_routers_dtype(moe_router_dtype: str | None) -> None:
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
def test_a_router_does_not_see_inactive_tokens(seed: int, factor: float | None, loss_scale_of_1: None) -> None:
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
def test_losses_per_token_are_multiplied_by_the_tokens(world: int, masked: bool, loss_scale_of_1: None) -> None:
    """Calculate_per_token_loss: by this rank's active tokens times tp x cp, which the caller divides by later."""
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


def test_a_mask_may_have_no_dimension_of_sequences() -> None:
    router = TopKRouter(RouterConfig(E, H, K, "none"))
    router.weight.data = randn(E, H)
    x, mask = randn(6, H, seed=2), torch.arange(6) % 2 > 0
    for found, expected in zip(router(x, mask), router(x.view(6, 1, H), mask.view(6, 1)), strict=True):
        assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="mask is"):
        router(x, mask[1:])


def test_a_layer_that_is_not_trained_has_no_losses() -> None:
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
def test_input_jitter_stays_in_its_range(dtype: Any) -> None:
    router = TopKRouter(RouterConfig(E, H, moe_input_jitter_eps=0.1))
    x = torch.full((400, H), 2.0, dtype=dtype)
    noisy = router.apply_input_jitter(x)
    assert noisy.dtype == dtype and 1.78 < float(noisy.min()) < 1.85 and 2.15 < float(noisy.max()) < 2.22
    assert abs(float(noisy.float().mean()) - 2.0) < 0.01 and len(noisy.unique()) > 8
    assert TopKRouter(RouterConfig(E, H)).apply_input_jitter(x) is x


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
def test_seq_aux_loss_is_the_mean_over_sequences(function: str) -> None:
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


def test_global_aux_loss_averages_over_steps() -> None:
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


def test_aux_loss_is_of_a_micro_batch_and_global_aux_loss_spans_replicas() -> None:
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


# ---- RouterReplay


@pytest.fixture(autouse=True)
def no_objects() -> Iterator[None]:
    RouterReplay.clear_global_router_replay_instances()
    yield
    RouterReplay.clear_global_router_replay_instances()


def test_all_objects_are_set_read_and_cleared_at_once() -> None:
    first, second = RouterReplay(), RouterReplay()
    targets = [torch.tensor([[0, 1]]), torch.tensor([[1, 0]])]
    RouterReplay.set_replay_data(targets)
    assert first.target_topk_idx is targets[0] and second.target_topk_idx is targets[1]
    for replay, ids in zip((first, second), targets, strict=True):
        replay.record_indices(ids)
    assert all(a is b for a, b in zip(RouterReplay.get_recorded_data(), targets, strict=True))
    RouterReplay.clear_global_indices()
    assert RouterReplay.get_recorded_data() == [None, None] and not first.replay_backward_list
    with pytest.raises(ValueError, match="has no ids to replay"):
        first.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        first.next_ids()
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    actions = [replay.router_replay_action for replay in (first, second)]
    assert actions == [RouterReplayAction.REPLAY_FORWARD] * 2
    RouterReplay.clear_global_router_replay_action()
    actions = [replay.router_replay_action for replay in (first, second)]
    assert actions == [None, None]
    with pytest.raises(ValueError, match="has 1 tensors for 2 routers"):
        RouterReplay.set_replay_data(targets[:1])
    memory = torch.full((5, 2, K), -1)
    RouterReplay.set_global_static_buffers(memory)
    with pytest.raises(ValueError, match="has 6 tokens, the static buffer 5"):
        first.record_indices(torch.zeros(6, K, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"need \(max tokens, 2, k\)"):
        RouterReplay.set_global_static_buffers(memory[:, :1])
    RouterReplay.clear_global_static_buffers()
    assert first.static_buffer is None


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_the_router_of_a_second_model_takes_what_the_first_recorded(score: str) -> None:
    options = {"moe_router_score_function": score, "moe_enable_routing_replay": True}
    config = RouterConfig(E, H, K, "none", **options)  # type: ignore[arg-type]
    assert TopKRouter(RouterConfig(E, H, K)).router_replay is None
    first, second = TopKRouter(config), TopKRouter(config)
    first.weight.data, second.weight.data = randn(E, H), randn(E, H, seed=1)
    x = randn(9, 1, H, seed=2)
    assert first.router_replay is not None and second.router_replay is not None
    first.router_replay.set_router_replay_action(RouterReplayAction.RECORD)
    _, chosen = first(x)
    recorded = first.router_replay.get_recorded_indices()
    assert recorded is not None and not torch.equal(second(x)[1], chosen)
    second.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    second.router_replay.set_target_indices(recorded)
    probs, again = second(x)
    assert torch.equal(again, chosen)
    probs.square().sum().backward()
    assert second.weight.grad is not None and bool(second.weight.grad.any())
