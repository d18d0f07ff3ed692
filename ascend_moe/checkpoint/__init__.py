"""One MoE layer out of a Hugging Face safetensors checkpoint, each rank reading its own experts only.

Layouts of the experts (both with any shard files):

* published: one matrix an expert: ``experts.N.{w1,w3,w2}.weight`` (Mixtral) or
  ``experts.N.{gate,up,down}_proj.weight`` (Qwen, DeepSeek), bf16, fp16, fp32, or fp8 with
  ``weight_scale_inv`` blocks (DeepSeek-V3);
* fused: ``experts.gate_up_proj`` (E, 2I, H) and ``experts.down_proj`` (E, H, I), or both transposed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ascend_moe.checkpoint.config import Fp8Format, moe_config, need_directory, read_json
from ascend_moe.checkpoint.files import CheckpointFiles, Read, dequantize_fp8
from ascend_moe.dispatchers.base import Dispatcher
from ascend_moe.errors import ArgumentError, need, with_typed_errors
from ascend_moe.layer import MoEConfig, MoELayer

#: Names of an expert's gate, up and down matrices.
_EXPERT_STYLES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_ReadExpert = Callable[[int, Tensor, Tensor], None]  # expert, out gate_up (H, 2I), out down (I, H)
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass
class LayerWeights:
    """The weights of one layer that one rank holds.

    Attributes:
        config: the layer's numbers.
        tensors: by the names of MoELayer's parameters.
        reads: every read from the files, in order; ``bytes_read`` is the sum of their sizes.
    """

    config: MoEConfig
    tensors: dict[str, Tensor]
    reads: list[Read]

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data read from the files."""
        return sum(read.bytes for read in self.reads)


@with_typed_errors
def build_layer(
    directory: str | Path,
    layer: int,
    dispatcher: Dispatcher,
    *,
    dtype: torch.dtype | None = None,
    router_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    global_bs: int = 0,
    config: MoEConfig | None = None,
) -> MoELayer:
    """Builds a MoELayer with the weights of ``load_layer`` for the dispatcher's rank.

    ``router_dtype``, ``device`` and ``global_bs`` are MoELayer's, the other arguments and errors load_layer's.
    """
    weights = load_layer(
        directory, layer, rank=dispatcher.rank, world=dispatcher.world_size, dtype=dtype, config=config
    )
    kind = weights.tensors["w_down"].dtype
    module = MoELayer(
        weights.config, dispatcher, dtype=kind, router_dtype=router_dtype, device="meta", global_bs=global_bs
    )
    module.load_state_dict({name: value.to(device) for name, value in weights.tensors.items()}, assign=True)
    return module


@with_typed_errors
def load_layer(
    directory: str | Path,
    layer: int,
    *,
    rank: int = 0,
    world: int = 1,
    dtype: torch.dtype | None = None,
    config: MoEConfig | None = None,
) -> LayerWeights:
    """Reads the router, the shared expert and experts rank * L .. (rank + 1) * L - 1 of one layer.

    Args:
        directory: with config.json and the safetensors files.
        layer: decoder layer, counted from 0.
        rank, world: whose experts.
        dtype: of the experts' weights; None: config.json's, else bf16. The router's are fp32.
        config: replaces the numbers of config.json.

    Raises:
        ArgumentError: a file, layer or tensor is missing or does not fit. The message has what was looked for
            and what is there (``.missing``, ``.found`` for a tensor).
        LibraryError: safetensors is not installed.
    """
    need(dtype is None or isinstance(dtype, torch.dtype), "dtype", "is {!r:.60}; it must be a torch.dtype", dtype)
    need_directory(directory)
    needed = config is None or dtype is None or (Path(directory) / "config.json").is_file()
    values = read_json(directory) if needed else {}
    config = moe_config(values) if config is None else config
    need(0 <= rank < world, "rank", "is {} of world {}; need 0 <= rank < world", rank, world)
    rule = "is {}; it must divide the checkpoint's {} experts"
    need(config.num_experts % world == 0, "world", rule, world, config.num_experts)
    if dtype is None:
        dtype = _DTYPES.get(str(values.get("dtype") or values.get("torch_dtype")), torch.bfloat16)
    fp8 = Fp8Format.of(values)
    with CheckpointFiles(directory) as files:
        reader = _Block(files, _find_block(files, layer), config, dtype, fp8)
        experts = config.num_experts
        tensors = {"gate_weight": reader.tensor("gate.weight", (experts, config.hidden_size)).float()}
        if config.router == "deepseek_v3":
            tensors["gate_bias"] = reader.tensor(reader.bias_name(), (experts,)).float()
        local = config.num_experts // world
        tensors.update(reader.experts(range(rank * local, (rank + 1) * local)))
        tensors.update(reader.shared())
        reader.need_no_more()
        return LayerWeights(config, tensors, files.reads)


