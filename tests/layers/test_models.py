"""Model types of checkpoints: what each rank reads, parts that one type alone has, and whole models."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gloo_ranks import threads
from hf_models import LAYER, QWEN, RENAMED, SIZES, WRAPPED, first_of, make, router_of, run_block, saved
from models_table import MODELS_READ, WORLDS, check_reads, measured
from safetensors.torch import load_file, save_file
from torch import Tensor

from ascend_moe import LocalCluster, MoELayer
from ascend_moe.checkpoint import build_layer, load_layer
from ascend_moe.checkpoint.config import WRAPPERS, moe_config
from ascend_moe.dispatchers import AllToAllDispatcher, MC2Dispatcher
from ascend_moe.errors import ArgumentError


@pytest.mark.parametrize("name", MODELS_READ)
def test_each_rank_reads_its_own_experts_bytes_only(name: str) -> None:
    for layout in ("published", *(() if name in RENAMED else ("fused",))):
        check_reads(name, layout, 4)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS_READ)
def test_the_row_of_the_page(name: str) -> None:
    """EP 1, 2 and 4 in fp32; in bf16 the router in the page's dtype chooses as the model's own."""
    row, config = measured(name), load_layer(saved(name).directory, LAYER).config
    assert set(row.errors) == set(WORLDS) and max(row.errors.values()) < 2e-6
    (shown,) = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and f"`{name}`" in line]
    router, activation, shared, dtype, _ = (cell.strip() for cell in shown.strip("|").split("|"))
    assert row.elsewhere[getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}[dtype])] < 0.005
    assert max(row.elsewhere.values()) < 0.006
    parts = {"groups": config.n_group > 1, "bias": config.router_bias, "copy experts": config.copy_expert_num}
    assert router.split(", ") == [config.router, *(part for part, has in parts.items() if has)]
    numbers = ", ".join(f"{key} {value:g}" for key, value in config.activation_numbers.items())
    assert activation == config.activation + (f" ({numbers})" if numbers else "")
    gate = ", gated" if config.shared_expert_gate else ""
    assert shared == (f"yes{gate}" if config.shared_intermediate_size else "no")


def alone(experts: int, **special: int) -> AllToAllDispatcher:
    return AllToAllDispatcher(threads(1).groups[0], experts, **special)


def tensors_of(checkpoint: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_file(checkpoint.directory / "model.safetensors")
    return found


def test_hash_layers_take_their_experts_from_the_tokens_ids() -> None:
    checkpoint = saved("deepseek_v4")
    model = make("deepseek_v4")[0]
    model.load_state_dict(type(model).from_pretrained(checkpoint.directory).state_dict())
    block = model.model.layers[0].mlp.eval()
    shared = block.shared_experts
    x, ids = torch.randn(2, 9, checkpoint.hidden), torch.randint(0, 64, (2, 9))
    with torch.no_grad():
        for tensor in (block.gate.weight, *block.experts.parameters(), *shared.parameters()):
            tensor.normal_(0, tensor.shape[-1] ** -0.5)
        block.gate.tid2eid.copy_(torch.rand(64, 8).argsort(1)[:, :3])
        layer = build_layer(checkpoint.directory, 0, alone(8))
        assert layer.config.router == "hash" and layer.config.vocab_size == 64 and layer.gate_bias is None
        layer.load_state_dict({
            "gate_weight": block.gate.weight, "tid2eid": block.gate.tid2eid.int(),
            "w_gate_up": block.experts.gate_up_proj.mT, "w_down": block.experts.down_proj.mT,
            "shared_gate_up": torch.cat([shared.gate_proj.weight, shared.up_proj.weight]).t(),
            "shared_down": shared.down_proj.weight.t(),
        })  # fmt: skip
        torch.testing.assert_close(layer(x, input_ids=ids), block(x, ids), rtol=1e-5, atol=1e-5)
    with pytest.raises(ArgumentError, match="input_ids is None; router 'hash' chooses experts by the tokens' ids"):
        layer(x)
    with pytest.raises(ArgumentError, match=r"input_ids has an id outside 0\.\.63"):
        layer(x, input_ids=ids + 60)


def test_swiglu_limit_reaches_routed_and_shared_experts() -> None:
    checkpoint = saved("deepseek_v4")
    values = json.loads((checkpoint.directory / "config.json").read_text())
    limited, free = moe_config(values), moe_config(values | {"swiglu_limit": 1e6})
    assert limited.activation_numbers == {"limit": 1.5} and limited != free
    x = 3 * torch.randn(12, checkpoint.hidden, generator=torch.Generator().manual_seed(0))
    layers = [build_layer(checkpoint.directory, LAYER, alone(8), config=config) for config in (limited, free)]
    for part in (MoELayer.run_shared, MoELayer.forward):
        cut, whole = (part(layer, x) for layer in layers)
        assert not torch.allclose(cut, whole, rtol=0.01)
    torch.testing.assert_close(layers[0](x), run_block(checkpoint.block, x), rtol=1e-5, atol=1e-5)


def test_mxfp4_blocks_become_exact_weights(tmp_path: Path) -> None:
    """gpt-oss's published form: transformers' own function decodes each expert to the same bits."""
    # Here, because it looks for torch_npu, which tests beside the virtual NPU have without its libraries.
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    checkpoint, generator = saved("gpt_oss"), torch.Generator().manual_seed(6)
    tensors = tensors_of(checkpoint)
    config = json.loads((checkpoint.directory / "config.json").read_text()) | {
        "hidden_size": 64,
        "intermediate_size": 32,
    }
    base = f"model.layers.{LAYER}.mlp"
    tensors = {
        f"{base}.router.weight": torch.randn(8, 64, generator=generator), f"{base}.router.bias": torch.randn(8),
        f"{base}.experts.gate_up_proj_bias": torch.randn(8, 64), f"{base}.experts.down_proj_bias": torch.randn(8, 64),
    }  # fmt: skip
    wanted = {}
    for part, rows, columns in (("gate_up", 64, 64), ("down", 64, 32)):
        blocks = torch.randint(0, 256, (8, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 126, (8, rows, columns // 32), dtype=torch.uint8, generator=generator)
        tensors[f"{base}.experts.{part}_proj_blocks"], tensors[f"{base}.experts.{part}_proj_scales"] = blocks, scales
        wanted[part] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))
    for rank in range(2):
        loaded = load_layer(tmp_path, LAYER, rank=rank, world=2, dtype=torch.float32)
        own = slice(rank * 4, rank * 4 + 4)
        assert torch.equal(loaded.tensors["w_gate_up"], wanted["gate_up"][own])
        assert torch.equal(loaded.tensors["w_down"], wanted["down"][own])
        read = [each for each in loaded.reads if each.name.endswith(("blocks", "scales"))]
        assert len(read) == 16 and sum(each.bytes for each in read) == 4 * (64 * 2 * 17 + 64 * 17)
    for part, change, rule in (
        ("down_proj_blocks", lambda t: t[:, :2].clone(), r"has .*down_proj_blocks of \(8, 2, 1, 16\); config.json's"),
        ("down_proj_scales", lambda t: t.to(torch.int8), r"has .*_scales of torch.int8; need torch.uint8"),
    ):
        name = f"{base}.experts.{part}"
        save_file(tensors | {name: change(tensors[name].clone())}, tmp_path / "model.safetensors")
        with pytest.raises(ArgumentError, match=rule):
            load_layer(tmp_path, LAYER)


def test_published_layers_for_prediction_are_passed_over(tmp_path: Path) -> None:
    """Qwen3-Next's files have mtp.layers.0 beside model.layers.0; wrappers have a prefix, and towers of their own."""
    checkpoint, prefix = saved("qwen3_next"), "model.language_model."
    tensors = {key.replace("model.", prefix, 1): value for key, value in tensors_of(checkpoint).items()}
    for other in ("mtp.layers.1.mlp.gate.weight", "model.visual.layers.1.mlp.gate.weight"):
        tensors[other] = torch.zeros(8, checkpoint.hidden)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((checkpoint.directory / "config.json").read_bytes())
    got, whole = (load_layer(path, LAYER).tensors for path in (tmp_path, checkpoint.directory))
    assert all(torch.equal(got[name], whole[name]) for name in whole)


