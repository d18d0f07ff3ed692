"""Quantised matrices of published files: which scheme a file says, and the matrix behind its codes.

* ModelSlim (msmodelslim): `ascend_moe.checkpoint.modelslim`.
* compressed-tensors: quantization_config of config.json. Formats int-quantized (int8) and float-quantized (fp8 e4m3)
  have ``weight`` (N, K) and ``weight_scale``: (N, 1) by channel, one value by tensor, or one a block. pack-quantized
  has ``weight_packed`` int32, ``weight_shape`` (2,), and ``weight_scale`` (N, K / group) or (N, 1): numbers of 4 or
  8 bits, plus half their range, the first in the lowest bits of an int32. Integers that are not symmetric have
  ``weight_zero_point`` of the scale's shape, int8, or int32 packed along N: ``(code - zero) * scale``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ascend_moe.checkpoint.config import Json
from ascend_moe.checkpoint.files import SCALES, CheckpointFiles
from ascend_moe.checkpoint.modelslim import Coded, ModelSlim
from ascend_moe.errors import ArgumentError, need

_FORMATS = ("int-quantized", "float-quantized", "pack-quantized")
_FP8 = torch.float8_e4m3fn


class Weights(NamedTuple):
    """What a compressed-tensors group says of its weights."""

    form: str
    bits: int
    strategy: str
    group_size: int
    block: tuple[int, int]
    symmetric: bool = True


@dataclass(frozen=True)
class Quantized:
    """Reads the matrices that a description or a quantization_config says are quantised.

    Attributes:
        modelslim: ModelSlim's description; None: there is none.
        groups: targets and weights of each compressed-tensors group.
        ignored: names, classes or "re:" patterns that are left in float.
        rows_are_int8: the activations are quantised by token, to int8.
    """

    modelslim: ModelSlim | None = None
    groups: list[tuple[list[str], Weights]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    rows_are_int8: bool = False

    @staticmethod
    def of(directory: str | Path, values: Json) -> Quantized:
        """Reads what a directory and its config.json's values say.

        Raises:
            ArgumentError: a format of compressed-tensors that is not read, or a quantization_config of another form.
        """
        if (described := ModelSlim.of(directory)) is not None:
            return Quantized(described, rows_are_int8=True)
        said = values.get("quantization_config") or values.get("compression_config") or {}
        if not isinstance(said, dict) or said.get("quant_method") != "compressed-tensors":
            return Quantized()
        groups = said.get("config_groups")
        ignored = said.get("ignore") or []
        known = isinstance(groups, dict) and all(isinstance(group, dict) for group in groups.values())
        need(known, "directory", "has config_groups {!r:.60} in quantization_config; need an object of groups", groups)
        assert isinstance(groups, dict)
        read = [(list(group.get("targets") or []), _weights(group, said)) for group in groups.values()]
        tokens = [group.get("input_activations") or {} for group in groups.values()]
        int8 = all((a.get("num_bits"), a.get("type"), a.get("dynamic")) == (8, "int", True) for a in tokens)
        return Quantized(None, read, [str(name) for name in ignored], int8)

    def finds(self, files: CheckpointFiles, name: str) -> bool:
        """Whether there is a matrix of that name, packed or not."""
        return name in files or f"{name}_packed" in files

    def weights_of(self, name: str) -> Weights | None:
        """What compressed-tensors says of a matrix; None: it is left in float."""
        module = name.removesuffix(".weight")
        if any(_matches(pattern, module) for pattern in self.ignored):
            return None
        return next((weights for targets, weights in self.groups if any(_matches(t, module) for t in targets)), None)

    def keeps(self, files: CheckpointFiles, name: str) -> int:
        """Bits of the codes that a layer can keep of a matrix, 8 or 4; 0: it becomes floats. Reads no data.

        8: int8 with a scale a channel, whose rows are int8. 4: int4 with a scale a channel or group; the rows become
        int8, also where a file leaves them in float.
        """
        if self.modelslim is not None:
            return self.modelslim.bits(name)
        weights = self.weights_of(name)
        packed = weights is not None and weights.form == "pack-quantized" and f"{name}_packed" in files
        if weights is None or not weights.symmetric or not (packed or f"{name}_scale" in files):
            return 0
        if packed and weights.bits == 4:
            return 4
        integer = weights.strategy == "channel" and (packed or weights.form == "int-quantized")
        return 8 if integer and self.rows_are_int8 else 0

    def symmetric(self, files: CheckpointFiles, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the zero of a matrix that ``keeps`` names is code 0."""
        return self.modelslim is None or self.modelslim.symmetric(files, name, shape)

    def coded(self, files: CheckpointFiles, name: str, shape: tuple[int, ...]) -> Coded:
        """The codes and scales of a symmetric matrix (N, K) that ``keeps`` names.

        Raises:
            ArgumentError: a scale is missing, a tensor has another shape or dtype.
        """
        if self.modelslim is not None:
            return self.modelslim.coded(files, name, shape)
        weights = self.weights_of(name)
        assert weights is not None
        if weights.form == "pack-quantized":
            return Coded(_unpacked(files, name, shape, weights), _scale(files, name, shape, weights))
        codes = files.part(name, shape, torch.int8)
        return Coded(codes, files.part(f"{name}_scale", (shape[0], 1), *SCALES).float())

    def read(self, files: CheckpointFiles, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """The matrix (N, K) in fp32; None: it is not quantised in a way that this class reads.

        Raises:
            ArgumentError: a scale is missing, a tensor has another shape or dtype, the scheme is not read.
        """
        if self.modelslim is not None:
            return self.modelslim.read(files, name, shape) if self.modelslim.bits(name) else None
        weights = self._scheme(files, name)
        if weights is None:
            return None
        if weights.form == "pack-quantized":
            codes = _unpacked(files, name, shape, weights)
        else:
            codes = files.part(name, shape, torch.int8 if weights.form == "int-quantized" else _FP8)
        scale = _spread(_scale(files, name, shape, weights), shape, weights)
        values = codes.float() if weights.symmetric else codes.float() - _zeros(files, name, shape, weights)
        return values * scale

    def _scheme(self, files: CheckpointFiles, name: str) -> Weights | None:
        weights = self.weights_of(name)
        packed = f"{name}_packed" in files
        if weights is None:
            need(not packed, "directory", "has {}_packed, which quantization_config ignores or does not name", name)
            return None
        if weights.form == "pack-quantized":
            return weights if packed else None
        # A float matrix beside the scheme is a module that is no Linear: routers often are not ignored by name.
        return weights if f"{name}_scale" in files or files.dtype(name) in ("I8", "F8_E4M3") else None


def _weights(group: Json, said: Json) -> Weights:
    """A group's weights; the group's own format goes before the file's."""
    form = group.get("format") or said.get("format")
    need(form in _FORMATS, "directory", "has compressed-tensors format {!r:.40}; need one of {}", form, _FORMATS)
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise ArgumentError(f"directory has weights {weights!r:.60} in quantization_config", argument="directory")
    strategy, bits, kind = (weights.get(key) for key in ("strategy", "num_bits", "type"))
    allowed: dict[str, tuple[tuple[str, ...], tuple[int, ...], str]] = {
        "int-quantized": (("channel", "tensor"), (8,), "int"),
        "float-quantized": (("channel", "tensor", "block"), (8,), "float"),
        "pack-quantized": (("channel", "group"), (4, 8), "int"),
    }
    strategies, sizes, wanted = allowed[str(form)]
    rule = "has {} weights of {} bits, type {!r:.20}, strategy {!r:.20}; need bits {}, type {}, strategy {}"
    fits = strategy in strategies and bits in sizes and kind == wanted
    need(fits, "directory", rule, form, bits, kind, strategy, sizes, wanted, strategies)
    symmetric = weights.get("symmetric", True)
    rule = "has symmetric {!r:.20} of {} weights; need true" + ("" if kind == "float" else " or false")
    need(symmetric is True or (symmetric is False and kind == "int"), "directory", rule, symmetric, form)
    need(weights.get("actorder") is None, "directory", "has actorder {!r:.20}; need none", weights.get("actorder"))
    size = weights.get("group_size") or 0
    need(
        strategy != "group" or (type(size) is int and size > 0), "directory", "has group_size {!r:.20}; need > 0", size
    )
    block = weights.get("block_structure") or (0, 0)
    sides = isinstance(block, (list, tuple)) and len(block) == 2 and all(type(side) is int for side in block)
    need(sides and (strategy != "block" or min(block) > 0), "directory", "has block_structure {!r:.30}", block)
    group_size = size if strategy == "group" else 0
    return Weights(str(form), int(bits or 0), str(strategy), group_size, (block[0], block[1]), symmetric)


def _matches(pattern: str, module: str) -> bool:
    """Whether a target or an ignore names a module: "Linear" is every matrix."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return pattern == "Linear" or pattern == module


def _scale_shape(shape: tuple[int, ...], weights: Weights) -> tuple[int, ...]:
    rows, columns = shape
    high, wide = weights.block if weights.strategy == "block" else (1, weights.group_size or columns)
    return (-(-rows // high), -(-columns // wide))


def _scale(files: CheckpointFiles, name: str, shape: tuple[int, ...], weights: Weights) -> Tensor:
    """Scales in fp32: (N, 1) by channel, (N, G) by group, one a block, or one value."""
    single = f"{name}_scale"
    if weights.strategy == "tensor":
        return files.part(single, () if single in files and files.shape(single) == () else (1,), *SCALES).float()
    return files.part(single, _scale_shape(shape, weights), *SCALES).float()


def _zeros(files: CheckpointFiles, name: str, shape: tuple[int, ...], weights: Weights) -> Tensor:
    """Zero points in fp32, as they are subtracted from a matrix (N, K)."""
    zero = f"{name}_zero_point"
    if weights.form != "pack-quantized":
        single = weights.strategy == "tensor"
        wanted = files.shape(zero) if single and zero in files else _scale_shape(shape, weights)
        return files.part(zero, wanted, torch.int8).float()
    rows, groups = _scale_shape(shape, weights)
    packed = files.part(zero, (-(-rows // (32 // weights.bits)), groups), torch.int32)
    return _spread(_numbers(packed.t(), weights.bits)[:, :rows].t().float(), shape, weights)


def _spread(scale: Tensor, shape: tuple[int, ...], weights: Weights) -> Tensor:
    """Scales as they are multiplied with a matrix (N, K)."""
    if weights.strategy not in ("block", "group"):
        return scale
    high, wide = weights.block if weights.strategy == "block" else (1, weights.group_size)
    return scale.repeat_interleave(high, 0)[: shape[0]].repeat_interleave(wide, 1)[:, : shape[1]]


def _numbers(packed: Tensor, bits: int) -> Tensor:
    """The signed numbers along the last dimension of int32 words, which hold them plus half their range."""
    places = torch.arange(32 // bits, dtype=torch.int32) * bits
    return ((packed[..., None] >> places) & ((1 << bits) - 1)).flatten(-2) - (1 << (bits - 1))


def _unpacked(files: CheckpointFiles, name: str, shape: tuple[int, ...], weights: Weights) -> Tensor:
    """int8 codes (N, K) of numbers of 4 or 8 bits, packed along K into int32."""
    rows, columns = shape
    stated = files.part(f"{name}_shape", (2,), torch.int64, torch.int32).tolist()
    rule = "has {}_shape {}; config.json's numbers make it {}"
    need(stated == [rows, columns], "directory", rule, name, stated, [rows, columns])
    packed = files.part(f"{name}_packed", (rows, -(-columns // (32 // weights.bits))), torch.int32)
    return _numbers(packed, weights.bits)[:, :columns].to(torch.int8)
