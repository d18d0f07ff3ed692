"""Loading one layer from checkpoint files: right numbers, own experts only, and helpful errors."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bad_arguments import refused
from hf_models import LAYER, MODELS, MORE_MODELS, RENAMED, saved
from safetensors.torch import load_file, save_file
from tiny_checkpoints import (
    BLOCK,
    FORMATS,
    INNER,
    INT8,
    KEPT_INT4,
    KEPT_INT8,
    TOKENS,
    E,
    H,
    Tiny,
    check_values,
    compressed,
    outcomes,
    tiny,
    with_int8,
)
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from ascend_moe.checkpoint import load_layer
from ascend_moe.checkpoint.config import MODEL_TYPES, moe_config
from ascend_moe.checkpoint.files import FP8
from ascend_moe.checkpoint.keys import HARMLESS, NEUTRAL
from ascend_moe.errors import ArgumentError
from ascend_moe.experts.int4 import unpack_int4


def rewritten(source: Path, target: Path, change: Any, **config: Any) -> Path:
    """A copy of a single-file checkpoint with ``change(tensors)`` and other config values."""
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    values = {**json.loads((source / "config.json").read_text()), **config}
    (target / "config.json").write_text(json.dumps(values))
    return target


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
        ("nemotron_h", "published", drop(r"experts\."), {}, r"no tensor .*\.0\.up_proj.*\.w3\..*experts\.up_proj\)"),
        ("qwen3_moe", "fused", drop(r"down_proj"), {}, r"no tensor .*experts\.down_proj; it has"),
        ("qwen2_moe", "published", drop(r"shared_expert_gate"), {}, r"no tensor .*expert_gate\.weight"),
        ("qwen2_moe", "published", drop(r"shared_expert\."), {}, r"no tensor .*expert\.gate_proj"),
        ("deepseek_v3", "published", drop(r"correction_bias"), {}, r"no tensor .*e_score_correction_bias"),
        ("mixtral", "published", drop(r"gate\.weight"), {}, r"layer 1 .* no router .*layers with one: none"),
        ("mixtral", "published", nothing, {"intermediate_size": 40}, r"w1\.weight of \(48, 32\).*\(40"),
        ("mixtral", "published", nothing, {"num_local_experts": 4}, r"gate\.weight of \(8, 32\).* \(4, 32\)"),
        ("mixtral", "fused", nothing, {"intermediate_size": 40}, r"gate_up_proj of \(8, 96, 32\) and"),
        ("mixtral", "published", recast(r"w2", torch.int8), {}, r"w2\.weight of torch\.int8, but neither quant"),
        ("mixtral", "fused", recast(r"down_proj", torch.float8_e4m3fn), {}, r"no tensor .*down_proj_scale_inv"),
        ("mixtral", "published", recast(r"w2", torch.float8_e4m3fn), {}, r"no tensor .*w2\.weight_scale_inv"),
        ("mixtral", "published", nothing, {"model_type": "gpt2"}, r"model_type 'gpt2'; need one of mixtral"),
        ("mixtral", "published", nothing, {"hidden_act": "mish"}, r"hidden_act 'mish'"),
        ("mixtral", "published", nothing, {"num_experts_per_tok": None}, r"no num_experts_per_tok"),
        ("mixtral", "published", nothing, {"num_experts_per_tok": 9}, r"config\.json has .* top_k is 9.* 8 experts"),
        ("deepseek_v2", "published", nothing, {"norm_topk_prob": True}, r"norm_topk_prob with deepseek_v2"),
        ("deepseek_v2", "published", nothing, {"topk_method": "other"}, r"topk_method 'other'; need greedy"),
        ("deepseek_v3", "published", nothing, {"scoring_func": "softmax"}, r"scoring_func 'softmax'"),
        ("mixtral", "published", nothing, {"hidden_size": "wide"}, "a value that does not fit: .* 'wide'"),
        ("mixtral", "published", nothing, {"dtype": "float64"}, r"'float64' in config\.json; need bfloat16 or"),
        *(
            ("mixtral", "published", nothing, {"quantization_config": given}, "size .*; need null|7; need an object")
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
    refused("layer", load_layer, directory, 0, says=r"layer 0 .* no router .*layers with one: 1$")
    for rank, world, argument in [(2, 2, "rank"), (-1, 2, "rank"), (0, 0, "rank"), (0, 3, "world")]:
        refused(argument, load_layer, directory, LAYER, rank=rank, world=world)
    wrong = {"directory": None, "dtype": torch.int8, "layer": "1", "rank": None, "world": 2.0, "config": {}}
    for name, value in wrong.items():
        given = {"directory": directory, "layer": LAYER} | {name: value}
        refused(name, load_layer, **given, says=f"^{name} is .*; (it must be|need) ")
    in_files = functools.partial(refused, "directory", load_layer, tmp_path, LAYER)
    in_files(says=r"config\.json does not exist")
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    in_files(says=r"neither model\.safetensors\.index\.json nor a \.safetensors")
    for text, message in (
        *((json.dumps({"weight_map": {"a": outside}}), f"names '{outside}', which is not a file in it")
          for outside in ("../other.safetensors", "/etc/passwd")),
        ("[1]", "contains a list"),
        ("{", "cannot be read"),
        ("{}", "no weight_map"),
        ("\0", "cannot be read"),
    ):  # fmt: skip
        (tmp_path / "model.safetensors.index.json").write_text(text)
        in_files(says=message)


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
    """From the sizes, and keys without effect in published files, the layer is that of transformers' config class."""
    sizes = ("hidden_size", "moe_intermediate_size", "intermediate_size", "num_experts_per_tok", "num_experts")
    sizes += ("n_routed_experts", "num_local_experts", "shared_expert_intermediate_size", "n_shared_experts")
    sizes += ("moe_topk", "moe_k", "moe_num_experts", "moe_num_shared_experts", "moe_shared_expert_intermediate_size")
    sizes += ("num_experts_per_token", "num_shared_experts", "expert_ffn_hidden_size")
    given = {name: value for name, value in config_of(kind).items() if name in sizes}
    if kind in ("deepseek_v3", "deepseek_v32", "bailing_hybrid"):
        given |= {"n_group": 4, "topk_group": 2}
    whole = getattr(transformers, CONFIG_MAPPING_NAMES[kind])(**given).to_dict()
    more = {"pruned_heads": {}, "top_k": 50, "norm_eps": 1e-5, "moe_quantize": "w8a8_dynamic", "no_kda_lora": True}
    more |= {"for_llm_compressor": False, "cache_implementation": "hybrid", "use_cla": False}
    assert moe_config({"model_type": kind, **given, **more}) == moe_config(whole)


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
    assert name in values or moe_config({**values, name: None}) == plain
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


