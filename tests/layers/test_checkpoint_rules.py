"""The rules of docs/checkpoints.md, applied to every format: right numbers, or a typed error on every rank alike."""

from __future__ import annotations

import json
import random
import re
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_checkpoints import (
    BLOCK,
    FP8_CHANNEL,
    INT4,
    KEPT_INT4,
    KEPT_INT8,
    KINDS,
    TOKENS,
    E,
    Outcome,
    Tiny,
    check_values,
    is_right,
    outcomes,
    tiny,
    with_int8,
)
from torch import Tensor

from ascend_moe.checkpoint import kept_bits, load_layer, patterns
from ascend_moe.checkpoint.files import FP8, INDEX, SCALES
from ascend_moe.checkpoint.patterns import Names
from ascend_moe.errors import ArgumentError


def alike(loaded: list[Outcome]) -> bool:
    """Whether both ranks have an error, or the same tensors in the same dtypes and shapes."""
    kinds = [
        None if isinstance(each, str) else {name: (value.dtype, value.shape) for name, value in each.items()}
        for each in loaded
    ]
    return kinds[0] == kinds[1]


def scales_of(made: Tiny) -> list[str]:
    """The scales, offsets and biases beside codes."""
    beside = [name for name in made.tensors if "scale" in name or "offset" in name]
    return [name for name in beside if made.tensors[name].dtype in (*SCALES, torch.uint8)]


def corrupted(value: Tensor, number: float) -> Tensor:
    """The same with one number that is not finite; of exponents the byte that is none."""
    value = value.clone()
    flat = value.view(torch.uint8).reshape(-1) if value.element_size() == 1 else value.reshape(-1)
    flat[-1] = 255 if value.element_size() == 1 else number
    return value


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_is_the_formulas_value_on_every_rank(kind: str, tmp_path: Path) -> None:
    made = tiny(kind)
    check_values(made, tmp_path, dequantize=True)


def test_fused_transposed_weights_are_read(tmp_path: Path) -> None:
    made = tiny("fused").changed()
    for name in [name for name in made.tensors if ".experts." in name]:
        made.tensors[name] = made.tensors[name].transpose(1, 2)
    assert len({*made.gate_up[0].shape}) == 1  # gate_up alone is square
    check_values(made, tmp_path)


@pytest.mark.parametrize(
    ("kind", "dequantize"),
    [(kind, kept) for kind in KINDS if scales_of(tiny(kind)) for kept in {kind not in (*KEPT_INT8, *KEPT_INT4), True}],
)
def test_a_scale_or_offset_that_is_no_number_is_refused(kind: str, dequantize: bool, tmp_path: Path) -> None:
    """By the rank whose expert it is: others do not read it."""
    ends = {re.sub(r".*\.\d+\.", "", name): name for name in scales_of(tiny(kind))}
    for number, name in enumerate(ends.values()):
        made = tiny(kind).changed()
        made.tensors[name] = corrupted(made.tensors[name], (float("nan"), float("inf"), -float("inf"))[number % 3])
        last = outcomes(made.write(tmp_path), dequantize=dequantize)[1]
        assert isinstance(last, str) and name in last and "not finite" in last


@pytest.mark.parametrize(("row", "inner"), [(36, 32), (64, 30)])
def test_int4_of_rows_that_no_word_divides_becomes_floats(row: int, inner: int, tmp_path: Path) -> None:
    """Int4 is kept eight in an int32, of a row and of gate and up side by side."""
    made = tiny("int4 in bytes").changed()
    made.config |= {"hidden_size": row, "moe_intermediate_size": inner}
    for name, value in made.tensors.items():
        shape = (row, inner) if "down_proj" in name else (inner, row) if "experts" in name else (E, row)
        made.tensors[name] = value[: shape[0], : shape[1]]
    made.gate_up = [torch.cat([half[:row, :inner] for half in each.chunk(2, 1)], 1) for each in made.gate_up]
    made.down = [each[:inner, :row] for each in made.down]
    check_values(made, tmp_path)


