"""Opening the windows of a process group: ranks exchange records in the group's store and map each other's memory.

1. Every rank creates its window (a memfd) and stores a record under its rank: its process and descriptor, its machine
   and settings, and a token of this opening alone, which its window's first page contains too.
2. Every rank opens the windows of the others through /proc/<pid>/fd/<fd>, which Linux allows to processes of the same
   user, and maps them. A pidfd reports the end of such a process.
3. A rank that has mapped all windows writes READY into its own first page, with a digest of all tokens.
4. A rank that reads the same digest in all first pages writes DONE and has opened the windows.

Two ranks with the same digest have mapped the same windows, whatever either tried before. DONE completes ranks whose
peers have already closed again. A rank that gives up marks its window as closed: the others drop it and wait for the
rank's next record.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import time
from collections.abc import Callable
from dataclasses import replace

from ascend_moe import settings
from ascend_moe.comm.communicator import Communicator
from ascend_moe.comm.peers import (
    Peer,
    Processes,
    Record,
    boot_time,
    create_window,
    mark_closed,
    write_state,
)
from ascend_moe.comm.records import (
    ALIKE_ON_SERVERS,
    EXPORT,
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    STORE_TIMEOUT_S,
    Records,
    compare,
)
from ascend_moe.errors import AscendMoeError, CommError, CommTimeout, ConfigMismatch, PeerLost
from ascend_moe.native import library
from ascend_moe.native.liveness import ProcessWatch, describe_process, file_owner, out_of_descriptors, process_user
from ascend_moe.native.windows import DONE, MEMFD, MIB, OPEN, PAGE_BYTES, READY, OpeningState

LEAVING_TIMEOUT_S = 0.2  # for the store, when a rank gives up

# Those that determine others come first.
_ALIKE = (
    *ALIKE_ON_SERVERS,
    (settings.CONTEXT.name, "context", "", EXPORT),
    (settings.HCCL_BUFFSIZE.name, "data_bytes", "MiB", EXPORT),
    (settings.REGISTERED_MIB.name, "registered_bytes", "MiB", EXPORT),
    ("window layout", "total", "bytes", "install one version of ascend_moe on every rank"),
)


def _need_one_machine(name: str, rank: int, mine: Record, other: int, record: Record) -> None:
    """Raise ConfigMismatch if the ranks cannot open each other's windows through /proc."""
    if record.machine != mine.machine:
        ours, theirs = mine.host, record.host
        text = (
            f"rank {rank} on {ours} and rank {other} on {theirs} cannot share the windows of group {name!r}: they need "
            "one machine (one boot); across machines use ascend_moe.dispatchers"
        )
        raise ConfigMismatch(text, field="machine", rank=other, ours=ours, theirs=theirs)
    if record.pid_space != mine.pid_space:
        ours, theirs = mine.pid_space, record.pid_space
        text = (
            f"rank {rank} in PID namespace {ours} and rank {other} in {theirs} cannot open each other's windows of "
            f"group {name!r} through /proc/<pid>: let their containers share one PID namespace, e.g. docker run "
            "--pid=host or --pid=container:<name>"
        )
        raise ConfigMismatch(text, field="PID namespace", rank=other, ours=ours, theirs=theirs)


RecordsMaker = Callable[[Record, str], Records[Record]]


