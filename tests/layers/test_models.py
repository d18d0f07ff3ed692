"""Model types of checkpoints: what each rank reads, parts that one type alone has, and whole models."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bad_arguments import refused
from gloo_ranks import threads
from hf_models import (
    LAYER,
    MODELS,
    MORE_MODELS,
    QWEN,
    RENAMED,
    SIZES,
    WRAPPED,
    first_of,
    make,
    router_of,
    run_block,
    saved,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from ascend_moe import MoELayer
from ascend_moe.checkpoint import build_layer, load_layer
from ascend_moe.checkpoint.config import WRAPPERS, moe_config
from ascend_moe.checkpoint.schemes import Schemes
from ascend_moe.dispatchers import AllToAllDispatcher, MC2Dispatcher


def alone(experts: int, **special: int) -> AllToAllDispatcher:
    return AllToAllDispatcher(threads(1).groups[0], experts, **special)


PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
MODELS_READ, TOKENS = (*MODELS, *MORE_MODELS, *RENAMED), 2000


def elsewhere(name: str) -> dict[torch.dtype, float]:
    """By the router's dtype: the share of tokens whose experts are others than the bf16 model's own."""
    checkpoint = saved(name, dtype=torch.bfloat16)
    gate = copy.deepcopy(router_of(checkpoint.block)).bfloat16()
    gate._forward_pre_hooks.clear()  # of `fp32_routing`
    tokens = torch.randn(TOKENS, checkpoint.hidden, generator=torch.Generator().manual_seed(4)).bfloat16()
    with torch.no_grad():
        beside = [checkpoint.block.e_score_correction_bias] if name == "minimax_m2" else []
        chosen = chosen_by(gate(tokens, *beside), TOKENS)
    dispatcher, shares = alone(checkpoint.experts, **checkpoint.special), {}
    for kind in (torch.float32, torch.bfloat16):
        layer = build_layer(checkpoint.directory, LAYER, dispatcher, router_dtype=kind)
        assert layer.gate_weight.dtype == layer.half().bfloat16().gate_weight.dtype == kind
        weights, ids = layer.route(tokens)
        assert weights.dtype == torch.float32
        shares[kind] = float((ids.long().sort().values != chosen.sort().values).any(1).float().mean())
    return shares


def chosen_by(out: tuple[Tensor, ...], tokens: int) -> Tensor:
    """Ids (T, K) of what a router of transformers returned."""
    if len(out) == 2:  # Llama-4's scores of all experts, zero for those that are not chosen, and logits
        return out[0].nonzero()[:, 1:].reshape(tokens, -1)
    return out[-1]


@pytest.mark.parametrize(
    "name",
    [
        *("mixtral", "qwen2_moe", "qwen3_moe"),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in MODELS_READ if name not in [*MODELS][:3]),
    ],
)
def test_the_row_of_the_page(name: str) -> None:
    """In bf16 the router in the page's dtype chooses as the model's own."""
    shares, config = elsewhere(name), load_layer(saved(name).directory, LAYER).config
    (shown,) = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and f"`{name}`" in line]
    router, activation, shared, dtype, _ = (cell.strip() for cell in shown.strip("|").split("|"))
    assert shares[getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}[dtype])] < 0.005
    assert max(shares.values()) < 0.006
    parts = {"groups": config.n_group > 1, "bias": config.router_bias, "copy experts": config.copy_expert_num}
    assert router.split(", ") == [config.router, *(part for part, has in parts.items() if has)]
    numbers = ", ".join(f"{key} {value:g}" for key, value in config.activation_numbers.items())
    assert activation == config.activation + (f" ({numbers})" if numbers else "")
    gate = ", gated" if config.shared_expert_gate else ""
    assert shared == (f"yes{gate}" if config.shared_intermediate_size else "no")


def tensors_of(checkpoint: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_file(checkpoint.directory / "model.safetensors")
    return found


def test_hash_layers_need_the_tokens_ids() -> None:
    """That they compute what transformers' do is what the page's program shows."""
    layer, x = build_layer(saved("deepseek_v4").directory, 0, alone(8)), torch.randn(2, 9, 32)
    assert layer.config.router == "hash" and layer.config.vocab_size == 64 and layer.gate_bias is None
    for ids, rule in (
        (None, "input_ids is None; router 'hash' chooses experts by token id"),
        (torch.zeros(9, 2, dtype=torch.int64), r"input_ids is \(9, 2\); it must be \(2, 9\) or \(18,\)"),
        (torch.full((2, 9), 64), r"input_ids contains an id outside 0\.\.63"),
    ):
        refused("input_ids", layer, x, input_ids=ids, says=rule)


def test_published_layers_for_prediction_are_passed_over(tmp_path: Path) -> None:
    """Qwen3-Next's files have mtp.layers.0 beside model.layers.0; wrappers have a prefix, and towers of their own."""
    checkpoint, prefix = saved("qwen3_next"), "model.language_model."
    tensors = {key.replace("model.", prefix, 1): value for key, value in tensors_of(checkpoint).items()}
    for other in ("mtp.layers.1", "model.visual.layers.1", "layers." + 5000 * "1"):
        tensors[f"{other}.mlp.gate.weight"] = torch.zeros(8, checkpoint.hidden)
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
    refused("directory", moe_config, {"model_type": kind}, says=f"model_type '{kind}'; need one of")


