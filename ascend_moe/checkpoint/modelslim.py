"""Matrices that ModelSlim (msmodelslim) has quantised: quant_model_description.json names a scheme for every tensor.

* W8A8_DYNAMIC: ``weight`` int8 (N, K), ``weight_scale`` and ``weight_offset`` (N, 1): ``(code - offset) * scale``.
* W4A8_DYNAMIC: ``weight_scale`` (N, 1), and by group of K also ``weight_scale_second`` (N, G): ``code * second *
  scale``. The offsets beside them are zeros. ``weight`` is int8 (N / 2, K) in version 1.0.0: two int4 a byte, those of
  an even and the next output channel, the even one in the low half; and ``scale_bias`` (N, any) sums up to
  ``8 * sum(weight)`` over K. Older versions have (N, K), and no bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ascend_moe.checkpoint.config import read_object
from ascend_moe.checkpoint.files import SCALES, CheckpointFiles
from ascend_moe.errors import need
from ascend_moe.experts.int4 import unpack_int4

DESCRIPTION = "quant_model_description.json"
_FLOAT, _W8A8, _W4A8 = "FLOAT", "W8A8_DYNAMIC", "W4A8_DYNAMIC"
_PACKED = "1.0.0"


class Coded(NamedTuple):
    """A matrix as int8 codes (N, K) of 8 or 4 bits, and fp32 scales (N, G) of G groups of K.

    correction: (N,), W4A8's bias as the file has it; None: the file has none.
    """

    codes: Tensor
    scale: Tensor
    correction: Tensor | None = None

    def dequantized(self) -> Tensor:
        """fp32 (N, K)."""
        columns = self.codes.shape[1]
        return self.codes.float() * self.scale.repeat_interleave(columns // self.scale.shape[1], 1)


@dataclass(frozen=True)
class ModelSlim:
    """Reads the matrices of a description.

    Attributes:
        described: scheme of each tensor, and what the description says besides.
    """

    described: dict[str, Any]

    @staticmethod
    def of(directory: str | Path) -> ModelSlim | None:
        """Reads a directory's description; None: there is none."""
        path = Path(directory) / DESCRIPTION
        return ModelSlim(read_object(path)) if path.is_file() else None

    def bits(self, name: str) -> int:
        """4 or 8 bits of a matrix's codes; 0: it is left in float.

        Raises:
            ArgumentError: the scheme is none that is read.
        """
        said = self.described.get(name, _FLOAT)
        rule = "says {!r:.40} of {} in {}; need {}, {} or {}"
        need(said in (_FLOAT, _W8A8, _W4A8), "directory", rule, said, name, DESCRIPTION, _FLOAT, _W8A8, _W4A8)
        return {_FLOAT: 0, _W8A8: 8, _W4A8: 4}[said]

    def symmetric(self, files: CheckpointFiles, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a matrix's zero is code 0; reads the offsets."""
        return not bool(self._offset(files, name, shape).any())

    def _offset(self, files: CheckpointFiles, name: str, shape: tuple[int, ...]) -> Tensor:
        return files.part(f"{name}_offset", (shape[0], 1), *SCALES).float()

    def coded(self, files: CheckpointFiles, name: str, shape: tuple[int, ...]) -> Coded:
        """The codes and scales of a matrix (N, K) whose zero is code 0, which `symmetric` says."""
        if self.bits(name) == 8:
            codes = files.part(name, shape, torch.int8)
            return Coded(codes, files.part(f"{name}_scale", (shape[0], 1), *SCALES).float())
        return self._int4(files, name, shape)

    def read(self, files: CheckpointFiles, name: str, shape: tuple[int, ...]) -> Tensor:
        """The matrix (N, K) in fp32."""
        offset = self._offset(files, name, shape)
        coded = self.coded(files, name, shape)
        if self.bits(name) == 8:
            return (coded.codes.float() - offset) * coded.scale
        need(not bool(offset.any()), "directory", "has {}_offset that is not zero; {} is symmetric", name, _W4A8)
        return coded.dequantized()

    def _int4(self, files: CheckpointFiles, name: str, shape: tuple[int, ...]) -> Coded:
        rows, columns = shape
        packed = str(self.described.get("version")) == _PACKED
        codes = files.part(name, (rows // 2, columns) if packed else shape, torch.int8)
        if packed:
            codes = unpack_int4(codes.t()).t()
        else:
            need(bool(((codes >= -8) & (codes <= 7)).all()), "directory", "has {} with codes that are no int4", name)
        scale = files.part(f"{name}_scale", (rows, 1), *SCALES).float()
        if f"{name}_scale_second" in files:
            groups = files.shape(f"{name}_scale_second")[-1]
            rule = "has {}_scale_second of {} groups, which do not divide {} columns"
            need(groups > 0 and columns % groups == 0, "directory", rule, name, groups, columns)
            second = files.part(f"{name}_scale_second", (rows, groups), *SCALES).float()
            zeros = files.part(f"{name}_offset_second", (rows, groups), *SCALES)
            need(
                not bool(zeros.any()),
                "directory",
                "has {}_offset_second that is not zero; {} is symmetric",
                name,
                _W4A8,
            )
            scale = scale * second
        else:
            size = self.described.get("group_size") or 0
            rule = "has no {}_scale_second, though {} says group_size {}"
            need(not size or size >= columns, "directory", rule, name, DESCRIPTION, size)
        bias, correction = f"{name.removesuffix('.weight')}.scale_bias", None
        if packed and bias not in files:
            raise files.missing(bias, name.rsplit(".", 1)[0])
        if bias in files:
            parts = files.shape(bias)[1:]
            correction = files.part(bias, (rows, *(parts if len(parts) == 1 else (1,))), *SCALES).float().sum(1)
        return Coded(codes, scale, correction)
