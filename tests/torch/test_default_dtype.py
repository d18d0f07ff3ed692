"""Results do not depend on torch.set_default_dtype: sgl-kernel-npu's ranks set it to bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ascend_moe import npu
from ascend_moe.interop import sglang


@pytest.fixture
def bf16_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float32)


def routed(quant_mode: int) -> Any:
    ids = torch.arange(300).view(150, 2).int() % 3
    given = {"active_num": 300, "expert_num": 4, "active_expert_range": [0, 4], "expert_tokens_num_flag": True}
    x = drawn(150, 32).bfloat16()
    return npu.npu_moe_init_routing_v2(x, ids, quant_mode=quant_mode, expert_tokens_num_type=1, **given)


CALLS: dict[str, Any] = {
    "npu_moe_init_routing_v2": lambda: routed(-1),
    "npu_moe_init_routing_v2, int8": lambda: routed(1),
    "npu_moe_token_permute": lambda: npu.npu_moe_token_permute(drawn(5, 32), torch.arange(10).view(5, 2) % 3),
    "run_moe_ep_preproess": lambda: sglang.run_moe_ep_preproess(torch.arange(700).view(350, 2) % 3, 4),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_float32(name: str, request: pytest.FixtureRequest) -> None:
    expected = CALLS[name]()
    request.getfixturevalue("bf16_by_default")
    for got, wanted in zip(CALLS[name](), expected, strict=True):
        assert got.dtype == wanted.dtype and torch.equal(got, wanted)
