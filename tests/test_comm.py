"""Names, settings and the rendezvous of communicators, in one process."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import window_library
from window_library import WindowLibrary, exchange

from ascend_moe import comm
from ascend_moe.board import Board, Post, StoreHost
from ascend_moe.communicator import Communicator, timeout_s, window_data_bytes
from ascend_moe.errors import ArgumentError, AscendMoeError, CommError, CommTimeout, PeerLost
from ascend_moe.link import Link
from ascend_moe.liveness import describe_process, process_gone
from ascend_moe.rendezvous import Opening, create_window


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[WindowLibrary]:
    """Counted windows; every test leaves none, and no descriptor either."""
    monkeypatch.setenv("HCCL_BUFFSIZE", "1")
    installed = window_library.install(monkeypatch)
    # pytest holds the group longer than the test does, and with it gloo's own descriptors.
    kinds = ("/memfd", "anon_inode:[pidfd]") if "group" in request.fixturenames else ("",)
    before = open_files(kinds)
    yield installed
    assert (installed.mapped, installed.comms) == ({}, {})
    assert open_files(kinds) == before


def open_files(kinds: tuple[str, ...]) -> list[str]:
    """What this process has open of these kinds."""
    gc.collect()
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(link for link in links if link.startswith(kinds))


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """The default group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    comm.close("0")
    dist.destroy_process_group()


