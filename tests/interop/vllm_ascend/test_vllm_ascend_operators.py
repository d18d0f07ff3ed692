"""vllm-ascend's operators follow their definitions and the schemas of its releases; one call runs a layer."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from routed_tokens import codes, randn
from vllm_ascend_calls import BF16, INT8, INT32, MX, C, E, F, H, K, X

from ascend_moe import LocalCluster, layer_ops, npu
from ascend_moe.errors import ArgumentError
from ascend_moe.experts import quantize_weight
from ascend_moe.interop import vllm_ascend
from ascend_moe.interop.vllm_ascend import schemas


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


def test_dispatch_gmm_combine_decode() -> None:
    """As the releases 0.18 and 0.23 call it, with lists (dynamic EPLB) and tensors of all experts, in W8A8."""
    w1, w2 = randn(E, H, 2 * F).to(BF16) / 6, randn(E, F, H, seed=1).to(BF16) / 4
    (c1, s1), (c2, s2) = quantize_weight(w1), quantize_weight(w2)

    def rank(rank: int, group: str) -> None:
        mine = slice(rank * E // 2, (rank + 1) * E // 2)
        ids = (torch.arange(5 * K).view(5, K) + rank).int() % E
        x, probs = randn(5, H, seed=rank).to(BF16), randn(5, K, seed=9).abs()
        lists = {
            "gmm1_permuted_weight": list(c1[mine]), "gmm1_permuted_weight_scale": list(s1[mine]),
            "gmm2_weight": list(c2[mine]), "gmm2_weight_scale": list(s2[mine].to(BF16)),
        }  # fmt: skip
        call: dict[str, Any] = {
            "expert_smooth_scales": None, "expert_scales": probs, "group_ep": group, "ep_rank_size": 2,
            "ep_rank_id": rank, "moe_expert_num": E, "global_bs": 0, "x": x, "expert_ids": ids,
        }  # fmt: skip
        y, counts = C.dispatch_gmm_combine_decode(**call, **lists)
        stacked = {name: [torch.stack(tensors)] for name, tensors in lists.items()}
        again = C.dispatch_gmm_combine_decode(**call | {"global_bs": 10}, **stacked)
        assert torch.equal(again[0], y) and torch.equal(again[1], counts) and counts.dtype == torch.int64
        every = [(torch.arange(5 * K) + other) % E for other in range(2)]
        assert torch.equal(counts, torch.bincount(torch.cat(every), minlength=E)[mine])
        expected = torch.zeros(5, H, dtype=torch.float64)
        for token, slot in torch.cartesian_prod(torch.arange(5), torch.arange(K)).tolist():
            gate, up = (x[token].double() @ (c1[ids[token, slot]].double() * s1[ids[token, slot]])).chunk(2)
            down = c2[ids[token, slot]].double() * s2[ids[token, slot]].to(BF16)
            expected[token] += probs[token, slot] * ((gate / (1 + (-gate).exp()) * up) @ down)
        assert (y.double() - expected).norm() < 0.02 * expected.norm()
        few = x[: 5 - 2 * rank], ids[: 5 - 2 * rank], probs[: 5 - 2 * rank]
        fewer = dict(zip(("x", "expert_ids", "expert_scales"), few, strict=True))
        mask = torch.arange(len(few[0])) < 2
        made, _ = C.dispatch_gmm_combine_decode(**call | fewer | {"global_bs": 10, "x_active_mask": mask}, **lists)
        assert torch.equal(made[:2], y[:2]) and not made[2:].any()
        for wrong in (
            {"expert_smooth_scales": x}, {"shared_expert_num": 2}, {"shared_expert_rank_num": 1}, {"quant_mode": 2},
            {"ep_rank_size": 1}, {"ep_rank_id": 1 - rank}, {"moe_expert_num": 4},
        ):  # fmt: skip
            with pytest.raises(ArgumentError, match=f"^{next(iter(wrong))} is "):
                C.dispatch_gmm_combine_decode(**call | wrong, **lists)
        with pytest.raises(
            ArgumentError, match=r"gmm1_permuted_weight is torch.int32, which carries int4, and this call"
        ):
            C.dispatch_gmm_combine_decode(**call, **lists | {"gmm1_permuted_weight": list(c1[mine].view(INT32))})

    with LocalCluster(2) as cluster:
        cluster.run(rank)


@pytest.mark.parametrize("int8", [False, True])
def test_dispatch_ffn_combine_of_all_releases(int8: bool) -> None:
    w1, w2 = randn(E, H, 2 * F).to(BF16) / 6, randn(E, F, H, seed=1).to(BF16) / 4
    (c1, s1), (c2, s2) = quantize_weight(w1), quantize_weight(w2)

    def rank(rank: int, group: str) -> bool:
        mine = slice(rank * E // 2, (rank + 1) * E // 2)
        tokens = 5 - 5 * rank  # rank 1 has none
        x, probs = randn(tokens, H, seed=rank).to(BF16), randn(tokens, K, seed=9).abs()
        ids = torch.arange(tokens * K).view(tokens, K).int() % E
        given: dict[str, Any] = {"x": x, "expert_idx": ids, "probs": probs, "group": group, "max_output_size": 64}
        if int8:
            given |= {"weight1": list(c1[mine]), "weight2": list(c2[mine])}
            given |= {"scale1": list(s1[mine]), "scale2": list(s2[mine])}
        else:
            given |= {"weight1": [w1[mine]], "weight2": [w2[mine]], "scale1": [], "scale2": []}
        results = []
        for release in ("main", "main's tests", "0.18", "0.13"):
            out, counts = torch.full_like(x, torch.nan), torch.full((E // 2,), -1, dtype=INT32)
            extra: dict[str, Any] = {} if release == "0.13" else {"expert_token_nums": counts}
            if release.startswith("main"):
                bias = [] if release == "main" else torch.tensor([])
                extra |= {"bias1": bias, "bias2": bias, "swiglu_limit": 0.0}
            C.dispatch_ffn_combine(**given, out=out, **extra)
            results.append((out, counts))
        out, counts = torch.empty_like(x), torch.empty(E // 2, dtype=INT32)
        layer_ops.dispatch_ffn_combine(**given, bias1=None, bias2=None, out=out, expert_token_nums=counts)
        same = all(torch.equal(found, out) for found, _ in results)
        return same and all(torch.equal(found, counts) for _, found in results[:3])

    with LocalCluster(2) as cluster:
        assert cluster.run(rank) == [True, True]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_dispatch_ffn_combine_is_compiled(backend: str) -> None:
    """Into one graph, by backends that rewrite writes in place too."""
    w1, w2 = randn(E, H, 2 * F).to(BF16) / 6, randn(E, F, H, seed=1).to(BF16) / 4
    x, probs, ids = randn(5, H).to(BF16), randn(5, K, seed=9).abs(), torch.arange(5 * K).view(5, K).int() % E

    def rank(rank: int, group: str) -> bool:
        def layer(x: torch.Tensor) -> torch.Tensor:
            out, counts = torch.empty_like(x), torch.empty(E, dtype=INT32)
            C.dispatch_ffn_combine(x, [w1], [w2], ids, [], [], [], [], probs, group, 64, out, counts)
            return out + counts.sum()

        return torch.equal(torch.compile(layer, backend=backend, fullgraph=True)(x), layer(x))

    with LocalCluster(1) as cluster:
        assert cluster.run(rank) == [True]


def test_shapes_on_meta() -> None:
    x, ids = randn(6, E).to(BF16), torch.zeros(6, K, dtype=INT32)
    rows, weight, scale, row_scale = codes(9, H), codes(3, H, 2 * F), randn(3, 2 * F).abs(), randn(9).abs()
    sums = torch.tensor([4, 4, 7])
    routed = {"expert_num": E, "active_num": 6 * K, "quant_mode": 1, "active_expert_range": [2, 6]}
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("moe_gating_top_k", (x, K, 1, 1, 1, 1, 0, True, 1.0, 1e-20), {}),
        ("moe_gating_top_k_hash", (x, K), {"norm_type": 2}),
        ("npu_dequant_swiglu_quant", (rows.float(),), {"quant_mode": 1}),
        ("grouped_matmul_swiglu_quant", (rows, weight, scale, row_scale, sums), {}),
        ("grouped_matmul_swiglu_quant_weight_nz", (rows, weight, scale, row_scale, sums), {}),
        ("grouped_matmul_swiglu_quant_weight_nz_tensor_list", (rows, [*weight], [*scale], row_scale, sums), {}),
        ("grouped_matmul_swiglu_quant_v2", (rows, [weight], [scale], row_scale, sums), {}),
        ("npu_moe_init_routing_custom", (randn(6, H), ids), routed),
        ("moe_grouped_matmul", (x, randn(2, E, F).to(BF16), torch.tensor([[0, 2], [1, 4]]), 2, 0, 2), {}),
        ("npu_swiglu_group_quant", (X,), MX),
        ("situ_mx_quant", (X,), {"activate_left": True}),
        ("dequant_situ_quant", (X,), {}),
    ]
    move = torch.utils._pytree.tree_map_only
    for name, args, kwargs in calls:
        real = getattr(C, name)(*args, **kwargs)
        fake = getattr(C, name)(*move(torch.Tensor, lambda tensor: tensor.to("meta"), args), **kwargs)
        assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in real], name
        assert all(tensor.is_meta for tensor in fake)
    out, counts = torch.empty(6, H, device="meta"), torch.empty(2, dtype=INT32, device="meta")
    lists = [torch.empty(2, H, 2 * F, device="meta")], [torch.empty(2, F, H, device="meta")]
    made = C.dispatch_ffn_combine(out, *lists, ids.to("meta"), [], [], [], [], out, "group", 1, out, counts)
    assert [tensor.shape for tensor in made] == [out.shape, counts.shape]
    first, second = torch.empty(2, H, 2 * F, dtype=INT8), torch.empty(2, F, H, dtype=INT8)
    scales = [torch.empty(2, 2 * F)], [torch.empty(2, H)]
    decode = ([first], scales[0], [second], scales[1], torch.empty(6, K))
    args = move(torch.Tensor, lambda tensor: tensor.to("meta"), (randn(6, H).to(BF16), ids, *decode))
    y, rows = C.dispatch_gmm_combine_decode(*args)
    assert (y.shape, y.dtype, rows.shape, rows.dtype) == ((6, H), BF16, (2,), torch.int64)


# ---- schemas of the releases


# By release, the schemas as the compiled part of its wheel has them in its strings; white space is squeezed.
FACTS: dict[str, dict[str, str]] = {}
for line in (Path(__file__).parent / "schemas.txt").read_text().splitlines():
    of, schema = line.split("\t")
    FACTS.setdefault(of, {})[schema.partition("(")[0]] = schema


def test_schemas_are_the_wheels() -> None:
    assert list(FACTS) == schemas.RELEASES
    for release, facts in FACTS.items():
        known = schemas.of_release(release)
        for name, text in facts.items():
            assert torch._C.parse_schema(name + known.pop(name)) == torch._C.parse_schema(text), (release, name)
        assert all("." in name for name in known), release
    both = FACTS["0.23.0"] | FACTS["0.26.0"]
    for name, text in both.items():
        schema = str(getattr(C, name).default._schema).removeprefix("_C_ascend::")
        assert schema == str(torch._C.parse_schema(text)), name
    assert set(both) == set(vllm_ascend.OPS)


def test_the_oldest_release_in_a_process_of_its_own() -> None:
    script = f"""
