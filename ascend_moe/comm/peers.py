"""The windows and processes of the other ranks of a group: what each rank writes for the others to read."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ascend_moe.comm.communicator import Communicator
from ascend_moe.comm.records import ProcessRecord, Records
from ascend_moe.errors import ConfigMismatch, PeerLost
from ascend_moe.native import library
from ascend_moe.native.liveness import ProcessWatch, process_gone
from ascend_moe.native.windows import (
    DONE,
    LEFT,
    MEMFD,
    PAGE_BYTES,
    STATE_AT,
    STATE_BYTES,
    OpeningState,
    context_kind,
    opening_of,
)
from ascend_moe.settings import CONTEXTS

_CLOSED_WORD = 63  # csrc/abi/window.h
# A rank's record for a subgroup of this group, in its window's first page. Only its own rank writes it.
_RECORD_AT, _RECORD_BYTES = 2560, 1536


def _write(base: int, at: int, room: int, text: str) -> None:
    raw = text.encode() + b"\0"
    assert len(raw) <= room, text
    ctypes.memmove(base + at, raw, len(raw))


def _read(base: int, at: int, room: int) -> str:
    return ctypes.string_at(base + at, room).partition(b"\0")[0].decode(errors="replace")


def write_state(base: int, state: OpeningState) -> None:
    """Write this rank's state of an opening into its window, mapped at ``base``."""
    _write(base, STATE_AT, STATE_BYTES, state.text())


def mark_closed(base: int) -> None:
    """Mark the window at ``base`` as no longer used: its rank has closed it or given up opening the group."""
    library.lib().am_window_ballot(base, _CLOSED_WORD, 0, 1)


def create_window(total: int) -> int:
    """Create a memfd and return its descriptor; its size, ``total`` bytes, is sealed: no peer can make reads fault."""
    fd = os.memfd_create(MEMFD, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, total)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def boot_time() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class Record(ProcessRecord):
    """One attempt of one rank to open a group; ``token`` is unique to the attempt.

    Attributes:
        data_bytes, registered_bytes, total: sizes of the window's areas, and of the window.
        fd: the window's descriptor in process ``pid``; -1 before it exists.
        started: when the attempt began, in ns since boot.
        user: effective user id.
        left: when the rank gave up, in ns since boot; 0 if it has not. ``why``: the class of its error.
    """

    data_bytes: int
    registered_bytes: int
    total: int
    fd: int = -1
    started: int = field(default_factory=boot_time)
    user: int = field(default_factory=os.geteuid)
    context: str = field(default_factory=lambda: CONTEXTS[context_kind()])
    left: int = 0
    why: str = ""

    def died_since(self, born: int) -> bool:
        """Return whether the record's process has ended without giving up, in an attempt that began after ``born``.

        ``born``: start of the calling process; an older attempt is a leftover of an earlier run of the job.
        """
        began = self.started * os.sysconf("SC_CLK_TCK") // 10**9
        return not self.left and began >= born and process_gone(self.pid, self.born)


class Peer:
    """Another rank's window and process.

    Attributes:
        record: the opening in which the window was mapped.
        base: address of the window here; only its first page is mapped if its size differs from this rank's.
        word, digest: the state last read from its first page.
    """

    def __init__(self, record: Record, watch: ProcessWatch, base: int, size: int) -> None:
        """``size``: bytes that are mapped at ``base``. ``watch``: of the process; owned from here on."""
        self.record, self.watch, self.base, self._size = record, watch, base, size
        self.word = self.digest = ""

    @property
    def over(self) -> bool:
        """Whether the rank has completed this opening or given it up: it never becomes READY again."""
        return self.word in (DONE, LEFT)

    @property
    def closed(self) -> bool:
        """Whether the rank has closed its communicator or given up opening."""
        return bool(library.lib().am_window_ballot(self.base, _CLOSED_WORD, 0, 0))

    def read(self) -> bool:
        """Read ``word`` and ``digest`` from the rank's window; return whether one has changed."""
        before = self.word, self.digest
        state = opening_of(ctypes.string_at(self.base, PAGE_BYTES))
        self.word, self.digest = ("", "") if state is None else (state.word, state.digest)
        if (
            state is None or state.token != self.record.token or (self.word != DONE and self.closed)
        ):  # the descriptor may have been reused
            self.word = LEFT
        return before != (self.word, self.digest)

    def close(self) -> None:
        self.watch.close()
        library.lib().am_window_unmap(self.base, self._size)


