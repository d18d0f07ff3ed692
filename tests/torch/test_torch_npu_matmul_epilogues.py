"""Operators that join the grouped matmul with its next step give bit for bit what the chain gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from expert_values import DYNAMIC, grouped, int8s
from torch_npu_calls import values as drawn

from ascend_moe.experts import npu_dequant_swiglu_quant
from ascend_moe.npu import (
    npu_grouped_matmul_finalize_routing,
    npu_grouped_matmul_swiglu_quant,
    npu_grouped_matmul_swiglu_quant_v2,
)

INNER, WIDTH, GROUPS = 24, 32, 4
TAIL = [2, 0, 1, 1]
COUNTS = [3, 3, 3, 3], [0, 7, 0, 2], [0, 0, 0, 12], [0, 0, 0, 0], TAIL
EACH_COUNTS = pytest.mark.parametrize("counts", COUNTS, ids=str)


def inputs() -> tuple[torch.Tensor, ...]:
    """x, weight, weight_scale, x_scale."""
    x, weight = int8s(12, INNER, seed=1), int8s(GROUPS, INNER, WIDTH, seed=2)
    return x, weight, drawn(GROUPS, WIDTH, seed=3).abs() / 500, drawn(12, seed=4).abs()


@pytest.mark.parametrize("smoothed", ["", "rows", "values"])
@EACH_COUNTS
def test_swiglu_quant_is_bit_for_bit_the_chain(counts: list[int], smoothed: str) -> None:
    x, weight, weight_scale, x_scale = inputs()
    sums, by_expert = torch.tensor(counts).cumsum(0), torch.tensor(counts)
    shape = {"": (), "rows": (GROUPS, WIDTH // 2), "values": (GROUPS,)}[smoothed]
    smooth = drawn(*shape, seed=5).abs() + 0.1 if shape else None
    form = DYNAMIC | {"weight_scale": weight_scale, "activation_scale": x_scale, "group_index": by_expert}
    form["quant_scale"] = None if smooth is None else smooth.reshape(GROUPS, -1).expand(GROUPS, WIDTH // 2)
    chain = npu_dequant_swiglu_quant(grouped(x, weight, counts, output_dtype=torch.int32), **form)
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    for list_type, group_list in ((0, sums), (1, by_expert)):
        found = npu_grouped_matmul_swiglu_quant_v2(
            x, [turned], [weight_scale], x_scale, group_list, smooth_scale=smooth, group_list_type=list_type
        )
        assert all(torch.equal(one, other) for one, other in zip(found, chain, strict=True))
    if smooth is None:
        *found, offset = npu_grouped_matmul_swiglu_quant(x, weight, sums, weight_scale, x_scale)
        assert offset.dtype == torch.float32 and offset.shape == ()
        assert all(torch.equal(one, other) for one, other in zip(found, chain, strict=True))


def finalized(counts: list[int], row_index: np.ndarray, batch: int, logit: np.ndarray | None) -> np.ndarray:
    """Row by row in float32, in row order, no numpy matrix product; with a logit, by x_scale too."""
    x, weight, scale, x_scale = (tensor.numpy() for tensor in inputs())
    total = np.zeros((batch, WIDTH), dtype=np.float32)
    for row, group in enumerate(np.repeat(range(GROUPS), counts)):
        products = (x[row].astype(np.int32)[:, None] * weight[group].astype(np.int32)).sum(0)
        value = products.astype(np.float32) * scale[group]
        total[row_index[row]] += value if logit is None else value * x_scale[row] * logit[row]
    return total


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("list_type", [0, 1])
@EACH_COUNTS
def test_finalize_routing_is_numpys_bit_for_bit(counts: list[int], list_type: int, weighted: bool) -> None:
    x, weight, scale, x_scale = inputs()
    by_expert, batch = torch.tensor(counts), 5
    row_index = torch.randint(0, batch, (12,), generator=torch.Generator().manual_seed(8))
    given: dict[str, Any] = {"scale": scale, "row_index": row_index}
    if weighted:
        given = {"scale": scale.unsqueeze(1), "row_index": row_index.int()}
        given |= {"pertoken_scale": x_scale, "logit": drawn(12, seed=9)}
    given |= {"group_list_type": list_type, "output_bs": batch}
    group_list = by_expert if list_type else by_expert.cumsum(0)
    found = npu_grouped_matmul_finalize_routing(x, weight, group_list, **given)
    logit = given["logit"].numpy() if weighted else None
    assert found.dtype == torch.float32
    assert np.array_equal(found.numpy(), finalized(counts, row_index.numpy(), batch, logit))


def test_finalize_routing_adds_the_shared_expert_first() -> None:
    x, weight, scale, x_scale = inputs()
    counts, rows = torch.tensor(TAIL), torch.arange(12) % 6
    shared = drawn(2, WIDTH, dtype=torch.bfloat16, seed=7)
    kwargs = {"scale": scale, "pertoken_scale": x_scale, "row_index": rows, "output_bs": 6}
    plain = npu_grouped_matmul_finalize_routing(x, weight, counts, **kwargs)
    kwargs |= {"shared_input": shared, "shared_input_weight": 0.5, "shared_input_offset": 3}
    found = npu_grouped_matmul_finalize_routing(x, weight, counts, **kwargs)
    expected = plain.clone()
    expected[3:5] = 0.5 * shared.float() + plain[3:5]
    assert torch.equal(found, expected) and not torch.equal(found, plain)
