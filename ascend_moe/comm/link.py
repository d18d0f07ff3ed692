"""One connection between two ranks that open windows together, and the words that go over it.

Words are JSON packets on a SOCK_SEQPACKET socket: ``hello`` (with the window's descriptor), ``ready``
and ``done`` (with the digest of all attempts), ``bye`` (with the reason).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
from dataclasses import dataclass
from typing import Any

from ascend_moe.comm.liveness import PeerWatch, open_pidfd, peer_credentials

PACKET_BYTES = 4096


@dataclass(frozen=True)
class Hello:
    rank: int
    nonce: str
    started: int
    to: str  # nonce of the attempt that is addressed; empty in a reply
    data_bytes: int
    lent_bytes: int
    total: int


@dataclass(frozen=True)
class Bye:
    kind: str  # class of the error that ended the attempt
    rank: int | None  # its culprit
    text: str


class Link:
    """Non-blocking end of one connection. ``read`` takes in all that has come.

    Args:
        rank: of the peer when we dialled; our own, for none yet, when it did.
        expected: nonce of the attempt we dialled, empty when we were dialled.
    """

    def __init__(self, sock: socket.socket, rank: int, *, expected: str = "") -> None:
        self.sock = sock
        self.rank = rank
        self.expected = expected
        self.pid, uid = peer_credentials(sock)
        self.same_user = uid == os.geteuid()
        self.pidfd = open_pidfd(self.pid)
        self.window = -1
        self.hello: Hello | None = None
        self.ready = ""
        self.done = ""
        self.bye: Bye | None = None
        self.closed = False  # the peer sends no more
        self.dead = False  # its process has ended

    @property
    def nonce(self) -> str:
        return self.hello.nonce if self.hello else ""

    @property
    def started(self) -> int:
        return self.hello.started if self.hello else 0

    def send(self, word: dict[str, Any], fd: int = -1) -> None:
        """Sends one word, with a descriptor or without. A peer that is gone is found out by reading."""
        with contextlib.suppress(OSError):
            packet = [json.dumps(word).encode()]
            if fd >= 0:
                socket.send_fds(self.sock, packet, [fd])
            else:
                self.sock.sendmsg(packet)

    def read(self) -> None:
        """Takes in every word that has come, and whether the peer is still there."""
        # First: what a process that has ended said before is complete.
        self.dead = self.dead or (self.pidfd >= 0 and bool(_poll(self.pidfd)))
        reset = False
        while not self.closed:
            try:
                packet, fds, _, _ = socket.recv_fds(self.sock, PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                # Words of ours that the peer never read are reported once, before what it wrote last.
                self.closed, reset = reset, True
                continue
            if packet:
                self._take(packet, fds)
            else:
                self.closed = True

    def _take(self, packet: bytes, fds: list[int]) -> None:
        keep = False
        with contextlib.suppress(ValueError, TypeError, KeyError):
            word = json.loads(packet)
            if "hello" in word and self.hello is None and len(fds) == 1:
                self.hello = Hello(**word["hello"])
                self.window, keep = fds[0], True
            elif "ready" in word:
                self.ready = str(word["ready"])
            elif "done" in word:
                self.done = str(word["done"])
            elif "bye" in word:
                self.bye = Bye(**word["bye"])
                self.closed = True
        if not keep:
            for fd in fds:
                os.close(fd)

    def window_fits(self, total: int) -> bool:
        """The descriptor that came really has the bytes its hello tells of."""
        return self.window >= 0 and os.fstat(self.window).st_size == total

    def close_window(self) -> None:
        if self.window >= 0:
            os.close(self.window)
            self.window = -1

    def watch(self) -> PeerWatch:
        """Hands socket and pidfd over to a watch of the open communicator."""
        watch = PeerWatch(self.sock, self.pid, self.pidfd)
        self.pidfd = -1
        return watch

    def close(self) -> None:
        """Closes everything this end owns; visible to the peer at once."""
        self.close_window()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def _poll(fd: int) -> list[tuple[int, int]]:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return poll.poll(0)
