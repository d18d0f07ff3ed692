"""vllm-ascend's one call for a layer in all its releases, and the schemas of its operators."""

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

from ascend_moe import LocalCluster, layer_ops
from ascend_moe.errors import ArgumentError
from ascend_moe.experts import quantize_weight
from ascend_moe.interop import vllm_ascend
from ascend_moe.interop.vllm_ascend import schemas


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
