"""Communicators on the NPU: the host's state of an HCCL communicator, and its error record.

The kernels write errors into a record on the device. The first launch and every sixteenth after it are followed by a
copy to pinned memory on the same stream; the host reads that before each launch, without waiting. ``check`` waits, and
copies the record itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist

from .. import comm, settings
from ..comm.communicator import GroupCommunicator, take_number
from ..comm.registered import RegisteredMemory, no_room
from ..errors import ArgumentError, AscendMoeError, WindowTooSmall
from ..native import binding, hang, library, log, probe_results, timestamps
from ..native.plans import ALGORITHMS
from ..native.windows import A2_STATE_MIB, CONTEXT_A2, CONTEXT_A3, MIB, deadline_s
from . import calls, npu_adapter, npu_servers

OWN_OPTION = 'pg_options.hccl_config["hccl_buffer_size"]'  # of a group; takes precedence over HCCL_BUFFSIZE
_MAGIC, _CODE = 0, 1  # words of the record
# As in op_kernel/probe/tiling.h.
PROBE_CONTEXT, PROBE_CLEAR, PROBE_TIMESTAMPS, PROBE_PASSED, PROBE_REPORT = 1, 15, 16, 0x600D, (64, 8)
# How HCCL links the ranks of a group on several A2 servers, as the algConfig of its first launch requests: ranks store
# to the others of their server, or all are reached by RDMA.
LINKS = {
    True: "stores within a server (BatchWrite=level1:hierarchy)",
    False: "RDMA between all ranks (BatchWrite=level1:fullmesh)",
}
_RECREATE = (
    " - this group has failed: destroy its process group and create a new one, on all ranks; "
    "after a lost rank, ascend_moe.agree and shrink create one of the others"
)


def soc_of(device: torch.device) -> str:
    """Return torch_npu's name of the SoC of a device, such as "Ascend910B3"."""
    return str(torch.npu.get_device_name(device))  # type: ignore[attr-defined]


def context_kind(soc: str) -> int:
    """Return the layout of HCCL's context on the SoC with torch_npu's name ``soc``, as an index into ``CONTEXTS``."""
    if soc.startswith("Ascend910_93"):
        return CONTEXT_A3
    if soc.startswith("Ascend910B"):
        return CONTEXT_A2
    raise ArgumentError(
        f"tensors are on a {soc}: dispatch and combine support Ascend910B (A2) and Ascend910_93 (A3) only",
        argument="device",
    )


