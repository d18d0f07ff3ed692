"""The published numbers of a run of the V1 operators (rank 0 of 2, 32 experts), out of the op."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from op_runs import cores

import ascend_moe

pytestmark = [pytest.mark.asan, pytest.mark.tsan]

EXPERTS, WORLD, LOCAL = 32, 2, 16
IDS = """
    11 17 29 12 24 23  1  0 16 30 18  8
     2 14 11  3 30 21 12  0 10  9  6 31
    22 27 30 21  1 24 17 11  3 19  2 29
    16 13  7 27  6 29  5 22 24 19 23  2"""
EXPAND_IDX = """
    0 0 0 0 0 0 0 0 0 0 0 0
    0 0 1 0 1 0 1 1 0 0 0 0
    0 0 2 1 1 1 1 2 1 0 1 1
    1 0 0 1 1 2 0 1 2 1 1 2"""
RECV_COUNTS = """
     2  3  5  6  9 11 13 16
    16 17 18 22 24 27 28 30
    31 32 33 34 35 36 39 41
    43 44 45 46 47 47 47 50"""
TOKEN_NUMS = "3 6 11 16 17 22 27 30 32 34 36 41 44 46 47 50"
ROWS_TO_PEER = 25


def numbers(text: str) -> torch.Tensor:
    return torch.tensor([int(word) for word in text.split()], dtype=torch.int32)


def peer_ids(topk: int) -> torch.Tensor:
    """Rank 1's ids, distinct in a token: to rank 0's experts what its counts name, the rest to its own."""
    ends = [0, *numbers(RECV_COUNTS).tolist()]
    due = Counter({local: ends[2 * local + 2] - ends[2 * local + 1] for local in range(LOCAL)})
    own = 0
    tokens: list[list[int]] = []
    for _ in range(48 // topk):
        token = [expert for expert, left in due.most_common(topk) if left > 0]
        due.subtract(token)
        while len(token) < topk:
            token.append(LOCAL + own % LOCAL)
            own += 1
        tokens.append(token)
    assert not +due, "rank 1's tokens do not hold all rows that rank 0 receives from it"
    return torch.tensor(tokens, dtype=torch.int32)


@pytest.mark.parametrize("topk", [8, 12])
def test_published_numbers(topk: int) -> None:
    mine = numbers(IDS).reshape(-1, topk)
    theirs = peer_ids(topk)
    assert all(len(set(token)) == topk for token in [*mine.tolist(), *theirs.tolist()])
    assert int((mine >= LOCAL).sum()) == ROWS_TO_PEER
    tokens = torch.arange(48 // topk * 64).reshape(-1, 64).bfloat16()

    def fn(rank: int, group_ep: str) -> list[tuple[torch.Tensor, ...]]:
        ids = mine if rank == 0 else theirs
        return [
            ascend_moe.npu_moe_distribute_dispatch(
                tokens, ids, group_ep, WORLD, rank, EXPERTS, expert_token_nums_type=kind
            )
            for kind in (0, 1)
        ]

    counts, ends = numbers(RECV_COUNTS), numbers(TOKEN_NUMS).long()
    with ascend_moe.LocalCluster(WORLD) as cluster:
        for number in (1, 8, 48):
            with cores(number):
                cumulative, each = cluster.run(fn)[0]
            for outputs in (cumulative, each):
                assert torch.equal(outputs[2], numbers(EXPAND_IDX))
                assert torch.equal(outputs[4], counts)
            assert torch.equal(cumulative[3], ends)
            assert torch.equal(each[3], torch.diff(ends, prepend=torch.zeros(1, dtype=torch.int64)))
