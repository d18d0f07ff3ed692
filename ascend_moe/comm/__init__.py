"""Communicators by name: group_ep of a process group or of a LocalCluster.

``comm_name`` returns the name, by which the ops find the communicator; ``close`` closes it. For an HCCL group the name
is HCCL's own. For any other group it is the c10d group name; the windows are in shared memory of one machine and are
opened collectively on first use.
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
from ascend_moe.comm.records import Records, store_of
from ascend_moe.comm.rendezvous import Opening
from ascend_moe.comm.threads import LocalCluster
from ascend_moe.errors import ArgumentError, AscendMoeError, need, with_typed_errors
from ascend_moe.native import library
from ascend_moe.native.liveness import out_of_descriptors
from ascend_moe.native.windows import timeout_s, window_data_bytes, window_registered_bytes
from ascend_moe.settings import MAX_WORLD

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ascend_moe.comm.vote import StoreVote

__all__ = ["Communicator", "LocalCluster", "close", "comm_name", "lookup", "window_empty"]

MAX_NAME = 127  # characters of group_ep, as in CANN


@dataclass(frozen=True)
class Device:
    """Functions that find and close the communicators on one type of device; passed to `register_device`."""

    known: Callable[[str], Any]  # the communicator that an op has opened for a group_ep, or None
    find: Callable[[str, int, int, torch.device], Any]  # the communicator of a group_ep, opened if there is none
    close: Callable[[str], None]  # forgets a communicator; idempotent
    vote: Callable[[str, ProcessGroup], StoreVote | None]  # votes of a group; None before its first op
    share: Callable[[str, int, int, torch.device], int]  # ranks per server; opens no communicator


_devices: dict[str, Device] = {}  # by torch's name of the device type
# By group_ep and rank: the group, and its communicator.
_entries: dict[tuple[str, int], tuple[weakref.ref[ProcessGroup], Communicator]] = {}
_subgroups: dict[str, Communicator] = {}  # by group_ep: created by shrink, unknown to torch.distributed
_gates: dict[tuple[str, int], threading.Lock] = {}  # serialize the opening of a name
_handed_out: dict[str, weakref.ref[ProcessGroup]] = {}  # HCCL's names, unknown to c10d


def register_device(kind: str, device: Device) -> None:
    """Make lookups and ``close`` include the communicators on devices of the type ``kind``, torch's name, as "npu"."""
    _devices[kind] = device


def npu_vote(group_ep: str, group: ProcessGroup) -> StoreVote | None:
    """Return the object by which an HCCL group's ranks vote (`agree`); None if no op has run on it in this process."""
    return _devices["npu"].vote(group_ep, group) if "npu" in _devices else None


def _known_on_device(group_ep: str) -> Any:
    """Return the communicator of this name that an op on a device has opened, or None."""
    return next((found for device in _devices.values() if (found := device.known(group_ep)) is not None), None)


