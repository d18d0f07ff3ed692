"""The probe kernel and its two devices.

``Twin``: ranks are threads with windows in HCCL's layouts. ``Npu``: a rank of an HCCL group launches the kernel on its
NPU, real or virtual, through the adapter.
"""

from __future__ import annotations

import ctypes
import secrets
import socket
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ascendc_twin

from .. import comm
from ..errors import AscendMoeError
from ..native import library
from ..native.windows import MIB
from ..ops import npu_adapter, npu_communicator, npu_servers
from ..plan import limits
from .run import DevicePlace, exchanged

CONTEXTS = {"a3": 1, "a2": 2}  # moe::kContextA3, kContextA2
STATE_MIB = 1  # of A2's window
CYCLES_PER_MICRO = 50  # as the kernels assume
PASSED, DIFFERS, TIMEOUT, MISMATCH = npu_communicator.PROBE_PASSED, 1, 2, 3
TILING_KEY = 1000  # ASCEND_MOE_TILING_KEY_PROBE
MODES = {"context": npu_communicator.PROBE_CONTEXT, "store": 2, "atomic": 3, "order": 4, "core barrier": 5}
MODES |= {"cycles": 6, "zero": 7}
MODES |= {"pull": 8, "relay": 9, "queue": 10, "writers": 11, "neighbours": 12, "batch": 13, "stride": 14}
MODES["levels"] = 17
MODES |= {"clear": npu_communicator.PROBE_CLEAR, "timestamps": npu_communicator.PROBE_TIMESTAMPS}  # no probes
ROW_BYTES = 16384
WORKSPACE_BYTES = (3 + 256) * 64 * 32  # moe::kProbeWorkspaceBytes
WAIT_S = 10.0
REPORT = npu_communicator.PROBE_REPORT
CORES = 6  # word of a report: moe::kPrCores
MEET_S = 60.0


