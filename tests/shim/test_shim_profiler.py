"""The shim's torch_npu.profiler writes torch_npu's files, with events of the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from routed_tokens import randn


def read_events(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())
    assert all({"name", "ts", "dur"} <= event.keys() for event in events)
    return events


@pytest.mark.filterwarnings("ignore:Profiler")
def test_profiler_of_scheduled_steps(torch_npu: Any, tmp_path: Path) -> None:
    """As sgl-kernel-npu measures: one step of two, two exports, a list whose events have ts and dur."""
    from torch_npu.profiler import ProfilerActivity, profile, schedule, supported_activities

    x = randn(2, 8)
    with profile(activities=[ProfilerActivity.NPU], schedule=schedule(wait=1, active=1, repeat=1)) as recorded:
        for times in (1, 3):
            for _ in range(times):
                torch.ops.npu.npu_swiglu(x)
            recorded.step()
    for name in ("first", "second"):
        recorded.export_chrome_trace(tmp_path / name)
        names = [event["name"] for event in read_events(tmp_path / name)]
        assert names.count("npu::npu_swiglu") == 3 and "ProfilerStep#1" in names
    assert supported_activities() == {ProfilerActivity.CPU} and ProfilerActivity.NPU in supported_activities()
