"""LocalCluster: ranks as threads, their failures, and its windows."""

from __future__ import annotations

import signal
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import window_library
from bad_arguments import refused
from window_library import WindowLibrary, exchange

import ascend_moe
from ascend_moe import comm
from ascend_moe.comm import LocalCluster
from ascend_moe.comm import threads as local_cluster
from ascend_moe.errors import ArgumentError, AscendMoeError, CommTimeout, PeerLost

pytestmark = pytest.mark.tsan


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[WindowLibrary]:
    """Counted windows; every test leaves none, and no rank's thread."""
    monkeypatch.setenv("HCCL_BUFFSIZE", "1")
    with window_library.counted(monkeypatch) as installed:
        yield installed
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("local_cluster")]


def op(rank: int, group_ep: str, world: int = 3) -> list[int]:
    return exchange(comm.lookup(group_ep, world, rank), rank + 10)


@pytest.mark.parametrize("fails", [False, True])
def test_the_default_dtype_is_as_before(fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Two ranks enter and leave a context that sets it, in turn, as from_pretrained's: it would stay bfloat16."""
    turns = [threading.Event() for _ in range(4)]
    turns[0].set()

    def work(rank: int, group_ep: str) -> None:
        turns[rank].wait(20)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        turns[rank + 1].set()
        turns[rank + 2].wait(20)
        torch.set_default_dtype(before)
        turns[3].set()
        assert not fails

    with LocalCluster(2) as cluster:
        cluster.run(lambda rank, group_ep: None)
        assert not caplog.records
        if fails:
            with pytest.raises(AssertionError):
                cluster.run(work)
        else:
            cluster.run(work)
    assert torch.get_default_dtype() == torch.float32
    (record,) = caplog.records
    assert "default dtype, shared by all threads, to torch.bfloat16" in record.getMessage()


@pytest.mark.parametrize("world", [1, 2, 64])
def test_results_by_rank_run_after_run(world: int, library: WindowLibrary) -> None:
    with LocalCluster(world) as cluster:
        assert cluster.run(lambda rank, name: rank * rank) == [rank * rank for rank in range(world)]
        assert not library.mapped, "windows are opened by the first op"
        handles = []
        for _ in range(3):
            results = cluster.run(lambda rank, name: (rank, name, op(rank, name, world)))
            assert results == [(rank, cluster.name, list(range(10, 10 + world))) for rank in range(world)]
            handles.append(sorted(library.comms))
        assert handles[0] == handles[1] == handles[2], "the windows stay open from run to run"
        assert len(library.mapped) == world
    assert not library.mapped


def test_world_size_is_1_to_384() -> None:
    for size in (0, 385, -1, True, 2.0, "2", None):
        refused("world_size", LocalCluster, size, says=r"in 1\.\.384")


def test_the_window_has_the_size_given_or_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in (0, True, 1.0, "4"):
        with pytest.raises(ArgumentError, match="window_mib"):
            LocalCluster(2, window_mib=bad)  # type: ignore[arg-type]

    def data_bytes(rank: int, name: str) -> int:
        return comm.lookup(name, 2, rank).data_bytes

    with LocalCluster(2, window_mib=3) as fixed, LocalCluster(2) as by_env:
        assert fixed.name != by_env.name
        assert fixed.run(data_bytes) == [3 << 20] * 2
        assert by_env.run(data_bytes) == [1 << 20] * 2
        monkeypatch.setenv("HCCL_BUFFSIZE", "2")
        assert by_env.run(data_bytes) == [1 << 20] * 2, "the windows are open"
        comm.close(by_env.name)
        assert by_env.run(data_bytes) == [2 << 20] * 2
        comm.close(by_env.name)
        monkeypatch.setenv("HCCL_BUFFSIZE", "none")
        with pytest.raises(ArgumentError, match="HCCL_BUFFSIZE"):
            by_env.run(data_bytes)


def test_only_inside_with() -> None:
    cluster = LocalCluster(2)
    with cluster:
        assert "local_cluster" in comm.lookup(cluster.name, 2, 1).name
    for _ in range(2):
        with pytest.raises(AscendMoeError, match="is not open"):
            cluster.run(op)
        cluster = LocalCluster(2)  # never opened
    with pytest.raises(ArgumentError, match="names no live communicator"):
        comm.lookup(cluster.name, 2, 0)
    comm.close(cluster.name)


@pytest.mark.parametrize(
    ("errors", "text"),
    [
        ([ValueError("of rank 0"), ValueError("of rank 1")], "of rank 0"),
        # A peer may learn of rank 1's failure before its exception reaches the cluster.
        ([PeerLost("rank 1 is lost", rank=1), ValueError("the cause")], "the cause"),
        ([CommTimeout("rank 1 did not come", rank=1), ValueError("later")], "did not come"),
        ([PeerLost("rank 1 is lost", rank=1), PeerLost("rank 0 is lost", rank=0)], "is lost"),
        ([SystemExit(3), SystemExit(3)], "3"),
        ([KeyError("first"), None], "first"),  # the other rank waits in its first op
    ],
)
def test_earliest_error_and_lost_peers_lead_to_the_cause(errors: list[Any], text: str) -> None:
    def body(rank: int, name: str) -> None:
        time.sleep(0.1 * rank)
        if errors[rank] is None:
            op(rank, name, 2)
        raise errors[rank]

    with LocalCluster(2) as cluster:
        with pytest.raises(BaseException, match=text) as caught:
            cluster.run(body)
        assert caught.value in errors
        if errors[1] is None:
            (lost,) = caught.value.others.values()  # type: ignore[attr-defined]
            assert type(lost) is PeerLost and lost.rank == 0 and "its function raised KeyError" in str(lost)
        assert cluster._windows is None, "failed windows are closed"
        assert cluster.run(op, 2) == [[10, 11]] * 2


def test_peer_that_closed_is_lost_and_new_windows_wait_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "2")

    def one_closes(rank: int, name: str) -> Any:
        op(rank, name, 2)
        if rank == 0:
            with pytest.raises(PeerLost, match="it has closed its communicator") as lost:
                time.sleep(0.1)
                op(rank, name, 2)
            return lost.value.rank
        comm.close(name)
        with pytest.raises(CommTimeout, match="new windows need close") as late:
            op(rank, name, 2)
        return late.value.ranks

    with LocalCluster(2) as cluster:
        assert cluster.run(one_closes) == [1, [0]]