TEXTS = {
    "qwen3_vl_moe": ("Qwen3VLMoeConfig", QWEN | {"moe_intermediate_size": 24}),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", QWEN | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}),
    "llama4": ("Llama4Config", {"num_local_experts": 8}),
    "kimi_k25": ("Kimi_K25Config", {"n_group": 1, "topk_group": 1}),
    "kimi_vl": (None, {"model_type": "deepseek_v3", "moe_intermediate_size": 24, "n_routed_experts": 8, "n_group": 1,
                       "topk_group": 1, "num_experts_per_tok": 2}),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRAPPERS)
def test_wrappers_are_read_by_their_text_config(kind: str) -> None:
    name, text = TEXTS[kind]
    if name is None:  # no class in transformers: its published config is a deepseek_v3's inside
        values: dict[str, Any] = {"model_type": kind, "text_config": SIZES | text, "vision_config": {}}
    else:
        values = getattr(transformers, name)(text_config=SIZES | text).to_dict()
    assert values["model_type"] == kind
    inner = moe_config(values["text_config"])
    assert moe_config(values) == inner and inner.hidden_size == SIZES["hidden_size"]
    with pytest.raises(ArgumentError, match=f"model_type '{kind}'; need one of"):
        moe_config({"model_type": kind})


def test_an_unknown_type_is_refused_with_the_list_and_what_it_says_of_its_layers() -> None:
    values = {"model_type": "new_moe", "hidden_size": 8, "n_experts": 64, "router_kind": "cosine"}
    rule = r"has model_type 'new_moe'; need one of mixtral, .*longcat_flash, qwen3_vl_moe \(its text_config\), .*"
    rule += r"or pass config=; of its layers it says n_experts 64, router_kind 'cosine'"
    with pytest.raises(ArgumentError, match=rule):
        moe_config(values)


PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt_oss": (
        {"attention_bias": True, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
         "initial_context_length": 4096, "intermediate_size": 2880, "num_experts_per_tok": 4, "num_local_experts": 128,
         "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "rope_theta": 150000,
         "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"}},
        {"num_experts": 128, "top_k": 4, "moe_intermediate_size": 2880, "expert_bias": True},
    ),
    "hunyuan_v1_moe": (
        {"hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": [32] * 3, "num_experts": 8,
         "moe_topk": [4] * 3, "num_shared_expert": [2] * 3, "use_mixed_mlp_moe": True, "norm_topk_prob": True},
        {"top_k": 4, "moe_intermediate_size": 32, "shared_intermediate_size": 96},
    ),
    "bailing_moe_v2": (
        {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4, "n_group": 4,
         "topk_group": 2, "num_shared_experts": 1, "moe_shared_expert_intermediate_size": 40, "norm_topk_prob": True,
         "score_function": "sigmoid", "moe_router_enable_expert_bias": True, "router_dtype": "fp32", "use_bias": False,
         "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "use_qkv_bias": False, "use_rmsnorm": True},
        {"router": "deepseek_v3", "n_group": 4, "shared_intermediate_size": 40, "routed_scaling_factor": 2.5},
    ),
    "longcat_flash": (
        {"attention_method": "MLA", "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048, "hidden_size": 6144,
         "mla_scale_kv_lora": True, "mla_scale_q_lora": True, "moe_topk": 12, "n_routed_experts": 512, "num_layers": 28,
         "routed_scaling_factor": 6.0, "zero_expert_num": 256, "zero_expert_type": "identity", "use_cache": True},
        {"router": "softmax_bias", "num_experts": 512, "copy_expert_num": 256, "top_k": 12, "renormalize": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", PUBLISHED)
def test_configs_as_they_are_published(kind: str) -> None:
    """Keys that transformers' own class writes under other names, or not at all."""
    values, wanted = PUBLISHED[kind]
    config = moe_config({"model_type": kind, **values})
    assert {name: getattr(config, name) for name in wanted} == wanted
    if kind == "gpt_oss":
        with pytest.raises(ArgumentError, match="has num_experts_per_tok 4 and experts_per_token 5"):
            moe_config({"model_type": kind, **values, "experts_per_token": 5})
    for name, value in {"zero_expert_type": "drop", "router_bias": True}.items() if kind == "longcat_flash" else ():
        with pytest.raises(ArgumentError, match=f"has {name} "):
            moe_config({"model_type": kind, **values, name: value})


# ---- MoELayer's parts that only some types have


@pytest.mark.parametrize("name", ["gpt_oss", "nemotron_h", "llama4_text", "phimoe", "ernie4_5_moe", "longcat_flash"])
def test_casts_gradients_and_int8(name: str) -> None:
    checkpoint = saved(name)
    config, x = load_layer(checkpoint.directory, LAYER).config, torch.randn(6, checkpoint.hidden)
    layer = MoELayer(
        config, alone(checkpoint.experts, **checkpoint.special), dtype=torch.float32, trainable=True
    ).init_weights(1)
    layer(x).square().sum().backward()
    used = {key for key, value in layer.named_parameters() if value.grad is not None and value.grad.abs().sum() > 0}
    assert used == {key for key, value in layer.named_parameters() if value.requires_grad}
    half = build_layer(checkpoint.directory, LAYER, alone(checkpoint.experts, **checkpoint.special)).bfloat16()
    assert first_of(half(x.bfloat16())).dtype == torch.bfloat16 and half.gate_weight.dtype == torch.float32
    frozen = build_layer(checkpoint.directory, LAYER, alone(checkpoint.experts, **checkpoint.special))
    exact = first_of(frozen(x))
    if name == "gpt_oss":
        with pytest.raises(ArgumentError, match="expert_bias is True; int8 rows take no bias"):
            frozen.quantize_()
    else:
        assert float((first_of(frozen.quantize_()(x)) - exact).norm()) < 0.05 * float(exact.norm())


@pytest.mark.parametrize("name", ["phimoe", "mixtral", "minimax_m2"])
def test_noise_of_training_is_transformers_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under one seed the outputs and the gradients of the input are the block's; none of it after eval()."""
    checkpoint, block = saved(name), copy.deepcopy(saved(name).block).train()
    key = "input_jitter_noise" if name == "phimoe" else "router_jitter_noise"
    values = json.loads((checkpoint.directory / "config.json").read_text())
    config = moe_config(values | {key: 0.4})
    assert config.input_jitter == 0.4 and moe_config(values).input_jitter == 0
    for part in (block, router_of(block)):
        part.jitter_noise = part.input_jitter_noise = 0.4
    layer = MoELayer(config, alone(checkpoint.experts), dtype=torch.float32, trainable=True)
    layer.load_state_dict(load_layer(checkpoint.directory, LAYER).tensors)
    x = torch.randn(9, checkpoint.hidden, generator=torch.Generator().manual_seed(2))
    uniform = torch.Tensor.uniform_  # without numbers the sparse mixer draws with it what it does not use
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda drawn, *ends: uniform(drawn, *ends) if ends else drawn)
    made = []
    for run in (layer, lambda given: block(given[None])[0]):
        given = x.clone().requires_grad_()
        torch.manual_seed(5)
        y = run(given * 1)
        made.append((y.detach(), *torch.autograd.grad(y.square().sum(), given)))
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    still = layer.eval()(x).detach()
    assert not torch.allclose(still, made[0][0], rtol=0.1)
    torch.testing.assert_close(still, run_block(block.eval(), x), rtol=1e-5, atol=1e-5)


def test_masks_leave_the_shared_expert_of_a_latent_layer_out() -> None:
    checkpoint, mask = saved("nemotron_h"), torch.tensor([True, False, True, False])
    x = torch.randn(4, checkpoint.hidden)

    def body(rank: int, group: str) -> Tensor:
        layer = build_layer(checkpoint.directory, LAYER, MC2Dispatcher(group, 2, rank, checkpoint.experts))
        return layer(x, mask)

    with LocalCluster(2) as cluster:
        y = cluster.run(body)[1]
    torch.testing.assert_close(y[mask], run_block(checkpoint.block, x)[mask], rtol=1e-5, atol=1e-5)
    assert not y[~mask].any()


@pytest.mark.parametrize("world", [1, 2])
def test_llama4_of_several_experts_is_transformers_block(world: int, tmp_path: Path) -> None:
    """K 3: each of a token's rows is weighed by its own expert's score before the expert; masked tokens give zeros."""
    import transformers

    sizes = {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 8, "interleave_moe_layer_step": 1}
    torch.manual_seed(4)
    model = transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(**SIZES | {"intermediate_size_mlp": 48} | sizes)
    )
    block = model.model.layers[LAYER].feed_forward
    with torch.no_grad():
        for value in block.parameters():
            value.normal_(0, value.shape[-1] ** -0.5)
    model.float().save_pretrained(tmp_path)
    x = torch.randn(world, 7, 32, generator=torch.manual_seed(5))
    mask = torch.tensor([True, False, True, True, True, False, True])

    def body(rank: int, group: str) -> tuple[Tensor, Tensor]:
        layer = build_layer(tmp_path, LAYER, MC2Dispatcher(group, world, rank, 8), dtype=torch.float32)
        few, (whole, _) = layer(x[rank, : 7 - 2 * rank], global_bs=7 * world)[0], layer(x[rank])
        torch.testing.assert_close(few, whole[: 7 - 2 * rank], rtol=1e-5, atol=1e-5)
        return whole, layer(x[rank], mask)[0]

    with torch.no_grad(), LocalCluster(world) as cluster:
        for rank, (y, masked) in enumerate(cluster.run(body)):
            wanted = block(x[rank : rank + 1])[0].reshape(7, 32)
            torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(masked[mask], y[mask], rtol=1e-5, atol=1e-5)
            assert not masked[~mask].any()


@pytest.mark.parametrize("form", ["int8, e8m0", "uint8, uint8"])
def test_fp4_experts_of_deepseek_v4_become_exact_weights(form: str, tmp_path: Path) -> None:
    """e2m1 two a byte, the low half first, and a power of two for 32 numbers: transformers' own dequantisation.

    Worked: byte 0xA3 is 1.5 (3) and -1 (10 = -(2)); exponent 128 doubles them: 3 and -2.
    """
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    source = saved("deepseek_v4").directory
    values = json.loads((source / "config.json").read_text()) | {"moe_intermediate_size": 32, "expert_dtype": "fp4"}
    values["quantization_config"] = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [16, 16]}
    generator, wanted, tensors = torch.Generator().manual_seed(7), {}, load_file(source / "model.safetensors")
    decode = Fp8Dequantize(None)._dequantize_one
    base = next(name for name in tensors if f"layers.{LAYER}." in name and ".experts." in name).split(".experts.")[0]
    for name in [name for name in tensors if name.startswith(f"{base}.experts.")]:
        del tensors[name]
    for expert in range(8):
        for part in ("w1", "w2", "w3"):
            codes = torch.randint(0, 256, (32, 16), dtype=torch.uint8, generator=generator)
            exponents = torch.randint(118, 132, (32, 1), dtype=torch.uint8, generator=generator)
            codes[5, 3], exponents[5] = 0xA3, 128
            name = f"{base}.experts.{expert}.{part}"
            wanted[expert, part] = decode(codes.view(torch.int8), exponents, torch.float32)
            assert wanted[expert, part][5, 6:8].tolist() == [3.0, -2.0]
            kinds = (torch.int8, torch.float8_e8m0fnu) if form.startswith("int8") else (torch.uint8, torch.uint8)
            tensors[f"{name}.weight"], tensors[f"{name}.scale"] = codes.view(kinds[0]), exponents.view(kinds[1])
    for part in ("w1", "w2", "w3"):  # the shared expert is fp8 by block
        shape = (32, 32)
        tensors[f"{base}.shared_experts.{part}.weight"] = torch.randn(shape, generator=generator).to(
            torch.float8_e4m3fn
        )
        tensors[f"{base}.shared_experts.{part}.scale"] = torch.full((2, 2), 128, dtype=torch.uint8).view(kinds[1])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(values))
    loaded = load_layer(tmp_path, LAYER, rank=1, world=2, dtype=torch.float32)
    for local in range(4):
        parts = [wanted[4 + local, part] for part in ("w1", "w3")]
        assert torch.equal(loaded.tensors["w_gate_up"][local], torch.cat(parts).t())
        assert torch.equal(loaded.tensors["w_down"][local], wanted[4 + local, "w2"].t())
    shared = 2 * tensors[f"{base}.shared_experts.w2.weight"].float().t()
    assert torch.equal(loaded.tensors["shared_down"], shared)


