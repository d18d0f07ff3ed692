"""Models of transformers on the virtual NPU, and what they ask for: attention, losses, optimizers, products of int8."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch_npu  # type: ignore[import-not-found, unused-ignore]
import transformers
from npu_runs import mixed, near, raises, record_operators, run_checks, unexpected
from torch.nn import functional

Tensor = torch.Tensor
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 8},
    "DeepseekV3": {**LATENT, "num_experts_per_tok": 2, "num_key_value_heads": 4},
}


def model_of(name: str, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **MODELS[name]})
    model: torch.nn.Module = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).eval()
    return model


def train(model: Any, ids: Tensor) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def check_models_compute_generate_and_train_as_on_the_cpu() -> None:
    ids = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(2))
    for name in MODELS:
        for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
            here = model_of(name, dtype)
            there = copy.deepcopy(here).npu()
            near(there(ids.npu()).logits, here(ids).logits, limit)
            how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
            if dtype == torch.float32:
                assert torch.equal(there.generate(ids.npu(), **how).cpu(), here.generate(ids, **how)), name
            losses = train(there.train(), ids.npu())
            near(torch.tensor(losses), torch.tensor(train(here.train(), ids)), 4 * limit)
            assert losses[-1] < losses[0]
            if dtype == torch.float32:
                pairs = zip(there.parameters(), here.parameters(), strict=True)
                for mine, theirs in pairs:
                    near(mine, theirs, 1e-3)


def check_gradients_of_norms_and_of_a_squared_error() -> None:
    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        return torch_npu.npu_rms_norm(x, weight)[0] if x.is_npu else functional.rms_norm(x, (8,), weight, 1e-6)

    for function in (
        rms_norm,
        lambda x, weight: functional.layer_norm(x, (8,), weight, weight),
        lambda x, weight: functional.mse_loss(x, weight.expand_as(x), reduction="none"),
    ):
        results = []
        for device in ("cpu", "npu"):
            leaves = [x.to(device).requires_grad_() for x in (mixed(3, 5, 8), mixed(8))]
            out = function(*leaves)
            results.append([out, *torch.autograd.grad(out, leaves, mixed(3, 5, 8).to(device) + 1)])
        for want, found in zip(*results, strict=True):
            near(found, want, 1e-5)


def check_gradients_are_scaled_and_infinite_ones_skipped() -> None:
    weight = torch.nn.Parameter(torch.ones(4, device="npu"))
    scaler, optimizer = torch.amp.GradScaler("npu", init_scale=4.0, growth_interval=2), torch.optim.SGD([weight], 1.0)
    for slope, scale, left in ((0.5, 4, 0.5), (0.5, 8, 0), (float("inf"), 4, 0)):
        scaler.scale((weight * slope).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert (scaler.get_scale(), weight.tolist()) == (scale, [left] * 4)


# ---- attention


def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """(B, N, S, D); ``seen``: True where a query sees a key."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, seen)


def laid_out(x: Tensor, layout: str) -> Tensor:
    by_rows = x.transpose(1, 2)  # (B, S, N, D)
    made = {"BNSD": x, "BSND": by_rows, "BSH": by_rows.flatten(2), "SBH": by_rows.transpose(0, 1).flatten(2)}
    return made[layout].contiguous()


def check_fusion_attention_in_every_layout_with_gradients() -> None:
    q, k, v, dy = mixed(2, 4, 5, 8), mixed(2, 2, 7, 8), mixed(2, 2, 7, 8) + 1, mixed(2, 4, 5, 8)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, mixed(2, 4, 5, 7))]
    want = reference(*leaves[:3], leaves[3] * 8**-0.5)  # scale * (pse + q @ k)
    *wanted, wanted_shift = torch.autograd.grad(want, leaves, dy)
    for layout in ("BNSD", "BSND", "BSH", "SBH"):
        mine = [laid_out(x, layout).npu().requires_grad_() for x in (q, k, v)]
        shift = leaves[3].detach().npu().requires_grad_()
        out = torch_npu.npu_fusion_attention(*mine, 4, layout, pse=shift, scale=8**-0.5)[0]
        near(out, laid_out(want, layout), 1e-6)
        grads = [*(laid_out(grad, layout) for grad in wanted), wanted_shift]
        for found, grad in zip(
            torch.autograd.grad(out, [*mine, shift], laid_out(dy, layout).npu()), grads, strict=True
        ):
            near(found, grad, 1e-5)


