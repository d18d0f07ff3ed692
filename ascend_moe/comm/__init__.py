"""Communicators by name: group_ep of a process group or of a LocalCluster.

``comm_name`` gives the name, the ops look it up, ``close`` closes it. On an HCCL group the name is
HCCL's own; on any other group the windows lie in shared memory of one machine, are opened
collectively on first use, and the c10d group name is the key.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import resource
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ascend_moe import settings
from ascend_moe.comm import registered, threads
from ascend_moe.comm.communicator import Communicator
from ascend_moe.comm.liveness import out_of_descriptors
from ascend_moe.comm.records import Records, store_of
from ascend_moe.comm.rendezvous import Opening
from ascend_moe.comm.threads import LocalCluster
from ascend_moe.errors import ArgumentError, AscendMoeError, need, with_typed_errors
from ascend_moe.native import library
from ascend_moe.native.windows import timeout_s, window_data_bytes, window_lent_bytes
from ascend_moe.settings import MAX_WORLD

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ascend_moe.comm.vote import StoreVote

__all__ = ["Communicator", "LocalCluster", "close", "comm_name", "lookup", "window_empty"]

MAX_NAME = 127  # characters of group_ep, as in CANN


@dataclass(frozen=True)
class Device:
    """Ends whose windows are in a device's memory: how ``register_device`` reaches them."""

    known: Callable[[str], Any]  # the end of a group_ep that an op has opened, None without one
    find: Callable[[str, int, int, torch.device], Any]  # the end of a group_ep, made when there is none
    close: Callable[[str], None]  # forgets an end; idempotent
    vote: Callable[[str, ProcessGroup], StoreVote | None]  # of a group; None before its first op


_devices: dict[str, Device] = {}  # by torch's name of the device type
# By group_ep and rank: the group, and its communicator.
_entries: dict[tuple[str, int], tuple[weakref.ref[ProcessGroup], Communicator]] = {}
_subgroups: dict[str, Communicator] = {}  # by group_ep: made by shrink, unknown to torch.distributed
_gates: dict[tuple[str, int], threading.Lock] = {}  # one opening of a name at a time
_handed_out: dict[str, weakref.ref[ProcessGroup]] = {}  # names that c10d does not know: HCCL's


def register_device(kind: str, device: Device) -> None:
    """Makes lookups and ``close`` reach the ends on one kind of device; called where they are implemented."""
    _devices[kind] = device


def npu_vote(group_ep: str, group: ProcessGroup) -> StoreVote | None:
    """Return the votes of an HCCL group, or None if no op has run on it here."""
    return _devices["npu"].vote(group_ep, group) if "npu" in _devices else None


def _known_on_device(group_ep: str) -> Any:
    """The end of this name that an op on a device has opened, if any."""
    return next((end for device in _devices.values() if (end := device.known(group_ep)) is not None), None)


def comm_name(process_group: ProcessGroup | None = None) -> str:
    """The ``group_ep`` of a process group, for the dispatch and combine ops.

    Args:
        process_group: None for the default group; or as `group_of`. HCCL: HCCL's communicator name. Any other
            backend: the group's name in c10d; the first call on a group opens its windows, which is collective,
            and so is the first after ``close``.

    Windows hold HCCL_BUFFSIZE MiB (default 200) a rank and are shared memory: all ranks on one machine.

    Raises:
        ArgumentError: no such group, or not a member of it.
        CommTimeout, PeerLost: a rank did not come within ASCEND_MOE_TIMEOUT_S, or died.
        ConfigMismatch: HCCL_BUFFSIZE or the machine differs between the ranks.
    """
    group = group_of("process_group", process_group)
    if not _initialized() or group not in _c10d()._world.pg_map:
        raise _no_group("process_group", "is not a live process group with this rank as a member; ")
    if has_hccl(group):
        hccl: Any = group._get_backend(torch.device("npu"))
        name = str(hccl.get_hccl_comm_name(group.rank()))
        _handed_out[name] = weakref.ref(group)
        return name
    name = str(group.group_name)
    _end(name, group)
    return name


