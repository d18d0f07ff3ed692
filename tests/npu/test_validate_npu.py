"""`ascend-moe validate` and its bring-up on virtual NPUs: the real torch_npu wheel, HCCL groups."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ascend_moe.validate.probes import KERNEL_PROBES
from ascend_moe.validate.probes_ops import OP_PROBES

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
    """torch_npu prints lines of its own before, and after a failure."""
    found: dict[str, Any] = json.JSONDecoder().raw_decode(said[said.index("{\n") :])[0]
    return found


@pytest.mark.parametrize("soc", ["Ascend910_9391", "Ascend910B3"])
def test_validate(soc: str, tmp_path: Path) -> None:
    code, said = on_vnpu(tmp_path, soc, "validate", "--extra", "4", "--json")
    found = read(said)
    assert code == 0 and found["ok"], said
    assert found["device"] == f"virtual npu, {soc}, 2 processes, hccl" and found["world"] == 2
    assert {one["op"] for one in found["counts"]} == {"dispatch", "combine", "errors"}
    assert len([one for one in found["counts"] if one["op"] == "combine"]) == 18


def test_two_servers(tmp_path: Path) -> None:
    """9 ranks of an A2: the last is on a server of its own, reached by RDMA."""
    head = [sys.executable, "-m", "ascend_moe", "vnpu", "--soc", "Ascend910B3", "--devices", "9", "--"]
    words = [sys.executable, "-m", "ascend_moe", "validate", "--extra", "0", "--dtypes", "bf16"]
    done = subprocess.run([*head, *words], cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "several servers (ranks a server: 8)" in done.stdout and "PASS: " in done.stdout


@pytest.mark.parametrize(("soc", "cores"), [("Ascend910_9391", 48), ("Ascend910B3", 40)])
def test_bringup(soc: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All probes pass; those of the kernel were launched as an operator, by both ranks."""
    monkeypatch.setenv("ASCEND_MOE_VNPU_REPORT", str(tmp_path / "report"))
    code, said = on_vnpu(tmp_path, soc, "validate", "--bringup", "--json")
    found = {one["name"]: one for one in read(said)["findings"]}
    names = [probe.name for probe in (*KERNEL_PROBES, *OP_PROBES)]
    assert list(found) == names and len(names) == 11
    # The rate is measured beside other tests: anything.
    rate = found.pop("cycle rate")["verdict"]
    assert {one["verdict"] for one in found.values()} == {"PASS"}, said
    assert code == (0 if rate == "PASS" else 1)
    assert f"on {cores} cores" in found["context layout"]["detail"]
    ranks = [json.loads(line) for line in (tmp_path / "report").read_text().splitlines()]
    launches = {one["rank"]: one["launches"]["AscendMoeProbe"] for one in ranks if one["rank"]}
    assert launches == {"0": 13, "1": 13}


def test_bringup_fails_on_broken_devices(tmp_path: Path) -> None:
    """The same launches, on devices that lose a store, tear a block, let a flag overtake, miss a meeting."""
    script = str(Path(__file__).with_name("npu_broken_probes.py"))
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", script]
    done = subprocess.run(
        [sys.executable, "-m", "ascend_moe", "vnpu", "--devices", "2", "--", *run],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )
    found = {one["name"]: one for one in read(done.stdout)["findings"]}
    assert list(found) == [probe.name for probe in KERNEL_PROBES], done.stdout
    texts = {
        "peer store and read": r"rank 0, core 0: at 0 is 0x\w+, not 0x\w+",
        "32-byte atomicity": r"rank \d, core 1: at 7 is",
        "data before flag": r"rank \d, core 1: at \d is 0x\w+, not",
        "SyncAll": r"rank \d, core \d+: at 47 is",
    }
    for name, text in texts.items():
        assert found[name]["verdict"] == "FAIL" and re.match(text, found[name]["detail"]), found[name]
    assert all(found[name]["verdict"] == "PASS" for name in ("context layout", "zero-initialised state"))


def test_doctor(tmp_path: Path) -> None:
    _, said = on_vnpu(tmp_path, "Ascend910B3", "doctor", "--json")
    found = {one["topic"]: one for one in read(said)["findings"]}
    assert found["NPUs"]["what"] == "2 x Ascend910B3 (virtual: host memory and CPU cores)"
    assert found["operator package"]["level"] == found["torch_npu"]["level"] == "ok"
    assert "nothing here says anything about silicon" in found["virtual NPU"]["what"]