def test_close_from_elsewhere_while_running() -> None:
    inside, leave = threading.Barrier(3), threading.Event()

    def body(rank: int, name: str) -> list[int]:
        result = op(rank, name, 2)
        inside.wait(10)
        leave.wait(10)
        return result

    with LocalCluster(2) as cluster:
        runs: list[Any] = []
        thread = threading.Thread(target=lambda: runs.append(cluster.run(body)))
        thread.start()
        inside.wait(10)
        with pytest.raises(AscendMoeError, match="in the function of each rank"):
            comm.close(cluster.name)
        with pytest.raises(AscendMoeError, match="already in progress"):
            cluster.run(body)
        leave.set()
        thread.join(10)
        assert runs == [[[10, 11]] * 2]
        comm.close(cluster.name)


def test_no_memory_for_windows(library: WindowLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    alloc, left = library.am_window_alloc, [2]

    def short_of_memory(total: int) -> int | None:
        left[0] -= 1
        return alloc(total) if left[0] >= 0 else None

    monkeypatch.setattr(library, "am_window_alloc", short_of_memory)
    with LocalCluster(3) as cluster:
        with pytest.raises(AscendMoeError, match=r"no memory for the 1 MiB window of rank.*HCCL_BUFFSIZE"):
            cluster.run(op)
        assert not library.mapped
        left[0] = 3
        assert cluster.run(op) == [[10, 11, 12]] * 3


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C works as at a terminal: a shell's background job has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_soon(started: threading.Event) -> None:
    def body() -> None:
        started.wait(10)
        time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]

    threading.Thread(target=body).start()