def group_of(argument: str, given: object = None) -> ProcessGroup:
    """The live process group that a caller means by ``given``. Opens nothing.

    Args:
        argument: its name in errors.
        given: a process group with this rank in it; its name; a DeviceMesh of one dimension; an object with such a
            group as ``device_group`` (vLLM's and SGLang's GroupCoordinator). None: the default group.

    Raises:
        ArgumentError: it is none of these, the group was destroyed, or this rank is not in it.
    """
    if isinstance(given, str):
        cluster, found = find(given)
        if subgroup(given) is not None:
            raise _no_group(argument, f"{given!r} was made by shrink and has no process group; ")
        if cluster is not None:
            raise _no_group(argument, f"{given!r} is a LocalCluster's name, which has no process group; ")
        if found is None:
            raise _no_group(argument, f"{given!r} names no live process group; ")
        return found
    group: Any = getattr(given, "device_group", given)
    if group is None and given is None and _initialized():
        group = dist.group.WORLD
    if hasattr(group, "get_group") and hasattr(group, "mesh_dim_names"):  # a DeviceMesh
        if group.ndim != 1:
            names = group.mesh_dim_names or range(group.ndim)
            raise _no_group(argument, f"is a DeviceMesh of dimensions {', '.join(map(str, names))}; ")
        group = group.get_group()
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        if given is None and not _initialized():
            raise ArgumentError(
                f"{argument} needs torch.distributed: call torch.distributed.init_process_group first, "
                "or run the ranks as threads with ascend_moe.LocalCluster",
                argument=argument,
            )
        raise _no_group(argument, f"is a {type(group).__name__}, not a live process group; ")
    if not (_initialized() and group in _c10d()._world.pg_map) and _has_name(group):
        raise _no_group(argument, "is not a live process group with this rank as a member; ")
    return group


def _has_name(group: ProcessGroup) -> bool:
    """Whether c10d has made the group. One made by hand has none, but its collectives work."""
    try:
        return bool(group.group_name)
    except RuntimeError:
        return False


def name_of(argument: str, given: object = None) -> str:
    """The ``group_ep`` of ``given``: a name stays, known or not; of all else that `group_of` takes, `comm_name`.

    Raises:
        ArgumentError: as `group_of`. Other errors: as `comm_name`, which opens the windows of a group, collectively.
    """
    if given == "":
        raise _no_group(argument, "is an empty name; ")
    return given if isinstance(given, str) else comm_name(group_of(argument, given))


def need_name(argument: str, given: object) -> None:
    """Raise unless ``given`` may be the name of a group: torch's operators take no group itself."""
    kind = type(given).__name__
    need(isinstance(given, str), argument, "is a {}; it must be a str: use ascend_moe.comm_name(process_group)", kind)


def _no_group(argument: str, why: str) -> ArgumentError:
    fix = "pass a ProcessGroup, a DeviceMesh of one dimension, a GroupCoordinator, or the name of one"
    return ArgumentError(f"{argument} {why}{fix}", argument=argument)


def find(group_ep: object) -> tuple[LocalCluster | None, ProcessGroup | None]:
    """The cluster or the live process group of this name; neither for an unknown one or a subgroup's."""
    if not isinstance(group_ep, str):
        return None, None
    cluster = threads.find(group_ep)
    return cluster, _resolve(group_ep) if cluster is None and group_ep else None


def process_group(group_ep: str) -> ProcessGroup | None:
    """The live process group of this name; None where it is a LocalCluster's, or nobody's."""
    return find(group_ep)[1]


def size_and_rank(group_ep: str) -> tuple[int, int | None] | None:
    """World size and rank of a known group, without opening anything; None for an unknown name.

    The rank is None where the calling thread could be any rank.
    """
    if (made := subgroup(group_ep)) is not None:
        return made.world, made.rank
    cluster, group = find(group_ep)
    if cluster is not None:
        return cluster.world_size, cluster.rank_here()
    return None if group is None else (group.size(), group.rank())


# torch.compile cannot trace the lookup. torch.compiler.assume_constant_result is this line, but imports torch._dynamo:
# a second for every process.
size_and_rank._dynamo_marked_constant = True  # type: ignore[attr-defined]


