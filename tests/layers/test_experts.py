"""Grouped matmul, SwiGLU, the quantizing operators and those that join them: against loops in numpy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch_npu_calls import values as drawn

from ascend_moe.errors import ArgumentError
from ascend_moe.experts import (
    grouped_matmul,
    npu_clipped_swiglu,
    npu_dequant_swiglu_quant,
    npu_dynamic_quant,
    npu_grouped_matmul,
    npu_swiglu,
    quantize_weight,
)
from ascend_moe.experts.grouped_matmul import int8_matmul, int8_matmul_by_float32
from ascend_moe.npu import (
    npu_grouped_matmul_finalize_routing,
    npu_grouped_matmul_swiglu_quant,
    npu_grouped_matmul_swiglu_quant_v2,
)

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
EACH_FLOAT = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def small_integers(*shape: int, dtype: torch.dtype = torch.float32, seed: int) -> torch.Tensor:
    """Integers whose products any float32 sum holds exactly, so that every correct kernel agrees."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int8s(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def looped_matmul(
    x: torch.Tensor, weights: torch.Tensor, counts: Sequence[int], bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Row by row in float64, where integers are exact; zeros behind the last group."""
    y = torch.zeros(x.shape[0], weights.shape[2], dtype=torch.float64)
    for row, expert in enumerate(np.repeat(range(len(counts)), counts)):
        y[row] = x[row].double() @ weights[expert].double() + (0 if bias is None else bias[expert].double())
    return y


def grouped(x: torch.Tensor, weight: torch.Tensor, counts: Sequence[int], **kwargs: Any) -> torch.Tensor:
    """One tensor of rows by one of weights, numbers of rows by expert."""
    place = {"group_list": torch.tensor(counts), "group_list_type": 1, "split_item": 2, "group_type": 0}
    return npu_grouped_matmul([x], [weight], **(place | kwargs))[0]


# ---- grouped matmul


def group_list_of(counts: Sequence[int], list_type: int) -> torch.Tensor:
    if list_type < 2:
        return torch.tensor(counts if list_type else list(itertools.accumulate(counts)))
    pairs = [[expert, count] for expert, count in enumerate(counts) if count]
    return torch.tensor(pairs + [[0, 0]] * (len(counts) - len(pairs)))


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 0], [0, 9, 0, 0], [2, 2, 2, 3]], ids=str)
@pytest.mark.parametrize("list_type", [0, 1, 2])
@EACH_FLOAT
def test_one_output_is_the_loop_over_experts(dtype: torch.dtype, list_type: int, counts: list[int]) -> None:
    x = small_integers(11, 40, dtype=dtype, seed=1)
    weight = small_integers(4, 40, 24, dtype=dtype, seed=2)
    expected = looped_matmul(x, weight, counts).to(dtype)
    x[sum(counts) :] = torch.nan  # rows of nobody must not reach anybody
    form = {"group_list": group_list_of(counts, list_type), "group_list_type": list_type, "group_type": 0}
    for split_item, weights in ((2, [weight]), (3, list(weight))):
        (y,) = npu_grouped_matmul([x], weights, **form, split_item=split_item)
        assert y.dtype == dtype and torch.equal(y, expected)


@pytest.mark.parametrize("native", [True, False])
@EACH_FLOAT
def test_sums_are_float32_and_rounded_once(dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:  # a CPU without bf16 products
        monkeypatch.setattr(grouped_matmul, "_multiplies_natively", lambda dtype: False)
    x = small_integers(30, 1031, dtype=dtype, seed=3)
    weight = small_integers(2, 1031, 17, dtype=dtype, seed=4)
    bias, counts = torch.tensor([[0.5] * 17, [-3.25] * 17]), [13, 17]
    assert torch.equal(grouped(x, weight, counts), looped_matmul(x, weight, counts).to(dtype))
    expected = looped_matmul(x, weight, counts, bias).to(dtype)
    assert torch.equal(grouped(x, weight, counts, bias=[bias]), expected)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8], ids=str)
def test_transposed_weights_and_sliced_rows(dtype: torch.dtype) -> None:
    wide = small_integers(8, 64, dtype=dtype, seed=6)
    stored = small_integers(3, 12, 32, dtype=dtype, seed=7)  # (E, N, K), as checkpoints keep it
    x, weight = wide[1:7, 16:48], stored.transpose(1, 2)
    output_dtype = torch.int32 if dtype == torch.int8 else dtype
    y = grouped(x, weight, [2, 0, 4], output_dtype=output_dtype if dtype == torch.int8 else None)
    assert torch.equal(y, looped_matmul(x, weight, [2, 0, 4]).to(output_dtype))


def test_one_output_a_group() -> None:
    x = small_integers(9, 16, seed=8)
    weights = [small_integers(16, n, seed=n) for n in (3, 7, 5)]
    ends = [2, 2, 8]
    for group_list, group_type in ((ends, None), (torch.tensor(ends), 0)):
        outputs = npu_grouped_matmul([x], weights, group_list=group_list, split_item=0, group_type=group_type)
        rows = [x[:2], x[2:2], x[2:8]]
        assert [y.shape for y in outputs] == [(2, 3), (0, 7), (6, 5)]
        assert all(torch.equal(y, r @ w) for y, r, w in zip(outputs, rows, weights, strict=True))


@pytest.mark.parametrize("group_type", [-1, None])
def test_one_x_an_expert(group_type: int | None) -> None:
    shapes = [(4, 6), (0, 5), (3, 8)]
    x = [small_integers(*shape, seed=i) for i, shape in enumerate(shapes)]
    weights = [small_integers(s[1], 10, seed=9 + i) for i, s in enumerate(shapes)]
    bias = [small_integers(10, seed=20 + i) for i in range(3)]
    expected = [a @ w + b for a, w, b in zip(x, weights, bias, strict=True)]
    outputs = npu_grouped_matmul(x, weights, bias=bias, group_type=group_type)
    assert all(torch.equal(y, e) for y, e in zip(outputs, expected, strict=True))
    (joined,) = npu_grouped_matmul(x, weights, bias=bias, split_item=2, group_type=0)
    assert torch.equal(joined, torch.cat(expected))
    deep = [small_integers(2, 3, 6, seed=30), x[1], x[2]]
    assert npu_grouped_matmul(deep, weights, group_type=group_type)[0].shape == (2, 3, 10)


def test_one_x_an_expert_and_a_list_of_other_rows() -> None:
    x, weights = [small_integers(rows, 6, seed=rows) for rows in (4, 3)], [small_integers(6, 5, seed=9)] * 2
    right = npu_grouped_matmul(x, weights, group_list=[4, 7], split_item=2)[0]
    assert torch.equal(right, torch.cat(x) @ weights[0])
    for wrong in ([3, 7], [4, 6], [7, 7]):
        with pytest.raises(ArgumentError, match=r"group_list does not describe x's row counts \[4, 3\]; leave it out"):
            npu_grouped_matmul(x, weights, group_list=wrong, split_item=2)


@pytest.mark.parametrize("group_list, kind", [([0, 0], 0), (torch.tensor([[1, 0]]), 2)], ids=["list", "pairs"])
def test_no_rows_at_all_still_have_gradients(group_list: Any, kind: int) -> None:
    """Also where the gradients are no grouped products: a list on the host, or pairs."""
    x, weight = torch.randn(3, 6).requires_grad_(), torch.randn(2, 6, 5).requires_grad_()
    group_type = 0 if isinstance(group_list, torch.Tensor) else None
    (y,) = npu_grouped_matmul(
        [x], [weight], group_list=group_list, group_list_type=kind, split_item=2, group_type=group_type
    )
    y.sum().backward()
    assert x.grad is not None and weight.grad is not None and not x.grad.any() and not weight.grad.any()


def test_pairs_pick_experts_in_any_order() -> None:
    x = small_integers(6, 8, seed=10)
    weight = small_integers(5, 8, 4, seed=11)
    pairs = torch.tensor([[3, 2], [1, 3], [99, 0]])
    (y,) = npu_grouped_matmul([x], [weight], group_list=pairs, group_list_type=2, split_item=3, group_type=0)
    assert torch.equal(y, torch.cat([x[:2] @ weight[3], x[2:5] @ weight[1], torch.zeros(1, 4)]))


@pytest.mark.parametrize(
    "shape", [(0, 16, 8), (1, 1, 1), (3, 5, 7), (5, 1024, 9), (17, 1025, 33), (2, 2047, 3), (2, 7168, 3)]
)
def test_int8_sums_are_exact(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a, b = int8s(m, k, seed=1), int8s(k, n, seed=2)
    most_negative = torch.full_like(a, -128), torch.full_like(b, -128)
    large_and_odd = torch.full_like(a, 127), torch.full_like(b, 127)  # what float32 would round
    odd_sums = torch.full_like(a, 127), torch.full_like(b, 127)
    odd_sums[0][:, ::1024], odd_sums[1][::1024] = 1, 2  # of 1024 products each, which are no sums of larger powers of 2
    for x, w in ((a, b), most_negative, large_and_odd, odd_sums, (a, b.t().contiguous().t())):
        expected = (x.long() @ w.long()).to(torch.int32)
        assert torch.equal(int8_matmul(x, w), expected)
        assert torch.equal(int8_matmul_by_float32(x, w), expected)


def test_int8_scaling_follows_the_written_order() -> None:
    counts, rows = [3, 0, 4], 9
    x, weight = int8s(rows, 200, seed=3), int8s(3, 200, 30, seed=4)
    generator = torch.Generator().manual_seed(6)
    scale = torch.rand(3, 30, generator=generator) / 100
    per_token = torch.rand(rows, generator=generator)
    per_token[sum(counts) :] = torch.nan
    whole_bias = torch.randint(-(10**6), 10**6, (3, 30), generator=generator, dtype=torch.int32)
    float_bias = torch.randn(3, 30, generator=generator)
    for dtype, number in ((torch.bfloat16, 15), (torch.float16, 256 + 1), (torch.float32, 6)):
        for bias, tokens in itertools.product((None, whole_bias, float_bias), (None, per_token)):
            expected = torch.zeros(rows, 30, dtype=dtype)
            for row, expert in enumerate([0] * 3 + [2] * 4):
                total = (x[row].long() @ weight[expert].long()).to(torch.int32)
                total = total + whole_bias[expert] if bias is whole_bias else total
                value = total.float() * scale[expert]
                value = value if tokens is None else value * tokens[row]
                expected[row] = value + float_bias[expert] if bias is float_bias else value
            given = {} if tokens is None else {"per_token_scale": [tokens]}
            tensors = given | {"scale": [scale], "bias": None if bias is None else [bias]}
            lists = given | {"scale": list(scale), "bias": None if bias is None else list(bias)}
            assert torch.equal(grouped(x, weight, counts, **tensors, output_dtype=dtype), expected)
            assert torch.equal(grouped(x, weight, counts, **lists, output_dtype=number), expected)


# ---- SwiGLU and quantizing


def numpy_quantize(row: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """One float32 row to int8, element by element in float32."""
    scale = np.float32(np.float32(np.abs(row).max()) / np.float32(127))
    if scale == 0:
        return np.zeros(row.shape, np.int8), scale
    codes = np.rint((row / scale).astype(np.float32))
    return np.clip(codes, -128, 127).astype(np.int8), scale


def assert_codes(values: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> None:
    """Of float32 rows: what quantizing makes of each."""
    for row, found, of_row in zip(values.float(), codes, scale, strict=True):
        expected, expected_scale = numpy_quantize(row.numpy())
        assert np.array_equal(found.numpy(), expected) and of_row.item() == expected_scale


@EACH_FLOAT
@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_swiglu_rounds_once(dtype: torch.dtype, dim: int) -> None:
    x = drawn(6, 8, 10, seed=1, dtype=dtype) * 4
    gate, up = np.split(x.double().numpy(), 2, axis=dim)
    expected = torch.from_numpy(gate / (1 + np.exp(-gate)) * up)
    y = npu_swiglu(x, dim)
    assert y.dtype == dtype and y.shape == expected.shape
    half_ulp = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert torch.allclose(y.double(), expected, rtol=half_ulp * 1.01, atol=1e-7)


@EACH_FLOAT
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dim", [-1, 0])
def test_clipped_swiglu_rounds_once(dtype: torch.dtype, interleaved: bool, dim: int) -> None:
    x = drawn(6, 8, 10, seed=1, dtype=dtype) * 9
    wide = np.moveaxis(x.double().numpy(), dim, -1)
    gate, up = (wide[..., ::2], wide[..., 1::2]) if interleaved else np.split(wide, 2, axis=-1)
    assert (gate > 7).any() and (abs(up) > 7).any()
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    expected = torch.from_numpy(np.moveaxis(gate / (1 + np.exp(-1.702 * gate)) * (up + 1), -1, dim).copy())
    y = npu_clipped_swiglu(x, dim=dim, interleaved=interleaved)
    assert y.dtype == dtype and y.shape == expected.shape
    half_ulp = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert torch.allclose(y.double(), expected, rtol=half_ulp * 1.01, atol=1e-6)
    rows = 48 if dim == -1 else 1
    part = npu_clipped_swiglu(x, dim=dim, interleaved=interleaved, group_index=torch.tensor([1, 0]))
    kept = part.reshape(rows, -1)
    assert torch.equal(kept[0], y.reshape(rows, -1)[0]) and not kept[1:].any()


@EACH_FLOAT
@pytest.mark.parametrize("list_type", [0, 1])
def test_columns_grouped_are_the_weights_gradients(dtype: torch.dtype, list_type: int) -> None:
    counts = [3, 0, 4]
    x, grad = drawn(9, 8, seed=1, dtype=dtype), drawn(9, 6, seed=2, dtype=dtype)
    place = {"group_list": group_list_of(counts, list_type), "group_list_type": list_type, "split_item": 3}
    (found,) = npu_grouped_matmul([x.T], [grad], **place, group_type=2)
    weight = torch.zeros(3, 8, 6, dtype=dtype, requires_grad=True)
    npu_grouped_matmul([x], [weight], **place, group_type=0)[0].backward(grad)
    assert found.shape == (3, 8, 6) and not found[1].any()
    for expert, rows in ((0, slice(0, 3)), (2, slice(3, 7))):
        product = (x[rows].double().T @ grad[rows].double()).to(dtype)
        torch.testing.assert_close(found[expert], product)
    assert torch.equal(found, weight.grad)
    with pytest.raises(ArgumentError, match="group_type 2 needs 2 or 3"):
        npu_grouped_matmul([x.T], [grad], **(place | {"split_item": 0}), group_type=2)
    with pytest.raises(ArgumentError, match="group_list covers 10 rows, but the matrix has 9"):
        npu_grouped_matmul([x.T], [grad], group_list=torch.tensor([10]), split_item=2, group_type=2)
    with pytest.raises(ArgumentError, match="bias"):
        npu_grouped_matmul([x.T], [grad], bias=[torch.zeros(3, 6)], **place, group_type=2)


@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0, 0], [0, 9, 0]], ids=str)
@pytest.mark.parametrize("list_type", [0, 1])
@pytest.mark.parametrize("listed", [False, True])
def test_numeric_gradients_of_the_grouped_matmul(counts: list[int], list_type: int, listed: bool) -> None:
    """One tensor of all weights and biases, and one an expert; rows of nobody at the end, or none."""
    x, weight, bias = (drawn(*shape, seed=3).double() for shape in ((9, 4), (3, 4, 5), (3, 5)))
    parameters = [*weight.unbind(), *bias.unbind()] if listed else [weight, bias]
    leaves = [each.clone().requires_grad_() for each in (x, *parameters)]
    place = {"group_list": group_list_of(counts, list_type), "group_list_type": list_type, "split_item": 3}

    def multiply(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        weights, biases = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        (y,) = npu_grouped_matmul([x], list(weights), bias=list(biases), **place, group_type=0)
        return y

    assert torch.autograd.gradcheck(multiply, leaves)
    (y,) = npu_grouped_matmul([leaves[0]], [weight], **place, group_type=0)
    y.sum().backward()  # of x alone: nothing is multiplied for weights that are constant
    assert leaves[0].grad is not None and not leaves[0].grad[sum(counts) :].any()


def test_swiglu_gradient() -> None:
    assert torch.autograd.gradcheck(npu_swiglu, (drawn(3, 8, seed=2).double().requires_grad_(),))


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


DYNAMIC: dict[str, Any] = {"activate_left": True, "quant_mode": 1}
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


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_dequant_swiglu_quant_forms_of_glu(dtype: torch.dtype, mode: int) -> None:
    inner = 32
    integer = dtype == torch.int32
    x = (drawn(2, 3, 2 * inner, seed=10) * (500 if integer else 6)).to(dtype)
    weight_scale = drawn(2 * inner, seed=11).abs() / 50 if integer else None
    given = DYNAMIC | {"weight_scale": weight_scale, "swiglu_mode": mode, "clamp_limit": 3.0}
    codes, scale = npu_dequant_swiglu_quant(x, **given)
    values = x.double().numpy() * (weight_scale.double().numpy() if integer else 1)
    gate, up = (values[..., ::2], values[..., 1::2]) if mode == 1 else np.split(values, 2, axis=-1)
    if mode == 0:
        expected = gate / (1 + np.exp(-gate)) * up
    else:
        gate, up = np.minimum(gate, 3.0), np.clip(up, -3.0, 3.0)
        expected = gate / (1 + np.exp(-1.702 * gate)) * (up + 1.0)
    assert codes.shape == (2, 3, inner) and scale.shape == (2, 3)
    assert np.allclose(scale.numpy(), np.abs(expected).max(-1) / 127, rtol=1e-5)
    exact = expected / scale.double().numpy()[..., None]
    assert np.abs(codes.numpy() - exact).max() <= 0.5 + 1e-3


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


# ---- joined operators

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
