"""Kernels of an opened source or library: launches, and explorations of schedules."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import abi
from .abi import Engine, policy_in_turn
from .arguments import Arguments
from .compiling import ENGINES, SOURCES, PathLike, build, engine_path, source_paths
from .errors import ArgumentError, TwinFault, need
from .soc import DEFAULT_SOC, costs_of, soc_named
from .timing import Timing
from .windows import Groups, Member, Windows, members_of

__all__ = ["Exploration", "Kernels", "LaunchResult", "Member", "Timing", "Windows", "build", "load"]


@dataclass(frozen=True)
class Exploration:
    """The result of `Kernels.explore`: schedules that ran, how many differed, and the first finding, if any.

    Attributes:
        schedules: number of schedules that ran.
        distinct, steps: number of different ones, and steps of all together, without one that a fault ended.
        finding: class of the finding ("race between cores", "hang", "wrong result", ...), or None.
        text: the finding in one line, or None.
        seed, policy: arguments of `Kernels.launch` that repeat the finding with mode="checked"; None without one.
        warnings: as in `LaunchResult`; empty if there is a finding.
    """

    schedules: int
    distinct: int
    steps: int
    finding: str | None = None
    text: str | None = None
    seed: int | None = None
    policy: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there was no finding."""
        return self.finding is None

    def __str__(self) -> str:
        head = f"{self.schedules} schedules, {self.distinct} distinct, {self.steps} steps"
        return f"{head}: no finding" if self.ok else f"{head}: {self.text}"


MAX_CORES = 64
DEADLINE_S = 60.0
_MODELLED = 1e-3  # of a deadline, in the timed engine's time


@dataclass(frozen=True)
class LaunchResult:
    """The result of a launch.

    Attributes:
        steps, trace_hash: checked mode: number of steps, and a hash of their order. Timed mode: ``steps`` is the
            number of instructions.
        warnings: a line for each call that broke a rule without ending the launch. Violations of rules that CANN
            documents end it, unless ``warn=True`` lists them here.
        time: timed mode: the predicted times on an NPU; None in other modes.
    """

    steps: int = 0
    trace_hash: int = 0
    warnings: tuple[str, ...] = ()
    time: Timing | None = None


