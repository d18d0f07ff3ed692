"""Cache folders of code compiled at run time: private to the user, complete or absent, verified before loading."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from .errors import LibraryError

_KEEP_DAYS = 30
_SUMS = "SHA256SUMS"


class Cache:
    """A cache folder that code is loaded from.

    Args:
        variable: environment variable with the path of the folder; if it is not set or empty, the folder is
            ``name`` under $XDG_CACHE_HOME or ~/.cache.
        error: exception class, raised if a file belongs to another user, is writable by others, or was changed.
    """

    def __init__(self, variable: str, name: str, error: type[Exception] = LibraryError) -> None:
        self.variable, self.name, self.error = variable, name, error

    def directory(self) -> Path:
        """Return the folder, created with access for this user only.

        If it cannot be written, or the user has no home, return a folder that is removed when this process ends.
        """
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        path = Path(os.path.expanduser(os.environ.get(self.variable, "").strip() or f"{home}/{self.name}"))
        try:
            if path.parts[:1] == ("~",):  # no home
                return _temporary(self.name)
            path.mkdir(0o700, parents=True, exist_ok=True)
        except OSError:
            return _temporary(self.name)
        self._need_own(path)
        return path if os.access(path, os.W_OK) else _temporary(self.name)

    def place(self, *names: str) -> Path:
        """Return the path of ``names`` in the cache, existing or not; raise ``error`` if others can write to it."""
        path = self.directory()
        for name in names:
            path = path / name
            self._need_own(path)
        return path

    def _need_own(self, path: Path) -> None:
        """Raise if another user could have written what this process is about to load."""
        try:
            seen = path.stat()
        except FileNotFoundError:
            return
        fix = f"remove it, or name a folder of your own in {self.variable}"
        if seen.st_uid != os.geteuid():
            raise self.error(f"{path}, which code is loaded from, belongs to user {seen.st_uid}, not to you: {fix}")
        if seen.st_mode & 0o022:
            mode = oct(seen.st_mode & 0o777)[2:]
            raise self.error(f"{path}, which code is loaded from, can be written by others (mode {mode}): {fix}")

    def sound(self, path: Path, sums: Path | None = None) -> Path:
        """Return ``path`` if its hashes are those in ``sums`` (None: SHA256SUMS next to it); else raise ``error``."""
        sums = sums or path.with_name(_SUMS)
        try:
            lines = sums.read_text().splitlines()
        except OSError as error:
            raise self.error(f"{path} cannot be checked ({error.strerror}: {sums}): remove {sums.parent}") from None
        known = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
        for file in _files(path):
            self._need_own(file)
            if known.get(str(file.relative_to(sums.parent))) != _hash(file):
                raise self.error(f"{file} is not as it was built: remove {sums.parent}, the next use builds it again")
        return path


@functools.cache
def _temporary(name: str) -> Path:
    path, maker = Path(tempfile.mkdtemp(prefix=f"{name.replace('_', '-')}-")), os.getpid()

    @atexit.register
    def remove() -> None:
        if os.getpid() == maker:
            shutil.rmtree(path, ignore_errors=True)

    return path


def fill_folder(folder: Path, make: Callable[[Path], None]) -> None:
    """Create ``folder`` at once: ``make`` fills a temporary one, sealed and renamed. Remove old folders beside it."""
    folder.parent.mkdir(0o700, parents=True, exist_ok=True)
    forget_old(folder.parent)
    scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    try:
        make(scratch)
        seal(scratch, scratch / _SUMS)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def seal(made: Path, sums: Path) -> None:
    """Remove others' access to the file, or files in the folder, ``made``; write SHA-256 hashes to ``sums`` there."""
    lines = []
    for path in _files(made):
        path.chmod(path.stat().st_mode & 0o700)
        lines.append(f"{_hash(path)}  {path.relative_to(sums.parent)}\n")
    sums.write_text("".join(lines))
    sums.chmod(0o600)


def _files(path: Path) -> list[Path]:
    """A file, or all files of a folder that are no links."""
    found = [path] if path.is_file() else sorted(path.rglob("*"))
    return [each for each in found if each.is_file() and not each.is_symlink()]


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def forget_old(cache: Path) -> None:
    """Remove the folders in ``cache`` that are older than 30 days. Libraries already loaded from them go on working."""
    limit = time.time() - _KEEP_DAYS * 86400
    for folder in cache.iterdir():
        with contextlib.suppress(OSError):
            if folder.is_dir() and folder.stat().st_mtime < limit:
                shutil.rmtree(folder, ignore_errors=True)


def digest_of(*parts: str) -> str:
    """Return 32 hex digits that depend on the parts and where each ends, to name a folder in the cache."""
    return hashlib.sha256("\0".join((_SUMS, *parts)).encode()).hexdigest()[:32]
