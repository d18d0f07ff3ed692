"""Loading one MoE layer from a Hugging Face safetensors checkpoint; each rank reads its own experts only.

Layouts of the experts (with any number of shard files):

* published: one matrix per expert: ``experts.N.{w1,w3,w2}.weight`` (Mixtral) or
  ``experts.N.{gate,up,down}_proj.weight`` (Qwen, DeepSeek; Nemotron has no gate), bf16, fp16, fp32, fp8 with
  ``weight_scale_inv`` blocks (DeepSeek-V3) or ``weight_scale`` by channel or tensor, or fp4 (DeepSeek-V4);
* fused: ``experts.gate_up_proj`` (E, 2I, H) and ``experts.down_proj`` (E, H, I), or both transposed; Granite names
  them ``input_linear.weight`` and ``output_linear.weight``. Rows of zero experts are ignored;
* fused in MX's fp4: ``experts.gate_up_proj_blocks`` and ``_scales`` (gpt-oss);
* published, quantized by ModelSlim or compressed-tensors: see `ascend_moe.checkpoint.quantized`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ascend_moe._tensors import on_the_host
from ascend_moe.checkpoint.block import Block
from ascend_moe.checkpoint.config import Fp8Format, moe_config, need_directory, read_json, returns_pair, text_values
from ascend_moe.checkpoint.files import CheckpointFiles, Read
from ascend_moe.checkpoint.quantized import Quantized
from ascend_moe.dispatchers.base import Dispatcher
from ascend_moe.errors import ArgumentError, need, with_typed_errors
from ascend_moe.layer import MoEConfig, MoELayer

#: A router's name: the MoE block of a decoder layer, and the router in it. Excludes layers after the last.
_ROUTER = re.compile(
    r"(?P<block>(?!.*\b(?:mtp|visual|vision_\w+)\.)(?:.*\.)?layers\.(?P<layer>\d{1,9})"
    r"\.(?:mlp|block_sparse_moe|feed_forward|mixer|ffn))"
    r"\.(?P<router>gate|router|gate\.wg|router\.layer|router\.classifier)\.weight"
)
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass
class LayerWeights:
    """One rank's weights of one MoE layer, as `load_layer` returns them.

    Attributes:
        config: sizes, router and activation of the layer.
        tensors: CPU tensors by the names of MoELayer's parameters; int8 and int4 experts as after its ``quantize_``.
        dtype: dtype of the layer's weights, except the router's (fp32) and int8 or int4 experts.
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
    """A MoELayer whose forward returns two values, as the decoder layers of gpt-oss and Llama-4 expect."""

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        """Return ``(output, None)``: these decoder layers ignore the second value, which would be the router's scores.

        Args:
            args, options: as in `MoELayer.forward`.
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
    """Return a MoELayer with the weights of ``load_layer`` for the dispatcher's rank.

    The layer can replace the MoE block in transformers' model. If that block returns two values (gpt-oss, Llama-4), the
    layer is a `PairLayer`, which returns ``(y, None)``.

    Args:
        directory, layer, dtype, config, dequantize: as in `load_layer`.
        dispatcher: transports the layer's rows; its rank and world size select the experts to read.
        router_dtype, device, global_bs: as in `MoELayer`.

    Raises:
        ArgumentError, LibraryError: as in `load_layer`.
    """
    place = {"rank": dispatcher.rank, "world": dispatcher.world_size}
    weights = load_layer(directory, layer, **place, dtype=dtype, config=config, dequantize=dequantize)
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


@on_the_host
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
    """Read the router, the shared expert and this rank's share of the experts of one MoE layer.

    Args:
        directory: folder with config.json and the safetensors files.
        layer: index of the decoder layer, from 0.
        rank, world: read experts rank * L .. (rank + 1) * L - 1 of E = world * L; world must divide E.
        dtype: dtype of the weights; None: config.json's, or bf16 if it names none. The router's are always fp32.
        config: sizes, router and activation of the layer; None: read them from config.json.
        dequantize: convert all quantized experts to ``dtype``. False: if all experts have int8 weights with a scale per
            channel and int8 activations per token (W8A8), or all have int4 weights (W4A8, even if the file leaves
            activations in float), they stay quantized, and dispatch sends int8 rows; others are converted.

    Raises:
        ArgumentError: a file, layer or tensor is missing or does not fit. The message names what was looked for
            and what was found; for a missing tensor so do the error's attributes ``missing`` and ``found``.
        LibraryError: safetensors is not installed.
    """
    rule = "is {!r:.60}; need torch.bfloat16, torch.float16 or torch.float32"
    need(dtype in (None, *_DTYPES.values()), "dtype", rule, dtype)
    for name, number in (("layer", layer), ("rank", rank), ("world", world)):
        need(hasattr(number, "__index__"), name, "is {!r:.60}; it must be an integer", number)
    need(config is None or isinstance(config, MoEConfig), "config", "is {!r:.60}; it must be a MoEConfig", config)
    need_directory(directory)
    needed = config is None or dtype is None or (Path(directory) / "config.json").is_file()
    values = text_values(read_json(directory)) if needed else {}
    config = moe_config(values) if config is None else config
    need(0 <= rank < world, "rank", "is {} of world {}; need 0 <= rank < world", rank, world)
    rule = "is {}; it must divide the checkpoint's {} experts"
    need(config.num_experts % world == 0, "world", rule, world, config.num_experts)
    if dtype is None:
        said = str(values.get("dtype") or values.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        rule = "has dtype {!r:.40} in config.json; need {}, or pass dtype="
        need(said in _DTYPES, "directory", rule, said, " or ".join(_DTYPES))
        dtype = _DTYPES[said]
    fp8 = Fp8Format.of(values)
    with CheckpointFiles(directory) as files:
        prefix, router = _find_block(files, layer)
        if (table := f"{prefix}.{router}.tid2eid") in files:  # DeepSeek-V4's first layers
            need(config.router == "deepseek_v4", "directory", "has {}, a table of router 'hash'", table)
            config = replace(config, router="hash", vocab_size=files.shape(table)[0])
        block = Block(files, prefix, router, config, dtype, fp8, Quantized.of(directory, values), dequantize)
        local = config.num_experts // world
        tensors = block.tensors(range(rank * local, (rank + 1) * local))
        return LayerWeights(config, tensors, dtype, files.reads)


@with_typed_errors
def kept_bits(directory: str | Path, layer: int) -> int:
    """Return 8 or 4 if `load_layer` keeps a layer's experts in int8 or int4, or 0 if it converts them to floats.

    Reads names and headers only, so it also returns 8 for int8 experts whose offsets are not all 0; `load_layer`, which
    reads the offsets, converts those to floats.

    Args:
        directory: folder with config.json and the safetensors files.
        layer: index of the decoder layer, from 0.

    Raises:
        ArgumentError, LibraryError: as in `load_layer`.
    """
    values = text_values(read_json(directory))
    with CheckpointFiles(directory) as files:
        prefix, router = _find_block(files, layer)
        config, fp8, quantized = moe_config(values), Fp8Format.of(values), Quantized.of(directory, values)
        return Block(files, prefix, router, config, torch.float32, fp8, quantized).kept_bits()


@with_typed_errors
def layer_kinds(directory: str | Path) -> dict[str, list[int]]:
    """Return the indices of decoder layers by kind: "routed" and "hash" (MoE, the latter by token id), and "dense".

    Raises:
        ArgumentError: the ``directory`` is not a safetensors checkpoint.
        LibraryError: safetensors is not installed.
    """
    with CheckpointFiles(directory) as files:
        routers = {int(match["layer"]): match for name in files.names if (match := _ROUTER.fullmatch(name))}
        prefixes = {match["block"].rsplit(match["layer"], 1)[0] for match in routers.values()}
        layers = {int(name[len(p) :].split(".")[0]) for name in files.names for p in prefixes if name.startswith(p)}
        hashed = {n for n, match in routers.items() if f"{match['block']}.{match['router']}.tid2eid" in files}
    kinds = {"routed": set(routers) - hashed, "hash": hashed, "dense": layers - set(routers)}
    return {kind: sorted(numbers) for kind, numbers in kinds.items()}


def _find_block(files: CheckpointFiles, layer: int) -> tuple[str, str]:
    """Return the prefix of a layer's MoE block, e.g. model.layers.3.mlp, and the name of its router, e.g. gate."""
    routers = [match for name in files.names if (match := _ROUTER.fullmatch(name))]
    here = [match for match in routers if int(match["layer"]) == layer]
    if len(here) == 1:
        return here[0]["block"], here[0]["router"]
    if here:
        raise ArgumentError(
            f"{files.directory} has {len(here)} routers for layer {layer}; only one per layer is supported: "
            f"{', '.join(match[0] for match in here)}",
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
