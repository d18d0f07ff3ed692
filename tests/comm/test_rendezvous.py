"""How ranks open windows together: threads and scripted peers over a HashStore."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch.distributed as dist
import window_library
from window_library import WindowLibrary, exchange

from ascend_moe.comm.board import Board, Post, StoreHost
from ascend_moe.comm.communicator import Communicator
from ascend_moe.comm.link import Hello, Link
from ascend_moe.comm.rendezvous import Opening, create_window
from ascend_moe.errors import CommTimeout, ConfigMismatch, PeerLost
from ascend_moe.native import library as _lib


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[WindowLibrary]:
    """Counted windows; every test leaves none, and no descriptor either."""
    installed = window_library.install(monkeypatch)
    before = len(os.listdir("/proc/self/fd"))
    yield installed
    assert (installed.mapped, installed.comms) == ({}, {})
    assert len(os.listdir("/proc/self/fd")) == before


class Rank:
    """One rank of a group over a HashStore; ``open`` makes one attempt."""

    def __init__(self, rank: int, world: int, store: Any) -> None:
        self.rank, self.world, self.store = rank, world, store

    def open(self, timeout: float, mib: int = 1) -> tuple[Communicator, str]:
        """(this rank's end, the digest that all ranks of these windows share)"""
        opening = Opening("g", self.store, self.rank, self.world, mib << 20, mib << 20, timeout)
        opening.run()
        watches = {link.rank: link.watch() for link in opening.linked()}

        def release() -> None:
            for watch in watches.values():
                watch.close()
            for base in opening.bases:
                _lib.lib().am_window_unmap(base, opening.total)

        live_fds = [watches[r].fileno() if r in watches else -1 for r in range(self.world)]
        end = Communicator(
            "g",
            self.rank,
            opening.bases,
            opening.data_bytes,
            opening.lent_bytes,
            live_fds=live_fds,
            describe=lambda r: watches[r].describe(),
            release=release,
        )
        return end, opening.digest


def on_threads(world: int, function: Any) -> list[Any]:
    """function(Rank) on a thread a rank over a fresh store; results by rank, the first error raised."""
    store = dist.HashStore()
    results: list[Any] = [None] * world
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            results[rank] = function(Rank(rank, world, store))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return results


@pytest.fixture
def hesitant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks hesitate at random before a word, so that every other rank can get ahead of it."""
    send, dice = Link.send, random.Random(1)

    def send_later(self: Link, word: dict[str, Any], fd: int = -1) -> None:
        if dice.random() < 0.2:
            time.sleep(dice.choice([0.002, 0.02]))
        send(self, word, fd)

    monkeypatch.setattr(Link, "send", send_later)


@pytest.mark.usefixtures("hesitant")
@pytest.mark.parametrize("world", [2, 3, 5])
def test_generations_never_mix(world: int) -> None:
    """Ranks open and close as fast as they can, or dawdle: the n-th windows of all are the same ones."""

    def rank_body(rank: Rank) -> list[str]:
        dice = random.Random(world * 100 + rank.rank)
        digests = []
        for _ in range(12):
            end, digest = rank.open(20)
            digests.append(digest)
            end.close()
            time.sleep(dice.choice([0, 0, 0.001, 0.01]))
        return digests

    digests = on_threads(world, rank_body)
    assert all(other == digests[0] for other in digests) and len(set(digests[0])) == 12


@pytest.mark.usefixtures("hesitant")
@pytest.mark.parametrize("seed", range(8))
def test_attempts_given_up_at_any_moment_do_no_harm(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank gives up a few times at moments of its own; then all meet, and the windows are common."""
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "10")

    def rank_body(rank: Rank) -> tuple[str, list[int]]:
        dice = random.Random(seed * 10 + rank.rank)
        hasty = dice.randrange(6)
        while True:
            hasty -= 1
            try:
                end, digest = rank.open(dice.uniform(0, 0.03) if hasty >= 0 else 10)
            except CommTimeout:
                assert hasty >= 0, "all were there for this attempt"
                continue
            try:
                return digest, exchange(end, rank.rank + 7)
            except PeerLost:  # a peer gave up in the same instant in which we completed
                continue
            finally:
                end.close()

    results = on_threads(3, rank_body)
    assert len({digest for digest, _ in results}) == 1
    assert all(values == [7, 8, 9] for _, values in results)