class Run:
    """A launch with checked and converted arguments, to be executed by one engine. Keeps memory that C++ points to."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        args: Sequence[Any],
        tiling: Any,
        block_dim: int,
        tiling_key: int,
        windows: Groups,
        rank: int | None,
        workspace_bytes: int | None,
        warn: bool,
        data: Iterable[str],
    ) -> None:
        need(1 <= block_dim <= MAX_CORES, f"block_dim is {block_dim}; pass 1 to {MAX_CORES} AIV cores", "block_dim")
        engine.check_key(name, tiling_key & 0xFFFFFFFFFFFFFFFF)
        self._engine, self._name, self._block_dim, self._tiling_key = engine, name, block_dim, tiling_key
        self._warn, self._data, self._suspect = warn, (data,) if isinstance(data, str) else tuple(data), ""
        self._members = members_of(windows, rank)
        alone = rank is not None or windows is None or isinstance(windows, Member)
        lists = _per_rank(args, tiling, len(self._members), alone=alone)
        parameters, stage = engine.entry(name).parameters, engine.mode == "checked"
        self._arguments = [
            Arguments(name, parameters, values, data, workspace_bytes, rank=number, stage=stage)
            for number, (values, data) in enumerate(lists)
        ]
        self._keep: list[Any] = []
        self._launches = (abi.Launch * len(self._members))()
        for launch, arguments, members in zip(self._launches, self._arguments, self._members, strict=True):
            self._describe(launch, arguments, members)

    @property
    def shared(self) -> Member | None:
        """The group and number of a rank launched alone, while other threads launch its peers; else None."""
        alone = len(self._members) == 1 and len(self._members[0]) > 0
        member = self._members[0][0] if alone else None
        return member if member is not None and member.windows.world > 1 else None

    @property
    def size(self) -> int:
        """Number of native ranks that the launch needs."""
        return self.shared.windows.world if self.shared else len(self._members)

    def _describe(self, launch: abi.Launch, arguments: Arguments, members: tuple[Member, ...]) -> None:
        launch.entry = self._engine.address(self._name)
        launch.name = self._name.encode()
        launch.block_dim = self._block_dim
        launch.warn = int(self._warn)
        launch.deadline_s = DEADLINE_S
        launch.tiling_key = self._tiling_key & 0xFFFFFFFFFFFFFFFF
        launch.arguments = arguments.words
        launch.argument_count = arguments.count
        ranges = arguments.ranges()
        for index, member in enumerate(members):
            windows = member.windows
            blob = windows.context(self._engine.library, member.rank)
            launch.contexts[index] = blob.address
            ranges.append(abi.range_of(blob.address, blob.size, f"HCCL context {index}"))
            workspace = windows.workspace(member.rank)
            ranges.append(abi.range_of(workspace.address, workspace.size, f"HCCL workspace {index}"))
            if windows not in [earlier.windows for earlier in members[:index]]:
                # the checked engine detects by itself which blocks are flags
                ranges += windows.ranges(member.rank, atomic=self._engine.mode == "fast")
        if members:
            launch.doorbell = members[0].windows.doorbell(members[0].rank)
        self._mark_data(ranges)
        table = (abi.Range * len(ranges))(*ranges)
        self._keep += [ranges, table]
        launch.ranges = table
        launch.range_count = len(ranges)

    def _mark_data(self, ranges: list[abi.Range]) -> None:
        """Mark the ranges of these names, as findings show them, without "arg 2" and "of rank 0"."""
        shared = {name: found for found in ranges if (name := _shared_name(found))}
        for wanted in self._data:
            text = f"data names {wanted!r}; windows and workspaces to choose from: {', '.join(shared) or 'none'}"
            need(wanted in shared, text, "data")
        for found in ranges:
            found.data = int(_shared_name(found) in self._data)

    def once(self, world: int, options: abi.Options, timeout_s: float | None) -> LaunchResult:
        """Execute the launch once on native ranks ``world``, or raise TwinFault. ``timeout_s`` None: no limit."""
        for launch in self._launches:
            launch.deadline_s = timeout_s or 0.0
        outcome = self._native(world, options)
        if isinstance(outcome, abi.TwinOutcome):
            raise self._fault(outcome, options)
        return outcome

    def _native(self, world: int, options: abi.Options) -> LaunchResult | abi.TwinOutcome:
        """Return the result, or after a failure the native one, which contains the finding."""
        native, library = abi.TwinOutcome(), self._engine.library
        for windows in self._groups().values():
            windows.touch()
        if self.shared is not None:
            rank = self.shared.rank
            failed = library.twin_world_run_rank(world, rank, self._launches, ctypes.byref(native))
        else:
            how = ctypes.byref(options)
            failed = library.twin_world_run(world, self._launches, how, ctypes.byref(native))
        for arguments in self._arguments:
            arguments.finish()
        warnings = tuple(native.warnings.decode(errors="replace").splitlines())
        self._suspect = native.suspect.decode(errors="replace")
        if failed:
            return native
        timing = self._engine.times(world, native) if self._engine.mode == "timed" else None
        return LaunchResult(int(native.steps), int(native.trace_hash), warnings, timing)

    def costs(self, soc: str, replaced: Mapping[str, float] | None) -> dict[str, float]:
        """Return `costs_of` the SoC, with the windows' ranks_per_server; raise ArgumentError if it cannot be timed."""
        chip, wanted = soc_named(soc), dict(replaced or {})
        text = f"block_dim is {self._block_dim}; {soc} has {chip.aiv} AIV cores: pass at most as many"
        need(self._block_dim <= chip.aiv, text, "block_dim")
        text = "rank=: the timed engine runs all ranks of a group together: call launch once, without rank"
        need(self.shared is None, f"{self._name}: {text}", "rank")
        for number, members in enumerate(self._members):
            if other := [member for member in members if member.rank != number]:
                text = f"rank {number} is rank {other[0].rank} of a group; the timed engine needs one number for a rank"
                raise ArgumentError(f"{self._name}: windows: {text}", argument="windows")
        for windows in self._groups().values():
            text = f"{windows.ranks_per_server} ranks in a server of {soc}, which has {chip.ranks_per_server}"
            fits = chip.series != "A2" or windows.ranks_per_server <= chip.ranks_per_server
            need(fits, f"{text}: pass Windows(..., layout='a2', ranks_per_server=...)", "windows")
            if windows.ranks_per_server < windows.world:
                wanted.setdefault("ranks_per_server", windows.ranks_per_server)
        return costs_of(soc, wanted)

    def _groups(self) -> dict[int, Windows]:
        return {id(member.windows): member.windows for members in self._members for member in members}

    def _fault(self, native: abi.TwinOutcome, options: abi.Options) -> TwinFault:
        text = _placed(native.text.decode(errors="replace"))
        at = re.search(r"\(rank (\d+), core \d+\)", text)
        details: dict[str, Any] = {}
        if self._engine.mode == "checked" and self.shared is None:
            policy = self._engine.policies[options.policy]
            details = {"seed": int(options.seed), "policy": policy}
            text += f" [mode='checked', seed={options.seed}, policy='{policy}']"
        return TwinFault(
            f"{self._name}: {text}",
            kernel=self._name,
            rank=int(at.group(1)) if at else int(native.rank),
            finding=native.finding.decode(),
            **details,
        )

    def _of_single_blocks(self) -> str:
        """Return a possible cause of a wrong result that is not a finding itself: see ``data`` of `launch`."""
        if not self._suspect:
            return ""
        rule = "stores of single 32-byte blocks into windows and workspaces count as flags, and are in no race"
        name = _short(self._suspect.rpartition('"')[0].rpartition('"')[2])
        return f"; {_placed(self._suspect)}: {rule}; if it is data, pass data=[{name!r}], which reports the race"

    def explore(
        self, world: int, schedules: Sequence[abi.Options], deterministic: bool, check: Callable[[], object] | None
    ) -> Exploration:
        """Execute the launch under each schedule, from the same contents, until one fails. See `Kernels.explore`."""
        saved = {key: windows.snapshot() for key, windows in self._groups().items()}
        for arguments in self._arguments:
            arguments.save()
        first: list[list[tuple[str, bytes]]] = []
        hashes: set[int] = set()
        warnings: set[str] = set()
        steps = 0
        for done, options in enumerate(schedules, 1):
            for key, windows in self._groups().items():
                windows.restore(saved[key])
            for arguments in self._arguments:
                arguments.restore()
            outcome = self._native(world, options)
            seed, policy = int(options.seed), self._engine.policies[options.policy]
            if isinstance(outcome, abi.TwinOutcome):
                fault = self._fault(outcome, options)
                return Exploration(done, len(hashes), steps, fault.finding, str(fault), seed, policy)
            hashes.add(outcome.trace_hash)
            warnings |= set(outcome.warnings)
            steps += outcome.steps
            text = _violation(check)
            if text is None and deterministic:
                left = [arguments.contents() for arguments in self._arguments]
                first = first or left
                text = _difference(first, left, int(schedules[0].seed))
            if text is not None:
                text += self._of_single_blocks()
                line = f"{self._name}: {text} [mode='checked', seed={seed}, policy='{policy}']"
                return Exploration(done, len(hashes), steps, "wrong result", line, seed, policy)
        return Exploration(len(schedules), len(hashes), steps, warnings=tuple(sorted(warnings)))