def check_masks_and_sparse_modes_of_attention() -> None:
    q, k, v = mixed(2, 4, 5, 8), mixed(2, 4, 7, 8), mixed(2, 4, 7, 8) + 1
    row, column = torch.arange(5)[:, None], torch.arange(7)[None]
    hidden = (row + 2 * column) % 3 == 1
    band = torch.triu(torch.ones(2048, 2048, dtype=torch.bool), 1)
    seen = {
        0: ~hidden,
        1: ~hidden,
        2: column <= row,
        3: column <= row + 2,
        4: (column <= row + 3) & (column >= row - 1),
    }
    for mode, shown in seen.items():
        mask = hidden if mode < 2 else band
        more = {"pre_tockens": 3, "next_tockens": 1} if mode == 4 else {}
        options = {"scale": 8**-0.5, "atten_mask": mask.npu(), "sparse_mode": mode, **more}
        out = torch_npu.npu_fusion_attention(q.npu(), k.npu(), v.npu(), 4, "BNSD", **options)[0]
        near(out, reference(q, k, v, shown), 1e-6)
    with raises("507035"):
        torch_npu.npu_fusion_attention(q.npu(), k.npu(), v.npu(), 4, "BNSD", atten_mask=band.npu(), sparse_mode=6)
    out = functional.scaled_dot_product_attention(q.npu(), q.npu(), q.npu(), is_causal=True)
    near(out, functional.scaled_dot_product_attention(q, q, q, is_causal=True), 1e-6)


def check_dropped_probabilities_keep_their_mean() -> None:
    x = torch.ones(4, 64, 32).npu()
    torch.manual_seed(3)
    kept = functional.dropout(x, 0.25)
    near(kept.unique(), torch.tensor([0, 4 / 3]), 1e-6)
    assert abs(float(kept.mean()) - 1) < 0.05
    q = mixed(1, 2, 16, 8).npu()
    v = torch.ones(1, 2, 16, 8).npu()
    out = torch_npu.npu_fusion_attention(q, q, v, 2, "BNSD", scale=1.0, keep_prob=0.5)[0]
    assert out.std() > 0.05 and abs(float(out.mean()) - 1) < 0.2
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        kept = functional.dropout(x, 0.25)
    sums = {graph.replay() or float(kept.sum()) for _ in range(3)}
    assert len(sums) == 3, sums  # drawn anew


def check_attention_for_inference() -> None:
    q, k, v = mixed(2, 4, 5, 8), mixed(2, 2, 7, 8), mixed(2, 2, 7, 8) + 1
    given = [x.half() for x in (q, k, v)]
    want = reference(*(x.float() for x in given))
    heads = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "BNSD", "scale": 8**-0.5}
    out, lse = torch_npu.npu_fused_infer_attention_score(*(x.npu() for x in given), **heads, softmax_lse_flag=True)
    near(out, want, 0.002)
    scores = given[0].float() @ given[1].float().repeat_interleave(2, 1).mT * 8**-0.5
    near(lse, scores.logsumexp(-1, keepdim=True), 1e-3)
    lengths = {"actual_seq_lengths": [5, 3], "actual_seq_lengths_kv": [7, 4]}
    out, _ = torch_npu.npu_fused_infer_attention_score(*(x.npu() for x in given), **heads, **lengths)
    near(out[0], want[0], 0.002)
    short = reference(given[0].float()[1:, :, :3], given[1].float()[1:, :, :4], given[2].float()[1:, :, :4])
    near(out[1:, :, :3], short, 0.002)
    newer = {"num_query_heads": 4, "num_key_value_heads": 2, "input_layout": "BNSD", "softmax_scale": 8**-0.5}
    near(torch_npu.npu_fused_infer_attention_score_v2(*(x.npu() for x in given), **newer)[0], want, 0.002)


