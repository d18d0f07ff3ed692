"""`ascend-moe validate` and its bring-up on virtual NPUs: the real torch_npu wheel, HCCL groups."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.npu


def on_vnpu(tmp_path: Path, soc: str, *argv: str) -> tuple[int, str]:
    head = [sys.executable, "-m", "ascend_moe", "vnpu", "--soc", soc, "--devices", "2", "--"]
    done = subprocess.run(
        [*head, sys.executable, "-m", "ascend_moe", *argv],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def read(said: str) -> dict[str, Any]:
    """torch_npu prints a line of its own before."""
    found: dict[str, Any] = json.loads(said[said.index("{\n") :])
    return found


@pytest.mark.parametrize("soc", ["Ascend910_9391", "Ascend910B3"])
def test_validate(soc: str, tmp_path: Path) -> None:
    code, said = on_vnpu(tmp_path, soc, "validate", "--extra", "4", "--json")
    found = read(said)
    assert code == 0 and found["ok"], said
    assert found["device"] == f"virtual npu, {soc}, 2 processes, hccl" and found["world"] == 2
    assert {one["op"] for one in found["counts"]} == {"dispatch", "combine", "errors"}
    assert len([one for one in found["counts"] if one["op"] == "combine"]) == 18


def test_bringup(tmp_path: Path) -> None:
    code, said = on_vnpu(tmp_path, "Ascend910_9391", "validate", "--bringup", "--json")
    verdicts = {one["name"]: one["verdict"] for one in read(said)["findings"]}
    by_ops = {"context layout", "cycle rate", "zero-initialised state"}
    by_ops |= {"first op", "BS = 0 launch", "abort", "capture and replay"}
    assert {name for name, verdict in verdicts.items() if verdict == "PASS"} == by_ops, said
    assert set(verdicts.values()) == {"PASS", "SKIPPED"} and code == 3


def test_doctor(tmp_path: Path) -> None:
    _, said = on_vnpu(tmp_path, "Ascend910B3", "doctor", "--json")
    found = {one["topic"]: one for one in read(said)["findings"]}
    assert found["NPUs"]["what"] == "2 x Ascend910B3 (virtual: host memory and CPU cores)"
    assert found["operator package"]["level"] == found["torch_npu"]["level"] == "ok"
    assert "nothing here says anything about silicon" in found["virtual NPU"]["what"]
