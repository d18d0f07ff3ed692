"""`ascend-moe validate`, its bring-up and what follows on virtual NPUs: the real torch_npu wheel, HCCL groups."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from npu_runs import launch, run

from ascend_moe.native import probe_results, timestamps
from ascend_moe.ops import npu_communicator
from ascend_moe.validate import times
from ascend_moe.validate.bringup import OP_PROBES
from ascend_moe.validate.probes import KERNEL_PROBES, SERVERS

pytestmark = pytest.mark.npu
A3, A2 = "Ascend910_9391", "Ascend910B3"


def on_vnpu(soc: str, *argv: str, devices: int = 2, python_path: Path | None = None, **env: str) -> tuple[int, str]:
    if python_path is not None:
        env["PYTHONPATH"] = f"{python_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    options = ["--no-verify", "--soc", soc, "--devices", str(devices)]
    done = launch(*options, "--", sys.executable, "-m", "ascend_moe", *argv, **env)
    print(done.returncode, done.stderr)  # for the report of a failure
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


def read(printed: str) -> dict[str, Any]:
    """torch_npu prints lines of its own before, and after a failure."""
    found: dict[str, Any] = json.JSONDecoder().raw_decode(printed[printed.index("{\n") :])[0]
    return found


@pytest.mark.parametrize("soc", [A3, pytest.param(A2, marks=pytest.mark.nightly)])
def test_validate_passes_on_the_virtual_npu(soc: str) -> None:
    code, printed = on_vnpu(soc, "validate", "--extra", "4", "--json")
    found = read(printed)
    assert code == 0 and found["ok"], printed
    assert found["device"] == f"virtual npu, {soc}, 2 processes, hccl" and found["world"] == 2
    assert {count["op"] for count in found["counts"]} == {"dispatch", "combine", "errors"}
    assert len([count for count in found["counts"] if count["op"] == "combine"]) == 23


@pytest.mark.nightly
@pytest.mark.parametrize(("soc", "cores"), [(A3, 12), (A2, 10)])
def test_four_ranks_pass_on_one_virtual_npu(soc: str, cores: int, tmp_path: Path) -> None:
    """A launch of the operator for each dispatch and each combine, none of another operator."""
    env = {"ASCEND_MOE_VNPU_REPORT": str(tmp_path / "report")}
    code, printed = on_vnpu(soc, "validate", "--one-card", "4", "--extra", "0", "--json", devices=1, **env)
    found = read(printed)
    assert code == 0 and found["ok"], printed
    assert found["device"] == f"virtual npu, {soc}, 4 ranks on one device, 8 and {cores} cores each"
    (report,) = map(json.loads, (tmp_path / "report").read_text().splitlines())
    assert report["launches"] == {"AscendMoeOneCard": 2 * found["cases"]}


@pytest.mark.nightly
def test_validate_passes_between_two_servers() -> None:
    """8 ranks of an A2 on two servers."""
    options = ("--extra", "0", "--dtype", "bf16")
    code, printed = on_vnpu(A2, "validate", *options, devices=8, ASCEND_MOE_RANKS_PER_SERVER="4")
    assert code == 0 and "several servers (4 ranks each)" in printed and "PASS: " in printed, printed


@pytest.mark.nightly
@pytest.mark.parametrize(("soc", "cores"), [(A3, 48), (A2, 40)])
def test_every_probe_of_the_bringup_passes(soc: str, cores: int, tmp_path: Path) -> None:
    """All probes pass; those of the kernel were launched as an operator, by both ranks."""
    report = tmp_path / "report"
    env = {"ASCEND_MOE_VNPU_REPORT": str(report), "ASCEND_MOE_PROVEN": ""}
    kind = probe_results.Machine(f"virtual {soc}", "", probe_results.ONE_SERVER)
    kind.path.unlink(missing_ok=True)
    code, printed = on_vnpu(soc, "validate", "--bringup", "--times", "--json", **env)
    assert (
        f"probe results: virtual {soc}, " in read(printed)["stored"]
        and "comm_alg auto is direct" in read(printed)["stored"]
    )
    kept = probe_results.read(kind.path)
    kind.path.unlink()
    assert kept is not None and kept.ranks == 2 and probe_results.allows("direct", kept.passed)
    assert set(kept.barriers) == {"blocks", "syncall"} and min(kept.barriers.values()) > 0
    found = {finding["name"]: finding for finding in read(printed)["probes"]}
    assert dict(kept.probes) == {name: finding["status"] for name, finding in found.items()}
    names = [probe.name for probe in (SERVERS, *KERNEL_PROBES, *OP_PROBES)]
    assert list(found) == names and len(names) == 20
    # The rate is measured beside other tests: anything.
    rate = found.pop("cycle rate")["status"]
    assert {value["status"] for value in found.values()} == {"PASS"}, printed
    assert code == (0 if rate == "PASS" else 1)
    assert f"on {cores} cores" in found["context layout"]["detail"]
    ranks = [json.loads(line) for line in report.read_text().splitlines()]
    launches = {rank["rank"]: rank["launches"]["AscendMoeProbe"] for rank in ranks if rank["rank"]}
    blocks = timestamps.words_of_core() // npu_communicator.PROBE_REPORT[1]  # that a core's timestamps fill
    reads = 2 * times.ROUNDS * 2 * blocks  # by algorithm, round and op
    # Two probes have nothing to show on one server, and the servers' launches nothing. On A2 the first launch of every
    # other probe's group, and of the two groups of the times, comes after one that clears the state areas.
    clears = len(names) - 3 + 2 if soc == A2 else 0
    assert launches == dict.fromkeys(("0", "1"), 19 + reads + clears)
    phases = [phase for phase in read(printed)["times"] if phase["name"] == "launch"]
    assert {(phase["op"], phase["algorithm"]) for phase in phases} == {
        (op, algorithm) for op in ("dispatch", "combine") for algorithm in ("window", "direct")
    }
    assert {phase["cores"] for phase in phases} == {cores} and all(phase["slowest"] > 0 for phase in phases)


@pytest.mark.nightly
@pytest.mark.parametrize(("first", "model"), [*enumerate((9372, 9381, 9382, 9392))])
def test_probes_pass_beside_faults_in_every_fourth_one(first: int, model: int) -> None:
    """Of one of two ranks under torchrun, of all kinds; the results are stored."""
    soc = f"Ascend910_{model}"  # no other test's, whose results would be replaced
    kind = probe_results.Machine(f"virtual {soc}", "", probe_results.ONE_SERVER)
    kind.path.unlink(missing_ok=True)
    script = str(Path(__file__).with_name("bringup_fault_ranks.py"))
    torchrun = ("-c", "from torch.distributed.run import main; main()", "--standalone", "--nproc-per-node=2")
    words = ("--no-verify", "--soc", soc, "--devices", "2", "--", sys.executable, *torchrun, script)
    done = launch(*words, str(first), str(first), ASCEND_MOE_PROVEN="", ASCEND_MOE_TIMEOUT_S="5")
    assert done.returncode == 0 and "5 faults, probe results: virtual " in done.stdout, done.stdout + done.stderr
    found = probe_results.read(kind.path)
    kind.path.unlink()
    assert found is not None and list(found.probes.values()).count("FAULT") == 5


def test_doctor_says_that_the_device_is_virtual() -> None:
    found = {each["topic"]: each for each in read(on_vnpu(A2, "doctor", "--json")[1])["diagnostics"]}
    assert found["NPUs"]["what"] == "2 x Ascend910B3 (virtual: host memory and CPU cores)"
    assert found["operator package"]["level"] == found["torch_npu"]["level"] == "ok"
    assert "results do not apply to real NPUs" in found["virtual NPU"]["what"]


@pytest.mark.parametrize("soc", [A3, pytest.param(A2, marks=pytest.mark.nightly)])
def test_the_default_algorithm_follows_the_probe_results(soc: str) -> None:
    """The virtual NPU counts as an NPU here: window until a bring-up has passed."""
    run("probe_result_ranks.py", world=2, soc=soc, env={"ASCEND_MOE_PROVEN": ""}, devices=2).must_pass()