class Processes:
    """The other ranks of a communicator as processes, an implementation of `communicator.Peers`.

    ``window``: descriptor of this rank's own window, closed with the communicator; `ascend_moe.native.hang` reads it.
    """

    def __init__(self, rank: int, base: int, peers: Mapping[int, Peer], window: int) -> None:
        self.rank, self._window = rank, window
        self._base, self._peers, self._owner = base, peers, os.getpid()

    def live_fds(self, world: int) -> list[int]:
        return [self._peers[rank].watch.fd if rank in self._peers else -1 for rank in range(world)]

    def gone(self, rank: int) -> bool:
        return rank != self.rank and (self._peers[rank].closed or self.ended(rank))

    def ended(self, rank: int) -> bool:
        return rank != self.rank and self._peers[rank].watch.ended()

    def describe(self, rank: int) -> str:
        closed = "it has closed its communicator; " if self._peers[rank].closed else ""
        return closed + self._peers[rank].watch.describe()

    def write(self, text: str) -> None:
        """Publish a text of this rank in its window, replacing the last one."""
        _write(self._base, _RECORD_AT, _RECORD_BYTES, f"{zlib.crc32(text.encode()):08x} {text}")

    def texts(self) -> dict[int, str]:
        """Return the texts that the other ranks have published, by rank; one that is being written is left out."""
        found = {}
        for rank, peer in self._peers.items():
            checksum, _, text = _read(peer.base, _RECORD_AT, _RECORD_BYTES).partition(" ")
            if checksum == f"{zlib.crc32(text.encode()):08x}":
                found[rank] = text
        return found

    def close(self) -> None:
        """Mark this rank's communicator as closed, and unmap the other ranks' windows."""
        if os.getpid() == self._owner:  # a forked child leaves the peers alone
            mark_closed(self._base)
        for peer in self._peers.values():
            peer.close()
        if self._window >= 0:
            os.close(self._window)
            self._window = -1


class PeerRecords(Records[Record]):
    """The records of the ranks of a new, smaller group, exchanged through the windows of the old one.

    Needs no store, because the process group's store dies with the rank that hosts it.
    """

    def __init__(self, group: Communicator, topic: str, members: Sequence[int], mine: Record, prefix: str) -> None:
        """``group``: the old one. ``topic``: of this attempt. ``members``: old rank of each new rank, equal on all."""
        assert isinstance(group.peers, Processes)
        self.rank, self.mine, self.prefix = members.index(group.rank), mine, prefix
        self.found, self.responds = {}, True
        self._group, self._peers = group, group.peers
        self._topic, self._members = topic, list(members)

    def exchange(self, ranks: list[int], seconds: float) -> None:
        """Publish ``mine``, and add to ``found`` the other ranks' records that are there by now; ``seconds``: unused.

        Raises:
            PeerLost: a rank of ``ranks`` has ended or closed the old group without a record, or after giving up.
            ConfigMismatch: another rank passes other members.
        """
        mask = sum(1 << member for member in self._members)
        with self._group.held():
            message = {"topic": self._topic, "members": f"{mask:x}", "record": asdict(self.mine)}
            self._peers.write(json.dumps(message))
            for rank, text in self._peers.texts().items():
                self._take(rank, json.loads(text))
            for rank in ranks:
                record, member = self.found.get(rank), self._members[rank]
                if (record is None or record.left) and self._peers.gone(member):
                    text = f"{self.prefix}: rank {rank} is lost: {self._peers.describe(member)}; see its log for why"
                    raise PeerLost(text, rank=rank, phase="open")

    def _take(self, rank: int, message: Mapping[str, Any]) -> None:
        if message["topic"] != self._topic:
            return
        mask = int(message["members"], 16)
        theirs = [member for member in range(self._group.world) if mask >> member & 1]
        if theirs != self._members:
            raise ConfigMismatch(
                f"{self.prefix}: rank {rank} shrinks to ranks {theirs}, this one to {self._members}: "
                "pass the list returned by ascend_moe.agree on every rank",
                field="alive",
                rank=rank,
                ours=self._members,
                theirs=theirs,
            )
        if rank in self._members:
            self.found[self._members.index(rank)] = Record(**message["record"])
