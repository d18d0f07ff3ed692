"""Takes processes that were started anew back into a group that went on without them: ``grow``.

A process that comes back knows the name of the first group alone. It connects to an abstract Unix socket that is named
after that group and the job, and waits there. Rank 0 of the group that went on listens from its first ``grow`` on.
In ``grow`` rank 0 tells the other ranks who waits, all open the windows of the larger group, with the posts of those
who come back passed on by rank 0, and agree on it as ``shrink`` does.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ascend_moe import comm, log
from ascend_moe.comm import regrouped
from ascend_moe.comm.board import Board
from ascend_moe.comm.links import LinkBoard, Links, received, send
from ascend_moe.comm.liveness import foreign_user
from ascend_moe.comm.place import Place
from ascend_moe.comm.processes import Opening, Post
from ascend_moe.comm.regrouped import Regrouped
from ascend_moe.comm.survivors import Standing, open_together, seconds_of, standing
from ascend_moe.errors import AscendMoeError, CommError, CommTimeout, ConfigMismatch, PeerLost, need, with_typed_errors
from ascend_moe.native.windows import window_data_bytes, window_lent_bytes

_PAUSE_S = 0.005  # between two looks at a connection
_HELLO_MS = 200
_KNOCKS = 64  # processes that may wait at once


@dataclass(frozen=True)
class Grown:
    """What ``grow`` returns: the place in the larger group, and the step that its ranks go on with.

    Attributes:
        place: group_ep, W and rank.
        step: as the ranks that went on have given it.
        origins: the ranks' numbers in the first group, by rank.
    """

    place: Place
    step: int
    origins: list[int]


@with_typed_errors
def grow(
    group_ep: str,
    step: int | None = None,
    *,
    rank: int | None = None,
    timeout: float | None = None,
    job: str | None = None,
) -> Grown | None:
    """Takes processes back that were started anew, at a step that all ranks agree on.

    The ranks that went on call it at steps of their choice, all at the same ones, with ``step``: when nobody waits, it
    returns None at once, and the group stays. A process that was started anew calls it with its ``rank`` and without a
    step, with the name of the first group (that of the process group), and waits. Once it is let in, all have a new
    group in which ranks are numbered in the order of the first one, with all its ranks the same as then, and
    the same step. Weights and other state are the callers' affair.

    Args:
        group_ep: name of the group that `shrink` or grow has made; in a process that comes back, of the first group.
        step: any whole number, the same on all ranks that went on.
        rank: the rank that comes back, as it was in the first group.
        timeout: seconds: of the opening, and to wait to be let in; None: ASCEND_MOE_TIMEOUT_S.
        job: tells this job from others of this user on the machine; the same in all its processes. None: MASTER_ADDR
            and MASTER_PORT, as torchrun sets them.

    Returns:
        the place, the step and who is there; None: nobody came back.

    Raises:
        ConfigMismatch: ranks give different steps. CommTimeout, PeerLost: a rank did not come, or died; in a process
            that comes back: nobody let it in.
        ArgumentError: a rule above is broken.
    """
    seconds = seconds_of(timeout)
    comm.need_name("group_ep", group_ep)
    name = address(regrouped.first_name(group_ep), job)
    if rank is not None:
        need(
            step is None,
            "step",
            "is {!r}; the ranks that went on tell it to the one that comes back: leave it out",
            step,
        )
        need(isinstance(rank, int) and rank >= 0, "rank", "is {!r}; it must be a rank of the first group", rank)
        return _come_back(group_ep, rank, name, seconds)
    whole = isinstance(step, int) and not isinstance(step, bool)
    need(whole, "step", "is {!r}; it must be a whole number, the same on all ranks", step)
    assert step is not None
    here = standing(group_ep)
    made, links = here.made, here.end.links
    rule = "of {!r} is not a group of processes that shrink has made, and nobody can come back to it"
    need(made is not None, "group_ep", rule, group_ep)
    assert made is not None and links is not None
    made.steps += 1
    topic = f"grow {made.steps}"
    guests: dict[int, socket.socket] = {}
    if here.rank == 0:
        guests = _knocking(made, name)
        links.say(topic, {"step": step, "guests": sorted(guests)})
        coming = sorted(guests)
    else:
        coming = _told(here, links, topic, step, seconds)
    if not coming:
        return None
    try:
        return _let_in(here, made, links, coming, guests, step, seconds)
    finally:
        for guest in guests.values():
            guest.close()


def address(first_name: str, job: str | None) -> str:
    """The name of the socket at which processes knock."""
    if job is None:
        job = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    text = f"{os.geteuid()}\n{job}\n{first_name}"
    return "\0ascend_moe-grow-" + hashlib.sha256(text.encode()).hexdigest()[:32]


def _knocking(made: Regrouped, name: str) -> dict[int, socket.socket]:
    """Rank 0: who waits to be let in, by its number in the first group. Listens from now on."""
    if made.door is not None and made.door.getsockname() != name.encode():  # another job now
        made.door.close()
        made.door = None
    if made.door is None:
        made.door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            made.door.bind(name)
        except OSError as error:
            made.door.close()
            made.door = None
            text = "grow: another process listens for its job's ranks under this name: pass job=, a text of this job's"
            raise AscendMoeError(f"{text} own, on all ranks ({error.strerror})") from error
        made.door.setblocking(False)
        made.door.listen(_KNOCKS)
    guests: dict[int, socket.socket] = {}
    with contextlib.suppress(BlockingIOError):
        while True:
            guest = made.door.accept()[0]
            if foreign_user(guest) is not None:
                guest.close()
                continue
            guest.setblocking(False)
            rank = _rank_of(guest)
            if rank in made.missing and rank not in guests:
                guests[rank] = guest
            else:
                here = ", ".join(map(str, made.origins))
                send(guest, {"refused": f"rank {rank} is not missing: ranks {here} of {made.first_world} are there"})
                guest.close()
    return guests


def _rank_of(guest: socket.socket) -> int | None:
    """Which rank knocks; None: a process that has gone."""
    poll = select.poll()
    poll.register(guest, select.POLLIN)
    poll.poll(_HELLO_MS)  # it says so right after it has connected
    message = next(iter(received(guest)), {})
    rank = message.get("rank")
    return rank if isinstance(rank, int) and not _ended(guest) else None


def _ended(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def _told(here: Standing, links: Links, topic: str, step: int, seconds: float) -> list[int]:
    """What rank 0 says: who comes back."""
    deadline, prefix = time.monotonic() + seconds, f"rank {here.rank}: grow of group {here.name!r}"
    while 0 not in (heard := links.heard(topic)):
        if links.gone(0):
            raise PeerLost(f"{prefix}: rank 0 is lost: {links.describe(0)}; agree and shrink", rank=0, phase="grow")
        if time.monotonic() >= deadline:
            seen = links.describe(0)
            text = f"{prefix}: rank 0 did not call it within {seconds:g} s: {seen}; all ranks call it at the same steps"
            raise CommTimeout(text, rank=0, ranks=[0], phase="grow")
        time.sleep(_PAUSE_S)
    message = heard[0]
    if message["step"] != step:
        text = f"{prefix}: step is {step} here and {message['step']} on rank 0; it must be the same on all ranks"
        raise ConfigMismatch(text, field="step", rank=0, ours=step, theirs=message["step"])
    return list(message["guests"])


def _let_in(
    here: Standing,
    made: Regrouped,
    links: Links,
    coming: Sequence[int],
    guests: Mapping[int, socket.socket],
    step: int,
    seconds: float,
) -> Grown | None:
    """Opens the larger group; None when who came back has failed meanwhile."""
    origins = sorted([*made.origins, *coming])
    name, members = regrouped.next_name(here.name), [_place_in(made.origins, origin) for origin in origins]
    invited = {"name": name, "step": step, "origins": origins, "world": made.first_world}
    for guest in guests.values():
        send(guest, invited)
    topic = f"posts {made.steps}"
    board: Any = functools.partial(LinkBoard, links, topic, members)
    if here.rank == 0:
        by_rank = {origins.index(origin): guest for origin, guest in guests.items()}
        board = functools.partial(HostBoard, by_rank, links, topic, members)
    place = members.index(here.rank)
    sizes = (here.end.data_bytes, here.end.lent_bytes)
    opening = Opening(name, None, place, len(origins), *sizes, seconds, board=board)
    try:
        end = open_together(here, range(here.end.world), opening, seconds)
    except CommError as error:
        if any(links.gone(rank) for rank in range(here.end.world)):
            raise
        log.say(logging.WARNING, "grow: nobody is taken back: %s", error, rank=here.rank)
        return None
    regrouped.add(Regrouped(end, origins, made.first_world))
    comm.close(here.name)
    for guest in guests.values():
        send(guest, {"go": True})
    return Grown(Place(name, end.world, end.rank), step, origins)


def _place_in(origins: Sequence[int], origin: int) -> int | None:
    return origins.index(origin) if origin in origins else None


class HostBoard(LinkBoard):
    """Rank 0's board: passes on the posts between the ranks that went on and those who come back."""

    def __init__(self, guests: Mapping[int, socket.socket], *others: Any) -> None:
        """``guests``: the connections of those who come back, by new rank. ``others``: as of LinkBoard."""
        super().__init__(*others)
        self._guests = guests
        self._passed_on: dict[int, Post] = {}

    def exchange(self, ranks: list[int], seconds: float) -> None:
        """As of LinkBoard; takes in the guests' posts, and tells them all."""
        for rank, guest in self._guests.items():
            for message in received(guest):
                with contextlib.suppress(TypeError, KeyError):
                    self.posts[rank] = Post(**message["post"])
            if _ended(guest) and rank not in self.posts:
                self._lost = sorted({*self._lost, rank})
        super().exchange(ranks, seconds)
        for rank, post in (self.posts | self._own()).items():
            if self._passed_on.get(rank) != post:
                self._passed_on[rank] = post
                for guest in self._guests.values():
                    send(guest, {"posts": {str(rank): asdict(post)}})

    def _own(self) -> dict[int, Post]:
        return super()._own() | {rank: self.posts[rank] for rank in self._guests if rank in self.posts}


