"""Storage of a matrix: the tensors that it needs, and the computation of its values.

Formats without a separate description: floats, fp8 with scales (DeepSeek-V3), fp4 (DeepSeek-V4, gpt-oss).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ascend_moe.checkpoint.config import Fp8Format
from ascend_moe.checkpoint.files import FLOATS, FP8, INTEGERS, SCALES, CheckpointFiles, Part, numbers
from ascend_moe.errors import need

MX_GROUP = 32  # numbers that share an exponent
#: MX's fp4 by its four bits.
_E2M1 = torch.tensor(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float32, device="cpu"
)
Block = tuple[int, int]  # rows and columns that share a scale


class Coded(NamedTuple):
    """A quantized matrix: ``codes`` (N, K), int8 of 8 or 4 bits; fp32 ``scale`` (N, G), one per K / G columns.

    correction: (N,), W4A8's bias (8 x the sum of a row's weights) from the file; None: the file has none.
    """

    codes: Tensor
    scale: Tensor
    correction: Tensor | None = None


@dataclass(frozen=True)
class Stored:
    """How a matrix (N, K) is stored in a checkpoint: the tensors to read, and the computation of its values.

    Attributes:
        parts: the tensors to read.
        value: computes the matrix in float from these tensors.
        coded: computes its codes and scales from these tensors; None: a layer cannot keep it quantized.
        bits: 8 or 4: a layer can keep it in int8 or int4; 0: it cannot.
        groups: number G of column groups with one scale each, if ``bits`` is not 0.
        zero: offsets that must all be 0 for a layer to keep the codes; None: no such condition.
    """

    parts: tuple[Part, ...]
    value: Callable[..., Tensor]
    coded: Callable[..., Coded] | None = None
    bits: int = 0
    groups: int = 0
    zero: Part | None = None

    def read(self, files: CheckpointFiles, row: int = 0) -> Tensor:
        """Read the matrix and return it in float; ``row``: index in fused tensors."""
        value = self.value(*self._data(files, row))
        quantized = len(self.parts) > 1
        rule = "has {} with values that are not finite: download it again"
        need(not quantized or bool(value.isfinite().all()), "directory", rule, self.parts[0].name)
        return value

    def read_codes(self, files: CheckpointFiles) -> Coded:
        """Read the matrix and return its codes and scales; only if ``bits`` is not 0. Errors are those of `read`."""
        assert self.coded is not None
        coded = self.coded(*self._data(files, 0))
        rule = "has {} with scales that are not finite: download it again"
        need(bool(coded.scale.isfinite().all()), "directory", rule, self.parts[0].name)
        return coded

    def of_all(self, matrices: int, transposed: bool = False) -> Stored:
        """Return the storage of ``matrices`` such matrices in one tensor; ``transposed``: each is stored as (K, N)."""
        parts = tuple(_fused(part, matrices) for part in self.parts)
        return replace(self, parts=parts, value=(lambda *data: self.value(*data).t()) if transposed else self.value)

    def _data(self, files: CheckpointFiles, row: int) -> list[Tensor]:
        return [files.take(part, (row, row + 1))[0] if part.fused else files.take(part) for part in self.parts]


def _fused(part: Part, count: int) -> Part:
    return part._replace(shapes=tuple((count, *shape) for shape in part.shapes), fused=True)


def scaled(codes: Tensor, scale: Tensor, block: Block) -> Tensor:
    """Return codes (N, K), converted to fp32, times ``scale``, one per block of ``block`` = (rows, columns) codes."""
    return codes.float() * spread(scale, tuple(codes.shape), block)


def spread(grid: Tensor, shape: tuple[int, ...], block: Block) -> Tensor:
    """Repeat each number of ``grid``, one per block, up to ``shape``; a side with one block stays 1, to broadcast."""
    for side in (0, 1):
        if grid.shape[side] not in (1, shape[side]):
            grid = grid.repeat_interleave(block[side], side).narrow(side, 0, shape[side])
    return grid


def blocks_of(shape: tuple[int, int], block: Block) -> tuple[int, int]:
    """Return the number of blocks, also partial ones, along the rows and the columns of a matrix."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def float_matrix(files: CheckpointFiles, name: str, shape: tuple[int, int], fp8: Fp8Format) -> Stored:
    """Return how the matrix ``name`` of ``shape`` (N, K) is stored: in bf16, fp16 or fp32, or in fp8 with scales.

    The scales are name_scale_inv, one per block of ``fp8``, name_scale, one per row, column or tensor, or .scale in
    place of .weight (DeepSeek-V4), one per block.

    Raises:
        ArgumentError: fp8 without scales, or integers.
    """
    blocks, single, own = f"{name}_scale_inv", f"{name}_scale", f"{name.removesuffix('.weight')}.scale"
    scale = next((each for each in (blocks, single, own) if each in files), None)
    dtype = files.dtype(name) if files.is_here(name) else None
    rule = "has {} of {}, but neither quantization_config nor quant_model_description.json describes it: add one"
    need(dtype not in INTEGERS, "directory", rule, name, dtype)
    if scale is None or dtype in FLOATS:
        if dtype == FP8:
            raise files.missing(f"{blocks} (nor {single})", name.rsplit(".", 1)[0])
        return Stored((Part(name, (shape,), FLOATS),), lambda value: value)
    rows, columns = shape
    codes = Part(name, (shape,), (FP8,))
    whole: tuple[tuple[int, ...], ...] = ((1, 1), (1,), ())
    if scale == single:
        shapes = ((rows, 1), (rows,), (1, columns), *whole)
        return Stored((codes, Part(scale, shapes, SCALES, finite=True)), _times_scale)
    kinds = (*SCALES, torch.uint8) if fp8.exponents else SCALES
    if fp8.block is None:
        return Stored((codes, Part(scale, whole, kinds, finite=True)), lambda codes, one: codes.float() * numbers(one))
    block = fp8.block
    grid = Part(scale, (blocks_of(shape, block),), kinds, finite=True)
    return Stored((codes, grid), lambda codes, scale: scaled(codes, numbers(scale), block))


