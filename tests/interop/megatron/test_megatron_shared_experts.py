"""Megatron-LM's SharedExpertMLP runs as one call, or by steps between those of the dispatcher."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gloo_ranks import threads
from megatron_layers import F, H, close, loss_of, mlp, overlapped, shared_expert
from routed_tokens import randn

from ascend_moe.errors import AscendMoeError


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_overlapped_shared_expert_gives_the_bits_of_the_plain(world: int, gate: bool, sequence: bool) -> None:
    """Covers M18."""
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


def test_steps_of_the_shared_expert_in_another_order_raise() -> None:
    """Covers M18."""
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