def comm_name(process_group: ProcessGroup | None = None) -> str:
    """Return the ``group_ep`` of a process group, for the dispatch and combine ops.

    For an HCCL group it is the name of HCCL's communicator; the first call creates that, collectively, if it does not
    exist. For any other backend it is the group's name in c10d, and the first call on a group opens its windows, which
    is collective; so is the first call after ``close``. Windows have HCCL_BUFFSIZE MiB (default 200) per rank and are
    shared memory: all ranks must be on one machine.

    Args:
        process_group: a group as in `group_of`; None: the default group.

    Raises:
        ArgumentError: there is no such group, this rank is not a member, or the group is too large for windows.
        CommTimeout: a rank did not arrive within ASCEND_MOE_TIMEOUT_S. PeerLost: a rank died.
        ConfigMismatch: HCCL_BUFFSIZE, another setting of windows, the machine or the user differs between the ranks.
        AscendMoeError: the windows could not be opened on this rank.
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
    _communicator(name, group)
    return name


def group_of(argument: str, given: object = None) -> ProcessGroup:
    """Return the live process group that ``given`` stands for. Opens nothing.

    Args:
        argument: the caller's name for ``given`` in error messages.
        given: a process group that includes this rank; its name; a DeviceMesh of one dimension; an object with such a
            group as ``device_group`` (vLLM's and SGLang's GroupCoordinator). None: the default group.

    Raises:
        ArgumentError: ``given`` is none of these, the group was destroyed, or this rank is not a member.
    """
    if isinstance(given, str):
        cluster, found = find(given)
        if subgroup(given) is not None:
            raise _no_group(argument, f"{given!r} was created by shrink and has no process group; ")
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
            raise _no_group(argument, f"is a DeviceMesh with the dimensions {', '.join(map(str, names))}; ")
        group = group.get_group()
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        rule = (
            "needs torch.distributed: call torch.distributed.init_process_group first, or run the ranks as threads "
            "with ascend_moe.LocalCluster"
        )
        need(given is not None or _initialized(), argument, rule)
        raise _no_group(argument, f"is a {type(group).__name__}, not a live process group; ")
    if not (_initialized() and group in _c10d()._world.pg_map) and _has_name(group):
        raise _no_group(argument, "is not a live process group with this rank as a member; ")
    return group


def _has_name(group: ProcessGroup) -> bool:
    """Return whether c10d created the group; the collectives of other groups work too."""
    try:
        return bool(group.group_name)
    except RuntimeError:
        return False


def name_of(argument: str, given: object = None) -> str:
    """Return the ``group_ep`` for ``given`` (as in `group_of`): a string unchanged, even if unknown; else `comm_name`.

    Raises:
        ArgumentError: the string is empty, or as `group_of`. Other errors: as `comm_name`, which may open windows.
    """
    if given == "":
        raise _no_group(argument, "is an empty string; ")
    return given if isinstance(given, str) else comm_name(group_of(argument, given))


def need_name(argument: str, given: object) -> None:
    """Raise ArgumentError about ``argument`` unless ``given`` is a string: the ops take names, not groups."""
    kind = type(given).__name__
    need(isinstance(given, str), argument, "is a {}; it must be a str: use ascend_moe.comm_name(process_group)", kind)


def _no_group(argument: str, why: str) -> ArgumentError:
    fix = "pass a ProcessGroup, a DeviceMesh of one dimension, a GroupCoordinator, or the name of one"
    return ArgumentError(f"{argument} {why}{fix}", argument=argument)


def find(group_ep: object) -> tuple[LocalCluster | None, ProcessGroup | None]:
    """Return (LocalCluster or None, live process group or None) of this name; both None: unknown, or a `subgroup`."""
    if not isinstance(group_ep, str):
        return None, None
    cluster = threads.find(group_ep)
    return cluster, _resolve(group_ep) if cluster is None and group_ep else None


def process_group(group_ep: str) -> ProcessGroup | None:
    """Return the live process group with the name ``group_ep`` (HCCL's or c10d's), or None."""
    return find(group_ep)[1]


def size_and_rank(group_ep: str) -> tuple[int, int | None] | None:
    """Return (world size, this rank) of a group without opening anything, or None if the name is unknown.

    The rank is None for a `LocalCluster` if the calling thread runs none of its ranks.
    """
    if (made := subgroup(group_ep)) is not None:
        return made.world, made.rank
    cluster, group = find(group_ep)
    if cluster is not None:
        return cluster.world_size, cluster.rank_here()
    return None if group is None else (group.size(), group.rank())


# torch.compile cannot trace the lookup. The decorator torch.compiler.assume_constant_result does the same but imports
# torch._dynamo, which takes a second in every process.
size_and_rank._dynamo_marked_constant = True  # type: ignore[attr-defined]


def device_of(group_ep: str) -> torch.device:
    """Return the device of the group's windows: the current NPU for HCCL's name of a group, the CPU for all others."""
    _, group = find(group_ep)
    if group is None or not _names_hccl(group_ep, group):
        return torch.device("cpu")
    return _current_npu()


def _current_npu() -> torch.device:
    return torch.device("npu", torch.npu.current_device())  # type: ignore[attr-defined,unused-ignore]


def lookup(group_ep: str, ep_world_size: int, ep_rank_id: int) -> Communicator:
    """Return this rank's communicator on the CPU. For a process group the first lookup opens it, collectively.

    Raises:
        ArgumentError: the name is unknown or of an HCCL group, or ep_world_size or ep_rank_id is not the group's.
        Other errors: as ``comm_name``.
    """
    _check_name(group_ep)
    if (made := subgroup(group_ep)) is not None:
        _check_place(group_ep, made.world, made.rank, ep_world_size, ep_rank_id)
        return made
    cluster, group = find(group_ep)
    if cluster is not None:
        _check_place(group_ep, cluster.world_size, cluster.rank_here(), ep_world_size, ep_rank_id)
        return cluster.communicator(ep_rank_id)
    if group is None:
        raise unknown(group_ep)
    _check_place(group_ep, group.size(), group.rank(), ep_world_size, ep_rank_id)
    if _names_hccl(group_ep, group):
        raise _wrong_group(
            f"group_ep={group_ep!r} is an HCCL communicator, whose windows are on NPUs, but the tensors are "
            "on cpu: move them to the NPU, or use the name of a gloo group"
        )
    return _communicator(group_ep, group)


def ranks_per_server(group_ep: str, ep_world_size: int, ep_rank_id: int) -> int:
    """Return the ranks per server, 0 or W for one server; ranks of other servers are reached by RDMA, as on an A2.

    On an A2 it follows from ASCEND_MOE_RANKS_PER_SERVER or, if that is not set, from host names (docs/cluster.md); on
    the CPU it is that variable, on other NPUs 0. If it is above 0 and below W = ep_world_size, assist_info_for_combine
    begins with the BS*K words of expand_idx and contains no source indices. Collective on a group's first call.

    Raises:
        On the CPU as ``lookup``, which opens a communicator if there is none; on an NPU as the group's first op.
    """
    _check_name(group_ep)
    found = _known_on_device(group_ep)
    if found is None:
        _, group = find(group_ep)
        if "npu" in _devices and group is not None and has_hccl(group):
            return _devices["npu"].share(group_ep, ep_world_size, ep_rank_id, _current_npu())
        found = lookup(group_ep, ep_world_size, ep_rank_id)
    return int(found.ranks_per_server)


def algorithm_of(group_ep: str) -> str:
    """Return the algorithm of this rank's last op on the group: "window", "direct", "hierarchy", or "" before any.

    Args:
        group_ep: name of the group, as for the ops. For a LocalCluster, outside of its ranks' threads: rank 0's op.

    Raises:
        ArgumentError: the name is unknown. Other errors: on the CPU, the fatal error of an earlier op.
    """
    _check_name(group_ep)
    return algorithm_on(group_ep, None)


def algorithm_on(group_ep: str, rank: int | None) -> str:
    """Return `algorithm_of` for ``rank`` (as in `communicator_here`). Waits while that rank is in an op on the CPU."""
    on_device = _known_on_device(group_ep)
    if on_device is not None:
        return str(on_device.algorithm)
    found = communicator_here(group_ep, rank)
    return "" if found is None else found.algorithm


def epoch_on(group_ep: str, rank: int) -> int:
    """Return the epoch (number) of a rank's last op on the group; 0: none so far, nothing is open, or on an NPU."""
    if _known_on_device(group_ep) is not None:
        return 0
    found = communicator_here(group_ep, rank, opens=False)
    return 0 if found is None else found.epoch


