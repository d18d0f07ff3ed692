"""The folder of libraries that are compiled at run time, and how a new one is put there in one step."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from .. import settings

_KEEP_DAYS = 30


def cache_directory() -> Path:
    """$ASCEND_MOE_CACHE, else ~/.cache/ascend_moe (or under $XDG_CACHE_HOME); created."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = settings.CACHE.get() or home / "ascend_moe"
    try:
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.W_OK):
            return path
    except OSError:
        pass
    return _temporary_cache()


@functools.cache
def _temporary_cache() -> Path:
    return Path(tempfile.mkdtemp(prefix="ascend-moe-"))


def fill_folder(folder: Path, make: Callable[[Path], None]) -> None:
    """Fills a new folder by ``make`` and renames it into place: a reader sees the whole folder or none."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    forget_old(folder.parent)
    scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    try:
        make(scratch)
        scratch.chmod(0o755)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def forget_old(cache: Path) -> None:
    """Removes folders that are older than `_KEEP_DAYS`. Processes that opened their files keep them."""
    limit = time.time() - _KEEP_DAYS * 86400
    for folder in cache.iterdir():
        with contextlib.suppress(OSError):
            if folder.is_dir() and folder.stat().st_mtime < limit:
                shutil.rmtree(folder, ignore_errors=True)


def digest_of(*parts: str) -> str:
    """A hash of the parts and their boundaries, for names of folders in the cache."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
