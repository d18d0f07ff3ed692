"""One call of launch or explore: the ranks' arguments, their native description, what comes of it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError, TwinFault
from . import _abi
from .arguments import Arguments
from .engine import Engine
from .exploration import Exploration
from .windows import Groups, Member, Windows, members_of

MAX_CORES = 64


@dataclass(frozen=True)
class Outcome:
    """What a launch left behind. Checked mode: steps taken, and a hash of their order."""

    steps: int = 0
    trace_hash: int = 0


@dataclass(frozen=True)
class Call:
    """The arguments of `Kernels.launch` that say what runs."""

    name: str
    args: Sequence[Any]
    tiling: Any
    block_dim: int
    tiling_key: int
    windows: Groups
    rank: int | None
    workspace_bytes: int | None


class Run:
    """A call, ready to be executed by an engine. Keeps alive whatever the native side points at."""

    def __init__(self, engine: Engine, call: Call) -> None:
        if not 1 <= call.block_dim <= MAX_CORES:
            raise ArgumentError(
                f"block_dim is {call.block_dim}: 1..{MAX_CORES} AIV cores", argument="block_dim"
            )
        self._engine, self._call = engine, call
        self._members = members_of(call.windows, call.rank)
        alone = call.rank is not None or call.windows is None or isinstance(call.windows, Member)
        lists = _per_rank(call.args, call.tiling, len(self._members), alone=alone)
        parameters = engine.entry(call.name).parameters
        self._arguments = [
            Arguments(
                call.name,
                parameters,
                values,
                tiling,
                call.workspace_bytes,
                rank=number,
                stage=engine.mode == "checked",
            )
            for number, (values, tiling) in enumerate(lists)
        ]
        self._keep: list[Any] = []
        self._launches = (_abi.Launch * len(self._members))()
        for launch, arguments, members in zip(self._launches, self._arguments, self._members, strict=True):
            self._describe(launch, arguments, members)

    @property
    def shared(self) -> Member | None:
        """The place of a rank that runs while its peers are other threads' launches."""
        alone = len(self._members) == 1 and len(self._members[0]) > 0
        member = self._members[0][0] if alone else None
        return member if member is not None and member.windows.world > 1 else None

    @property
    def size(self) -> int:
        """Ranks of the native world."""
        return self.shared.windows.world if self.shared else len(self._members)

    def _describe(self, launch: _abi.Launch, arguments: Arguments, members: tuple[Member, ...]) -> None:
        launch.entry = self._engine.address(self._call.name)
        launch.block_dim = self._call.block_dim
        launch.tiling_key = self._call.tiling_key & 0xFFFFFFFFFFFFFFFF
        launch.arguments = arguments.words
        launch.argument_count = arguments.count
        ranges = arguments.ranges()
        for index, member in enumerate(members):
            windows = member.windows
            blob = windows.context(self._engine.library, member.rank)
            launch.contexts[index] = blob.address
            ranges.append(_abi.range_of(blob.address, blob.size, f"HCCL context {index}"))
            workspace = windows.workspace(member.rank)
            ranges.append(_abi.range_of(workspace.address, workspace.size, f"HCCL workspace {index}"))
            if windows not in [earlier.windows for earlier in members[:index]]:
                # The checked engine sees for itself which blocks are flags.
                ranges += windows.ranges(atomic=self._engine.mode == "fast")
        if members:
            launch.doorbell = members[0].windows.doorbell(members[0].rank)
        table = (_abi.Range * len(ranges))(*ranges)
        self._keep += [ranges, table]
        launch.ranges = table
        launch.range_count = len(ranges)

    # ---- once ----

    def once(self, world: int, options: _abi.Options, timeout_s: float | None) -> Outcome:
        """Executes the call in a native world of `size` ranks. Raises TwinFault."""
        for launch in self._launches:
            launch.deadline_s = timeout_s or 0.0
        outcome = self._native(world, options)
        self._finish()
        if isinstance(outcome, _abi.Outcome):
            raise self._fault(outcome, options)
        return outcome

    def _native(self, world: int, options: _abi.Options) -> Outcome | _abi.Outcome:
        """Outcome, or the native one of a failure."""
        native, library = _abi.Outcome(), self._engine.library
        for windows in self._groups().values():
            windows.touch()
        if self.shared is not None:
            rank = self.shared.rank
            failed = library.twin_world_run_rank(world, rank, self._launches, ctypes.byref(native))
        else:
            failed = library.twin_world_run(
                world, self._launches, ctypes.byref(options), ctypes.byref(native)
            )
        return native if failed else Outcome(int(native.steps), int(native.trace_hash))

    def _finish(self) -> None:
        for arguments in self._arguments:
            arguments.finish()

    def _groups(self) -> dict[int, Windows]:
        return {id(one.windows): one.windows for members in self._members for one in members}

    def _fault(self, native: _abi.Outcome, options: _abi.Options) -> TwinFault:
        text = native.text.decode(errors="replace")
        said = re.search(r"\(rank (\d+), core \d+\)", text)
        details: dict[str, Any] = {}
        if self._engine.mode == "checked" and self.shared is None:
            policy = self._engine.policies[options.policy]
            details = {"seed": int(options.seed), "policy": policy}
            text += f" [mode='checked', seed={options.seed}, policy='{policy}']"
        return TwinFault(
            f"{self._call.name}: {text}",
            kernel=self._call.name,
            rank=int(said.group(1)) if said else int(native.rank),
            finding=native.finding.decode(),
            **details,
        )

    # ---- many times ----

    def explore(
        self,
        world: int,
        schedules: Sequence[_abi.Options],
        deterministic: bool,
        check: Callable[[], object] | None,
    ) -> Exploration:
        """Executes the call under each schedule, from the same contents, until one fails."""
        saved = {key: windows.snapshot() for key, windows in self._groups().items()}
        for arguments in self._arguments:
            arguments.save()
        first: list[list[tuple[str, bytes]]] = []
        hashes: set[int] = set()
        steps = 0
        for done, options in enumerate(schedules, 1):
            self._restore(saved)
            outcome = self._native(world, options)
            self._finish()
            seed, policy = int(options.seed), self._engine.policies[options.policy]
            if isinstance(outcome, _abi.Outcome):
                fault = self._fault(outcome, options)
                return Exploration(done, len(hashes), steps, fault.finding, str(fault), seed, policy)
            hashes.add(outcome.trace_hash)
            steps += outcome.steps
            text = _violation(check)
            if text is None and deterministic:
                left = [arguments.contents() for arguments in self._arguments]
                first = first or left
                text = _difference(first, left, int(schedules[0].seed))
            if text is not None:
                line = f"{self._call.name}: {text} [mode='checked', seed={seed}, policy='{policy}']"
                return Exploration(done, len(hashes), steps, "wrong result", line, seed, policy)
        return Exploration(len(schedules), len(hashes), steps)

    def _restore(self, saved: dict[int, Any]) -> None:
        for key, windows in self._groups().items():
            windows.restore(saved[key])
        for arguments in self._arguments:
            arguments.restore()