def communicator_here(group_ep: str, rank: int | None = None, opens: bool = True) -> Communicator | None:
    """Return a rank's communicator in this process, or None if it is not open; raise ArgumentError for an unknown name.

    ``rank``: of a LocalCluster; None: the calling thread's, or 0. ``opens``: open the windows of a LocalCluster.
    """
    if (made := subgroup(group_ep)) is not None:
        return made
    cluster, group = find(group_ep)
    if cluster is not None:
        rank = (cluster.rank_here() or 0) if rank is None else rank
        return cluster.communicator(rank) if opens else cluster.open_communicator(rank)
    if group is None:
        raise unknown(group_ep)
    return _if_open(group_ep, group)


@with_typed_errors
def window_empty(
    shape: Sequence[int] | int, *, dtype: torch.dtype, group_ep: str, ep_world_size: int, ep_rank_id: int
) -> torch.Tensor:
    """Return a tensor in this rank's window, a zero-copy input of one combine with ``comm_alg="direct"``.

    That combine publishes the rows in place and thereby consumes the tensor: other ranks may read it until this rank's
    next op has returned. A consumed tensor must not be written, and passing it to a direct combine again raises
    WindowTensorError. Allocate a new tensor for every combine and drop the old one: its memory is free one op later.
    All other ops treat it as an ordinary tensor; a combine with another algorithm copies it and leaves it unchanged.
    ``grouped_mlp(..., out=)`` writes into it.

    Only pages that are written use memory, so a shape for the maximum number of rows costs nothing extra. All live
    tensors and the last consumed one share ASCEND_MOE_REGISTERED_MIB MiB per rank: on CPUs outside the window (default:
    another HCCL_BUFFSIZE), on NPUs part of HCCL_BUFFSIZE (default: none). On NPUs a tensor must not outlive its process
    group.

    Args:
        shape: sizes, e.g. those of dispatch's expand_x: ``(A, H)``.
        dtype: bf16, fp16 or fp32, as for combine's expand_x.
        group_ep, ep_world_size, ep_rank_id: as for dispatch and combine. Before a group's first op this
            opens its windows, which is collective.

    Returns:
        A contiguous uninitialized tensor on the CPU, or on the current NPU for the name of an HCCL group. On the CPU
        its memory stays valid after ``close``.

    Raises:
        ArgumentError: shape, dtype or group is invalid.
        WindowTooSmall: there is no room; ``.needed_mib`` is the size for ``.variable``, ``.held`` the number of tensors
            that use the space.
        CommTimeout, PeerLost, ConfigMismatch: opening the windows failed.
        Other errors: the fatal error of an earlier op of this rank on the group.
    """
    sizes, size = registered.byte_size(shape, dtype)
    _, group = find(group_ep)
    if group is not None and _names_hccl(group_ep, group):
        on_npu = _devices["npu"].find(group_ep, ep_world_size, ep_rank_id, _current_npu())
        with on_npu.ops_handle:
            made: torch.Tensor = on_npu.register(sizes, size, dtype)
            return made
    found = lookup(group_ep, ep_world_size, ep_rank_id)
    found.raise_if_failed()
    if size == 0:
        return torch.empty(sizes, dtype=dtype, device="cpu")
    return registered.tensor_of(found.register(size), sizes, dtype)


