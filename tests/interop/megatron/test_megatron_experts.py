"""Megatron-LM's GroupedMLP has shards of experts, and right gradients of their weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron_layers import FP32, ROUTINGS, Case, E, F, H, close, trained
from routed_tokens import randn

from ascend_moe.interop.megatron import GroupedMLP


@pytest.mark.parametrize("etp", [1, 2, 4])
def test_shards_of_grouped_mlp_add_up_to_the_whole(etp: int) -> None:
    """M17: w1 [H, L * 2F / etp] and w2 [L * F / etp, H]; the shards' results add up to the whole."""
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
    """Covers M17."""
    case = Case(world, [9, 1, 0, 4][:world], routing)
    *_, g1, g2 = case.expected()
    local, part = E // (world // etp), F // etp
    for rank, found in enumerate(clusters[world].run(lambda rank, group: trained("mc2", case, etp, rank, group))):
        ep_rank, place = divmod(rank, etp)
        mine, columns = slice(ep_rank * local, (ep_rank + 1) * local), slice(place * part, (place + 1) * part)
        gate, up = g1[mine].chunk(2, 2)
        close(found[3].double(), torch.cat([gate[:, :, columns], up[:, :, columns]], 2), atol=1e-4)
        close(found[4].double(), g2[mine, columns], atol=1e-4)
