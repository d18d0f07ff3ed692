"""Activation checkpoints run a forward again: its tokens are counted and recorded once, and gradients stay."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.interop.megatron import MoEAuxLossAutoScaler, RouterConfig, TopKRouter
from ascend_moe.layer import MoEConfig, MoELayer
from ascend_moe.placement import LoadCounter
from ascend_moe.routers import RouteCapture, RouterReplay, RouterReplayAction

H, E, K, T = 16, 6, 2, 5


def wrapped(function: Callable[[Tensor], Tensor], reentrant: list[bool]) -> Callable[[Tensor], Tensor]:
    """function in checkpoints, the outermost last."""
    for each in reentrant:
        function = functools.partial(checkpoint, function, use_reentrant=each)
    return function


class Step:
    """Micro-batches through a router, what counts and records beside it, and a product."""

    def __init__(self, batches: int) -> None:
        generator = torch.Generator().manual_seed(batches)
        kinds: dict[str, Any] = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
        self.router = TopKRouter(RouterConfig(E, H, K, "global_aux_loss", 0.1, **kinds))
        self.router.weight.data = torch.randn(E, H, generator=generator)
        self.x = [torch.randn(T, H, generator=generator).requires_grad_() for _ in range(batches)]
        self.loads, self.capture = LoadCounter(1, E), RouteCapture(T, E, steps=8)
        self.replay = RouterReplay(register=False)
        self.replay.set_router_replay_action(RouterReplayAction.RECORD)

    def forward(self, x: Tensor) -> Tensor:
        probs, chosen = self.router(x)
        self.loads.add(0, chosen.sum(0))
        ids = chosen.int()
        self.capture(ids)
        self.replay.chose(ids)
        return (probs @ self.router.weight).tanh()

    def run(self, reentrant: list[bool], alternate: bool) -> list[Tensor]:
        function, waiting = wrapped(self.forward, reentrant), []
        for x in self.x:
            y = function(x).square().sum()
            if alternate:
                y.backward()
            else:
                waiting.append(y)
        for y in waiting:
            y.backward()
        router, recorded = self.router, self.replay.recorded_topk_idx
        assert router.local_tokens_per_expert is not None and router.ga_steps is not None and recorded is not None
        counts = [router.local_tokens_per_expert, router.ga_steps, router.global_tokens_per_expert, self.loads.counts]
        gradients = [router.weight.grad, *(x.grad for x in self.x)] if alternate else []
        return [*counts, recorded, *self.capture.last(), *gradients]  # type: ignore[list-item]


@pytest.mark.parametrize("count", [25, pytest.param(2000, marks=pytest.mark.nightly)])
def test_a_token_counts_once_in_any_nest_of_checkpoints(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    generator = random.Random(count)
    for _ in range(count):
        batches, alternate = generator.randint(1, 3), generator.random() < 0.5
        reentrant = [generator.random() < 0.5 for _ in range(generator.randint(1, 3))]
        wanted, found = Step(batches).run([], alternate), Step(batches).run(reentrant, alternate)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, msg=lambda text, given=(reentrant, alternate): f"{given}: {text}")


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layer_captures_and_records_a_step_once(reentrant: bool, group_ep: str) -> None:
    config = MoEConfig(H, 8, E, K)
    capture, replay = RouteCapture(T, K, steps=4), RouterReplay(register=False)
    layer = MoELayer(config, MC2Dispatcher(group_ep, 1, 0, E), dtype=torch.float32, trainable=True).init_weights()
    x = [torch.randn(T, H, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in range(2)]
    wanted = [layer.route(each)[1] for each in x]
    layer.capture, layer.replay = capture, replay
    replay.set_router_replay_action(RouterReplayAction.RECORD)
    outs = [checkpoint(layer, each, use_reentrant=reentrant) for each in x]
    for y in outs:
        y.sum().backward()
        assert torch.equal(replay.recorded_topk_idx, wanted[1])
    assert [step.tolist() for step in capture.last()] == [ids.tolist() for ids in wanted]