def _per_rank(args: Sequence[Any], tiling: Any, ranks: int, *, alone: bool) -> list[tuple[Sequence[Any], Any]]:
    if alone:
        return [(args, tiling)]
    text = f"with windows of {ranks} ranks, args is a list of {ranks} lists, one a rank; rank= launches one alone"
    need(len(args) == ranks and all(isinstance(values, (list, tuple)) for values in args), text, "args")
    if isinstance(tiling, (list, tuple)):
        need(len(tiling) == ranks, f"{len(tiling)} tilings for {ranks} ranks: pass one per rank", "tiling")
        return list(zip(args, tiling, strict=True))
    return [(values, tiling) for values in args]


def _shared_name(memory: abi.Range) -> str:
    """The name of a workspace or window, as ``data`` takes it; "" for memory in which nothing counts as a flag."""
    name = str(memory.name.decode())
    nothing = memory.kind == abi.TENSOR or name.endswith("tiling") or name.startswith("HCCL ")
    return "" if nothing else _short(name)


def _short(name: str) -> str:
    """A range's name without "arg 2" and "of rank 0"."""
    return name.rpartition("(")[2].removesuffix(")").partition(" of rank ")[0]


def _placed(text: str) -> str:
    """The line of a finding with its place in the source instead of the library, where addr2line knows it."""
    at = re.search(r" at (/\S+)\+(0x[0-9a-f]+) ", text)
    tool = shutil.which("addr2line")
    if at is None or tool is None:
        return text
    said = subprocess.run([tool, "-e", at[1], at[2]], capture_output=True, text=True, check=False).stdout.split()
    place = said[0] if said else "?"
    return text if place.startswith("?") else text.replace(at[0], f" at {place.rsplit('/', 1)[-1]} ")