class ProbeTiling(ctypes.Structure):
    """The fields of the C++ struct moe::MoeProbeTiling that follow CANN's MC2 head."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("mode", "world", "rank", "cores")),
        *((name, ctypes.c_uint32) for name in ("context_kind", "nonce", "rounds", "intra_node_ranks")),
        ("data_bytes", ctypes.c_uint64),
        ("deadline_cycles", ctypes.c_uint64),
    ]


@dataclass(frozen=True)
class Seen:
    """Report of one core: ``code`` is PASSED or a failure; the meaning of the other words depends on the probe."""

    rank: int
    core: int
    code: int
    where: int
    wanted: int
    seen: int
    done: int
    cycles: int = 0


@dataclass
class _Call:
    windows: ascendc_twin.Windows
    args: list[list[Any]]
    tilings: list[bytes]

    def seen(self) -> list[Seen]:
        return [
            Seen(rank, core, *(int(word) for word in words[:6]))
            for rank, (report, _) in enumerate(self.args)
            for core, words in enumerate(report)
        ]


@dataclass
class Twin:
    """The twin (emulator) as a device for probes: ``world`` ranks with windows of ``layout`` "a3" or "a2".

    ``ranks_per_server`` 0: one server. ``folder``: kernel sources, None: the package's.
    """

    world: int = 2
    cores: int = 3
    ranks_per_server: int = 0
    layout: str = "a3"
    folder: Path | None = None
    window_mib: int = 4

    @property
    def ranks(self) -> range:
        """Ranks whose reports `launch` returns: all."""
        return range(self.world)

    @property
    def hosts(self) -> list[str]:
        """The host name of every rank, which is this host's."""
        return [socket.gethostname()] * self.world

    def launch(self, mode: str, rounds: int = 1, cycles: int = 0) -> tuple[list[Seen], float]:
        """Run the probe ``mode`` on new windows; return the reports of all cores and the seconds of the launch."""
        call = self._prepare(mode, rounds, cycles)
        start = time.monotonic()
        self._kernels.launch("ascend_moe_probe", call.args, call.tilings, self.cores, TILING_KEY, call.windows)
        seconds = time.monotonic() - start
        return call.seen(), seconds

    def explore(self, mode: str, rounds: int, schedules: int) -> tuple[ascendc_twin.Exploration, list[Seen]]:
        """Run the probe ``mode`` under ``schedules`` of the checked engine, which checks the probe kernel itself.

        As in the built package, the compiler adds no waits. In half of the schedules stores arrive out of order, which
        detects a flag sent before its rows have left. The result is that of a launch with an error, else of the last.
        """
        for unordered in (True, False):
            call = self._prepare(mode, rounds, 0)  # new windows, without flags of earlier schedules
            launch = ("ascend_moe_probe", call.args, call.tilings, self.cores, TILING_KEY, call.windows)
            how: dict[str, Any] = {"unordered": unordered, "auto_sync": False, "deterministic": False}
            found = self._kernels.explore(*launch, schedules=(schedules + unordered) // 2, **how)
            if not found.ok:
                break
        return found, call.seen()

    def _windows(self) -> ascendc_twin.Windows:
        share, data_bytes = self.ranks_per_server if self.layout == "a2" else 0, self.window_mib * MIB
        return ascendc_twin.Windows(self.world, data_bytes=data_bytes, layout=self.layout, ranks_per_server=share)

    def _prepare(self, mode: str, rounds: int, cycles: int) -> _Call:
        windows = self._windows()
        reports = [np.zeros((self.cores, 8), np.uint32) for _ in range(self.world)]
        spaces = [np.zeros(WORKSPACE_BYTES, np.uint8) for _ in range(self.world)]
        nonce = secrets.randbits(30) | 1
        head = bytes(limits()["mc2_bytes"])
        ranks = range(self.world)
        tilings = [head + bytes(self._tiling(mode, rank, rounds, cycles, nonce)) for rank in ranks]
        return _Call(windows, [list(pair) for pair in zip(reports, spaces, strict=True)], tilings)

    def _tiling(self, mode: str, rank: int, rounds: int, cycles: int, nonce: int) -> ProbeTiling:
        tiling = ProbeTiling(mode=MODES[mode], world=self.world, rank=rank, cores=self.cores)
        tiling.context_kind, tiling.nonce, tiling.rounds = CONTEXTS[self.layout], nonce, rounds
        tiling.intra_node_ranks = self.ranks_per_server
        state = STATE_MIB if self.layout == "a2" else 0
        tiling.data_bytes = (self.window_mib - state) * MIB
        tiling.deadline_cycles = cycles or int(WAIT_S * 1e6 * CYCLES_PER_MICRO)
        return tiling

    @cached_property
    def _kernels(self) -> ascendc_twin.Kernels:
        folder = self.folder or library.native_source_root() / "op_kernel"
        return ascendc_twin.load(folder / "ascend_moe_probe.cpp", includes=[folder])


@dataclass
class Npu:
    """This rank's NPU as a device for probes. Every launch is collective over the ranks of ``place``.

    ``cores``: vector cores of the last launch.
    """

    place: DevicePlace
    cores: int = 0
    _launches: int = field(default=0, repr=False)

    @property
    def world(self) -> int:
        return self.place.world

    @property
    def ranks(self) -> range:
        """Ranks whose reports `launch` returns: this one."""
        return range(self.place.rank, self.place.rank + 1)

    # The probe of the servers uses these three before a communicator is opened, which launches a kernel on an A2.

    @property
    def ranks_per_server(self) -> int:
        """Ranks per server."""
        return self._before_opening()[1]

    @property
    def hosts(self) -> list[str]:
        """The host name of every rank."""
        place = self.place
        group = comm.hccl_group(place.group_ep, place.world, place.rank)
        records = npu_servers.gather(place.group_ep, group, MEET_S, npu_communicator.soc_of(place.device))
        return [record.host for record in records]

    @property
    def layout(self) -> str:
        """Layout of HCCL's context, "a3" or "a2"."""
        kind = self._before_opening()[0]
        return next(name for name, number in CONTEXTS.items() if number == kind)

    def launch(self, mode: str, rounds: int = 1, cycles: int = 0) -> tuple[list[Seen], float]:
        """Run the probe ``mode`` on all ranks; return the reports of this rank's cores and the launch's seconds."""
        npu_adapter.load()
        end = self._end(mode)
        report = torch.zeros(REPORT, dtype=torch.int32, device=self.place.device)
        numbers = (MODES[mode], self._wait_for_ranks(), rounds, cycles)
        machine = (end.buffer_mib, int(WAIT_S * 1e6), end.ranks_per_server, int(end.stores or False))
        npu: Any = torch.npu  # type: ignore[attr-defined,unused-ignore]
        npu.synchronize(self.place.device)
        start = time.monotonic()
        with npu_adapter.typed_errors():
            torch.ops.ascend_moe_npu.probe(self.place.group_ep, self.world, self.place.rank, *numbers, *machine, report)
            npu.synchronize(self.place.device)
        seconds = time.monotonic() - start
        words = [[word & 0xFFFFFFFF for word in block] for block in report.cpu().tolist()]
        self.cores = words[0][CORES]
        found = [Seen(self.place.rank, core, *block[:6]) for core, block in enumerate(words)]
        return found[: max(self.cores, 1)], seconds

    def _before_opening(self) -> tuple[int, int]:
        place = self.place
        return npu_communicator.before_opening(place.group_ep, place.world, place.rank, place.device)

    def _end(self, mode: str) -> npu_communicator.NpuCommunicator:
        """This rank's end, opened with the links that a mode of the probe needs: items go to all ranks by RDMA."""
        place = self.place
        stores = mode != "batch"
        return npu_communicator.find(place.group_ep, place.world, place.rank, place.device, stores=stores)

    def _wait_for_ranks(self) -> int:
        """Wait for all ranks and return the nonce of this launch, which rank 0 has drawn."""
        key = f"ascend_moe/bringup/{self.place.group_ep}/{self._launches}"
        self._launches += 1
        store: Any = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined,unused-ignore]
        nonces = exchanged(store, key, (self.place.rank, self.world), secrets.randbits(30) | 1, MEET_S)
        if missing := [rank for rank, nonce in enumerate(nonces) if nonce is None]:
            raise AscendMoeError(f"rank(s) {missing} did not reach the probe within {MEET_S:g} s: look at their output")
        return int(nonces[0])
