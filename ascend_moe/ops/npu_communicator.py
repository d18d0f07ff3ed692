"""Communicators on the NPU: what the host knows of an HCCL communicator, and its error record.

The kernels write what they found into a record on the device. The first launch and every sixteenth after it are
followed by a copy of it to pinned memory, on the same stream; the host looks there before each launch, without
waiting. ``check`` waits, and copies the record itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist

from .. import comm, settings
from ..comm.communicator import GroupEnd, take_number
from ..comm.registered import RegisteredMemory, no_room
from ..errors import ArgumentError, AscendMoeError, WindowTooSmall
from ..native import binding, library, log, probe_results, stamps
from ..native.plans import ALGORITHMS
from ..native.windows import A2_STATE_MIB, CONTEXT_A2, CONTEXT_A3, MIB, near_stores, rdma_flags, timeout_s
from . import calls, npu_adapter, npu_servers

DEFAULT_TIMEOUT_S = 300.0
# What HCCL_EXEC_TIMEOUT is by default; torch_npu gives an operator as long before it is stopped.
_HCCL_EXEC_TIMEOUT_S = 1836.0
_MARGIN_S = 10.0
OWN_OPTION = 'pg_options.hccl_config["hccl_buffer_size"]'  # of a group, goes before HCCL_BUFFSIZE
_MAGIC, _CODE = 0, 1  # words of the record
# Of op_kernel/probe/tiling.h.
PROBE_CONTEXT, PROBE_CLEAR, PROBE_STAMPS, PROBE_PASSED, PROBE_REPORT = 1, 15, 16, 0x600D, (64, 8)
_ANEW = (
    " - this group has failed for good: destroy its process group and make a new one, on all ranks; "
    "where one is lost, ascend_moe.agree and shrink make one of the others"
)


def soc_of(device: torch.device) -> str:
    """The name that torch_npu gives it."""
    return str(torch.npu.get_device_name(device))  # type: ignore[attr-defined]


def context_kind(soc: str) -> int:
    """The layout of the HCCL context on a SoC, by the name that torch_npu gives it."""
    if soc.startswith("Ascend910_93"):
        return CONTEXT_A3
    if soc.startswith("Ascend910B"):
        return CONTEXT_A2
    raise ArgumentError(
        f"tensors are on a {soc}: dispatch and combine run on Ascend910B (A2) and Ascend910_93 (A3)",
        argument="device",
    )


def deadline_s(first: bool) -> float:
    """Seconds that a kernel waits for a peer: ASCEND_MOE_TIMEOUT_S, default 300.

    Twice as long for a communicator's first op, whose peers may still be compiling; never so long that the
    runtime would stop the operator first (HCCL_EXEC_TIMEOUT).
    """
    given = timeout_s() if settings.TIMEOUT_S.is_set() else DEFAULT_TIMEOUT_S
    text = os.environ.get("HCCL_EXEC_TIMEOUT", "").strip()
    try:
        runtime = float(text) if text else _HCCL_EXEC_TIMEOUT_S
    except ValueError:
        runtime = _HCCL_EXEC_TIMEOUT_S
    limit = runtime - _MARGIN_S if runtime > 2 * _MARGIN_S and math.isfinite(runtime) else math.inf
    return min(given * (2 if first else 1), limit)


class NpuCommunicator(GroupEnd):
    """One rank's end on its NPU: the place of an HCCL communicator, and the error record of its ops.

    Attributes:
        name: HCCL's name of it, the group_ep.
        rank, world, data_bytes, lent_bytes, context_kind, ranks_per_server: what a call is planned for. The last
            is 0 on an A3, whose stores reach the ranks of other servers.
        proven: the bring-up's probes that have passed on this machine (``verdict``).
        auto_is_window: whether comm_alg "auto" means window here: no bring-up has passed what direct needs.
        meeting: how the cores of this rank meet the faster, as bring-up has timed it; "": not known.
        algorithm: what the last op was launched as, "window" or "direct"; "" before any.
        failed: the first fatal error; later ops raise it at once, after ``ascend_moe.close(name)`` too, until
            the process group is made anew.
    """

    def __init__(
        self,
        name: str,
        group: Any,
        device: torch.device,
        ranks_per_server: int,
        proven: frozenset[str],
        meeting: str = "",
    ) -> None:
        self.name, self.device = name, device
        self.group = weakref.ref(group)
        self.rank, self.world = int(group.rank()), int(group.size())
        self.soc = soc_of(device)
        self.context_kind = context_kind(self.soc)
        on_a2 = self.context_kind == CONTEXT_A2
        self.ranks_per_server = ranks_per_server
        self.proven, self.meeting = proven, meeting
        self.auto_is_window = not probe_results.allows("direct", proven)
        options = getattr(group._get_backend(torch.device("npu")), "options", None)
        own = (getattr(options, "hccl_config", None) or {}).get("hccl_buffer_size")
        self.own_buffer = bool(own)
        self.buffer_mib = settings.HCCL_BUFFSIZE.value_of(str(own), OWN_OPTION) if own else settings.HCCL_BUFFSIZE.get()
        if on_a2 and self.buffer_mib <= A2_STATE_MIB:
            setting = OWN_OPTION if self.own_buffer else settings.HCCL_BUFFSIZE.name
            raise ArgumentError(
                f"{setting}={self.buffer_mib} must be more than {A2_STATE_MIB} MiB on an A2, whose last "
                "MiB holds the status blocks",
                argument=settings.HCCL_BUFFSIZE.name,
            )
        lent_mib = settings.LENT_MIB.get() or 0
        self.data_bytes = (self.buffer_mib - lent_mib - (A2_STATE_MIB if on_a2 else 0)) * MIB
        if self.data_bytes <= 0:
            raise ArgumentError(
                f"{settings.LENT_MIB.name}={lent_mib} leaves no room for rows in the window of {self.buffer_mib} MiB: "
                f"export a larger {settings.HCCL_BUFFSIZE.name} on all ranks",
                argument=settings.LENT_MIB.name,
            )
        self.lent_bytes = lent_mib * MIB
        self._lent: RegisteredMemory | None = None
        self.number = take_number(self)
        self.end = binding.End(  # its lock is held from the look to the launch
            number=self.number,
            world=self.world,
            rank=self.rank,
            window_mib=self.data_bytes // MIB,
            lent_mib=lent_mib,
            context_kind=self.context_kind,
            ranks_per_server=self.ranks_per_server,
            near_stores=near_stores(),
            rdma_flags=rdma_flags(),
            auto_is_window=self.auto_is_window,
            buffer_mib=self.buffer_mib,
            meeting=1 + settings.MEETINGS.index(meeting) if meeting else 0,
            on_npu=True,
            of_process_group=True,
        )
        log.opened(name, self.rank, self.world, self.data_bytes // MIB, lent_mib)
        if self.auto_is_window:
            log.unproven(name, self.rank, probe_results.COMMAND)
        words = calls.error_record_words()
        self.record = torch.zeros(words, dtype=torch.int32, device=device)
        self._host = torch.zeros(words, dtype=torch.int32, device="cpu").pin_memory()
        self._seen: Any = self._host.numpy()
        self.end.take_record(self.record, self._host)

    @property
    def algorithm(self) -> str:
        return ALGORITHMS[self.end.algorithm]

    def alive(self) -> bool:
        """Whether its process group was not destroyed."""
        return comm.is_alive(self.group)

    def raise_why_unusable(self) -> None:
        """Raises what keeps ops from using this end, if anything does."""
        self.look()

    def look(self) -> None:
        """Raises what an earlier op found, as far as it is known by now; waits for nothing otherwise."""
        self.raise_if_failed()
        if self._seen[_MAGIC] != 0:
            self._raise_found()

    def lend(self, sizes: tuple[int, ...], size: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of ``size`` bytes in this rank's window. The lock of the end is held."""
        self.look()
        if size == 0:
            return torch.empty(sizes, dtype=dtype, device=self.device)
        if self._lent is None:
            if self.lent_bytes == 0:
                raise no_room(size, 0, 0, size)
            base = self._data_address() + self.data_bytes
            self._lent = RegisteredMemory(library.lib().am_lent_open(self.rank, base, self.lent_bytes))
            self.end.lend(self._lent.handle)
        address, generation = self._lent.grant(size, self.lent_bytes)
        release = ctypes.cast(library.lib().am_lent_release, ctypes.c_void_p).value
        given = (address, sizes, dtype, self.device, self._lent.handle, generation, release)
        made: torch.Tensor = torch.ops.ascend_moe_npu.lent_tensor(*given)
        return made

    def clear_state(self) -> None:
        """Zeroes this rank's state area. Nobody may store there meanwhile: before the first op of the group only.

        On an A2 it is the last MiB of the only window. What lies there may be what a framework's first broadcast has
        carried, or, in memory that was another group's, the abort of that group, which would end the first op.
        """
        self._probed(PROBE_CLEAR)

    def _data_address(self) -> int:
        """Returns the data address of this rank's window, as its kernels find it."""
        words = self._probed(PROBE_CONTEXT)[0]
        return words[2] | words[3] << 32

    def stamps(self, op: str) -> list[stamps.Stamp]:
        """What the cores of this rank's last dispatch or combine have left; none without `settings.STAMPS`.

        Waits for that op. Launches the probe kernel, which copies a block of every core at a time.
        """
        blocks = stamps.words_of_core() // PROBE_REPORT[1]
        first = (stamps.OPS[op] - 1) * blocks + 1
        parts = [self._launch_probe(PROBE_STAMPS, first + block) for block in range(blocks)]
        return stamps.of_words([word for core in zip(*parts, strict=True) for part in core for word in part])

    def _probed(self, mode: int) -> list[list[int]]:
        """Every core's report, where core 0 has passed."""
        report = self._launch_probe(mode)
        words = report[0]
        if words[0] != PROBE_PASSED:
            raise AscendMoeError(
                f"group {self.name!r}, rank {self.rank}: its windows are not as planned (field {words[1]}: "
                f"{words[2]}, found {words[3]}): run ascend-moe validate --bringup"
            )
        return report

    def _launch_probe(self, mode: int, rounds: int = 1) -> list[list[int]]:
        """Every core's report, once the launch has ended."""
        npu_adapter.load()
        report = torch.zeros(PROBE_REPORT, dtype=torch.int32, device=self.device)
        place = (self.name, self.world, self.rank)
        machine = (self.buffer_mib, 0, self.ranks_per_server)
        torch.ops.ascend_moe_npu.probe(*place, mode, 1, rounds, 0, *machine, report)
        return [[word & 0xFFFFFFFF for word in block] for block in report.tolist()]

    def check(self) -> None:
        """Waits for the device, then raises what the ops so far found."""
        torch.npu.synchronize(self.device)  # type: ignore[attr-defined]
        self._host.copy_(self.record)
        self.look()

    def _raise_found(self) -> None:
        if not capturing():
            # The record may still be on its way; an error may cost a wait.
            torch.npu.synchronize(self.device)  # type: ignore[attr-defined]
        words = self._seen.copy()
        code = int(words[_CODE])
        error = calls.error_of(code, words.ctypes.data, "", self)
        if library.lib().am_error_is_fatal(code):
            error = self.failed = type(error)(f"{error}{_ANEW}", **error.details)
        if not capturing():
            self.record.zero_()
            self._host.zero_()
        raise error

    def retire(self) -> None:
        """No more tensors in the window; those that live stay memory while HCCL's window does."""
        if self._lent is not None:
            self.end.lend(0)
            self._lent.retire(lambda: None)
            self._lent = None

    def describe_peer(self, rank: int) -> str:
        """Nothing can be seen of a peer's process from here."""
        return ""


