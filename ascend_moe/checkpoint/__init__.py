"""One MoE layer out of a Hugging Face safetensors checkpoint, each rank reading its own experts only.

Layouts of the experts (all with any shard files):

* published: one matrix an expert: ``experts.N.{w1,w3,w2}.weight`` (Mixtral) or
  ``experts.N.{gate,up,down}_proj.weight`` (Qwen, DeepSeek; Nemotron has no gate), bf16, fp16, fp32, fp8 with
  ``weight_scale_inv`` blocks (DeepSeek-V3) or ``weight_scale`` by channel or tensor, or fp4 (DeepSeek-V4);
* fused: ``experts.gate_up_proj`` (E, 2I, H) and ``experts.down_proj`` (E, H, I), or both transposed; Granite calls
  them ``input_linear.weight`` and ``output_linear.weight``. Zero experts may have rows there that nobody reads;
* fused in MX's fp4: ``experts.gate_up_proj_blocks`` and ``_scales`` (gpt-oss);
* published, quantised by ModelSlim or compressed-tensors: see `ascend_moe.checkpoint.quantized`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ascend_moe.checkpoint.config import Fp8Format, moe_config, need_directory, read_json, returns_pair
from ascend_moe.checkpoint.files import CheckpointFiles, Read, dequantize_fp4, dequantize_mxfp4, read_fp8
from ascend_moe.checkpoint.modelslim import Coded
from ascend_moe.checkpoint.quantized import Quantized
from ascend_moe.dispatchers.base import Dispatcher
from ascend_moe.errors import ArgumentError, need, with_typed_errors
from ascend_moe.experts import Activation
from ascend_moe.experts.int4 import IN_WORD, correction_of, pack_int4
from ascend_moe.layer import MoEConfig, MoELayer
from ascend_moe.moe_config import ROUTERS

#: Names of an expert's gate, up and down matrices; without a gate the last two.
_EXPERT_STYLES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
#: Names of all experts' matrices in one tensor, without a gate the last two.
_FUSED = (("experts.gate_up_proj", "experts.down_proj"), ("input_linear.weight", "output_linear.weight"))
_FUSED_UP = (("experts.up_proj", "experts.down_proj"),)
#: Where a correction bias lies, from the block or below the router.
_BIASES = (
    "{}.e_score_correction_bias",
    "router.e_score_correction_bias",
    "e_score_correction_bias",
    "moe_statics.e_score_correction_bias",
    "{}.moe_statics.e_score_correction_bias",
    "{}.expert_bias",
    "{}.bias",
)
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")
#: A router's name: the block of a decoder layer, not of layers behind the last, and the router in it.
_ROUTER = re.compile(
    r"(?P<block>(?!.*\b(?:mtp|visual|vision_\w+)\.)(?:.*\.)?layers\.(?P<layer>\d+)"
    r"\.(?:mlp|block_sparse_moe|feed_forward|mixer|ffn))"
    r"\.(?P<router>gate|router|gate\.wg|router\.layer|router\.classifier)\.weight"
)
_ReadExpert = Callable[[int, Tensor, Tensor], None]  # expert, out gate_up (H, 2I), out down (I, H)
_FP8 = torch.float8_e4m3fn
_INTEGERS = ("I8", "U8", "I32")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass
class LayerWeights:
    """The weights of one layer that one rank holds.

    Attributes:
        config: the layer's numbers.
        tensors: by the names of MoELayer's parameters; int8 and int4 experts as after ``quantize_``.
        dtype: of the layer.
        reads: every read from the files, in order; ``bytes_read`` is the sum of their sizes.
    """

    config: MoEConfig
    tensors: dict[str, Tensor]
    dtype: torch.dtype
    reads: list[Read]

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data read from the files."""
        return sum(read.bytes for read in self.reads)