@dataclass
class _Block:
    """Reads the tensors below one layer's MoE block, checking every shape."""

    files: CheckpointFiles
    prefix: str
    config: MoEConfig
    dtype: torch.dtype
    fp8: Fp8Format

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A whole tensor; fp8 matrices come as fp32."""
        full = f"{self.prefix}.{name}"
        if (actual := self.files.shape(full)) != shape:
            text = f"{full} is {actual}; config.json's numbers make it {shape}"
            raise ArgumentError(text, argument="directory")
        value = self.files.read(full)
        if value.dtype == torch.float8_e4m3fn:
            return dequantize_fp8(full, value, self.files.read(f"{full}_scale_inv"), self.fp8)
        return _floating(value, full)

    def bias_name(self) -> str:
        """The correction bias lies below the gate, in MiniMax-M2 beside it."""
        beside = "e_score_correction_bias"
        return beside if f"{self.prefix}.{beside}" in self.files else f"gate.{beside}"

    def need_no_more(self) -> None:
        """Raises for the first tensor of the block whose like no rank reads: it would be left out of the result."""

        def of_any_expert(name: str) -> str:
            return re.sub(r"\.experts\.\d+\.", ".experts.*.", name)

        read = {of_any_expert(read.name) for read in self.files.reads}
        for name in self.files.names:
            if name.startswith(f"{self.prefix}.") and of_any_expert(name) not in read:
                raise ArgumentError(
                    f"{self.files.directory} has {name}, which a layer with config.json's numbers does not use",
                    argument="directory",
                )

    def experts(self, experts: range) -> dict[str, Tensor]:
        """w_gate_up (L, H, 2I) and w_down (L, I, H) of consecutive experts."""
        hidden, inner = self.config.hidden_size, self.config.moe_intermediate_size
        gate_up = torch.empty(len(experts), hidden, 2 * inner, dtype=self.dtype)
        down = torch.empty(len(experts), inner, hidden, dtype=self.dtype)
        fused = f"{self.prefix}.experts.gate_up_proj" in self.files
        read_expert = self._fused_expert() if fused else self._single_expert(experts[0])
        for local, expert in enumerate(experts):
            read_expert(expert, gate_up[local], down[local])
        return {"w_gate_up": gate_up, "w_down": down}

    def shared(self) -> dict[str, Tensor]:
        """The dense shared expert's tensors, if the layer has one."""
        hidden, inner = self.config.hidden_size, self.config.shared_intermediate_size
        if inner == 0:
            return {}
        names = ("shared_expert", "shared_experts")
        base = next((n for n in names if f"{self.prefix}.{n}.down_proj.weight" in self.files), names[0])
        gate_up = torch.empty(hidden, 2 * inner, dtype=self.dtype)
        down = torch.empty(inner, hidden, dtype=self.dtype)
        self._read_matrices([f"{base}.{part}.weight" for part in _EXPERT_STYLES[0]], gate_up, down)
        tensors = {"shared_gate_up": gate_up, "shared_down": down}
        if self.config.shared_expert_gate:
            tensors["shared_gate"] = self.tensor("shared_expert_gate.weight", (1, hidden))[0].to(self.dtype)
        return tensors

    def _read_matrices(self, names: list[str], gate_up: Tensor, down: Tensor) -> None:
        """An expert's gate, up and down matrices, into (H, 2I) and (I, H)."""
        inner, hidden = down.shape
        gate_up[:, :inner] = self.tensor(names[0], (inner, hidden)).t()
        gate_up[:, inner:] = self.tensor(names[1], (inner, hidden)).t()
        down.copy_(self.tensor(names[2], (hidden, inner)).t())

    def _single_expert(self, first: int) -> _ReadExpert:
        base = f"{self.prefix}.experts.{first}"
        style = next((s for s in _EXPERT_STYLES if f"{base}.{s[0]}.weight" in self.files), None)
        if style is None:
            raise self.files.missing(
                f"{base}.{_EXPERT_STYLES[0][0]}.weight (nor {_EXPERT_STYLES[1][0]}.weight, nor the fused "
                f"{self.prefix}.experts.gate_up_proj)",
                f"{self.prefix}.",
            )

        def read_expert(expert: int, gate_up: Tensor, down: Tensor) -> None:
            self._read_matrices([f"experts.{expert}.{part}.weight" for part in style], gate_up, down)

        return read_expert

    def _fused_expert(self) -> _ReadExpert:
        config = self.config
        hidden, inner, experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
        names = (f"{self.prefix}.experts.gate_up_proj", f"{self.prefix}.experts.down_proj")
        # Either matrix may be square, but never both: together they show the axis order.
        as_rows = ((experts, 2 * inner, hidden), (experts, hidden, inner))
        as_columns = ((experts, hidden, 2 * inner), (experts, inner, hidden))
        shapes = (self.files.shape(names[0]), self.files.shape(names[1]))
        if shapes not in (as_rows, as_columns):
            raise ArgumentError(
                f"{names[0]} is {shapes[0]} and {names[1]} is {shapes[1]}; with config.json's numbers they "
                f"must be {as_rows[0]} and {as_rows[1]}, or {as_columns[0]} and {as_columns[1]}",
                argument="directory",
            )

        def read_expert(expert: int, gate_up: Tensor, down: Tensor) -> None:
            for name, out in zip(names, (gate_up, down), strict=True):
                value = _floating(self.files.read(name, (expert, expert + 1))[0], name)
                out.copy_(value.t() if shapes == as_rows else value)

        return read_expert


