"""Builds both parts of vLLM's modular kernel and the inputs of one rank, and computes the layer by three calls."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from routed_tokens import randn, routed

from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.experts import grouped_mlp, quantize_weight
from ascend_moe.interop import vllm
from ascend_moe.interop.vllm import make_experts, make_prepare_finalize

FP32, BF16 = torch.float32, torch.bfloat16
E, K, H, F = 8, 3, 64, 32
KINDS = ["mc2", "alltoall", "allgather", "batched"]
each_kind = pytest.mark.parametrize("kind", KINDS)
windows = pytest.mark.parametrize("kind", ["mc2", "batched"])


class Part(NamedTuple):
    """One rank's tokens and experts."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    w1: torch.Tensor  # (L, 2F, H)
    w2: torch.Tensor
    config: Any  # quantization

    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.w1, self.w2, self.weights, self.ids


def part_of(
    rank: int,
    world: int,
    tokens: int,
    ids: str = "random",
    dtype: torch.dtype = BF16,
    w8a8: bool = False,
    topk: int = K,
) -> Part:
    w1, w2 = randn(E, 2 * F, H, seed=3) / H**0.5, randn(E, H, F, seed=4) / F**0.5
    own = slice(rank * E // world, (rank + 1) * E // world)
    w1, w2, config = w1[own].to(dtype), w2[own].to(dtype), None
    if w8a8:
        (w1, s1), (w2, s2) = (quantize_weight(weight.transpose(1, 2)) for weight in (w1, w2))
        w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
        config = vllm.int8_w8a8_moe_quant_config(s1.unsqueeze(2), s2)
    x, weights = randn(tokens, H, seed=20 + rank).to(dtype), randn(tokens, topk, seed=40 + rank).softmax(1)
    return Part(x, routed(tokens, E, topk, ids), weights, w1, w2, config)


def three_calls(part: Part, rank: int, world: int, group: str, most: int) -> torch.Tensor:
    """The layer by dispatch, grouped_mlp and combine."""
    dispatcher = MC2Dispatcher(group, world, rank, E)
    scales = {} if part.config is None else {"quant_mode": 2}
    sent = dispatcher.dispatch(part.x, part.ids, global_bs=world * max(1, most), **scales)
    given: dict[str, Any] = {}
    if part.config is not None:
        given = {"dynamic_scales": sent.dynamic_scales, "output_dtype": part.x.dtype}
        given |= {"w_gate_up_scale": part.config.w1_scale.squeeze(-1), "w_down_scale": part.config.w2_scale}
    mlp = (part.w1.transpose(1, 2), part.w2.transpose(1, 2), sent.expert_token_nums)
    return dispatcher.combine(grouped_mlp(sent.expand_x, *mlp, **given), sent, part.weights)


def pair(kind: str, rank: int, world: int, group: str, config: Any = None, **more: Any) -> tuple[Any, Any]:
    """Both parts, with few places so that batched rows stay small."""
    way = make_prepare_finalize(None, None, group, rank, world, E, kind, **{"max_num_tokens": 16} | more)
    return way, make_experts(None, None, None, config, E // world, "batched" if kind == "batched" else "standard")


def expert_map(rank: int, world: int) -> torch.Tensor:
    made, local = torch.full((E,), -1, dtype=torch.int32), E // world
    made[rank * local : (rank + 1) * local] = torch.arange(local, dtype=torch.int32)
    return made


def prepared(way: Any, part: Part, name: str = "prepare") -> Any:
    return getattr(way, name)(part.x, part.weights, part.ids, E, None, False, part.config)


def computed(experts: Any, part: Part, came: Any) -> torch.Tensor:
    rows, scales, meta, ids, weights = came
    *shapes, dtype = experts.workspace_shapes(
        part.x, rows, rows.shape[-2], 2 * F, H, ids.shape[1], E, len(part.w1), meta
    )
    made = torch.full(shapes[2], float("nan"), dtype=dtype)
    first, second = (torch.full(shape, float("nan"), dtype=dtype) for shape in shapes[:2])
    experts.apply(made, rows, part.w1, part.w2, weights, ids, "silu", E, None, scales, None, first, second, meta, False)
    return made


def finished(way: Any, experts: Any, part: Part, came: Any, name: str = "finalize") -> Any:
    output = torch.full_like(part.x, float("nan"))
    impl = experts.finalize_weight_and_reduce_impl()
    receiver = getattr(way, name)(output, computed(experts, part, came), came[4], came[3], False, impl)
    return output if name == "finalize" else (receiver, output)


def impl_of(name: str, *args: Any) -> Any:
    return getattr(vllm, f"TopKWeightAndReduce{name}")(*args)
