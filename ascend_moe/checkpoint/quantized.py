"""Quantised matrices of published files: which scheme a file says, and the matrix behind its codes.

* ModelSlim (msmodelslim): quant_model_description.json names a scheme for every tensor. W8A8_DYNAMIC has ``weight``
  int8 (N, K), ``weight_scale`` and ``weight_offset`` (N, 1): ``(code - offset) * scale``.
* compressed-tensors: quantization_config of config.json. Formats int-quantized (int8) and float-quantized (fp8 e4m3)
  have ``weight`` (N, K) and ``weight_scale``: (N, 1) by channel, one value by tensor, or one a block. pack-quantized
  has ``weight_packed`` int32, ``weight_shape`` (2,), and ``weight_scale`` (N, K / group) or (N, 1): numbers of 4 or
  8 bits, plus half their range, the first in the lowest bits of an int32.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ascend_moe.checkpoint.config import Json, read_object
from ascend_moe.checkpoint.files import CheckpointFiles
from ascend_moe.errors import ArgumentError, need

DESCRIPTION = "quant_model_description.json"
_FLOAT, _W8A8 = "FLOAT", "W8A8_DYNAMIC"
_FORMATS = ("int-quantized", "float-quantized", "pack-quantized")
_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
_FP8 = torch.float8_e4m3fn


class Coded(NamedTuple):
    """A matrix as int8 codes (N, K) and one scale fp32 (N,) an output channel."""

    codes: Tensor
    scale: Tensor


class Weights(NamedTuple):
    """What a compressed-tensors group says of its weights."""

    form: str
    bits: int
    strategy: str
    group_size: int
    block: tuple[int, int]


@dataclass(frozen=True)
class Quantized:
    """Reads the matrices that a description or a quantization_config says are quantised.

    Attributes:
        described: scheme of each tensor, of ModelSlim's description; None: there is none.
        groups: targets and weights of each compressed-tensors group.
        ignored: names, classes or "re:" patterns that are left in float.
        rows_are_int8: the activations are quantised by token, to int8.
    """

    described: dict[str, Any] | None = None
    groups: list[tuple[list[str], Weights]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    rows_are_int8: bool = False

    @staticmethod
    def of(directory: str | Path, values: Json) -> Quantized:
        """Reads what a directory and its config.json's values say.

        Raises:
            ArgumentError: a format of compressed-tensors that is not read, or a quantization_config of another form.
        """
        if (path := Path(directory) / DESCRIPTION).is_file():
            return Quantized(described=read_object(path), rows_are_int8=True)
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

    def coded(self, files: CheckpointFiles, name: str, shape: tuple[int, ...]) -> Coded | None:
        """The codes of an int8 matrix (N, K) with a scale a channel; None: it is none, or its zero is not code 0."""
        scheme = self._scheme(files, name)
        if scheme == _W8A8:
            codes, scale, offset = self._described(files, name, shape)
            return Coded(codes, scale.reshape(-1)) if not bool(offset.any()) else None
        if isinstance(scheme, Weights) and (scheme.form, scheme.strategy) == ("int-quantized", "channel"):
            codes = _part(files, name, shape, torch.int8)
            return Coded(codes, _part(files, f"{name}_scale", (shape[0], 1), *_SCALES).float().reshape(-1))
        return None

    def read(self, files: CheckpointFiles, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """The matrix (N, K) in fp32; None: it is not quantised in a way that this class reads.

        Raises:
            ArgumentError: a scale is missing, a tensor has another shape or dtype, the scheme is not read.
        """
        scheme = self._scheme(files, name)
        if scheme is None:
            return None
        if scheme == _W8A8:
            codes, scale, offset = self._described(files, name, shape)
            return (codes.float() - offset) * scale
        assert isinstance(scheme, Weights)
        if scheme.form == "pack-quantized":
            return _unpacked(files, name, shape, scheme)
        codes = _part(files, name, shape, torch.int8 if scheme.form == "int-quantized" else _FP8)
        scale = _scale(files, name, shape, scheme)
        return codes.float() * scale

    def _scheme(self, files: CheckpointFiles, name: str) -> str | Weights | None:
        if self.described is not None:
            said = self.described.get(name, _FLOAT)
            rule = "says {!r:.40} of {} in {}; need {} or {}"
            need(said in (_FLOAT, _W8A8), "directory", rule, said, name, DESCRIPTION, _FLOAT, _W8A8)
            return None if said == _FLOAT else str(said)
        weights = self.weights_of(name)
        packed = f"{name}_packed" in files
        if weights is None:
            need(not packed, "directory", "has {}_packed, which quantization_config ignores or does not name", name)
            return None
        if weights.form == "pack-quantized":
            return weights if packed else None
        # A float matrix beside the scheme is a module that is no Linear: routers often are not ignored by name.
        return weights if f"{name}_scale" in files or files.dtype(name) in ("I8", "F8_E4M3") else None

    def _described(self, files: CheckpointFiles, name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        codes, column = _part(files, name, shape, torch.int8), (shape[0], 1)
        scale, offset = (_part(files, f"{name}_{part}", column, *_SCALES).float() for part in ("scale", "offset"))
        return codes, scale, offset


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
    need(weights.get("symmetric", True) is True, "directory", "has weights with zero points; need symmetric ones")
    need(weights.get("actorder") is None, "directory", "has actorder {!r:.20}; need none", weights.get("actorder"))
    size = weights.get("group_size") or 0
    need(
        strategy != "group" or (type(size) is int and size > 0), "directory", "has group_size {!r:.20}; need > 0", size
    )
    block = weights.get("block_structure") or (0, 0)
    sides = isinstance(block, (list, tuple)) and len(block) == 2 and all(type(side) is int for side in block)
    need(sides and (strategy != "block" or min(block) > 0), "directory", "has block_structure {!r:.30}", block)
    return Weights(str(form), int(bits or 0), str(strategy), size if strategy == "group" else 0, (block[0], block[1]))


def _matches(pattern: str, module: str) -> bool:
    """Whether a target or an ignore names a module: "Linear" is every matrix."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return pattern == "Linear" or pattern == module