# ---- whole models

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"


def program_of_the_page() -> tuple[str, str]:
    """The program that replaces every layer of a model: before and after it makes a model of its own."""
    block = next(text for text in PAGE.read_text().split("```python\n") if ".set_submodule(" in text).split("```")[0]
    imports, own = block.split("sizes = {", 1)
    return imports, own.split("\n\n", 1)[1]


def model_of(name: str) -> Any:
    """transformers' model with the weights of ``saved(name)``."""
    base = RENAMED.get(name, (name,))[0]
    return type(make(base)[0]).from_pretrained(saved(base).directory, dtype=torch.float32).eval()


@pytest.mark.skipif(not PAGE.is_file(), reason="not in a source tree")
@pytest.mark.parametrize("name", [*(name for name in MODELS_READ if name not in WRAPPED.values()), *WRAPPED])
def test_the_pages_program_generates_the_same_tokens_with_every_type(name: str) -> None:
    """Two prompts a rank, one of them padded; qwen3_vl_moe_text and qwen3_5_moe_text within what wraps them."""
    imports, program = program_of_the_page()
    names: dict[str, Any] = {"directory": saved(name).directory, "model": model_of(name), "W": 2}
    exec(imports, names)
    exec(program, names)
    assert names["moe"] and names["tokens"].shape == (4, 17) and torch.equal(names["tokens"], names["alone"])


@pytest.mark.parametrize(("name", "loss"), [("gpt_oss", True), ("llama4_text", False)])
def test_a_replaced_block_has_no_entry_in_router_logits(name: str, loss: bool) -> None:
    """The second value is None; with a loss of the logits transformers raises its own error where all are replaced."""
    model, tokens, checkpoint = model_of(name), torch.arange(1, 7)[None], saved(name)
    with torch.no_grad():
        wanted = model(tokens, output_router_logits=True).router_logits
        built = build_layer(checkpoint.directory, LAYER, alone(checkpoint.experts))
        assert built(torch.randn(2, 3, checkpoint.hidden))[1] is None
        for number, left in ((LAYER, 1), (0, 0)):
            block = next(
                key for key, part in model.named_modules() if f"layers.{number}." in key and hasattr(part, "experts")
            )
            model.set_submodule(block, build_layer(checkpoint.directory, number, built.dispatcher))
            if left or not loss:
                made = model(tokens, output_router_logits=True).router_logits
                assert len(wanted) == 2 and len(made) == left and all(map(torch.equal, made, wanted))
            else:
                with pytest.raises(IndexError):
                    model(tokens, output_router_logits=True)
