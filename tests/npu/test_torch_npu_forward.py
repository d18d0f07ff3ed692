"""On an NPU the vendor ops are torch_npu's own: they run on the virtual one and give what the CPU gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vendor_calls import CALLS
from vnpu_process import report_of

pytestmark = pytest.mark.npu

CHILD = Path(__file__).with_name("torch_npu_forward.py")
# torch_npu's operators whose CANN operator the virtual NPU does not have: the call ends at its aclnn symbol.
WITHOUT_ACLNN = {"npu_grouped_matmul_finalize_routing": "aclnnGroupedMatmulFinalizeRouting"}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the process with torch_npu found. It fails, and never skips, without the wheel."""
    target = tmp_path_factory.mktemp("forward") / "report.json"
    return report_of(CHILD, target)


@pytest.fixture(scope="module")
def report(answers: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """What came of every call, by operator and label."""
    return {(one["op"], one["label"]): one for one in answers["calls"]}


@pytest.mark.parametrize("op, label", [(call.op, call.label) for call in CALLS])
def test_npu_tensors_give_what_cpu_tensors_give(
    report: dict[tuple[str, str], dict[str, Any]], op: str, label: str
) -> None:
    found = report[op, label]
    if op in WITHOUT_ACLNN and "raised" in found:
        assert WITHOUT_ACLNN[op] in found["raised"] and "libopapi.so" in found["raised"]
    else:
        assert found.get("devices") == ["npu:0"], found
        assert found["equal"] and all(found["equal"]), found


def test_most_operators_run(report: dict[tuple[str, str], dict[str, Any]]) -> None:
    ran = {op for (op, _), found in report.items() if "equal" in found}
    assert {call.op for call in CALLS} - ran <= set(WITHOUT_ACLNN)


def test_gradients_are_torch_npus_or_refused(answers: dict[str, Any]) -> None:
    for op in ("npu_swiglu", "npu_moe_token_permute"):
        on_npu, on_cpu = answers["gradients"][op]
        assert on_npu == pytest.approx(on_cpu, rel=1e-5) and on_npu[0] > 0
    # torch_npu has none of a grouped matmul; on the CPU it is differentiable.
    on_npu, on_cpu = answers["gradients"]["npu_grouped_matmul"]
    assert on_npu.startswith("AscendMoeError: npu_grouped_matmul is not differentiable") and all(on_cpu)
    for raised in answers["gradients"]["npu_dynamic_quant"]:
        assert raised.startswith("AscendMoeError: npu_dynamic_quant is not differentiable")


def test_barrier_and_the_fused_norm_run_on_our_kernels(tmp_path: Path) -> None:
    """They use the windows of the group, so they are ours on an NPU too, and equal the CPU's bit for bit."""
    from ascend_moe import vnpu

    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *command, str(CHILD.with_name("torch_npu_collectives.py")), str(tmp_path)],
        env=vnpu.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = [json.loads((tmp_path / f"{rank}.json").read_text("utf-8")) for rank in range(2)]
    for rank, report in enumerate(found):
        assert report["devices"] == [f"npu:{rank}"]
        assert all(report["equal"]) and report["sum"] and report["rows"] > 0
        assert report["left"] >= found[1]["arrived"]  # rank 1 was late


def test_a_script_that_fails_with_work_in_the_queue_ends() -> None:
    from ascend_moe import vnpu

    script = (
        "import torch, torch_npu, ascend_moe\n"
        "x = torch.ones(9, 8).npu()\n"
        "for _ in range(200): y = torch.ops.ascend_moe.npu_swiglu(x)\n"
        "raise RuntimeError('on purpose')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=vnpu.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1 and done.stderr.rstrip().endswith("RuntimeError: on purpose"), done.stderr
