"""Grouped matmuls with int4 weights: worked numbers, and the formulas in float64."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from bad_arguments import refused
from expert_values import EACH_FLOAT, int8s
from torch import Tensor

from ascend_moe import MoEConfig, MoELayer
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.errors import ArgumentError
from ascend_moe.experts import grouped_mlp, npu_grouped_matmul
from ascend_moe.experts.int4 import correction_of, pack_int4, quantize_weight_int4, unpack_int4
from ascend_moe.npu import npu_grouped_matmul_swiglu_quant, npu_grouped_matmul_swiglu_quant_v2

EXPERTS, ROWS, INNER, WIDTH = 3, 7, 16, 24
COUNTS = torch.tensor([3, 0, 2])  # two rows belong to nobody
FORM: dict[str, Any] = {"group_list": COUNTS, "group_list_type": 1, "group_type": 0, "split_item": 2}


def int4s(*shape: int, seed: int) -> Tensor:
    return torch.randint(-8, 8, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def powers(*shape: int, seed: int) -> Tensor:
    """Powers of two from 1/16 to 1: products and sums with small integers are exact in float32."""
    return 0.5 ** torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(seed))


def bits_of(scale: Tensor) -> Tensor:
    """As vllm-ascend has them: int64 whose low half is the fp32."""
    return scale.contiguous().view(torch.int32).long() & 0xFFFFFFFF


def by_row(x: Tensor, weight: Tensor) -> Tensor:
    """Each row times its expert's weight, in float64; zeros behind the last group."""
    owner = torch.arange(EXPERTS).repeat_interleave(COUNTS)
    y = torch.zeros(ROWS, weight.shape[2], dtype=torch.float64)
    for row, expert in enumerate(owner):
        y[row] = x[row].double() @ weight[expert].double()
    return y


def spread(scale: Tensor) -> Tensor:
    """(E, G, N) for every row of K."""
    return scale.repeat_interleave(INNER // scale.shape[1], 1)


def test_worked_numbers_of_the_layout() -> None:
    """-8, -7, 0, 1, 2, 3, 6, 7: the word is 0x76321098, its bytes 98 10 32 76."""
    codes = torch.tensor([[-8, -7, 0, 1, 2, 3, 6, 7]], dtype=torch.int8)
    word = pack_int4(codes)
    assert word.tolist() == [[0x76321098]] and word.view(torch.uint8).tolist() == [[0x98, 0x10, 0x32, 0x76]]
    every = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 1)
    for dtype in (torch.int32, torch.int8, torch.uint8):
        assert torch.equal(unpack_int4(pack_int4(every).view(dtype)), every)
    refused("codes", pack_int4, codes[:, 1:], says=r"codes is \(1, 7\); its last dimension must be a multiple of 8")
    refused("codes", pack_int4, codes + 1, says=r"codes must be -8\.\.7")