def _violation(check: Callable[[], object] | None) -> str | None:
    if check is None:
        return None
    try:
        check()
    except AssertionError as error:
        lines = str(error).strip().splitlines() or ["AssertionError"]
        return f"check: {lines[0]}"
    return None


def _difference(first: list[list[tuple[str, bytes]]], now: list[list[tuple[str, bytes]]], seed: int) -> str | None:
    for rank, (ours, theirs) in enumerate(zip(first, now, strict=True)):
        for (name, wanted), (_, got) in zip(ours, theirs, strict=True):
            if wanted != got:
                at = next(i for i, (a, b) in enumerate(zip(wanted, got, strict=True)) if a != b)
                return f"{name} of rank {rank} differs from seed {seed}'s, first at byte {at}"
    return None


def load(
    path: PathLike,
    *,
    defines: Iterable[str] = (),
    includes: Iterable[PathLike] = (),
    tiling_keys: Iterable[int] | None = None,
    debug: bool = False,
    engine: str = "fast",
) -> Kernels:
    """Open kernels: a source (.cpp), compiled now, and for other modes at their first launch, or a library of `build`.

    Args:
        path: the source or the library.
        defines, includes, tiling_keys, debug: as in `build`, for a source; ignored for a library.
        engine: the default ``mode`` of launches: "fast", "checked" or "timed".

    Raises:
        TwinBuildError: a source does not compile. LibraryError: `build` did not make the library.
        ArgumentError: there is no such file, engine, or library of that engine.
    """
    return Kernels(Path(path), tuple(defines), tuple(map(Path, includes)), tiling_keys, debug, engine)