def device_of(group_ep: str) -> torch.device:
    """Where the group's windows are: the current NPU for an HCCL group, else the CPU."""
    _, group = find(group_ep)
    if group is None or not _names_hccl(group_ep, group):
        return torch.device("cpu")
    return _current_npu()


def _current_npu() -> torch.device:
    return torch.device("npu", torch.npu.current_device())  # type: ignore[attr-defined,unused-ignore]


def lookup(group_ep: str, ep_world_size: int, ep_rank_id: int) -> Communicator:
    """This rank's open communicator. For a process group the first lookup opens it, collectively.

    Raises:
        ArgumentError: ``.argument`` is group_ep, ep_world_size or ep_rank_id.
        CommTimeout, PeerLost, ConfigMismatch: as ``comm_name``.
    """
    _check_name(group_ep)
    if (made := subgroup(group_ep)) is not None:
        _check_place(group_ep, made.world, made.rank, ep_world_size, ep_rank_id)
        return made
    cluster, group = find(group_ep)
    if cluster is not None:
        _check_place(group_ep, cluster.world_size, cluster.rank_here(), ep_world_size, ep_rank_id)
        return cluster.end(ep_rank_id)
    if group is None:
        raise unknown(group_ep)
    _check_place(group_ep, group.size(), group.rank(), ep_world_size, ep_rank_id)
    if _names_hccl(group_ep, group):
        raise _wrong_group(
            f"group_ep={group_ep!r} is an HCCL communicator, whose windows are on NPUs, but the tensors are "
            "on cpu: move them to the NPU, or use the name of a gloo group"
        )
    return _end(group_ep, group)


def ranks_per_server(group_ep: str, ep_world_size: int, ep_rank_id: int) -> int:
    """Ranks that share a server, 0 or W for one server: ranks of other servers are reached by RDMA, as on an A2.

    On an A2 the host names of the group's ranks tell it (docs/cluster.md), on other NPUs it is 0. When it is above 0
    and below ep_world_size, assist_info_for_combine begins with the BS*K words of expand_idx and has no triples.

    Raises:
        As ``lookup``, which opens a communicator that is not open yet.
    """
    _check_name(group_ep)
    end = _known_on_device(group_ep)
    if end is None:
        _, group = find(group_ep)
        if "npu" in _devices and group is not None and has_hccl(group):
            end = _devices["npu"].find(group_ep, ep_world_size, ep_rank_id, _current_npu())
        else:
            end = lookup(group_ep, ep_world_size, ep_rank_id)
    return int(end.ranks_per_server)


def algorithm_of(group_ep: str) -> str:
    """Returns what this rank's last op on the group ran: "window", "direct", "hierarchy", or "" before any.

    Args:
        group_ep: name of the group, as the ops take it.

    Raises:
        ArgumentError: the name is no group's.
    """
    _check_name(group_ep)
    return algorithm_on(group_ep, None)


def algorithm_on(group_ep: str, rank: int | None) -> str:
    """`algorithm_of` for a rank; None: the calling thread's. It waits while that rank is in an op."""
    on_device = _known_on_device(group_ep)
    if on_device is not None:
        return str(on_device.algorithm)
    end = communicator_here(group_ep, rank)
    return "" if end is None else end.algorithm


def epoch_on(group_ep: str, rank: int) -> int:
    """The number on the wire of a rank's last op on the group; 0: unknown, as on an NPU, which counts by itself."""
    if _known_on_device(group_ep) is not None:
        return 0
    end = communicator_here(group_ep, rank, opens=False)
    return 0 if end is None else end.epoch


def communicator_here(group_ep: str, rank: int | None = None, opens: bool = True) -> Communicator | None:
    """Return a rank's communicator in this process, or None if it is not open; ``opens``: a LocalCluster's is opened.

    ``rank``: None for the calling thread's.
    """
    if (made := subgroup(group_ep)) is not None:
        return made
    cluster, group = find(group_ep)
    if cluster is not None:
        rank = (cluster.rank_here() or 0) if rank is None else rank
        return cluster.end(rank) if opens else cluster.open_end(rank)
    if group is None:
        raise unknown(group_ep)
    return _if_open(group_ep, group)


