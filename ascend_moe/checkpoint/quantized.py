"""Quantized matrices of published files: their schemes, and the matrices encoded by their codes.

* ModelSlim (msmodelslim): `ascend_moe.checkpoint.modelslim`.
* compressed-tensors: quantization_config of config.json, read by `ascend_moe.checkpoint.schemes`.

  * int-quantized (int8, or one int4 per byte) and float-quantized (fp8 e4m3): ``weight`` (N, K) and ``weight_scale``:
    (N, 1) per channel, one value per tensor, (N, K / group), or one per block.
  * pack-quantized: ``weight_packed`` int32, ``weight_shape`` (2,), and ``weight_scale`` (N, K / group) or (N, 1):
    numbers of 4 or 8 bits, plus half their range, the first in the lowest bits of an int32.
  * Asymmetric integers have ``weight_zero_point`` with the scale's shape, int8, or int32 packed along N:
    ``(code - zero) * scale``.
  * mxfp4-pack-quantized: ``weight_packed``, two fp4 per byte; mxfp8-quantized: ``weight`` in fp8; both with exponents
    ``weight_scale`` uint8 (N, K / 32).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ascend_moe.checkpoint.config import Json
from ascend_moe.checkpoint.files import FP8, SCALES, CheckpointFiles, Part, numbers
from ascend_moe.checkpoint.modelslim import ModelSlim
from ascend_moe.checkpoint.schemes import Scheme, Schemes
from ascend_moe.checkpoint.stored import Block, Coded, Stored, blocks_of, fp4_of, scaled, spread
from ascend_moe.errors import need


@dataclass(frozen=True)
class Quantized:
    """Reader of a checkpoint's quantized matrices, in ModelSlim's or compressed-tensors' formats.

    Attributes:
        modelslim: reader by ModelSlim's description; None: the checkpoint has none.
        schemes: groups of compressed-tensors' quantization_config; None: there is none, or ``modelslim`` is used.
    """

    modelslim: ModelSlim | None = None
    schemes: Schemes | None = None

    @staticmethod
    def of(directory: str | Path, values: Json) -> Quantized:
        """Return a reader by ModelSlim's description in ``directory``, else by the config.json ``values``.

        Raises:
            ArgumentError: a quant_method, key or value is not supported.
        """
        described = ModelSlim.of(directory)
        return Quantized(described, Schemes.of(values) if described is None else None)

    def stored(self, files: CheckpointFiles, shapes: Mapping[str, tuple[int, int]]) -> dict[str, Stored]:
        """Return by name how to read the quantized matrices among ``shapes``, (N, K) by name; not floats or plain fp8.

        The result depends on names and headers, not on data.

        Raises:
            ArgumentError: a scheme is not supported, or does not fit a matrix.
        """
        if self.modelslim is not None:
            found = {name: self.modelslim.stored(files, name, shape) for name, shape in shapes.items()}
            return {name: stored for name, stored in found.items() if stored is not None}
        groups = {} if self.schemes is None else self.schemes.of_matrices(shapes)
        schemes: dict[str, Scheme] = {}
        made = {}
        for name, shape in shapes.items():
            group, packed = groups.get(name), f"{name}_packed" in files
            rule = "has {}_packed, which quantization_config ignores or does not name: correct quantization_config"
            need(group is not None or not packed, "directory", rule, name)
            coded = packed or f"{name}_scale" in files
            coded = coded or (files.is_here(name) and files.dtype(name) in (torch.int8, FP8))
            # A float matrix in a group is not a Linear module: routers are often not ignored by name.
            if self.schemes is not None and group is not None and coded:
                schemes[group] = schemes.get(group) or self.schemes.scheme(group)
                made[name] = _stored(name, shape, schemes[group])
        return made


def _stored(name: str, shape: tuple[int, int], scheme: Scheme) -> Stored:
    rows, columns = shape
    size = scheme.group_size or columns
    rule = "has group_size {} of {} in quantization_config, which does not divide its {} columns"
    need(columns % size == 0, "directory", rule, size, name, columns)
    block: Block = {"tensor": shape, "block": scheme.block}.get(scheme.strategy, (1, size))
    grid = blocks_of(shape, block)
    mx = scheme.form.startswith("mx")
    if scheme.form == "mxfp4-pack-quantized":
        return fp4_of(f"{name}_packed", f"{name}_scale", shape, torch.uint8)
    shapes = ((1,), ()) if scheme.strategy == "tensor" else (grid,)
    scale = Part(f"{name}_scale", shapes, (torch.uint8, torch.float8_e8m0fnu) if mx else SCALES, finite=True)
    packed = scheme.form == "pack-quantized"
    parts = [*_codes(name, shape, scheme), scale]
    if not scheme.symmetric:
        zeros = ((-(-rows // (32 // scheme.bits)), grid[1]),) if packed else shapes
        parts.append(Part(f"{name}_zero_point", zeros, (torch.int32 if packed else torch.int8,)))

    def decoded(codes: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes (N, K) and scales of the blocks."""
        if packed:
            rule = "has {}_shape {}; config.json's numbers make it {}"
            need(more[0].tolist() == [rows, columns], "directory", rule, name, more[0].tolist(), [rows, columns])
            codes, more = _numbers(codes, scheme.bits)[:, :columns].to(torch.int8), more[1:]
        elif scheme.bits == 4:
            need(bool(((codes >= -8) & (codes <= 7)).all()), "directory", "has {} with codes outside of int4", name)
        return codes, numbers(more[0]).reshape(grid)

    def value(*data: Tensor) -> Tensor:
        codes, scales = decoded(*data)
        if scheme.symmetric:
            return scaled(codes, scales, block)
        zero = _numbers(data[-1].t(), scheme.bits)[:, :rows].t() if packed else data[-1].reshape(grid)
        return scaled(codes.float() - spread(zero.float(), shape, block), scales, block)

    bits = _kept_bits(scheme)
    return Stored(tuple(parts), value, lambda *data: Coded(*decoded(*data)), bits, grid[1] if bits else 0)


def _kept_bits(scheme: Scheme) -> int:
    """Return the bits of the codes that a layer can keep, 8 or 4; 0: they become floats.

    8: int8 with channel scales and int8 rows. 4: int4 with channel or group scales; the rows become int8, also if the
    file leaves them in float.
    """
    if not scheme.symmetric or scheme.form not in ("int-quantized", "pack-quantized") or scheme.strategy == "tensor":
        return 0
    return scheme.bits if scheme.bits == 4 or (scheme.strategy == "channel" and scheme.rows_are_int8) else 0


def _codes(name: str, shape: tuple[int, int], scheme: Scheme) -> list[Part]:
    """Return the tensors of the codes."""
    if scheme.form != "pack-quantized":
        return [Part(name, (shape,), (torch.int8 if scheme.form == "int-quantized" else FP8,))]
    words = (shape[0], -(-shape[1] // (32 // scheme.bits)))
    stated = Part(f"{name}_shape", ((2,),), (torch.int64, torch.int32))
    return [Part(f"{name}_packed", (words,), (torch.int32,)), stated]


def _numbers(packed: Tensor, bits: int) -> Tensor:
    """Return the signed numbers packed along the last dimension of int32 words, stored plus half their range."""
    places = torch.arange(32 // bits, dtype=torch.int32, device=packed.device) * bits
    return ((packed[..., None] >> places) & ((1 << bits) - 1)).flatten(-2) - (1 << (bits - 1))
