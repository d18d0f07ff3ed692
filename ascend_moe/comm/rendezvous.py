"""Opens the windows of a process group collectively: ranks exchange memfds over abstract Unix sockets.

Steps of one attempt of one rank:

1. Create a memfd, listen on a socket with a random name, post the name in the group's store.
2. Connect to every lower rank, be connected to by every higher one; ``hello`` both ways carries the
   window's descriptor and the attempt's nonce.
3. With a hello of everybody: map all windows, send ``ready`` with the digest of all W nonces.
4. With the same digest from everybody: send ``done`` with it. The windows are open.

The digest decides: two ranks that complete have mapped the windows of the same W attempts. Ranks may
have made any number of attempts before, as one that gives up says ``bye`` and the others keep its place
open for its next attempt. ``done`` lets a rank complete whose peers were so quick that they have closed
already; it is read before a newer hello of the same peer is looked at. No step is a collective of
the process group, so that a rank that is missing can be named.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import selectors
import socket
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ascend_moe.comm import verdicts
from ascend_moe.comm.board import Board, Post, StoreHost
from ascend_moe.comm.communicator import MIB
from ascend_moe.comm.link import Hello, Link
from ascend_moe.comm.liveness import process_stat
from ascend_moe.errors import AscendMoeError, CommError
from ascend_moe.native import library

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

POLL_S = 0.01
STALL_S = 0.5  # a pause that took so long: this process itself was stopped, or starved
CONFIRM_S = 0.5  # a post of a dead process counts after this, time for a successor's post to show


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


class Opening:
    """One attempt of this rank. ``run`` leaves ``bases`` and ``links`` filled, or nothing at all behind."""

    def __init__(
        self,
        name: str,
        store: Store,
        rank: int,
        world: int,
        data_bytes: int,
        lent_bytes: int,
        timeout: float,
        host: StoreHost | None = None,
    ) -> None:
        self.name = name
        self.rank = rank
        self.world = world
        self.data_bytes, self.lent_bytes = data_bytes, lent_bytes
        self.total: int = library.lib().am_window_total_bytes(data_bytes, lent_bytes)
        self.timeout = timeout
        self.host = host or StoreHost()
        self.mine = Post.mine()
        self.board = Board(store, rank, self.mine)
        self.links: list[Link | None] = [None] * world  # with everybody whose hello has come
        self.bases: list[int] = [0] * world
        self.digest = ""  # of all attempts, once every hello has come and every window is mapped
        self.refused: dict[int, str] = {}  # rank -> nonce of an attempt that is over
        self.stalled = 0.0  # seconds in which this process did not run
        self.died: dict[int, float] = {}  # rank -> when its post was first seen without its process
        self._window = -1
        self._storeless = 0.0  # since when the store has failed
        self._looked = time.monotonic()
        self._deadline = self._looked + timeout
        self._born = getattr(process_stat(os.getpid()), "born", 0)
        self._pending: set[Link] = set()  # connected, no hello yet
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._selector = selectors.DefaultSelector()

    # ---- the attempt

    def run(self) -> None:
        """Opens the windows.

        Raises:
            CommTimeout: a rank did not arrive by the deadline; ``.rank`` is the first, ``.ranks`` all.
            PeerLost: a rank's process ended meanwhile, or the store did.
            ConfigMismatch: ranks differ in HCCL_BUFFSIZE, ASCEND_MOE_LENT_MIB, the package's version or
                the machine.
        """
        try:
            self._start()
            late = False
            while not self._complete():
                self._judge(late)
                late = self._late()  # before the last look, not after it
                self._dial()
                self._wait()
            for link in self.linked():
                link.send({"done": self.digest})
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            self.board.halt()
            self._listener.close()
            for link in list(self._pending):
                self._drop(link)
            self._selector.close()
            if self._window >= 0:
                os.close(self._window)
                self._window = -1

    def _start(self) -> None:
        self._window = create_window(self.total)
        self.bases[self.rank] = self._map(self._window, self.rank)
        if self.world == 1:
            return
        self._listener.setblocking(False)
        self._listener.bind("\0" + self.mine.socket)
        self._listener.listen(2 * self.world)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._want()
        self.board.start()

    def _give_up(self, error: BaseException) -> None:
        """Tells whoever has heard of this attempt that it is over, and why; unmaps and closes everything."""
        culprit = getattr(error, "rank", None) if isinstance(error, CommError) else None
        bye = {"bye": {"kind": type(error).__name__, "rank": culprit, "text": str(error)[:500]}}
        for link in [*self.linked(), *self._pending]:
            link.send(bye)
        for link in self.linked():
            self._drop(link)
        if self.bases[self.rank]:
            library.lib().am_window_unmap(self.bases[self.rank], self.total)
            self.bases[self.rank] = 0

    # ---- links

    def linked(self) -> list[Link]:
        return [link for link in self.links if link is not None]

    def absent(self) -> list[int]:
        """Ranks without an attempt that goes on: no hello yet, or a goodbye."""
        return [r for r, link in enumerate(self.links) if r != self.rank and (link is None or link.closed)]

    def _want(self) -> None:
        self.board.wanted = frozenset(self.absent())

    def _add(self, link: Link) -> None:
        self._pending.add(link)
        self._selector.register(link.sock, selectors.EVENT_READ, link)
        if link.pidfd >= 0:
            self._selector.register(link.pidfd, selectors.EVENT_READ, link)

    def _drop(self, link: Link) -> None:
        """Forgets a link and what came over it."""
        self._pending.discard(link)
        for fd in (link.sock, link.pidfd):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(fd)
        if self.links[link.rank] is link:
            self.links[link.rank] = None
            if self.bases[link.rank]:
                library.lib().am_window_unmap(self.bases[link.rank], self.total)
                self.bases[link.rank] = 0
        link.close()

    def _hello(self, to: Post | None = None) -> dict[str, Any]:
        hello = Hello(
            rank=self.rank,
            nonce=self.mine.nonce,
            started=self.mine.started,
            to=to.nonce if to else "",
            data_bytes=self.data_bytes,
            lent_bytes=self.lent_bytes,
            total=self.total,
        )
        return {"hello": asdict(hello)}

    def _dial(self) -> None:
        """Connects to the lower ranks that have posted an attempt we have not tried yet."""
        dialled = {link.rank for link in self._pending}
        for rank in self.absent():
            post = self.board.posts.get(rank)
            if rank > self.rank or rank in dialled or post is None or post.nonce == self.refused.get(rank):
                continue
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.setblocking(False)
            try:
                sock.connect("\0" + post.socket)
            except OSError as error:
                sock.close()
                if error.errno != errno.EAGAIN:  # that one means: its queue is full, try again
                    self.refused[rank] = post.nonce
                continue
            link = Link(sock, rank, expected=post.nonce)
            self._add(link)
            if link.same_user:
                link.send(self._hello(post), self._window)
            else:
                self.refused[rank] = post.nonce
                self._drop(link)

    def _wait(self) -> None:
        """Takes in what has come; returns at once then, or after a moment."""
        pause = min(POLL_S, max(self._deadline - time.monotonic(), 0))
        ready = [key for key, _ in self._selector.select(pause)]
        # Words over links that stand come before new hellos: see the module's text.
        for key in ready:
            if isinstance(key.data, Link) and key.data not in self._pending:
                self._read(key.data)
        for key in ready:
            if key.data in self._pending:
                self._read_hello(key.data)
            elif key.data is None:
                self._accept()
        self._want()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            while True:
                sock, _ = self._listener.accept()
                sock.setblocking(False)
                link = Link(sock, self.rank)
                self._add(link)
                if not link.same_user:
                    self._drop(link)

    def _read(self, link: Link) -> None:
        link.read()
        if link.closed:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(link.sock)
        if link.dead:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(link.pidfd)

    def _read_hello(self, link: Link) -> None:
        link.read()
        dialled = bool(link.expected)
        if link.hello is None:
            if link.closed or link.dead:
                if dialled:
                    self.refused[link.rank] = link.expected
                self._drop(link)
            return
        hello = link.hello
        if dialled:
            good = hello.nonce == link.expected and hello.rank == link.rank
        else:
            good = hello.to == self.mine.nonce and self.rank < hello.rank < self.world
        if not good or not link.window_fits(hello.total):
            self._drop(link)
            return
        self._seat(link, hello.rank, reply=not dialled)

    def _seat(self, link: Link, rank: int, *, reply: bool) -> None:
        """Gives a link with a good hello its place, unless the attempt it would replace has completed."""
        old = self.links[rank]
        if old is not None:
            self._read(old)
            if self._agreed():
                return
            if old.started >= link.started:
                self._drop(link)
                return
            self._drop(old)
        self._pending.discard(link)
        link.rank = rank
        self.links[rank] = link
        self.digest = ""
        if reply:
            link.send(self._hello(), self._window)

    # ---- completion

    def _complete(self) -> bool:
        if not self.digest and all(self.links[r] for r in range(self.world) if r != self.rank):
            self._judge_sizes()
            self._map_all()
        return self._agreed()

    def _map_all(self) -> None:
        """Maps every window not mapped yet and says so."""
        for link in self.linked():
            if not self.bases[link.rank]:
                self.bases[link.rank] = self._map(link.window, link.rank)
                link.close_window()
        nonces = [link.nonce if link else self.mine.nonce for link in self.links]
        self.digest = hashlib.sha256(" ".join(nonces).encode()).hexdigest()
        for link in self.linked():
            link.send({"ready": self.digest})

    def _map(self, fd: int, rank: int) -> int:
        base = library.lib().am_window_map(fd, self.total)
        if not base:
            raise AscendMoeError(
                f"rank {self.rank}: mapping the {self.data_bytes // MIB} MiB window of rank {rank} failed: "
                f"lower HCCL_BUFFSIZE or raise the limit of address space (ulimit -v)"
            )
        return int(base)

    def _agreed(self) -> bool:
        """Everybody has mapped the windows of the same attempts as this rank."""
        if not self.digest:
            return False
        links = self.linked()
        ready = all(link.ready == self.digest and link.bye is None for link in links)
        return ready or any(link.done == self.digest for link in links)

    # ---- what goes wrong

    def _late(self) -> bool:
        """The deadline has passed. Also notes when this process itself has not run."""
        now = time.monotonic()
        if now - self._looked > STALL_S:
            self.stalled += now - self._looked
        self._looked = now
        return now >= self._deadline

    def _judge(self, late: bool) -> None:
        """Raises what is certain by now, and past the deadline whatever is likeliest."""
        self._judge_machines()
        verdicts.judge_losses(self)
        self._judge_posts()
        if self.board.failed is not None and self.absent():
            self._judge_store(self.board.failed)
        if late:
            self._judge_sizes()
            raise verdicts.timed_out(self)

    def _judge_store(self, error: Exception) -> None:
        """The store has failed. A moment more, as its host's end may show itself and say more."""
        now = time.monotonic()
        self._storeless = self._storeless or now
        if now - self._storeless > CONFIRM_S:
            raise verdicts.store_lost(self, error)

    def _judge_machines(self) -> None:
        for rank in self.absent():
            post = self.board.posts.get(rank)
            if post is not None and not post.local:
                raise verdicts.other_machine(self, rank, post)

    def _judge_posts(self) -> None:
        """A rank that was killed between its post and its hello."""
        now = time.monotonic()
        for rank in self.absent():
            post = self.board.posts.get(rank)
            if post is None or not post.died_since(self._born):
                self.died.pop(rank, None)
            elif now - self.died.setdefault(rank, now) > CONFIRM_S:
                raise verdicts.lost(self, rank, f"process {post.pid} has ended")

    def _judge_sizes(self) -> None:
        for link in self.linked():
            hello = link.hello
            assert hello is not None
            theirs, ours = (hello.data_bytes, hello.lent_bytes), (self.data_bytes, self.lent_bytes)
            if theirs != ours or hello.total != self.total:
                raise verdicts.other_size(self, hello)