# ---- lists of tensors, products of int8, formats


def check_operators_on_lists() -> None:
    x, y, z = ([mixed(3, n).sigmoid() for n in range(first, first + 3)] for first in (1, 4, 7))
    y, z = ([b[:, : a.shape[1]].clone() for a, b in zip(x, other, strict=True)] for other in (y, z))
    unary = (
        "abs acos asin atan cos cosh erf erfc exp expm1 log log10 log1p log2 neg reciprocal sigmoid sign sin sinh sqrt"
    )
    calls: list[tuple[str, tuple[Any, ...]]] = [(name, (x,)) for name in (*unary.split(), "tan", "tanh", "norm")]
    for name in ("add", "sub", "mul", "div", "maximum", "minimum", "pow"):
        calls += [(name, (x, y)), (name, (x, 2.5)), (name, (x, [0.5, 1.5, 2.5]))]
    for name in ("addcdiv", "addcmul"):
        calls += [(name, (x, y, z, 0.5)), (name, (x, y, z, [0.5, 1.5, 2.5]))]
    calls += [("lerp", (x, y, 0.25)), ("lerp", (x, y, z)), ("pow", (2.0, x))]

    def there(value: Any) -> Any:
        if isinstance(value, list):
            return [there(part) for part in value]
        return value.npu() if isinstance(value, Tensor) else value

    for name, given in calls:
        function = getattr(torch, f"_foreach_{name}")
        for found, want in zip(function(*map(there, given)), function(*given), strict=True):
            assert not want.isnan().any(), name
            near(found, want, 1e-5 * (1 + float(want.abs().max())))
    moved = there(x)
    torch._foreach_zero_(moved)
    assert all(not tensor.any() for tensor in moved)
    torch._foreach_copy_(moved, there(y))
    for found, want in zip(moved, y, strict=True):
        assert torch.equal(found.cpu(), want)


def check_products_of_int8() -> None:
    generator = torch.Generator().manual_seed(4)
    x, w = (torch.randint(-9, 10, shape, generator=generator, dtype=torch.int8) for shape in ((5, 32), (32, 16)))
    scale, rows, bias = mixed(16).abs(), mixed(5).abs(), torch.arange(16, dtype=torch.int32)
    sums = x.int() @ w.int()
    given = {"pertoken_scale": rows.npu(), "output_dtype": torch.bfloat16}
    found = torch_npu.npu_quant_matmul(x.npu(), w.npu(), scale.npu(), **given).cpu()
    assert torch.equal(found, (sums.float() * scale * rows[:, None]).bfloat16())
    found = torch_npu.npu_quant_matmul(x.npu(), w.npu(), scale.npu(), bias=bias.npu(), **given).cpu()
    assert torch.equal(found, ((sums + bias).float() * scale * rows[:, None]).bfloat16())
    half = torch.full((16,), 0.03125)
    packed = torch_npu.npu_trans_quant_param(half.npu())
    found = torch_npu.npu_quant_matmul(x.npu(), w.npu(), packed).cpu()
    assert torch.equal(found, (sums.float() * half).round().clamp(-128, 127).to(torch.int8))


def check_products_with_weights_of_int8_and_of_int4() -> None:
    generator = torch.Generator().manual_seed(4)
    for most, pack in ((127, lambda codes: codes.to(torch.int8)), (7, torch_npu.npu_convert_weight_to_int4pack)):
        codes = torch.randint(-most, most, (32, 16), generator=generator, dtype=torch.int32)
        x, scale, offset, bias = mixed(5, 32).half(), mixed(16).half().abs(), mixed(16).half() * 3, mixed(16).half()
        want = x.float() @ ((codes + offset.float()) * scale.float()) + bias.float()
        given = {"antiquant_scale": scale.npu(), "antiquant_offset": offset.npu(), "bias": bias.npu()}
        near(
            torch_npu.npu_weight_quant_batchmatmul(x.npu(), pack(codes.npu()), **given),
            want,
            2e-3 * float(want.abs().max()),
        )


