"""The torch_npu adapter on the virtual NPU: an unmodified torch_npu wheel, npu tensors, end to end."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from npu_runs import launch, run

import ascend_vnpu

pytestmark = pytest.mark.npu

HERE = Path(__file__).resolve().parent
RANKS = "adapter_ranks.py"
EXAMPLE = HERE.parents[1] / "examples" / "npu_moe_layer.py"
DISPATCH, COMBINE, PROBE = "AscendMoeDistributeDispatch", "AscendMoeDistributeCombine", "AscendMoeProbe"


# ---- the example, as a user runs it


def torchrun(world: int) -> list[str]:
    options = ["--standalone", "--nproc-per-node", str(world)]
    return ["--", sys.executable, "-m", "torch.distributed.run", *options, str(EXAMPLE)]


def pasted_output() -> list[str]:
    """The comment at the end of the example, below "# Output:"."""
    lines = EXAMPLE.read_text().partition("\n# Output:\n")[2].splitlines()
    assert len(lines) == 8 and all(line.startswith("# ") for line in lines)
    return [line[2:] for line in lines]


def reports(path: Path) -> dict[str, Any]:
    """Returns what each rank that launched kernels reported when it ended."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["rank"]: line for line in lines if line["launches"]}


@pytest.mark.parametrize(
    "soc, server_type", [("Ascend910_9391", 1), pytest.param("Ascend910B3", 0, marks=pytest.mark.nightly)]
)
def test_the_example_runs_on_npu_tensors(soc: str, server_type: int, tmp_path: Path) -> None:
    """The wheel's files are compared with its RECORD before anything starts."""
    report = tmp_path / "report.jsonl"
    done = launch("--soc", soc, *torchrun(4), ASCEND_MOE_VNPU_REPORT=str(report))
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    printed = [line for line in done.stdout.splitlines() if line.startswith(("V1", "V2", "rank"))]
    assert printed == [line.replace("Ascend910_9391", soc) for line in pasted_output()]
    # The kernels have run, on every rank, the one without tokens too; nothing else gave these tensors.
    counted = reports(report)
    assert set(counted) == {"0", "1", "2", "3"}
    clears = {PROBE: 1} if server_type == 0 else {}  # A2: a group's first op clears the state areas before it
    for line in counted.values():
        assert line["launches"] == {DISPATCH: 4, COMBINE: 4} | clears and line["skips"] == {}
        assert (line["soc"], line["server_type"]) == (soc, server_type)


def test_a_missing_symbol_is_reported(tmp_path: Path) -> None:
    """Without our aclnn symbol nothing answers in its place."""
    changed = Path(shutil.copytree(ascend_vnpu.library_folder(), tmp_path / "vnpu"))
    library = changed / "opp/op_api/lib/libcust_opapi.so"
    name, other = (f"\0aclnnAscendMoeDistributeCombin{end}\0".encode() for end in "eX")
    data = library.read_bytes()
    assert name in data
    library.write_bytes(data.replace(name, other))
    report = tmp_path / "report"
    env = {"RANK": "0", "WORLD_SIZE": "1", "STORE": str(tmp_path / "store")}
    env["ASCEND_MOE_VNPU_REPORT"] = str(report)
    check = (sys.executable, str(HERE / RANKS), "check_ranks_without_tokens_launch_too")
    error = launch("--no-verify", "--", *check, **env, ASCEND_MOE_VNPU_LIBRARIES=str(changed)).stderr
    assert "LibraryError: aclnnAscendMoeDistributeCombine is not among the operators" in error, error
    assert "install the ascend_moe opp package" in error
    assert all(COMBINE not in line["launches"] for line in reports(report).values())


# ---- what ranks find


def test_two_ranks_of_an_a3() -> None:
    run(RANKS, world=2, soc="Ascend910_9391").must_pass()


@pytest.mark.parametrize(
    "soc, env",
    [
        ("Ascend910B3", {}),
        pytest.param("Ascend910_9391", {"TASK_QUEUE_ENABLE": "2"}, marks=pytest.mark.nightly),
        pytest.param("Ascend910_9391", {"TASK_QUEUE_ENABLE": "0"}, marks=pytest.mark.nightly),
        pytest.param("Ascend910_9391", {"ASCEND_LAUNCH_BLOCKING": "1"}, marks=pytest.mark.nightly),
    ],
    ids=["A2", "queue 2", "no queue", "blocking"],
)
def test_calls_follow_other_settings(soc: str, env: dict[str, str]) -> None:
    checks = (
        "check_an_expert_id_out_of_range_is_reported_later_and_once",
        "check_ranks_without_tokens_launch_too",
        "check_ops_in_two_launches_give_the_same",
        "check_what_a_started_op_finds_is_reported",
        "check_a_rank_that_does_not_call_is_named_and_the_group_stays_failed",
        "check_a_groups_own_window_size_counts_and_an_a2_keeps_its_state_area_in_it",
    )
    run(RANKS, *checks, world=2, env=env, soc=soc).must_pass()


def test_a_script_that_fails_with_work_in_the_queue_ends() -> None:
    script = (
        "import torch, torch_npu, ascend_moe\n"
        "x = torch.ones(9, 8).npu()\n"
        "for _ in range(200): y = torch.ops.ascend_moe.npu_swiglu(x)\n"
        "raise RuntimeError('on purpose')\n"
    )
    outcome = run(script)
    assert outcome.codes == (1,) and outcome.stderr[0].rstrip().endswith("RuntimeError: on purpose")
