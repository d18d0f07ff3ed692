"""Quantised files as they are published: each is written here from its format's description, loaded, and compared."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import LAYER, saved
from safetensors.torch import load_file, save_file
from torch import Tensor

from ascend_moe.checkpoint import build_layer, load_layer
from ascend_moe.comm import LocalCluster
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.errors import ArgumentError
from ascend_moe.experts import quantize_weight

EXPERT = re.compile(rf"layers\.{LAYER}\.mlp\.experts\.\d+\.\w+_proj\.weight$")
Tensors = dict[str, Tensor]
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
BLOCK = {"strategy": "block", "block_structure": [12, 12]}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8}
TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


def channel(matrix: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """A matrix (N, K) in units of its channels' scales (N, 1)."""
    scale = matrix.abs().amax(1, keepdim=True) / most
    return matrix / scale, scale


def modelslim(tensors: Tensors, name: str, offset: float = 0.0) -> Tensor:
    """int8 codes, scales and offsets an output channel; the value is (code - offset) * scale."""
    units, scale = channel(tensors[name], 127)
    codes = (units + offset).round().clamp(-128, 127).to(torch.int8)
    tensors |= {name: codes, f"{name}_scale": scale, f"{name}_offset": torch.full_like(scale, offset)}
    return (codes.double() - offset) * scale.double()


def int8_channel(tensors: Tensors, name: str) -> Tensor:
    units, scale = channel(tensors[name], 127)
    tensors |= {name: units.round().to(torch.int8), f"{name}_scale": scale}
    return tensors[name].double() * scale.double()


def int8_tensor(tensors: Tensors, name: str) -> Tensor:
    scale = tensors[name].abs().amax().reshape(1) / 127
    tensors |= {name: (tensors[name] / scale).round().to(torch.int8), f"{name}_scale": scale}
    return tensors[name].double() * scale.double()


def fp8_channel(tensors: Tensors, name: str) -> Tensor:
    units, scale = channel(tensors[name], 448)
    scale = scale.bfloat16()
    tensors |= {name: units.to(torch.float8_e4m3fn), f"{name}_scale": scale}
    return tensors[name].double() * scale.double()