_ends: dict[str, NpuCommunicator] = {}
_closed: list[NpuCommunicator] = []  # kept: a captured graph writes into their records when it is replayed
_lock = threading.Lock()
_cleared: weakref.WeakSet[Any] = weakref.WeakSet()  # groups on A2 whose state areas were zeroed
_clearing: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()


def known(group_ep: str) -> NpuCommunicator | None:
    """The end that an op has opened, if any."""
    return _ends.get(group_ep)


def find(group_ep: str, world: int, rank: int, device: torch.device, op_name: str = "") -> NpuCommunicator:
    """This process's end of the HCCL communicator of that name; ``op_name`` begins the message of an error.

    Raises:
        CommError: this group has failed, in an end that was closed since.
        ArgumentError: no such communicator, or one of a backend whose windows are in CPU memory; or
            ep_world_size or ep_rank_id is not its own; or its ranks are on servers as no A2 serves them.
        ConfigMismatch, CommTimeout, PeerLost: as ``npu_servers``, of a group's first call.
    """
    try:
        group = comm.hccl_group(group_ep, world, rank)
    except ArgumentError as error:
        raise type(error)(f"{op_name}: {error}" if op_name else str(error), **error.details) from None
    share, proven = _agreed(group_ep, group, device)  # without the lock: it waits for the other ranks
    meeting = _faster_meeting(group_ep, group, device)
    with _lock:
        end = _ends.get(group_ep)
        if end is None or end.group() is not group or end.device != device:
            _forget(group_ep)
            for closed in _closed:
                if closed.group() is group:  # HCCL's windows still hold its fatal error
                    if not capturing():  # nobody may have asked since its last op
                        with contextlib.suppress(AscendMoeError):
                            closed.check()
                    closed.raise_if_failed()
            end = _ends[group_ep] = NpuCommunicator(group_ep, group, device, share, proven, meeting)
    if end.context_kind == CONTEXT_A2 and group not in _cleared:
        _clear_together(end, group)
    return end


