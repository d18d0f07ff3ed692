"""Which ranks of a group share a server, on devices whose stores cannot leave their server (A2).

Every rank stores its host name and settings in the group's store, so all ranks have the same records and compute the
same number or raise the same error. Host names decide. ASCEND_MOE_RANKS_PER_SERVER takes precedence, for machines whose
host names do not distinguish servers; it counts ranks of the job, so that one value is right for all its groups.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ascend_moe import settings
from ascend_moe.comm.records import (
    ALIKE_ON_SERVERS,
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    STORE_TIMEOUT_S,
    ProcessRecord,
    Records,
    compare,
    store_of,
)
from ascend_moe.comm.vote import StoreVote
from ascend_moe.errors import ArgumentError, CommTimeout, ConfigMismatch
from ascend_moe.native import library, probe_results
from ascend_moe.native.liveness import process_gone

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"  # torchrun's: ranks that it has started on this host
_INSTEAD = f"if host names do not distinguish servers, export {settings.RANKS_PER_SERVER.name} on all ranks"


DEVICES_OF_A_MODULE = 8


def module_of(soc: str) -> int:
    """Return the number of the module of 8 devices that the current NPU belongs to on an A2; 0 on other SoCs.

    HCCL treats a module as a server. The number is the driver's physical device id divided by 8.
    """
    if not soc.startswith("Ascend910B"):
        return 0
    index = int(torch.npu.current_device())  # type: ignore[attr-defined,unused-ignore]
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "").split(",")
    device = int(visible[index]) if index < len(visible) and visible[index].strip().isdigit() else index
    found = ctypes.c_int32()
    with contextlib.suppress(OSError, AttributeError):  # older runtimes do not have both
        runtime = ctypes.CDLL("libascendcl.so")
        if (
            runtime.aclrtGetLogicDevIdByUserDevId(index, ctypes.byref(found)) == 0
            and runtime.aclrtGetPhyDevIdByLogicDevId(found.value, ctypes.byref(found)) == 0
        ):
            device = found.value
    return device // DEVICES_OF_A_MODULE


def _local_world() -> int:
    text = os.environ.get(LOCAL_WORLD_SIZE, "").strip()
    return int(text) if text.isascii() and text.isdigit() else 0


@dataclass(frozen=True)
class ServerRecord(ProcessRecord):
    """The record of one rank about its server; the defaults describe this process.

    Attributes:
        local_world: torchrun's LOCAL_WORLD_SIZE, 0: not set.
        super_pod: HCCL_LOGIC_SUPERPOD_ID, "": not set.
        proven: passed bring-up probes, comma-separated, by topology (``TOPOLOGIES``).
        module: the module of 8 devices of its NPU (``module_of``).
        links: how the rank wants HCCL to link a group on several servers (`npu_communicator.LINKS`); "": unset.
        seen: digest of the tokens of all records that this rank has read; "" before it has read all.
    """

    local_world: int = field(default_factory=_local_world)
    super_pod: str = field(default_factory=settings.LOGIC_SUPER_POD.text)
    proven: dict[str, str] = field(default_factory=dict)
    module: int = 0
    links: str = ""
    seen: str = ""


# ---- the records of a group

_gathered: weakref.WeakKeyDictionary[Any, tuple[ServerRecord, ...]] = weakref.WeakKeyDictionary()
_votes: weakref.WeakKeyDictionary[Any, StoreVote] = weakref.WeakKeyDictionary()
_gates: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()  # one thread gathers at a time
_lock = threading.Lock()


def gather(name: str, group: ProcessGroup, timeout: float, soc: str) -> tuple[ServerRecord, ...]:
    """Return the records of all ranks of a group, by rank. The first call for a group is collective.

    ``soc``: torch_npu's name of this rank's SoC.

    Raises:
        CommTimeout: a rank did not arrive within ``timeout`` seconds; ``.rank`` is the first, ``.ranks`` are all.
        PeerLost: the group's store has failed.
    """
    with _lock:
        gate = _gates.setdefault(group, threading.Lock())
    with gate:
        if group not in _gathered:
            prefix, world = f"rank {group.rank()}: the servers of group {name!r}", group.size()
            passed = {
                each: ",".join(sorted(probe_results.proven(soc, each, world))) for each in probe_results.TOPOLOGIES
            }
            mine = ServerRecord(proven=passed, module=module_of(soc))
            _gathered[group] = _exchange(
                Records(*store_of(group), "servers", group.rank(), mine, prefix), world, timeout
            )
        return _gathered[group]


def vote(name: str, group: ProcessGroup) -> StoreVote | None:
    """Return the object by which a group's ranks vote in its store (`agree`), or None before ``gather``."""
    records = _gathered.get(group)
    if records is None:
        return None
    with _lock:
        if group not in _votes:
            rank, key = group.rank(), _seen_of(records)  # excludes votes of an earlier group of this name
            gone = functools.partial(_ended, records, rank)
            _votes[group] = StoreVote(name, rank, group.size(), gone, *store_of(group), key)
        return _votes[group]


