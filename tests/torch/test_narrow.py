"""A caller's int64 never becomes another int32, which its low bits would be."""

from __future__ import annotations

import random

import pytest
import torch

from ascend_moe._tensors import id_text, narrow, wide_ids_named
from ascend_moe.errors import ArgumentError, InvalidExpertId

TOP, LOW = 2**31 - 1, -(2**31)


def test_an_integer_stays_or_is_at_an_end_of_int32() -> None:
    draw = random.Random(7)
    values = [0, -1, 7, TOP, LOW, TOP + 1, LOW - 1, 2**32, 2**32 + 3, -(2**32), 2**33 - 1, 2**63 - 1, -(2**63)]
    values += [draw.randrange(-(2**63), 2**63) >> draw.randrange(64) for _ in range(500)]
    narrowed = narrow("expert_ids", torch.tensor(values))
    assert narrowed.dtype == torch.int32
    assert narrowed.tolist() == [min(max(value, LOW), TOP) for value in values]
    same = torch.tensor([[-1, 3]], dtype=torch.int32)
    assert narrow("expert_ids", same) is same


KINDS = (torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64)


@pytest.mark.parametrize("dtype", [*KINDS, torch.float16, torch.float32, torch.float64])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ArgumentError, match=f"topk_ids is torch.{name}; it must be int32 or int64"):
        narrow("topk_ids", torch.zeros(1, 2).to(dtype))


def test_own_rank_is_told_the_wide_id_and_others_that_there_is_more() -> None:
    ids = torch.tensor([[0, 1], [2, 2**32 + 3]])
    assert [id_text(value) for value in (TOP, LOW, -1, 9)] == [f"{TOP} or more", f"{LOW} or less", "-1", "9"]

    def refuse(rank: int, expert_id: int) -> InvalidExpertId:
        with pytest.raises(InvalidExpertId) as caught, wide_ids_named(ids, 1):
            text = f"rank {rank}, token 1, k 1 has expert id {id_text(expert_id)}; need 0..3"
            raise InvalidExpertId(text, rank=rank, token=1, k=1, expert_id=expert_id)
        return caught.value

    own, other = refuse(1, TOP), refuse(0, TOP)
    assert str(own) == "rank 1, token 1, k 1 has expert id 4294967299; need 0..3" and own.expert_id == 2**32 + 3
    assert f"{TOP} or more" in str(other) and other.expert_id == TOP