class GuestBoard(Board[Post]):
    """The board of a process that comes back: rank 0 of the group that went on has all posts."""

    def __init__(self, host: socket.socket, mine: Post, prefix: str) -> None:
        self.mine, self.posts, self.answers = mine, {}, True
        self._connection, self._prefix = host, prefix
        self._said: Post | None = None

    def exchange(self, ranks: list[int], seconds: float) -> None:
        """Says ``mine`` and takes in the posts of the others. Raises PeerLost: the group has given up."""
        if self.mine != self._said:
            send(self._connection, {"post": asdict(self.mine)})
            self._said = self.mine
        ended = _ended(self._connection)
        for message in received(self._connection):
            posts = {int(rank): Post(**post) for rank, post in message.get("posts", {}).items()}
            self.posts |= {rank: post for rank, post in posts.items() if post.socket != self.mine.socket}
        if ended and any(rank not in self.posts for rank in ranks):
            raise PeerLost(f"{self._prefix}: the group has given up taking this rank back: call again", phase="open")


def _come_back(first: str, rank: int, name: str, seconds: float) -> Grown:
    """Waits to be let in, opens the windows with the others, and waits for their agreement."""
    need(
        regrouped.MARK not in first,
        "group_ep",
        "is {!r}; pass the first group's name, without {}",
        first,
        regrouped.MARK,
    )
    deadline = time.monotonic() + seconds
    host, invited = _invited(first, rank, name, deadline, seconds)
    with contextlib.closing(host):
        place, world = invited["origins"].index(rank), len(invited["origins"])
        data_bytes = window_data_bytes()
        sizes = (data_bytes, window_lent_bytes(data_bytes))
        opening = Opening(
            invited["name"], None, place, world, *sizes, seconds, board=functools.partial(GuestBoard, host)
        )
        opening.run()
        end = opening.communicator()
        if not _answered(host, "go", time.monotonic() + seconds):
            end.close()
            raise PeerLost(f"{opening.prefix}: the group has given up taking this rank back: call again", phase="open")
    regrouped.add(Regrouped(end, invited["origins"], invited["world"]))
    return Grown(Place(invited["name"], world, place), invited["step"], invited["origins"])


