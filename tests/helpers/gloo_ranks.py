"""EP ranks over gloo for tests: threads of this process, or real processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
_TIMEOUT = timedelta(seconds=20)


class GlooThreads:
    """``world`` gloo process groups of one communicator, rank r's used by thread r of ``run``."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.store = dist.HashStore()
        self.pool = ThreadPoolExecutor(world)
        self.groups = list(self.pool.map(self._open, range(world)))

    def _open(self, rank: int) -> dist.ProcessGroup:
        store = dist.PrefixStore("ranks", self.store)
        group = dist.ProcessGroup(store, rank, self.world)
        kind = dist.ProcessGroup.BackendType.GLOO
        gloo = dist.ProcessGroupGloo(store, rank, self.world, _TIMEOUT)
        group._register_backend(torch.device("cpu"), kind, gloo)
        group._set_default_backend(kind)
        return group

    def run(self, fn: Callable[[int, dist.ProcessGroup], T]) -> list[T]:
        """Results of fn(rank, group) by rank; the lowest rank's exception is raised, if any."""
        results = self.outcomes(fn)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results  # type: ignore[return-value]

    def outcomes(self, fn: Callable[[int, dist.ProcessGroup], T]) -> list[T | BaseException]:
        """Like ``run``, with an exception in the place of a result."""

        def guarded(rank: int) -> T | BaseException:
            try:
                return fn(rank, self.groups[rank])
            except BaseException as error:
                return error

        return list(self.pool.map(guarded, range(self.world)))


@functools.cache
def threads(world: int) -> GlooThreads:
    """The same groups for all tests of a session."""
    return GlooThreads(world)


def process_main(rank: int, world: int, rendezvous: str, body: Callable[[int], Any], out: str) -> None:
    """One rank of ``run_processes``; must be importable by name in the child."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=_TIMEOUT)
    torch.save(body(rank), Path(out) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_processes(world: int, body: Callable[[int], Any], scratch: Path) -> list[Any]:
    """Runs body(rank) in ``world`` processes with a default gloo group; returns results by rank."""
    torch.multiprocessing.spawn(
        process_main, args=(world, str(scratch / "rendezvous"), body, str(scratch)), nprocs=world
    )
    return [torch.load(scratch / f"{rank}.pt") for rank in range(world)]