@with_typed_errors
def window_empty(
    shape: Sequence[int] | int, *, dtype: torch.dtype, group_ep: str, ep_world_size: int, ep_rank_id: int
) -> torch.Tensor:
    """A tensor in this rank's window, for the rows that one combine with ``comm_alg="direct"`` shall send.

    That combine publishes the rows where they lie, copies nothing, and so consumes the tensor: other ranks may
    read it until this rank's next op has returned. A consumed tensor must not be written, and passing it to a
    direct combine again raises. Take a new tensor for every combine and drop the old one: its memory is free
    one op later. To every other op it is a tensor like any other; a combine of another algorithm
    copies it and leaves it as it was. ``grouped_mlp(..., out=)`` writes into it.

    Memory is touched where rows are written, so a shape for the most rows that may arrive costs no more than
    those that do. All tensors that live, and the last consumed one, share ASCEND_MOE_LENT_MIB MiB a rank: on CPUs
    memory behind the window (default: HCCL_BUFFSIZE more), on NPUs a part of HCCL_BUFFSIZE (default: none). On NPUs
    a tensor must not outlive its process group.

    Args:
        shape: sizes, e.g. those of dispatch's expand_x: ``(A, H)``.
        dtype: bf16, fp16 or fp32, as combine takes expand_x.
        group_ep, ep_world_size, ep_rank_id: as for dispatch and combine. Before a group's first op this
            opens its windows, which is collective.

    Returns:
        A contiguous tensor on the CPU, or on the current NPU for the name of an HCCL group, its values undefined.
        On the CPU it stays valid, as memory, after ``close``.

    Raises:
        ArgumentError: shape or dtype, or the group, as the ops say it.
        WindowTooSmall: no room. ``.needed_mib`` for ``.variable``; ``.held`` tensors hold space.
        CommTimeout, PeerLost, ConfigMismatch: of the opening.
        Other errors: the communicator has failed before.
    """
    sizes, size = registered.byte_size(shape, dtype)
    _, group = find(group_ep)
    if group is not None and _names_hccl(group_ep, group):
        end = _devices["npu"].find(group_ep, ep_world_size, ep_rank_id, _current_npu())
        with end.end:
            made: torch.Tensor = end.lend(sizes, size, dtype)
            return made
    end = lookup(group_ep, ep_world_size, ep_rank_id)
    end.raise_if_failed()
    if size == 0:
        return torch.empty(sizes, dtype=dtype, device="cpu")
    return registered.tensor_of(end.lend(size), sizes, dtype)


def hccl_group(group_ep: str, ep_world_size: int, ep_rank_id: int) -> ProcessGroup:
    """The process group of an HCCL communicator's name, for ops on an NPU. Opens nothing.

    Raises:
        ArgumentError: no communicator of HCCL has that name (one of another backend may), or
            ep_world_size or ep_rank_id is not this rank's.
    """
    _check_name(group_ep)
    cluster, group = find(group_ep)
    if cluster is not None or (group is not None and not has_hccl(group)):
        raise _wrong_group(
            f"group_ep={group_ep!r} has its windows in CPU memory, but the tensors are on an NPU: use the "
            "name of an HCCL group (init_process_group('hccl')), or move the tensors to the CPU"
        )
    if group is None:
        raise unknown(group_ep, hccl=True)
    if not _names_hccl(group_ep, group):
        raise _wrong_group(
            f"group_ep={group_ep!r} is c10d's name of an HCCL group, ops on an NPU need HCCL's own: "
            "use ascend_moe.comm_name(process_group)"
        )
    _check_place(group_ep, group.size(), group.rank(), ep_world_size, ep_rank_id)
    return group


