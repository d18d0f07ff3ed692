"""A library of kernels: launches on one rank or several, in both engines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from . import _compiler
from .build import SOURCES, PathLike, build, engine_path, source_paths
from .engine import Engine, policy_in_turn
from .exploration import Exploration
from .run import Call, Outcome, Run
from .windows import Groups

DEFAULT_TIMEOUT_S = 60.0


def load(path: PathLike, *, defines: Iterable[str] = (), includes: Iterable[PathLike] = ()) -> Kernels:
    """Opens kernels: a source (.cpp), built when it is first needed, or a library that `build` made.

    Raises:
        TwinBuildError: a source does not compile. LibraryError: the library is none of ours.
        ArgumentError: there is no such file.
    """
    return Kernels(Path(path), tuple(defines), tuple(map(Path, includes)))


class Kernels:
    """The kernels of one library. Launches of one object wait for each other, those with ``rank=`` do not."""

    def __init__(self, path: Path, defines: tuple[str, ...] = (), includes: tuple[Path, ...] = ()) -> None:
        self._path, self._defines, self._includes = path, defines, includes
        self._engines: dict[str, Engine] = {}
        self._opening, self._running = threading.Lock(), threading.Lock()
        if path.suffix in SOURCES:
            source_paths(path)
        elif not path.is_file():
            raise ArgumentError(f"there is no library {path}", argument="path")
        only_checked = path.suffix == ".so" and not engine_path(path, "fast").is_file()
        self._any = self._engine("checked" if only_checked else "fast")

    @property
    def names(self) -> list[str]:
        """The kernel entries."""
        return list(self._any.entries)

    def parameters(self, name: str) -> list[str]:
        """Names of an entry's parameters, tiling included."""
        return [one.name for one in self._any.entry(name).parameters]

    def launch(
        self,
        name: str,
        args: Sequence[Any],
        tiling: Any = None,
        block_dim: int = 1,
        tiling_key: int = 0,
        windows: Groups = None,
        *,
        rank: int | None = None,
        workspace_bytes: int | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        mode: str = "fast",
        seed: int = 0,
        policy: str | None = None,
        unordered: bool = False,
        auto_sync: bool = True,
        max_steps: int = 50_000_000,
    ) -> Outcome:
        """Runs a kernel to its end; tensors among ``args`` are read and written in place.

        Args:
            name: the entry.
            args: torch tensors (CPU, contiguous), numpy arrays, None (a null GM_ADDR), or ints where the
                entry has integer parameters, in the entry's order without workspace_bytes' and the tiling.
                With windows: one such list a rank.
            tiling: bytes, numpy array, ctypes struct or torch tensor; passed last. None: the entry has none.
                With windows: one for all ranks, or a list of one a rank.
            block_dim: AIV cores, 1..64.
            windows: the group that GetHcclContext<0> leads to, or a pair of groups, for <0> and <1>; all
                ranks run together, each on a thread of its own. Where ranks have other numbers in the second
                group, a list of each rank's places: ``[(ep.member(0), tp.member(1)), ...]``.
            rank: launch this rank alone, on this thread; ``args`` is then its one list, and its peers are
                launched by other threads.
            workspace_bytes: insert a zeroed GM workspace of this size before the tiling.
            timeout_s: fast mode: all cores polling this long and nothing moving is a hang; None: no limit.
                Checked mode sees by itself when nothing can move.
            mode: "fast" or "checked". Checked runs all cores of all ranks under one schedule, chosen by
                ``policy`` ("late", "random", "lazy", "pct") and ``seed``; default "late" at seed 0, else
                "random". unordered: stores land in any order. auto_sync=False: the compiler inserts no
                PipeBarrier<PIPE_V> between dependent vector calls. max_steps: more is a hang.

        Raises:
            TwinFault: the kernel broke a rule; one line says what, where, on which rank and core.
            ArgumentError: the call does not fit the entry. TwinBuildError: see `load`.
        """
        engine = self._engine(mode)
        call = Call(name, args, tiling, block_dim, tiling_key, windows, rank, workspace_bytes)
        run = Run(engine, call)
        options = engine.schedule(seed, policy, unordered=unordered, auto_sync=auto_sync, max_steps=max_steps)
        if run.shared is not None:
            return run.once(engine.world(run.size, run.shared.windows.number), options, timeout_s)
        with self._running:
            return run.once(engine.world(run.size, -1), options, timeout_s)

    def explore(
        self,
        name: str,
        args: Sequence[Any],
        tiling: Any = None,
        block_dim: int = 1,
        tiling_key: int = 0,
        windows: Groups = None,
        *,
        schedules: int = 100,
        seed: int = 0,
        policy: str | None = None,
        workspace_bytes: int | None = None,
        unordered: bool = False,
        auto_sync: bool = True,
        deterministic: bool = True,
        check: Callable[[], object] | None = None,
        max_steps: int = 50_000_000,
    ) -> Exploration:
        """Runs a kernel under many schedules of the checked engine, until one fails or all have run.

        Before each, arguments and windows are as they were at the call; afterwards they are as the last
        schedule left them. Arguments as for `launch`, and:

        Args:
            schedules: how many; seeds seed, seed + 1, ...
            policy: one for all; default: "late" first, then "random", "lazy" and "pct" in turn.
            deterministic: outputs that differ from the first schedule's are a finding.
            check: called after each schedule; an AssertionError that it raises is a finding.
        """
        engine = self._engine("checked")
        call = Call(name, args, tiling, block_dim, tiling_key, windows, None, workspace_bytes)
        run = Run(engine, call)
        options = [
            engine.schedule(
                seed + done,
                policy or policy_in_turn(done),
                unordered=unordered,
                auto_sync=auto_sync,
                max_steps=max_steps,
            )
            for done in range(schedules)
        ]
        with self._running:
            return run.explore(engine.world(run.size, -1), options, deterministic, check)

    def _engine(self, mode: str) -> Engine:
        if mode not in _compiler.ENGINES:
            raise ArgumentError(f"mode is fast or checked, not {mode!r}", argument="mode")
        with self._opening:
            if mode not in self._engines:
                self._engines[mode] = Engine(self._library(mode))
            return self._engines[mode]

    def _library(self, mode: str) -> Path:
        if self._path.suffix in SOURCES:
            return build(self._path, defines=self._defines, includes=self._includes, engine=mode)
        path = engine_path(self._path, mode)
        if not path.is_file():
            raise ArgumentError(
                f"{self._path} has no library of the {mode} engine beside it: build it with engine='both'",
                argument="mode",
            )
        return path
