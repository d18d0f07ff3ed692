"""Grouped matmul against loops over experts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from ascend_moe.experts import grouped_matmul, npu_grouped_matmul
from ascend_moe.experts.grouped_matmul import int8_matmul, int8_matmul_by_float32

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
COUNTS = [[3, 0, 5, 1], [0, 0, 0, 0], [0, 9, 0, 0], [2, 2, 2, 3]]


def small_integers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Integers whose products any float32 sum holds exactly, so that every correct kernel agrees."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def int8s(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def group_list_of(counts: Sequence[int], list_type: int) -> torch.Tensor:
    if list_type == 0:
        return torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int64)
    if list_type == 1:
        return torch.tensor(counts, dtype=torch.int64)
    pairs = [[expert, count] for expert, count in enumerate(counts) if count]
    pairs += [[0, 0]] * (len(counts) - len(pairs))
    return torch.tensor(pairs, dtype=torch.int64)


def looped_matmul(
    x: torch.Tensor, weights: torch.Tensor, counts: Sequence[int], bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Row by row in float64, where integers are exact; zeros behind the last group."""
    y = torch.zeros(x.shape[0], weights.shape[2], dtype=torch.float64)
    row = 0
    for expert, count in enumerate(counts):
        for _ in range(count):
            y[row] = x[row].double() @ weights[expert].double()
            if bias is not None:
                y[row] += bias[expert].double()
            row += 1
    return y


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("list_type", [0, 1, 2])
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_output_is_the_loop_over_experts(dtype: torch.dtype, list_type: int, counts: list[int]) -> None:
    x = small_integers(11, 40, dtype=dtype, seed=1)
    weight = small_integers(4, 40, 24, dtype=dtype, seed=2)
    expected = looped_matmul(x, weight, counts).to(dtype)
    x[sum(counts) :] = torch.nan  # rows of nobody must not reach anybody
    group_list = group_list_of(counts, list_type)
    for split_item, weights in ((2, [weight]), (3, list(weight))):
        (y,) = npu_grouped_matmul(
            [x],
            weights,
            group_list=group_list,
            group_list_type=list_type,
            split_item=split_item,
            group_type=0,
        )
        assert y.dtype == dtype and torch.equal(y, expected)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_are_float32_and_rounded_once(
    dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:  # a CPU without bf16 products
        monkeypatch.setattr(grouped_matmul, "_multiplies_natively", lambda dtype: False)
    x = small_integers(30, 1031, dtype=dtype, seed=3)
    weight = small_integers(2, 1031, 17, dtype=dtype, seed=4)
    bias = torch.tensor([[0.5] * 17, [-3.25] * 17])
    counts = torch.tensor([13, 17])
    (y,) = npu_grouped_matmul([x], [weight], group_list=counts, group_list_type=1, split_item=2, group_type=0)
    assert torch.equal(y, looped_matmul(x, weight, counts.tolist()).to(dtype))
    (y,) = npu_grouped_matmul(
        [x], [weight], bias=[bias], group_list=counts, group_list_type=1, split_item=2, group_type=0
    )
    assert torch.equal(y, looped_matmul(x, weight, counts.tolist(), bias).to(dtype))


def test_random_floats_stay_close_to_float64() -> None:
    generator = torch.Generator().manual_seed(5)
    x, weight = torch.randn(20, 96, generator=generator), torch.randn(3, 96, 50, generator=generator)
    counts = [4, 9, 7]
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2**-8), (torch.float16, 2**-10)):
        cast_x, cast_w = x.to(dtype), weight.to(dtype)
        (y,) = npu_grouped_matmul(
            [cast_x],
            [cast_w],
            group_list=torch.tensor(counts),
            group_list_type=1,
            split_item=3,
            group_type=0,
        )
        expected = looped_matmul(cast_x, cast_w, counts)
        assert torch.allclose(y.double(), expected, rtol=tolerance, atol=1e-4)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8])
def test_transposed_weights_and_sliced_rows(dtype: torch.dtype) -> None:
    counts = [2, 0, 4]
    wide = small_integers(8, 64, dtype=dtype, seed=6)
    stored = small_integers(3, 12, 32, dtype=dtype, seed=7)  # (E, N, K), as checkpoints keep it
    x, weight = wide[1:7, 16:48], stored.transpose(1, 2)
    assert not x.is_contiguous() and not weight.is_contiguous()
    integer = dtype == torch.int8
    (y,) = npu_grouped_matmul(
        [x],
        [weight],
        group_list=torch.tensor(counts),
        group_list_type=1,
        split_item=2,
        group_type=0,
        output_dtype=torch.int32 if integer else None,
    )
    assert torch.equal(y, looped_matmul(x, weight, counts).to(torch.int32 if integer else dtype))


