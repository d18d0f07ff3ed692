"""``torch_npu.profiler`` of the shim: torch.profiler of the CPU.

Names and file formats are torch_npu's. The events are those that torch records on a CPU: operators by torch's names and
the program's record_function ranges, without NPU kernels and with times of this machine.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction

__all__ = [
    "AiCMetrics",
    "ExportType",
    "ProfilerAction",
    "ProfilerActivity",
    "ProfilerLevel",
    "profile",
    "schedule",
    "supported_activities",
    "tensorboard_trace_handler",
]

ProfilerLevel = Enum("ProfilerLevel", "Level_none Level0 Level1 Level2")
ExportType = Enum("ExportType", "Text Db")
AiCMetrics = Enum(
    "AiCMetrics",
    "PipeUtilization ArithmeticUtilization Memory MemoryL0 MemoryUB ResourceConflictRatio L2Cache MemoryAccess "
    "AiCoreNone",
)


class ProfilerActivity:
    """Activities of torch_npu; both mean the CPU."""

    CPU = NPU = torch.profiler.ProfilerActivity.CPU


def supported_activities() -> set[torch.profiler.ProfilerActivity]:
    return {ProfilerActivity.CPU}


class _ExperimentalConfig:
    """Options for NPU counters, without effect."""

    def __init__(self, **options: Any) -> None:
        vars(self).update(options)


def schedule(
    wait: int, active: int, warmup: int = 0, repeat: int = 0, skip_first: int = 0, skip_first_wait: int = 0
) -> Callable[[int], ProfilerAction]:
    """Return ``torch.profiler.schedule`` of these numbers of steps; the defaults are torch_npu's."""
    chosen: Callable[[int], ProfilerAction] = torch.profiler.schedule(
        wait=wait, warmup=warmup, active=active, repeat=repeat, skip_first=skip_first, skip_first_wait=skip_first_wait
    )
    return chosen


class profile(torch.profiler.profile):
    """``torch.profiler.profile`` of the CPU, with torch_npu's arguments and trace format.

    Args:
        activities: members of ProfilerActivity, all of which mean the CPU.
        experimental_config: accepted, without effect.
        schedule, on_trace_ready, record_shapes, profile_memory, with_stack, with_modules, with_flops: as in torch.
    """

    def __init__(
        self,
        activities: Iterable[torch.profiler.ProfilerActivity] | None = None,
        schedule: Callable[[int], ProfilerAction] | None = None,
        on_trace_ready: Callable[..., Any] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_modules: bool = False,
        with_flops: bool = False,
        experimental_config: _ExperimentalConfig | None = None,
    ) -> None:
        super().__init__(
            activities=[ProfilerActivity.CPU], schedule=schedule, on_trace_ready=on_trace_ready,
            record_shapes=record_shapes, profile_memory=profile_memory, with_stack=with_stack,
            with_modules=with_modules, with_flops=with_flops,
        )  # fmt: skip
        self._exported: tuple[Any, list[dict[str, Any]]] = (None, [])

    def export_chrome_trace(self, output_path: str | os.PathLike[str]) -> None:  # type: ignore[override]
        """Write the complete events of the last recorded steps as a JSON list, as torch_npu does; torch writes a dict.

        Each event has name, ts and dur (microseconds), pid, tid and args.
        """
        Path(output_path).write_text(json.dumps(self._events()))

    def _events(self) -> list[dict[str, Any]]:
        recorder, events = self._exported
        if recorder is None or recorder is not self.profiler:  # torch writes a recording out once
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "trace.json")
                super().export_chrome_trace(path)
                whole = json.loads(Path(path).read_text())["traceEvents"]
            # Complete events only: readers of torch_npu's traces take ts and dur of each.
            events = [event for event in whole if event.get("ph") == "X" and event.get("cat") != "Trace"]
            self._exported = (self.profiler, events)
        return events


def tensorboard_trace_handler(
    dir_name: str, worker_name: str | None = None, analyse_flag: bool = True, async_mode: bool = False
) -> Callable[[profile], None]:
    """Return a function for `profile`'s on_trace_ready.

    It writes ``<worker>_<time>_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json`` in ``dir_name``.

    Args:
        dir_name: output folder, created if it is missing.
        worker_name: beginning of the file's path; None: host name and process number.
        analyse_flag, async_mode: have no effect; the trace is written immediately.
    """
    worker = worker_name or f"{socket.gethostname()}_{os.getpid()}"

    def write(recorded: profile) -> None:
        now = time.time()
        stamp = time.strftime("%Y%m%d%H%M%S", time.localtime(now)) + f"{int(now * 1000) % 1000:03}"
        folder = Path(dir_name, f"{worker}_{stamp}_ascend_pt", "ASCEND_PROFILER_OUTPUT")
        folder.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(folder / "trace_view.json")

    return write
