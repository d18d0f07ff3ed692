"""Finding and loading the torch_npu adapter (csrc/npu), on the first op with tensors on an NPU.

It belongs to one pair of torch and torch_npu versions. Packages built with torch_npu installed contain it (``lib/``);
otherwise it is compiled once into the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ascendc_twin.cache import fill_folder

from .. import settings
from ..errors import AscendMoeError, LibraryError
from ..native import library as _lib
from ..native.build import cached, one_builder, reported_build, sound
from ..native.torch_npu import fix_of_library, missing_library
from . import npu_adapter_build
from .npu_adapter_build import BuildError

_lock = threading.Lock()
_loaded: Path | None = None

_TITLE = "the torch_npu adapter"
_SECONDS = 90  # typical build time


@contextmanager
def typed_errors() -> Iterator[None]:
    """Context manager: turn a launch's RuntimeError into LibraryError (CANN lacks the operator) or AscendMoeError."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        raise (LibraryError if "is not among the operators" in text else AscendMoeError)(text) from error


def load() -> Path:
    """Load the adapter, once per process, and return its path. It defines ``torch.ops.ascend_moe_npu``."""
    global _loaded
    if _loaded is None:
        with _lock:
            if _loaded is None:
                path = library_path()
                try:
                    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
                except OSError as error:
                    library = missing_library(error)
                    own = not library or library.startswith(("libtorch", "libc10"))
                    given = settings.NPU_LIBRARY.is_set()
                    fix = f"unset {settings.NPU_LIBRARY.name}" if given else "remove it, the next call rebuilds it"
                    fix = fix if own else fix_of_library(library)
                    raise LibraryError(f"the torch_npu adapter {path} cannot be loaded ({error}): {fix}") from error
                _loaded = path
    return _loaded


def library_path() -> Path:
    """Return the path of an adapter for the installed torch and torch_npu; build it if there is none.

    $ASCEND_MOE_NPU_LIBRARY names a file to return instead. Raises LibraryError if that is missing or the build fails.
    """
    override = settings.NPU_LIBRARY.get()
    if override is not None:
        return override
    try:
        root = _lib.native_source_root()
        wanted = npu_adapter_build.key(root)
        for folder in _lib._package_paths():
            packaged = folder / "lib" / npu_adapter_build.LIBRARY
            key = packaged.with_name(packaged.name + npu_adapter_build.KEY_SUFFIX)
            if packaged.is_file() and key.is_file() and key.read_text().strip() == wanted:
                return packaged
        folder = cached("npu", wanted)
        if not folder.is_dir():
            folder.parent.mkdir(0o700, parents=True, exist_ok=True)
            with one_builder(folder.parent / ".lock", _TITLE):  # all ranks of a job arrive at once
                if not folder.is_dir():
                    npu_adapter_build.command(root, folder / npu_adapter_build.LIBRARY)  # raises if a tool is missing
                    with reported_build(_TITLE, folder, _SECONDS):
                        fill_folder(folder, lambda scratch: _build(root, scratch))
        return sound(folder / npu_adapter_build.LIBRARY)
    except BuildError as error:
        raise LibraryError(f"ops on an NPU need the torch_npu adapter, and {error}") from error


def _build(root: Path, folder: Path) -> None:
    npu_adapter_build.build(root, folder / npu_adapter_build.LIBRARY)