def _ended(records: Sequence[ServerRecord], rank: int, other: int) -> bool:
    """Return whether the process of ``other`` has ended, as far as visible to ``rank``."""
    here, there = records[rank], records[other]
    visible = (here.machine, here.pid_space) == (there.machine, there.pid_space)
    return other != rank and visible and there.pid > 0 and process_gone(there.pid, there.born or None)


def _seen_of(records: Sequence[ServerRecord]) -> str:
    return hashlib.sha256(" ".join(record.token for record in records).encode()).hexdigest()


def synchronize(name: str, group: ProcessGroup, timeout: float, what: str) -> None:
    """Wait, at most ``timeout`` seconds, until every rank of the group has called this. Collective, a barrier.

    ``name``: the group's, for errors. ``what``: the barrier's, never used before on this group. Raises CommTimeout and
    PeerLost as ``gather``.
    """
    _exchange_again(ServerRecord(), name, group, timeout, what)


def _exchange_again(
    mine: ServerRecord, name: str, group: ProcessGroup, timeout: float, what: str
) -> tuple[ServerRecord, ...]:
    prefix, key = f"rank {group.rank()}: {what} of group {name!r}", what.replace(" ", "_")
    return _exchange(Records(*store_of(group), key, group.rank(), mine, prefix), group.size(), timeout)


def agree_on_links(name: str, group: ProcessGroup, timeout: float, links: str) -> None:
    """Wait until every rank of the group has called this with the same ``links`` (of `npu_communicator.LINKS`).

    Raises:
        ConfigMismatch: another rank passes different ``links``.
        CommTimeout, PeerLost: as ``gather``.
    """
    for rank, record in enumerate(_exchange_again(ServerRecord(links=links), name, group, timeout, "links")):
        if record.links != links:
            raise ConfigMismatch(
                f"the first op of group {name!r} needs {links} on rank {group.rank()}, {record.links} on rank {rank}: "
                f"pass the same comm_alg, and export {settings.COMM_ALG.name} and HCCL_INTRA_* alike, on all ranks",
                field="comm_alg",
                rank=rank,
                ours=links,
                theirs=record.links,
            )


def _exchange(store: Records[ServerRecord], world: int, timeout: float) -> tuple[ServerRecord, ...]:
    """Return all ranks' records. The store may contain stale ones: a rank is present once it has seen all others."""
    others = [other for other in range(world) if other != store.rank]
    deadline, pause = time.monotonic() + timeout, FIRST_PAUSE_S
    while True:
        late = time.monotonic() >= deadline
        store.exchange(others, max(deadline - time.monotonic(), STORE_TIMEOUT_S))
        records = store.found | {store.rank: store.mine}
        seen = ""
        if len(records) == world:
            seen = _seen_of([records[peer] for peer in range(world)])
            if store.mine.seen != seen:
                store.mine = replace(store.mine, seen=seen)
                continue  # publish it: the others wait for it
        missing = [peer for peer in others if peer not in records or not seen or records[peer].seen != seen]
        if not missing:
            return tuple(records[peer] for peer in range(world))
        if late:
            absent = [peer for peer in others if peer not in records] or missing
            noun = "rank" if len(absent) == 1 else "ranks"
            raise CommTimeout(
                f"{store.prefix}: {noun} {', '.join(map(str, absent))} did not report their host within {timeout:g} s "
                f"({settings.TIMEOUT_S.name}): every rank of the group must make the same call",
                rank=absent[0],
                ranks=absent,
                phase="open",
            )
        time.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE_S)


# ---- evaluation


def topology(records: Sequence[ServerRecord]) -> str:
    """Return ONE_SERVER if all records have one host name, boot id and module, else SEVERAL_SERVERS."""
    one = len({(record.host, record.machine, record.module) for record in records}) == 1
    return probe_results.ONE_SERVER if one else probe_results.SEVERAL_SERVERS


def agreed_proven(name: str, rank: int, records: Sequence[ServerRecord]) -> frozenset[str]:
    """Return the bring-up probes that have passed on every rank; ``rank``: this rank, named first in errors.

    Raises:
        ConfigMismatch: ranks have passed different probes.
    """
    where = topology(records)
    ours, *each = (record.proven.get(where, "") for record in (records[rank], *records))
    for other, theirs in enumerate(each):
        if ours != theirs:
            text = f"{ours or 'nothing'} on rank {rank}, {theirs or 'nothing'} on rank {other}"
            raise ConfigMismatch(
                f"bring-up results differ in group {name!r} ({where.replace('-', ' ')}): {text}: run "
                f"`{probe_results.COMMAND}` on all ranks at once, or export one {settings.PROVEN.name} on every rank",
                field=settings.PROVEN.name,
                rank=other,
                ours=ours,
                theirs=theirs,
            )
    return frozenset(filter(None, ours.split(",")))


