"""Which ranks of a group share a server, on devices whose stores end at their server (A2).

Every rank posts its host's name and its settings in the group's store. All ranks so have the same posts, and come
to the same number or to the same error. Host names decide. ASCEND_MOE_RANKS_PER_SERVER goes before them, for
machines whose host names do not tell servers apart; it counts ranks of the job, so that one value is right for
groups of any of them.
"""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from ascend_moe import settings
from ascend_moe.comm.ballot import StoreBallot
from ascend_moe.comm.board import FIRST_PAUSE_S, LAST_PAUSE_S, STORE_TIMEOUT_S, Board, store_host
from ascend_moe.comm.liveness import born_here, machine_id, pid_namespace, process_gone
from ascend_moe.errors import ArgumentError, CommTimeout, ConfigMismatch
from ascend_moe.native import library, probe_results
from ascend_moe.native.windows import near_stores, ranks_per_server, rdma_flags

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"  # torchrun's: ranks that it has started on this host
_INSTEAD = f"where host names do not tell servers apart, export {settings.RANKS_PER_SERVER.name} on all ranks"


def _local_world() -> int:
    text = os.environ.get(LOCAL_WORLD_SIZE, "").strip()
    return int(text) if text.isascii() and text.isdigit() else 0


@dataclass(frozen=True)
class ServerPost:
    """Holds what one rank says of its server; by default of this process, now.

    Attributes:
        host, boot: the host's name, and what no two running kernels have in common.
        share: ASCEND_MOE_RANKS_PER_SERVER, 0: not set.
        local_world: LOCAL_WORLD_SIZE, 0: not set.
        near_stores: ASCEND_MOE_NEAR_STORES.
        rdma_flags: ASCEND_MOE_RDMA_FLAGS.
        super_pod: HCCL_LOGIC_SUPERPOD_ID, "": not set.
        proven: probes that bring-up has passed, with commas between them, by topology (``TOPOLOGIES``).
        pid, born, pids: of this process, as ``liveness`` has them; the last is the namespace of the first.
        token: of this post alone.
        seen: of the tokens of all posts that this rank has read; "" before it has read all.
    """

    host: str = field(default_factory=lambda: socket.gethostname())
    boot: str = field(default_factory=lambda: machine_id().partition("/")[0])
    share: int = field(default_factory=ranks_per_server)
    local_world: int = field(default_factory=_local_world)
    near_stores: int = field(default_factory=near_stores)
    rdma_flags: int = field(default_factory=rdma_flags)
    super_pod: str = field(default_factory=settings.LOGIC_SUPER_POD.text)
    proven: dict[str, str] = field(default_factory=dict)
    pid: int = field(default_factory=os.getpid)
    born: int = field(default_factory=born_here)
    pids: str = field(default_factory=pid_namespace)
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    seen: str = ""


# ---- the posts of a group

_gathered: weakref.WeakKeyDictionary[Any, tuple[ServerPost, ...]] = weakref.WeakKeyDictionary()
_ballots: weakref.WeakKeyDictionary[Any, StoreBallot] = weakref.WeakKeyDictionary()
_gates: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()  # one thread gathers, others wait
_lock = threading.Lock()


def gather(name: str, group: ProcessGroup, timeout: float, soc: str) -> tuple[ServerPost, ...]:
    """The posts of all ranks of a group, by rank. The first call for a group is collective; the posts stay.

    ``soc``: what this rank runs on, as torch_npu names it.

    Raises:
        CommTimeout: a rank did not come within ``timeout`` seconds; ``.rank`` is the first, ``.ranks`` all.
        PeerLost: the group's store has gone.
    """
    with _lock:
        gate = _gates.setdefault(group, threading.Lock())
    with gate:
        if group not in _gathered:
            c10d: Any = dist.distributed_c10d  # absent where torch was built without it
            store = c10d._world.pg_map[group][1]
            prefix = f"rank {group.rank()}: the servers of group {name!r}"
            world = group.size()
            passed = {
                each: ",".join(sorted(probe_results.proven(soc, each, world))) for each in probe_results.TOPOLOGIES
            }
            board = Board(store, group.rank(), ServerPost(proven=passed), store_host(store, group), prefix, "servers")
            _gathered[group] = _meet(board, group.rank(), world, timeout, prefix)
        return _gathered[group]


def ballot(name: str, group: ProcessGroup) -> StoreBallot | None:
    """The votes of a group in its store; None before ``gather``."""
    posts = _gathered.get(group)
    if posts is None:
        return None
    with _lock:
        if group not in _ballots:
            c10d: Any = dist.distributed_c10d
            store, rank = c10d._world.pg_map[group][1], group.rank()
            key = _seen_of(posts)  # not the votes of an earlier group of this name
            gone = functools.partial(_ended, posts, rank)
            _ballots[group] = StoreBallot(name, rank, group.size(), gone, store, store_host(store, group), key)
        return _ballots[group]