def with_fused_scales(
    name: str, shape: tuple[int, int], scales: str, experts: int, place: tuple[int, int], fp8: Fp8Format
) -> Stored:
    """Return the storage of one expert's fp8 codes (N, K) whose scales, per block of ``fp8``, are in a fused tensor.

    Those of an expert are the scales of ``place[1]`` matrices (N, K) one above the other, this one at ``place[0]``.
    """
    whole, block = (place[1] * shape[0], shape[1]), fp8.block or shape
    grid = _fused(Part(scales, (blocks_of(whole, block),), SCALES, finite=True), experts)

    def value(codes: Tensor, scale: Tensor) -> Tensor:
        wide = spread(numbers(scale), whole, block)
        return codes.float() * (wide if len(wide) == 1 else wide.narrow(0, place[0] * shape[0], shape[0]))

    return Stored((Part(name, (shape,), (FP8,)), grid), value)


def _times_scale(codes: Tensor, scale: Tensor) -> Tensor:
    """Multiply fp8 codes (N, K) by scales per row (N, 1) or (N,), per column (1, K), or per tensor."""
    wide = scale.float()
    return codes.float() * (wide if wide.dim() == 2 else wide.reshape(-1, 1))


def fp4_matrix(files: CheckpointFiles, name: str, shape: tuple[int, int]) -> Stored:
    """Return the storage of a matrix ``shape`` (N, K) in fp4: bytes (N, K / 2), and an e8m0 exponent per 32 numbers."""
    exponents = f"{name.removesuffix('.weight')}.scale"
    exponents = exponents if exponents in files else f"{name}_scale_inv"
    return fp4_of(name, exponents, shape, torch.int8, torch.uint8)


def fp4_of(codes: str, exponents: str, shape: tuple[int, int], *dtypes: torch.dtype) -> Stored:
    """Return the storage of an fp4 matrix (N, K) from its tensors' names; ``dtypes``: allowed dtypes of ``codes``."""
    rows, columns = shape
    rule = "has {} in fp4 with {} columns by config.json's numbers; need a multiple of {}"
    need(columns % MX_GROUP == 0, "directory", rule, codes, columns, MX_GROUP)
    kinds = (torch.float8_e8m0fnu, torch.uint8)
    scale = Part(exponents, ((rows, columns // MX_GROUP),), kinds, finite=True)
    return Stored((Part(codes, ((rows, columns // 2),), dtypes), scale), _fp4)


def mxfp4_matrix(name: str, shape: tuple[int, int]) -> Stored:
    """Return the storage of a matrix in gpt-oss's fp4: name_blocks (N, G, 16) and name_scales (N, G), both uint8."""
    rows, columns = shape
    groups = -(-columns // MX_GROUP)
    blocks = Part(f"{name}_blocks", ((rows, groups, MX_GROUP // 2),), (torch.uint8,))
    scales = Part(f"{name}_scales", ((rows, groups),), (torch.uint8,), finite=True)
    return Stored((blocks, scales), lambda codes, scale: _fp4(codes.flatten(1), scale)[:, :columns])


def _fp4(codes: Tensor, exponents: Tensor) -> Tensor:
    """Return fp32 of fp4 codes (N, K / 2), two per byte, the low bits first, and e8m0 exponents (N, K / 32)."""
    pairs = codes.view(torch.uint8)
    values = _E2M1[torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2).long()]
    return scaled(values, numbers(exponents), (1, MX_GROUP))