def _find_block(files: CheckpointFiles, layer: int) -> str:
    """Prefix of a layer's MoE block, e.g. model.layers.3.mlp: the prefix below which there is a router."""
    pattern = re.compile(r"(?:^|.*\.)layers\.(\d+)\.(?:mlp|block_sparse_moe)\.gate\.weight")
    routers = {name: int(match[1]) for name in files.names if (match := pattern.fullmatch(name))}
    here = [name for name, number in routers.items() if number == layer]
    if len(here) == 1:
        return here[0].removesuffix(".gate.weight")
    if here:
        raise ArgumentError(
            f"{files.directory} has {len(here)} routers for layer {layer}: {', '.join(here)}",
            argument="layer",
        )
    with_router = sorted(set(routers.values()))
    shown = ", ".join(map(str, with_router))
    raise ArgumentError(
        f"layer {layer} of {files.directory} has no router (looked for *layers.{layer}.mlp.gate.weight and "
        f"*layers.{layer}.block_sparse_moe.gate.weight); layers with one: {shown or 'none'}",
        argument="layer",
        found=with_router,
    )


def _floating(value: Tensor, name: str) -> Tensor:
    if value.dtype not in _DTYPES.values():
        raise ArgumentError(
            f"{name} is {value.dtype}; need bf16, fp16, fp32, or fp8 by expert with weight_scale_inv",
            argument="directory",
        )
    return value