def _ended(posts: Sequence[ServerPost], rank: int, other: int) -> bool:
    """Whether the process of ``other`` has ended, as far as ``rank`` can see that."""
    here, there = posts[rank], posts[other]
    near = (here.boot, here.pids) == (there.boot, there.pids)
    return other != rank and near and there.pid > 0 and process_gone(there.pid, there.born or None)


def _seen_of(posts: Sequence[ServerPost]) -> str:
    return hashlib.sha256(" ".join(post.token for post in posts).encode()).hexdigest()


def meet_again(name: str, group: ProcessGroup, timeout: float, what: str) -> None:
    """Returns when every rank of the group has come here, after ``gather``. Collective; ``what``: unique in a group.

    Raises:
        CommTimeout, PeerLost: as ``gather``.
    """
    c10d: Any = dist.distributed_c10d
    store = c10d._world.pg_map[group][1]
    prefix = f"rank {group.rank()}: {what} of group {name!r}"
    board = Board(store, group.rank(), ServerPost(), store_host(store, group), prefix, what.replace(" ", "_"))
    _meet(board, group.rank(), group.size(), timeout, prefix)


def _meet(board: Board[ServerPost], rank: int, world: int, timeout: float, prefix: str) -> tuple[ServerPost, ...]:
    """A store may still hold the posts of a former group of this name: a rank is there once it has seen all others."""
    others = [other for other in range(world) if other != rank]
    deadline, pause = time.monotonic() + timeout, FIRST_PAUSE_S
    while True:
        late = time.monotonic() >= deadline
        board.exchange(others, max(deadline - time.monotonic(), STORE_TIMEOUT_S))
        posts = board.posts | {rank: board.mine}
        seen = ""
        if len(posts) == world:
            seen = _seen_of([posts[peer] for peer in range(world)])
            if board.mine.seen != seen:
                board.mine = replace(board.mine, seen=seen)
                continue  # the others wait for it
        missing = [peer for peer in others if peer not in posts or not seen or posts[peer].seen != seen]
        if not missing:
            return tuple(posts[peer] for peer in range(world))
        if late:
            absent = [peer for peer in others if peer not in posts] or missing
            noun = "rank" if len(absent) == 1 else "ranks"
            raise CommTimeout(
                f"{prefix}: {noun} {', '.join(map(str, absent))} did not say where they run within {timeout:g} s "
                f"({settings.TIMEOUT_S.name}): every rank of the group must make the same call",
                rank=absent[0],
                ranks=absent,
                phase="open",
            )
        time.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE_S)


# ---- what they say


def proven(name: str, group: ProcessGroup, timeout: float, soc: str) -> frozenset[str]:
    """The probes that bring-up has passed on this machine, the same on all ranks. Collective, as ``gather``.

    Raises:
        ConfigMismatch: they differ between ranks.
        CommTimeout, PeerLost: as ``gather``.
    """
    return agreed_proven(name, group.rank(), gather(name, group, timeout, soc))


def topology(posts: Sequence[ServerPost]) -> str:
    """Of ``probe_results.TOPOLOGIES``: one name on two machines is two servers, and so are two names on one."""
    one = len({(post.host, post.boot) for post in posts}) == 1
    return probe_results.ONE_SERVER if one else probe_results.SEVERAL_SERVERS


def agreed_proven(name: str, rank: int, posts: Sequence[ServerPost]) -> frozenset[str]:
    """What ``proven`` returns, of the posts of all ranks; ``rank``: this one, whose own comes first in errors."""
    where = topology(posts)
    ours, *each = (post.proven.get(where, "") for post in (posts[rank], *posts))
    for other, theirs in enumerate(each):
        if ours != theirs:
            text = f"{ours or 'nothing'} on rank {rank}, {theirs or 'nothing'} on rank {other}"
            raise ConfigMismatch(
                f"what bring-up has proven differs in group {name!r} ({where.replace('-', ' ')}): {text}: run "
                f"`{probe_results.COMMAND}` on all ranks at once, or export {settings.PROVEN.name} alike on every rank",
                field=settings.PROVEN.name,
                rank=other,
                ours=ours,
                theirs=theirs,
            )
    return frozenset(filter(None, ours.split(",")))


def need_one_super_pod(name: str, group: ProcessGroup, timeout: float, soc: str) -> None:
    """Refuse a group whose ranks are on several super-pods of A3, as far as their settings tell. Collective.

    Raises:
        ArgumentError: they are.
        CommTimeout, PeerLost: as ``gather``.
    """
    refuse_super_pods(name, gather(name, group, timeout, soc))


