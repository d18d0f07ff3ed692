"""Loading one layer from checkpoint files: right numbers, own experts only, and helpful errors."""

from __future__ import annotations

import contextlib
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import LAYER, MODELS, MORE_MODELS, RENAMED, saved
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from ascend_moe.checkpoint import load_layer
from ascend_moe.checkpoint.config import MODEL_TYPES, moe_config
from ascend_moe.checkpoint.keys import HARMLESS, NEUTRAL
from ascend_moe.errors import ArgumentError


def rewritten(source: Path, target: Path, change: Any, **config: Any) -> Path:
    """A copy of a single-file checkpoint with ``change(tensors)`` and other config values."""
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    values = {**json.loads((source / "config.json").read_text()), **config}
    (target / "config.json").write_text(json.dumps(values))
    return target


def test_fused_transposed_weights_are_read(tmp_path: Path) -> None:
    checkpoint = saved("qwen3_moe", "fused")

    def turn(tensors: dict[str, torch.Tensor], name: str) -> None:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()

    change = changing(r"\.experts\.", turn)
    directory = rewritten(checkpoint.directory, tmp_path, change)
    assert checkpoint.hidden == 2 * MODELS["qwen3_moe"][1]["moe_intermediate_size"]  # gate_up alone is square
    got = load_layer(directory, LAYER, rank=1, world=2, dtype=torch.float32).tensors
    whole = load_layer(checkpoint.directory, LAYER, dtype=torch.float32).tensors
    for name in ("w_gate_up", "w_down"):
        assert torch.equal(got[name], whole[name][4:])


SCALES = {
    "fp32": (torch.float32, {}, None),
    "bf16": (torch.bfloat16, {}, None),
    "e8m0": (torch.float8_e8m0fnu, {}, None),
    "bytes that the format calls e8m0": (torch.uint8, {"scale_fmt": "ue8m0"}, None),
    "fp32 where the format says ue8m0": (torch.float32, {"scale_fmt": "ue8m0"}, None),
    "bytes": (torch.uint8, {}, r"up_proj\.weight_scale_inv of torch\.uint8; need torch\.float32 or "),
    "int8": (torch.int8, {"scale_fmt": "ue8m0"}, r"_scale_inv of torch\.int8; need"),
    "int32": (torch.int32, {"scale_fmt": "ue8m0"}, r"_scale_inv of torch\.int32; need"),
}


@pytest.mark.parametrize("kind", SCALES)
def test_scales_of_fp8_blocks_are_read_as_what_they_are(kind: str, tmp_path: Path) -> None:
    """Powers of two from 2^-4 to 2^3, in every dtype; bytes are exponents plus 127."""
    dtype, form, refused = SCALES[kind]
    exact: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(1)

    def quantize(tensors: dict[str, torch.Tensor], name: str) -> None:
        codes = tensors[name].to(torch.float8_e4m3fn)
        exponent = torch.randint(-4, 4, (1, 1), generator=generator)
        exact[name] = codes.float() * torch.exp2(exponent.float())
        scale = (exponent + 127).to(dtype) if dtype == torch.uint8 else torch.exp2(exponent.float()).to(dtype)
        tensors[name], tensors[f"{name}_scale_inv"] = codes, scale

    change = changing(rf"layers\.{LAYER}\.mlp\.experts.*up_proj\.weight", quantize)
    directory = rewritten(saved("qwen3_moe").directory, tmp_path, change, quantization_config=form)
    if refused:
        with pytest.raises(ArgumentError, match=refused):
            load_layer(directory, LAYER)
        return
    up = load_layer(directory, LAYER, dtype=torch.float32).tensors["w_gate_up"][..., 16:]
    for expert in range(8):
        assert torch.equal(up[expert], exact[f"model.layers.{LAYER}.mlp.experts.{expert}.up_proj.weight"].t())


def test_weights_come_in_the_dtype_asked_for(tmp_path: Path) -> None:
    checkpoint = saved("deepseek_v3")
    half = load_layer(checkpoint.directory, LAYER, dtype=torch.float16).tensors
    wide = {name for name, value in half.items() if value.dtype == torch.float32}
    assert wide == {"gate_weight", "gate_bias"}
    assert load_layer(checkpoint.directory, LAYER).tensors["w_down"].dtype == torch.float32  # config.json's
    directory = rewritten(checkpoint.directory, tmp_path, lambda tensors: None, dtype="bfloat16")
    assert load_layer(directory, LAYER).tensors["w_down"].dtype == torch.bfloat16


def changing(pattern: str, change: Any) -> Any:
    """``change(tensors, name)`` of every tensor whose name fits."""

    def change_all(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if re.search(pattern, n)]:
            change(tensors, name)

    return change_all


def drop(pattern: str) -> Any:
    return changing(pattern, lambda tensors, name: tensors.pop(name))


def recast(pattern: str, dtype: torch.dtype) -> Any:
    return changing(pattern, lambda tensors, name: tensors.update({name: tensors[name].to(dtype)}))


def nothing(tensors: dict[str, torch.Tensor]) -> None: ...


