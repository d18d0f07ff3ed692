"""Megatron-LM's RouterReplay by its own names: what its own test asks for, and TopKRouter with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from megatron_layers import E, H, K
from routed_tokens import randn

from ascend_moe.interop.megatron import (
    RouterConfig,
    RouterReplay,
    RouterReplayAction,
    TopKRouter,
)


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
