"""The probe kernel on an NPU, virtual or not: one rank of an HCCL group launches it through the adapter."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import AscendMoeError, LibraryError
from ..ops import npu_adapter, npu_communicator
from .probes_kernel import CONTEXTS, MODES, WAIT_S, Seen
from .run import Place

REPORT = (64, 8)  # moe::kProbeReportBlocks, words of a block
CORES = 6  # word of a report: moe::kPrCores
MEET_S = 60.0
_LAYOUTS = {kind: name for name, kind in CONTEXTS.items()}


@dataclass
class Npu:
    """A device for the probes: this rank's NPU. Every launch is collective over the ranks of ``place``.

    Attributes:
        world: ranks of the group. ranks: those whose reports ``launch`` returns.
        cores: vector cores of the last launch; 0 before it.
        broken: for tests, every probe finds a device which does what it rules out.
    """

    place: Place
    broken: bool = False
    ranks: int = 1
    cores: int = 0
    _launches: int = field(default=0, repr=False)

    @property
    def world(self) -> int:
        """Ranks of the group."""
        return self.place.world

    @property
    def layout(self) -> str:
        """Of HCCL's context: "a3" or "a2"."""
        return _LAYOUTS[self._end().context_kind]

    def launch(self, mode: str, rounds: int = 1, cycles: int = 0) -> tuple[list[Seen], float]:
        """Runs one probe when all ranks are there: what this rank's cores report, and the seconds it took.

        Raises:
            AscendMoeError: a rank did not come, or CANN refuses the launch.
            LibraryError: the adapter or the operator package is missing, or the package has no probe.
        """
        npu_adapter.load()
        end = self._end()
        report = torch.zeros(REPORT, dtype=torch.int32, device=self.place.device)
        numbers = (MODES[mode], self._meet(), rounds, cycles, MODES[mode] if self.broken else 0)
        settings = (end.buffer_mib, int(WAIT_S * 1e6))
        npu: Any = torch.npu  # type: ignore[attr-defined,unused-ignore]
        npu.synchronize(self.place.device)
        start = time.monotonic()
        try:
            torch.ops.ascend_moe_npu.probe(
                self.place.group_ep, self.world, self.place.rank, *numbers, *settings, report
            )
            npu.synchronize(self.place.device)
        except RuntimeError as error:
            text = str(error).partition("\n")[0]
            raise (LibraryError if "is not among the operators" in text else AscendMoeError)(text) from error
        seconds = time.monotonic() - start
        words = [[word & 0xFFFFFFFF for word in block] for block in report.cpu().tolist()]
        self.cores = words[0][CORES]
        found = [Seen(self.place.rank, core, *block[:6]) for core, block in enumerate(words)]
        return found[: max(self.cores, 1)], seconds

    def _end(self) -> npu_communicator.NpuCommunicator:
        place = self.place
        return npu_communicator.find(place.group_ep, place.world, place.rank, place.device)

    def _meet(self) -> int:
        """Waits for all ranks; returns the nonce of this launch, rank 0's."""
        key = f"ascend_moe/bringup/{self.place.group_ep}/{self._launches}"
        self._launches += 1
        store: Any = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined,unused-ignore]
        store.set(f"{key}/{self.place.rank}", str(secrets.randbits(30) | 1))
        keys = [f"{key}/{rank}" for rank in range(self.world)]
        try:
            store.wait(keys, timedelta(seconds=MEET_S))
        except RuntimeError:
            missing = [rank for rank, one in enumerate(keys) if not store.check([one])]
            raise AscendMoeError(
                f"rank(s) {missing} did not come to the probe within {MEET_S:g} s: their own output says why"
            ) from None
        return int(store.get(keys[0]))