def test_one_output_a_group() -> None:
    x = small_integers(9, 16, dtype=torch.float32, seed=8)
    weights = [small_integers(16, n, dtype=torch.float32, seed=n) for n in (3, 7, 5)]
    ends = [2, 2, 8]
    for group_list, group_type in ((ends, None), (torch.tensor(ends), 0)):
        outputs = npu_grouped_matmul([x], weights, group_list=group_list, split_item=0, group_type=group_type)
        rows = [x[:2], x[2:2], x[2:8]]
        assert [y.shape for y in outputs] == [(2, 3), (0, 7), (6, 5)]
        assert all(torch.equal(y, r @ w) for y, r, w in zip(outputs, rows, weights, strict=True))


@pytest.mark.parametrize("group_type", [-1, None])
def test_one_x_an_expert(group_type: int | None) -> None:
    shapes = [(4, 6), (0, 5), (3, 8)]
    x = [small_integers(*shape, dtype=torch.float32, seed=i) for i, shape in enumerate(shapes)]
    weights = [small_integers(s[1], 10, dtype=torch.float32, seed=9 + i) for i, s in enumerate(shapes)]
    bias = [small_integers(10, dtype=torch.float32, seed=20 + i) for i in range(3)]
    expected = [a @ w + b for a, w, b in zip(x, weights, bias, strict=True)]
    outputs = npu_grouped_matmul(x, weights, bias=bias, group_type=group_type)
    assert all(torch.equal(y, e) for y, e in zip(outputs, expected, strict=True))
    (joined,) = npu_grouped_matmul(x, weights, bias=bias, split_item=2, group_type=0)
    assert torch.equal(joined, torch.cat(expected))
    deep = [small_integers(2, 3, 6, dtype=torch.float32, seed=30), x[1], x[2]]
    assert npu_grouped_matmul(deep, weights, group_type=group_type)[0].shape == (2, 3, 10)


def test_pairs_pick_experts_in_any_order() -> None:
    x = small_integers(6, 8, dtype=torch.float32, seed=10)
    weight = small_integers(5, 8, 4, dtype=torch.float32, seed=11)
    pairs = torch.tensor([[3, 2], [1, 3], [99, 0]])
    (y,) = npu_grouped_matmul([x], [weight], group_list=pairs, group_list_type=2, split_item=3, group_type=0)
    assert torch.equal(y, torch.cat([x[:2] @ weight[3], x[2:5] @ weight[1], torch.zeros(1, 4)]))


@pytest.mark.parametrize(
    "shape", [(0, 16, 8), (1, 1, 1), (3, 5, 7), (5, 1024, 9), (17, 1025, 33), (2, 7168, 3)]
)
def test_int8_sums_are_exact(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a, b = int8s(m, k, seed=1), int8s(k, n, seed=2)
    most_negative = torch.full_like(a, -128), torch.full_like(b, -128)
    large_and_odd = torch.full_like(a, 127), torch.full_like(b, 127)  # what float32 would round
    for x, w in ((a, b), most_negative, large_and_odd, (a, b.t().contiguous().t())):
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
                if bias is whole_bias:
                    total = total + whole_bias[expert]
                value = total.float() * scale[expert]
                if tokens is not None:
                    value = value * tokens[row]
                if bias is float_bias:
                    value = value + float_bias[expert]
                expected[row] = value.to(dtype)
            for output_dtype, scales, biases in (
                (dtype, [scale], None if bias is None else [bias]),
                (number, list(scale), None if bias is None else list(bias)),
            ):
                (y,) = npu_grouped_matmul(
                    [x],
                    [weight],
                    scale=scales,
                    bias=biases,
                    per_token_scale=None if tokens is None else [tokens],
                    group_list=torch.tensor(counts),
                    group_list_type=1,
                    split_item=2,
                    group_type=0,
                    output_dtype=output_dtype,
                )
                assert torch.equal(y, expected)


def test_gradients_are_those_of_a_loop_also_without_rows() -> None:
    counts = [2, 0, 3]
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(7, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 6, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(7, 4, generator=generator, dtype=torch.float64)

    def run(counts: list[int]) -> tuple[torch.Tensor, ...]:
        (y,) = npu_grouped_matmul(
            [x], [weight], group_list=torch.tensor(counts), group_list_type=1, split_item=2, group_type=0
        )
        return torch.autograd.grad(y, (x, weight), gradient)

    owner = torch.tensor([0, 0, 2, 2, 2])
    loop = torch.cat([torch.einsum("rk,rkn->rn", x[:5], weight[owner]), torch.zeros(2, 4)])
    for ours, theirs in zip(run(counts), torch.autograd.grad(loop, (x, weight), gradient), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12)
    assert all(not grad.any() for grad in run([0, 0, 0]))
