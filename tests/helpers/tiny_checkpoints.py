"""Checkpoints of one tiny MoE layer in every format, written from its description, with the values behind them."""

from __future__ import annotations

import copy
import functools
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ascend_moe.checkpoint import load_layer
from ascend_moe.errors import ArgumentError

Tensors = dict[str, Tensor]
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8_CHANNEL = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
BY_BLOCK = {"strategy": "block", "block_structure": [12, 20]}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8}
TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


def channel(matrix: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """A matrix (N, K) in units of its channels' scales (N, 1)."""
    scale = matrix.abs().amax(1, keepdim=True) / most
    return matrix / scale, scale


def coded(tensors: Tensors, name: str, most: int = 127, group: int = 0) -> Tensor:
    """Integers from -most to most, one a byte, in units of scales of channels or of groups of K."""
    matrix = tensors[name]
    units, scale = channel(matrix.reshape(-1, group or matrix.shape[1]), most)
    codes, scale = units.round().to(torch.int8).reshape(matrix.shape), scale.reshape(len(matrix), -1)
    tensors |= {name: codes, f"{name}_scale": scale}
    return codes.double() * scale.double().repeat_interleave(group or matrix.shape[1], 1)


def of_scale(tensors: Tensors, name: str, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes in units of a scale of the tensor, or of scales of channels."""
    units = tensors[name] / scale
    tensors |= {name: (units.round() if dtype == torch.int8 else units).to(dtype), f"{name}_scale": scale}
    return tensors[name].double() * scale.double()


def modelslim(tensors: Tensors, name: str, offset: float = 0.0) -> Tensor:
    """int8 codes, scales and offsets an output channel; the value is (code - offset) * scale."""
    units, scale = channel(tensors[name], 127)
    codes = (units + offset).round().clamp(-128, 127).to(torch.int8)
    tensors |= {name: codes, f"{name}_scale": scale, f"{name}_offset": torch.full_like(scale, offset)}
    return (codes.double() - offset) * scale.double()


def modelslim_int4(tensors: Tensors, name: str, group: int = 0, packed: bool = True) -> Tensor:
    """int4 codes, two output channels a byte, scales an output channel, by group second ones; the bias of x - 8.

    The channels' scales are powers of two where there are second ones: their product is then exact.
    """
    exact = coded(tensors, name, 7, group)
    codes, scale, rows = tensors[name], tensors[f"{name}_scale"], len(exact)
    tensors[f"{name}_offset"] = torch.zeros(rows, 1)
    if group:
        tensors |= {f"{name}_scale": torch.full((rows, 1), 0.25), f"{name}_scale_second": scale * 4}
        tensors[f"{name}_offset_second"] = torch.zeros_like(scale)
    if packed:
        tensors[name] = (codes[1::2] << 4) | (codes[::2] & 15)
        bias, parts = (8 * exact.sum(1)).float(), 16 if "down_proj" in name else 1
        tensors[f"{name.removesuffix('.weight')}.scale_bias"] = (bias[:, None] / parts).repeat(1, parts)
    return exact


def zero_points(tensors: Tensors, name: str, bits: int, group: int = 0) -> Tensor:
    """Codes that are not symmetric, and the code of zero; by group packed along the channels."""
    matrix, half = tensors.pop(name), 1 << (bits - 1)
    rows, columns = matrix.shape
    grouped = matrix.reshape(rows, -1, group or columns)
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    scale = (high - low) / (2 * half - 1)
    zero = (-half - low / scale).round().clamp(-half, half - 1)
    codes = (grouped / scale + zero).round().clamp(-half, half - 1)
    exact = ((codes - zero).double() * scale.double()).reshape(rows, columns)
    codes, zero, scale = codes.reshape(rows, columns), zero[..., 0], scale[..., 0]
    if group:
        tensors |= {f"{name}_packed": words(codes, bits), f"{name}_shape": torch.tensor([rows, columns])}
        tensors[f"{name}_zero_point"] = words(zero.t(), bits).t().contiguous()
    else:
        tensors |= {name: codes.to(torch.int8), f"{name}_zero_point": zero.to(torch.int8)}
    tensors[f"{name}_scale"] = scale
    return exact


def fp8_block(
    tensors: Tensors, name: str, high: int = 12, wide: int = 20, *, end: str = "_scale", exponents: bool = False
) -> Tensor:
    """Scales of blocks that are not square; ``exponents``: as e8m0, powers of two."""
    rows, columns = tensors[name].shape
    scale = torch.rand(-(-rows // high), -(-columns // wide), generator=torch.manual_seed(rows)) + 0.5
    scale = scale.log2().round().exp2() if exponents else scale
    spread = blocks(scale, tensors[name], high, wide)
    tensors[name] = (tensors[name] / spread).to(torch.float8_e4m3fn)
    tensors[f"{name}{end}"] = scale.to(torch.float8_e8m0fnu) if exponents else scale
    return tensors[name].double() * spread.double()


def blocks(scale: Tensor, matrix: Tensor, high: int, wide: int) -> Tensor:
    """A scale a block, for every number of a matrix."""
    rows, columns = matrix.shape
    return scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]


def words(codes: Tensor, bits: int) -> Tensor:
    """Codes plus half their range, 32 / bits in an int32, the first in the lowest bits."""
    numbers = (codes.long() + (1 << (bits - 1))).reshape(len(codes), -1, 32 // bits)
    sums = (numbers << (torch.arange(32 // bits) * bits)).sum(-1)
    return torch.where(sums >= 1 << 31, sums - (1 << 32), sums).int()


def packed(tensors: Tensors, name: str, bits: int, group: int) -> Tensor:
    """Symmetric codes by group of K, in words."""
    exact = coded(tensors, name, (1 << (bits - 1)) - 1, group)
    tensors |= {f"{name}_packed": words(tensors.pop(name), bits), f"{name}_shape": torch.tensor(exact.shape)}
    return exact


def compressed(form: str, weights: dict[str, Any], rows: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rows}
    said = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return said | {"ignore": ["lm_head", r"re:.*mlp\.gate$"]} | more


def fp8_method(**more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic"} | more


def fp8_channel(tensors: Tensors, name: str) -> Tensor:
    return of_scale(tensors, name, channel(tensors[name], 448)[1].bfloat16(), torch.float8_e4m3fn)


W8A8, W4A8 = {"scheme": "W8A8_DYNAMIC"}, {"scheme": "W4A8_DYNAMIC", "version": "1.0.0"}
ASYMMETRIC = {"symmetric": False}
#: How a matrix is written, and quantization_config, or a description's scheme and what it says besides.
FORMATS: dict[str, tuple[Callable[[Tensors, str], Tensor], dict[str, Any]]] = {
    "ModelSlim": (modelslim, W8A8),
    "ModelSlim with offsets": (lambda tensors, name: modelslim(tensors, name, 3.0), W8A8),
    "ModelSlim W4A8": (modelslim_int4, W4A8 | {"group_size": 0}),
    "ModelSlim W4A8 by group": (
        lambda tensors, name: modelslim_int4(tensors, name, 8), W4A8 | {"group_size": 8}
    ),
    "ModelSlim W4A8, older": (
        lambda tensors, name: modelslim_int4(tensors, name, 8, packed=False), W4A8 | {"version": "0", "group_size": 8}
    ),
    "int8 by channel": (coded, compressed("int-quantized", INT8, TOKENS)),
    "int8 by tensor": (
        lambda tensors, name: of_scale(tensors, name, tensors[name].abs().amax().reshape(1) / 127, torch.int8),
        compressed("int-quantized", INT8 | {"strategy": "tensor"}, TOKENS),
    ),
    "int8 with zero points": (
        lambda tensors, name: zero_points(tensors, name, 8), compressed("int-quantized", INT8 | ASYMMETRIC, TOKENS)
    ),
    "int4 in bytes": (
        lambda tensors, name: coded(tensors, name, 7),
        compressed("int-quantized", INT4 | {"strategy": "channel", "group_size": None}, TOKENS),
    ),
    "int4 in bytes by group": (
        lambda tensors, name: coded(tensors, name, 7, 8), compressed("int-quantized", INT4, TOKENS)
    ),
    "fp8 by channel": (fp8_channel, compressed("float-quantized", FP8_CHANNEL)),
    "fp8 by block": (fp8_block, compressed("float-quantized", FP8_CHANNEL | BY_BLOCK)),
    "fp8 by block, e8m0 scales": (
        lambda tensors, name: fp8_block(tensors, name, exponents=True),
        compressed("float-quantized", FP8_CHANNEL | BY_BLOCK),
    ),
    "fp8 by channel, quant_method fp8": (fp8_channel, fp8_method()),
    "fp8 by tensor, quant_method fp8": (
        lambda tensors, name: of_scale(tensors, name, tensors[name].abs().amax() / 448, torch.float8_e4m3fn),
        fp8_method(),
    ),
    "int4 by group": (lambda tensors, name: packed(tensors, name, 4, 8), compressed("pack-quantized", INT4, TOKENS)),
    "int4 by group, float rows": (
        lambda tensors, name: packed(tensors, name, 4, 8), compressed("pack-quantized", INT4 | {"actorder": "static"})
    ),
    "int4 with zero points": (
        lambda tensors, name: zero_points(tensors, name, 4, 8), compressed("pack-quantized", INT4 | ASYMMETRIC)
    ),
    "int8 by channel, packed": (
        lambda tensors, name: packed(tensors, name, 8, tensors[name].shape[1]), compressed("pack-quantized", INT8)
    ),
    "int8 by channel, packed, int8 rows": (
        lambda tensors, name: packed(tensors, name, 8, tensors[name].shape[1]),
        compressed("pack-quantized", INT8, TOKENS),
    ),
}  # fmt: skip
KEPT_INT8 = ("ModelSlim", "int8 by channel", "int8 by channel, packed, int8 rows")
KEPT_INT4 = tuple(kind for kind in FORMATS if re.search("W4A8|int4 by|int4 in", kind))


def description(said: dict[str, Any], names: list[str], quantized: list[str]) -> dict[str, Any]:
    """ModelSlim's description of tensors, of which those of some matrices are quantised."""
    scheme = said["scheme"]
    made = {name: scheme if re.sub(r"\.\w+$", ".weight", name) in quantized else "FLOAT" for name in names}
    return made | {"model_quant_type": scheme} | {key: said[key] for key in said if key != "scheme"}


E, H, INNER = 4, 64, 32
BLOCK = "model.layers.0.mlp"
QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": H, "moe_intermediate_size": INNER, "num_experts": E,
    "num_experts_per_tok": 2, "norm_topk_prob": True, "hidden_act": "silu", "dtype": "float32",
}  # fmt: skip
OTHER = ("model_type", "num_experts", "moe_intermediate_size", "norm_topk_prob")
GPT_OSS = {key: value for key, value in QWEN.items() if key not in OTHER} | {
    "model_type": "gpt_oss", "num_local_experts": E, "intermediate_size": INNER,
}  # fmt: skip
DEEPSEEK_V4 = {key: value for key, value in QWEN.items() if key not in OTHER} | {
    "model_type": "deepseek_v4", "n_routed_experts": E, "moe_intermediate_size": INNER, "expert_dtype": "fp4",
}  # fmt: skip
MX = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
MX |= {"scale_dtype": "torch.uint8"}
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


@dataclass
class Tiny:
    """A checkpoint: tensors, config.json, ModelSlim's description, and the experts' (K, N) in float64."""

    tensors: Tensors
    config: dict[str, Any]
    gate_up: list[Tensor] = field(default_factory=list)
    down: list[Tensor] = field(default_factory=list)
    description: dict[str, Any] | None = None

    def write(self, directory: Path) -> Path:
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(self.config))
        if self.description is not None:
            (directory / "quant_model_description.json").write_text(json.dumps(self.description))
        return directory

    def changed(self) -> Tiny:
        """A copy to change."""
        return Tiny(
            dict(self.tensors), copy.deepcopy(self.config), self.gate_up, self.down, copy.deepcopy(self.description)
        )


