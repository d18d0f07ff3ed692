"""SwiGLU and the quantising operators, against numpy written row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ascend_moe.errors import ArgumentError
from ascend_moe.experts import npu_dequant_swiglu_quant, npu_dynamic_quant, npu_swiglu, quantize_weight

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def numpy_quantise(row: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """One float32 row to int8, element by element in float32."""
    scale = np.float32(np.float32(np.abs(row).max()) / np.float32(127))
    if scale == 0:
        return np.zeros(row.shape, np.int8), scale
    codes = np.rint((row / scale).astype(np.float32))
    return np.clip(codes, -128, 127).astype(np.int8), scale


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_swiglu_rounds_once(dtype: torch.dtype, dim: int) -> None:
    x = randn(6, 8, 10, seed=1, dtype=dtype) * 4
    gate, up = np.split(x.double().numpy(), 2, axis=dim)
    expected = torch.from_numpy(gate / (1 + np.exp(-gate)) * up)
    y = npu_swiglu(x, dim)
    assert y.dtype == dtype and y.shape == expected.shape
    half_ulp = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert torch.allclose(y.double(), expected, rtol=half_ulp * 1.01, atol=1e-7)


def test_swiglu_gradient_and_rules() -> None:
    x = randn(3, 8, seed=2).double().requires_grad_()
    assert torch.autograd.gradcheck(npu_swiglu, (x,))
    for bad, argument in ((torch.ones(2, 5), "dim"), (torch.ones(2, 4, dtype=torch.int32), "input")):
        with pytest.raises(ArgumentError) as caught:
            npu_swiglu(bad)
        assert caught.value.argument == argument
    with pytest.raises(ArgumentError):
        npu_swiglu(torch.ones(2, 4), dim=2)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("smooth", ["none", "one", "groups"])
def test_dynamic_quant_is_amax_over_127(dtype: torch.dtype, smooth: str) -> None:
    x = randn(2, 5, 48, seed=3, dtype=dtype)
    x[0, 1] = 0
    ends = [3, 3, 9]  # the tenth row lies behind the last group
    owner = [0, 0, 0, 2, 2, 2, 2, 2, 2, None]
    scales = {
        "none": None,
        "one": randn(48, seed=4, dtype=dtype),
        "groups": randn(3, 48, seed=5, dtype=dtype),
    }
    smooth_scales = scales[smooth]
    group_index = torch.tensor(ends, dtype=torch.int32) if smooth == "groups" else None
    codes, scale = npu_dynamic_quant(x, smooth_scales=smooth_scales, group_index=group_index)
    assert codes.dtype == torch.int8 and codes.shape == x.shape
    assert scale.dtype == torch.float32 and scale.shape == (2, 5)
    rows = x.float().reshape(10, 48).numpy()
    for row in range(10):
        values = rows[row]
        if smooth_scales is not None and (smooth == "one" or owner[row] is not None):
            factor = smooth_scales if smooth == "one" else smooth_scales[owner[row]]
            values = values * factor.float().numpy()
        expected, expected_scale = numpy_quantise(values)
        assert np.array_equal(codes.reshape(10, 48)[row].numpy(), expected)
        assert scale.flatten()[row].item() == expected_scale
    assert scale[0, 1] == 0 and not codes[0, 1].any()
    assert codes.flatten(0, 1).abs().amax(-1).tolist() == [127, 0, *[127] * 8]


def test_dynamic_quant_per_tensor_and_odd_values() -> None:
    x = randn(4, 6, seed=6)
    codes, scale = npu_dynamic_quant(x, quant_mode="pertensor", dst_type=torch.int8)
    expected, expected_scale = numpy_quantise(x.numpy())
    assert scale.shape == (1,) and scale.item() == expected_scale
    assert np.array_equal(codes.numpy(), expected)
    for number in (1, 258):
        assert torch.equal(npu_dynamic_quant(x, dst_type=number)[0], npu_dynamic_quant(x)[0])
    codes, scale = npu_dynamic_quant(torch.tensor([[1.0, torch.nan], [1.0, -torch.inf], [2.0, -4.0]]))
    assert torch.isnan(scale[0]) and torch.isinf(scale[1]) and scale[2] == np.float32(4) / np.float32(127)
    assert codes.tolist() == [[0, 0], [0, 0], [64, -127]]  # 63.5 rounds to even
    codes, scale = npu_dynamic_quant(torch.ones(0, 8))
    assert codes.shape == (0, 8) and scale.shape == (0,)


@pytest.mark.parametrize("dtype", FLOATS)
def test_quantize_weight_per_output_channel(dtype: torch.dtype) -> None:
    weight = randn(2, 9, 5, seed=7, dtype=dtype)
    weight[1, :, 3] = 0
    codes, scale = quantize_weight(weight)
    assert codes.shape == (2, 9, 5) and codes.is_contiguous() and scale.shape == (2, 5)
    for expert in range(2):
        for channel in range(5):
            expected, expected_scale = numpy_quantise(weight[expert, :, channel].float().numpy())
            assert np.array_equal(codes[expert, :, channel].numpy(), expected)
            assert scale[expert, channel].item() == expected_scale
    with pytest.raises(ArgumentError):
        quantize_weight(torch.ones(3))


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
    codes, scale = npu_dequant_swiglu_quant(
        x,
        weight_scale=weight_scale,
        activation_scale=activation_scale[:, None] if column else activation_scale,
        quant_scale=smooth,
        group_index=torch.tensor(counts),
        activate_left=left,
        quant_mode=1,
    )
    assert codes.dtype == torch.int8 and codes.shape == (rows, inner) and scale.shape == (rows,)
    for row, group in enumerate([0, 0, 0, 2, 2]):
        factor = weight_scale[group, 0] * activation_scale[row]
        values = (gate[row] * factor) * (up[row] * factor) * smooth[group]
        expected, expected_scale = numpy_quantise(values.numpy())
        assert np.array_equal(codes[row].numpy(), expected)
        assert scale[row].item() == expected_scale
    assert scale[1] == 0 and scale[0] > 0
    assert not codes[5:].any() and not scale[5:].any()


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_dequant_swiglu_quant_forms_of_glu(dtype: torch.dtype, mode: int) -> None:
    inner = 32
    integer = dtype == torch.int32
    x = (randn(2, 3, 2 * inner, seed=10) * (500 if integer else 6)).to(dtype)
    weight_scale = (
        torch.rand(2 * inner, generator=torch.Generator().manual_seed(11)) / 50 if integer else None
    )
    codes, scale = npu_dequant_swiglu_quant(
        x, weight_scale=weight_scale, quant_mode=1, swiglu_mode=mode, clamp_limit=3.0, activate_left=True
    )
    values = x.double().numpy()
    if weight_scale is not None:
        values = values * weight_scale.double().numpy()
    if mode == 1:
        gate, up = values[..., ::2], values[..., 1::2]
    else:
        gate, up = values[..., :inner], values[..., inner:]
    if mode == 0:
        expected = gate / (1 + np.exp(-gate)) * up
    else:
        gate, up = np.minimum(gate, 3.0), np.clip(up, -3.0, 3.0)
        expected = gate / (1 + np.exp(-1.702 * gate)) * (up + 1.0)
    assert codes.shape == (2, 3, inner) and scale.shape == (2, 3)
    assert np.allclose(scale.numpy(), np.abs(expected).max(-1) / 127, rtol=1e-5)
    exact = expected / scale.double().numpy()[..., None]
    assert np.abs(codes.numpy() - exact).max() <= 0.5 + 1e-3


@pytest.mark.parametrize("kind", ["int32", "float"])
def test_dequant_swiglu_quant_bias(kind: str) -> None:
    gate, up = exact_halves(4, 8, seed=12)
    x = torch.cat([gate, up], dim=1)
    bias = torch.tensor([32] * 8 + [7] * 8, dtype=torch.int32 if kind == "int32" else torch.float32)
    codes, scale = npu_dequant_swiglu_quant(
        x, weight_scale=torch.full((1, 16), 2.0), bias=bias, activate_left=True, quant_mode=1
    )
    before = kind == "int32"
    left = (gate + 32) * 2 if before else gate * 2 + 32
    right = (up + 7) * 2 if before else up * 2 + 7
    for row in range(4):
        expected, expected_scale = numpy_quantise((left * right)[row].float().numpy())
        assert np.array_equal(codes[row].numpy(), expected) and scale[row].item() == expected_scale


def test_dequant_swiglu_quant_static() -> None:
    gate, up = exact_halves(5, 8, seed=13)
    x = torch.cat([up, gate], dim=1).to(torch.float32)
    values = (gate * up).float()
    channel = 16.0 * (1 + torch.arange(8))
    offset = torch.arange(8) - 3.5
    codes, scale = npu_dequant_swiglu_quant(x, quant_scale=channel, quant_offset=offset)
    expected = torch.round(values / channel + offset).clamp(-128, 127).to(torch.int8)
    assert torch.equal(codes, expected) and not scale.any() and scale.shape == (5,)
    assert codes.min() == -128 or codes.max() == 127  # the clip is exercised
    single = npu_dequant_swiglu_quant(x, quant_scale=torch.tensor([64.0]))[0]
    assert torch.equal(single, torch.round(values / 64).clamp(-128, 127).to(torch.int8))
    grouped = npu_dequant_swiglu_quant(
        x, quant_scale=torch.tensor([32.0, 64.0]), group_index=torch.tensor([1, 3])
    )[0]
    expected = torch.round(values / torch.tensor([32.0, 64, 64, 64, 1])[:, None]).clamp(-128, 127)
    assert torch.equal(grouped[:4], expected[:4].to(torch.int8)) and not grouped[4].any()


def test_dequant_swiglu_quant_without_rows() -> None:
    arguments = {"weight_scale": torch.ones(2, 8), "group_index": torch.tensor([0, 0]), "quant_mode": 1}
    for rows in (0, 3):
        codes, scale = npu_dequant_swiglu_quant(torch.ones(rows, 8, dtype=torch.int32), **arguments)
        assert codes.shape == (rows, 4) and not codes.any() and not scale.any()
