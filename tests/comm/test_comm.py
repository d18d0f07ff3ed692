"""Names, settings and the rendezvous of communicators, in one process."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import window_library
from bad_arguments import refused
from comm_cases import file_links
from window_library import WindowLibrary, exchange

from ascend_moe import comm
from ascend_moe.comm.peers import create_window
from ascend_moe.errors import CommBusy, CommClosed
from ascend_moe.native import liveness
from ascend_moe.native.liveness import describe_process, machine_id, process_gone


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[WindowLibrary]:
    """Counted windows; every test leaves none, and no descriptor either."""
    monkeypatch.setenv("HCCL_BUFFSIZE", "1")
    # pytest holds the group longer than the test does, and with it gloo's own descriptors.
    kinds = ("/memfd", "anon_inode:[pidfd]") if "group" in request.fixturenames else ("",)
    before = open_files(kinds)
    with window_library.counted(monkeypatch) as installed:
        yield installed
    assert open_files(kinds) == before


def open_files(kinds: tuple[str, ...]) -> list[str]:
    """Returns what this process has open of these kinds."""
    gc.collect()
    return sorted(link for link in file_links() if link.startswith(kinds))


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """The default group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    comm.close("0")
    dist.destroy_process_group()


def test_comm_name_opens_once_and_lookup_finds_it(group: Any, library: WindowLibrary) -> None:
    assert comm.comm_name() == comm.comm_name(group) == group.group_name == "0"
    end = comm.lookup("0", 1, 0)
    assert (end.name, end.rank, end.world, end.data_bytes, end.failed) == ("0", 0, 1, 1 << 20, None)
    assert comm.lookup("0", 1, 0) is end and len(library.comms) == 1
    assert exchange(end, 5) == [5]
    for place, argument in ((("0", 2, 0), "ep_world_size"), (("0", 1, 1), "ep_rank_id"), (("no", 1, 0), "group_ep")):
        refused(argument, comm.lookup, *place)
    comm.close("0")
    comm.close("0")
    assert end.closed and not library.mapped
    with pytest.raises(CommClosed, match="is closed") as caught, end.use():
        pass
    assert caught.value.details == {"rank": 0}
    fresh = comm.lookup("0", 1, 0)
    assert fresh is not end and exchange(fresh, 6) == [6]


def test_destroying_the_group_closes_its_windows(library: WindowLibrary) -> None:
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        end = comm.lookup(comm.comm_name(), 1, 0)
        assert len(library.comms) == 1 and exchange(end, 1) == [1]
        dist.destroy_process_group()
        refused("group_ep", comm.lookup, "0", 1, 0, says="not initialised")
    assert end.closed and not library.comms


def test_names_of_hccl_groups_are_hccls(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def get_hccl_comm_name(rank: int, init_comm: bool = True) -> str:
        asked.append(init_comm)
        return "127.0.0.1%hccl_0"

    name, (_, store) = "127.0.0.1%hccl_0", dist.distributed_c10d._world.pg_map[group]
    backend = SimpleNamespace(get_hccl_comm_name=get_hccl_comm_name)
    monkeypatch.setitem(dist.distributed_c10d._world.pg_map, group, ("hccl", store))
    monkeypatch.setattr(type(group), "_get_backend", lambda self, device: backend)
    monkeypatch.setattr(torch, "device", lambda kind: kind)
    assert comm.hccl_group(name, 1, 0) is group  # HCCL gave the name itself
    assert asked == [False]  # asking may not create a communicator: that is collective
    refused("group_ep", comm.hccl_group, str(group.group_name), 1, 0, says="c10d's name of an HCCL group")
    assert comm.comm_name(group) == name and comm.size_and_rank(name) == (1, 0)
    # Windows of that name are HCCL's: an op on CPU tensors must not open others.
    refused("group_ep", comm.lookup, name, 1, 0, says=r"is an HCCL communicator, .* the tensors are on cpu")
    assert not comm._entries


def test_close_waits_for_a_running_op(group: Any) -> None:
    end = comm.lookup(comm.comm_name(), 1, 0)
    entered, leave = threading.Event(), threading.Event()

    def op() -> None:
        with end.use():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=op)
    thread.start()
    entered.wait(10)
    with pytest.raises(CommBusy, match="an op is still running"):
        end.close(wait_s=0.05)
    assert not end.closed
    threading.Timer(0.1, leave.set).start()
    comm.close("0")
    assert end.closed
    thread.join()


def test_window_cannot_be_resized_by_a_peer() -> None:
    fd = create_window(8192)
    try:
        for size in (0, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)


def test_processes_are_described_by_state_and_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"process {os.getpid()} is running" in describe_process(os.getpid())
    own = liveness.process_stat(os.getpid())
    assert own is not None and not own.ending
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # a zombie has ended too
    assert describe_process(child) == f"process {child} has ended" and process_gone(child)
    left = liveness.process_stat(child)
    assert left is not None and left.ending
    # Killed, and what it holds not yet given back: an instant that no test can wait for.
    with monkeypatch.context() as patch:
        patch.setattr(liveness, "process_stat", lambda pid: liveness.ProcessStat("R", 1, ending=True))
        assert describe_process(child) == f"process {child} is ending"
    os.waitpid(child, 0)
    assert process_gone(child)
    assert process_gone(os.getpid(), born=1), "a process of this id with another start is another process"


def test_nobody_is_gone_because_no_descriptor_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object, **__: object) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Path, "read_text", exhausted)
    with pytest.raises(OSError, match="Too many open files"):
        process_gone(os.getpid())
    with pytest.raises(OSError, match="Too many open files"):
        machine_id.__wrapped__()
    assert describe_process(os.getpid()) == f"process {os.getpid()} cannot be inspected (Too many open files)"
