"""Faults planted into the processes of a bring-up: an exception of an AI core, a hang, an abort, a killed process.

And a wrong result, after which a process is replaced too.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from ascend_moe.validate import bringup, probes, supervisor
from ascend_moe.validate.probes import PASS, Judged, Probe
from ascend_moe.validate.run import DevicePlace

AI_CORE = "The error from device(chipId:0), EZ9999: error code 507015, MTE DDR address out of range, planted"


def stop_the_core() -> None:
    """As after an exception of an AI core: nothing runs on the device of this process any more."""
    bringup.device_error = lambda place: AI_CORE  # type: ignore[assignment]
    raise RuntimeError(AI_CORE)


def differ() -> None:
    raise AssertionError("rank 0, core 1: word 3 is 0x5, planted")


def end(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


WRONG = "wrong result"
# Kind -> what a rank does instead of its probe, and what the result says of it.
KINDS: dict[str, tuple[Callable[[], object], str]] = {
    "AI core": (stop_the_core, "507015, MTE DDR address out of range"),
    "hang": (lambda: threading.Event().wait(), "no result within"),
    "abort": (os.abort, "was ended by SIGABRT: Fatal Python error: Aborted"),
    "killed": (end(signal.SIGKILL), "was ended by SIGKILL"),
    WRONG: (differ, "word 3 is 0x5"),
    "bad address": (end(signal.SIGSEGV), "was ended by SIGSEGV: Fatal Python error: Segmentation fault"),
}


@dataclass(frozen=True)
class Planted:
    """`supervisor.serve` of a process in which ``rank`` has a fault in each of some probes.

    ``faults``: kind by probe. ``real``: other probes run; if not, they pass at once.
    """

    faults: Mapping[str, str] = field(default_factory=dict)
    rank: int = 1
    real: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, pipe: Connection, ranks: bringup.Ranks, session: str, log: str) -> None:
        judge, lost = Probe.judge, list[str]()

        def planted(probe: Probe, place: Any) -> Judged:
            own = not isinstance(place, DevicePlace) or place.rank == self.rank
            if own and (probe.name in self.faults or lost):
                lost.append(probe.name)
                kind = self.faults.get(probe.name, "AI core")
                return judge(Probe(probe.name, "", lambda _: KINDS[kind][0]()), place)
            return judge(probe, place) if self.real else Judged(PASS, "as planted")

        os.environ.update(self.environment)  # the fork server's is another
        Probe.judge = planted  # type: ignore[method-assign]
        probes.ROUNDS = 20
        supervisor.serve(pipe, ranks, session, log)