@pytest.mark.parametrize(
    ("model", "layout", "change", "config", "message"),
    [
        ("qwen3_moe", "published", drop(r"\.5\.up"), {}, r"no tensor .*\.5\.up_proj.*; it has .*\.5\."),
        ("qwen3_moe", "published", drop(r"experts\."), {}, r"no tensor .*\.0\.gate_proj.*fused.*it has"),
        ("qwen3_moe", "fused", drop(r"down_proj"), {}, r"no tensor .*experts\.down_proj; it has"),
        ("qwen2_moe", "published", drop(r"shared_expert_gate"), {}, r"no tensor .*expert_gate\.weight"),
        ("qwen2_moe", "published", drop(r"shared_expert\."), {}, r"no tensor .*expert\.gate_proj"),
        ("deepseek_v3", "published", drop(r"correction_bias"), {}, r"no tensor .*e_score_correction_bias"),
        ("mixtral", "published", drop(r"gate\.weight"), {}, r"layer 1 .* no router .*layers with one: none"),
        ("mixtral", "published", nothing, {"intermediate_size": 40}, r"w1\.weight of \(48, 32\).*\(40"),
        ("mixtral", "published", nothing, {"num_local_experts": 4}, r"gate\.weight of \(8, 32\).* \(4, 32\)"),
        ("mixtral", "fused", nothing, {"intermediate_size": 40}, r"gate_up_proj is \(8, 96, 32\) and"),
        ("mixtral", "published", recast(r"w2", torch.int8), {}, r"w2\.weight of torch\.int8; need torch\.float32 or"),
        ("mixtral", "fused", recast(r"down_proj", torch.float8_e4m3fn), {}, r"no tensor .*down_proj_scale_inv"),
        ("mixtral", "published", recast(r"w2", torch.float8_e4m3fn), {}, r"no tensor .*w2\.weight_scale_inv"),
        ("mixtral", "published", nothing, {"model_type": "gpt2"}, r"model_type 'gpt2'; need one of mixtral"),
        ("mixtral", "published", nothing, {"hidden_act": "mish"}, r"hidden_act 'mish'"),
        ("mixtral", "published", nothing, {"num_experts_per_tok": None}, r"no num_experts_per_tok"),
        ("mixtral", "published", nothing, {"num_experts_per_tok": 9}, r"top_k is 9.* 8 experts"),
        ("deepseek_v2", "published", nothing, {"norm_topk_prob": True}, r"norm_topk_prob with deepseek_v2"),
        ("deepseek_v2", "published", nothing, {"topk_method": "other"}, r"topk_method 'other'; need greedy"),
        ("deepseek_v3", "published", nothing, {"scoring_func": "softmax"}, r"scoring_func 'softmax'"),
        ("mixtral", "published", nothing, {"hidden_size": "wide"}, "a value of the wrong kind: .* 'wide'"),
        *(
            ("mixtral", "published", nothing, {"quantization_config": given}, "weight_block_size .*; need two")
            for given in (7, *({"weight_block_size": sides} for sides in (5, [1], [0, 128], [128, "a"])))
        ),
    ],
)  # fmt: skip
def test_broken_checkpoints_name_what_is_missing(
    tmp_path: Path, model: str, layout: str, change: Any, config: dict[str, Any], message: str
) -> None:
    directory = rewritten(saved(model, layout).directory, tmp_path, change, **config)
    with pytest.raises(ArgumentError, match=message) as caught:
        load_layer(directory, LAYER, rank=1, world=2)
    if ".5" in message:
        base = "model.layers.1.mlp.experts.5"
        assert caught.value.missing == f"{base}.up_proj.weight"
        assert caught.value.found == [f"{base}.down_proj.weight", f"{base}.gate_proj.weight"]