def _clear_together(end: NpuCommunicator, group: Any) -> None:
    """Zeroes the state areas of all ranks of a group on A2, once, before any of them goes on. Collective."""
    with _lock:
        gate = _clearing.setdefault(group, threading.Lock())
    with gate:
        if group in _cleared:
            return
        try:
            end.clear_state()
        except (AscendMoeError, RuntimeError) as error:  # HCCL may have zeroed it all the same
            log.say(logging.WARNING, "the state area of group %s was not cleared: %s", end.name, error, rank=end.rank)
        npu_servers.meet_again(end.name, group, deadline_s(first=True), "clear state")
        _cleared.add(group)


def _faster_meeting(group_ep: str, group: Any, device: torch.device) -> str:
    """What ``faster_meeting`` knows of this machine. After ``_agreed``, whose records of the ranks it reads."""
    end = _ends.get(group_ep)
    if end is not None and end.group() is group:
        return end.meeting
    soc = soc_of(device)
    records = npu_servers.gather(group_ep, group, deadline_s(first=True), soc)
    return probe_results.faster_meeting(soc, npu_servers.topology(records))


def before_opening(group_ep: str, world: int, rank: int, device: torch.device) -> tuple[int, int]:
    """The layout of the context, and ranks of a server, that an end will be opened with: opens and launches nothing.

    Collective at first. Raises as ``find``.
    """
    group = comm.hccl_group(group_ep, world, rank)
    return context_kind(soc_of(device)), _agreed(group_ep, group, device)[0]


