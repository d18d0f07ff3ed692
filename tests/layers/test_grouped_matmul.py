"""The grouped matmul equals loops: forms, sums, gradients, int8."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from bad_arguments import refused
from expert_values import EACH_FLOAT, FLOATS, grouped, int8s
from torch_npu_calls import values as drawn

from ascend_moe.errors import ArgumentError
from ascend_moe.experts import grouped_matmul, npu_grouped_matmul, products
from ascend_moe.experts.products import int8_matmul, int8_matmul_by_float32


def small_integers(*shape: int, dtype: torch.dtype = torch.float32, seed: int) -> torch.Tensor:
    """Integers whose products any float32 sum holds exactly, so that every correct kernel agrees."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def looped_matmul(
    x: torch.Tensor, weights: torch.Tensor, counts: Sequence[int], bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Row by row in float64, where integers are exact; zeros behind the last group."""
    y = torch.zeros(x.shape[0], weights.shape[2], dtype=torch.float64)
    for row, expert in enumerate(np.repeat(range(len(counts)), counts)):
        y[row] = x[row].double() @ weights[expert].double() + (0 if bias is None else bias[expert].double())
    return y


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
        monkeypatch.setattr(products, "_multiplies_natively", lambda dtype: False)
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


@pytest.mark.parametrize("list_type", [0, 1])
def test_gradients_behind_the_last_group_are_zero_where_an_npu_leaves_anything(
    list_type: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = torch.tensor([2, 0, 4])
    groups = counts if list_type else counts.cumsum(0)

    def multiply(x: Sequence[torch.Tensor], *args: Any, **options: Any) -> list[torch.Tensor]:
        (y,) = npu_grouped_matmul(x, *args, **options)
        return [torch.cat([y[:6], torch.full_like(y[6:], torch.nan)])] if options["group_type"] == 0 else [y]

    monkeypatch.setattr(grouped_matmul, "on_npu", lambda tensor: True)
    x, weight = torch.randn(9, 16, requires_grad=True), torch.randn(3, 16, 32, requires_grad=True)
    options = {"group_list": groups, "group_list_type": list_type, "split_item": 3, "bias": None, "output_dtype": None}
    (y,) = grouped_matmul.multiply_with_gradient(multiply, {"x": [x], "weight": [weight], **options})
    y[:6].sum().backward()
    assert x.grad is not None and weight.grad is not None
    assert bool(x.grad[:6].all()) and not x.grad[6:].any() and bool(weight.grad.isfinite().all())


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
    refused("bias", npu_grouped_matmul, [x.T], [grad], bias=[torch.zeros(3, 6)], **place, group_type=2, says="bias")


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
    if listed:  # the first weight and bias are frozen
        leaves[1].requires_grad_(False)
        leaves[4].requires_grad_(False)
        assert torch.autograd.gradcheck(multiply, leaves)
    (y,) = npu_grouped_matmul([leaves[0]], [weight], **place, group_type=0)
    y.sum().backward()  # of x alone: nothing is multiplied for weights that are constant
    assert leaves[0].grad is not None and not leaves[0].grad[sum(counts) :].any()