def _per_rank(
    args: Sequence[Any], tiling: Any, ranks: int, *, alone: bool
) -> list[tuple[Sequence[Any], Any]]:
    if alone:
        return [(args, tiling)]
    if len(args) != ranks or not all(isinstance(one, (list, tuple)) for one in args):
        raise ArgumentError(
            f"with windows of {ranks} ranks, args is a list of {ranks} lists", argument="args"
        )
    if isinstance(tiling, (list, tuple)):
        if len(tiling) != ranks:
            raise ArgumentError(f"{len(tiling)} tilings for {ranks} ranks", argument="tiling")
        return list(zip(args, tiling, strict=True))
    return [(one, tiling) for one in args]


def _violation(check: Callable[[], object] | None) -> str | None:
    if check is None:
        return None
    try:
        check()
    except AssertionError as error:
        said = str(error).strip().splitlines() or ["AssertionError"]
        return f"check: {said[0]}"
    return None


def _difference(
    first: list[list[tuple[str, bytes]]], now: list[list[tuple[str, bytes]]], seed: int
) -> str | None:
    for rank, (ours, theirs) in enumerate(zip(first, now, strict=True)):
        for (name, wanted), (_, got) in zip(ours, theirs, strict=True):
            if wanted != got:
                at = next(i for i, (a, b) in enumerate(zip(wanted, got, strict=True)) if a != b)
                return f"{name} of rank {rank} differs from seed {seed}'s, first at byte {at}"
    return None