def refuse_super_pods(name: str, posts: Sequence[ServerPost]) -> None:
    """What ``need_one_super_pod`` does, of the posts of all ranks."""
    pods = [(rank, post.super_pod) for rank, post in enumerate(posts) if post.super_pod]
    other = next((here for here in pods if here[1] != pods[0][1]), None)
    if other is not None:
        said = " and ".join(f"{pod} on rank {rank}" for rank, pod in (pods[0], other))
        rule = library.lib().am_super_pod_rule().decode()
        raise ArgumentError(
            f"group {name!r}: {settings.LOGIC_SUPER_POD.name} is {said}: {rule} (`ascend-moe plan --super-pods "
            f"{len({pod for _, pod in pods})}` says its HCCL_BUFFSIZE); make a group of the ranks of each super-pod",
            argument="group_ep",
        )


def ranks_sharing(name: str, group: ProcessGroup, timeout: float, soc: str) -> int:
    """How many ranks of the group share each server: 1..W, a divisor of W. Collective, as ``gather``.

    Raises:
        ConfigMismatch: a setting, or what tells servers apart, differs between ranks.
        ArgumentError: servers have different numbers of the group's ranks, or ranks that do not follow one another.
        CommTimeout, PeerLost: as ``gather``.
    """
    posts = gather(name, group, timeout, soc)
    ranks = [dist.get_global_rank(group, rank) for rank in range(group.size())]
    return agreed(name, group.rank(), posts, ranks, dist.get_world_size())


def agreed(name: str, rank: int, posts: Sequence[ServerPost], ranks: Sequence[int], job: int) -> int:
    """The number that ``ranks_sharing`` returns, of the posts of all ranks.

    Args:
        rank: this one; its own values come first in errors.
        ranks: of the job, by rank of the group.
        job: ranks of the job.
    """
    mine = posts[rank]
    for other, post in enumerate(posts):
        for setting, ours, theirs in (
            (settings.RANKS_PER_SERVER, mine.share, post.share),
            (settings.NEAR_STORES, mine.near_stores, post.near_stores),
            (settings.RDMA_FLAGS, mine.rdma_flags, post.rdma_flags),
        ):
            if ours != theirs:
                text = f"{setting.name} differs in group {name!r}: {ours} on rank {rank}, {theirs} on rank {other}"
                fix = "export one value on every rank"
                raise ConfigMismatch(f"{text}: {fix}", field=setting.name, rank=other, ours=ours, theirs=theirs)
    if mine.share:
        fix = f"{settings.RANKS_PER_SERVER.name} is {mine.share}, which counts ranks of the job"
        return _share_of_each(name, [f"server {peer // mine.share}" for peer in ranks], fix)
    _judge_names(name, posts, whole_job=len(ranks) == job)
    return _share_of_each(name, [post.host for post in posts], _INSTEAD)


def _judge_names(name: str, posts: Sequence[ServerPost], whole_job: bool) -> None:
    """Host names must agree with what else is known of the servers."""
    first: dict[str, int] = {}
    hosts = [post.host for post in posts]
    for rank, post in enumerate(posts):
        one = first.setdefault(post.host, rank)
        if posts[one].boot != post.boot:
            raise ConfigMismatch(
                f"ranks {one} and {rank} of group {name!r} both have the host name {post.host!r}, but run on two "
                f"machines: give each server a name of its own, or, {_INSTEAD}",
                field="host name",
                rank=rank,
                ours=posts[one].boot,
                theirs=post.boot,
            )
        here, local = hosts.count(post.host), post.local_world
        if local and (here > local or (whole_job and here < local)):
            raise ConfigMismatch(
                f"{LOCAL_WORLD_SIZE} is {local} on rank {rank} of group {name!r}, but {here} of its {len(posts)} ranks "
                f"have that one's host name {post.host!r}: {_INSTEAD}",
                field=LOCAL_WORLD_SIZE,
                rank=rank,
                ours=here,
                theirs=local,
            )


def _share_of_each(name: str, servers: Sequence[str], remark: str) -> int:
    """Returns the consecutive ranks of a server, equal on all, by each rank's server. ``remark`` ends an error."""

    def refuse(text: str) -> NoReturn:
        fix = f"make the group of as many ranks of each server, server by server ({remark})"
        raise ArgumentError(f"group {name!r}: {text}: {fix}", argument="group_ep")

    begins: dict[str, int] = {}
    runs: list[tuple[str, int]] = []  # server, ranks that follow one another
    for server, run in groupby(servers):
        begin = sum(count for _, count in runs)
        if server in begins:
            between = begin - 1
            refuse(
                f"ranks {begins[server]} and {begin} are on {server!r}, but rank {between} between them is on "
                f"{servers[between]!r}, and ranks of a server must follow one another"
            )
        begins[server] = begin
        runs.append((server, len(list(run))))
    for server, count in runs:
        if count != runs[0][1]:
            refuse(
                f"{runs[0][1]} of its {len(servers)} ranks are on {runs[0][0]!r} (from rank 0 on), {count} on "
                f"{server!r} (from rank {begins[server]} on), and an Ascend910B needs as many on every server"
            )
    return runs[0][1]