def test_an_unknown_type_is_refused_with_the_list_and_what_it_says_of_its_layers() -> None:
    values = {"model_type": "new_moe", "hidden_size": 8, "n_experts": 64, "router_kind": "cosine"}
    rule = r"has model_type 'new_moe'; need one of mixtral, .*longcat_flash, qwen3_vl_moe \(its text_config\), .*"
    rule += r"or pass a MoEConfig as config; its MoE keys: n_experts 64, router_kind 'cosine'"
    refused("directory", moe_config, values, says=rule)


PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt_oss": (
        {"experts_per_token": 4, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
         "intermediate_size": 2880, "num_experts_per_tok": 4, "num_local_experts": 128, "router_aux_loss_coef": 0.9,
         "swiglu_limit": 7.0, "quantization_config": {"quant_method": "mxfp4"}},
        {"num_experts": 128, "top_k": 4, "moe_intermediate_size": 2880, "expert_bias": True},
    ),
    "hunyuan_v1_moe": (
        {"hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": [32] * 3, "num_experts": 8,
         "moe_topk": [4] * 3, "num_shared_expert": [2] * 3, "use_mixed_mlp_moe": True, "norm_topk_prob": True,
         "moe_drop_tokens": False, "group_limited_greedy": False, "dense_list": [64, 0]},
        {"top_k": 4, "moe_intermediate_size": 32, "shared_intermediate_size": 96},
    ),
    "bailing_moe_v2": (
        {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4, "n_group": 4,
         "topk_group": 2, "num_shared_experts": 1, "moe_shared_expert_intermediate_size": 40, "norm_topk_prob": True,
         "score_function": "sigmoid", "moe_router_enable_expert_bias": True, "router_dtype": "fp32", "use_bias": False,
         "routed_scaling_factor": 2.5, "first_k_dense_replace": 1},
        {"router": "deepseek_v3", "n_group": 4, "shared_intermediate_size": 40, "routed_scaling_factor": 2.5},
    ),
    "longcat_flash": (
        {"ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048, "hidden_size": 6144, "moe_topk": 12,
         "n_routed_experts": 512, "routed_scaling_factor": 6.0, "zero_expert_num": 256, "zero_expert_type": "identity"},
        {"router": "softmax_bias", "num_experts": 512, "copy_expert_num": 256, "top_k": 12, "renormalize": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", PUBLISHED)
def test_configs_as_they_are_published(kind: str) -> None:
    """Keys that transformers' own class writes under other names, or not at all."""
    values, wanted = PUBLISHED[kind]
    config = moe_config({"model_type": kind, **values})
    assert {name: getattr(config, name) for name in wanted} == wanted
    wrong = {"longcat_flash": {"zero_expert_type": "drop", "router_bias": True}}
    wrong |= {"hunyuan_v1_moe": {"group_limited_greedy": True, "moe_drop_tokens": True}}
    wrong |= {"gpt_oss": {"experts_per_token": 5}}
    for name, value in wrong.get(kind, {}).items():
        refused("directory", moe_config, {"model_type": kind, **values, name: value}, says=f"(has|and) {name} ")


@pytest.mark.parametrize("kind", [transformers.FineGrainedFP8Config, transformers.Mxfp4Config])
def test_keys_that_transformers_writes_in_a_quantization_config_are_known(kind: Any) -> None:
    assert Schemes.of({"quantization_config": json.loads(kind().to_json_string(use_diff=False))}) is None


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
        refused("expert_bias", frozen.quantize_, says="expert_bias is True; int8 rows take no bias")
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


@pytest.mark.parametrize("world", [1, 2])
def test_llama4_of_several_experts_is_transformers_block(world: int, clusters: Any, tmp_path: Path) -> None:
    """K 3: each of a token's rows is weighed by its own expert's score before the expert; masked tokens give zeros."""
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

    with torch.no_grad():
        for rank, (y, masked) in enumerate(clusters[world].run(body)):
            wanted = block(x[rank : rank + 1])[0].reshape(7, 32)
            torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(masked[mask], y[mask], rtol=1e-5, atol=1e-5)
            assert not masked[~mask].any()


# ---- whole models


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
