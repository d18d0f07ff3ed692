"""Quantised files as they are published: each is written from its format's description, loaded, and compared."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import LAYER, saved
from quantized_files import (
    EXPERT,
    FORMATS,
    FP8,
    INT4,
    INT8,
    KEPT_INT4,
    KEPT_INT8,
    TOKENS,
    WITH_SHARED,
    Tensors,
    compressed,
    written,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from ascend_moe.checkpoint import load_layer
from ascend_moe.errors import ArgumentError
from ascend_moe.experts.int4 import unpack_int4

DOWN = f"model.layers.{LAYER}.mlp.experts.2.down_proj.weight"


def matrix(exact: Tensors, expert: int, *parts: str) -> Tensor:
    """(K, N) as the layer has it."""
    names = [f"model.layers.{LAYER}.mlp.experts.{expert}.{part}_proj.weight" for part in parts]
    return torch.cat([exact[name] for name in names]).t()


@pytest.mark.parametrize("kind", FORMATS)
def test_each_rank_reads_its_own_experts_matrices_and_scales_only(kind: str, tmp_path: Path) -> None:
    """Together the ranks read every tensor of the experts once."""
    directory, _ = written(kind, tmp_path)
    there = [name for name in load_file(directory / "model.safetensors") if f"layers.{LAYER}.mlp.experts." in name]
    read: list[str] = []
    for rank in range(4):
        reads = load_layer(directory, LAYER, rank=rank, world=4).reads
        names = [each.name for each in reads if ".experts." in each.name]
        if kind.startswith("ModelSlim") and "W4A8" not in kind:  # whether all offsets are zero decides on every rank
            names = [name for name in names if not name.endswith("_offset")]
        owners = {int(re.search(r"experts\.(\d+)\.", name)[1]) // 2 for name in names}  # type: ignore[index]
        assert owners == {rank}
        read += names
    offsets = [name for name in there if name.endswith("_offset") and "W4A8" not in kind]
    assert sorted([*read, *offsets]) == sorted(there)


@pytest.mark.parametrize("kind", [*KEPT_INT8, *KEPT_INT4, "fp8 by block", "fp8 by channel, quant_method fp8"])
@pytest.mark.parametrize("left", [True, False])
def test_a_shared_expert_is_left_in_float_or_read_as_the_others(kind: str, left: bool, tmp_path: Path) -> None:
    """An ignore list leaves it and its gate: the same bits as in the file. Else it is the formula's value."""
    directory, exact = written(kind, tmp_path, model="qwen2_moe", names=EXPERT if left else WITH_SHARED)
    path = directory / "config.json"
    values = json.loads(path.read_text())
    if left and "config_groups" in values.get("quantization_config", {}):
        values["quantization_config"]["ignore"] += [r"re:.*\.shared_expert\..*", r"re:.*shared_expert_gate$"]
        path.write_text(json.dumps(values))
    got = load_layer(directory, LAYER, dtype=torch.float32).tensors
    plain = load_layer(saved("qwen2_moe").directory, LAYER, dtype=torch.float32).tensors
    assert torch.equal(got["shared_gate"], plain["shared_gate"])
    assert torch.equal(got["gate_weight"], plain["gate_weight"])
    assert ("w_down_scale" in got) == (kind in (*KEPT_INT8, *KEPT_INT4))
    if left:
        wanted = (plain["shared_gate_up"], plain["shared_down"])
    else:
        base = f"model.layers.{LAYER}.mlp.shared_expert"
        gate, up, down = (exact[f"{base}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        wanted = (torch.cat([gate, up]).t().float(), down.t().float())
    assert torch.equal(got["shared_gate_up"], wanted[0]) and torch.equal(got["shared_down"], wanted[1])


@pytest.mark.parametrize("kind", [*KEPT_INT8, *KEPT_INT4])
def test_codes_stay_with_their_scales_and_int4_with_its_correction(kind: str, tmp_path: Path) -> None:
    directory, exact = written(kind, tmp_path)
    got = load_layer(directory, LAYER, dtype=torch.float32)
    for name, parts in (("w_gate_up", ("gate", "up")), ("w_down", ("down",))):
        stored, scale = got.tensors[name], got.tensors[f"{name}_scale"]
        for expert in range(8):
            values = matrix(exact, expert, *parts)
            codes = stored[expert] if kind in KEPT_INT8 else unpack_int4(stored[expert])
            groups = scale[expert].double().reshape(-1, values.shape[1])
            wide = groups.repeat_interleave(len(values) // len(groups), 0)
            assert torch.equal(codes, (values / wide).round().to(torch.int8))
            if kind in KEPT_INT4:
                correction = got.tensors[f"{name}_correction"][expert]
                torch.testing.assert_close(correction.double(), 8 * values.sum(0), rtol=1e-5, atol=1e-5)
    if kind in KEPT_INT4 and "float rows" not in kind:
        names = [read.name for read in got.reads]
        assert len(names) == len(set(names))  # nothing is read twice


@pytest.mark.parametrize("kind", ["int4 in bytes", "ModelSlim W4A8, older"])
def test_an_int4_in_a_byte_may_be_the_least_number(kind: str, tmp_path: Path) -> None:
    values = []
    for code in (-8, -4):
        directory, _ = written(kind, tmp_path, lambda tensors, code=code: tensors[DOWN][5, 1].fill_(code))
        loaded = load_layer(directory, LAYER, dtype=torch.float32, dequantize=True).tensors
        values.append(float(loaded["w_down"][2, 1, 5]))
    assert values[0] == 2 * values[1] < 0


@pytest.mark.parametrize("size", [31, 32])
def test_a_group_size_of_all_columns_needs_no_second_scales(size: int, tmp_path: Path) -> None:
    directory, _ = written("ModelSlim W4A8", tmp_path)
    path = directory / "quant_model_description.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"group_size": size}))
    with pytest.raises(ArgumentError, match="says group_size 31") if size < 32 else nullcontext():
        load_layer(directory, LAYER)


def test_the_bias_of_w4a8_is_the_files(tmp_path: Path) -> None:
    (tmp_path / "twice").mkdir()
    kind, ends = "ModelSlim W4A8", "scale_bias"
    plain = load_layer(written(kind, tmp_path)[0], LAYER).tensors
    twice = written(kind, tmp_path / "twice", lambda t: t.update({n: 2 * t[n] for n in t if n.endswith(ends)}))[0]
    for name, value in load_layer(twice, LAYER).tensors.items():
        assert torch.equal(value, plain[name] * (2 if name.endswith("_correction") else 1))


@pytest.mark.parametrize("packed", [False, True])
def test_integers_of_all_experts_in_one_tensor_are_refused(packed: bool, tmp_path: Path) -> None:
    """Nobody publishes them so: ModelSlim's and compressed-tensors' files have a matrix an expert."""
    source, base = saved("qwen3_moe", "fused").directory, f"model.layers.{LAYER}.mlp.experts"
    tensors = load_file(source / "model.safetensors")
    for name in (f"{base}.gate_up_proj", f"{base}.down_proj"):
        whole = tensors.pop(name)
        codes = {f"{name}_packed": torch.zeros(8, 4, 4, dtype=torch.int32)} if packed else {name: whole.to(torch.int8)}
        tensors |= codes | {f"{name}_scale": torch.ones(8, whole.shape[1], 1)}
    save_file(tensors, tmp_path / "model.safetensors")
    values = json.loads((source / "config.json").read_text())
    values["quantization_config"] = compressed("int-quantized", INT8, TOKENS)
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ArgumentError, match=r"has integers in .*experts\.gate_up_proj for all experts; int8 and"):
        load_layer(tmp_path, LAYER)


def test_matrices_are_read_once_where_not_all_experts_are_int8(tmp_path: Path) -> None:
    """One expert of one rank in float makes all experts of all ranks floats, and no matrix is read for nothing."""
    name = f"model.layers.{LAYER}.mlp.experts.1.down_proj.weight"
    plain = load_file(saved("qwen3_moe").directory / "model.safetensors")[name]
    directory, _ = written("int8 by channel", tmp_path, lambda t: t.update({name: plain}) or t.pop(f"{name}_scale"))
    for rank in range(2):
        loaded = load_layer(directory, LAYER, rank=rank, world=2)
        names = [read.name for read in loaded.reads]
        assert "w_down_scale" not in loaded.tensors and len(names) == len(set(names))


UP = f"model.layers.{LAYER}.mlp.experts.3.up_proj.weight"
WRONG: list[tuple[str, Callable[[Tensors], Any], str]] = [
    ("ModelSlim", lambda tensors: tensors.pop(f"{UP}_offset"), r"has no tensor .*up_proj\.weight_offset"),
    ("ModelSlim", lambda tensors: tensors.update({UP: torch.zeros(16, 32)}), r"torch\.float32; need torch\.int8"),
    ("int8 by channel", lambda tensors: tensors.update({f"{UP}_scale": torch.ones(16)}),
     r"weight_scale of \(16,\); config\.json's numbers make it \(16, 1\)"),
    ("ModelSlim W4A8", lambda tensors: tensors.update({UP: torch.zeros(16, 32, dtype=torch.int8)}),
     r"up_proj\.weight of \(16, 32\); config\.json's numbers make it \(8, 32\)"),
    ("ModelSlim W4A8 by group", lambda tensors: tensors.pop(f"{UP}_scale_second"),
     r"has no .*up_proj\.weight_scale_second, though quant_model_description\.json says group_size 8"),
    ("ModelSlim W4A8 by group", lambda tensors: tensors.update({f"{UP}_scale_second": torch.ones(16, 5)}),
     r"scale_second of 5 groups, which do not divide 32 columns"),
    *((kind, lambda tensors, code=code: tensors.update({UP: torch.full((16, 32), code, dtype=torch.int8)}),
       r"up_proj\.weight with codes that are no int4")
      for kind in ("ModelSlim W4A8, older", "int4 in bytes") for code in (-9, 8)),
    ("int4 with zero points", lambda tensors: tensors.update({f"{UP}_zero_point": torch.zeros(16, 4)}),
     r"weight_zero_point of \(16, 4\); config\.json's numbers make it \(2, 4\)"),
    ("fp8 by channel, quant_method fp8", lambda tensors: tensors.pop(f"{UP}_scale"),
     r"has no tensor .*up_proj\.weight_scale_inv \(nor .*up_proj\.weight_scale\)"),
    ("fp8 by channel, quant_method fp8", lambda tensors: tensors.update({f"{UP}_scale": torch.ones(5, 1)}),
     r"weight_scale of \(5, 1\); config\.json's numbers make it \(16, 1\) or \(16,\) or \(1, 32\)"),
    ("int4 by group", lambda tensors: tensors.update({f"{UP}_shape": torch.tensor([16, 40])}),
     r"weight_shape \[16, 40\]; config\.json's numbers make it \[16, 32\]"),
    ("int4 by group", lambda tensors: tensors.update({f"{UP}_packed": torch.zeros(16, 5, dtype=torch.int32)}),
     r"weight_packed of \(16, 5\); config\.json's numbers make it \(16, 4\)"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "text"), WRONG)
def test_a_missing_or_wrong_tensor_is_named(
    kind: str, change: Callable[[Tensors], Any], text: str, tmp_path: Path
) -> None:
    directory, _ = written(kind, tmp_path, change)
    with pytest.raises(ArgumentError, match=text) as error:
        load_layer(directory, LAYER, dtype=torch.float32)
    assert "\n" not in str(error.value)


def test_unknown_schemes_are_refused_and_ignored_matrices_stay_float(tmp_path: Path) -> None:
    directory, _ = written("int8 by channel", tmp_path)
    values = json.loads((directory / "config.json").read_text())
    for said, text in (
        (compressed("float-quantized", FP8 | {"symmetric": False}), "has symmetric False of float-quantized weights"),
        (compressed("pack-quantized", INT4 | {"group_size": None}), "has group_size"),
        (compressed("mxfp8-quantized", FP8 | {"strategy": "group", "group_size": 64}), "has group_size 64 .* need 32"),
        (compressed("int-quantized", INT8) | {"config_groups": None}, "has config_groups None"),
        (compressed("int-quantized", INT8, TOKENS, ignore=[r"re:.*experts\.0\.up"]), "up_proj.weight of torch.int8"),
    ):
        (directory / "config.json").write_text(json.dumps(values | {"quantization_config": said}))
        with pytest.raises(ArgumentError, match=text):
            load_layer(directory, LAYER)
    directory, exact = written("ModelSlim", tmp_path)
    path = directory / "quant_model_description.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {UP: "W8A8_MIX"}))
    with pytest.raises(
        ArgumentError, match=r"says 'W8A8_MIX' of .*up_proj\.weight .*need FLOAT, W8A8_DYNAMIC or W4A8_"
    ):
        load_layer(directory, LAYER)
    name = f"model.layers.{LAYER}.mlp.experts.1.down_proj.weight"
    plain = load_file(saved("qwen3_moe").directory / "model.safetensors")[name]

    def left_out(tensors: Tensors) -> None:
        for part in ("_scale", "_offset"):
            del tensors[f"{name}{part}"]
        tensors[name] = plain

    directory, exact = written("ModelSlim", tmp_path, left_out)
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: "FLOAT"}))
    got = load_layer(directory, LAYER, dtype=torch.float32).tensors  # not all experts are int8: all become floats
    assert torch.equal(got["w_down"][1], plain.t())
    assert torch.equal(got["w_down"][0], matrix(exact, 0, "down").float())
