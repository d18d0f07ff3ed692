"""What is compiled at run time and kept: where it lies, and how a folder comes there all at once."""

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

_KEEP_DAYS = 30


def cache_directory() -> Path:
    """$ASCEND_MOE_CACHE, else ~/.cache/ascend_moe (or under $XDG_CACHE_HOME); created."""
    override = os.environ.get("ASCEND_MOE_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(override) if override else home / "ascend_moe"
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
    """Makes a folder in the cache at once: a reader sees all of it or nothing."""
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
    """Removes what was built long ago. Processes that have it open keep it."""
    limit = time.time() - _KEEP_DAYS * 86400
    for folder in cache.iterdir():
        with contextlib.suppress(OSError):
            if folder.is_dir() and folder.stat().st_mtime < limit:
                shutil.rmtree(folder, ignore_errors=True)


def digest_of(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