def check_activations_of_int4() -> None:
    x, left, right = mixed(3, 4, 16).half(), mixed(4, 4).half(), mixed(16, 16).half()
    turned = left.float() @ (x.float() @ right.float())
    given = {"clip_ratio": 0.75, "dst_dtype": torch.int32}
    found = [torch_npu.npu_kronecker_quant(x.npu(), left.npu(), right.npu(), **given)]
    found += [torch_npu.npu_dynamic_quant(x[0].npu(), dst_type=torch.quint4x2)]
    for (codes, scale), values, ratio, rows in zip(
        found, (turned, x[0].float()), (0.75, 1), ((1, 2), (1,)), strict=True
    ):
        want = values.abs().amax(rows, keepdim=True) * ratio / 7
        near(scale.reshape(want.shape), want, 1e-3)
        words = codes.cpu()[..., None] >> torch.arange(0, 32, 4) & 15
        numbers = ((words ^ 8) - 8).flatten(-2)
        near(numbers.float(), (values / want).round().clamp(-8, 7), 0)


def check_products_of_int4() -> None:
    x, w, scale = (
        mixed(5, 32).half().npu(),
        torch.arange(-256, 256, dtype=torch.int32).reshape(16, 32) % 15 - 7,
        mixed(16),
    )
    codes, rows = torch_npu.npu_dynamic_quant(x, dst_type=torch.quint4x2)
    numbers = (x.cpu().float() / rows.cpu()[:, None]).round()
    given = {"pertoken_scale": rows, "output_dtype": torch.float16}
    want = (numbers @ w.T.float()) * scale * rows.cpu()[:, None]
    for packed in (
        torch_npu.npu_convert_weight_to_int4pack(w.npu()).mT,
        torch_npu.npu_convert_weight_to_int4pack(w.T.contiguous().npu()),
    ):
        near(torch_npu.npu_quant_matmul(codes, packed, scale.npu(), **given), want, 1e-3 * float(want.abs().max()))


def check_products_with_blocked_weights() -> None:
    generator = torch.Generator().manual_seed(5)
    x, w = (torch.randint(-9, 10, shape, generator=generator, dtype=torch.int8) for shape in ((5, 32), (2, 32, 64)))
    scale, rows = mixed(2, 64).abs(), mixed(5).abs()
    torch.npu.config.allow_internal_format = True
    try:
        blocked = torch_npu.npu_format_cast(w.npu(), 29)
        one = torch_npu.npu_format_cast(w[0].npu(), 29)
    finally:
        torch.npu.config.allow_internal_format = False
    assert torch_npu.get_npu_format(blocked) == torch_npu.get_npu_format(one) == 29
    found = torch_npu.npu_quant_matmul(x.npu(), one, scale[0].npu(), pertoken_scale=rows.npu(), output_dtype=torch.half)
    want = torch.stack([(x.int() @ part.int()).float() * row for part, row in zip(w, scale, strict=True)])
    want = want * rows[:, None]
    near(found, want[0], 1e-3 * float(want.abs().max()))
    given = {"scale": [scale.bfloat16().npu()], "per_token_scale": [rows.npu()], "group_list_type": 1, "split_item": 2}
    given |= {"group_list": torch.tensor([2, 3]).npu(), "group_type": 0, "output_dtype": torch.bfloat16}
    found = torch_npu.npu_grouped_matmul([x.npu()], [blocked], **given)[0]
    near(found, torch.cat((want[0, :2], want[1, 2:])), 0.01 * float(want.abs().max()))


def check_formats_and_utilization() -> None:
    w = mixed(33, 18).half()
    cast = torch_npu.npu_format_cast(w.npu(), 29)
    assert torch.equal(cast.cpu(), w)
    near(mixed(4, 33).half().npu() @ cast, mixed(4, 33).half().float() @ w.float(), 0.02)
    assert torch.equal(torch_npu.npu_format_cast(cast, 2).cpu(), w)
    assert torch.npu.utilization() == 0


def check_torch_npu_has_called_them_all() -> None:
    """Only a call by torch_npu shows a wrong type in the table of entries."""
    assert not unexpected("models"), unexpected("models")


if __name__ == "__main__":
    record_operators()
    run_checks()
