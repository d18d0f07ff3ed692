"""Has what rank processes do in the tests of communicators: functions that a test names."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from typing import Any

import torch.distributed as dist
from window_library import WindowLibrary, exchange

from ascend_moe import comm
from ascend_moe.comm import rendezvous
from ascend_moe.native import library as _lib
from ascend_moe.ops import npu_servers


def library() -> WindowLibrary:
    current = _lib.lib()
    assert isinstance(current, WindowLibrary)
    return current


def op(name: str = "0") -> list[int]:
    """An exchange by group name: opens the windows when they are not."""
    group = comm._resolve(name)
    assert group is not None
    end = comm.lookup(name, group.size(), group.rank())
    return exchange(end, 100 * end.rank + len(name))


def close_twice_and_count() -> tuple[int, int, int]:
    """Windows mapped, communicators and memfds after closing."""
    comm.close("0")
    comm.close("0")
    memfds = [link for link in file_links() if "memfd" in link]
    return len(library().mapped), len(library().comms), len(memfds)


def open_files() -> list[str]:
    """Returns what this process has open, without the numbers."""
    return sorted(link.split("[")[0] for link in file_links())


def inheritable_files() -> list[int]:
    """Descriptors above stderr that a program we start would inherit."""
    return [fd for fd in range(3, 256) if os.path.exists(f"/proc/self/fd/{fd}") and os.get_inheritable(fd)]


def file_links() -> list[str]:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return links


def leave_room_for_files(count: int) -> None:
    """So many descriptors may be opened yet."""
    last = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + count, last + count))


def set_env(name: str, value: str) -> None:
    os.environ[name] = value


def open_with_the_checked_engine(name: str = "0") -> int:
    """Its library in the place of the fast one; the ranks of the opened group."""
    library().inner = _lib.open_library(_lib.library_path("checked"), _lib.SIGNATURES)
    group = comm._resolve(name)
    assert group is not None
    return comm.lookup(name, group.size(), group.rank()).world


def set_on(rank: int, name: str, value: str) -> None:
    if dist.get_rank() == rank:
        os.environ[name] = value


def hosts_are(names: list[str]) -> None:
    """This process takes itself to be on the host of its rank."""
    socket.gethostname = lambda: names[dist.get_rank()]


def ranks_sharing(some: list[int]) -> int:
    """In a new group of these ranks; all ranks call, and the others get 0."""
    group = dist.new_group(some)
    if not isinstance(group, dist.ProcessGroup):
        return 0
    records = npu_servers.gather("g", group, 10, "Ascend910_9391")
    return npu_servers.agreed("g", group.rank(), records, sorted(some), dist.get_world_size())


def signal_self_at(point: str, number: int) -> None:
    """The next opening sends this process a signal: at 'record', 'peer', 'map' or 'ready'."""

    opening = rendezvous.Opening
    take, announce = opening._take, opening._announce

    def hit() -> None:
        opening._take, opening._announce = take, announce  # type: ignore[method-assign]
        os.kill(os.getpid(), number)

    def taking(self: Any, rank: int) -> None:
        if point == "record":  # its record is stored
            hit()
        take(self, rank)
        if point == "peer" and self.peers:
            hit()

    def announcing(self: Any) -> None:
        if point == "map":
            hit()
        announce(self)
        if point == "ready":
            hit()

    opening._take, opening._announce = taking, announcing  # type: ignore[method-assign]


def fail_mapping_once() -> None:
    library().fail_map_at = 1


def fork_and_exit_child() -> int:
    """A forked child that runs its exit handlers must not close the parent's communicator."""
    comm.comm_name()
    child = os.fork()
    if child == 0:
        comm._close_all()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fork_child_that_stays() -> int:
    """A child that holds copies of all descriptors for a while."""
    comm.comm_name()
    held = dict(comm._entries)
    child = os.fork()
    if child == 0:
        time.sleep(20 * len(held))
        os._exit(0)
    return child


def new_group(ranks: list[int]) -> str:
    """A group of these ranks alone; only they call."""
    group = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group.group_name


def destroy_and_init_again(port: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world)