def test_no_thread_of_a_rank_outlives_run(monkeypatch: pytest.MonkeyPatch) -> None:
    finished = LocalCluster._finished

    def lingering(self: LocalCluster, rank: int, error: BaseException | None) -> None:
        finished(self, rank, error)
        time.sleep(0.05)

    monkeypatch.setattr(LocalCluster, "_finished", lingering)
    with LocalCluster(2) as cluster:
        cluster.run(lambda rank, group_ep: None)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith(cluster.name)]


def test_the_error_is_the_last_line_of_its_traceback() -> None:
    def fails(rank: int, name: str, wrong: int) -> None:
        if rank == wrong:
            try:
                raise KeyError("first")
            except KeyError as error:
                raise ValueError("my own") from error

    with LocalCluster(2) as cluster, pytest.raises(ValueError) as raised:
        cluster.run(fails, 1)
    lines = "".join(traceback.format_exception(raised.value)).splitlines()
    assert lines[-1] == "ValueError: my own" and lines[0].endswith("RankRaised: rank 1 of " + cluster.name)


@pytest.mark.usefixtures("ctrl_c")
def test_keyboard_interrupt_wakes_ranks_that_wait_in_an_op() -> None:
    started = threading.Event()

    def waits(rank: int, name: str) -> list[int]:
        started.set()
        if rank == 2:
            time.sleep(0.3)
        return op(rank, name)

    with LocalCluster(3) as cluster:
        interrupt_soon(started)
        with pytest.raises(KeyboardInterrupt):
            cluster.run(waits)
        assert cluster.run(op) == [[10, 11, 12]] * 3


def test_an_interrupt_while_threads_start_leaves_the_cluster_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if thread.name.endswith("-rank1"):
            monkeypatch.setattr(threading.Thread, "start", start)
            raise KeyboardInterrupt
        start(thread)

    with LocalCluster(3) as cluster:
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cluster.run(op)
        assert cluster.run(op) == [[10, 11, 12]] * 3


@pytest.mark.usefixtures("ctrl_c")
def test_keyboard_interrupt_does_not_wait_for_ever(library: WindowLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_cluster, "INTERRUPT_GRACE_S", 0.1)
    started, leave = threading.Event(), threading.Event()

    def stuck(rank: int, name: str) -> None:
        op(rank, name, 2)
        started.set()
        leave.wait(10)

    with LocalCluster(2) as cluster:
        interrupt_soon(started)
        with pytest.raises(KeyboardInterrupt):
            cluster.run(stuck)
        with pytest.raises(AscendMoeError, match="is not open"):
            cluster.run(op)
    assert library.mapped, "not freed under a function that may still use them"
    leave.set()
    deadline = time.monotonic() + 5
    while library.mapped and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not library.mapped, "the last function to end has freed them"


def test_a_timeout_says_which_rank_is_in_python_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of the two ranks that are waited for computes; the op of the second waits for the first too."""
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "0.5")
    over = threading.Barrier(3)  # rank 1 computes until the others have their errors

    def rank_main(rank: int, group_ep: str) -> str:
        x, ids = torch.zeros(3, 16), torch.arange(3, dtype=torch.int32)[:, None]
        try:
            if rank != 1:
                ascend_moe.npu_moe_distribute_dispatch_v2(x, ids, group_ep, 3, rank, 3)
        except CommTimeout as error:
            return str(error)
        finally:
            over.wait(20)
        return ""

    with LocalCluster(3) as cluster:
        said = cluster.run(rank_main)
    assert said[1] == "" and all("rank 1: its function is running, in no op of this group" in said[r] for r in (0, 2))