import torch
from ascend_moe.interop import vllm_ascend
made = vllm_ascend.register("0.18.1")
for name, text in {FACTS["0.18.0"]!r}.items():
    schema = str(getattr(torch.ops._C_ascend, name).default._schema).removeprefix("_C_ascend::")
    assert schema == str(torch._C.parse_schema(text)) and name in made, name
assert not hasattr(torch.ops._C_ascend, "npu_swiglu_group_quant")
x, weight, group = torch.ones(2, 32, dtype=torch.int8), torch.ones(1, 32, 4, dtype=torch.int8), torch.tensor([2])
call = x, weight, torch.ones(1, 4) / 32, torch.ones(2), group
assert (torch.ops._C_ascend.grouped_matmul_swiglu_quant(*call)[0] == 127).all()
try:
    torch.ops._C_ascend.grouped_matmul_swiglu_quant(*call, swiglu_limit=1.0)
except RuntimeError as error:
    assert "swiglu_limit" in str(error), error
else:
    raise AssertionError
from ascend_moe import LocalCluster
def rank(rank, group):
    eye, x, ids = torch.eye(32)[None], torch.ones(2, 32), torch.zeros(2, 1, dtype=torch.int32)
    first, probs, out, rows = torch.cat([eye, eye], -1), torch.ones(2, 1), torch.empty(2, 32), torch.empty(1).int()
    torch.ops._C_ascend.dispatch_ffn_combine(x, [first], [eye], ids, [], [], probs, group, 64, out, rows)
    assert rows.tolist() == [2] and torch.allclose(out, torch.ones(1).sigmoid())
