"""Lazy access to the tensors of a safetensors checkpoint directory, with a record of all reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ascend_moe.checkpoint.config import LFS, is_pointer, need_directory, read_object
from ascend_moe.errors import ArgumentError, AscendMoeError, LibraryError, need

INDEX = "model.safetensors.index.json"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SCALES = (*FLOATS, torch.float8_e8m0fnu)
FP8 = torch.float8_e4m3fn
INTEGERS = (torch.int8, torch.uint8, torch.int32)
#: dtypes by safetensors' names.
_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


@dataclass(frozen=True)
class Read:
    """One read of a tensor's data: file and tensor, and its size; ``rows``: range (first, end) of dim 0, None: all."""

    file: str
    name: str
    rows: tuple[int, int] | None
    bytes: int


class Part(NamedTuple):
    """A tensor that a layer needs from the files, and the shapes and dtypes in which it is accepted.

    Attributes:
        finite: its values, such as scales and offsets, must be finite; uint8 are read as exponents (e8m0).
        fused: it contains several matrices, or their scales, one per index of the leading dimension.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    finite: bool = False
    fused: bool = False


class CheckpointFiles:
    """Reader of the safetensors files of a checkpoint's directory by tensor name; a context manager that closes them.

    Names come from model.safetensors.index.json, or the directory's only *.safetensors.index.json, or without an index
    from the headers of all *.safetensors files. A file is opened at its first use. Only ``take`` reads data, by
    safetensors' lazy slices, and notes each read in ``reads``.

    Raises:
        ArgumentError: the directory is not a safetensors checkpoint, or its files cannot be read.
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
        """All tensor names in the index, or without an index in the headers, sorted."""
        return sorted(self._file_of)

    def below(self, prefix: str) -> list[str]:
        """Return the sorted tensor names that start with ``prefix``, also those in open files that the index lacks."""
        there = {name for handle in self._open.values() for name in handle.keys()}  # noqa: SIM118
        return sorted(name for name in there | set(self._file_of) if name.startswith(prefix))

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def is_here(self, name: str) -> bool:
        """Return whether a tensor is known and its file exists here; files that only other ranks read may be absent."""
        return name in self._file_of and os.path.isfile(self.directory / self._file_of[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor from its file's header; raise ArgumentError if tensor or file is missing."""
        with self._header(name) as part:
            return tuple(part.get_shape())

    def dtype(self, name: str) -> object:
        """Return a tensor's torch.dtype by its file's header, or safetensors' name (as "F64") if not in _DTYPES."""
        with self._header(name) as part:
            return _DTYPES.get(str(part.get_dtype()), part.get_dtype())

    def check(self, part: Part, *, of_others: bool = False) -> None:
        """Raise ArgumentError unless the tensor exists, in a shape and dtype that ``part`` allows.

        ``of_others``: this rank may not read the tensor, so check only its name if its file is absent here.
        """
        if part.name not in self:
            raise self.missing(part.name, part.name.rsplit(".", 2)[0])
        if not of_others or self.is_here(part.name):
            shape, dtype = self.shape(part.name), self.dtype(part.name)
            shapes = " or ".join(map(str, part.shapes))
            rule = "has {} of {}; config.json's numbers make it {}: correct config.json, or download the file again"
            need(shape in part.shapes, "directory", rule, part.name, shape, shapes)
            dtypes = " or ".join(map(str, part.dtypes))
            need(dtype in part.dtypes, "directory", "has {} of {}; need {}", part.name, dtype, dtypes)

    def take(self, part: Part, rows: tuple[int, int] | None = None) -> Tensor:
        """Read a tensor, or only its range ``rows`` = (first, end) of the leading dimension.

        Raises:
            ArgumentError: tensor or file is missing or damaged, or ``part`` does not allow its shape, dtype or values.
        """
        self.check(part)
        with self._header(part.name) as data:
            if not data.get_shape():  # safetensors has no slice of a scalar
                tensor: Tensor = self._handle(self._file_of[part.name]).get_tensor(part.name)
            else:
                tensor = data[:] if rows is None else data[rows[0] : rows[1]]
        self.reads.append(Read(self._file_of[part.name], part.name, rows, tensor.numel() * tensor.element_size()))
        rule = "has {} with values that are not finite: download it again"
        need(not part.finite or bool(numbers(tensor).isfinite().all()), "directory", rule, part.name)
        return tensor

    def missing(self, wanted: str, shown_prefix: str) -> ArgumentError:
        """Return an ArgumentError for tensor ``wanted``; it lists names with ``shown_prefix``, or any if none has."""
        there = [name for name in self.names if name.startswith(shown_prefix)] or self.names
        shown = ", ".join(there[:6]) + (f" and {len(there) - 6} more" if len(there) > 6 else "")
        return ArgumentError(
            f"{self.directory} has no tensor {wanted}; it has {shown or 'no tensor at all'}",
            argument="directory",
            missing=wanted,
            found=there,
        )

    @contextmanager
    def _header(self, name: str) -> Iterator[Any]:
        """Context manager: open a tensor's lazy slice; errors of safetensors and torch name file and tensor."""
        file = self._file_of.get(name)
        if file is None:
            raise self.missing(name, name.rsplit(".", 2)[0])
        handle = self._handle(file)
        with _named(f"{name} of {self.directory / file}"):
            yield handle.get_slice(name)

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            path = self.directory / file
            if not os.path.isfile(path):
                why = f"is missing, though {self._index} names it; download it"
                raise ArgumentError(f"{path} {why}", argument="directory")
            try:
                from safetensors import safe_open
            except ImportError as error:
                raise LibraryError("reading checkpoints needs safetensors: pip install safetensors") from error
            with _named(str(path), path):
                self._open[file] = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        return self._open[file]

    def _find_names(self) -> dict[str, str]:
        named = sorted(path.name for path in self.directory.glob(f"*{INDEX.removeprefix('model')}") if path.is_file())
        rule = "has the indices {}, of which one must be {}: rename that of its files"
        need(len(named) < 2 or INDEX in named, "directory", rule, " and ".join(named), INDEX)
        self._index = INDEX if INDEX in named else "".join(named)
        if named:
            index = self.directory / self._index
            mapping = read_object(index).get("weight_map")
            if not isinstance(mapping, dict):
                raise ArgumentError(f"{index} has no weight_map: download it again", argument="directory")
            rule = "has an {} that names {!r:.60}, which is not a file in it: download it again"
            for file in mapping.values():
                need(isinstance(file, str), "directory", rule, self._index, file)
            for file in sorted(set(mapping.values())):
                need(self._is_inside(file), "directory", rule, self._index, file)
            return mapping
        files = sorted(path.name for path in self.directory.glob("*.safetensors") if path.is_file())
        if not files:
            raise ArgumentError(
                f"{self.directory} has neither {INDEX} nor a .safetensors file; pass the directory of a "
                "safetensors checkpoint",
                argument="directory",
            )
        found: dict[str, str] = {}
        for file in files:
            for name in self._handle(file).keys():  # noqa: SIM118
                rule = "has {} in {} and in {}, but no {}: remove the older file"
                need(name not in found, "directory", rule, name, found.get(name), file, INDEX)
                found[name] = file
        return found

    def _is_inside(self, file: str) -> bool:
        """Return whether a file's folder is inside the directory with links resolved; the file itself may be a link.

        Hugging Face's cache contains links to ../../blobs.
        """
        if "\0" in file or ".." in (path := PurePosixPath(file)).parts:
            return False
        return (self.directory / path.parent).resolve().is_relative_to(self.directory.resolve())


@contextmanager
def _named(what: str, path: Path | None = None) -> Iterator[None]:
    """Context manager: convert errors of safetensors or torch to ArgumentError about ``what``."""
    try:
        yield
    except AscendMoeError:
        raise
    except Exception as error:
        fix = LFS if path is not None and is_pointer(path) else f"{error}; download it again"
        raise ArgumentError(f"{what} cannot be read: {' '.join(fix.split())[:300]}", argument="directory") from error


def numbers(scale: Tensor) -> Tensor:
    """Convert scales of any shape to fp32; uint8 are read as e8m0 exponents."""
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()