def close(group_ep: str) -> None:
    """Closes this rank's end. Local and idempotent; the next use opens fresh windows, collectively.

    A LocalCluster's name: in a rank's function that rank's end, outside of ``run`` the ends of all ranks.
    Peers that still use the communicator see this rank as lost. A name of HCCL: what this process knows of
    it; the windows belong to HCCL, so after a fatal error ops on that group fail until the process group is
    destroyed and made anew. The traceback of a fatal error loses the variables of the calls that it has ended, so that
    an error which is kept does not keep tensors of `window_empty`, and with them the window.

    Raises:
        CommBusy: an op of another thread still runs on it, two seconds after its deadline.
        ArgumentError: group_ep is no name at all.
    """
    _check_name(group_ep)
    cluster = threads.find(group_ep)
    if cluster is not None:
        cluster.close()
    if (made := _subgroups.get(group_ep)) is not None:
        try:
            made.close()
        finally:
            if made.closed:
                _subgroups.pop(group_ep, None)
    for device in _devices.values():
        device.close(group_ep)
    for key in [key for key in list(_entries) if key[0] == group_ep]:
        with _gates.setdefault(key, threading.Lock()):
            if key in _entries:
                _entries[key][1].close()
                _entries.pop(key, None)


# ---- names


def _check_name(group_ep: str) -> None:
    if not isinstance(group_ep, str) or not 1 <= len(group_ep.encode()) <= MAX_NAME:
        size = f" of {len(group_ep.encode())} bytes" if isinstance(group_ep, str) else ""
        raise _wrong_group(
            f"group_ep must be a str of 1..{MAX_NAME} bytes in UTF-8, not a {type(group_ep).__name__}{size}: "
            f"use ascend_moe.comm_name(process_group)"
        )


def _wrong_group(text: str) -> ArgumentError:
    return ArgumentError(text, argument="group_ep")


def _check_place(name: str, world: int, rank: int | None, ep_world_size: int, ep_rank_id: int) -> None:
    """Compares the op's arguments with the group; ``rank`` is None where this thread could be any rank."""
    if ep_world_size != world:
        text = f"ep_world_size={ep_world_size} but group {name!r} has {world} ranks"
        raise ArgumentError(text, argument="ep_world_size")
    if rank is not None and ep_rank_id != rank:
        text = f"ep_rank_id={ep_rank_id} but this is rank {rank} of group {name!r}"
        raise ArgumentError(text, argument="ep_rank_id")
    if not 0 <= ep_rank_id < world:
        text = f"ep_rank_id={ep_rank_id} must be in 0..{world - 1} for group {name!r}"
        raise ArgumentError(text, argument="ep_rank_id")


def _c10d() -> Any:
    return dist.distributed_c10d  # absent where torch was built without it


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def has_hccl(group: ProcessGroup) -> bool:
    """Whether the group's windows are on NPUs."""
    return "hccl" in _c10d()._world.pg_map[group][0]


def _names_hccl(name: str, group: ProcessGroup) -> bool:
    """Whether the name is HCCL's own, of an HCCL group, and not c10d's."""
    return has_hccl(group) and name != group.group_name


def is_alive(reference: weakref.ref[ProcessGroup]) -> bool:
    """Whether the process group was not destroyed; another one may have its name since."""
    group = reference()
    return group is not None and group in _c10d()._world.pg_map


def _hccl_named(name: str) -> ProcessGroup | None:
    """The group whose HCCL communicator has this name, when HCCL was asked for the name directly."""
    for group in list(_c10d()._world.pg_map):
        if has_hccl(group):
            hccl: Any = group._get_backend(torch.device("npu"))
            # Without init_comm=False HCCL would create the communicator, collectively.
            if str(hccl.get_hccl_comm_name(group.rank(), init_comm=False)) == name:
                _handed_out[name] = weakref.ref(group)
                return group  # type: ignore[no-any-return]
    return None


def _resolve(name: str) -> ProcessGroup | None:
    """The live process group of this name."""
    if not _initialized():
        return None
    handed = _handed_out.get(name)
    group = handed() if handed else None
    if group is not None and group not in _c10d()._world.pg_map:  # destroyed; its name may serve another
        group = None
    if group is None:
        try:
            group = _c10d()._resolve_process_group(name)
        except (RuntimeError, LookupError):
            return _hccl_named(name)
    return group if group in _c10d()._world.pg_map else None