class PairLayer(MoELayer):
    """A MoELayer for decoder layers that unpack two values from their MoE block, as gpt-oss's and Llama-4's do."""

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        """Return the output, and None in the place of the router's scores, which these decoder layers drop.

        Args:
            args, options: as of `MoELayer.forward`.
        """
        return super().forward(*args, **options), None


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
    dequantize: bool = False,
) -> MoELayer:
    """Builds a MoELayer with the weights of ``load_layer`` for the dispatcher's rank.

    It takes the place of the MoE block in transformers' model: where that block returns two values (gpt-oss, Llama-4),
    the layer is a `PairLayer`, which returns ``(y, None)``.

    Args:
        directory, layer, dtype, config, dequantize: as of `load_layer`.
        dispatcher: its rank and world size say which experts are read; the layer keeps it.
        router_dtype, device, global_bs: as of `MoELayer`.

    Raises:
        ArgumentError: as `load_layer`.
    """
    weights = load_layer(
        directory,
        layer,
        rank=dispatcher.rank,
        world=dispatcher.world_size,
        dtype=dtype,
        config=config,
        dequantize=dequantize,
    )
    pair = (Path(directory) / "config.json").is_file() and returns_pair(read_json(directory))
    module = (PairLayer if pair else MoELayer)(
        weights.config, dispatcher, dtype=weights.dtype, router_dtype=router_dtype, device="meta", global_bs=global_bs
    )
    if "w_down_correction" in weights.tensors:
        gate_up, down = (weights.tensors[f"{name}_scale"].shape[1] for name in ("w_gate_up", "w_down"))
        module.quantize_(4, (gate_up, down))
    elif "w_down_scale" in weights.tensors:
        module.quantize_()
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
    dequantize: bool = False,
) -> LayerWeights:
    """Reads the router, the shared expert and experts rank * L .. (rank + 1) * L - 1 of one layer.

    Args:
        directory: with config.json and the safetensors files.
        layer: decoder layer, counted from 0.
        rank, world: whose experts.
        dtype: of the experts' weights; None: config.json's, else bf16. The router's are fp32.
        config: replaces the numbers of config.json.
        dequantize: experts in int8 by channel, whose activations are int8 by token (W8A8), and in int4 become floats
            too. Else they keep their codes, and dispatch sends int8 rows; with int4 (W4A8) also where the file leaves
            the activations in float.

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
        prefix, router = _find_block(files, layer)
        if (table := f"{prefix}.{router}.tid2eid") in files:  # DeepSeek-V4's first layers
            need(config.router == "deepseek_v4", "directory", "has {}, a table of router 'hash'", table)
            config = replace(config, router="hash", vocab_size=files.shape(table)[0])
        reader = _Block(files, prefix, router, config, dtype, fp8, Quantized.of(directory, values), dequantize)
        tensors = reader.router_tensors()
        local = config.num_experts // world
        tensors.update(reader.experts(range(rank * local, (rank + 1) * local)))
        tensors.update(reader.shared())
        reader.need_no_more()
        return LayerWeights(config, tensors, dtype, files.reads)


@dataclass
class _Block:
    """Reads the tensors below one layer's MoE block, checking every shape."""

    files: CheckpointFiles
    prefix: str
    router: str
    config: MoEConfig
    dtype: torch.dtype
    fp8: Fp8Format
    quantized: Quantized
    dequantize: bool

    @property
    def gated(self) -> bool:
        """Whether the experts have gate matrices."""
        return Activation.of(self.config.activation).gated

    def router_tensors(self) -> dict[str, Tensor]:
        """The router's, and the matrices around the experts that have a width of their own."""
        config, dtype = self.config, self.dtype
        experts, hidden = config.all_experts, config.hidden_size
        tensors = {"gate_weight": self.tensor(f"{self.router}.weight", (experts, hidden)).float()}
        if ROUTERS[config.router].biased:
            names = [name.format(self.router) for name in _BIASES]
            name = next((n for n in names if f"{self.prefix}.{n}" in self.files), names[0])
            tensors["gate_bias"] = self.tensor(name, (experts,), (1, experts)).float().reshape(experts)
        if config.router_bias:
            tensors["logit_bias"] = self.tensor(f"{self.router}.bias", (experts,)).float()
        if config.router == "hash":
            tensors["tid2eid"] = self.files.read(f"{self.prefix}.{self.router}.tid2eid").to(torch.int32)
        if config.latent_size:
            for own, name, shape in (
                ("w_latent_in", "fc1_latent_proj.weight", (config.latent_size, hidden)),
                ("w_latent_out", "fc2_latent_proj.weight", (hidden, config.latent_size)),
            ):
                tensors[own] = self.tensor(name, shape).t().to(dtype).contiguous()
        return tensors

    def tensor(self, name: str, *shapes: tuple[int, ...]) -> Tensor:
        """A whole tensor of one of the shapes; quantised matrices come as fp32."""
        full = f"{self.prefix}.{name}"
        matrix = next((shape for shape in shapes if len(shape) == 2 and shape[0] > 1), None)
        if matrix and (value := self.quantized.read(self.files, full, matrix)) is not None:
            return value
        fp4 = self.fp8.fp4_experts and ".experts." in full and full in self.files
        if matrix and fp4 and self.files.dtype(full) in ("I8", "U8"):
            return self._fp4(full, *matrix)
        if (actual := self.files.shape(full)) not in shapes:
            text = f"{full} is {actual}; config.json's numbers make it {shapes[0]}"
            raise ArgumentError(text, argument="directory")
        value = self.files.read(full)
        return read_fp8(self.files, full, value, self.fp8) if value.dtype == _FP8 else _floating(value, full)

    def _fp4(self, name: str, rows: int, columns: int) -> Tensor:
        """An fp4 matrix (N, K): bytes (N, K / 2), and e8m0 exponents of 32 numbers each."""
        codes = self.files.part(name, (rows, columns // 2), torch.int8, torch.uint8)
        exponents = f"{name.removesuffix('.weight')}.scale"
        if exponents not in self.files:
            exponents = f"{name}_scale_inv"
        kinds = (torch.float8_e8m0fnu, torch.uint8)
        return dequantize_fp4(name, codes, self.files.part(exponents, (rows, columns // 32), *kinds))

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
        """w_gate_up (L, R, 2I) and w_down (L, I, R) of consecutive experts, and their biases."""
        if (coded := self._coded(experts)) is not None:
            return coded
        row, inner = self.config.row_size, self.config.moe_intermediate_size
        width = (2 if self.gated else 1) * inner
        gate_up = torch.empty(len(experts), row, width, dtype=self.dtype)
        down = torch.empty(len(experts), inner, row, dtype=self.dtype)
        read_expert = self._reader_of(experts[0])
        for local, expert in enumerate(experts):
            read_expert(expert, gate_up[local], down[local])
        tensors = {"w_gate_up": gate_up, "w_down": down}
        if self.config.expert_bias:
            for own, part, size in (("gate_up_bias", "gate_up", width), ("down_bias", "down", row)):
                name, rows = f"{self.prefix}.experts.{part}_proj_bias", (experts.start, experts.stop)
                shape, wanted = self.files.shape(name), (self.config.num_experts, size)
                need(
                    shape == wanted, "directory", "has {} of {}; config.json's numbers make it {}", name, shape, wanted
                )
                tensors[own] = _floating(self.files.read(name, rows), name).to(self.dtype)
        return tensors

    def kept_bits(self, first: int = 0) -> int:
        """Bits of the codes that the layer keeps of its experts, 8 or 4; 0: they become floats.

        All experts decide, on every rank alike, by names only; ``first`` says what they are called.
        """
        style = self._style(first)
        if self.dequantize or self.config.expert_bias or style is None:
            return 0
        everyone = range(self.config.num_experts)
        bits = {self.quantized.keeps(self.files, name) for name, _ in self._matrices(everyone, style)}
        sides = (self.config.row_size, len(self._sides(style)["w_gate_up"][0]) * self.config.moe_intermediate_size)
        packs = all(side % IN_WORD == 0 for side in sides)
        return bits.pop() if bits == {8} or (bits == {4} and packs) else 0

    def _sides(self, style: tuple[str, ...]) -> dict[str, tuple[tuple[str, ...], tuple[int, int]]]:
        """The parts and the shape (N, K) of each, of gate and up and of down."""
        row, inner = self.config.row_size, self.config.moe_intermediate_size
        return {
            "w_gate_up": (style[:2] if self.gated else style[1:2], (inner, row)),
            "w_down": (style[2:], (row, inner)),
        }

    def _matrices(self, experts: range, style: tuple[str, ...]) -> list[tuple[str, tuple[int, int]]]:
        sides = self._sides(style).values()
        return [(self._of(expert, part), shape) for parts, shape in sides for expert in experts for part in parts]

    def _of(self, expert: int, part: str) -> str:
        return f"{self.prefix}.experts.{expert}.{part}.weight"

    def _coded(self, experts: range) -> dict[str, Tensor] | None:
        """Codes and scales of experts that stay int8 or int4, as a layer has them after ``quantize_``; None: floats."""
        style, bits = self._style(experts[0]), self.kept_bits(experts[0])
        if style is None or not bits:
            return None
        if not all(self.quantized.symmetric(self.files, name, shape) for name, shape in self._matrices(experts, style)):
            return None
        made: dict[str, list[Tensor]] = {}
        for expert in experts:
            for own_name, (parts, shape) in self._sides(style).items():
                coded = [self.quantized.coded(self.files, self._of(expert, part), shape) for part in parts]
                for name, tensor in _joined(own_name, coded, bits == 4).items():
                    made.setdefault(name, []).append(tensor)
        return {name: torch.stack(tensors) for name, tensors in made.items()}

    def _style(self, first: int) -> tuple[str, str, str] | None:
        """How an expert's own matrices are called; None: there are none."""
        base, up = f"{self.prefix}.experts.{first}", 0 if self.gated else 1
        return next((s for s in _EXPERT_STYLES if self.quantized.finds(self.files, f"{base}.{s[up]}.weight")), None)

    def _reader_of(self, first: int) -> _ReadExpert:
        """What reads an expert, by the tensors that there are."""
        if f"{self.prefix}.experts.gate_up_proj_blocks" in self.files:
            return self._mxfp4_expert
        for names in _FUSED if self.gated else _FUSED_UP:
            own = [f"{self.prefix}.{name}" for name in names]
            integers = any(f"{name}_packed" in self.files for name in own)
            integers = integers or any(name in self.files and self.files.dtype(name) in _INTEGERS for name in own)
            rule = "has integers in {} for all experts; int8 and int4 are read from experts.N.gate_proj.weight …, as "
            need(not integers, "directory", rule + "ModelSlim and compressed-tensors publish them", own[0])
            if own[0] in self.files:
                return self._fused_expert(*own)
        return self._single_expert(first)

    def shared(self) -> dict[str, Tensor]:
        """The dense shared expert's tensors, if the layer has one."""
        hidden, inner = self.config.hidden_size, self.config.shared_intermediate_size
        if inner == 0:
            return {}
        styles = [(base, style) for base in _SHARED for style in _EXPERT_STYLES]
        names = {pair: f"{self.prefix}.{pair[0]}.{pair[1][2]}.weight" for pair in styles}
        there = (pair for pair in styles if self.quantized.finds(self.files, names[pair]))
        base, style = next(there, styles[0])
        gate_up = torch.empty(hidden, (2 if self.gated else 1) * inner, dtype=self.dtype)
        down = torch.empty(inner, hidden, dtype=self.dtype)
        self._read_matrices([f"{base}.{part}.weight" for part in style], gate_up, down)
        tensors = {"shared_gate_up": gate_up, "shared_down": down}
        if self.config.shared_expert_gate:
            tensors["shared_gate"] = self.tensor("shared_expert_gate.weight", (1, hidden))[0].to(self.dtype)
        return tensors

    def _read_matrices(self, names: list[str], gate_up: Tensor, down: Tensor) -> None:
        """An expert's gate, up and down matrices, into (R, 2I) and (I, R); without a gate the last two of the names."""
        inner, row = down.shape
        parts = gate_up.chunk(gate_up.shape[1] // inner, 1)
        for name, part in zip(names[-1 - len(parts) : -1], parts, strict=True):
            part.copy_(self.tensor(name, (inner, row)).t())
        down.copy_(self.tensor(names[-1], (row, inner)).t())

    def _single_expert(self, first: int) -> _ReadExpert:
        base = f"{self.prefix}.experts.{first}"
        style = self._style(first)
        if style is None:
            raise self.files.missing(
                f"{base}.{_EXPERT_STYLES[0][0]}.weight (nor {_EXPERT_STYLES[1][0]}.weight, nor the fused "
                f"{self.prefix}.experts.gate_up_proj)",
                f"{self.prefix}.",
            )

        def read_expert(expert: int, gate_up: Tensor, down: Tensor) -> None:
            self._read_matrices([f"experts.{expert}.{part}.weight" for part in style], gate_up, down)

        return read_expert

    def _mxfp4_expert(self, expert: int, gate_up: Tensor, down: Tensor) -> None:
        for part, out in (("gate_up", gate_up), ("down", down)):
            name, columns = f"{self.prefix}.experts.{part}_proj", len(out)
            wanted = (self.config.num_experts, out.shape[1], -(-columns // 32))
            for kind, shape in (("blocks", (*wanted, 16)), ("scales", wanted)):
                actual = self.files.shape(f"{name}_{kind}")
                rule = "has {}_{} of {}; config.json's numbers make it {}"
                need(actual == shape, "directory", rule, name, kind, actual, shape)
            pair = (self.files.read(f"{name}_{kind}", (expert, expert + 1))[0] for kind in ("blocks", "scales"))
            out.copy_(dequantize_mxfp4(name, *pair)[:, :columns].t())

    def _fused_expert(self, *names: str) -> _ReadExpert:
        config = self.config
        row, inner, experts = config.row_size, config.moe_intermediate_size, config.num_experts
        width = (2 if self.gated else 1) * inner
        # Either matrix may be square, but both only without a gate: together they show the axis order.
        as_rows = ((experts, width, row), (experts, row, inner))
        as_columns = ((experts, row, width), (experts, inner, row))
        shapes = tuple(self.files.shape(name) for name in names)
        if experts < config.all_experts:  # LongCat's gate_up_proj has places for experts without weights
            shapes = tuple((experts if of in (experts, config.all_experts) else of, *rest) for of, *rest in shapes)
        if shapes not in (as_rows, as_columns):
            raise ArgumentError(
                f"{names[0]} is {shapes[0]} and {names[1]} is {shapes[1]}; with config.json's numbers they "
                f"must be {as_rows[0]} and {as_rows[1]}, or {as_columns[0]} and {as_columns[1]}",
                argument="directory",
            )

        def read_expert(expert: int, gate_up: Tensor, down: Tensor) -> None:
            for name, out in zip(names, (gate_up, down), strict=True):
                value = self.files.read(name, (expert, expert + 1))[0]
                if value.dtype == _FP8:
                    value = read_fp8(self.files, name, value, self.fp8, expert)
                value = _floating(value, name)
                out.copy_(value.t() if shapes == as_rows else value)

        return read_expert


def _joined(name: str, coded: list[Coded], int4: bool) -> dict[str, Tensor]:
    """One expert's codes (K, N) of matrices side by side, with their scales, and of int4 the correction."""
    codes = torch.cat([each.codes for each in coded]).t().contiguous()
    if not int4:
        return {name: codes, f"{name}_scale": torch.cat([each.scale.reshape(-1) for each in coded])}
    groups = [each.scale.shape[1] for each in coded]
    need(len(set(groups)) == 1, "directory", "has gate and up with {} groups of scales; need as many", groups)
    scale = torch.cat([each.scale for each in coded]).t().contiguous()
    given = [each.correction for each in coded if each.correction is not None]
    correction = torch.cat(given) if len(given) == len(coded) else correction_of(codes, scale)
    return {name: pack_int4(codes), f"{name}_scale": scale, f"{name}_correction": correction}


@with_typed_errors
def kept_bits(directory: str | Path, layer: int) -> int:
    """Tells how many bits the codes have that `load_layer` keeps of a layer's experts: 8, 4, or 0: they become floats.

    Reads names only. Codes of 8 bits whose zero is not code 0, which their data show, become floats all the same.

    Args:
        directory: folder with config.json and the safetensors files.
        layer: index of the decoder layer.

    Raises:
        ArgumentError: as `load_layer`.
    """
    values = read_json(directory)
    with CheckpointFiles(directory) as files:
        prefix, router = _find_block(files, layer)
        quantized = Quantized.of(directory, values)
        config, fp8 = moe_config(values), Fp8Format.of(values)
        return _Block(files, prefix, router, config, torch.float32, fp8, quantized, False).kept_bits()


@with_typed_errors
def layer_kinds(directory: str | Path) -> dict[str, list[int]]:
    """Decoder layers by kind, from the names of a checkpoint's tensors: "routed", "hash" and "dense".

    Raises:
        ArgumentError: the directory holds no safetensors checkpoint.
    """
    with CheckpointFiles(directory) as files:
        routers = {int(match["layer"]): match for name in files.names if (match := _ROUTER.fullmatch(name))}
        prefixes = {match["block"].rsplit(match["layer"], 1)[0] for match in routers.values()}
        layers = {int(name[len(p) :].split(".")[0]) for name in files.names for p in prefixes if name.startswith(p)}
        hashed = {n for n, match in routers.items() if f"{match['block']}.{match['router']}.tid2eid" in files}
    kinds = {"routed": set(routers) - hashed, "hash": hashed, "dense": layers - set(routers)}
    return {kind: sorted(numbers) for kind, numbers in kinds.items()}


def _find_block(files: CheckpointFiles, layer: int) -> tuple[str, str]:
    """Prefix of a layer's MoE block, e.g. model.layers.3.mlp, and its router, e.g. gate, whose weight lies below."""
    routers = [match for name in files.names if (match := _ROUTER.fullmatch(name))]
    here = [match for match in routers if int(match["layer"]) == layer]
    if len(here) == 1:
        return here[0]["block"], here[0]["router"]
    if here:
        raise ArgumentError(
            f"{files.directory} has {len(here)} routers for layer {layer}: {', '.join(match[0] for match in here)}",
            argument="layer",
        )
    with_router = sorted({int(match["layer"]) for match in routers})
    shown = ", ".join(map(str, with_router))
    raise ArgumentError(
        f"layer {layer} of {files.directory} has no router (looked for *layers.{layer}.BLOCK.ROUTER.weight: "
        f"mlp.gate, mlp.router, block_sparse_moe.gate, mixer.gate, ffn.gate …); layers with one: {shown or 'none'}",
        argument="layer",
        found=with_router,
    )


def _floating(value: Tensor, name: str) -> Tensor:
    if value.dtype not in _DTYPES.values():
        raise ArgumentError(
            f"{name} is {value.dtype}; need bf16, fp16, fp32, or fp8 with its scales", argument="directory"
        )
    return value