def mxfp4(
    tensors: Tensors, name: str, codes: str, exponents: str, kinds: tuple[torch.dtype, ...] = (torch.uint8,) * 2
) -> Tensor:
    """Random fp4, two a byte, and exponents of 32 numbers each, in place of a matrix."""
    rows, columns = tensors.pop(name).shape
    halves = torch.randint(0, 16, (rows, columns))
    powers = torch.randint(120, 130, (rows, columns // 32))
    tensors[codes] = (halves[:, ::2] | halves[:, 1::2] << 4).to(torch.uint8).view(kinds[0])
    tensors[exponents] = powers.to(torch.uint8).view(kinds[1])
    values = torch.tensor([*E2M1, *(-each for each in E2M1)], dtype=torch.float64)[halves]
    return values * torch.exp2(powers.double() - 127).repeat_interleave(32, 1)


def mxfp8(tensors: Tensors, name: str) -> Tensor:
    rows, columns = tensors[name].shape
    powers = torch.randint(120, 130, (rows, columns // 32))
    tensors |= {name: (64 * tensors[name]).to(torch.float8_e4m3fn), f"{name}_scale": powers.to(torch.uint8)}
    return tensors[name].double() * torch.exp2(powers.double() - 127).repeat_interleave(32, 1)


MORE = {
    "published": (lambda tensors, name: tensors[name].double(), {}),
    "fp8 by block, quant_method fp8": (
        lambda tensors, name: fp8_block(tensors, name, 1, end="_scale_inv"), fp8_method(weight_block_size=[1, 20])
    ),
    "mxfp4": (
        lambda tensors, name: mxfp4(tensors, name, f"{name}_packed", f"{name}_scale"),
        compressed("mxfp4-pack-quantized", MX, ignore=[]),
    ),
    "mxfp8": (mxfp8, compressed("mxfp8-quantized", MX | {"num_bits": 8}, ignore=[])),
    "fp4 of deepseek_v4": (
        lambda tensors, name: mxfp4(tensors, name, name, f"{name.removesuffix('.weight')}.scale"),
        fp8_method(scale_fmt="ue8m0"),
    ),
    "fp4 of deepseek_v4, int8 and e8m0": (
        lambda tensors, name: mxfp4(
            tensors, name, name, f"{name.removesuffix('.weight')}.scale", (torch.int8, torch.float8_e8m0fnu)
        ),
        fp8_method(scale_fmt="ue8m0"),
    ),
}  # fmt: skip
FUSED = ("fused", "fused fp8 by block", "fused fp8 by channel", "fp8 by block, fused scales", "mxfp4 of gpt_oss")
KINDS = (*MORE, *FUSED, *FORMATS)


@functools.cache
def tiny(kind: str) -> Tiny:
    """The checkpoint of a kind; ``changed()`` before anything is changed."""
    torch.manual_seed(len(kind))
    config = {"fp4 of deepseek_v4": DEEPSEEK_V4, "mxfp4 of gpt_oss": GPT_OSS}.get(kind.partition(",")[0], QWEN)
    made = Tiny({}, dict(config))
    router = "router" if kind == "mxfp4 of gpt_oss" else "gate"
    made.tensors[f"{BLOCK}.{router}.weight"] = torch.randn(E, H)
    if config is DEEPSEEK_V4:
        made.tensors[f"{BLOCK}.gate.e_score_correction_bias"] = torch.randn(E)
    if config is GPT_OSS:
        sizes = {"router.bias": E, "experts.gate_up_proj_bias": 2 * INNER, "experts.down_proj_bias": H}
        made.tensors |= {f"{BLOCK}.{name}": torch.randn(*((E, n) if n != E else (E,))) for name, n in sizes.items()}
    (fuse if kind in FUSED else quantize)(made, kind)
    return made


def quantize(made: Tiny, kind: str) -> None:
    """Experts with a tensor a matrix."""
    write, said = (MORE | FORMATS)[kind]
    v4 = kind.startswith("fp4 of deepseek_v4")
    names, exact, before = [], {}, list(made.tensors)
    for expert in range(E):
        for part, shape in zip(("w1", "w3", "w2") if v4 else ("gate_proj", "up_proj", "down_proj"),
                               ((INNER, H), (INNER, H), (H, INNER)), strict=True):  # fmt: skip
            names.append(f"{BLOCK}.experts.{expert}.{part}.weight")
            made.tensors[names[-1]] = torch.randn(shape)
            exact[names[-1]] = write(made.tensors, names[-1])
        gate, up, down = (exact[name] for name in names[-3:])
        made.gate_up.append(torch.cat([gate, up]).t())
        made.down.append(down.t())
    if "scheme" in said:
        made.description = description(said, [*before, *names, *made.tensors], names)
    elif said:
        made.config["quantization_config"] = copy.deepcopy(said)


def fuse(made: Tiny, kind: str) -> None:
    """Experts in two tensors."""
    for part, rows, columns, exact in (("gate_up", 2 * INNER, H, made.gate_up), ("down", H, INNER, made.down)):
        base, stacks = f"{BLOCK}.experts.{part}_proj", {}
        for _ in range(E):
            one = {base: torch.randn(rows, columns)}
            if kind == "mxfp4 of gpt_oss":
                value = mxfp4(one, base, f"{base}_blocks", f"{base}_scales")
                one[f"{base}_blocks"] = one[f"{base}_blocks"].reshape(rows, columns // 32, 16)
            elif "fp8" in kind:
                value = fp8_channel(one, base) if "channel" in kind else fp8_block(one, base, end="_scale_inv")
            else:
                value = one[base].double()
            exact.append(value.t())
            for name, tensor in one.items():
                stacks.setdefault(name, []).append(tensor)
        made.tensors |= {name: torch.stack(tensors) for name, tensors in stacks.items()}
        if kind == "fp8 by block, fused scales":  # as transformers saves what it has quantized
            for expert, codes in enumerate(made.tensors.pop(base)):
                names = [f"{BLOCK}.experts.{expert}.{name}_proj.weight" for name in part.split("_")]
                made.tensors |= dict(zip(names, codes.chunk(len(names)), strict=True))
    methods = {"fused": {}, "mxfp4 of gpt_oss": {"quant_method": "mxfp4"}}
    if said := methods.get(kind, fp8_method(weight_block_size=[12, 20])):
        made.config["quantization_config"] = said


# ---- loading them on two ranks

Outcome = dict[str, Tensor] | str


def outcomes(directory: Path, **more: Any) -> list[Outcome]:
    """What each of two ranks loads, or its error; a second of processor time is enough for both."""
    start, made = time.thread_time(), []
    for rank in range(2):
        try:
            loaded: Outcome = load_layer(directory, 0, rank=rank, world=2, dtype=torch.float32, **more).tensors
        except ArgumentError as error:
            loaded = str(error)
            assert "\n" not in loaded and loaded
        made.append(loaded)
    assert time.thread_time() - start < 2
    return made


def is_right(loaded: Outcome, rank: int, made: Tiny) -> bool:
    """Whether a rank's floats are the formula's values."""
    return not isinstance(loaded, str) and all(
        torch.equal(loaded["w_gate_up"][local], made.gate_up[2 * rank + local].float())
        and torch.equal(loaded["w_down"][local], made.down[2 * rank + local].float())
        for local in range(E // 2)
    )


def check_values(made: Tiny, directory: Path, **more: Any) -> None:
    """Writes a checkpoint; both ranks load the formula's values."""
    for rank, loaded in enumerate(outcomes(made.write(directory), **more)):
        assert is_right(loaded, rank, made), loaded


def with_int8(*experts: int) -> Tiny:
    """A file whose other experts stay floats."""
    made, plain = tiny("int8 by channel").changed(), tiny("published")
    made.gate_up, made.down = list(made.gate_up), list(made.down)
    for expert in set(range(E)) - set(experts):
        for name in [name for name in made.tensors if f".experts.{expert}." in name]:
            del made.tensors[name]
        made.tensors |= {name: value for name, value in plain.tensors.items() if f".experts.{expert}." in name}
        made.gate_up[expert], made.down[expert] = plain.gate_up[expert], plain.down[expert]
    return made