class Opening:
    """One attempt of this rank to open the windows of a group: call ``run``, then ``communicator``."""

    def __init__(
        self,
        name: str,
        rank: int,
        world: int,
        data_bytes: int,
        registered_bytes: int,
        timeout: float,
        records: RecordsMaker,
    ) -> None:
        """``timeout``: seconds. ``records``: returns the `Records` for this rank's record and the start of messages."""
        self.name = name
        self.rank = rank
        self.world = world
        self.timeout = timeout
        self.prefix = f"rank {rank}: opening the windows of group {name!r}"
        total = library.lib().am_window_total_bytes(data_bytes, registered_bytes)
        self.mine = Record(data_bytes, registered_bytes, total)
        self.records = records(self.mine, self.prefix)
        self.peers: dict[int, Peer] = {}
        self.digest = ""  # of the tokens of all openings, once every window is mapped
        self.base = 0  # address of this rank's own window
        self._deadline = time.monotonic() + timeout
        self._pause = FIRST_PAUSE_S
        self._window = -1
        self._over: dict[int, str] = {}  # rank -> token of its opening that is over

    def run(self) -> None:
        """Open the windows of all ranks; after an error nothing remains mapped or open.

        Raises:
            CommTimeout: ranks did not arrive in time (``.rank``: the first, ``.ranks``: all), or the store is stopped.
            PeerLost: a rank's process ended meanwhile, or the store failed.
            AscendMoeError, OSError: a window cannot be created, opened or mapped here.
            ConfigMismatch: ranks differ in a property of `_ALIKE` (versions only by their window layout), the
                machine, the PID namespace or the user.
        """
        try:
            self._start()
            late = False
            while not self._look():
                if late:
                    compare(self.name, self.rank, self.mine, self._known(), _ALIKE)
                    raise self._timed_out()
                late = time.monotonic() >= self._deadline
                self._wait()
            self._write(DONE)
        except BaseException as error:
            self._give_up(error)
            if self._window >= 0:
                os.close(self._window)
            raise

    # ---- steps

    def _start(self) -> None:
        self._window = create_window(self.mine.total)
        self.base = library.lib().am_window_map(self._window, self.mine.total) or 0
        if not self.base:
            raise self._unmappable(self.rank)
        self.mine = self.records.mine = replace(self.mine, fd=self._window)
        self._write(OPEN)

    def _look(self) -> bool:
        """Run one iteration of all steps; return whether the windows are open."""
        for peer in self.peers.values():
            if peer.read():
                self._pause = FIRST_PAUSE_S
        if self._agreed():
            return True
        self._drop()
        absent = [rank for rank in range(self.world) if rank not in (self.rank, *self.peers)]
        if absent:
            self.records.exchange(absent, max(self._deadline - time.monotonic(), STORE_TIMEOUT_S))
            for rank in absent:
                self._judge(rank)
                self._take(rank)
        if not self.digest:
            known = self._known()
            if len(known) == self.world - 1:
                # Only when all ranks are known: then every rank sees the difference and none keeps waiting.
                compare(self.name, self.rank, self.mine, known, _ALIKE)
                if all(rank in self.peers for rank in known):
                    self._announce()
        return self._agreed()

    def _wait(self) -> None:
        """Wait until a process ends, or until the next iteration is due."""
        poll = select.poll()
        for peer in self.peers.values():
            poll.register(peer.watch.fd, select.POLLIN)
        poll.poll(min(self._pause, max(self._deadline - time.monotonic(), 0)) * 1e3)
        self._pause = min(2 * self._pause, LAST_PAUSE_S)

    def _take(self, rank: int) -> None:
        """Map the window of a rank whose opening is not over.

        Raises:
            ConfigMismatch: the window belongs to another user.
            AscendMoeError: the process does not permit opening it, or there is no room to map it.
        """
        record = self.records.found.get(rank)
        if record is None or record.left or record.token == self._over.get(rank):
            return
        try:
            peer = self._map(rank, record)
        except OSError as error:
            if out_of_descriptors(error):
                raise
            user = process_user(record.pid)
            if user is None:  # it is exiting
                return
            if user != os.geteuid():
                raise self._of_another_user(rank, user) from None
            text = f"{self.prefix}: the window of rank {rank} cannot be opened through /proc/{record.pid}/fd, or its "
            text += f"process not watched by a pidfd ({error.strerror}): run all ranks as ordinary processes of one "
            text += "user and group, not setuid or undumpable (PR_SET_DUMPABLE), with Linux 5.3 or later"
            raise AscendMoeError(text, rank=rank) from error
        if peer is None:
            self._over[rank] = record.token
        else:
            self.peers[rank] = peer
            self._pause = FIRST_PAUSE_S

    def _map(self, rank: int, record: Record) -> Peer | None:
        """Map the window of a record; return None if its opening is over. Raises OSError if the kernel refuses."""
        path, total = f"/proc/{record.pid}/fd/{record.fd}", self.mine.total
        with contextlib.ExitStack() as undo:
            try:
                watch = ProcessWatch(record.pid)
                undo.callback(watch.close)
                if not os.readlink(path).startswith(f"/memfd:{MEMFD}"):
                    return None
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
            except (FileNotFoundError, ProcessLookupError):
                return None
            try:
                if (user := file_owner(fd)) != os.geteuid():
                    raise self._of_another_user(rank, user)
                if os.fstat(fd).st_size != record.total:  # reading beyond its end would raise SIGBUS
                    return None
                size = total if record.total == total else PAGE_BYTES
                base = library.lib().am_window_map(fd, size)
            finally:
                os.close(fd)
            if not base:
                raise self._unmappable(rank)
            peer = Peer(record, watch, base, size)
            undo.pop_all()
        peer.read()
        if not peer.over:
            return peer
        peer.close()
        return None

    def _announce(self) -> None:
        """Publish the digest of the mapped windows."""
        openings = {rank: peer.record for rank, peer in self.peers.items()} | {self.rank: self.mine}
        tokens = " ".join(openings[rank].token for rank in range(self.world))
        self.digest = hashlib.sha256(tokens.encode()).hexdigest()
        self._write(READY)

    def _agreed(self) -> bool:
        """Return whether all ranks have mapped the windows of the same openings as this rank."""
        if not self.digest:
            return False
        same = [peer.word for peer in self.peers.values() if peer.digest == self.digest]
        return DONE in same or same.count(READY) == self.world - 1

    def _write(self, word: str) -> None:
        state = OpeningState(self.mine.token, word, self.digest, self.rank, self.world, self.name)
        write_state(self.base, state)

    def _drop(self) -> None:
        """Forget openings that are over."""
        for rank, peer in list(self.peers.items()):
            if peer.over:
                self._over[rank] = peer.record.token
                peer.close()
                del self.peers[rank]
                if self.digest:
                    self.digest = ""
                    self._write(OPEN)
            elif peer.watch.ended():
                raise self._lost(rank, peer.watch.describe())

    def _give_up(self, error: BaseException) -> None:
        """Publish that this opening is over, and why; unmap everything.

        The store comes first: a rank that sees the closed window then finds the reason there.
        """
        if self.world > 1 and self.records.responds:
            culprit = getattr(error, "rank", None) if isinstance(error, CommError) else None
            why = type(error).__name__ + ("" if culprit is None else f" about rank {culprit}")
            self.records.mine = replace(self.mine, left=boot_time(), why=why)
            with contextlib.suppress(AscendMoeError):
                self.records.exchange([], LEAVING_TIMEOUT_S)
        if self.base:
            mark_closed(self.base)
        for peer in self.peers.values():
            peer.close()
        self._unmap()

    def _unmap(self) -> None:
        if self.base:
            library.lib().am_window_unmap(self.base, self.mine.total)
        self.base = 0

    # ---- errors

    def _lost(self, rank: int, seen: str) -> PeerLost:
        text = f"{self.prefix}: rank {rank} is lost: {seen}; see its log for why"
        return PeerLost(text, rank=rank, phase="open")

    def _unmappable(self, rank: int) -> AscendMoeError:
        return AscendMoeError(
            f"rank {self.rank}: mapping the {self.mine.data_bytes // MIB} MiB window of rank {rank} failed: "
            f"lower HCCL_BUFFSIZE or raise the limit of address space (ulimit -v)"
        )

    def _of_another_user(self, rank: int, user: int) -> ConfigMismatch:
        text = f"{self.prefix}: rank {rank} runs as user {user} and this rank as user {os.geteuid()}; windows are "
        text += "shared by processes of one user: run all ranks as the same"
        return ConfigMismatch(text, field="user", rank=rank, ours=os.geteuid(), theirs=user)

    def _judge(self, rank: int) -> None:
        """Raise the error that follows from the record of a rank that is not mapped yet, if any."""
        record, mine = self.records.found.get(rank), self.mine
        if record is None:
            return
        _need_one_machine(self.name, self.rank, mine, rank, record)
        if record.user != os.geteuid():
            raise self._of_another_user(rank, record.user)
        if record.died_since(mine.born):
            raise self._lost(rank, f"process {record.pid} has ended")

    def _known(self) -> dict[int, Record]:
        """Return the records of openings concurrent with this one: mapped, or given up since it began."""
        known = {rank: record for rank, record in self.records.found.items() if record.left > self.mine.started}
        return known | {rank: peer.record for rank, peer in self.peers.items()}

    def _timed_out(self) -> CommTimeout:
        """Return the error that names the missing ranks: those that never arrived or are stopped first."""
        reports = sorted(report for rank in range(self.world) if (report := self._report(rank)) is not None)
        # Ranks that are not ready are probably waiting for the surely missing ones: do not blame both.
        missing = sorted(rank for blame, rank, _ in reports if blame == reports[0][0])
        noun = "rank" if len(missing) == 1 else "ranks"
        return CommTimeout(
            f"{self.prefix}: {noun} {', '.join(map(str, missing))} did not arrive within {self.timeout:g} s "
            f"(ASCEND_MOE_TIMEOUT_S): {'; '.join(f'rank {rank} {seen}' for _, rank, seen in reports)}; "
            f"every rank of the group must make the same call",
            rank=reports[0][1] if reports else None,
            ranks=missing,
            phase="open",
        )

    def _report(self, rank: int) -> tuple[int, int, str] | None:
        """Return (how surely a rank is missing, 0 most; the rank; its state), or None if it is present."""
        peer, record = self.peers.get(rank), self.records.found.get(rank)
        if rank == self.rank:
            return None
        if record is None:
            return 0, rank, "has not called"
        process = describe_process(record.pid)
        stopped = "is stopped" in process
        if peer is not None:
            if (peer.digest if peer.word == READY else "") == self.digest and not stopped:
                return None
            return int(not stopped), rank, f"is not ready, {process}"
        if record.left > self.mine.started:
            # For a reason of its own, or because of a rank that is reported here too.
            return 2 if " about rank " in record.why else 0, rank, f"gave up before with {record.why}"
        since = f"it gave up with {record.why}" if record.why else "its last windows were closed"
        return 0, rank, f"has not called since {since}, {process}"

    # ---- after run()

    def communicator(self, alive: Callable[[], bool] | None = None) -> Communicator:
        """Return this rank's communicator, which owns the windows of ``run``. ``alive``: as in `Communicator`."""
        peers = Processes(self.rank, self.base, self.peers, self._window)
        bases = {rank: peer.base for rank, peer in self.peers.items()} | {self.rank: self.base}
        try:
            return Communicator(
                self.name,
                self.rank,
                [bases[rank] for rank in range(self.world)],
                self.mine.data_bytes,
                self.mine.registered_bytes,
                peers=peers,
                release=peers.close,
                unmap=self._unmap,
                alive=alive,
            )
        except BaseException:
            peers.close()
            self._unmap()
            raise