with LocalCluster(1) as cluster:
    cluster.run(rank)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.parametrize(
    ("version", "taken"),
    [
        ("0.18.0", "0.18.0"), ("0.22.1", "0.18.0"), ("0.23.0rc1", "0.23.0"), ("0.23.0.post1", "0.23.0"),
        ("0.25.0", "0.24.0"), ("0.26.0rc1", "0.26.0"), ("1.0", "0.26.0"), ("0.13.0", "0.18.0"), (None, "0.26.0"),
        ("0.1.dev1+g1234567", "0.26.0"),
    ],
)  # fmt: skip
def test_release(
    version: str | None, taken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def found(name: str) -> str:
        assert name == "vllm-ascend"
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", found)
    with caplog.at_level("INFO", "ascend_moe"):
        assert vllm_ascend.register() == ()
    assert caplog.messages[-1].endswith(f"by the schemas of vllm-ascend {taken}")
    assert ("is older than" in caplog.text) == (version == "0.13.0")
    assert schemas.choose("v0.23.0") == "0.23.0"
    with pytest.raises(ArgumentError, match=r"release is 'main'; need a release of vllm-ascend, such as 0.23.0"):
        vllm_ascend.register("main")


def test_register_twice_and_beside_others() -> None:
    assert vllm_ascend.register() == ()
    script = """
import torch
theirs = torch.library.Library("_C_ascend", "DEF")
theirs.define("moe_gating_top_k_hash(Tensor x) -> Tensor")
theirs.impl("moe_gating_top_k_hash", lambda x: x + 1, "CPU")
from ascend_moe.interop import vllm_ascend
made = vllm_ascend.register()
assert "moe_gating_top_k_hash" not in made and "moe_gating_top_k" in made, made
assert "npu_moe_init_routing_custom" not in made and vllm_ascend.register("0.18.0")[-1] == "npu_moe_init_routing_custom"
assert torch.ops._C_ascend.moe_gating_top_k_hash(torch.ones(1)) == 2
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