class Kernels:
    """The kernels of one source or library, opened by `load`, which has the same arguments and errors.

    Any thread may launch. Launches run one after the other, except those of single ranks (``rank=``).
    """

    def __init__(
        self,
        path: Path,
        defines: tuple[str, ...] = (),
        includes: tuple[Path, ...] = (),
        tiling_keys: Iterable[int] | None = None,
        debug: bool = False,
        engine: str = "fast",
    ) -> None:
        self._path, self._defines, self._includes, self._debug = path, defines, includes, debug
        self._tiling_keys = None if tiling_keys is None else tuple(tiling_keys)
        self._engines: dict[str, Engine] = {}
        self._opening, self._running = threading.Lock(), threading.Lock()
        if path.suffix in SOURCES:
            source_paths(path)
        else:
            need(path.is_file(), f"there is no library {path}: build it, or pass a source (.cpp)", "path")
        self._mode, there = engine, [name for name in ENGINES if engine_path(path, name).is_file()]
        opened = engine if engine != "fast" or path.suffix in SOURCES or not there else there[0]
        self._any = self._engine(opened, "engine")

    @property
    def names(self) -> list[str]:
        """Names of the kernels, in the order of the source."""
        return list(self._any.entries)

    def tiling_keys(self, name: str) -> dict[int, dict[str, str]]:
        """Return tiling key -> template arguments, for each runnable instance of kernel ``name``; {}: no template."""
        return {
            instance.key: dict(instance.arguments)
            for instance in self._any.entry(name).instances
            if not instance.refused
        }

    def parameters(self, name: str) -> list[str]:
        """Return the names of the parameters of kernel ``name``, tiling included."""
        return [parameter.name for parameter in self._any.entry(name).parameters]

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
        timeout_s: float | None = DEADLINE_S,
        mode: str | None = None,
        seed: int = 0,
        policy: str | None = None,
        unordered: bool = False,
        auto_sync: bool = True,
        max_steps: int = 50_000_000,
        warn: bool = False,
        data: Iterable[str] = (),
        soc: str = DEFAULT_SOC,
        costs: Mapping[str, float] | None = None,
        events: int = 0,
    ) -> LaunchResult:
        """Run a kernel to its end; tensors among ``args`` are read and written in place.

        Args:
            name: the kernel.
            args: torch tensors (CPU, contiguous), numpy arrays, None (a null GM_ADDR), or ints for integer
                parameters, in the kernel's order, without the tiling and the workspace of ``workspace_bytes``.
                With windows: a list of such lists, one per rank.
            tiling: bytes, numpy array, ctypes struct or torch tensor; passed last. None: the kernel has none.
                With windows: one for all ranks, or a list with one per rank.
            block_dim: AIV cores per rank, 1..64.
            tiling_key: the number that TILING_KEY_IS compares; for a template one of `tiling_keys`.
            windows: the group that GetHcclContext<0> leads to, or a pair of groups, for <0> and <1>; all
                ranks run together. If ranks have other numbers in the second group, a list with the members
                of each rank: ``[(ep.member(0), tp.member(1)), ...]``. None: one rank without windows.
            rank: launch this rank alone, on this thread, while other threads launch its peers; ``args`` is then
                the list of this rank. None: launch all ranks.
            workspace_bytes: insert a zeroed GM workspace of this size before the tiling.
            timeout_s: if all cores only poll for this many seconds and nothing moves, the launch is a hang; None: no
                limit. Checked mode detects by itself that nothing can move, and limits only loops of repeated reads
                that also store. Timed mode limits modelled time, to a thousandth of it.
            mode: "fast", "checked" or "timed"; None: ``engine`` of `load`. Checked runs all cores of all ranks under
                one schedule, chosen by ``policy`` ("late", "random", "lazy", "pct"; None: "late" for seed 0, else
                "random") and ``seed``. unordered: a core's stores arrive in any order. auto_sync=False: the compiler
                inserts no PipeBarrier<PIPE_V> between dependent vector calls. max_steps: more steps are a hang.
            warn: rules of CANN's documents that kernels in use break and NPUs let pass (twin/README.md) are listed in
                the result's ``warnings`` too, and do not end the launch.
            data: checked mode: names of workspaces and windows ("workspace" or the parameter's name, "windowsIn",
                "windowsOut", "windowsExp") that contain no flags. In all others a store of single 32-byte blocks
                counts as a flag, and no race is reported for it.
            soc, costs, events: timed mode: the SoC whose costs apply, costs by name that replace some of them, and
                the most events to record for a timeline. The result's ``time`` is the prediction.

        Raises:
            TwinFault: the kernel broke a rule; one line says what, where, on which rank and core.
            ArgumentError: the arguments do not fit the kernel or the mode. TwinBuildError, LibraryError: see `load`.
        """
        engine = self._engine(mode or self._mode)
        run = Run(engine, name, args, tiling, block_dim, tiling_key, windows, rank, workspace_bytes, warn, data)
        if engine.mode == "timed":
            limit_s = float("inf") if timeout_s is None else timeout_s * _MODELLED
            options = engine.timed(run.costs(soc, costs), limit_s, events)
        else:
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
        warn: bool = False,
        data: Iterable[str] = (),
    ) -> Exploration:
        """Run a kernel under many schedules of the checked engine, until one fails or all have run.

        Before each schedule, arguments and windows are as they were at the call; afterwards they are as the last
        schedule left them. Faults are returned, not raised.

        Args:
            schedules: number of schedules to run, with seeds ``seed``, ``seed + 1``, ...
            policy: one for all schedules; None: "late" first, then "random", "lazy" and "pct" in turn.
            deterministic: outputs that differ from the first schedule's are a finding.
            check: called after each schedule; an AssertionError that it raises is a finding.
            name, args, tiling, block_dim, tiling_key, windows, workspace_bytes, unordered, auto_sync, max_steps, warn,
                data: as in `launch`.
        """
        engine = self._engine("checked")
        run = Run(engine, name, args, tiling, block_dim, tiling_key, windows, None, workspace_bytes, warn, data)
        how: dict[str, Any] = {"unordered": unordered, "auto_sync": auto_sync, "max_steps": max_steps}
        options = [engine.schedule(seed + done, policy or policy_in_turn(done), **how) for done in range(schedules)]
        with self._running:
            return run.explore(engine.world(run.size, -1), options, deterministic, check)

    def _engine(self, mode: str, argument: str = "mode") -> Engine:
        need(mode in ENGINES, f"{argument} is one of {', '.join(ENGINES)}, not {mode!r}", argument)
        with self._opening:
            if mode not in self._engines:
                self._engines[mode] = Engine(self._library(mode, argument))
            return self._engines[mode]

    def _library(self, mode: str, argument: str) -> Path:
        if self._path.suffix in SOURCES:
            how: dict[str, Any] = {"tiling_keys": self._tiling_keys, "debug": self._debug}
            return build(self._path, defines=self._defines, includes=self._includes, engine=mode, **how)
        path = engine_path(self._path, mode)
        text = f"{self._path} has no library of the {mode} engine next to it: build it with"
        need(path.is_file(), f"{text} engine='{'timed' if mode == 'timed' else 'both'}'", argument)
        return path