def hccl_group(group_ep: str, ep_world_size: int, ep_rank_id: int) -> ProcessGroup:
    """Return the process group of an HCCL communicator's name, for ops on an NPU. Opens nothing.

    Raises:
        ArgumentError: no HCCL communicator has that name (one of another backend may), or ep_world_size or ep_rank_id
            is not this rank's.
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
            f"group_ep={group_ep!r} is c10d's name of an HCCL group, but ops on an NPU need HCCL's own name: "
            "use ascend_moe.comm_name(process_group)"
        )
    _check_place(group_ep, group.size(), group.rank(), ep_world_size, ep_rank_id)
    return group


def close(group_ep: str) -> None:
    """Close this rank's communicator. Local and idempotent; the next use opens new windows, collectively.

    For a LocalCluster's name: within a rank's function that rank's communicator, outside of ``run`` those of all ranks.
    Peers that still use the communicator see this rank as lost. For HCCL's name only this process's state is released:
    the windows belong to HCCL, so after a fatal error ops on that group fail until the process group is recreated. The
    frames in a fatal error's traceback are cleared, so that a stored error does not keep tensors of `window_empty`, and
    with them the window, alive.

    Raises:
        CommBusy: an op of another thread is still running after ASCEND_MOE_TIMEOUT_S and two more seconds.
        ArgumentError: group_ep is not a string of 1 to 127 bytes. An unknown name is not an error.
        AscendMoeError: ``run`` of the LocalCluster is in progress, and this thread is none of its ranks.
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
    """Compare the op's arguments with the group; ``rank`` is None if this thread could be any rank."""
    if ep_world_size != world:
        text = f"ep_world_size={ep_world_size} but group {name!r} has {world} ranks: pass {world}"
        raise ArgumentError(text, argument="ep_world_size")
    if rank is not None and ep_rank_id != rank:
        text = f"ep_rank_id={ep_rank_id} but this is rank {rank} of group {name!r}: pass {rank}"
        raise ArgumentError(text, argument="ep_rank_id")
    if not 0 <= ep_rank_id < world:
        text = f"ep_rank_id={ep_rank_id} must be in 0..{world - 1} for group {name!r}"
        raise ArgumentError(text, argument="ep_rank_id")