def fp8_block(tensors: Tensors, name: str, side: int = 12) -> Tensor:
    rows, columns = tensors[name].shape
    scale = torch.rand(-(-rows // side), -(-columns // side), generator=torch.manual_seed(rows)) + 0.5
    full = scale.repeat_interleave(side, 0)[:rows].repeat_interleave(side, 1)[:, :columns]
    tensors |= {name: (tensors[name] / full).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    return tensors[name].double() * full.double()


def fp8_exponents(tensors: Tensors, name: str) -> Tensor:
    """Scales of blocks as e8m0: powers of two."""
    fp8_block(tensors, name)
    scale = tensors[f"{name}_scale"].log2().round().exp2()
    tensors[f"{name}_scale"] = scale.to(torch.float8_e8m0fnu)
    rows, columns = tensors[name].shape
    full = scale.repeat_interleave(12, 0)[:rows].repeat_interleave(12, 1)[:, :columns]
    return tensors[name].double() * full.double()


def packed(tensors: Tensors, name: str, bits: int, group: int) -> Tensor:
    """Codes plus half their range, 32 / bits in an int32, the first in the lowest bits."""
    matrix, half = tensors.pop(name), 1 << (bits - 1)
    rows, columns = matrix.shape
    units, scale = channel(matrix.reshape(-1, group), half - 1)
    codes = units.round().reshape(rows, columns).long()
    numbers = (codes + half).reshape(rows, -1, 32 // bits)
    words = (numbers << (torch.arange(32 // bits) * bits)).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    scale = scale.reshape(rows, -1)
    tensors |= {f"{name}_packed": words, f"{name}_scale": scale, f"{name}_shape": torch.tensor([rows, columns])}
    return codes.double() * scale.double().repeat_interleave(group, 1)


def compressed(form: str, weights: dict[str, Any], rows: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rows}
    said = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return said | {"ignore": ["lm_head", r"re:.*mlp\.gate$", r"re:.*layers\.0\..*"]} | more


FORMATS: dict[str, tuple[Callable[[Tensors, str], Tensor], dict[str, Any] | None]] = {
    "ModelSlim": (modelslim, None),
    "ModelSlim with offsets": (lambda tensors, name: modelslim(tensors, name, 3.0), None),
    "int8 by channel": (int8_channel, compressed("int-quantized", INT8, TOKENS)),
    "int8 by tensor": (int8_tensor, compressed("int-quantized", INT8 | {"strategy": "tensor"}, TOKENS)),
    "fp8 by channel": (fp8_channel, compressed("float-quantized", FP8)),
    "fp8 by block": (fp8_block, compressed("float-quantized", FP8 | BLOCK)),
    "fp8 by block, e8m0 scales": (fp8_exponents, compressed("float-quantized", FP8 | BLOCK)),
    "int4 by group": (lambda tensors, name: packed(tensors, name, 4, 8), compressed("pack-quantized", INT4)),
    "int8 by channel, packed": (
        lambda tensors, name: packed(tensors, name, 8, tensors[name].shape[1]), compressed("pack-quantized", INT8)
    ),
}  # fmt: skip


def written(kind: str, target: Path, change: Callable[[Tensors], None] | None = None) -> tuple[Path, Tensors]:
    """A checkpoint in that format, and the experts' matrices (N, K) behind it in float64."""
    write, said = FORMATS[kind]
    source = saved("qwen3_moe").directory
    tensors = load_file(source / "model.safetensors")
    exact = {name: write(tensors, name) for name in sorted(tensors) if EXPERT.search(name)}
    described = dict.fromkeys(tensors, "FLOAT")
    described |= {f"{name}{part}": "W8A8_DYNAMIC" for name in exact for part in ("", "_scale", "_offset")}
    if change is not None:
        change(tensors)
    save_file(tensors, target / "model.safetensors")
    values = json.loads((source / "config.json").read_text())
    if said is None:
        (target / "quant_model_description.json").write_text(json.dumps(described))
    else:
        values["quantization_config"] = said
    (target / "config.json").write_text(json.dumps(values))
    return target, exact


def matrix(exact: Tensors, expert: int, *parts: str) -> Tensor:
    """(K, N) as the layer has it."""
    names = [f"model.layers.{LAYER}.mlp.experts.{expert}.{part}_proj.weight" for part in parts]
    return torch.cat([exact[name] for name in names]).t()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_matrix_is_the_formulas_value(kind: str, tmp_path: Path) -> None:
    """code * scale of float64, rounded once to fp32: the fp32 product of two such numbers is that very number."""
    directory, exact = written(kind, tmp_path)
    plain = load_layer(saved("qwen3_moe").directory, LAYER).tensors
    got = load_layer(directory, LAYER, rank=1, world=2, dtype=torch.float32, dequantize=True).tensors
    assert torch.equal(got["gate_weight"], plain["gate_weight"])
    for local in range(4):
        assert torch.equal(got["w_gate_up"][local], matrix(exact, 4 + local, "gate", "up").float())
        assert torch.equal(got["w_down"][local], matrix(exact, 4 + local, "down").float())


@pytest.mark.parametrize("kind", ["ModelSlim", "int8 by channel"])
def test_int8_by_channel_stays_int8_and_equals_a_layer_that_was_quantised(kind: str, tmp_path: Path) -> None:
    directory, _ = written(kind, tmp_path)
    plain = load_layer(saved("qwen3_moe").directory, LAYER).tensors
    got = load_layer(directory, LAYER).tensors
    for name in ("w_gate_up", "w_down"):
        codes, scale = quantize_weight(plain[name])
        assert torch.equal(got[name], codes) and torch.equal(got[f"{name}_scale"], scale)
    assert got["gate_weight"].dtype == torch.float32 and "w_down_scale" not in plain
    x = torch.randn(2, 5, 32, generator=torch.manual_seed(1))

    def rank_main(rank: int, group: str) -> tuple[Tensor, Tensor, int]:
        made = [MC2Dispatcher(group, 2, rank, 8) for _ in range(2)]
        layer = build_layer(directory, LAYER, made[0])
        other = build_layer(saved("qwen3_moe").directory, LAYER, made[1]).quantize_()
        return layer(x[rank]), other(x[rank]), layer.quant_mode

    with LocalCluster(2) as cluster:
        for out, other, mode in cluster.run(rank_main):
            assert mode == 2 and torch.equal(out, other) and bool(out.any())


def test_worked_numbers_of_packed_int4(tmp_path: Path) -> None:
    """Codes -8, -7, 0, 1, 2, 3, 6, 7 and scale 0.5: the word is 0xFEBA9810, the values half the codes."""
    codes = torch.tensor([-8, -7, 0, 1, 2, 3, 6, 7])
    word = sum((int(code) + 8) << (4 * place) for place, code in enumerate(codes))
    assert word == 0xFEBA9810
    name = f"model.layers.{LAYER}.mlp.experts.2.down_proj.weight"

    def put(tensors: Tensors) -> None:
        tensors[f"{name}_packed"][5, 1] = word - (1 << 32)
        tensors[f"{name}_scale"][5, 1] = 0.5

    directory, _ = written("int4 by group", tmp_path, put)
    down = load_layer(directory, LAYER, dtype=torch.float32).tensors["w_down"]
    assert down[2, 8:16, 5].tolist() == [-4.0, -3.5, 0.0, 0.5, 1.0, 1.5, 3.0, 3.5]


UP = f"model.layers.{LAYER}.mlp.experts.3.up_proj.weight"
WRONG: list[tuple[str, Callable[[Tensors], Any], str]] = [
    ("ModelSlim", lambda tensors: tensors.pop(f"{UP}_scale"), r"has no tensor .*experts\.3\.up_proj\.weight_scale"),
    ("ModelSlim", lambda tensors: tensors.pop(f"{UP}_offset"), r"has no tensor .*up_proj\.weight_offset"),
    ("ModelSlim", lambda tensors: tensors.update({UP: torch.zeros(16, 32)}), r"torch\.float32; need torch\.int8"),
    ("int8 by channel", lambda tensors: tensors.pop(f"{UP}_scale"), r"has no tensor .*up_proj\.weight_scale"),
    ("int8 by channel", lambda tensors: tensors.update({f"{UP}_scale": torch.ones(16)}),
     r"weight_scale of \(16,\); config\.json's numbers make it \(16, 1\)"),
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
        (compressed("marlin-24", INT8), "has compressed-tensors format 'marlin-24'; need one of"),
        (compressed("int-quantized", INT8 | {"num_bits": 6}), "of 6 bits"),
        (compressed("int-quantized", INT8 | {"symmetric": False}), "has weights with zero points"),
        (compressed("pack-quantized", INT4 | {"group_size": None}), "has group_size"),
        (compressed("pack-quantized", INT4 | {"actorder": "group"}), "has actorder 'group'"),
        (compressed("int-quantized", INT8) | {"config_groups": None}, "has config_groups None"),
        (compressed("int-quantized", INT8, TOKENS, ignore=[r"re:.*experts\.0\.up"]), "up_proj.weight is torch.int8"),
    ):
        (directory / "config.json").write_text(json.dumps(values | {"quantization_config": said}))
        with pytest.raises(ArgumentError, match=text):
            load_layer(directory, LAYER)
    directory, exact = written("ModelSlim", tmp_path)
    path = directory / "quant_model_description.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {UP: "W4A8_DYNAMIC"}))
    with pytest.raises(ArgumentError, match=r"says 'W4A8_DYNAMIC' of .*up_proj\.weight .*need FLOAT or W8A8_DYNAMIC"):
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