def test_wrong_arguments_and_indices_are_refused(tmp_path: Path) -> None:
    directory = saved("deepseek_v3").directory
    with pytest.raises(ArgumentError, match=r"layer 0 .* no router .*layers with one: 1$") as caught:
        load_layer(directory, 0)
    assert caught.value.argument == "layer"
    for rank, world, argument in [(2, 2, "rank"), (-1, 2, "rank"), (0, 0, "rank"), (0, 3, "world")]:
        with pytest.raises(ArgumentError) as caught:
            load_layer(directory, LAYER, rank=rank, world=world)
        assert caught.value.argument == argument
    for wrong in ({"directory": None}, {"directory": directory, "dtype": 5}):
        with pytest.raises(ArgumentError, match=f"^{[*wrong][-1]} is .*; it must be ") as caught:
            load_layer(layer=LAYER, **wrong)
        assert caught.value.argument == [*wrong][-1]
    with pytest.raises(ArgumentError, match=r"config\.json does not exist"):
        load_layer(tmp_path, LAYER)
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    with pytest.raises(ArgumentError, match=r"neither model\.safetensors\.index\.json nor a \.safetensors"):
        load_layer(tmp_path, LAYER)
    for outside in ("../other.safetensors", "/etc/passwd"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": outside}}))
        with pytest.raises(ArgumentError, match=f"names '{outside}', which is not a file in it"):
            load_layer(tmp_path, LAYER)
    index = tmp_path / "model.safetensors.index.json"
    for text, message in (
        ("[1]", "has a list"),
        ("{", "cannot be read"),
        ("{}", "no weight_map"),
        ("\0", "cannot be read"),
    ):
        index.write_text(text)
        with pytest.raises(ArgumentError, match=message):
            load_layer(tmp_path, LAYER)


# ---- what a config.json says and the layer does not compute


def config_of(kind: str) -> dict[str, Any]:
    """config.json of the small model of a model_type."""
    values: dict[str, Any] = json.loads((saved(kind).directory / "config.json").read_text())
    assert values["model_type"] == kind
    return values


ALL_MODELS = [*MODELS, *MORE_MODELS, *RENAMED]


def test_every_model_type_has_a_model_here() -> None:
    assert set(ALL_MODELS) == set(MODEL_TYPES)


@pytest.mark.parametrize("kind", [*MODELS, *MORE_MODELS])
def test_absent_numbers_are_those_of_transformers(kind: str) -> None:
    """From a file with the sizes only, the layer is that of transformers' config class with the same sizes."""
    sizes = ("hidden_size", "moe_intermediate_size", "intermediate_size", "num_experts_per_tok", "num_experts")
    sizes += ("n_routed_experts", "num_local_experts", "shared_expert_intermediate_size", "n_shared_experts")
    sizes += ("moe_topk", "moe_k", "moe_num_experts", "moe_num_shared_experts", "moe_shared_expert_intermediate_size")
    sizes += ("num_experts_per_token", "num_shared_experts", "expert_ffn_hidden_size")
    given = {name: value for name, value in config_of(kind).items() if name in sizes}
    if kind in ("deepseek_v3", "deepseek_v32", "bailing_hybrid"):
        given |= {"n_group": 4, "topk_group": 2}
    whole = getattr(transformers, CONFIG_MAPPING_NAMES[kind])(**given).to_dict()
    assert moe_config({"model_type": kind, **given}) == moe_config(whole)


@pytest.mark.parametrize("kind", ALL_MODELS)
def test_no_key_is_passed_over(kind: str) -> None:
    """Another value of a key changes the layer's numbers or is refused, but for keys that change nothing."""
    values, changed = config_of(kind), {bool: lambda v: not v, int: lambda v: v + 2, float: lambda v: v + 0.5}
    plain = moe_config(values)
    for name in set(values) - HARMLESS - {"model_type"}:
        if values[name] is None or name.startswith("_"):
            continue
        other = changed.get(type(values[name]), lambda v: f"{v}_other")(values[name])
        with contextlib.suppress(ArgumentError):
            assert moe_config({**values, name: other}) != plain, name


@pytest.mark.parametrize("seed", range(40))
def test_keys_that_change_a_layer_are_refused_by_name(seed: int) -> None:
    """Drawn keys of transformers' other models, with a value that says something, and keys of no model."""
    draw = random.Random(seed)
    kind = draw.choice(ALL_MODELS)
    values = config_of(kind)
    others = sorted(set(_fields_of_other_models()) - set(values) - HARMLESS)
    name = draw.choice([*others, *NEUTRAL, f"new_setting_{seed}"])
    value = draw.choice([2, 7.5, "word", [1, 2], {"a": 1}, NEUTRAL.get(name) is not True])
    plain = moe_config(values)
    assert moe_config({**values, name: None}) == plain or name in values
    try:
        read = moe_config({**values, name: value})
    except ArgumentError as error:
        assert name in str(error)
    else:
        assert name not in others and (read != plain or value == values.get(name)), (kind, name, value)
    if name in NEUTRAL and name not in values:
        assert moe_config({**values, name: NEUTRAL[name]}) == plain


def _fields_of_other_models() -> list[str]:
    """Keys of every config class in transformers that has experts, and is none of ours."""
    names: set[str] = set()
    for kind, name in CONFIG_MAPPING_NAMES.items():
        if kind not in ALL_MODELS and re.search("moe|jamba|dbrx|ernie|laguna|hy_v3|kimi_linear", kind):
            names |= set(getattr(transformers, name).__dataclass_fields__)
    assert "router_bias" in names
    return sorted(names)


@pytest.mark.parametrize(
    "name",
    [
        "gate.bias",
        "experts.2.down_proj.bias",
        "experts.5.up_proj.weight_scale",
        "experts.8.up_proj.weight",
        "new.weight",
    ],
)
def test_a_tensor_of_the_block_that_nobody_reads_is_refused(name: str, tmp_path: Path) -> None:
    full = f"model.layers.{LAYER}.mlp.{name}"
    add = lambda tensors: tensors.update({full: torch.zeros(4)})  # noqa: E731
    directory = rewritten(saved("qwen3_moe").directory, tmp_path, add)
    with pytest.raises(ArgumentError, match=f"has {re.escape(full)}, which a layer with .* does not use"):
        load_layer(directory, LAYER, rank=1, world=2)