# ---- ranks, kept codes, and named mistakes


LAYOUTS = [(kind, "published") for kind in ALL_MODELS] + [(kind, "fused") for kind in (*MODELS, *MORE_MODELS)]


@pytest.mark.parametrize(("kind", "layout"), [*LAYOUTS, *((kind, "") for kind in FORMATS)])
def test_each_rank_reads_its_own_experts_only(kind: str, layout: str, tmp_path: Path) -> None:
    """Matrices, scales and biases, and together the ranks every byte once; ``layout``: of a model's file."""
    directory, layer, experts, world = tiny(kind).write(tmp_path) if not layout else tmp_path, 0, E, 2
    if layout:
        directory, layer, experts, world = saved(kind, layout).directory, LAYER, saved(kind, layout).experts, 4

    def reads_of(**place: int) -> dict[Any, int]:
        """The bytes of the experts' parts that are read, by expert or experts, and name."""
        loaded, found = load_layer(directory, layer, **place), dict[Any, int]()
        assert loaded.bytes_read == sum(read.bytes for read in loaded.reads)
        for read in loaded.reads:
            match = re.search(r"experts\.(\d+)\.", read.name)
            part = (int(match[1]), int(match[1]) + 1) if match else read.rows
            assert part or not re.search(r"\.experts\.|_linear\.weight", read.name), read
            if part and ("W4A8" in kind or not read.name.endswith("_offset")):  # all ranks read whether these are zero
                assert (*part, read.name) not in found, read
                found[(*part, read.name)] = read.bytes
        return found

    own_bytes, local = 0, experts // world
    for rank in range(world):
        own = reads_of(rank=rank, world=world)
        assert {each for first, end, _ in own for each in range(first, end)} == {
            *range(rank * local, (rank + 1) * local)
        }
        own_bytes += sum(own.values())
    assert own_bytes == sum(reads_of().values())