def _agreed(group_ep: str, group: Any, device: torch.device) -> tuple[int, frozenset[str]]:
    """Ranks a server, and what bring-up has proven, with which an end of the group is opened. Collective at first."""
    end = _ends.get(group_ep)
    if end is not None and end.group() is group:
        return end.ranks_per_server, end.proven
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
    end = _ends.pop(group_ep, None)
    if end is not None:
        end.end.shut()
        end.clear_tracebacks()
        end.retire()
        _closed.append(end)


def close(group_ep: str) -> None:
    """Forgets this process's end. Idempotent. HCCL's windows live on until its group is destroyed."""
    with _lock:
        _forget(group_ep)


def check(group_ep: str | None = None) -> None:
    """Waits for the ops on the NPU and raises the error that one of them met; does nothing without any.

    An op on an NPU returns before its kernel has run. What the kernel finds is raised here, or by one of the next
    16 ops on that communicator.

    Args:
        group_ep: the communicator; None for all of this process. Ops on CPU raise by themselves.

    Raises:
        InvalidExpertId, RoutingOverflow, RoutingMismatch, ConfigMismatch, ArgumentError: the communicator
            goes on.
        PeerLost, CommTimeout, CorruptStatus: it has failed for good; make its process group anew.
    """
    with _lock:
        ends = [end for end in _ends.values() if group_ep is None or end.name == group_ep]
    for end in ends:
        with end.end:
            end.check()


def capturing() -> bool:
    """True while this thread's NPU stream records a graph."""
    npu = getattr(torch, "npu", None)
    return bool(npu is not None and npu.is_current_stream_capturing())


def of_own_window(error: WindowTooSmall, group_ep: str) -> WindowTooSmall:
    """The variable does not count for a group that was made with a size of its own: names that option."""
    end = known(group_ep)
    if end is None or not end.own_buffer:
        return error
    text = str(error).partition(": export HCCL_BUFFSIZE")[0]
    fix = f"make the group with {OWN_OPTION} = {error.needed_mib} on all ranks"
    return WindowTooSmall(f"{text}: {fix}", **error.details)


comm.register_device("npu", comm.Device(known, find, close, npu_servers.vote))
