"""State of processes (running, stopped, ended), from /proc and pidfds."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path

STATES = {"T": "is stopped", "t": "is stopped by a debugger", "D": "is waiting for a device"}
GONE = ("Z", "X", "x")  # a zombie's memory and file descriptors are released already
PF_EXITING = 0x4  # Linux, include/linux/sched.h
_PIDFD_OPEN = 434  # the same on every architecture; os.pidfd_open is missing where Python was built on old headers
_libc = ctypes.CDLL(None, use_errno=True)


def out_of_descriptors(error: OSError) -> bool:
    """Return whether ``error`` says that the limit of open files is reached, not that the file is missing."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


@dataclass(frozen=True)
class ProcessStat:
    """State letter of a process, and its start in clock ticks since boot, which distinguishes reused process ids.

    ``ending``: the process has been killed or is exiting, and its memory and descriptors are being released.
    """

    state: str
    born: int
    ending: bool


def process_stat(pid: int) -> ProcessStat | None:
    """Return the state of a process from /proc/<pid>/stat, or None if there is no such process.

    Raises:
        OSError: no descriptor is left to read it with.
    """
    if (text := _proc_text(pid, "stat")) is None:
        return None
    fields = text.rpartition(")")[2].split()  # the command in parentheses may contain anything
    return ProcessStat(state=fields[0], born=int(fields[19]), ending=bool(int(fields[6]) & PF_EXITING))


def _proc_text(pid: int, name: str) -> str | None:
    """Return the text of /proc/<pid>/<name>, or None if it is hidden or the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError as error:
        if out_of_descriptors(error):
            raise
        return None


def process_gone(pid: int, born: int | None = None) -> bool:
    """Return whether the process has ended, or ``pid`` now belongs to a process with another start than ``born``."""
    stat = process_stat(pid)
    return stat is None or stat.state in GONE or (born is not None and stat.born != born)


def process_user(pid: int) -> int | None:
    """Return a process's effective user id; None: ended, exiting, or hidden. Raises as `process_stat`."""
    stat = process_stat(pid)
    if stat is None or stat.state in GONE or stat.ending or (status := _proc_text(pid, "status")) is None:
        return None
    return int(status.partition("\nUid:")[2].split()[1])


def born_here() -> int:
    """Return the start of this process in clock ticks since boot; 0 if /proc hides it. Raises as `process_stat`."""
    stat = process_stat(os.getpid())
    return 0 if stat is None else stat.born


def describe_process(pid: int) -> str:
    """Describe the state of a process, e.g. ``process 4242 is stopped (state T)``."""
    try:
        stat = process_stat(pid)
    except OSError as error:
        return f"process {pid} cannot be inspected ({error.strerror})"
    if stat is None or stat.state in GONE:
        return f"process {pid} has ended"
    if stat.ending:
        return f"process {pid} is ending"
    return f"process {pid} {STATES.get(stat.state, 'is running')} (state {stat.state})"


@cache
def machine_id() -> str:
    """Return the id of this boot of this machine; where /proc hides it, the host name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError as error:
        if out_of_descriptors(error):
            raise
        return socket.gethostname()


@cache
def pid_namespace() -> str:
    """Return the name of this process's PID namespace, in which its process ids are valid; "" if unknown."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def file_owner(fd: int) -> int:
    """Return the user id of the process that created an open memfd."""
    return os.fstat(fd).st_uid


class ProcessWatch:
    """Watch on a process by a pidfd, ``fd``, which becomes readable when the process ends."""

    def __init__(self, pid: int) -> None:
        """Raise OSError if there is no such process, or no pidfd (Linux before 5.3, or a seccomp profile)."""
        self.pid = pid
        self.fd: int = _libc.syscall(_PIDFD_OPEN, pid, 0)  # close-on-exec
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def ended(self) -> bool:
        """Return whether the process has ended."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(0))

    def describe(self) -> str:
        """Describe the process, e.g. ``process 4242 is stopped (state T)``."""
        return f"process {self.pid} has ended" if self.ended() else describe_process(self.pid)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1
