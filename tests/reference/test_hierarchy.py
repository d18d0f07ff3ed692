"""The reference of comm_alg "hierarchy": a rounding a server, another at the end, and the bytes that cross."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ascend_moe.reference as ref
from ascend_moe.reference.cases import Case


def _combined(case: Case, share: int, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    return replace(case, share=share).combined(rows, case.dispatched())


def _hand(values: list[float], weights: list[float], dtype: torch.dtype, shared: float | None = None) -> torch.Tensor:
    """The sum of rank 0's only token, whose pair k goes to rank k of four; two ranks a server."""
    world, hidden = 4, 16
    x, ids = torch.zeros(1, hidden, dtype=dtype), torch.arange(world, dtype=torch.int32)[None]
    beside = None if shared is None else torch.full_like(x, shared)
    inputs = [
        ref.RankInput(x, ids if rank == 0 else -torch.ones_like(ids), None, None, torch.tensor([weights]), beside)
        for rank in range(world)
    ]
    sent = ref.dispatch(inputs, moe_expert_num=world)
    rows = [torch.full((1, hidden), value, dtype=dtype) for value in values]
    return ref.combine(inputs, rows, sent, moe_expert_num=world, ranks_per_server=2)[0][0, 0]


def test_each_server_rounds_its_sum() -> None:
    """bf16 has 8 bits: 256 + 1 becomes 256 on its server, where one sum of all four would be 260."""
    assert _hand([256, 1, 2, 1], [1, 1, 1, 1], torch.bfloat16) == 256 + 4  # 256 + 3 = 259 -> 260
    assert _hand([256, 1, 0.5, 0.25], [1, 1, 1, 1], torch.bfloat16) == 256  # one sum: 257.75 -> 258
    assert _hand([256, 1, 256, 1], [1, 1, 1, 1], torch.float32) == 514
    assert _hand([256, 1, 1, 1], [1, -1, 1, 1], torch.bfloat16) == 256  # 255, and 2: 257 -> 256, to even


def test_the_shared_experts_row_comes_after_the_servers() -> None:
    assert _hand([256, 1, 0.5, 0.25], [1, 1, 1, 1], torch.bfloat16, shared=-256.0) == 0.75
    # 2^24 + 1 is no fp32 number: from the shared row on, the sum would be 1.
    assert _hand([2.0**24, 0, 1, 0], [1, 1, 1, 1], torch.float32, shared=-(2.0**24)) == 0


@pytest.mark.parametrize("coded", [False, True])
def test_one_server_for_all_rounds_twice_the_same(coded: bool) -> None:
    """With all ranks on one server the second rounding changes nothing; codes are made of sums, not of rows."""
    case = Case(world=4, local=2, topk=3, contract=2, batches="unequal", batch=6, seed=3, comm_quant_mode=2 * coded)
    rows = [
        case.expert_rows(r, d.expand_x, d.dynamic_scales, d.ep_recv_counts) for r, d in enumerate(case.dispatched())
    ]
    plain = replace(case, comm_quant_mode=0)
    for one, all_ranks in zip(_combined(case, 4, rows), _combined(plain, 0, rows), strict=True):
        want = ref.restore_blocks(*ref.quantize_blocks(all_ranks)) if coded else all_ranks
        assert ref.same_bits(one, want)


def test_a_row_crosses_once_a_token_and_server() -> None:
    """Rank 0's token has two experts on the other server, and one on its own: one row goes, one sum returns."""
    ids = torch.tensor([[1, 2, 3]], dtype=torch.int32)
    none = -torch.ones_like(ids)
    inputs = [ref.RankInput(torch.zeros(1, 16, dtype=torch.bfloat16), ids if r == 0 else none) for r in range(4)]
    numbers = {"moe_expert_num": 4, "ranks_per_server": 2, "hidden": 16, "dtype": torch.bfloat16}
    assert ref.predict_crossings(inputs, **numbers) == [(32 + 32 + 96, 0), (0, 0), (0, 32), (0, 0)]
    coded = ref.predict_crossings(inputs, quant_mode=2, comm_quant_mode=2, **numbers)
    assert coded == [(32 + 32 + 32 + 96, 0), (0, 0), (0, 64), (0, 0)]
