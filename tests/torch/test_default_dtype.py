"""Results do not depend on torch.set_default_dtype: sgl-kernel-npu's ranks set it to bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ascend_moe import LocalCluster, MoEConfig, MoELayer, npu, routing
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.interop import megatron, sglang


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


def layer_weights() -> Any:
    config = MoEConfig(32, 16, 4, 2, router="deepseek_v3", shared_intermediate_size=16)
    with LocalCluster(1) as cluster:
        layer = MoELayer(config, MC2Dispatcher(cluster.name, 1, 0, 4), dtype=torch.float32)
        return list(layer.init_weights(3).state_dict().values())


def router_buffers() -> Any:
    config = megatron.RouterConfig(4, 32, 2, "global_aux_loss", 0.1, moe_router_enable_expert_bias=True)
    return list(megatron.TopKRouter(config).buffers())


def padded_rows() -> Any:
    """There and back on one rank."""
    chosen = torch.arange(8)[:, None] % 4 == torch.arange(4)
    probs = torch.where(chosen, drawn(8, 4).sigmoid(), 0)
    with LocalCluster(1) as cluster:
        limit = {"capacity_factor": 2.0, "pad_to_capacity": True, "probs_on": "combine"}
        ways = megatron.TokenDispatcher("mc2", cluster.name, 4, 1, world_size=1, rank=0, **limit)
        rows, weights, handle = ways.dispatch_preprocess(drawn(8, 32), chosen, probs)
        rows, weights = ways.token_dispatch(rows, weights, handle)
        rows, counts, weights = ways.dispatch_postprocess(rows, weights, handle)
        return rows, counts, weights, ways.token_combine(ways.combine_preprocess(rows, handle), handle)


def balancing_loss() -> Any:
    """Returns the balancing loss of 1001 tokens, which bfloat16 does not hold; a third of a token's rows is active."""
    chosen = torch.ones(1001, 3, dtype=torch.bool)
    counted = routing.get_tokens_per_expert_and_token_count(chosen, None, 3, with_padding_mask=True)
    scores = drawn(1001, 3).softmax(-1)
    return *counted, routing.switch_load_balancing_loss_func(scores, counted[0], 1001.0, 3, 3, 0.1)


CALLS: dict[str, Any] = {
    "npu_moe_init_routing_v2": lambda: routed(-1),
    "npu_moe_init_routing_v2, int8": lambda: routed(1),
    "MoELayer.init_weights": layer_weights,
    "Megatron-LM's router": router_buffers,
    "Megatron-LM's padding": padded_rows,
    "a balancing loss": balancing_loss,
    "npu_moe_token_permute": lambda: npu.npu_moe_token_permute(drawn(5, 32), torch.arange(10).view(5, 2) % 3),
    "run_moe_ep_preproess": lambda: sglang.run_moe_ep_preproess(torch.arange(700).view(350, 2) % 3, 4),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_float32(name: str, request: pytest.FixtureRequest) -> None:
    expected = CALLS[name]()
    request.getfixturevalue("bf16_by_default")
    for got, wanted in zip(CALLS[name](), expected, strict=True):
        assert got.dtype == wanted.dtype and torch.equal(got, wanted)
