"""Rank processes that do what a test tells them: call a function, be killed, be stopped."""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from typing_extensions import Self

from ascend_moe.native.liveness import describe_process

CONTEXT = multiprocessing.get_context("forkserver")  # imports torch once, each rank starts in an instant
_PRELOADED = [
    "torch.distributed.fsdp",
    "torch._dynamo",
    "ascend_moe.validate.supervisor",
    "window_library",
    "rank_processes",
]
CONTEXT.set_forkserver_preload(_PRELOADED)


@dataclass
class CallResult:
    """Holds what a call did: its value, or the error's class name, text and details."""

    value: Any = None
    error: str = ""
    text: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class Ranks:
    """``world`` processes in one gloo group; the store is this process's or, as with env://, rank 0's."""

    def __init__(self, world: int, *, rank0_hosts: bool = False, timeout_s: float = 3.0) -> None:
        import torch.distributed as dist

        self.world = world
        # A TCPStore on port 0 tells a free port; with rank0_hosts it is only asked for that.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._store = None if rank0_hosts else store
        port = store.port
        del store
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            ours, theirs = CONTEXT.Pipe()
            args = (theirs, rank, world, port, rank0_hosts, timeout_s)
            process = CONTEXT.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        for rank in range(world):
            assert self.wait(rank, 60).value == "ready"

    def pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def start(self, rank: int, function: Callable[..., Any], *args: Any) -> None:
        self.pipes[rank].send((function, args))

    def wait(self, rank: int, seconds: float = 20) -> CallResult:
        assert self.pipes[rank].poll(seconds), f"rank {rank} does not answer"
        outcome = self.pipes[rank].recv()
        assert isinstance(outcome, CallResult)
        return outcome

    def call(self, function: Callable[..., Any], *args: Any, ranks: Any = None) -> list[CallResult]:
        """The function on these ranks (default all) at once."""
        ranks = range(self.world) if ranks is None else ranks
        for rank in ranks:
            self.start(rank, function, *args)
        return [self.wait(rank) for rank in ranks]

    def kill(self, rank: int) -> None:
        os.kill(self.pid(rank), signal.SIGKILL)

    def stop(self, rank: int) -> None:
        os.kill(self.pid(rank), signal.SIGSTOP)
        while f"process {self.pid(rank)} is stopped" not in describe_process(self.pid(rank)):
            time.sleep(0.001)

    def resume(self, rank: int) -> None:
        os.kill(self.pid(rank), signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()  # ends a stopped process too
            process.join()
            process.close()
        self._store = None


def _serve(pipe: Connection, rank: int, world: int, port: int, rank0_hosts: bool, timeout_s: float) -> None:
    import torch.distributed as dist
    import window_library

    # Where rank 0 does not host the store, an agent does, as under torchrun.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(not rank0_hosts)
    os.environ["ASCEND_MOE_TIMEOUT_S"] = str(timeout_s)
    os.environ["HCCL_BUFFSIZE"] = "2"
    store = dist.TCPStore("127.0.0.1", port, is_master=rank0_hosts and rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    window_library.install()
    pipe.send(CallResult("ready"))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        began = time.monotonic()
        outcome = CallResult()
        try:
            outcome.value = function(*args)
        except Exception as error:
            outcome = CallResult(error=type(error).__name__, text=str(error))
            outcome.details = dict(getattr(error, "details", {}))
        outcome.seconds = time.monotonic() - began
        pipe.send(outcome)


def values(outcomes: list[CallResult]) -> list[Any]:
    for outcome in outcomes:
        assert not outcome.error, f"{outcome.error}: {outcome.text}"
    return [outcome.value for outcome in outcomes]


def assert_named(outcome: CallResult, error: str, rank: int, *words: str) -> None:
    """An error in one line, about this rank, with these words."""
    assert outcome.error == error, f"{outcome.error}: {outcome.text} {outcome.value}"
    assert outcome.details["rank"] == rank, outcome.text
    assert "\n" not in outcome.text
    for word in (f"rank {rank}", *words):
        assert word in outcome.text, outcome.text


def printed_by(program: str, folder: Path, **environment: str) -> str:
    """What a Python program prints in a process of its own, which has imported torch and not the program's names."""
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:
        return pool.submit(_printed_here, program, folder, environment).result()


def _printed_here(program: str, folder: Path, environment: dict[str, str]) -> str:
    os.chdir(folder)
    os.environ.update(environment)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(program, {"__name__": "__main__"})
    return out.getvalue()


# ---- fixtures: a test module that imports them has them in all its tests


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    """Started, and its descriptors open, before any are counted."""
    with Ranks(1):
        pass


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every test leaves nothing in /dev/shm, in this process's descriptors and among its children.

    A collection takes most of a second beside thousands of tests, so it runs only where something seems left.
    """
    before = present()
    yield
    if left(before):
        gc.collect()
    assert not left(before), f"{present()}, before the test {before}"


def left(before: tuple[list[str], int, list[str]]) -> bool:
    """Whether there is more than before; an older test's garbage may have gone meanwhile."""
    memory, descriptors, children = present()
    return bool(set(memory) - set(before[0]) or descriptors > before[1] or set(children) - set(before[2]))


def present() -> tuple[list[str], int, list[str]]:
    children = sorted(str(child) for child in multiprocessing.active_children())
    return shared_memory(), len(os.listdir("/proc/self/fd")), children


def shared_memory() -> list[str]:
    """Names in /dev/shm, without those that torch and Python make for programs beside us."""
    return sorted(name for name in os.listdir("/dev/shm") if not name.startswith(("torch_", "sem.", "psm_")))
