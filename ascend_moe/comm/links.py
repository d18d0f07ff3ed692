"""Keeps the connections of open windows between processes: what a rank says over them reaches every other rank.

They need no store: the one of a process group dies with the rank that serves it. ``LinkBoard`` opens the windows of
another group over them, as ``Board`` does over a store.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ascend_moe.comm.board import Board
from ascend_moe.errors import ConfigMismatch, PeerLost

if TYPE_CHECKING:
    from ascend_moe.comm.processes import Peer, Post

MESSAGE_BYTES = 1 << 16
REPEAT_S = 0.25  # a peer that is still opening its windows hears words of the opening alone


def send(sock: socket.socket, message: Mapping[str, Any]) -> bool:
    """Whether a message has left; a peer that has died, or that reads none, gets none."""
    try:
        sock.send(json.dumps(message).encode())
    except OSError:
        return False
    return True


def received(sock: socket.socket) -> list[dict[str, Any]]:
    """The messages that have come; what is none is left out."""
    messages: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):  # nothing more, or the peer has gone
        while text := sock.recv(MESSAGE_BYTES):
            with contextlib.suppress(ValueError):  # a word of the opening
                messages.append(json.loads(text))
    return messages


class Links:
    """The connections of one rank's open windows to the other ranks."""

    def __init__(self, rank: int, peers: Mapping[int, Peer], askers: Sequence[socket.socket]) -> None:
        """``askers``: the ends by which the other ranks hear this one."""
        self.rank = rank
        self._peers, self._askers = peers, askers
        self._heard: dict[str, dict[int, Any]] = {}  # by topic and rank: the last message

    def gone(self, rank: int) -> bool:
        """The rank's process has ended, or it has closed its end."""
        return rank != self.rank and self._peers[rank].watch.fired()

    def ended(self, rank: int) -> bool:
        """The rank's process has ended."""
        return rank != self.rank and self._peers[rank].watch.ended()

    def describe(self, rank: int) -> str:
        """Returns what can be seen of a rank."""
        return self._peers[rank].watch.describe()

    def say(self, topic: str, message: Any) -> None:
        """Tells all other ranks."""
        for asker in self._askers:
            send(asker, {"topic": topic, "message": message})

    def heard(self, topic: str) -> dict[int, Any]:
        """The last message of each rank that has said something about this."""
        for rank, peer in self._peers.items():
            for text in received(peer.sock):
                self._heard.setdefault(str(text.get("topic")), {})[rank] = text.get("message")
        return self._heard.get(topic, {})


class LinkBoard(Board["Post"]):
    """The posts of a new group's ranks, over the links of the group that it is made from."""

    def __init__(self, links: Links, topic: str, members: Sequence[int], mine: Post, prefix: str) -> None:
        """``topic``: of this try. ``members``, alike on all ranks: each new rank's number in the old group."""
        self.mine = mine
        self.posts: dict[int, Post] = {}
        self.answers = True
        self._links, self._topic, self._members, self._prefix = links, topic, list(members), prefix
        self._said: dict[str, Any] = {}
        self._again = 0.0

    def exchange(self, ranks: list[int], seconds: float) -> None:
        """Says ``mine`` and takes in what the others have said.

        Raises:
            PeerLost: a rank of ``ranks`` has gone without a post.
            ConfigMismatch: another rank makes the group of other ranks.
        """
        message = {"members": self._members, "post": asdict(self.mine)}
        if message != self._said or time.monotonic() >= self._again:
            self._links.say(self._topic, message)
            self._said, self._again = message, time.monotonic() + REPEAT_S
        for rank, message in self._links.heard(self._topic).items():
            self._take(rank, message)
        for rank in ranks:
            post, member = self.posts.get(rank), self._members[rank]
            if (post is None or post.left) and self._links.gone(member):
                text = f"{self._prefix}: rank {rank} is lost: {self._links.describe(member)}; see its log for why"
                raise PeerLost(text, rank=rank, phase="open")

    def _take(self, rank: int, message: Mapping[str, Any]) -> None:
        if message["members"] != self._members:
            theirs = message["members"]
            raise ConfigMismatch(
                f"{self._prefix}: rank {rank} makes it of ranks {theirs}, this one of {self._members}: "
                "pass what ascend_moe.agree has returned, on every rank",
                field="alive",
                rank=rank,
                ours=self._members,
                theirs=theirs,
            )
        self.posts[self._members.index(rank)] = type(self.mine)(**message["post"])


BoardMaker = Callable[["Post", str], Board["Post"]]