# ---- settings


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", "65537", "0x10", "२"])
def test_window_size_must_be_whole_mib(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", text)
    with pytest.raises(ArgumentError, match=r"HCCL_BUFFSIZE.*whole number of MiB in 1\.\.65536") as caught:
        window_data_bytes()
    assert caught.value.argument == "HCCL_BUFFSIZE"


def test_window_size_default_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, mib in [(" 7 ", 7), ("", 200), ("65536", 65536)]:
        monkeypatch.setenv("HCCL_BUFFSIZE", text)
        assert window_data_bytes() == mib << 20
    monkeypatch.delenv("HCCL_BUFFSIZE")
    assert window_data_bytes() == 200 << 20
    assert window_data_bytes(3) == 3 << 20
    for bad in (0, True, 1.0, "4"):
        with pytest.raises(ArgumentError, match="window_mib"):
            window_data_bytes(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["0", "-3", "soon", "nan", "inf"])
def test_timeout_must_be_positive(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", text)
    with pytest.raises(ArgumentError, match="seconds above 0") as caught:
        timeout_s()
    assert caught.value.argument == "ASCEND_MOE_TIMEOUT_S"


def test_timeout_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_MOE_TIMEOUT_S")
    assert timeout_s() == 60
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "0.25")
    assert timeout_s() == 0.25


# ---- names


@pytest.mark.parametrize("name", ["", "x" * 128, 3, None])
def test_group_ep_has_1_to_127_characters(name: Any) -> None:
    for call in (lambda: comm.lookup(name, 1, 0), lambda: comm.close(name)):
        with pytest.raises(ArgumentError, match=r"str of 1\.\.127 characters") as caught:
            call()
        assert caught.value.argument == "group_ep"


def test_without_torch_distributed() -> None:
    with pytest.raises(ArgumentError, match=r"init_process_group first, .*LocalCluster") as caught:
        comm.comm_name()
    assert caught.value.argument == "process_group"
    with pytest.raises(ArgumentError, match="not initialised") as caught:
        comm.lookup("0", 1, 0)
    assert caught.value.argument == "group_ep"
    comm.close("0")  # nothing to close is no error


def test_comm_name_opens_once_and_lookup_finds_it(group: Any, library: WindowLibrary) -> None:
    assert comm.comm_name() == comm.comm_name(group) == group.group_name == "0"
    end = comm.lookup("0", 1, 0)
    assert (end.name, end.rank, end.world, end.data_bytes, end.failed) == ("0", 0, 1, 1 << 20, None)
    assert comm.lookup("0", 1, 0) is end and len(library.comms) == 1
    assert exchange(end, 5) == [5]
    comm.close("0")
    comm.close("0")
    assert end.closed and not library.mapped
    with pytest.raises(AscendMoeError, match="closed"), end.use():
        pass
    fresh = comm.lookup("0", 1, 0)
    assert fresh is not end and exchange(fresh, 6) == [6]


def test_foreign_groups_are_refused(group: Any) -> None:
    for bad in ("0", object(), dist.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises(ArgumentError, match="not a live process group") as caught:
            comm.comm_name(bad)  # type: ignore[arg-type]
        assert caught.value.argument == "process_group"


def test_destroying_the_group_closes_its_windows(library: WindowLibrary) -> None:
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        end = comm.lookup(comm.comm_name(), 1, 0)
        assert len(library.comms) == 1 and exchange(end, 1) == [1]
        dist.destroy_process_group()
        with pytest.raises(ArgumentError, match="not initialised"):
            comm.lookup("0", 1, 0)
    assert end.closed and not library.comms


def test_name_of_an_hccl_group_is_hccls(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.distributed_c10d._world.pg_map[group][1]
    monkeypatch.setitem(dist.distributed_c10d._world.pg_map, group, ("cpu:gloo,npu:hccl", store))
    backend = SimpleNamespace(get_hccl_comm_name=lambda rank: f"127.0.0.1%hccl_{rank}")
    monkeypatch.setattr(type(group), "_get_backend", lambda self, device: backend)
    monkeypatch.setattr(torch, "device", lambda kind: kind)
    assert comm.comm_name(group) == "127.0.0.1%hccl_0"
    # The name that was handed out also leads CPU tensors to windows of that group.
    assert exchange(comm.lookup("127.0.0.1%hccl_0", 1, 0), 9) == [9]
    comm.close("127.0.0.1%hccl_0")


# ---- one end


def test_failed_end_raises_the_first_error_again(group: Any) -> None:
    end = comm.lookup(comm.comm_name(), 1, 0)
    end.failed = PeerLost("rank 3 is lost", rank=3)
    for _ in range(2):
        with pytest.raises(PeerLost, match="rank 3 is lost") as caught, end.use():
            pass
        assert caught.value.rank == 3 and caught.value.__cause__ is end.failed


def test_close_waits_for_a_running_op(group: Any) -> None:
    end = comm.lookup(comm.comm_name(), 1, 0)
    entered, leave = threading.Event(), threading.Event()

    def op() -> None:
        with end.use():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=op)
    thread.start()
    entered.wait(10)
    with pytest.raises(AscendMoeError, match="an op still runs"):
        end.close(patience=0.05)
    assert not end.closed
    threading.Timer(0.1, leave.set).start()
    comm.close("0")
    assert end.closed
    thread.join()


def test_window_cannot_be_resized_by_a_peer() -> None:
    fd = create_window(8192)
    try:
        for size in (0, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)


def test_process_states() -> None:
    assert f"process {os.getpid()} is running" in describe_process(os.getpid())
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # a zombie has ended too
    assert describe_process(child) == f"process {child} has ended" and process_gone(child)
    os.waitpid(child, 0)
    assert process_gone(child)
    assert process_gone(os.getpid(), born=1), "a process of this id with another start is another process"


# ---- ranks as threads that open windows over a store


class Rank:
    """One rank of a group over a HashStore; ``open`` makes one attempt."""

    def __init__(self, rank: int, world: int, store: Any) -> None:
        self.rank, self.world, self.store = rank, world, store

    def open(self, timeout: float, mib: int = 1) -> tuple[Communicator, str]:
        """(this rank's end, the digest that all ranks of these windows share)"""
        opening = Opening("g", self.store, self.rank, self.world, mib << 20, timeout)
        opening.run()
        watches = {link.rank: link.watch() for link in opening.linked()}

        def release() -> None:
            for watch in watches.values():
                watch.close()
            for base in opening.bases:
                comm._lib.lib().am_window_unmap(base, opening.total)

        live_fds = [watches[r].fileno() if r in watches else -1 for r in range(self.world)]
        end = Communicator(
            "g",
            self.rank,
            opening.bases,
            opening.data_bytes,
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
            except CommError:
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
        Rank(2, 3, store).open(0.5)
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
    hello = {"rank": 1, "nonce": "x", "started": 1 << 62, "to": "guess", "data_bytes": 1, "total": 4096}
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
    opening = Opening("g", dist.HashStore(), 1, 2, 1 << 20, 20, StoreHost(rank=0))
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
