"""Opens the windows of a process group: ranks meet in the group's store and hand each other their windows.

1. Every rank creates its window (a memfd), listens on an abstract Unix socket with a random name, and posts
   that name with its process, machine and sizes in the group's store, under its rank.
2. Every rank connects to every other rank that has posted, and gets its window over that connection. The
   connection stays: it carries the words below, and its end tells that the peer has closed or died.
3. A rank that has mapped everybody's window says ``ready`` with a digest of all names.
4. A rank that hears the same digest from everybody says ``done`` and has opened the windows.

Every opening has a new name, so two ranks with the same digest have mapped the same windows, whatever either
has tried before. ``done`` completes a rank whose peers are so quick that they have closed already. A rank
that gives up says ``left``: the others drop its window and wait for its next post.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ascend_moe import settings
from ascend_moe.comm.board import FIRST_PAUSE_S, LAST_PAUSE_S, STORE_TIMEOUT_S, Board
from ascend_moe.comm.communicator import Communicator
from ascend_moe.comm.links import BoardMaker, Links
from ascend_moe.comm.liveness import (
    PeerWatch,
    born_here,
    describe_process,
    foreign_user,
    machine_id,
    pid_namespace,
    process_gone,
)
from ascend_moe.errors import AscendMoeError, CommError, CommTimeout, ConfigMismatch, PeerLost
from ascend_moe.native import library
from ascend_moe.native.windows import MIB, context_kind, near_stores, ranks_per_server, rdma_flags
from ascend_moe.settings import CONTEXTS

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LEAVING_TIMEOUT_S = 0.2  # the same for the post of a rank that gives up
WORD_BYTES = 128
WINDOW, READY, DONE, LEFT = b"window", b"ready", b"done", b"left"


def create_window(total: int) -> int:
    """A memfd of ``total`` bytes, sealed at that size so that no peer can make our reads fault."""
    fd = os.memfd_create("ascend_moe-window", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, total)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _boot_time() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class Post:
    """One opening of one rank, as the store shows it to the others; by default of this process, now.

    ``started`` is in ns since boot, ``born``, the start of the process, in clock ticks since boot.
    """

    data_bytes: int
    lent_bytes: int
    total: int
    host: str = field(default_factory=lambda: socket.gethostname())
    # An abstract Unix socket; the name is of this opening alone.
    socket: str = field(default_factory=lambda: f"ascend_moe-{secrets.token_hex(16)}")
    started: int = field(default_factory=_boot_time)
    pid: int = field(default_factory=os.getpid)
    born: int = field(default_factory=born_here)
    pid_space: str = field(default_factory=pid_namespace)
    machine: str = field(default_factory=lambda: machine_id())
    ranks_per_server: int = field(default_factory=ranks_per_server)
    near_stores: int = field(default_factory=near_stores)
    rdma_flags: int = field(default_factory=rdma_flags)
    context: str = field(default_factory=lambda: CONTEXTS[context_kind()])
    left: int = 0  # when the rank gave up, as ``started``
    why: str = ""

    @property
    def visible_pid(self) -> int:
        """Its process id, 0 when that means nothing here."""
        return self.pid if self.machine == machine_id() and self.pid_space == pid_namespace() else 0

    def died_since(self, born: int) -> bool:
        """Its process has ended while opening, and began that after ``born`` (clock ticks since boot).

        An older post is a leftover of a former run of the job.
        """
        began = self.started * os.sysconf("SC_CLK_TCK") // 10**9
        visible = self.pid == self.visible_pid
        return not self.left and began >= born and visible and process_gone(self.pid, self.born)


class Peer:
    """The connection to another rank's opening, that rank's window, and the words it has said."""

    def __init__(self, post: Post, sock: socket.socket, total: int) -> None:
        """``total``: bytes of a window here; no other is mapped."""
        self.post = post
        self.total = total
        self.sock = sock
        self.watch = PeerWatch(sock)
        self.base = 0  # of its window, 0 also when that could not be mapped
        self.heard: dict[bytes, bytes] = {}  # by word, the digest that came with it
        self.gone = False

    @property
    def answered(self) -> bool:
        return WINDOW in self.heard

    @property
    def over(self) -> bool:
        """Its opening has completed, or has been given up: it will say no more."""
        return LEFT in self.heard or DONE in self.heard

    def read(self) -> None:
        """Takes in every word that has come, and whether the peer is still there; maps its window."""
        self.gone = self.watch.fired()  # first: after its end nothing more can come
        cut = 0
        with contextlib.suppress(OSError):
            while True:
                text, fds, flags, _ = socket.recv_fds(self.sock, WORD_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
                if not text:
                    break
                cut |= flags & socket.MSG_CTRUNC
                word, _, digest = text.partition(b" ")
                self.heard[word] = digest
                for fd in fds:
                    # Reading a window that is smaller than its post says would fault.
                    if not self.base and os.fstat(fd).st_size == self.total:
                        self.base = library.lib().am_window_map(fd, self.total) or 0
                    os.close(fd)
        if cut:  # a window came for which this process has no descriptor
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def close(self) -> None:
        self.watch.close()
        if self.base:
            library.lib().am_window_unmap(self.base, self.total)
        self.base = 0


# What windows of one group have in common: name, attribute of a post, its unit (of bytes, or of nothing), how to mend
# it. What decides about the others comes first.
_EXPORT = "export one value on every rank"
_ALIKE = (
    (settings.RANKS_PER_SERVER.name, "ranks_per_server", "", _EXPORT),
    (settings.CONTEXT.name, "context", "", _EXPORT),
    (settings.NEAR_STORES.name, "near_stores", "", _EXPORT),
    (settings.RDMA_FLAGS.name, "rdma_flags", "", _EXPORT),
    (settings.HCCL_BUFFSIZE.name, "data_bytes", "MiB", _EXPORT),
    (settings.LENT_MIB.name, "lent_bytes", "MiB", _EXPORT),
    ("window layout", "total", "bytes", "install one version of ascend_moe on every rank"),
)


class Opening:
    """One attempt of this rank to open the windows: ``run``, then ``communicator``."""

    def __init__(
        self,
        name: str,
        store: Store | None,
        rank: int,
        world: int,
        data_bytes: int,
        lent_bytes: int,
        timeout: float,
        host: int | None = None,
        board: BoardMaker | None = None,
    ) -> None:
        """``host``: the rank that serves the store, as ``store_host`` says. ``board``: where ranks meet without one."""
        self.name = name
        self.rank = rank
        self.world = world
        self.timeout = timeout
        self.prefix = f"rank {rank}: opening the windows of group {name!r}"
        total = library.lib().am_window_total_bytes(data_bytes, lent_bytes)
        self.mine = Post(data_bytes, lent_bytes, total)
        if store is not None:
            self.board = Board(store, rank, self.mine, host, self.prefix, "windows")
        elif board is not None:
            self.board = board(self.mine, self.prefix)
        self.peers: dict[int, Peer] = {}
        self.digest = b""  # of the names of all openings, once every window is mapped
        self.askers: list[socket.socket] = []  # our ends of the connections to us
        self.base = 0  # of this rank's own window
        self._deadline = time.monotonic() + timeout
        self._pause = FIRST_PAUSE_S
        self._window = -1
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._refused: dict[int, str] = {}  # rank -> name of an opening of it that is over

    def run(self) -> None:
        """Opens the windows, or leaves nothing behind.

        Raises:
            CommTimeout: a rank did not arrive by the deadline; ``.rank`` is the first, ``.ranks`` all.
            PeerLost: a rank's process ended meanwhile, or the store did.
            ConfigMismatch: ranks differ in a setting that must be the same on all (`_ALIKE`), the package's
                version, the machine or the user.
        """
        try:
            self._start()
            late = False
            while not self._look():
                if late:
                    self._judge_posts(self._known_posts())
                    raise self._timed_out()
                late = time.monotonic() >= self._deadline
                self._wait()
            self._say(DONE)
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            self._listener.close()
            if self._window >= 0:
                os.close(self._window)
                self._window = -1

    # ---- steps

    def _start(self) -> None:
        self._window = create_window(self.mine.total)
        self.base = library.lib().am_window_map(self._window, self.mine.total) or 0
        if not self.base:
            raise self._unmappable(self.rank)
        self._listener.setblocking(False)
        self._listener.bind("\0" + self.mine.socket)
        self._listener.listen(2 * self.world)

    def _look(self) -> bool:
        """One round of everything; True when the windows are open.

        A rank that has completed with us before says ``done`` before it connects anew. So whoever connects is
        accepted before the words are read, and answered after: never by an opening that has completed.
        """
        newcomers: list[socket.socket] = []
        try:
            with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
                while True:
                    newcomers.append(self._listener.accept()[0])
            for peer in self.peers.values():
                peer.read()
            if self._agreed():
                return True
            while newcomers:
                self._answer(newcomers.pop())
        finally:
            for sock in newcomers:
                sock.close()
        self._drop_gone()
        absent = [rank for rank in range(self.world) if rank not in (self.rank, *self.peers)]
        if absent:
            self.board.exchange(absent, max(self._deadline - time.monotonic(), STORE_TIMEOUT_S))
            for rank in absent:
                self._judge_post(rank)
                self._connect(rank)
        if not self.digest:
            known = self._known_posts()
            if len(known) == self.world - 1:
                self._judge_posts(known)
                if all(rank in self.peers for rank in known):
                    self._meet()
        return self._agreed()

    def _wait(self) -> None:
        """Until a word or a connection comes, or until it is time for the next look at the store."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        for peer in self.peers.values():
            poll.register(peer.sock, select.POLLIN)
            poll.register(peer.watch, select.POLLIN)
        left = max(self._deadline - time.monotonic(), 0)
        woken = poll.poll(min(self._pause, left) * 1e3)
        self._pause = FIRST_PAUSE_S if woken else min(2 * self._pause, LAST_PAUSE_S)

    def _answer(self, asker: socket.socket) -> None:
        """Hands our window to a process of the same user."""
        try:
            if foreign_user(asker) is not None:
                raise PermissionError
            asker.setblocking(False)
            socket.send_fds(asker, [WINDOW], [self._window])
            if self.digest:
                asker.send(READY + b" " + self.digest)
            self.askers.append(asker)
        except OSError:
            asker.close()

    def _connect(self, rank: int) -> None:
        """Connects to a rank that has posted an opening which may go on.

        Raises:
            ConfigMismatch: its process is another user's, who gets no window and whose window is not mapped.
        """
        post = self.board.posts.get(rank)
        if post is None or post.left or post.socket == self._refused.get(rank):
            return
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        try:
            sock.connect("\0" + post.socket)
            user = foreign_user(sock)
            if user is None:
                self.peers[rank] = Peer(post, sock, self.mine.total)
        except OSError as error:
            sock.close()
            if isinstance(error, ConnectionRefusedError):
                self._refused[rank] = post.socket
            elif not isinstance(error, BlockingIOError):  # its queue is full: the next look tries again
                raise
            return
        if user is not None:
            sock.close()
            text = f"{self.prefix}: rank {rank} runs as user {user} and this rank as user {os.geteuid()}; windows are "
            text += "shared by processes of one user: run all ranks as the same"
            raise ConfigMismatch(text, field="user", rank=rank, ours=os.geteuid(), theirs=user)

    def _meet(self) -> None:
        """Everybody has answered: tells them whose windows are mapped here."""
        for rank, peer in self.peers.items():
            if not peer.base:
                raise self._unmappable(rank)
        openings = {rank: peer.post for rank, peer in self.peers.items()} | {self.rank: self.mine}
        names = " ".join(openings[rank].socket for rank in range(self.world))
        self.digest = hashlib.sha256(names.encode()).hexdigest().encode()
        self._say(READY)

    def _agreed(self) -> bool:
        """Everybody has mapped the windows of the same openings as this rank."""
        if not self.digest:
            return False
        peers = self.peers.values()
        if any(peer.heard.get(DONE) == self.digest for peer in peers):
            return True
        ready = [peer for peer in peers if peer.heard.get(READY) == self.digest and not peer.over]
        return len(ready) == self.world - 1

    def _say(self, word: bytes) -> None:
        for asker in list(self.askers):
            try:
                asker.send(word + b" " + self.digest)
            except OSError:  # it has given up or died
                self.askers.remove(asker)
                asker.close()

    def _drop_gone(self) -> None:
        """Forgets openings that are over."""
        for rank, peer in list(self.peers.items()):
            if peer.gone and peer.answered and not peer.over:
                raise self._lost(rank, peer.watch.describe())
            if peer.gone or peer.over:
                self._refused[rank] = peer.post.socket
                self.digest = b""
                peer.close()
                del self.peers[rank]

    def _give_up(self, error: BaseException) -> None:
        """Tells the others that this opening is over, and why; unmaps and closes everything.

        First in the store: who hears ``left`` then finds the reason there.
        """
        if self.world > 1 and self.board.answers:
            culprit = getattr(error, "rank", None) if isinstance(error, CommError) else None
            why = type(error).__name__ + ("" if culprit is None else f" about rank {culprit}")
            self.board.mine = replace(self.mine, left=_boot_time(), why=why)
            with contextlib.suppress(CommError):
                self.board.exchange([], LEAVING_TIMEOUT_S)
        self._say(LEFT)
        self._close_connections()
        self._unmap()

    def _close_connections(self) -> None:
        for asker in self.askers:
            asker.close()
        for peer in self.peers.values():
            peer.close()

    def _unmap(self) -> None:
        if self.base:
            library.lib().am_window_unmap(self.base, self.mine.total)
        self.base = 0

    # ---- what goes wrong

    def _lost(self, rank: int, seen: str) -> PeerLost:
        text = f"{self.prefix}: rank {rank} is lost: {seen}; see its log for why"
        return PeerLost(text, rank=rank, phase="open")

    def _unmappable(self, rank: int) -> AscendMoeError:
        return AscendMoeError(
            f"rank {self.rank}: mapping the {self.mine.data_bytes // MIB} MiB window of rank {rank} failed: "
            f"lower HCCL_BUFFSIZE or raise the limit of address space (ulimit -v)"
        )

    def _judge_post(self, rank: int) -> None:
        post = self.board.posts.get(rank)
        if post is None:
            return
        if post.machine != self.mine.machine:
            ours, theirs = self.mine.host, post.host
            text = (
                f"rank {self.rank} on {ours} and rank {rank} on {theirs} cannot share the windows of group "
                f"{self.name!r}: they need one machine (one boot, one network namespace); across machines "
                "use ascend_moe.dispatchers"
            )
            raise ConfigMismatch(text, field="machine", rank=rank, ours=ours, theirs=theirs)
        if post.died_since(self.mine.born):
            raise self._lost(rank, f"process {post.pid} has ended")

    def _known_posts(self) -> dict[int, Post]:
        """Posts of openings that met this one: their ranks have answered, or have left since it began."""
        known = {rank: post for rank, post in self.board.posts.items() if post.left > self.mine.started}
        known |= {rank: peer.post for rank, peer in self.peers.items() if peer.answered}
        return known

    def _judge_posts(self, known: dict[int, Post]) -> None:
        """Not before all ranks are known: every rank then sees the difference, and none waits any more."""
        for rank, post in sorted(known.items()):
            for what, attribute, unit, fix in _ALIKE:
                ours, theirs = (
                    getattr(side, attribute) // MIB if unit == "MiB" else getattr(side, attribute)
                    for side in (self.mine, post)
                )
                if ours != theirs:
                    text = f"{what} differs in group {self.name!r}: {ours} {unit}".rstrip()
                    text += f" on rank {self.rank}, " + f"{theirs} {unit}".rstrip() + f" on rank {rank}: {fix}"
                    raise ConfigMismatch(text, field=what, rank=rank, ours=ours, theirs=theirs)

    def _timed_out(self) -> CommTimeout:
        """Names who is missing: ranks that never came or are stopped first."""
        reports = sorted(report for rank in range(self.world) if (report := self._report(rank)) is not None)
        # Ranks that are not ready wait for those that are surely missing, where there are some.
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
        """(how surely a rank is missing, 0 most; the rank; what is known of it); None when it is there."""
        peer, post = self.peers.get(rank), self.board.posts.get(rank)
        if rank == self.rank:
            return None
        if post is None:
            return 0, rank, "has not called"
        process = describe_process(post.visible_pid)
        stopped = "is stopped" in process
        if peer is not None:
            if peer.answered and peer.heard.get(READY, b"") == self.digest and not stopped:
                return None
            state = "is not ready" if peer.answered else "does not answer"
            return int(not stopped), rank, f"{state}, {process}"
        if post.left > self.mine.started:
            # For a reason of its own, or because of a rank that is reported here too.
            return 2 if " about rank " in post.why else 0, rank, f"gave up before with {post.why}"
        since = f"it gave up with {post.why}" if post.why else "its last windows were closed"
        return 0, rank, f"has not called since {since}, {process}"

    # ---- after run()

    def communicator(self, alive: Callable[[], bool] | None = None) -> Communicator:
        """This rank's end of the windows that were opened; it owns them from here on.

        ``alive``: as the communicator takes it.
        """
        owner, peers = os.getpid(), self.peers
        ends = [peers.get(rank) for rank in range(self.world)]
        links = Links(self.rank, peers, self.askers)

        def release() -> None:
            for asker in self.askers if os.getpid() == owner else ():  # a forked child leaves the peers alone
                with contextlib.suppress(OSError):  # tells the peer also when a forked child holds the socket
                    asker.shutdown(socket.SHUT_RDWR)
            self._close_connections()

        try:
            return Communicator(
                self.name,
                self.rank,
                [self.base if peer is None else peer.base for peer in ends],
                self.mine.data_bytes,
                self.mine.lent_bytes,
                live_fds=[-1 if peer is None else peer.watch.fileno() for peer in ends],
                describe=lambda rank: peers[rank].watch.describe(),
                release=release,
                unmap=self._unmap,
                alive=alive,
                gone=links.gone,
                links=links,
            )
        except BaseException:
            release()
            self._unmap()
            raise
