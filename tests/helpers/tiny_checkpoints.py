"""Checkpoints of one tiny MoE layer in every format, with the values behind them; to be changed and written."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from quantized_files import (
    FORMATS,
    Tensors,
    compressed,
    description,
    fp8_block,
    fp8_channel,
    fp8_method,
)
from safetensors.torch import save_file
from torch import Tensor

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
        lambda tensors, name: fp8_block(tensors, name, end="_scale_inv"), fp8_method(weight_block_size=[12, 20])
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
FUSED = ("fused", "fused fp8 by block", "fused fp8 by channel", "mxfp4 of gpt_oss")
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
    if "config_groups" in said:
        made.config["quantization_config"]["ignore"] = ["lm_head", r"re:.*mlp\.gate$"]


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
        made.tensors |= {name: stacked(tensors) for name, tensors in stacks.items()}
    methods = {"fused": {}, "mxfp4 of gpt_oss": {"quant_method": "mxfp4"}}
    if said := methods.get(kind, fp8_method(weight_block_size=[12, 20])):
        made.config["quantization_config"] = said


def stacked(tensors: list[Tensor]) -> Tensor:
    dtype = tensors[0].dtype
    return (
        torch.stack([each.view(torch.uint8) for each in tensors]).view(dtype)
        if dtype.itemsize == 1
        else torch.stack(tensors)
    )