def _invited(first: str, rank: int, name: str, deadline: float, seconds: float) -> tuple[socket.socket, dict[str, Any]]:
    """Knocks until somebody lets this process in: the connection, and what it is let into."""
    while True:
        host = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        host.setblocking(False)
        with contextlib.suppress(ConnectionRefusedError, BlockingIOError, FileNotFoundError):
            host.connect(name)
            if (user := foreign_user(host)) is not None:
                host.close()
                text = f"rank {rank}: user {user} listens for ranks that come back to group {first!r}, and this "
                text += f"process is of user {os.geteuid()}: run all ranks as the same user"
                raise ConfigMismatch(text, field="user", rank=0, ours=os.geteuid(), theirs=user)
            send(host, {"rank": rank})
            message = _answered(host, "name", deadline)
            if message:
                if "refused" in message:
                    host.close()
                    need(False, "rank", "is {}; {}", rank, message["refused"])
                return host, message
        host.close()
        if time.monotonic() >= deadline:
            raise CommTimeout(
                f"rank {rank}: nobody has let this process back into group {first!r} within {seconds:g} s: the ranks "
                f"that went on must call ascend_moe.grow with a step, with the same job",
                rank=rank,
                phase="grow",
            )
        time.sleep(_PAUSE_S)


def _answered(host: socket.socket, word: str, deadline: float) -> dict[str, Any]:
    """The message with this word, or a refusal; none when the connection ends, or at the deadline."""
    while True:
        ended = _ended(host)
        while messages := received(host, most=1):  # what follows is for others to read
            if word in messages[0] or "refused" in messages[0]:
                return messages[0]
        if ended or time.monotonic() >= deadline:
            return {}
        time.sleep(_PAUSE_S)
