"""Matrices quantized by ModelSlim (msmodelslim): quant_model_description.json names a scheme for every tensor.

* W8A8_DYNAMIC: ``weight`` int8 (N, K), ``weight_scale`` and ``weight_offset`` (N, 1): ``(code - offset) * scale``.
* W4A8_DYNAMIC: ``weight_scale`` (N, 1), and with groups of K also ``weight_scale_second`` (N, G): ``code * second *
  scale``. Their offsets are zeros. In version 1.0.0 ``weight`` is int8 (N / 2, K) with two int4 per byte, those of an
  even and the next output channel, the even one in the low bits, and ``scale_bias`` (N, any) sums up to
  ``8 * sum(weight)`` over K. Older versions have (N, K) and no bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ascend_moe.checkpoint.config import read_object
from ascend_moe.checkpoint.files import SCALES, CheckpointFiles, Part
from ascend_moe.checkpoint.stored import Coded, Stored, scaled
from ascend_moe.errors import need
from ascend_moe.experts.int4 import unpack_int4

DESCRIPTION = "quant_model_description.json"
_FLOAT, _W8A8, _W4A8 = "FLOAT", "W8A8_DYNAMIC", "W4A8_DYNAMIC"
_PACKED = "1.0.0"


@dataclass(frozen=True)
class ModelSlim:
    """Reader of matrices quantized by ModelSlim, which a checkpoint's quant_model_description.json lists.

    Attributes:
        described: content of that file: the scheme of each tensor by name, and other entries.
    """

    described: dict[str, Any]

    @staticmethod
    def of(directory: str | Path) -> ModelSlim | None:
        """Return a reader by the description file in ``directory``, or None if there is no such file."""
        path = Path(directory) / DESCRIPTION
        return ModelSlim(read_object(path)) if path.is_file() else None

    def stored(self, files: CheckpointFiles, name: str, shape: tuple[int, int]) -> Stored | None:
        """Return how to read the matrix ``name`` of ``shape`` (N, K), or None if it is not quantized.

        Raises:
            ArgumentError: the scheme is not supported, or does not fit the matrix.
        """
        said = self.described.get(name, _FLOAT)
        rule = "says {!r:.40} of {} in {}; need {}, {} or {}"
        need(said in (_FLOAT, _W8A8, _W4A8), "directory", rule, said, name, DESCRIPTION, _FLOAT, _W8A8, _W4A8)
        if said == _W4A8:
            return self._int4(files, name, shape)
        return _int8(name, shape) if said == _W8A8 else None

    def _int4(self, files: CheckpointFiles, name: str, shape: tuple[int, int]) -> Stored:
        rows, columns = shape
        packed = str(self.described.get("version")) == _PACKED
        need(not packed or rows % 2 == 0, "directory", "has {} of {} rows; need an even number", name, rows)
        parts = [
            Part(name, ((rows // 2, columns) if packed else shape,), (torch.int8,)),
            _column(f"{name}_scale", rows),
            _column(f"{name}_offset", rows),
        ]
        groups = self._groups(files, name, columns)
        if second := f"{name}_scale_second" in files:
            parts += [_column(f"{name}_{each}_second", rows, groups) for each in ("scale", "offset")]
        bias = f"{name.removesuffix('.weight')}.scale_bias"
        if biased := packed or bias in files:
            wide = files.shape(bias)[1:] if files.is_here(bias) else ()
            parts.append(_column(bias, rows, max(1, wide[0]) if len(wide) == 1 else 1))

        def coded(codes: Tensor, scale: Tensor, offset: Tensor, *more: Tensor) -> Coded:
            for part, zeros in ((parts[2], offset), *([(parts[4], more[1])] if second else [])):
                need(not bool(zeros.any()), "directory", "has {} that is not zero; {} needs zeros", part.name, _W4A8)
            codes = unpack_int4(codes.t()).t() if packed else codes
            need(bool(((codes >= -8) & (codes <= 7)).all()), "directory", "has {} with codes outside of int4", name)
            scale = scale.float() * more[0].float() if second else scale.float()
            return Coded(codes, scale, more[-1].float().sum(1) if biased else None)

        def value(*data: Tensor) -> Tensor:
            made = coded(*data)
            return scaled(made.codes, made.scale, (1, columns // groups))

        return Stored(tuple(parts), value, coded, bits=4, groups=groups)

    def _groups(self, files: CheckpointFiles, name: str, columns: int) -> int:
        """Return the groups of columns with a second scale, 1 without; from the file, else the description."""
        size, second = self.described.get("group_size") or 0, f"{name}_scale_second"
        rule = "has {}, whose group_size is {!r:.40}; need a whole number of at least 0"
        need(type(size) is int and size >= 0, "directory", rule, DESCRIPTION, size)
        if second not in files:
            rule = "has no {}, though {} says group_size {}: download it"
            need(size == 0 or size >= columns, "directory", rule, second, DESCRIPTION, size)
            return 1
        groups = (*files.shape(second), 0)[1] if files.is_here(second) else columns // (size or columns)
        rule = "has {} of {} groups, which do not divide {} columns: correct config.json, or download it again"
        need(groups > 0 and columns % groups == 0, "directory", rule, second, groups, columns)
        return groups


def _int8(name: str, shape: tuple[int, int]) -> Stored:
    offset = _column(f"{name}_offset", shape[0])
    return Stored(
        (Part(name, (shape,), (torch.int8,)), _column(f"{name}_scale", shape[0]), offset),
        lambda codes, scale, zero: (codes.float() - zero.float()) * scale.float(),
        lambda codes, scale, zero: Coded(codes, scale.float()), bits=8, groups=1, zero=offset,
    )  # fmt: skip


def _column(name: str, rows: int, columns: int = 1) -> Part:
    """Return the part for scales or offsets of channels (N, 1), or of their groups."""
    return Part(name, ((rows, columns),), SCALES, finite=True)