def unknown(name: str, hccl: bool = False) -> ArgumentError:
    """The error for a name that no group has; ``hccl``: only names of HCCL communicators would do."""
    known = [handed for handed in sorted(_handed_out) if not hccl or _resolve(handed) is not None]
    if not hccl:
        known += threads.names() + sorted(_subgroups)
        known += sorted(_c10d()._world.pg_names.values()) if _initialized() else []
    listed = f"known are {', '.join(map(repr, known))}" if known else "none is known"
    why = "" if known or _initialized() else " and torch.distributed is not initialised"
    kind = "HCCL communicator" if hccl else "communicator"
    return _wrong_group(
        f"group_ep={name!r} names no live {kind}: {listed}{why}; use ascend_moe.comm_name(process_group)"
        f"{' of an HCCL group' if hccl else ', or the name that LocalCluster.run passes on'}"
    )


# ---- process groups, and the subgroups that shrink makes of them


def subgroup(name: object) -> Communicator | None:
    """Return this rank's communicator of the open subgroup of this name."""
    return _subgroups.get(name) if isinstance(name, str) else None


def add_subgroup(made: Communicator) -> None:
    """Make a subgroup known by its name."""
    _subgroups[made.name] = made


def _if_open(name: str, group: ProcessGroup) -> Communicator | None:
    """Return this rank's communicator of a process group, if it is open and not one of an earlier group of the name."""
    entry = _entries.get((name, group.rank()))
    return entry[1] if entry is not None and entry[0]() is group and not entry[1].closed else None


def _end(name: str, group: ProcessGroup) -> Communicator:
    """Return this rank's communicator, opened when there is none."""
    key = (name, group.rank())
    with _gates.setdefault(key, threading.Lock()):
        communicator = _if_open(name, group)
        if communicator is None:
            if key in _entries:
                _entries[key][1].close()
            communicator = _open(name, group)
            _entries[key] = weakref.ref(group, lambda _: _abandon(key)), communicator
    return communicator


def _open(name: str, group: ProcessGroup) -> Communicator:
    world = group.size()
    if world > MAX_WORLD:
        text = f"group {name!r} has {world} ranks, windows on CPU serve at most {MAX_WORLD}: "
        raise ArgumentError(text + "use ascend_moe.dispatchers", argument="ep_world_size")
    if world > 1 and library.lib().am_engine_is_checked():  # its scheduler runs the ranks of one process
        text = (
            f"group {name!r} has {world} ranks, each a process of its own, and the checked engine runs ranks that are "
        )
        fix = f"threads: use ascend_moe.LocalCluster, or unset {settings.ENGINE.name}"
        raise ArgumentError(text + fix, argument=settings.ENGINE.name)
    data_bytes = window_data_bytes()
    lent_bytes = window_lent_bytes(data_bytes)
    reference = weakref.ref(group)
    try:
        records = functools.partial(Records, *store_of(group), "windows", group.rank())
        opening = Opening(name, group.rank(), world, data_bytes, lent_bytes, timeout_s(), records)
        opening.run()
        return opening.communicator(alive=functools.partial(is_alive, reference))
    except OSError as error:  # this rank's own trouble, which the others see as a rank that gave up
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        fix = f": raise the limit of {limit} open files (ulimit -n)" if out_of_descriptors(error) else ""
        text = f"rank {group.rank()}: opening the windows of group {name!r} failed here: {error.strerror or error}{fix}"
        raise AscendMoeError(text, rank=group.rank()) from error


def _abandon(key: tuple[str, int]) -> None:
    """The process group is gone. Runs wherever Python frees it, so it never waits for an op."""
    entry = _entries.get(key)
    if entry is not None and entry[0]() is None:
        with contextlib.suppress(AscendMoeError):
            entry[1].close(wait_s=0)
            _entries.pop(key, None)


def _forget() -> None:
    """In a forked child: the parent's ends are not ours, not even to close."""
    _entries.clear()
    _subgroups.clear()
    _gates.clear()
    _handed_out.clear()


@atexit.register
def _close_all() -> None:
    for communicator in [*_subgroups.values(), *(entry[1] for entry in _entries.values())]:
        with contextlib.suppress(AscendMoeError):
            communicator.close(wait_s=1)


os.register_at_fork(after_in_child=_forget)