class NpuCommunicator(GroupCommunicator):
    """One rank's communicator on its NPU: parameters of its HCCL communicator, registered buffers, its ops' errors.

    Attributes:
        name: HCCL's name of the communicator, the group_ep.
        rank, world, data_bytes, registered_bytes, context_kind, ranks_per_server: parameters of a call's plan. The
            last is 0 on an A3, whose stores reach ranks of other servers.
        proven: the bring-up probes that have passed on this machine.
        auto_is_window: whether comm_alg "auto" means window, since not all probes that direct needs have passed.
        barrier: the faster kind of core barrier according to bring-up, of ``CORE_BARRIERS``; "": unknown.
        algorithm: algorithm of the last op, "window", "direct" or "hierarchy"; "" before any.
        failed: the first fatal error; later ops raise it at once, also after ``ascend_moe.close(name)``, until the
            process group is recreated.
    """

    def __init__(
        self,
        name: str,
        group: Any,
        device: torch.device,
        ranks_per_server: int,
        proven: frozenset[str],
        barrier: str = "",
        stores: bool | None = None,
    ) -> None:
        self.name, self.device = name, device
        self.group = weakref.ref(group)
        self.rank, self.world = int(group.rank()), int(group.size())
        self.soc = soc_of(device)
        self.context_kind = context_kind(self.soc)
        on_a2 = self.context_kind == CONTEXT_A2
        self.ranks_per_server, self.stores = ranks_per_server, stores
        self.proven, self.barrier = proven, barrier
        self.auto_is_window = not probe_results.allows("direct", proven)
        options = getattr(group._get_backend(torch.device("npu")), "options", None)
        own = (getattr(options, "hccl_config", None) or {}).get("hccl_buffer_size")
        self.own_buffer = bool(own)
        self.buffer_mib = settings.HCCL_BUFFSIZE.value_of(str(own), OWN_OPTION) if own else settings.HCCL_BUFFSIZE.get()
        if on_a2 and self.buffer_mib <= A2_STATE_MIB:
            setting = OWN_OPTION if self.own_buffer else settings.HCCL_BUFFSIZE.name
            raise ArgumentError(
                f"{setting}={self.buffer_mib} must be more than {A2_STATE_MIB} MiB on an A2, where the last "
                "MiB contains the status blocks",
                argument=settings.HCCL_BUFFSIZE.name,
            )
        registered_mib = settings.REGISTERED_MIB.get() or 0
        self.data_bytes = (self.buffer_mib - registered_mib - (A2_STATE_MIB if on_a2 else 0)) * MIB
        if self.data_bytes <= 0:
            raise ArgumentError(
                f"{settings.REGISTERED_MIB.name}={registered_mib} leaves no room for rows in the window of "
                f"{self.buffer_mib} MiB: export a larger {settings.HCCL_BUFFSIZE.name} on all ranks",
                argument=settings.REGISTERED_MIB.name,
            )
        self.registered_bytes = registered_mib * MIB
        self._registered: RegisteredMemory | None = None
        self.number = take_number(self)
        self.ops_handle = binding.CommHandle(  # its lock is held from the check to the launch
            number=self.number,
            world=self.world,
            rank=self.rank,
            window_mib=self.data_bytes // MIB,
            registered_mib=registered_mib,
            context_kind=self.context_kind,
            ranks_per_server=self.ranks_per_server,
            intra_node_stores=int(settings.INTRA_NODE_STORES.get()),
            rdma_flags=int(settings.RDMA_FLAGS.get()),
            auto_is_window=self.auto_is_window,
            buffer_mib=self.buffer_mib,
            core_barrier=1 + settings.CORE_BARRIERS.index(barrier) if barrier else 0,
            on_npu=True,
            of_process_group=True,
        )
        log.opened(name, self.rank, self.world, self.data_bytes // MIB, registered_mib)
        hang.watch(self)
        if self.auto_is_window:
            log.unproven(name, self.rank, probe_results.COMMAND)
        words = calls.error_record_words()
        self.record = torch.zeros(words, dtype=torch.int32, device=device)
        self._host = torch.zeros(words, dtype=torch.int32, device="cpu").pin_memory()
        self._seen: Any = self._host.numpy()
        self.ops_handle.take_record(self.record, self._host)

    @property
    def links(self) -> str:
        """How ranks of one server reach each other where there are several (A2), a value of `LINKS`; else ""."""
        return "" if self.stores is None else LINKS[self.stores]

    @property
    def algorithm(self) -> str:
        return ALGORITHMS[self.ops_handle.algorithm]

    def alive(self) -> bool:
        """Return whether this communicator's process group still exists."""
        return comm.is_alive(self.group)

    def raise_why_unusable(self) -> None:
        """Raise the error that keeps ops from using this communicator, if it is known by now (as `look`)."""
        self.look()

    def look(self) -> None:
        """Raise the error of an earlier op if it is known by now; do not wait."""
        self.raise_if_failed()
        if self._seen[_MAGIC] != 0:
            self._raise_found()

    def register(self, sizes: tuple[int, ...], size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of the shape ``sizes``, ``size`` bytes, in this rank's window. The caller holds the lock."""
        self.look()
        if size == 0:
            return torch.empty(sizes, dtype=dtype, device=self.device)
        if self._registered is None:
            if self.registered_bytes == 0:
                raise no_room(size, 0, 0, size)
            base = self._data_address() + self.data_bytes
            self._registered = RegisteredMemory(
                library.lib().am_registered_open(self.rank, base, self.registered_bytes)
            )
            self.ops_handle.register_area(self._registered.handle)
        address, generation = self._registered.grant(size, self.registered_bytes)
        release = ctypes.cast(library.lib().am_registered_release, ctypes.c_void_p).value
        given = (address, sizes, dtype, self.device, self._registered.handle, generation, release)
        made: torch.Tensor = torch.ops.ascend_moe_npu.registered_tensor(*given)
        return made

    def clear_state(self) -> None:
        """Zero this rank's state area (status blocks), before the group's first op, while no rank stores there.

        On an A2 it is the last MiB of the only window. It may contain data of a framework's first broadcast, or the
        abort flag of another group that used this memory, which would stop the first op.
        """
        self._probed(PROBE_CLEAR)

    def _data_address(self) -> int:
        """Return the address of the data area of this rank's window, as its kernels see it."""
        words = self._probed(PROBE_CONTEXT)[0]
        return words[2] | words[3] << 32

    def timestamps(self, op: str) -> list[timestamps.Timestamp]:
        """Return the timestamps of this rank's last ``op``, "dispatch" or "combine"; [] without `settings.TIMESTAMPS`.

        Waits for that op. Launches the probe kernel several times: each launch copies one block of each core's.
        """
        blocks = timestamps.words_of_core() // PROBE_REPORT[1]
        first = (timestamps.OPS[op] - 1) * blocks + 1
        parts = [self._launch_probe(PROBE_TIMESTAMPS, first + block) for block in range(blocks)]
        return timestamps.of_words([word for core in zip(*parts, strict=True) for part in core for word in part])

    def _probed(self, mode: int) -> list[list[int]]:
        """Return every core's report, if core 0 has passed."""
        report = self._launch_probe(mode)
        words = report[0]
        if words[0] != PROBE_PASSED:
            raise AscendMoeError(
                f"group {self.name!r}, rank {self.rank}: HCCL's communication context is not as expected (probe "
                f"code {words[0]}, item {words[1]}: expected {words[2]}, found {words[3]}): run ascend-moe validate "
                "--bringup, which prints the cause"
            )
        return report

    def _launch_probe(self, mode: int, rounds: int = 1) -> list[list[int]]:
        """Launch the probe kernel, wait, and return every core's report."""
        npu_adapter.load()
        report = torch.zeros(PROBE_REPORT, dtype=torch.int32, device=self.device)
        place = (self.name, self.world, self.rank)
        machine = (self.buffer_mib, 0, self.ranks_per_server, int(self.stores or False))
        torch.ops.ascend_moe_npu.probe(*place, mode, 1, rounds, 0, *machine, report)
        return [[word & 0xFFFFFFFF for word in block] for block in report.tolist()]

    def check(self) -> None:
        """Wait for the device, then raise the first error of the ops so far, if any."""
        torch.npu.synchronize(self.device)  # type: ignore[attr-defined]
        self._host.copy_(self.record)
        self.look()

    def _raise_found(self) -> None:
        if not capturing():
            # The copy may still be in flight; an error may cost a wait.
            torch.npu.synchronize(self.device)  # type: ignore[attr-defined]
        words = self._seen.copy()
        code = int(words[_CODE])
        error = calls.error_of(code, words.ctypes.data, "", self)
        if library.lib().am_error_is_fatal(code):
            error = self.failed = type(error)(f"{error}{_RECREATE}", **error.details)
        if not capturing():
            self.record.zero_()
            self._host.zero_()
        raise error

    def retire(self) -> None:
        """Allow no more tensors in the window; existing ones stay valid as long as HCCL's window exists."""
        if self._registered is not None:
            self.ops_handle.register_area(0)
            self._registered.retire(lambda: None)
            self._registered = None

    def describe_peer(self, rank: int) -> str:
        """Return "": processes of peers are not visible on NPUs."""
        return ""


_open: dict[str, NpuCommunicator] = {}  # by name
_closed: list[NpuCommunicator] = []  # kept alive: replayed graphs write into their records
_lock = threading.Lock()
_stores: weakref.WeakKeyDictionary[Any, bool | None] = weakref.WeakKeyDictionary()  # of groups, as HCCL keeps them
_cleared: weakref.WeakSet[Any] = weakref.WeakSet()  # groups on A2 whose state areas were zeroed
_clearing: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()


def known(group_ep: str) -> NpuCommunicator | None:
    """Return the communicator that an op has opened in this process for HCCL's name ``group_ep``, or None."""
    return _open.get(group_ep)


def find(
    group_ep: str, world: int, rank: int, device: torch.device, op_name: str = "", stores: bool | None = None
) -> NpuCommunicator:
    """Return this process's communicator for HCCL's name; open it if there is none. Collective on a group's first call.

    ``op_name`` begins error messages. ``stores``: on several A2 servers, whether the next launch stores to ranks of its
    own server (see `LINKS`); None: as the group's first launch, or if there was none as a call without comm_alg.

    Raises:
        CommError: this group has failed, in a communicator that was closed since.
        ArgumentError: no HCCL group has this name; ``world`` or ``rank`` is not the group's; its ranks are distributed
            over servers in an unsupported way; or it was opened for other links.
        ConfigMismatch, CommTimeout, PeerLost: as ``npu_servers``, in a group's first call.
    """
    try:
        group = comm.hccl_group(group_ep, world, rank)
    except ArgumentError as error:
        raise type(error)(f"{op_name}: {error}" if op_name else str(error), **error.details) from None
    share, proven = _agreed(group_ep, group, device)  # outside of the lock: it waits for the other ranks
    barrier = _faster_barrier(group_ep, group, device)
    with _lock:
        stores = _stores_of(group_ep, group, share, stores, op_name)
        found = _open.get(group_ep)
        if found is None or found.group() is not group or found.device != device:
            _forget(group_ep)
            for closed in _closed:
                if closed.group() is group:  # HCCL's windows still contain its fatal error
                    if not capturing():  # its last op may not have been checked
                        with contextlib.suppress(AscendMoeError):
                            closed.check()
                    closed.raise_if_failed()
            found = _open[group_ep] = NpuCommunicator(group_ep, group, device, share, proven, barrier, stores)
    if found.context_kind == CONTEXT_A2 and group not in _cleared:
        _clear_together(found, group)
    return found


def _stores_of(group_ep: str, group: Any, share: int, stores: bool | None, op_name: str) -> bool | None:
    """Return which of `LINKS` a group has since its first call, or None where HCCL has no choice. Holds the lock."""
    if not 0 < share < group.size():
        return None
    known = _stores.get(group)
    if stores is None:
        stores = calls.is_two_level("") if known is None else known
    wanted = share > 1 and (settings.INTRA_NODE_STORES.get() or stores)
    if _stores.setdefault(group, wanted) != wanted:
        raise ArgumentError(
            f"{op_name}{': ' if op_name else ''}group {group_ep!r} was opened for {LINKS[not wanted]}, this call needs "
            f"{LINKS[wanted]}: HCCL keeps the links of a group's first launch, use a second process group for one of "
            "the two",
            argument="comm_alg",
        )
    return wanted


def _clear_together(here: NpuCommunicator, group: Any) -> None:
    """Zero the state areas of all ranks of a group on A2, once, before any of them continues. Collective."""
    with _lock:
        gate = _clearing.setdefault(group, threading.Lock())
    with gate:
        if group in _cleared:
            return
        if here.stores is not None:  # ranks that differ here would wait for each other in HCCL
            npu_servers.agree_on_links(here.name, group, deadline_s(first=True), here.links)
        try:
            here.clear_state()
        except (AscendMoeError, RuntimeError) as error:  # HCCL may have zeroed it all the same
            log.say(logging.WARNING, "the state area of group %s was not cleared: %s", here.name, error, rank=here.rank)
        npu_servers.synchronize(here.name, group, deadline_s(first=True), "clear state")
        _cleared.add(group)


def _faster_barrier(group_ep: str, group: Any, device: torch.device) -> str:
    """Return the faster core barrier of this machine. Runs after ``_agreed``, whose records it reads."""
    found = _open.get(group_ep)
    if found is not None and found.group() is group:
        return found.barrier
    soc = soc_of(device)
    records = npu_servers.gather(group_ep, group, deadline_s(first=True), soc)
    return probe_results.faster_barrier(soc, npu_servers.topology(records))


def before_opening(group_ep: str, world: int, rank: int, device: torch.device) -> tuple[int, int]:
    """Return (context layout, ranks per server) that `find` will open a communicator with. Opens and launches nothing.

    Collective on a group's first call. Raises as ``find``.
    """
    group = comm.hccl_group(group_ep, world, rank)
    return context_kind(soc_of(device)), _agreed(group_ep, group, device)[0]


def _agreed(group_ep: str, group: Any, device: torch.device) -> tuple[int, frozenset[str]]:
    """Return ranks per server and passed probes for opening a communicator. Collective on the first call."""
    found = _open.get(group_ep)
    if found is not None and found.group() is group:
        return found.ranks_per_server, found.proven
    if capturing():
        raise AscendMoeError(
            f"the first op on group {group_ep!r} is being captured: run every op once before the capture"
        )
    soc = soc_of(device)
    on_a2 = context_kind(soc) == CONTEXT_A2
    records, rank = npu_servers.gather(group_ep, group, deadline_s(first=True), soc), group.rank()
    sharing = 0
    if on_a2:
        ranks = [dist.get_global_rank(group, each) for each in range(group.size())]
        sharing = npu_servers.agreed(group_ep, rank, records, ranks, dist.get_world_size())
    else:
        npu_servers.refuse_super_pods(group_ep, records)
    return sharing, npu_servers.agreed_proven(group_ep, rank, records)


def _forget(group_ep: str) -> None:
    found = _open.pop(group_ep, None)
    if found is not None:
        found.ops_handle.shut()
        found.clear_tracebacks()
        found.retire()
        _closed.append(found)


def close(group_ep: str) -> None:
    """Drop this process's communicator, if any. HCCL's windows remain until the process group is destroyed."""
    with _lock:
        _forget(group_ep)


def check(group_ep: str | None = None) -> None:
    """Wait for the ops on the NPU and raise the error of one of them, if any.

    An op on an NPU returns before its kernel has run. Errors of the kernel are raised here, or by one of the next 16
    ops on that communicator.

    Args:
        group_ep: HCCL's name of a group; None: all. Other names are ignored: ops on the CPU raise errors themselves.

    Raises:
        InvalidExpertId, RoutingOverflow, RoutingMismatch, ConfigMismatch, ArgumentError: the communicator
            stays usable.
        PeerLost, CommTimeout, CorruptStatus: it has failed; recreate its process group.
    """
    with _lock:
        chosen = [each for each in _open.values() if group_ep is None or each.name == group_ep]
    for each in chosen:
        with each.ops_handle:
            each.check()


def capturing() -> bool:
    """Return whether the current NPU stream is capturing a graph; False without an NPU."""
    npu = getattr(torch, "npu", None)
    return bool(npu is not None and npu.is_current_stream_capturing())


def of_own_window(error: WindowTooSmall, group_ep: str) -> WindowTooSmall:
    """Return ``error``, naming instead of HCCL_BUFFSIZE the option that overrides it for a group, if it was used."""
    found = known(group_ep)
    if found is None or not found.own_buffer:
        return error
    text = str(error).partition(": export HCCL_BUFFSIZE")[0]
    fix = f"create the group with {OWN_OPTION} = {error.needed_mib} on all ranks"
    return WindowTooSmall(f"{text}: {fix}", **error.details)


comm.register_device("npu", comm.Device(known, find, close, npu_servers.vote, lambda *at: before_opening(*at)[1]))
