"""Is a process alive, stopped or gone: what /proc, a pidfd and the far end of a socket can tell."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path

STATES = {"T": "is stopped", "t": "is stopped by a debugger", "D": "is waiting for a device"}
GONE = ("Z", "X", "x")  # a zombie's memory and file descriptors are released already
PF_EXITING = 0x4  # Linux, include/linux/sched.h


def out_of_descriptors(error: OSError) -> bool:
    """The limit of open files is reached: nothing is known of what was to be looked at."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


@dataclass(frozen=True)
class ProcessStat:
    """One letter of state and the start, in clock ticks since boot, which tells reused ids apart.

    ``ending``: it has been killed or has left; what it holds goes piece by piece, its connections one after another.
    """

    state: str
    born: int
    ending: bool


def process_stat(pid: int) -> ProcessStat | None:
    """/proc/<pid>/stat, or None when there is no such process.

    Raises:
        OSError: no descriptor is left to look with.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError as error:
        if out_of_descriptors(error):
            raise
        return None
    fields = text.rpartition(")")[2].split()  # the command in parentheses may hold anything
    return ProcessStat(state=fields[0], born=int(fields[19]), ending=bool(int(fields[6]) & PF_EXITING))


def process_gone(pid: int, born: int | None = None) -> bool:
    """True when the process has ended, or when its id now belongs to one with another start."""
    stat = process_stat(pid)
    return stat is None or stat.state in GONE or (born is not None and stat.born != born)


def _is_ending(pid: int) -> bool:
    """Whether the process is there and leaves."""
    try:
        stat = process_stat(pid)
    except OSError:
        return False  # nothing is known
    return stat is not None and stat.ending


def born_here() -> int:
    """When this process was started, as ``ProcessStat.born``; 0: unknown."""
    stat = process_stat(os.getpid())
    return 0 if stat is None else stat.born


def describe_process(pid: int) -> str:
    """E.g. ``process 4242 is stopped (state T)``."""
    if pid <= 0:
        return "its process is not visible from here"
    try:
        stat = process_stat(pid)
    except OSError as error:
        return f"process {pid} cannot be looked at ({error.strerror})"
    if stat is None or stat.state in GONE:
        return f"process {pid} has ended"
    if stat.ending:
        return f"process {pid} is ending"
    return f"process {pid} {STATES.get(stat.state, 'is running')} (state {stat.state})"


@cache
def machine_id() -> str:
    """One boot and one network namespace: processes of equal id reach each other's abstract sockets."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError as error:
        if out_of_descriptors(error):
            raise
        return socket.gethostname()


@cache
def pid_namespace() -> str:
    """Process ids of another namespace mean nothing here."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """(process id, or 0 when not visible here; user id) of the process at the far end of a Unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def foreign_user(sock: socket.socket) -> int | None:
    """The user id of the process at the far end of a Unix socket, where it is not this process's; else None.

    Of a connection that was accepted it is who connected, of one that was made, who listened.
    """
    user = peer_credentials(sock)[1]
    return None if user == os.geteuid() else user


class PeerWatch:
    """The far end of an open communicator. Owns the connection to it.

    ``fileno()`` becomes readable when the peer's process ends or when it closes its end: an epoll
    descriptor over both. The socket alone would not do, as a forked child of the peer keeps it open;
    nor would a pidfd, as a peer can close its communicator and live on.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.pid = peer_credentials(sock)[0]
        self._sock = sock
        self._epoll = select.epoll()
        self._pidfd = -1  # also where the kernel gives none
        with contextlib.suppress(OSError, AttributeError):
            self._pidfd = os.pidfd_open(self.pid) if self.pid > 0 else -1
        # Not EPOLLIN: words that arrive late are no sign of death.
        self._epoll.register(sock.fileno(), select.EPOLLRDHUP)
        if self._pidfd >= 0:
            self._epoll.register(self._pidfd, select.EPOLLIN)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def fired(self) -> bool:
        """The peer has closed its end, or its process has ended."""
        return bool(self._epoll.poll(0))

    def ended(self) -> bool:
        """The peer's process has ended."""
        if self._pidfd < 0:
            return self.pid > 0 and process_gone(self.pid)
        return self._leaves(100 if self.fired() else 0)

    def describe(self) -> str:
        """Returns what can be seen of the peer now, e.g. ``process 4242 is stopped (state T)``."""
        closed = self._closed(self._sock.fileno(), select.POLLRDHUP, 0)
        if (closed or _is_ending(self.pid)) and self._pidfd >= 0 and self._leaves(100):
            return f"process {self.pid} has ended"
        return ("it has closed its communicator; " if closed else "") + describe_process(self.pid)

    def _leaves(self, timeout_ms: int) -> bool:
        """Whether its pidfd tells in time: a process that dies loses its sockets, one after another, before that."""
        return self._closed(self._pidfd, select.POLLIN, timeout_ms)

    @staticmethod
    def _closed(fd: int, events: int, timeout_ms: int) -> bool:
        poll = select.poll()
        poll.register(fd, events)
        return bool(poll.poll(timeout_ms))

    def close(self) -> None:
        self._epoll.close()
        self._sock.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
