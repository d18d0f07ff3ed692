"""Megatron-LM's experts: SharedExpertMLP as one call or in steps, and shards of GroupedMLP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gloo_ranks import threads
from megatron_layers import FP32, ROUTINGS, Case, E, F, H, close, loss_of, mlp, overlapped, shared_expert, trained
from routed_tokens import randn

from ascend_moe.errors import AscendMoeError
from ascend_moe.interop.megatron import GroupedMLP


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_overlapped_shared_expert_gives_the_bits_of_the_plain(world: int, gate: bool, sequence: bool) -> None:
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


# ---- shards of GroupedMLP, and gradients of their weights


@pytest.mark.parametrize("etp", [1, 2, 4])
def test_shards_of_grouped_mlp_add_up_to_the_whole(etp: int) -> None:
    """`w1` is [H, L * 2F / etp] and `w2` [L * F / etp, H]; the shards' results add up to the whole."""
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
def test_weight_gradients_are_right_under_unbalanced_routing(world: int, etp: int, routing: str, clusters: Any) -> None:
    case = Case(world, [9, 1, 0, 4][:world], routing)
    *_, g1, g2 = case.expected()
    local, part = E // (world // etp), F // etp
    for rank, found in enumerate(clusters[world].run(lambda rank, group: trained("mc2", case, etp, rank, group))):
        ep_rank, place = divmod(rank, etp)
        mine, columns = slice(ep_rank * local, (ep_rank + 1) * local), slice(place * part, (place + 1) * part)
        gate, up = g1[mine].chunk(2, 2)
        close(found[3].double(), torch.cat([gate[:, :, columns], up[:, :, columns]], 2), atol=1e-4)
        close(found[4].double(), g2[mine, columns], atol=1e-4)