@pytest.mark.parametrize("kind", [*KEPT_INT8, *KEPT_INT4, "fp8 by block", "fp8 by channel, quant_method fp8"])
@pytest.mark.parametrize("left", [True, False])
def test_a_shared_expert_is_left_in_float_or_read_as_the_others(kind: str, left: bool, tmp_path: Path) -> None:
    """An ignore list leaves it and its gate: the same bits as in the file. Else it is the formula's value."""
    made, base, exact = tiny(kind).changed(), f"{BLOCK}.shared_expert", list[Tensor]()
    made.config |= {"model_type": "qwen2_moe", "shared_expert_intermediate_size": INNER}
    made.tensors[f"{base}_gate.weight"] = torch.randn(1, H)
    for part, shape in (("gate", (INNER, H)), ("up", (INNER, H)), ("down", (H, INNER))):
        name = f"{base}.{part}_proj.weight"
        made.tensors[name] = torch.randn(shape)
        exact.append(made.tensors[name].double() if left else FORMATS[kind][0](made.tensors, name))
    if made.description is not None:
        scheme = "FLOAT" if left else made.description["model_quant_type"]
        made.description |= {name: scheme for name in made.tensors if f"{base}." in name}
        made.description[f"{base}_gate.weight"] = "FLOAT"
    elif left and "config_groups" in made.config["quantization_config"]:
        made.config["quantization_config"]["ignore"] += [r"re:.*\.shared_expert\..*", r"re:.*shared_expert_gate$"]
    got = load_layer(made.write(tmp_path), 0, dtype=torch.float32).tensors
    assert torch.equal(got["shared_gate"].flatten(), made.tensors[f"{base}_gate.weight"].flatten())
    assert ("w_down_scale" in got) == (kind in (*KEPT_INT8, *KEPT_INT4))
    assert torch.equal(got["shared_gate_up"], torch.cat(exact[:2]).t().float())
    assert torch.equal(got["shared_down"], exact[2].t().float())