def _c10d() -> Any:
    return dist.distributed_c10d  # absent if torch was built without it


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def has_hccl(group: ProcessGroup) -> bool:
    """Return whether a live process group has HCCL as a backend, so that its windows are on NPUs."""
    return "hccl" in _c10d()._world.pg_map[group][0]


def _names_hccl(name: str, group: ProcessGroup) -> bool:
    """Return whether ``name`` is HCCL's name of an HCCL group, not c10d's."""
    return has_hccl(group) and name != group.group_name


def is_alive(reference: weakref.ref[ProcessGroup]) -> bool:
    """Return whether the referenced process group was neither freed nor destroyed."""
    group = reference()
    return group is not None and group in _c10d()._world.pg_map


def _hccl_named(name: str) -> ProcessGroup | None:
    """Return the group whose HCCL communicator has this name, if the user obtained the name from HCCL."""
    for group in list(_c10d()._world.pg_map):
        if has_hccl(group):
            hccl: Any = group._get_backend(torch.device("npu"))
            # Without init_comm=False HCCL would create the communicator, collectively.
            if str(hccl.get_hccl_comm_name(group.rank(), init_comm=False)) == name:
                _handed_out[name] = weakref.ref(group)
                return group  # type: ignore[no-any-return]
    return None


def _resolve(name: str) -> ProcessGroup | None:
    """Return the live process group of this name, or None."""
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
    """Return the error for an unknown ``group_ep``, which lists known names, with ``hccl`` only HCCL's."""
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


# ---- process groups, and the subgroups that shrink creates


def subgroup(name: object) -> Communicator | None:
    """Return this rank's communicator of the open group ``name`` that `shrink` made of a CPU process group, or None."""
    return _subgroups.get(name) if isinstance(name, str) else None


def add_subgroup(made: Communicator) -> None:
    """Register the communicator of a group made by `shrink` under its name."""
    _subgroups[made.name] = made


def _if_open(name: str, group: ProcessGroup) -> Communicator | None:
    """Return this rank's open communicator of a process group, or None; never that of an earlier group of the name."""
    entry = _entries.get((name, group.rank()))
    return entry[1] if entry is not None and entry[0]() is group and not entry[1].closed else None


def _communicator(name: str, group: ProcessGroup) -> Communicator:
    """Return this rank's communicator; open it if there is none."""
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
        text = f"group {name!r} has {world} ranks, windows on the CPU support at most {MAX_WORLD}: "
        raise ArgumentError(text + "use AllToAllDispatcher of ascend_moe.dispatchers", argument="ep_world_size")
    if world > 1 and library.lib().am_engine_is_checked():  # it schedules the ranks of one process
        text = f"group {name!r} has {world} ranks in separate processes, but the checked engine needs ranks that are "
        fix = f"threads: use ascend_moe.LocalCluster, or unset {settings.ENGINE.name}"
        raise ArgumentError(text + fix, argument=settings.ENGINE.name)
    data_bytes = window_data_bytes()
    registered_bytes = window_registered_bytes(data_bytes)
    reference = weakref.ref(group)
    try:
        records = functools.partial(Records, *store_of(group), "windows", group.rank())
        opening = Opening(name, group.rank(), world, data_bytes, registered_bytes, timeout_s(), records)
        opening.run()
        return opening.communicator(alive=functools.partial(is_alive, reference))
    except OSError as error:  # a local problem; the other ranks see that this rank gave up
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        fix = f": raise the limit of {limit} open files (ulimit -n)" if out_of_descriptors(error) else ""
        text = f"rank {group.rank()}: opening the windows of group {name!r} failed here: {error.strerror or error}{fix}"
        raise AscendMoeError(text, rank=group.rank()) from error


def _abandon(key: tuple[str, int]) -> None:
    """Close the communicator of a destroyed process group. Runs wherever Python frees it, so it never waits."""
    entry = _entries.get(key)
    if entry is not None and entry[0]() is None:
        with contextlib.suppress(AscendMoeError):
            entry[1].close(wait_s=0)
            _entries.pop(key, None)


def _forget() -> None:
    """Drop the parent's communicators in a forked child, without closing them."""
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