def test_ids_of_a_hash_table_are_experts(tmp_path: Path) -> None:
    made = tiny("fp4 of deepseek_v4").changed()
    made.tensors.pop(f"{BLOCK}.gate.e_score_correction_bias")
    for least, right in ((0, True), (-1, False), (1, False)):
        made.tensors[f"{BLOCK}.gate.tid2eid"] = torch.arange(8).reshape(4, 2) % E + least
        for rank, loaded in enumerate(outcomes(made.write(tmp_path))):
            assert is_right(loaded, rank, made) if right else "tid2eid with ids that are not 0 .. 3" in loaded


def test_the_shared_expert_of_deepseek_v4_is_fp8_by_block(tmp_path: Path) -> None:
    made = tiny("fp4 of deepseek_v4").changed()
    made.config["quantization_config"]["weight_block_size"] = [16, 16]
    for part, shape in (("w1", (32, 64)), ("w2", (64, 32)), ("w3", (32, 64))):
        name = f"{BLOCK}.shared_experts.{part}"
        made.tensors[f"{name}.weight"] = torch.randn(shape).to(FP8)
        made.tensors[f"{name}.scale"] = torch.full((shape[0] // 16, shape[1] // 16), 128, dtype=torch.uint8)
    made.config["n_shared_experts"] = 1
    for loaded in outcomes(made.write(tmp_path)):
        assert not isinstance(loaded, str), loaded
        assert torch.equal(loaded["shared_down"], 2 * made.tensors[f"{BLOCK}.shared_experts.w2.weight"].float().t())


def test_codes_with_unlike_groups_become_floats(tmp_path: Path) -> None:
    """Of two experts, and of an expert's gate and up."""
    for part in (r"experts\.3\.", r"experts\.\d\.gate"):
        made, other = tiny("int4 in bytes by group").changed(), tiny("int4 in bytes")
        groups = made.config["quantization_config"]["config_groups"]
        groups["channel"] = {
            **other.config["quantization_config"]["config_groups"]["group_0"],
            "targets": [f"re:.*{part}"],
        }
        made.tensors |= {name: value for name, value in other.tensors.items() if re.search(part, name)}
        gates = [torch.cat([a[:, :32], b[:, 32:]], 1) for a, b in zip(other.gate_up, made.gate_up, strict=True)]
        made.gate_up = gates if "gate" in part else [*made.gate_up[:3], other.gate_up[3]]
        made.down = made.down if "gate" in part else [*made.down[:3], other.down[3]]
        check_values(made, tmp_path)
        assert kept_bits(tmp_path, 0) == 0


# ---- compressed-tensors


@pytest.mark.parametrize(
    "ignore",
    [
        [f"{BLOCK}.experts.{e}.{part}_proj" for e in (2, 3) for part in ("gate", "up", "down")],
        [r"re:.*experts\.[23]\..*"],
        [r"re:model\.layers\.0\.mlp\.experts\.[23]"],
        [r"re:^(?!.*experts\.[01]\.).*$"],
        [],
    ],
    ids=str,
)
def test_experts_left_in_float_load_on_ranks_without_others(ignore: list[str], tmp_path: Path) -> None:
    made = with_int8(0, 1)
    made.config["quantization_config"]["ignore"] = [r"re:.*mlp\.gate$", *ignore]
    check_values(made, tmp_path)
    assert kept_bits(tmp_path, 0) == 0


def test_a_groups_own_format_and_its_targets_go_before_the_files(tmp_path: Path) -> None:
    """Names go before patterns, these before classes: down is packed int4, one expert's int8, the others are fp8."""
    made, others = tiny("fp8 by channel").changed(), (tiny("int4 by group"), tiny("int8 by channel"))
    said = made.config["quantization_config"]
    groups = [other.config["quantization_config"]["config_groups"]["group_0"] for other in others]
    said["config_groups"]["packed"] = groups[0] | {"format": "pack-quantized", "targets": [r"re:.*\.down_proj$"]}
    named = groups[1] | {"format": "int-quantized", "targets": [f"{BLOCK}.experts.1.down_proj"]}
    said["config_groups"]["named"] = named
    made.down = [*others[0].down]
    made.down[1] = others[1].down[1]
    for name in [name for name in made.tensors if "down_proj" in name]:
        del made.tensors[name]
    for other, wanted in ((others[0], r"experts\.[023]\.down"), (others[1], r"experts\.1\.down")):
        made.tensors |= {name: value for name, value in other.tensors.items() if re.search(wanted, name)}
    check_values(made, tmp_path)
    said["config_groups"]["other"] = named | {"targets": [r"re:.*experts\.\d\.down_proj"]}
    for error in outcomes(made.write(tmp_path)):
        assert "the groups packed and other" in error and "differ" in error


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"quant_method": "gptq"}, "quant_method 'gptq' .*supported are fp8, mxfp4, compressed-tensors, and ModelSlim"),
        ({"quant_method": "awq"}, "quant_method 'awq'"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
        ({"input_activations": [1]}, r"input_activations of group_0 \[1\] in quantization_config; need an object"),
        ({"input_activations": {"dynamic": False}}, "dynamic False in input_activations of group_0"),
        ({"input_activations": {"num_bits": 8}}, "input_activations of group_0 without dynamic true"),
        ({"input_activations": {"dynamic": "local"}}, "dynamic 'local' in input_activations"),
        ({"output_activations": {"num_bits": 8}}, "output_activations .* in a group of group_0"),
        ({"weights": {"num_bits": 8, "symmetric": 1}}, "symmetric 1 in weights of group_0, which is not supported"),
        ({"weights": {"bits": 8}}, "bits 8 in weights of group_0, which is not supported; supported keys: num_bits"),
        ({"weights": None}, "weights of group_0 None"),
        ({"targets": "Linear"}, "targets of group_0 'Linear' in quantization_config; need a list of strings"),
        ({"ignore": [5]}, r"ignore \[5\] in quantization_config; need a list of strings"),
        ({"config_groups": {"W8A8": ["Linear"]}}, r"\{'W8A8': \['Linear'\]\} in config_groups"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config .* need None or {}"),
        ({"new_key": 1}, "new_key 1 in quantization_config of compressed-tensors, which is not supported"),
        ({"format": "float-quantized", "weights": FP8_CHANNEL | {"symmetric": False}}, "symmetric False of float-q"),
        ({"format": "pack-quantized", "weights": INT4 | {"group_size": None}}, "has group_size"),
        ({"format": "mxfp8-quantized", "weights": FP8_CHANNEL | {"strategy": "group", "group_size": 48}}, "48 .* 32"),
        ({"config_groups": None}, "has config_groups None"),
        ({"ignore": [r"re:.*experts\.\d\.up"]}, "up_proj.weight of torch.int8"),
    ],
    ids=str,
)
def test_what_a_quantization_config_may_not_say_is_named(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    made = tiny("int8 by channel").changed()
    said = made.config["quantization_config"]
    group = said["config_groups"]["group_0"]
    for key, value in change.items():
        (group if key in ("input_activations", "output_activations", "weights", "targets") else said)[key] = value
    for error in outcomes(made.write(tmp_path)):
        assert re.search(text, str(error))


def test_int8_codes_stay_with_symmetric_int8_activations_by_token_only(tmp_path: Path) -> None:
    for change, bits in (
        *(({}, 8), ({"symmetric": True}, 8), ({"symmetric": False}, 0), ({"strategy": "tensor"}, 0)),
        *(({"num_bits": 4}, 0), ({"type": "float"}, 0), (None, 0), ({"strategy": ...}, 0)),
    ):
        made = tiny("int8 by channel").changed()
        group = made.config["quantization_config"]["config_groups"]["group_0"]
        rows = group["input_activations"] | (change or {})
        said = {key: value for key, value in rows.items() if value is not ...}  # without strategy: by tensor
        group["input_activations"] = None if change is None else said
        made.write(tmp_path)
        assert kept_bits(tmp_path, 0) == bits


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_with_one_scale_for_a_matrix_become_floats(bits: int, tmp_path: Path) -> None:
    made = tiny("int8 by tensor").changed()
    made.config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = bits
    assert kept_bits(made.write(tmp_path), 0) == 0


def test_int8_codes_with_several_scales_a_channel_become_floats(tmp_path: Path) -> None:
    made = tiny("int4 in bytes by group").changed()
    group = made.config["quantization_config"]["config_groups"]["group_0"]
    group["weights"]["num_bits"], group["input_activations"] = 8, TOKENS
    check_values(made, tmp_path)
    assert kept_bits(tmp_path, 0) == 0


def test_codes_of_experts_with_biases_become_floats(tmp_path: Path) -> None:
    made, biased = tiny("int8 by channel").changed(), tiny("mxfp4 of gpt_oss")
    made.config = biased.config | {"quantization_config": made.config["quantization_config"]}
    made.tensors = {name: value for name, value in made.tensors.items() if ".experts." in name}
    made.tensors |= {name: value for name, value in biased.tensors.items() if "bias" in name or "router" in name}
    check_values(made, tmp_path)


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("places", [(), ("text",), ("wrapper",), ("text", "wrapper")], ids="+".join)
def test_a_text_configs_quantization_config_goes_first(places: tuple[str, ...], name: str, tmp_path: Path) -> None:
    """Kimi K2.5 publishes it in its text_config; compression_config is the older name."""
    made = tiny("int8 by channel").changed()
    said, text = made.config.pop("quantization_config"), made.config | {"model_type": "qwen3_vl_moe_text", name: None}
    if places:
        made.config = {"model_type": "qwen3_vl_moe", "text_config": text, "dtype": "float16"}
        made.config[name] = {"config_groups": {}}
        (text if "text" in places else made.config)[name] = said
        made.config = made.config if "wrapper" in places else {k: v for k, v in made.config.items() if k != name}
    else:
        made.config[name] = said
    made.write(tmp_path)
    assert kept_bits(tmp_path, 0) == 8
    assert load_layer(tmp_path, 0).dtype == torch.float32  # the text_config's too


# ---- ModelSlim


def test_one_offset_that_is_not_zero_makes_the_experts_of_all_ranks_floats(tmp_path: Path) -> None:
    made, name = tiny("ModelSlim").changed(), f"{BLOCK}.experts.3.down_proj.weight"
    offset = made.tensors[f"{name}_offset"] = made.tensors[f"{name}_offset"].clone()
    offset[5] = 2.0
    made.down = [*made.down]
    made.down[3] = ((made.tensors[name].double() - offset) * made.tensors[f"{name}_scale"].double()).t()
    check_values(made, tmp_path)


# ---- fp8


OF_A_TENSOR = {"(1, 1)": (1, 1), "(1,)": (1,), "()": ()}
OF_A_SQUARE: dict[str, tuple[int, ...]] = {"(N, 1)": (64, 1), "(N,)": (64,), "(1, K)": (1, 64), **OF_A_TENSOR}


@pytest.mark.parametrize(
    ("scale", "end"), [*((each, "_scale") for each in OF_A_SQUARE), *((each, "_scale_inv") for each in OF_A_TENSOR)]
)
def test_scales_of_square_fp8_matrices_are_read_by_their_shape(scale: str, end: str, tmp_path: Path) -> None:
    """A scale a row and a scale a column differ, also where a matrix has as many rows as columns."""
    made = tiny("fp8 by tensor, quant_method fp8").changed()
    made.config |= {"moe_intermediate_size": 64}
    made.config["quantization_config"]["weight_block_size"] = None
    exact = {}
    for name in [name for name in made.tensors if name.endswith("proj.weight")]:
        generator = torch.Generator().manual_seed(len(exact))
        made.tensors[name] = torch.randn(64, 64, generator=generator).to(torch.float8_e4m3fn)
        value = torch.rand(OF_A_SQUARE[scale], generator=generator) + 0.5
        made.tensors[f"{name}_scale"] = value
        made.tensors[f"{name}{end}"] = made.tensors.pop(f"{name}_scale")
        rows = value.double()[:, None] if scale == "(N,)" else value.double()
        exact[name] = (made.tensors[name].double() * rows).t()
    names = [f"{BLOCK}.experts.{expert}." for expert in range(E)]
    made.gate_up = [torch.cat([exact[f"{n}{part}_proj.weight"] for part in ("gate", "up")], 1) for n in names]
    made.down = [exact[f"{name}down_proj.weight"] for name in names]
    check_values(made, tmp_path)


# ---- files

MODELSLIM_INDEX = "quant_model_weights.safetensors.index.json"


def shards(made: Tiny, directory: Path, index: str = INDEX) -> dict[str, list[str]]:
    """Two files, experts 2 and 3 in the second, with their index."""
    files: dict[str, list[str]] = {"a.safetensors": [], "b.safetensors": []}
    for name in made.tensors:
        files["b.safetensors" if re.search(r"experts\.[23]\.", name) else "a.safetensors"].append(name)
    made.write(directory)
    (directory / "model.safetensors").unlink()
    for file, names in files.items():
        save_file({name: made.tensors[name] for name in names}, directory / file)
    if index:
        weights = {name: file for file, names in files.items() for name in names}
        (directory / index).write_text(json.dumps({"weight_map": weights}))
    return files


def test_two_files_with_the_same_tensor_need_an_index(tmp_path: Path) -> None:
    made = tiny("published").changed()
    shards(made, tmp_path, index="")
    assert is_right(outcomes(tmp_path)[0], 0, made)
    name = f"{BLOCK}.experts.1.up_proj.weight"
    save_file({name: made.tensors[name] * 3}, tmp_path / "old.safetensors")
    for error in outcomes(tmp_path):
        assert f"has {name} in a.safetensors and in old.safetensors, but no {INDEX}" in error
    for number in range(2):
        (tmp_path / f"{number}{MODELSLIM_INDEX}").write_text("{}")
    for error in outcomes(tmp_path):
        assert f"has the indices 0{MODELSLIM_INDEX} and 1{MODELSLIM_INDEX}, of which one must be {INDEX}" in error


@pytest.mark.parametrize(
    "kind", ["published", "ModelSlim W4A8 by group", "int4 by group", "fp8 by block", "int8 by channel"]
)
def test_shards_of_other_ranks_may_be_absent(kind: str, tmp_path: Path) -> None:
    index = MODELSLIM_INDEX if "ModelSlim" in kind else INDEX
    shards(tiny(kind), tmp_path, index)
    whole = outcomes(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    first, second = outcomes(tmp_path)
    assert all(torch.equal(value, whole[0][name]) for name, value in first.items())
    assert f"b.safetensors is missing, though {index} names it" in second


def test_offsets_of_all_experts_are_needed_to_keep_codes(tmp_path: Path) -> None:
    shards(tiny("ModelSlim"), tmp_path)
    (tmp_path / "b.safetensors").unlink()
    assert re.search(r"experts\.2\..*_offset in a file that is missing", outcomes(tmp_path)[0])
    assert is_right(outcomes(tmp_path, dequantize=True)[0], 0, tiny("ModelSlim"))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (lambda data: data[: len(data) // 2], "b.safetensors cannot be read: .*; download it again"),
        (lambda data: data[:-1], "b.safetensors cannot be read"),
        (lambda data: b"", "b.safetensors cannot be read"),
        (lambda data: struct.pack("<Q", 1 << 62) + data[8:], "b.safetensors cannot be read"),
        (lambda data: data.replace(b'"F32"', b'"F99"', 1), "b.safetensors cannot be read"),
        (lambda data: data.replace(b"experts.2.up", b"experts.2.xp"), r"experts\.2\.up_proj.*b\.safetensors"),
    ],
)
def test_a_broken_shard_is_named_on_every_rank(content: Callable[[bytes], bytes], text: str, tmp_path: Path) -> None:
    shards(tiny("published"), tmp_path)
    path = tmp_path / "b.safetensors"
    path.write_bytes(content(path.read_bytes()))
    for error in outcomes(tmp_path):
        assert re.search(text, str(error))


def test_links_to_files_are_followed_and_linked_folders_are_not(tmp_path: Path) -> None:
    """Hugging Face's cache has links to ../../blobs; an index must not lead out of the directory."""
    snapshot, blobs = tmp_path / "snapshots" / "1", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    shards(tiny("published"), snapshot)
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / f"{number}")
        path.symlink_to(Path("..") / ".." / "blobs" / f"{number}")
    assert is_right(outcomes(snapshot)[1], 1, tiny("published"))
    (tmp_path / "link").symlink_to(snapshot)
    assert is_right(outcomes(tmp_path / "link")[1], 1, tiny("published"))
    (snapshot / "inside").mkdir()
    (snapshot / "b.safetensors").rename(snapshot / "inside" / "b.safetensors")
    (snapshot / "out").symlink_to(blobs)
    index = json.loads((snapshot / INDEX).read_text())
    (snapshot / INDEX).unlink()
    for folder, right in (("inside", True), ("out", False), ("inside/../../x", False)):
        target = snapshot / folder
        if folder == "inside":
            (target / "b.safetensors").unlink()
            (target / "b.safetensors").symlink_to(blobs / "1")
        moved = {n: f"{folder}/{f}" if f.startswith("b.") else f for n, f in index["weight_map"].items()}
        (snapshot / INDEX).write_text(json.dumps({"weight_map": moved}))
        loaded = outcomes(snapshot)[1]
        assert is_right(loaded, 1, tiny("published")) if right else "not a file in it" in loaded


def test_a_key_that_a_json_file_has_twice_is_refused(tmp_path: Path) -> None:
    path = tiny("published").write(tmp_path) / "config.json"
    path.write_text(path.read_text().replace('"num_experts": 4', '"num_experts": 8, "num_experts": 4'))
    for error in outcomes(tmp_path):
        assert "config.json cannot be read: it has 'num_experts' twice, 8 and 4" in error
    path.write_text(path.read_text().replace('"num_experts": 8', '"num_experts": 4'))
    assert is_right(outcomes(tmp_path)[0], 0, tiny("published"))


def test_a_tensor_of_the_block_that_its_index_does_not_have_is_refused(tmp_path: Path) -> None:
    made = tiny("published").changed()
    made.tensors[f"{BLOCK}.gate.bias"] = torch.zeros(E)
    shards(made, tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    del index["weight_map"][f"{BLOCK}.gate.bias"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    for error in outcomes(tmp_path):
        assert f"has {BLOCK}.gate.bias, which a layer with config.json's numbers does not use" in error


@pytest.mark.parametrize("file", ["config.json", INDEX, "a.safetensors"])
def test_a_pointer_of_git_lfs_is_named(file: str, tmp_path: Path) -> None:
    shards(tiny("published"), tmp_path)
    (tmp_path / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    for error in outcomes(tmp_path):
        assert f"{tmp_path / file} cannot be read: it is a pointer of git-lfs: run git lfs pull" in error


# ---- drawn changes

JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2**62, 1.5, 1e400, float("nan"), "", "word", [], [1], [[1, 2]], {}, {"a": 1},
]  # fmt: skip


def change_tensors(draw: random.Random, made: Tiny) -> bool:
    """Changes a tensor's header or name; whether every rank sees it."""
    name = draw.choice(sorted(made.tensors))
    value, block = made.tensors.pop(name), [each for each in made.tensors if each.startswith(BLOCK)]
    kind = draw.choice(["drop", "rename", "dtype", "shape", "again", "nan"])
    if kind == "rename":
        made.tensors[draw.choice([f"{name}_", f"{name}_scale", name.replace(".0.", ".7."), f"{BLOCK}.x"])] = value
    elif kind == "dtype":
        made.tensors[name] = value.float().to(draw.choice([torch.float64, torch.int16, torch.bool, torch.int64]))
    elif kind == "shape":
        wide = value.view(torch.uint8) if value.element_size() == 1 else value
        other = draw.choice([wide[None], wide.reshape(-1), wide[..., None], wide[:0] if wide.dim() else wide[None]])
        made.tensors[name] = other.contiguous().view(value.dtype)
    elif kind == "again":
        other = draw.choice(block)
        base = draw.choice([name, other.rsplit(".", 1)[0]])
        twin = f"{base}.{draw.choice(['weight_scale_inv', 'bias', 'weight_shape'])}"
        made.tensors |= {name: value, twin: made.tensors.get(twin, torch.ones(1))}
    elif kind == "nan":
        made.tensors[name] = corrupted(value, float("nan")) if name in scales_of(Tiny({name: value}, {})) else value
        return name not in made.tensors or made.tensors[name] is value
    return True


def change_json(draw: random.Random, values: dict[str, Any]) -> None:
    """Another value or none for a key at any level."""
    place: Any = values
    while True:
        key = draw.choice(sorted(place)) if isinstance(place, dict) else draw.randrange(len(place))
        inner = place[key]
        if isinstance(inner, (dict, list)) and inner and draw.random() < 0.8:
            place = inner
            continue
        if isinstance(place, dict) and draw.random() < 0.3:
            del place[key]
            place.update({draw.choice(["other", f"{key}_"]): inner} if draw.random() < 0.5 else {})
        else:
            place[key] = draw.choice(JUNK)
        return


def change_files(draw: random.Random, made: Tiny, directory: Path) -> None:
    """Bytes of a header or of a JSON file, or the length of a file."""
    if draw.random() < 0.5:
        shards(made, directory)
    path = draw.choice(sorted(directory.iterdir()))
    data = bytearray(path.read_bytes())
    kind = draw.choice(["cut", "byte", "byte", "longer"])
    head = len(data) if path.suffix == ".json" else 8 + struct.unpack("<Q", data[:8])[0]
    if kind == "cut":
        data = data[: draw.randrange(len(data))]
    elif kind == "byte":
        data[draw.randrange(head)] = draw.choice(b'0123456789"{}[]:,aFIU8 \x00\xff')
    else:
        data += b"12"
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("cases", [150, pytest.param(6000, marks=pytest.mark.nightly)])
def test_a_changed_checkpoint_is_read_right_or_refused_on_every_rank(cases: int, tmp_path: Path) -> None:
    draw, refused = random.Random(cases), 0
    for case in range(cases):
        kind = draw.choice(KINDS)
        made, everyone = tiny(kind).changed(), True
        directory = tmp_path / f"{case}"
        directory.mkdir()
        way = draw.choice(["tensors", "json", "files"])
        if way == "tensors":
            everyone = change_tensors(draw, made)
        elif way == "json":
            change_json(draw, draw.choice([made.config, made.description or made.config]))
        made.write(directory)
        if way == "files":
            change_files(draw, made, directory)
        loaded = outcomes(directory, dequantize=draw.random() < 0.7)
        context = (case, kind, way, [each if isinstance(each, str) else "" for each in loaded])
        absent = any("is missing, though" in each for each in loaded)  # of an index: only who reads it needs it
        assert alike(loaded) or absent or not everyone, context
        for rank, each in enumerate(loaded):
            refused += isinstance(each, str)
            assert isinstance(each, str) or "w_down_scale" in each or is_right(each, rank, made), context
    assert cases // 2 < refused < 2 * cases


# ---- patterns

MODULES = [f"{BLOCK}.experts.{expert}.{part}_proj" for expert in range(256) for part in ("gate", "up", "down")]


def drawn_pattern(draw: random.Random, depth: int = 2) -> str:
    """A regular expression, which may be wrong."""
    branches = []
    for _ in range(draw.choice([1, 1, 2, 3])):
        text = ""
        for _ in range(draw.randint(0, 4)):
            inner = draw.random() < 0.3 and depth
            kind = rf"\{draw.choice('dwsDWS')}"
            atom = draw.choice(["a", "b", "c", ".", r"\.", "[ab]", "[^a]", "1", "^", "$", "z", kind, kind])
            text += f"{draw.choice(['(', '(?:'])}{drawn_pattern(draw, depth - 1)})" if inner else atom
            text += draw.choice(["", "", "", "*", "+", "?", "{2}", "{1,2}", "{1,}", "*?"])
        branches.append(text)
    return "|".join(branches)


@pytest.mark.parametrize("cases", [400, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_patterns_match_as_in_re_or_are_refused(cases: int) -> None:
    draw = random.Random(cases)
    names = sorted({"".join(draw.choices("ab1. c", k=draw.randint(0, 7))) for _ in range(60)})
    compared = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(cases):
            ahead = draw.choice(["", "", "^", f"(?!{drawn_pattern(draw, 1)})", f"^(?={drawn_pattern(draw, 1)})"])
            pattern = ahead + drawn_pattern(draw)
            try:
                found = Names(names).matching(pattern)
            except ArgumentError as error:
                assert "is not supported" in str(error)
                continue
            assert found == {name for name in names if re.match(pattern, name)}, pattern
            compared += 1
    assert compared > cases // 5


@pytest.mark.parametrize("pattern", ["(.+)+zzz$", "(a|a|m|.)*zzz$", ".*" * 300 + "z", "(.*.*.*|x)*(z|zz)"])
def test_patterns_that_backtrack_for_ever_elsewhere_end_soon(pattern: str, tmp_path: Path) -> None:
    """Also as an ignore list of a file, and with 200 patterns more."""
    start = time.thread_time()
    names = Names(MODULES)
    assert names.matching(pattern) == set()
    for layer in range(200):
        assert not names.matching(rf".*layers\.{layer + 1}\.self_attn\.[qkvo]_proj$")
    assert names.matching(r".*mlp\.experts\.25[0-5]\.(gate|up)_proj$") == {
        name for name in MODULES if re.search(r"\.25[0-5]\.(gate|up)", name)
    }
    assert time.thread_time() - start < 5
    made = tiny("int8 by channel").changed()
    made.config["quantization_config"]["ignore"] += [f"re:{pattern}"]
    assert is_right(outcomes(made.write(tmp_path), dequantize=True)[1], 1, made)


@pytest.mark.parametrize(
    "pattern",
    [r"(a)\1", "a(?=b)", "(?i)a", "(?<=a)b", r"\bgate", "a++", "(a", "a)", "[a", "[[a]b]", "*", "a{3,2}",
     "a" * 10_001, "(" * 51 + ")" * 51,
     "((.+)+)+", "(?P<n>a)", "(?!a)b|c"],
)  # fmt: skip
def test_patterns_that_are_not_read_are_named(pattern: str) -> None:
    with pytest.raises(ArgumentError, match=r"has the pattern .* in quantization_config; .* is not supported"):
        Names(["gate"]).matching(pattern)


def test_patterns_that_need_too_much_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MOST_WORK", 1_000_000)
    names = Names(MODULES)
    with pytest.raises(ArgumentError, match="patterns in quantization_config that take too long"):
        for number in range(1000):
            names.matching(f"({'|'.join('abcdefgh.') * 50})*{number}x")