def test_stale_posts_are_not_joined() -> None:
    """Posts of a former life of the job: of a dead process, and of sockets that nobody listens on."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    store = dist.HashStore()
    old = Post.mine()
    for rank, (pid, started) in enumerate([(child, 1), (os.getpid(), old.started)]):
        fields = {**old.__dict__, "pid": pid, "started": started}
        dist.PrefixStore("ascend_moe/windows", store).set(f"rank/{rank}", json.dumps(fields))
    with pytest.raises(CommTimeout, match="rank 0 has not called since") as caught:
        Rank(2, 3, store).open(0.9)
    assert caught.value.rank == 0 and caught.value.ranks == [0, 1]


def test_post_of_a_process_that_died_meanwhile_is_a_lost_peer() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    store = dist.HashStore()
    fields = {**Post.mine().__dict__, "pid": child}
    dist.PrefixStore("ascend_moe/windows", store).set("rank/0", json.dumps(fields))
    began = time.monotonic()
    with pytest.raises(PeerLost, match=f"process {child} has ended") as caught:
        Rank(1, 2, store).open(20)
    assert caught.value.rank == 0 and time.monotonic() - began < 2


def test_strangers_on_the_socket_get_no_window() -> None:
    """Who does not know the nonce in the store is not answered, and does not disturb."""
    store = dist.HashStore()
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(Rank(0, 2, store).open(10)))
    thread.start()
    key = dist.PrefixStore("ascend_moe/windows", store)
    post = Post(**json.loads(key.get("rank/0")))
    strangers = []
    hello = {
        "rank": 1,
        "nonce": "x",
        "started": 1 << 62,
        "to": "guess",
        "data_bytes": 1,
        "lent_bytes": 0,
        "total": 4096,
    }
    for packet in (b"\xff", b"[]", b'"hello"', json.dumps({"hello": hello}).encode(), b'{"done": ""}'):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect("\0" + post.socket)
        fd = create_window(4096)
        socket.send_fds(stranger, [packet], [fd])
        os.close(fd)
        strangers.append(stranger)
    end, digest = Rank(1, 2, store).open(10)
    thread.join(10)
    assert results[0][1] == digest
    for stranger in strangers:
        stranger.settimeout(5)
        packet, fds = b"", []
        with contextlib.suppress(ConnectionResetError):
            packet, fds, _, _ = socket.recv_fds(stranger, 4096, 1)
        assert not fds and b"hello" not in packet
        stranger.close()
    end.close()
    results[0][0].close()


def test_store_that_breaks_is_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Board, rank: int) -> Post | None:
        raise RuntimeError("Broken pipe\nwith a long trace")

    monkeypatch.setattr(Board, "_read", read)
    opening = Opening("g", dist.HashStore(), 1, 2, 1 << 20, 0, 20, StoreHost(rank=0))
    began = time.monotonic()
    with pytest.raises(
        PeerLost, match=r"store .* has failed \(Broken pipe\); rank 0 normally hosts"
    ) as caught:
        opening.run()
    assert caught.value.rank == 0 and time.monotonic() - began < 2 and "\n" not in str(caught.value)


def test_sixteen_ranks_meet_quickly() -> None:
    began = time.monotonic()
    opened = on_threads(16, lambda rank: rank.open(20))
    seconds = time.monotonic() - began
    assert len({digest for _, digest in opened}) == 1
    for end, _ in opened:
        end.close()
    assert seconds < 5


# ---- a scripted peer


class Scripted:
    """Rank 1 of 2, word by word, against a real rank 0 that opens in a thread."""

    def __init__(self, timeout: float) -> None:
        self.store = dist.HashStore()
        self.opening = Opening("g", self.store, 0, 2, 1 << 20, 1 << 20, timeout)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._open)
        self.thread.start()
        posts = dist.PrefixStore("ascend_moe/windows", self.store)
        self.post = Post(**json.loads(posts.get("rank/0")))
        self.attempts = 0

    def _open(self) -> None:
        try:
            self.opening.run()
        except BaseException as error:
            self.error = error

    def hello(self, window_bytes: int = 0, **changes: Any) -> tuple[Link, str]:
        """A new attempt that has said hello; the digest that rank 0 then is ready with."""
        self.attempts += 1
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect("\0" + self.post.socket)
        sock.setblocking(False)
        link = Link(sock, 0, expected=self.post.nonce)
        nonce, total = f"attempt {self.attempts}", self.opening.total
        hello = Hello(
            1, nonce, self.attempts, self.post.nonce, data_bytes=1 << 20, lent_bytes=1 << 20, total=total
        )
        window = create_window(window_bytes or total)
        link.send({"hello": {**asdict(hello), **changes}}, window)
        os.close(window)
        deadline = time.monotonic() + 5
        while not link.ready and not link.closed and time.monotonic() < deadline:
            link.read()
            time.sleep(0.001)
        return link, link.ready

    def completes(self, seconds: float) -> bool:
        self.thread.join(seconds)
        return not self.thread.is_alive()

    def end(self) -> None:
        """What the owner of an open communicator does at its close."""
        self.thread.join(10)
        for link in self.opening.linked():
            link.close()
        for base in self.opening.bases:
            if base:
                _lib.lib().am_window_unmap(base, self.opening.total)


def test_only_the_digest_of_the_same_attempts_completes() -> None:
    peer = Scripted(10)
    link, digest = peer.hello()
    link.send({"ready": "of other attempts"})
    link.send({"done": "of other attempts"})
    assert not peer.completes(0.1)
    link.send({"ready": digest})
    assert peer.completes(5) and peer.error is None
    link.read()
    assert link.done == digest
    link.close()
    peer.end()


def test_done_completes_though_the_peer_is_gone_again() -> None:
    peer = Scripted(10)
    link, digest = peer.hello()
    link.send({"done": digest})
    link.close()
    assert peer.completes(5) and peer.error is None
    peer.end()


def test_ready_then_goodbye_does_not_complete_and_a_new_attempt_does() -> None:
    peer = Scripted(10)
    first, digest = peer.hello()
    link, other = peer.hello()  # replaces the first, whose words do not count any more
    first.send({"ready": digest})
    assert other and other != digest and not peer.completes(0.1)
    first.close()
    link.send({"bye": {"kind": "CommTimeout", "rank": 5, "text": "why"}})
    link.send({"ready": other})
    assert not peer.completes(0.1)
    link.close()
    link, digest = peer.hello()
    link.send({"ready": digest})
    assert peer.completes(5) and peer.error is None
    link.close()
    peer.end()


def test_ready_then_goodbye_and_nothing_more_times_out() -> None:
    peer = Scripted(0.3)
    link, _ = peer.hello()
    link.send({"bye": {"kind": "KeyboardInterrupt", "rank": None, "text": ""}})
    assert peer.completes(5)
    assert isinstance(peer.error, CommTimeout) and peer.error.rank == 1
    assert "rank 1 gave up before with KeyboardInterrupt" in str(peer.error)
    link.close()
    peer.end()


def test_older_attempt_that_is_read_late_does_not_replace_a_newer_one() -> None:
    peer = Scripted(10)
    newer, digest = peer.hello(started=7)
    older, nothing = peer.hello(started=6)
    assert older.closed and not nothing
    older.close()
    newer.send({"ready": digest})
    assert peer.completes(5) and peer.error is None
    newer.close()
    peer.end()


def test_connection_that_breaks_without_goodbye_is_a_lost_peer() -> None:
    peer = Scripted(10)
    link, _ = peer.hello()
    link.close()
    assert peer.completes(2)
    assert isinstance(peer.error, PeerLost) and peer.error.rank == 1
    peer.end()


def test_goodbye_of_a_rank_that_lost_another_names_that_one() -> None:
    peer = Scripted(10)
    link, _ = peer.hello()
    link.send({"bye": {"kind": "PeerLost", "rank": 9, "text": "rank 9 is lost"}})
    assert peer.completes(2)
    assert isinstance(peer.error, PeerLost) and peer.error.rank == 9 and "rank 9 is lost" in str(peer.error)
    link.close()
    peer.end()


@pytest.mark.parametrize(
    ("field", "changes", "ours", "theirs"),
    [
        ("HCCL_BUFFSIZE", {"data_bytes": 2 << 20}, 1, 2),
        ("ASCEND_MOE_LENT_MIB", {"lent_bytes": 5 << 20}, 1, 5),
        ("window layout", {"total": 1 << 21, "window_bytes": 1 << 21}, 0, 1 << 21),
    ],
)
def test_windows_that_differ(field: str, changes: dict[str, int], ours: int, theirs: int) -> None:
    peer = Scripted(10)
    liar, _ = peer.hello(total=1 << 22)  # a window that has not the bytes its hello tells of would fault
    assert liar.closed and not peer.completes(0.05)
    liar.close()
    link, _ = peer.hello(**changes)
    assert peer.completes(2)
    assert isinstance(peer.error, ConfigMismatch) and peer.error.field == field
    expected = (1, ours or peer.opening.total, theirs)
    assert (peer.error.rank, peer.error.ours, peer.error.theirs) == expected
    link.close()
    peer.end()


def test_last_words_are_read_before_a_newer_hello_counts() -> None:
    """The peer completed, closed and came back between two looks of ours."""
    opening = Opening("g", dist.HashStore(), 0, 2, 1 << 20, 1 << 20, 10)
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    ours, theirs = zip(*pairs, strict=True)
    old, new = (Link(sock, 1) for sock in ours)
    for started, link in enumerate((old, new)):
        link.sock.setblocking(False)
        link.hello = Hello(1, f"attempt {started}", started, "", 1 << 20, 1 << 20, opening.total)
    opening.links[1], opening.digest = old, "ours"
    old.send({"ready": "ours"})  # never read by the peer: its end then is reported as a reset first
    theirs[0].send(json.dumps({"done": "ours"}).encode())
    theirs[0].close()
    opening._seat(new, 1, reply=False)
    assert opening.links[1] is old and opening._agreed()
    theirs[1].close()
    for item in (old, new, opening._listener, opening._selector):
        item.close()