def test_worked_numbers_of_w4a8() -> None:
    """x = (1, -2, 3, 4), column (7, -8, 1, 2), two groups of scales 0.5 and 0.25, row scale 2.

    x @ w by groups: 7 + 16 = 23 and 3 + 8 = 11. bias = 8 * ((7 - 8) * 0.5 + (1 + 2) * 0.25) = 2. With x - 8:
    23 - 8 * -1 = 31 and 11 - 8 * 3 = -13, so (31 * 0.5 - 13 * 0.25 + 2) * 2 = 28.5 = (23 * 0.5 + 11 * 0.25) * 2.
    """
    x = torch.tensor([[1, -2, 3, 4]], dtype=torch.int8)
    weight = torch.tensor([[7], [-8], [1], [2]], dtype=torch.int8).repeat(1, 8)
    scale, bias = torch.tensor([[0.5], [0.25]]).repeat(1, 8), torch.full((1, 8), 2.0)
    call = FORM | {"group_list": torch.tensor([1]), "per_token_scale": [torch.tensor([2.0])], "bias": [bias]}
    for given in (scale[None], bits_of(scale[None])):
        made = npu_grouped_matmul([x], [pack_int4(weight)[None]], scale=[given], output_dtype=torch.float32, **call)
        assert made[0].tolist() == [[28.5] * 8]
    # One group of scale 0.5, an offset of -1 before it: (23 + 11 - 6) * 0.5 * 2 = 28, bias 8 * (7 - 8 + 1 + 2) * 0.5.
    call |= {"bias": [torch.full((1, 8), 8.0)], "offset": [torch.full((1, 1, 8), -0.5)]}
    (y,) = npu_grouped_matmul(
        [x], [pack_int4(weight)[None]], scale=[scale[:1, None]], output_dtype=torch.float32, **call
    )
    assert y.tolist() == [[28.0] * 8]


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_w4a8_is_the_formula_in_float64(dtype: torch.dtype, groups: int) -> None:
    x, weight, scale = (
        int8s(ROWS, INNER, seed=1),
        int4s(EXPERTS, INNER, WIDTH, seed=2),
        powers(EXPERTS, groups, WIDTH, seed=3),
    )
    row_scale, dense = powers(ROWS, seed=4), weight.double() * spread(scale).double()
    bias = (8 * dense.sum(1)).float()
    expected = (by_row(x, dense) * row_scale.double()[:, None]).to(torch.float32).to(dtype)
    call = FORM | {"per_token_scale": [row_scale], "output_dtype": dtype}
    packed = pack_int4(weight)
    scales = [[scale], [bits_of(scale)], list(scale)] + ([[scale[:, 0]], list(scale[:, 0])] if groups == 1 else [])
    for given in scales:
        one = len(given) == 1
        (y,) = npu_grouped_matmul(
            [x], [packed] if one else list(packed), scale=given, bias=[bias] if one else list(bias), **call
        )
        assert y.dtype == dtype and torch.equal(y, expected)
    sums = npu_grouped_matmul(
        [x], [packed], scale=[scale], bias=[bias], **call | {"group_list": COUNTS.cumsum(0), "group_list_type": 0}
    )
    assert torch.equal(sums[0], expected)


