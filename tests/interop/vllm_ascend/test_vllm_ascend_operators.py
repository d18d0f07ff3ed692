"""vllm-ascend's operators follow their definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from routed_tokens import codes, randn
from vllm_ascend_calls import BF16, INT32, MX, C, E, F, H, K, X

from ascend_moe import npu
from ascend_moe.errors import ArgumentError


@pytest.mark.parametrize("tokens", [0, 7])
@pytest.mark.parametrize("norm_type", [0, 1])
@pytest.mark.parametrize("renorm", [0, 1])
@pytest.mark.parametrize("groups", [1, 4])
def test_gating(tokens: int, norm_type: int, renorm: int, groups: int) -> None:
    x, bias = randn(tokens, E).to(BF16), randn(E, seed=1)
    kept = 1 if groups == 1 else 2
    weights, ids, _ = C.moe_gating_top_k(
        x, k=K, k_group=kept, group_count=groups, group_select_mode=1, renorm=renorm, norm_type=norm_type,
        out_flag=False, routed_scaling_factor=2.5, eps=1e-20, bias_opt=bias,
    )  # fmt: skip
    assert weights.dtype == BF16 and ids.dtype == INT32 and weights.shape == ids.shape == (tokens, K)
    wanted = npu.npu_moe_gating_top_k(
        x.float(), K, bias=bias, k_group=kept, group_count=groups, group_select_mode=1, renorm=renorm,
        norm_type=norm_type, routed_scaling_factor=2.5,
    )  # fmt: skip
    assert torch.equal(ids, wanted[1]) and torch.equal(weights, wanted[0].to(BF16))


def test_gating_by_hash() -> None:
    x, bias = randn(6, E).to(BF16), randn(E, seed=1)
    table = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(row))[:K] for row in range(10)])
    words = torch.tensor([3, 0, 9, 3, 1, 2])
    weights, ids, _ = C.moe_gating_top_k_hash(
        x=x, k=K, bias=bias, input_ids=words, tid2eid=table.int(), group_select_mode=1, norm_type=2
    )
    scores = torch.nn.functional.softplus(x.float()).sqrt().gather(1, table[words])
    assert torch.equal(ids.long(), table[words])
    torch.testing.assert_close(weights, (scores / scores.sum(-1, keepdim=True)).to(BF16))
    plain = C.moe_gating_top_k_hash(x, K, bias, norm_type=2)
    other = npu.npu_moe_gating_top_k(x.float(), K, bias=bias, norm_type=2)
    assert torch.equal(plain[1], other[1]) and torch.equal(plain[0], other[0].to(BF16))
    with pytest.raises(ArgumentError, match=r"renorm is 1; need 0"):
        C.moe_gating_top_k_hash(x, K, renorm=1)


@pytest.mark.parametrize("limit", [0.0, 0.5])
@pytest.mark.parametrize("mode", [0, 1])
def test_dequant_swiglu_quant(mode: int, limit: float) -> None:
    """vllm-ascend's mode 1 has the gate in the left half, and no limit where that is 0."""
    sums, scale, rows = codes(6, 2 * F).int(), randn(2 * F).abs() / 5, randn(6, 1, seed=2).abs()
    given: dict[str, Any] = {"weight_scale": scale, "activation_scale": rows, "quant_mode": 1, "swiglu_mode": mode}
    for most, alpha, bias in ((limit, 1.0, 0.0), (0.0, 1.7, 1.0))[: 1 + mode]:
        y, scales = C.npu_dequant_swiglu_quant(sums, **given, clamp_limit=most, glu_alpha=alpha, glu_bias=bias)
        gate, up = (sums.float() * scale * rows).chunk(2, -1)
        if most and mode:
            gate, up = gate.clamp(max=most), up.clamp(-most, most)
        expected = gate * torch.sigmoid(alpha * gate) * (up + bias)
        torch.testing.assert_close(scales, expected.abs().amax(-1) / 127)
        torch.testing.assert_close(y.float() * scales[:, None], expected, atol=float(scales.max()), rtol=0)
    with pytest.raises(ArgumentError, match=r"swiglu_mode is 2; it must be 0 or 1"):
        C.npu_dequant_swiglu_quant(sums, weight_scale=scale, swiglu_mode=2)