def _part(files: CheckpointFiles, name: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> Tensor:
    """A tensor of that shape and one of these dtypes."""
    if name not in files:
        raise files.missing(name, name.rsplit(".", 1)[0])
    actual = files.shape(name)
    need(actual == shape, "directory", "has {} of {}; config.json's numbers make it {}", name, actual, shape)
    value = files.read(name)
    need(value.dtype in dtypes, "directory", "has {} of {}; need {}", name, value.dtype, " or ".join(map(str, dtypes)))
    return value


def _scale(files: CheckpointFiles, name: str, shape: tuple[int, ...], weights: Weights) -> Tensor:
    """Scales in fp32, as they are multiplied with a matrix (N, K)."""
    rows, columns = shape
    if weights.strategy == "channel":
        return _part(files, f"{name}_scale", (rows, 1), *_SCALES).float()
    if weights.strategy == "tensor":
        single = f"{name}_scale"
        return _part(files, single, () if single in files and files.shape(single) == () else (1,), *_SCALES).float()
    high, wide = weights.block if weights.strategy == "block" else (1, weights.group_size)
    scale = _part(files, f"{name}_scale", (-(-rows // high), -(-columns // wide)), *_SCALES).float()
    return scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]


def _unpacked(files: CheckpointFiles, name: str, shape: tuple[int, ...], weights: Weights) -> Tensor:
    """fp32 (N, K) of numbers of 4 or 8 bits, packed along K into int32."""
    rows, columns = shape
    each = 32 // weights.bits
    stated = _part(files, f"{name}_shape", (2,), torch.int64, torch.int32).tolist()
    rule = "has {}_shape {}; config.json's numbers make it {}"
    need(stated == [rows, columns], "directory", rule, name, stated, [rows, columns])
    packed = _part(files, f"{name}_packed", (rows, -(-columns // each)), torch.int32)
    places = torch.arange(each, dtype=torch.int32) * weights.bits
    numbers = (packed[..., None] >> places) & ((1 << weights.bits) - 1)
    codes = numbers.flatten(1)[:, :columns] - (1 << (weights.bits - 1))
    return codes.float() * _scale(files, name, shape, weights)