@pytest.mark.parametrize("kind", [*KEPT_INT8, *KEPT_INT4])
def test_codes_stay_with_their_scales_and_int4_with_its_correction(kind: str, tmp_path: Path) -> None:
    made = tiny(kind)
    got = load_layer(made.write(tmp_path), 0, dtype=torch.float32)
    for name, exact in (("w_gate_up", made.gate_up), ("w_down", made.down)):
        for expert, values in enumerate(exact):
            stored, scale = got.tensors[name][expert], got.tensors[f"{name}_scale"][expert].double()
            groups = scale.reshape(-1, values.shape[1])
            wide = groups.repeat_interleave(len(values) // len(groups), 0)
            codes = stored if kind in KEPT_INT8 else unpack_int4(stored)
            assert torch.equal(codes, (values / wide).round().to(torch.int8))
            if kind in KEPT_INT4:
                correction = got.tensors[f"{name}_correction"][expert]
                torch.testing.assert_close(correction.double(), 8 * values.sum(0), rtol=1e-5, atol=1e-5)
    if kind in KEPT_INT4 and "float rows" not in kind:
        names = [read.name for read in got.reads]
        assert len(names) == len(set(names))  # nothing is read twice


@pytest.mark.parametrize("kind", ["int4 in bytes", "ModelSlim W4A8, older"])
def test_an_int4_in_a_byte_may_be_the_least_number(kind: str, tmp_path: Path) -> None:
    values, name = [], f"{BLOCK}.experts.2.down_proj.weight"
    for code in (-8, -4):
        made = tiny(kind).changed()
        made.tensors[name] = made.tensors[name].clone()
        made.tensors[name][5, 1] = code
        loaded = load_layer(made.write(tmp_path), 0, dtype=torch.float32, dequantize=True).tensors
        values.append(float(loaded["w_down"][2, 1, 5]))
    assert values[0] == 2 * values[1] < 0


def test_a_group_size_of_all_columns_needs_no_second_scales(tmp_path: Path) -> None:
    made = tiny("ModelSlim W4A8").changed()
    described({"group_size": H})(made)
    load_layer(made.write(tmp_path), 0)


def test_the_bias_of_w4a8_is_the_files(tmp_path: Path) -> None:
    made = tiny("ModelSlim W4A8").changed()
    plain = load_layer(made.write(tmp_path), 0).tensors
    made.tensors |= {name: 2 * value for name, value in made.tensors.items() if name.endswith("scale_bias")}
    for name, value in load_layer(made.write(tmp_path), 0).tensors.items():
        assert torch.equal(value, plain[name] * (2 if name.endswith("_correction") else 1))


@pytest.mark.parametrize("packed", [False, True])
def test_integers_of_all_experts_in_one_tensor_are_refused(packed: bool, tmp_path: Path) -> None:
    """Nobody publishes them so: ModelSlim's and compressed-tensors' files have a matrix an expert."""
    made = tiny("fused").changed()
    for name in (f"{BLOCK}.experts.gate_up_proj", f"{BLOCK}.experts.down_proj"):
        whole = made.tensors.pop(name)
        codes = {f"{name}_packed": torch.zeros(E, 4, 4, dtype=torch.int32)} if packed else {name: whole.to(torch.int8)}
        made.tensors |= codes | {f"{name}_scale": torch.ones(E, whole.shape[1], 1)}
    made.config["quantization_config"] = compressed("int-quantized", INT8, TOKENS, ignore=[])
    with pytest.raises(ArgumentError, match=r"has integers in .*experts\.gate_up_proj for all experts; int8 and"):
        load_layer(made.write(tmp_path), 0)


def test_matrices_are_read_once_where_not_all_experts_are_int8(tmp_path: Path) -> None:
    """One expert of one rank in float makes all experts of all ranks floats, and no matrix is read for nothing."""
    with_int8(0, 2, 3).write(tmp_path)
    for rank in range(2):
        loaded = load_layer(tmp_path, 0, rank=rank, world=2)
        names = [read.name for read in loaded.reads]
        assert "w_down_scale" not in loaded.tensors and len(names) == len(set(names))


# ---- what is refused: by the rank whose expert it is, or on every rank alike

Change = Callable[[Tiny], Any]
UP = f"{BLOCK}.experts.3.up_proj.weight"


def put(name: str, value: Tensor) -> Change:
    return lambda made: made.tensors.update({name: value})


def pop(name: str) -> Change:
    return lambda made: made.tensors.pop(name)


def filled(**numbers: float) -> Change:
    """One number in all places of the tensors that belong to ``UP``, by the ends of their names."""
    return lambda made: [made.tensors.update({UP + end: like(made.tensors[UP + end], n)}) for end, n in numbers.items()]


def like(tensor: Tensor, number: float) -> Tensor:
    """All of one number; of fp8 its byte."""
    return torch.full_like(tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor, number).view(tensor.dtype)


def configured(**values: Any) -> Change:
    return lambda made: made.config.update(values)


def quantized(**values: Any) -> Change:
    return lambda made: made.config["quantization_config"].update(values)


def described(values: dict[str, Any]) -> Change:
    return lambda made: made.description.update(values)  # type: ignore[union-attr]


def groups_of_24(made: Tiny) -> None:
    """The last group is shorter; its scales would be read as those of equal groups."""
    made.config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 24
    made.tensors |= {name: value[:, : 3 if "down" not in name else 2] for name, value in made.tensors.items()
                     if name.endswith("_scale")}  # fmt: skip


BY_OWNER: list[tuple[str, Change, str]] = [
    ("ModelSlim", pop(f"{UP}_offset"), r"has no tensor .*up_proj\.weight_offset"),
    ("ModelSlim", put(UP, torch.zeros(32, 64)), r"torch\.float32; need torch\.int8"),
    ("int8 by channel", put(f"{UP}_scale", torch.ones(32)),
     r"weight_scale of \(32,\); config\.json's numbers make it \(32, 1\)"),
    ("ModelSlim W4A8", put(UP, torch.zeros(32, 64).char()),
     r"up_proj\.weight of \(32, 64\); config\.json's numbers make it \(16, 64\)"),
    ("ModelSlim W4A8 by group", pop(f"{UP}_scale_second"),
     r"has no .*up_proj\.weight_scale_second, though quant_model_description\.json says group_size 8"),
    ("ModelSlim W4A8 by group", put(f"{UP}_scale_second", torch.ones(32, 5)),
     r"scale_second of 5 groups, which do not divide 64 columns"),
    *((kind, filled(**{"": code}), r"up_proj\.weight with codes outside of int4")
      for kind in ("ModelSlim W4A8, older", "int4 in bytes") for code in (-9, 8)),
    *(("ModelSlim W4A8 by group", filled(**{end: 1}), rf"up_proj\.weight{end} that is not zero")
      for end in ("_offset", "_offset_second")),
    ("int4 with zero points", put(f"{UP}_zero_point", torch.zeros(32, 8)),
     r"weight_zero_point of \(32, 8\); config\.json's numbers make it \(4, 8\)"),
    *(("fp8 by block, quant_method fp8", put(f"{UP}_scale_inv", torch.ones(32, 4).to(dtype)),
       rf"up_proj\.weight_scale_inv of {dtype}; need torch\.float32 or ")
      for dtype in (torch.uint8, torch.int8, torch.int32)),
    ("fp8 by channel, quant_method fp8", pop(f"{UP}_scale"),
     r"has no tensor .*up_proj\.weight_scale_inv \(nor .*up_proj\.weight_scale\)"),
    ("fp8 by channel, quant_method fp8", put(f"{UP}_scale", torch.ones(5, 1)),
     r"weight_scale of \(5, 1\); config\.json's numbers make it \(32, 1\) or \(32,\) or \(1, 64\)"),
    ("int4 by group", put(f"{UP}_shape", torch.tensor([32, 40])),
     r"weight_shape \[32, 40\]; config\.json's numbers make it \[32, 64\]"),
    ("int4 by group", put(f"{UP}_packed", torch.zeros(32, 5).int()),
     r"weight_packed of \(32, 5\); config\.json's numbers make it \(32, 8\)"),
    *((kind, filled(**numbers), r"experts\.3\.up_proj\.weight.* not finite") for kind, numbers in (
        ("fp8 by channel", {"": 127}),  # the byte of e4m3's NaN
        ("mxfp8", {"": 127}),
        ("fp8 by block", {"_scale": 3e38}),
        ("int8 by tensor", {"_scale": 3e38}),
        ("ModelSlim with offsets", {"_scale": 3e38}),
        ("ModelSlim W4A8 by group", {"_scale": 3e38, "_scale_second": 10}),
    )),
]  # fmt: skip
ON_EVERY_RANK: list[tuple[str, Change, str]] = [
    *(("published", put(f"{BLOCK}.{name}", torch.zeros(4)), rf"has {BLOCK}\.{name}, which a layer with .* does not use")
      for name in ("gate.bias", "experts.2.down_proj.bias", "experts.3.up_proj.weight_scale",
                   "experts.4.up_proj.weight", "new.weight")),
    ("fp4 of deepseek_v4", configured(moe_intermediate_size=48),
     r"w2\.weight in fp4 with 48 columns by config\.json's numbers; need a multiple of 32"),
    ("ModelSlim W4A8", configured(moe_intermediate_size=31), r"gate_proj\.weight of 31 rows; need an even number"),
    ("ModelSlim W4A8", described({"group_size": H - 1}), f"says group_size {H - 1}"),
    ("ModelSlim", described({UP: "W8A8_MIX"}),
     r"says 'W8A8_MIX' of .*up_proj\.weight .*need FLOAT, W8A8_DYNAMIC or W4A8_"),
    ("ModelSlim", lambda made: made.description.pop(UP), r"up_proj\.weight of torch\.int8, but neither"),
    ("int4 by group", quantized(ignore=[r"re:.*experts\.3\.up_proj"]),
     r"experts\.3\.up_proj\.weight_packed, which quantization_config ignores"),
    ("int4 in bytes by group", groups_of_24, r"group_size 24 of .*gate_proj\.weight .* does not divide its 64 columns"),
]  # fmt: skip


@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize(
    ("kind", "change", "text", "first"), [*((*row, 1) for row in BY_OWNER), *((*row, 0) for row in ON_EVERY_RANK)]
)
def test_what_a_rule_forbids_is_named(
    kind: str, change: Change, text: str, first: int, dequantize: bool, tmp_path: Path
) -> None:
    made = tiny(kind).changed()
    change(made)
    for error in outcomes(made.write(tmp_path), dequantize=dequantize)[first:]:
        assert re.search(text, str(error)), error


def test_a_modelslim_description_leaves_a_matrix_in_float(tmp_path: Path) -> None:
    made, name = tiny("ModelSlim").changed(), f"{BLOCK}.experts.1.down_proj.weight"
    del made.tensors[f"{name}_scale"], made.tensors[f"{name}_offset"]
    made.tensors[name] = torch.randn(H, INNER)
    made.down = [*made.down]
    made.down[1] = made.tensors[name].t().double()
    described({name: "FLOAT"})(made)
    check_values(made, tmp_path)  # not all experts are int8: all become floats
