"""The fused expert operators against the chains they stand for, and against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vendor_calls import values

from ascend_moe.errors import ArgumentError
from ascend_moe.experts import npu_dequant_swiglu_quant, npu_dynamic_quant, npu_grouped_matmul
from ascend_moe.npu import (
    npu_grouped_matmul_finalize_routing,
    npu_grouped_matmul_swiglu_quant,
    npu_grouped_matmul_swiglu_quant_v2,
)

INNER, WIDTH, GROUPS = 24, 32, 4
COUNTS = {
    "even": [3, 3, 3, 3],
    "empty groups": [0, 7, 0, 2],
    "one": [0, 0, 0, 12],
    "none": [0, 0, 0, 0],
    "a tail": [2, 0, 1, 1],
}


def codes(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def inputs(rows: int = 12) -> tuple[torch.Tensor, ...]:
    """x, weight, weight_scale, x_scale."""
    weight_scale = values(GROUPS, WIDTH, seed=3).abs() / 500
    return (
        codes(rows, INNER, seed=1),
        codes(GROUPS, INNER, WIDTH, seed=2),
        weight_scale,
        values(rows, seed=4).abs(),
    )


def swiglu_quant(
    counts: list[int], smooth: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quotients before rounding, in float64, scales, and which rows belong to a group: row by row."""
    x, weight, weight_scale, x_scale = (tensor.numpy() for tensor in inputs())
    quotients, scales = np.zeros((len(x), WIDTH // 2)), np.zeros(len(x))
    valid = np.zeros(len(x), dtype=bool)
    row = 0
    for group, count in enumerate(counts):
        for _ in range(count):
            products = x[row].astype(np.int64) @ weight[group].astype(np.int64)
            c = products * weight_scale[group].astype(np.float64) * np.float64(x_scale[row])
            act, gate = c[: WIDTH // 2], c[WIDTH // 2 :]
            s = act / (1 + np.exp(-act)) * gate
            s = s if smooth is None else s * smooth[group]
            scales[row] = np.abs(s).max() / 127
            quotients[row] = s / scales[row]
            valid[row] = True
            row += 1
    return quotients, scales, valid


def assert_quantised(
    found: tuple[torch.Tensor, torch.Tensor], expected: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    quotients, scales, valid = expected
    assert np.allclose(found[1].numpy(), scales, rtol=1e-5)
    # A code is the nearest integer; float32 may fall on the other side of a half.
    assert np.abs(found[0].numpy() - quotients).max() <= 0.5 + 1e-3
    assert not found[0].numpy()[~valid].any() and not found[1].numpy()[~valid].any()


@pytest.mark.parametrize("name", COUNTS)
def test_swiglu_quant_is_numpys(name: str) -> None:
    counts = COUNTS[name]
    x, weight, weight_scale, x_scale = inputs()
    sums = torch.tensor(counts).cumsum(0)
    out, scale, offset = npu_grouped_matmul_swiglu_quant(x, weight, sums, weight_scale, x_scale)
    assert out.dtype == torch.int8 and scale.dtype == offset.dtype == torch.float32 and offset.shape == ()
    assert_quantised((out, scale), swiglu_quant(counts))


@pytest.mark.parametrize("smoothed", ["", "rows", "values"])
@pytest.mark.parametrize("list_type", [0, 1])
@pytest.mark.parametrize("name", COUNTS)
def test_swiglu_quant_v2_is_numpys(name: str, list_type: int, smoothed: str) -> None:
    x, weight, weight_scale, x_scale = inputs()
    counts = torch.tensor(COUNTS[name])
    smooth = {
        "": None,
        "rows": values(GROUPS, WIDTH // 2, seed=5).abs() + 0.1,
        "values": values(GROUPS, seed=6).abs() + 0.1,
    }[smoothed]
    found = npu_grouped_matmul_swiglu_quant_v2(
        x, [weight], [weight_scale], x_scale, counts if list_type else counts.cumsum(0),
        smooth_scale=smooth, group_list_type=list_type,
    )  # fmt: skip
    wide = None if smooth is None else smooth.reshape(GROUPS, -1).double().numpy()
    assert_quantised(found, swiglu_quant(COUNTS[name], wide))


@pytest.mark.parametrize("name", COUNTS)
def test_swiglu_quant_is_bit_for_bit_the_chain(name: str) -> None:
    x, weight, weight_scale, x_scale = inputs()
    counts = torch.tensor(COUNTS[name])
    sums = npu_grouped_matmul(
        [x],
        [weight],
        group_list=counts,
        group_list_type=1,
        group_type=0,
        split_item=2,
        output_dtype=torch.int32,
    )[0]
    chain = npu_dequant_swiglu_quant(
        sums, weight_scale=weight_scale, activation_scale=x_scale, group_index=counts, activate_left=True,
        quant_mode=1,
    )  # fmt: skip
    fused = npu_grouped_matmul_swiglu_quant(x, weight, counts.cumsum(0), weight_scale, x_scale)
    for one, other in zip(fused, chain, strict=False):
        assert torch.equal(one, other)


def test_a_strided_weight_and_an_all_zero_row() -> None:
    x, weight, weight_scale, x_scale = inputs()
    x[4] = 0
    sums = torch.tensor([3, 6, 9, 12])
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    plain = npu_grouped_matmul_swiglu_quant(x, weight, sums, weight_scale, x_scale)
    other = npu_grouped_matmul_swiglu_quant(x, turned, sums, weight_scale, x_scale)
    assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))
    assert not plain[0][4].any() and plain[1][4] == 0


# ---- and back to the tokens


def finalized(
    counts: list[int], row_index: np.ndarray, batch: int, logit: np.ndarray | None, pertoken: bool
) -> np.ndarray:
    """Row by row in float32, in row order, no numpy matrix product."""
    x, weight, scale, x_scale = (tensor.numpy() for tensor in inputs())
    total = np.zeros((batch, WIDTH), dtype=np.float32)
    row = 0
    for group, count in enumerate(counts):
        for _ in range(count):
            products = (x[row].astype(np.int32)[:, None] * weight[group].astype(np.int32)).sum(0)
            value = products.astype(np.float32) * scale[group]
            value = value * x_scale[row] if pertoken else value
            total[row_index[row]] += value if logit is None else value * logit[row]
            row += 1
    return total


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("list_type", [0, 1])
@pytest.mark.parametrize("name", COUNTS)
def test_finalize_routing_is_numpys_bit_for_bit(name: str, list_type: int, weighted: bool) -> None:
    x, weight, scale, x_scale = inputs()
    counts, batch = torch.tensor(COUNTS[name]), 5
    row_index = torch.randint(0, batch, (12,), generator=torch.Generator().manual_seed(8))
    logit = values(12, seed=9) if weighted else None
    found = npu_grouped_matmul_finalize_routing(
        x, weight, counts if list_type else counts.cumsum(0), scale=scale.unsqueeze(1) if weighted else scale,
        pertoken_scale=x_scale if weighted else None, logit=logit,
        row_index=row_index.int() if weighted else row_index, output_bs=batch, group_list_type=list_type,
    )  # fmt: skip
    expected = finalized(
        COUNTS[name], row_index.numpy(), batch, None if logit is None else logit.numpy(), weighted
    )
    assert found.dtype == torch.float32 and np.array_equal(found.numpy(), expected)


def test_finalize_routing_adds_the_shared_expert_first() -> None:
    x, weight, scale, x_scale = inputs()
    counts, rows = torch.tensor(COUNTS["a tail"]), torch.arange(12) % 6
    shared = values(2, WIDTH, dtype=torch.bfloat16, seed=7)
    kwargs = {"scale": scale, "pertoken_scale": x_scale, "row_index": rows, "output_bs": 6}
    plain = npu_grouped_matmul_finalize_routing(x, weight, counts, **kwargs)
    found = npu_grouped_matmul_finalize_routing(
        x, weight, counts, **kwargs, shared_input=shared, shared_input_weight=0.5, shared_input_offset=3
    )
    expected = plain.clone()
    expected[3:5] = 0.5 * shared.float() + plain[3:5]
    assert torch.equal(found, expected) and not torch.equal(found, plain)
    for offset in (-1, 5):
        with pytest.raises(
            ArgumentError, match=f"shared_input_offset is {offset}; 2 rows from there"
        ) as caught:
            npu_grouped_matmul_finalize_routing(
                x, weight, counts, **kwargs, shared_input=shared, shared_input_offset=offset
            )
        assert caught.value.argument == "shared_input_offset"


def test_finalize_routing_closes_the_layer() -> None:
    """The W8A8 layer by the fused pair equals the dequantised float layer within the quantisation's error."""
    x = values(12, INNER, seed=11)
    x_codes, x_scale = npu_dynamic_quant(x)
    _, w1, w1_scale, _ = inputs()
    w2, w2_scale = codes(GROUPS, WIDTH // 2, 8, seed=12), values(GROUPS, 8, seed=13).abs() / 100
    counts = torch.tensor(COUNTS["empty groups"])
    hidden, hidden_scale = npu_grouped_matmul_swiglu_quant_v2(
        x_codes, [w1], [w1_scale], x_scale, counts, group_list_type=1
    )
    y = npu_grouped_matmul_finalize_routing(
        hidden, w2, counts, scale=w2_scale, pertoken_scale=hidden_scale, row_index=torch.arange(12)
    )
    expected = torch.zeros(12, 8)
    row = 0
    for group, count in enumerate(COUNTS["empty groups"]):
        for _ in range(count):
            gate, up = (x[row] @ (w1[group] * w1_scale[group])).chunk(2)
            expected[row] = (torch.nn.functional.silu(gate) * up) @ (w2[group] * w2_scale[group])
            row += 1
    assert torch.allclose(y, expected, atol=0.03 * float(expected.abs().max()))
