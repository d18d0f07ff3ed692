"""Tensors of a safetensors checkpoint directory, read lazily, with a record of everything that was read."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ascend_moe.checkpoint.config import Fp8Format, need_directory, read_object
from ascend_moe.errors import ArgumentError, LibraryError, need

INDEX = "model.safetensors.index.json"
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


@dataclass(frozen=True)
class Read:
    """One read: ``rows`` (first, past the last) of the leading dimension, None for the whole tensor."""

    file: str
    name: str
    rows: tuple[int, int] | None
    bytes: int


class CheckpointFiles:
    """The tensors of a directory by name. A context manager: files stay open inside it.

    Names come from model.safetensors.index.json, or from the headers of all *.safetensors files. Data
    are read by ``read`` only, through safetensors' lazy slices.

    Raises:
        ArgumentError: the directory holds no safetensors checkpoint.
        LibraryError: safetensors is not installed.
    """

    def __init__(self, directory: str | Path) -> None:
        need_directory(directory)
        self.directory = Path(directory)
        self.reads: list[Read] = []
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()
        self._file_of = self._find_names()

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.clear()
        self._stack.close()

    @property
    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from its file's header."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Dtype of a tensor as safetensors names it (BF16, I8 …), from its file's header."""
        return str(self._slice(name).get_dtype())

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The tensor, or ``rows`` of its leading dimension; only these bytes are read."""
        part = self._slice(name)
        if not part.get_shape():  # safetensors has no slice of a scalar
            tensor: Tensor = self._handle(self._file_of[name]).get_tensor(name)
        else:
            tensor = part[:] if rows is None else part[rows[0] : rows[1]]
        self.reads.append(Read(self._file_of[name], name, rows, tensor.numel() * tensor.element_size()))
        return tensor

    def part(self, name: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> Tensor:
        """The whole tensor, which must have that shape and one of these dtypes.

        Raises:
            ArgumentError: there is none, or it has another shape or dtype.
        """
        if name not in self:
            raise self.missing(name, name.rsplit(".", 1)[0])
        actual = self.shape(name)
        need(actual == shape, "directory", "has {} of {}; config.json's numbers make it {}", name, actual, shape)
        value = self.read(name)
        rule = "has {} of {}; need {}"
        need(value.dtype in dtypes, "directory", rule, name, value.dtype, " or ".join(map(str, dtypes)))
        return value

    def missing(self, wanted: str, near: str) -> ArgumentError:
        """The error for a tensor that is not there; ``near`` is the prefix whose names are shown."""
        there = [name for name in self.names if name.startswith(near)] or self.names
        shown = ", ".join(there[:6]) + (f" and {len(there) - 6} more" if len(there) > 6 else "")
        return ArgumentError(
            f"{self.directory} has no tensor {wanted}; it has {shown or 'no tensor at all'}",
            argument="directory",
            missing=wanted,
            found=there,
        )

    def _slice(self, name: str) -> Any:
        file = self._file_of.get(name)
        if file is None:
            raise self.missing(name, name.rsplit(".", 2)[0])
        return self._handle(file).get_slice(name)

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            path = self.directory / file
            if not path.is_file():
                raise ArgumentError(f"{path} is missing, though {INDEX} names it; download it", argument="directory")
            try:
                from safetensors import safe_open
            except ImportError as error:
                raise LibraryError("reading checkpoints needs safetensors: pip install safetensors") from error
            self._open[file] = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        return self._open[file]

    def _find_names(self) -> dict[str, str]:
        index = self.directory / INDEX
        if index.is_file():
            mapping = read_object(index).get("weight_map")
            if not isinstance(mapping, dict):
                raise ArgumentError(f"{index} has no weight_map: download it anew", argument="directory")
            for file in mapping.values():
                inside = isinstance(file, str) and not Path(file).is_absolute() and ".." not in Path(file).parts
                need(inside, "directory", "has an {} that names {!r:.60}, outside of it: download it anew", INDEX, file)
            return mapping
        files = sorted(path.name for path in self.directory.glob("*.safetensors"))
        if not files:
            raise ArgumentError(
                f"{self.directory} has neither {INDEX} nor a .safetensors file; pass the directory of a "
                "safetensors checkpoint",
                argument="directory",
            )
        return {name: file for file in files for name in self._handle(file).keys()}  # noqa: SIM118


#: MX's fp4 by its four bits.
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_E8M0_BIAS = 127


def dequantize_mxfp4(name: str, blocks: Tensor, scales: Tensor) -> Tensor:
    """fp32 (R, G * 32) of fp4 codes (R, G, 16), two a byte, the low half first, and exponents (R, G), both uint8."""
    for kind, tensor in (("blocks", blocks), ("scales", scales)):
        need(tensor.dtype == torch.uint8, "directory", "has {}_{} of {}; need uint8", name, kind, tensor.dtype)
    need(not bool((scales == 255).any()), "directory", "has {}_scales that are not numbers: download it anew", name)
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    return torch.ldexp(_E2M1[codes.long()], scales.int()[..., None] - _E8M0_BIAS).flatten(-2)


def dequantize_fp4(name: str, codes: Tensor, exponents: Tensor) -> Tensor:
    """fp32 (R, C) of fp4 codes (R, C / 2), two a byte, the low half first, and e8m0 exponents (R, C / 32)."""
    rows, groups = exponents.shape
    blocks = codes.view(torch.uint8).reshape(rows, groups, -1)
    return dequantize_mxfp4(name, blocks, exponents.view(torch.uint8))


def read_fp8(files: CheckpointFiles, name: str, codes: Tensor, fp8: Fp8Format, row: int | None = None) -> Tensor:
    """fp32 matrix from fp8 codes (R, C) and the scales beside them: one a block, a row, a column, or one.

    ``name``: of the codes, of which ``row`` is one of the leading dimension. The scales' is name_scale_inv (blocks),
    name_scale, or .scale instead of .weight (DeepSeek-V4: blocks).

    Raises:
        ArgumentError: there are no scales, or their shape or values fit no meaning.
    """
    own = f"{name.removesuffix('.weight')}.scale" if name.endswith(".weight") else ""
    named = [each for each in (f"{name}_scale_inv", f"{name}_scale", own) if each in files]
    if not named:
        raise files.missing(f"{name}_scale_inv (nor {name}_scale)", name.rsplit(".", 1)[0])
    scale = files.read(named[0]) if row is None else files.read(named[0], (row, row + 1))[0]
    if named[0] != f"{name}_scale":
        return dequantize_fp8(named[0], codes, scale, fp8)
    rows, columns = codes.shape
    shapes: tuple[tuple[int, ...], ...] = ((rows, 1), (rows,), (1, columns), (1, 1), (1,), ())
    rule = "has {} of {}; need one scale a row, a column, or one: {}"
    need(tuple(scale.shape) in shapes, "directory", rule, named[0], scale.shape, shapes)
    need(scale.dtype in SCALES, "directory", "has {} of {}; it must be float", named[0], scale.dtype)
    wide = scale.float()
    need(bool(wide.isfinite().all()), "directory", "has {} with values that are not finite: download it anew", named[0])
    return codes.float() * (wide.unsqueeze(1) if tuple(scale.shape) == (rows,) and rows > 1 else wide)


def dequantize_fp8(name: str, codes: Tensor, scale_inv: Tensor, fp8: Fp8Format) -> Tensor:
    """fp32 matrix from fp8 codes (R, C) and one multiplier a block: (ceil(R / rows), ceil(C / columns)).

    ``name`` is the multipliers'. They are fp32, bf16, fp16 or e8m0. Bytes are e8m0 where the format says that they are
    exponents. Other integers have no meaning here.
    """
    rows, columns = codes.shape
    wanted = (-(-rows // fp8.rows), -(-columns // fp8.columns))
    if tuple(scale_inv.shape) != wanted:
        raise ArgumentError(
            f"{name} is {tuple(scale_inv.shape)}; a {rows} x {columns} matrix in blocks of "
            f"{fp8.rows} x {fp8.columns} needs {wanted}",
            argument="directory",
        )
    if scale_inv.dtype == torch.uint8 and fp8.exponents:
        scale_inv = scale_inv.view(torch.float8_e8m0fnu)
    if scale_inv.dtype not in SCALES:
        raise ArgumentError(
            f"{name} is {scale_inv.dtype}; need a float, or uint8 with scale_fmt ue8m0 in quantization_config",
            argument="directory",
        )
    scale = scale_inv.float()
    if not bool(scale.isfinite().all()):
        raise ArgumentError(f"{name} has values that are not finite: download it anew", argument="directory")
    full = scale.repeat_interleave(fp8.rows, 0)[:rows]
    return codes.to(torch.float32) * full.repeat_interleave(fp8.columns, 1)[:, :columns]
