"""The quantizing operators and those that join them equal numpy and the chain of operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from expert_values import DYNAMIC, EACH_FLOAT, grouped, int8s
from torch_npu_calls import values as drawn

from ascend_moe.experts import npu_dequant_swiglu_quant, npu_dynamic_quant, quantize_weight
from ascend_moe.npu import (
    npu_grouped_matmul_finalize_routing,
    npu_grouped_matmul_swiglu_quant,
    npu_grouped_matmul_swiglu_quant_v2,
)


def numpy_quantize(row: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """One float32 row to int8, element by element in float32."""
    scale = np.float32(np.float32(np.abs(row).max()) / np.float32(127))
    if scale == 0:
        return np.zeros(row.shape, np.int8), scale
    codes = np.rint((row / scale).astype(np.float32))
    return np.clip(codes, -128, 127).astype(np.int8), scale


def assert_codes(values: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> None:
    """Checks what quantizing makes of each float32 row."""
    for row, found, of_row in zip(values.float(), codes, scale, strict=True):
        expected, expected_scale = numpy_quantize(row.numpy())
        assert np.array_equal(found.numpy(), expected) and of_row.item() == expected_scale


@EACH_FLOAT
@pytest.mark.parametrize("smooth", ["none", "one", "groups"])
def test_dynamic_quant_is_amax_over_127(dtype: torch.dtype, smooth: str) -> None:
    x = drawn(2, 5, 48, seed=3, dtype=dtype)
    x[0, 1] = 0
    ends, owners = [3, 3, 9], [0] * 3 + [2] * 6  # the tenth row lies behind the last group
    shape = {"none": (), "one": (48,), "groups": (3, 48)}[smooth]
    smooth_scales = drawn(*shape, seed=4, dtype=dtype) if shape else None
    group_index = torch.tensor(ends, dtype=torch.int32) if smooth == "groups" else None
    codes, scale = npu_dynamic_quant(x, smooth_scales=smooth_scales, group_index=group_index)
    assert codes.dtype == torch.int8 and codes.shape == x.shape
    assert scale.dtype == torch.float32 and scale.shape == (2, 5)
    rows = x.float().reshape(10, 48)
    if smooth_scales is not None:
        rows[:9] *= (smooth_scales if smooth == "one" else smooth_scales[owners]).float()
        rows[9] *= smooth_scales.float() if smooth == "one" else 1
    assert_codes(rows, codes.reshape(10, 48), scale.flatten())
    assert scale[0, 1] == 0 and not codes[0, 1].any()
    assert codes.flatten(0, 1).abs().amax(-1).tolist() == [127, 0, *[127] * 8]


def test_dynamic_quant_per_tensor_and_odd_values() -> None:
    x = drawn(4, 6, seed=6)
    codes, scale = npu_dynamic_quant(x, quant_mode="pertensor", dst_type=torch.int8)
    expected, expected_scale = numpy_quantize(x.numpy())
    assert scale.shape == (1,) and scale.item() == expected_scale
    assert np.array_equal(codes.numpy(), expected)
    for number in (1, 258):
        assert torch.equal(npu_dynamic_quant(x, dst_type=number)[0], npu_dynamic_quant(x)[0])
    codes, scale = npu_dynamic_quant(torch.tensor([[1.0, torch.nan], [1.0, -torch.inf], [2.0, -4.0]]))
    assert torch.isnan(scale[0]) and torch.isinf(scale[1]) and scale[2] == np.float32(4) / np.float32(127)
    assert codes.tolist() == [[0, 0], [0, 0], [64, -127]]  # 63.5 rounds to even
    codes, scale = npu_dynamic_quant(torch.ones(0, 8))
    assert codes.shape == (0, 8) and scale.shape == (0,)


@EACH_FLOAT
def test_quantize_weight_per_output_channel(dtype: torch.dtype) -> None:
    weight = drawn(2, 9, 5, seed=7, dtype=dtype)
    weight[1, :, 3] = 0
    codes, scale = quantize_weight(weight)
    assert codes.shape == (2, 9, 5) and codes.is_contiguous() and scale.shape == (2, 5)
    for expert in range(2):
        assert_codes(weight[expert].t(), codes[expert].t(), scale[expert])


# Gates of 0, 32 and 64 make silu exact (0, 32, 64), so the whole chain has one right answer in float32.
GATES = torch.tensor([0, 32, 64], dtype=torch.int32)


def exact_halves(rows: int, inner: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    gate = GATES[torch.randint(0, 3, (rows, inner), generator=generator)]
    up = torch.randint(-50, 51, (rows, inner), generator=generator, dtype=torch.int32)
    return gate, up


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("column", [True, False])
def test_dequant_swiglu_quant_groups_exactly(left: bool, column: bool) -> None:
    counts, rows, inner = [3, 0, 2], 7, 16
    gate, up = exact_halves(rows, inner, seed=8)
    gate[1] = 0  # silu(0) * anything: an all-zero row
    x = torch.cat([gate, up] if left else [up, gate], dim=1)
    weight_scale = 2.0 ** torch.arange(3)[:, None].expand(3, 2 * inner)
    # Powers of two, at least 1 where gates are not 0: silu stays exact.
    activation_scale = torch.tensor([1.0, 0.5, 1, 2, 1, torch.nan, torch.nan])
    smooth = 2.0 ** torch.randint(-2, 3, (3, inner), generator=torch.Generator().manual_seed(9))
    given = {"weight_scale": weight_scale, "quant_scale": smooth, "group_index": torch.tensor(counts)}
    given["activation_scale"] = activation_scale[:, None] if column else activation_scale
    codes, scale = npu_dequant_swiglu_quant(x, **given, activate_left=left, quant_mode=1)
    assert codes.dtype == torch.int8 and codes.shape == (rows, inner) and scale.shape == (rows,)
    owners = [0, 0, 0, 2, 2]
    factor = weight_scale[owners, :1] * activation_scale[:5, None]
    assert_codes((gate[:5] * factor) * (up[:5] * factor) * smooth[owners], codes[:5], scale[:5])
    assert scale[1] == 0 and scale[0] > 0
    assert not codes[5:].any() and not scale[5:].any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_dequant_swiglu_quant_bias(dtype: torch.dtype) -> None:
    gate, up = exact_halves(4, 8, seed=12)
    bias = torch.tensor([32] * 8 + [7] * 8, dtype=dtype)
    given = DYNAMIC | {"weight_scale": torch.full((1, 16), 2.0), "bias": bias}
    codes, scale = npu_dequant_swiglu_quant(torch.cat([gate, up], dim=1), **given)
    before = 2 if dtype == torch.int32 else 1  # whole numbers are added to the sums, others to the products
    assert_codes((gate * 2 + 32 * before) * (up * 2 + 7 * before), codes, scale)
    # A whole bias joins the sum before it becomes a float, which has 24 bits.
    sums = torch.tensor([[2**25 + 1, 1]], dtype=torch.int32)
    given = DYNAMIC | {"weight_scale": torch.ones(1, 2), "bias": torch.tensor([-(2**25), 0], dtype=dtype)}
    _, scale = npu_dequant_swiglu_quant(sums, **given)
    assert bool(scale > 0.7 / 127) == (dtype == torch.int32)  # silu(1), or silu(0)


def test_dequant_swiglu_quant_static() -> None:
    gate, up = exact_halves(5, 8, seed=13)
    x, values = torch.cat([up, gate], dim=1).to(torch.float32), (gate * up).float()
    channel, offset = 16.0 * (1 + torch.arange(8)), torch.arange(8) - 3.5
    codes, scale = npu_dequant_swiglu_quant(x, quant_scale=channel, quant_offset=offset)
    assert torch.equal(codes, torch.round(values / channel + offset).clamp(-128, 127).to(torch.int8))
    assert codes.min() == -128 or codes.max() == 127  # the clip is exercised
    assert not scale.any() and scale.shape == (5,)
    single = npu_dequant_swiglu_quant(x, quant_scale=torch.tensor([64.0]))[0]
    assert torch.equal(single, torch.round(values / 64).clamp(-128, 127).to(torch.int8))
    # Halves of 41 * 64, where a product with the reciprocal leaves the tie.
    halves, scales = torch.tensor([[41.0 * odd for odd in range(1, 200, 2)]]), torch.tensor([2624.0])
    ties = npu_dequant_swiglu_quant(torch.cat([halves, torch.full_like(halves, 32)], 1), quant_scale=scales)[0]
    assert torch.equal(ties, torch.round(halves * 32 / scales).clamp(-128, 127).to(torch.int8))
    assert not torch.equal(halves * 32 / scales, halves * 32 * (1 / scales))
    groups = {"quant_scale": torch.tensor([32.0, 64.0]), "group_index": torch.tensor([1, 3])}
    codes = npu_dequant_swiglu_quant(x, **groups)[0]
    expected = torch.round(values[:4] / torch.tensor([32.0, 64, 64, 64])[:, None]).clamp(-128, 127)
    assert torch.equal(codes[:4], expected.to(torch.int8)) and not codes[4].any()
    nothing = {"weight_scale": torch.ones(2, 8), "group_index": torch.tensor([0, 0]), "quant_mode": 1}
    for rows in (0, 3):
        codes, scale = npu_dequant_swiglu_quant(torch.ones(rows, 8, dtype=torch.int32), **nothing)
        assert codes.shape == (rows, 4) and not codes.any() and not scale.any()


# ---- operators that join the grouped matmul with its next step give the bits of the chain


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


def finalized(counts: list[int], row_index: np.ndarray, total: np.ndarray, logit: np.ndarray | None) -> np.ndarray:
    """Row by row in float32, in row order, no numpy matrix product; with a logit, by x_scale too."""
    x, weight, scale, x_scale = (tensor.numpy() for tensor in inputs())
    for row, group in enumerate(np.repeat(range(GROUPS), counts)):
        products = (x[row].astype(np.int32)[:, None] * weight[group].astype(np.int32)).sum(0)
        value = products.astype(np.float32) * scale[group]
        total[row_index[row]] += value if logit is None else value * x_scale[row] * logit[row]
    return total


@pytest.mark.parametrize("factor", ["nothing shared", None, 0.0, 0.5])
@pytest.mark.parametrize("list_type", [0, 1])
@EACH_COUNTS
def test_finalize_routing_is_numpys_bit_for_bit(counts: list[int], list_type: int, factor: Any) -> None:
    """The shared expert's rows come first; their weight None is 1."""
    x, weight, scale, x_scale = inputs()
    by_expert, total, logit = torch.tensor(counts), np.zeros((5, WIDTH), dtype=np.float32), None
    row_index = torch.randint(0, len(total), (12,), generator=torch.Generator().manual_seed(8))
    given = {"scale": scale, "row_index": row_index, "output_bs": len(total), "group_list_type": list_type}
    if factor != "nothing shared":
        shared, logit = (
            drawn(2, WIDTH, dtype=torch.bfloat16, seed=7),
            drawn(12, seed=9) if list_type else torch.ones(12),
        )
        total[3:] = shared.float().numpy() * (1.0 if factor is None else factor)
        given |= {"scale": scale.unsqueeze(1), "row_index": row_index.int(), "pertoken_scale": x_scale}
        given |= {"shared_input": shared, "shared_input_weight": factor, "shared_input_offset": 3}
        given |= {"logit": logit} if list_type else {}
    found = npu_grouped_matmul_finalize_routing(x, weight, by_expert if list_type else by_expert.cumsum(0), **given)
    expected = finalized(counts, row_index.numpy(), total, None if logit is None else logit.numpy())
    assert found.dtype == torch.float32 and np.array_equal(found.numpy(), expected)