def refuse_super_pods(name: str, records: Sequence[ServerRecord]) -> None:
    """Raise ArgumentError if HCCL_LOGIC_SUPERPOD_ID differs between ranks: the group spans several super-pods of A3."""
    pods = [(rank, record.super_pod) for rank, record in enumerate(records) if record.super_pod]
    other = next((here for here in pods if here[1] != pods[0][1]), None)
    if other is not None:
        said = " and ".join(f"{pod} on rank {rank}" for rank, pod in (pods[0], other))
        rule = library.lib().am_super_pod_rule().decode()
        raise ArgumentError(
            f"group {name!r}: {settings.LOGIC_SUPER_POD.name} is {said}: {rule} (`ascend-moe plan --super-pods "
            f"{len({pod for _, pod in pods})}` prints CANN's HCCL_BUFFSIZE); create one group per super-pod",
            argument="group_ep",
        )


def agreed(name: str, rank: int, records: Sequence[ServerRecord], ranks: Sequence[int], job: int) -> int:
    """Return the ranks of the group per server: 1..W, a divisor of W.

    Args:
        rank: this rank, named first in errors.
        ranks: for each rank of the group, its rank in the job (default process group).
        job: number of ranks of the job.

    Raises:
        ConfigMismatch: a setting differs between ranks, or host names contradict boot ids or LOCAL_WORLD_SIZE.
        ArgumentError: servers have different numbers of the group's ranks, or non-contiguous ranks, or
            ASCEND_MOE_RANKS_PER_SERVER joins modules that HCCL treats as servers.
    """
    mine = records[rank]
    compare(name, rank, mine, dict(enumerate(records)), ALIKE_ON_SERVERS)
    if share := mine.ranks_per_server:
        _refuse_whole_modules(name, records, ranks, share)
        fix = f"{settings.RANKS_PER_SERVER.name} is {share}, which counts ranks of the job"
        return _share_of_each(name, [f"server {peer // share}" for peer in ranks], fix)
    _judge_names(name, records, whole_job=len(ranks) == job)
    return _share_of_each(name, _server_names(records), _INSTEAD)


def _server_names(records: Sequence[ServerRecord]) -> list[str]:
    """By rank: its host, and its module of devices where the group has ranks in several of that host."""
    modules = {host: {each.module for each in records if each.host == host} for host in {r.host for r in records}}
    return [
        record.host if len(modules[record.host]) == 1 else f"{record.host}, module {record.module}"
        for record in records
    ]


def _refuse_whole_modules(name: str, records: Sequence[ServerRecord], ranks: Sequence[int], share: int) -> None:
    """Raise ArgumentError where a server of ``share`` ranks of the job is what HCCL takes for two."""
    names = _server_names(records)
    first: dict[int, int] = {}
    for rank, of_job in enumerate(ranks):
        one = first.setdefault(of_job // share, rank)
        if records[one].host == records[rank].host and names[one] != names[rank]:
            raise ArgumentError(
                f"group {name!r}: {settings.RANKS_PER_SERVER.name} is {share}, but ranks {one} and {rank} are on "
                f"{names[one]!r} and {names[rank]!r}: HCCL takes modules of {DEVICES_OF_A_MODULE} devices for servers, "
                "so export the number of ranks of a module",
                argument="group_ep",
            )


def _judge_names(name: str, records: Sequence[ServerRecord], whole_job: bool) -> None:
    """Raise ConfigMismatch if host names contradict boot ids or LOCAL_WORLD_SIZE."""
    first: dict[str, int] = {}
    hosts = [record.host for record in records]
    for rank, record in enumerate(records):
        one = first.setdefault(record.host, rank)
        if records[one].machine != record.machine:
            raise ConfigMismatch(
                f"ranks {one} and {rank} of group {name!r} both have the host name {record.host!r}, but run on two "
                f"machines: give each server a unique host name, or, {_INSTEAD}",
                field="host name",
                rank=rank,
                ours=records[one].machine,
                theirs=record.machine,
            )
        here, local = hosts.count(record.host), record.local_world
        if local and (here > local or (whole_job and here < local)):
            raise ConfigMismatch(
                f"{LOCAL_WORLD_SIZE} is {local} on rank {rank} of group {name!r}, but {here} of its {len(hosts)} ranks "
                f"have its host name {record.host!r}: {_INSTEAD}",
                field=LOCAL_WORLD_SIZE,
                rank=rank,
                ours=here,
                theirs=local,
            )


def _share_of_each(name: str, servers: Sequence[str], remark: str) -> int:
    """Return the contiguous ranks per server, equal for all, from each rank's server. ``remark`` ends an error."""

    def refuse(text: str) -> NoReturn:
        fix = f"create the group from equally many contiguous ranks of each server ({remark})"
        raise ArgumentError(f"group {name!r}: {text}: {fix}", argument="group_ep")

    begins: dict[str, int] = {}
    runs: list[tuple[str, int]] = []  # server, contiguous ranks
    for server, run in groupby(servers):
        begin = sum(count for _, count in runs)
        if server in begins:
            between = begin - 1
            refuse(
                f"ranks {begins[server]} and {begin} are on {server!r}, but rank {between} between them is on "
                f"{servers[between]!r}, and ranks of a server must be contiguous"
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