@pytest.mark.parametrize("groups", [1, 2, 4, 16])
def test_the_correction_is_eight_times_each_groups_sum_by_its_own_scale(groups: int) -> None:
    """Of each column in float64; of one expert and of all; so the product with it is exact."""
    codes, scale = int4s(EXPERTS, INNER, WIDTH, seed=2), powers(EXPERTS, groups, WIDTH, seed=3)
    expected = torch.zeros(EXPERTS, WIDTH, dtype=torch.float64)
    for row in range(INNER):
        expected += 8 * codes[:, row].double() * scale[:, row // (INNER // groups)].double()
    assert torch.equal(correction_of(codes, scale), expected.float())
    assert all(
        torch.equal(correction_of(*one), wanted.float()) for *one, wanted in zip(codes, scale, expected, strict=True)
    )
    weight = 7 * codes.sign() * spread(scale)  # its scales are these powers, its codes -7, 0 and 7
    weight[:, :: INNER // groups] = 7 * scale
    packed, made, correction = quantize_weight_int4(weight, INNER // groups)
    assert torch.equal(made, scale) and torch.equal(unpack_int4(packed) * spread(scale), weight)
    assert torch.equal(correction, (8 * weight.double().sum(1)).float())
    x = int8s(ROWS, INNER, seed=1)
    call = FORM | {"per_token_scale": [torch.ones(ROWS)], "output_dtype": torch.float32}
    (y,) = npu_grouped_matmul([x], [packed], scale=[made], bias=[correction], **call)
    assert torch.equal(y.double(), by_row(x, weight))


@pytest.mark.parametrize("groups", [1, 2, 16])
def test_w4a8_of_any_scales_is_near_float64(groups: int) -> None:
    """Within the bound of the operator's docstring."""
    x, weight = int8s(ROWS, INNER, seed=1), int4s(EXPERTS, INNER, WIDTH, seed=2)
    generator = torch.Generator().manual_seed(5)
    scale, row_scale = torch.rand(EXPERTS, groups, WIDTH, generator=generator) + 0.1, torch.rand(ROWS)
    dense = weight.double() * spread(scale).double()
    y = npu_grouped_matmul(
        [x], [pack_int4(weight)], scale=[scale], bias=[(8 * dense.sum(1)).float()], output_dtype=torch.float32,
        per_token_scale=[row_scale], **FORM,
    )[0]  # fmt: skip
    by_token = row_scale.double()[:, None]
    bound = (groups + 5) * 2.0**-24 * by_row(x.double().abs() + 8, dense.abs()) * by_token
    gap = (y.double() - by_row(x, dense) * by_token).abs()
    assert bool((gap <= bound).all()) and bool(gap.any())


@pytest.mark.parametrize("form", ["int4", "int4 turned", "int8"])
@pytest.mark.parametrize("groups", [1, 4])
@EACH_FLOAT
def test_float_rows_meet_codes_that_become_floats(dtype: torch.dtype, groups: int, form: str) -> None:
    """x @ ((weight + offset) * scale) + bias; small powers of two, so that float32 sums are exact."""
    x = torch.randint(-4, 5, (ROWS, INNER), generator=torch.Generator().manual_seed(6)).to(dtype)
    weight, scale = int4s(EXPERTS, INNER, WIDTH, seed=7), powers(EXPERTS, groups, WIDTH, seed=8).to(dtype)
    offset, bias = int4s(EXPERTS, groups, WIDTH, seed=9).to(dtype), powers(EXPERTS, WIDTH, seed=10)
    passed = {
        "int4": pack_int4(weight),
        "int4 turned": pack_int4(weight.transpose(1, 2)).transpose(1, 2),  # packed along K
        "int8": weight,
    }[form]
    dense = (weight.double() + spread(offset).double()) * spread(scale).double()
    owner = torch.arange(EXPERTS).repeat_interleave(COUNTS)
    expected = by_row(x, dense)
    expected[: len(owner)] += bias[owner].double()
    given = {"antiquant_scale": [scale], "antiquant_offset": [offset], "bias": [bias]}
    if groups == 1:
        given |= {"antiquant_scale": [scale[:, 0]], "antiquant_offset": [offset[:, 0]]}
    rows = x.clone().requires_grad_()
    (y,) = npu_grouped_matmul([rows], [passed], **given, **FORM)
    assert y.dtype == dtype and torch.equal(y, expected.to(dtype))
    listed = {"antiquant_scale": list(scale), "antiquant_offset": list(offset), "bias": list(bias)}
    assert torch.equal(npu_grouped_matmul([x], list(passed), **listed, **FORM)[0], y)
    alone = {name: each[:1] for name, each in listed.items()} | FORM | {"group_list": COUNTS[:1]}
    assert torch.equal(npu_grouped_matmul([x], [passed[0]], **alone)[0][: COUNTS[0]], y[: COUNTS[0]])
    y.float().sum().backward()
    wanted = by_row(torch.ones(ROWS, WIDTH), dense.transpose(1, 2))
    assert rows.grad is not None and torch.equal(rows.grad, wanted.to(dtype))


@pytest.mark.parametrize("groups", [1, 2])
def test_swiglu_quant_is_the_product_and_the_activation(groups: int) -> None:
    x, weight, scale = (
        int8s(ROWS, INNER, seed=1),
        int4s(EXPERTS, INNER, WIDTH, seed=2),
        powers(EXPERTS, groups, WIDTH, seed=3) / 64,
    )
    x_scale, bias = powers(ROWS, seed=4), 8 * (weight.float() * spread(scale)).sum(1)
    packed = pack_int4(weight)
    gate, up = (by_row(x, weight.double() * spread(scale)) * x_scale[:, None].double()).float().chunk(2, 1)
    hidden = torch.nn.functional.silu(gate) * up
    expected = hidden.abs().amax(1) / 127
    codes = torch.nan_to_num(hidden / expected[:, None]).round().to(torch.int8)
    v2 = npu_grouped_matmul_swiglu_quant_v2(
        x, [packed], [bits_of(scale)], x_scale, COUNTS, weight_assist_matrix=[bias], group_list_type=1
    )
    assert torch.equal(v2[0], codes) and torch.equal(v2[1], expected)
    v1 = npu_grouped_matmul_swiglu_quant(x, packed, COUNTS.cumsum(0), scale, x_scale, bias=bias)
    assert torch.equal(v1[0], codes) and torch.equal(v1[1], expected)
    overloads = torch.ops.ascend_moe
    again = overloads.npu_grouped_matmul_swiglu_quant_v2(
        x, [packed], [scale], x_scale, COUNTS, weight_assist_matrix=[bias], group_list_type=1
    )
    assert torch.equal(again[0], codes)
    assert overloads.npu_grouped_matmul([x], [packed], scale=[scale], bias=[bias], per_token_scale=[x_scale],
                                        output_dtype=torch.bfloat16, **FORM)[0].shape == (ROWS, WIDTH)  # fmt: skip


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"scale": None}, "scale is missing; torch.int32 weights with x of torch.int8 need it"),
    ({"bias": None}, "bias is missing; int4 weights take 8 * the sum"),
    ({"bias": [torch.zeros(EXPERTS, WIDTH, dtype=torch.int32)]}, "bias is torch.int32; it must be fp32"),
    ({"per_token_scale": None}, "per_token_scale is missing; int8 rows and int4 weights"),
    ({"scale": [torch.ones(EXPERTS, 3, WIDTH)]}, "scale has shapes [(3, 3, 24)]; 3 experts with K=16, N=24 need"),
    ({"scale": [torch.ones(EXPERTS, WIDTH - 8)]}, "scale has shapes [(3, 16)]"),
    ({"scale": [torch.ones(EXPERTS, WIDTH, dtype=torch.int32)]}, "scale is torch.int32; it must be float, or int64"),
    ({"offset": [torch.ones(EXPERTS, 2, WIDTH)], "scale": [torch.ones(EXPERTS, 2, WIDTH)]}, "offset has groups of K"),
    ({"antiquant_scale": [torch.ones(EXPERTS, WIDTH)]}, "antiquant_scale does not go with torch.int8 x; use scale"),
    ({"output_dtype": torch.int32}, "output_dtype is torch.int32; torch.int8 rows with these weights support"),
    ({"weight": [torch.zeros(EXPERTS, INNER - 8, 3, dtype=torch.int32)], "scale": [torch.ones(EXPERTS, WIDTH)]},
     "x of (3, 16) does not fit weight of (8, 24)"),
    ({"x": [torch.ones(ROWS, INNER)], "per_token_scale": None}, "scale does not go with torch.float32 x"),
    ({"x": [torch.ones(ROWS, INNER)], "scale": None, "per_token_scale": None}, "antiquant_scale is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "text"), WRONG, ids=[text[:40] for _, text in WRONG])
def test_wrong_int4_calls_are_named_in_one_line(change: dict[str, Any], text: str) -> None:
    call = FORM | {
        "x": [int8s(ROWS, INNER, seed=1)], "weight": [pack_int4(int4s(EXPERTS, INNER, WIDTH, seed=2))],
        "scale": [torch.ones(EXPERTS, WIDTH)], "bias": [torch.zeros(EXPERTS, WIDTH)],
        "per_token_scale": [torch.ones(ROWS)], "output_dtype": torch.bfloat16,
    }  # fmt: skip
    refused(text.split()[0], npu_grouped_matmul, **call | change, says=re.escape(text))


def test_weights_of_int4_rows_multiply_their_results() -> None:
    torch.manual_seed(5)
    made = [quantize_weight_int4(torch.randn(EXPERTS, *shape)) for shape in ((INNER, 16), (8, INNER))]
    (gate_up, gate_up_scale, gate_up_bias), (down, down_scale, down_bias) = made
    call = {"w_gate_up_scale": gate_up_scale, "w_down_scale": down_scale, "output_dtype": torch.float32}
    call |= {"gate_up_bias": gate_up_bias, "down_bias": down_bias, "dynamic_scales": torch.rand(ROWS)}
    rows, weights = (int8s(ROWS, INNER, seed=1), gate_up, down, COUNTS), torch.linspace(0.1, 2, ROWS)
    wanted = grouped_mlp(*rows, **call) * weights[:, None]
    assert bool(wanted.any())
    torch.testing.assert_close(grouped_mlp(*rows, **call, topk_scales=weights), wanted)


def test_a_layer_of_int4_weights_keeps_its_codes_in_a_cast_and_calls_lists_alike(group_ep: str) -> None:
    config = MoEConfig(hidden_size=32, moe_intermediate_size=16, num_experts=4, top_k=2)
    made = [MC2Dispatcher(group_ep, 1, 0, 4) for _ in range(2)]
    layer = MoELayer(config, made[0], dtype=torch.float32).init_weights()
    for bits, groups, text in (
        (4, (3, 1), "groups is 3; it must divide 32 rows of w_gate_up"),
        (4, (1, 0), "divide 16 rows"),
        (8, (2, 1), "int8 weights have one scale per channel"),
        (2, (1, 1), "bits is 2; it must be 8 or 4"),
        (4, 2, "quantize_ cannot work with these arguments: 'int' object is not iterable"),
    ):
        with pytest.raises(ArgumentError, match=text):
            MoELayer(config, made[1], dtype=torch.float32).init_weights().quantize_(bits, groups)
    state = layer.quantize_(4, (4, 2)).state_dict()
    assert state["w_gate_up"].dtype == torch.int32 and state["w_gate_up_scale"].shape == (4, 4, 32)
    with pytest.raises(ArgumentError, match=r"w_down is int32 without w_down_correction"):
        layer.load_state_dict({name: value for name, value in state.items() if name != "w_down_correction"})
    with pytest.raises(ArgumentError, match=r"w_gate_up is int32, the layer's weights are torch.float32"):
        MoELayer(config, made[1], dtype=torch.float32).load_state_dict(state)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(2))
    y = layer(x)
    half = copy.deepcopy(layer).bfloat16()
    assert half.w_down.dtype == torch.int32 and half.w_down_correction is not None
    torch.testing.assert_close(half(x.bfloat16()).float(), y, rtol=0.1, atol=0.1)
    sent = layer.dispatcher.dispatch(x, layer.route(x)[1], quant_mode=2)
    call = {
        "w_gate_up_scale": layer.w_gate_up_scale,
        "w_down_scale": layer.w_down_scale,
        "dynamic_scales": sent.dynamic_scales,
    }
    call |= {"gate_up_bias": layer.w_gate_up_correction, "down_bias": layer.w_down_correction}
    weights = (layer.w_gate_up.detach(), layer.w_down.detach())
    one = grouped_mlp(sent.expand_x, *weights, sent.expert_token_nums, **call)
    sums = sent.expert_token_nums.cumsum(0)
    each = grouped_mlp(sent.expand_x, *(list(w) for w in weights), sums, group_list_type=0, **call)
    compiled = torch.compile(grouped_mlp, backend="aot_eager")(sent.expand_x, *weights, sent.expert_token_nums, **call)
    used = int(sums[-1])
    assert torch.equal(one, each) and torch.equal(one[:used], compiled[:used])
    with pytest.raises(ArgumentError, match=r"gate_up_bias is missing; int4 weights need it"):
        grouped_mlp(sent.expand_x, *weights, sent.expert_token_nums, **call | {"gate_up_bias": None})