@pytest.mark.parametrize("limit", [0.0, 0.25, 1e6])
def test_grouped_matmul_swiglu_quant(limit: float) -> None:
    """All forms give the same bits; rows behind the last group do not count."""
    rows, weight = codes(9, H), codes(3, H, 2 * F, seed=1)
    scale, x_scale = randn(3, 2 * F).abs() / 500, randn(9).abs() / 20
    counts = torch.tensor([4, 0, 3])
    call = {"x_scale": x_scale, "group_list": counts.cumsum(0), "swiglu_limit": limit}
    y, scales, _ = C.grouped_matmul_swiglu_quant(rows, weight, scale, **call)
    for expert, start, stop in ((0, 0, 4), (2, 4, 7)):
        sums = (rows[start:stop].int() @ weight[expert].int()).float()
        gate, up = (sums * scale[expert] * x_scale[start:stop, None]).chunk(2, -1)
        if limit:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        expected = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(scales[start:stop], expected.abs().amax(-1) / 127)
        back = y[start:stop].float() * scales[start:stop, None]
        torch.testing.assert_close(back, expected, atol=float(scales.max()), rtol=0)
    forms = (
        C.grouped_matmul_swiglu_quant_weight_nz(x=rows, weight=weight, weight_scale=scale, **call),
        C.grouped_matmul_swiglu_quant_weight_nz_tensor_list(rows, list(weight), list(scale), **call),
        C.grouped_matmul_swiglu_quant_v2(
            rows, [weight.transpose(1, 2)], [scale], x_scale, counts, group_list_type=1, transpose_weight=True,
            swiglu_limit=limit,
        ),
    )  # fmt: skip
    assert all(torch.equal(form[0], y) and torch.equal(form[1], scales) for form in forms)
    if limit != 0.25:
        plain = npu.npu_grouped_matmul_swiglu_quant(rows, weight, counts.cumsum(0), scale, x_scale)
        assert torch.equal(plain[0], y) and torch.equal(plain[1], scales)


def test_int4_as_vllm_ascend_passes_it_gives_the_same_from_every_form() -> None:
    """Its w4a8.py: bytes of two int4 viewed as int32, scales as int64 of fp32 bits, bias 8 * sum(weight * scale)."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randint(-8, 8, (2, H, 2 * F), dtype=torch.int8, generator=generator)
    scale = torch.rand(2, 2 * F, generator=generator) / 10
    pairs = (weight[..., 1::2] << 4) | (weight[..., ::2] & 15)
    packed, bits = pairs.view(INT32), torch.from_numpy(scale.numpy().view("uint32").astype("int64"))
    bias = 8 * (weight.float() * scale[:, None]).sum(1)
    rows, x_scale, counts = codes(5, H), torch.rand(5, generator=generator), torch.tensor([2, 3])
    call = {"x_scale": x_scale, "group_list": counts.cumsum(0), "swiglu_limit": 0.5}
    y, scales = C.grouped_matmul_swiglu_quant_v2(
        rows, [packed], [bits], x_scale, counts, weight_assist_matrix=[bias], group_list_type=1, swiglu_limit=0.5
    )
    forms = (
        C.grouped_matmul_swiglu_quant_weight_nz(x=rows, weight=packed, weight_scale=bits, bias=bias, **call),
        C.grouped_matmul_swiglu_quant_v2(
            rows, list(packed), list(bits), x_scale, counts, weight_assist_matrix=list(bias), group_list_type=1,
            swiglu_limit=0.5,
        ),
    )  # fmt: skip
    assert all(torch.equal(form[0], y) and torch.equal(form[1], scales) for form in forms)
    for call in (
        lambda: C.grouped_matmul_swiglu_quant(rows, packed, bits, x_scale, counts.cumsum(0)),
        lambda: C.grouped_matmul_swiglu_quant_v2(rows, [packed], [bits], x_scale, counts, group_list_type=1),
    ):
        with pytest.raises(ArgumentError, match=r"(bias|weight_assist_matrix) is missing; int4 weights need"):
            call()
    with pytest.raises(ArgumentError, match=r"belongs to int4 weights"):
        C.grouped_matmul_swiglu_quant(rows, codes(2, H, 2 * F), scale, x_scale, counts.cumsum(0), bias=bias)


@pytest.mark.parametrize("quant_mode", [-1, 1, None])
def test_init_routing_custom_is_v2(quant_mode: int | None) -> None:
    """Its quant_mode is by default 0, static, where torch_npu's is -1."""
    x, ids = randn(5, H).to(BF16), torch.stack([torch.randperm(E)[:K] for _ in range(5)]).int()
    call: dict[str, Any] = {"active_num": 5 * K, "expert_num": E, "expert_tokens_num_type": 1,
                            "expert_tokens_num_flag": True, "active_expert_range": [2, 6]}  # fmt: skip
    static = {"scale": torch.ones(1)} if quant_mode is None else {"quant_mode": quant_mode}
    made = C.npu_moe_init_routing_custom(x, ids, **call, **static)
    expected = npu.npu_moe_init_routing_v2(x, ids, **call, **{"quant_mode": 0} | static)
    assert all(torch.equal(*pair) for pair in zip(made, expected, strict=True))


def test_moe_grouped_matmul() -> None:
    x, weight, pairs = randn(9, H).to(BF16), randn(4, H, F, seed=1).to(BF16), torch.tensor([[0, 4], [3, 5]])
    (y,) = C.moe_grouped_matmul(x, weight, pairs, 2, 0, 2)
    expected = torch.cat([x[:4].double() @ weight[0].double(), x[4:].double() @ weight[3].double()])
    torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=1e-3)
    for wrong, name in (((0, 0, 2), "split_item"), ((2, 2, 2), "group_type"), ((2, 0, 1), "group_list_type")):
        with pytest.raises(ArgumentError, match=rf"^{name} is \d; it must be"):
            C.moe_grouped_matmul(x, weight, pairs, *wrong)


def decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The float64 values of MX codes; every block uses the largest exponent that keeps its codes within 512."""
    exponents = scales.view(torch.uint8).flatten(-2).double() - 127
    return codes.double() * exponents.exp2().repeat_interleave(32, -1)[..., : codes.shape[-1]]


@pytest.mark.parametrize("width", [32, 320, 1000])
@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_swiglu_group_quant(width: int, limit: float) -> None:
    x = (randn(2, 3, 2 * width) * 5).to(BF16)
    x[0, 0] = 0
    y, scales, _ = C.npu_swiglu_group_quant(
        x, topk_weight=None, group_index=None, dst_type=torch.float8_e4m3fn, quant_mode=2, clamp_value=limit
    )
    gate, up = x.double().chunk(2, -1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    check_mx(y, scales, gate / (1 + (-gate).exp()) * up)


def check_mx(codes: torch.Tensor, scales: torch.Tensor, expected: torch.Tensor) -> None:
    width = expected.shape[-1]
    assert codes.dtype == torch.float8_e4m3fn and scales.dtype == torch.float8_e8m0fnu
    assert codes.shape == expected.shape and scales.shape == (*expected.shape[:-1], -(-width // 64), 2)
    largest = torch.nn.functional.pad(expected, (0, -width % 64)).reshape(*expected.shape[:-1], -1, 32).abs().amax(-1)
    exponents = scales.view(torch.uint8).flatten(-2).double() - 127
    full = largest > 0
    assert ((largest / exponents.exp2() >= 255.9) & (largest / exponents.exp2() <= 512.1))[full].all()
    assert (exponents[~full] == -127).all()
    # Half a step of 3 bits, the smallest step of e4m3, or, past 448, what is cut off.
    room = exponents.exp2().repeat_interleave(32, -1)[..., :width]
    error = (decoded(codes, scales) - expected).abs()
    assert (error <= expected.abs() / 16 * 1.001 + room * 2**-10 + (expected.abs() - 448 * room).clamp(min=0)).all()


@pytest.mark.parametrize("linear", [0.0, 25.0])
def test_situ(linear: float) -> None:
    """Kimi's SiTU; as vllm-ascend calls it with experts (bf16) and with a shared expert (int32)."""

    def situ(values: torch.Tensor) -> torch.Tensor:
        gate, up = values.double().chunk(2, -1)
        up = linear * (up / linear).tanh() if linear else up
        return 4.0 * (gate / 4.0).tanh() / (1 + (-gate).exp()) * up

    x = (randn(5, 2 * F) * 8).to(BF16)
    check_mx(*C.situ_mx_quant(x=x, beta=4.0, linear_beta=linear, activate_left=True, dst_type=36), situ(x))
    scale, rows, sums = randn(2 * F).abs() / 20, randn(5, seed=2).abs(), codes(5, 2 * F).int()
    absent: dict[str, Any] = dict.fromkeys(("bias", "quant_scale", "quant_offset", "group_index"))
    absent |= {"beta": 4.0, "linear_beta": linear, "activate_left": True, "quant_mode": "dynamic"}
    for given, expected in (
        ({"x": x, "weight_scale": None, "activation_scale": None}, situ(x)),
        ({"x": sums, "weight_scale": scale, "activation_scale": rows}, situ(sums.double() * scale * rows[:, None])),
    ):
        y, scales = C.dequant_situ_quant(**given, **absent)
        torch.testing.assert_close(scales.double(), expected.abs().amax(-1) / 127, rtol=1e-5, atol=0)
        assert ((y.double() * scales[:, None] - expected).abs() <= scales[:, None] * 0.501).all()


@pytest.mark.parametrize(
    ("name", "call", "wrong"),
    [
        *(
            ("npu_swiglu_group_quant", MX, wrong)
            for wrong in (
                {"topk_weight": torch.ones(2)}, {"group_index": torch.tensor([2])}, {"dst_type": torch.float8_e5m2},
                {"quant_mode": 1}, {"group_size": 32}, {"round_scale": True}, {"ue8m0_scale": True},
                {"output_origin": True}, {"group_list_type": 1}, {"clamp_value": -1.0}, {"x": X.float()},
            )
        ),
        *(
            ("situ_mx_quant", {"activate_left": True}, wrong)
            for wrong in ({"activate_left": False}, {"dst_type": 35}, {"beta": 0.0}, {"linear_beta": -1.0})
        ),
        *(
            ("dequant_situ_quant", {}, wrong)
            for wrong in (
                {"bias": X}, {"weight_scale": X}, {"group_index": torch.tensor([2])}, {"quant_mode": "static"},
                {"activate_left": False},
            )
        ),
    ],
)  # fmt: skip
def test_unknown_modes_are_refused_by_name(name: str, call: dict[str, Any], wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"^{next(iter(wrong))} is "):
        getattr(C, name)(**{"x": X, **call, **wrong})
