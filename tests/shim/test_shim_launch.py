"""`ascend-moe shim` runs a program and its child processes with the shim."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ascend_moe.errors import ArgumentError
from ascend_moe.shim import launch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_shim(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ascend_moe", "shim", *words]
    whole = {**os.environ, "ASCEND_MOE_TIMEOUT_S": "60", **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=whole, check=False)


def edited(text: str, *changes: tuple[str, str]) -> str:
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


NPU_CODE = [
    ("from ascend_moe import npu as torch_npu  # on an NPU: import torch_npu\n", "import torch_npu\n"),
    ("= ascend_moe.comm_name(group)", '= group._get_backend(torch.device("npu")).get_hccl_comm_name(self.ep_rank_id)'),
    ("import ascend_moe\n", ""),
    ('"gloo", init_method', '"hccl", init_method'),
]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="not in a source tree")
def test_npu_code_runs_in_child_processes(ranks: int, tmp_path: Path) -> None:
    """The example as it was before its two lines were changed for CPUs."""
    text = (EXAMPLES / "vllm_ascend_style.py").read_text()
    text = edited(text, *NPU_CODE, ("nprocs=4", f"nprocs={ranks}"), ("args=(4,", f"args=({ranks},"))
    (tmp_path / "script.py").write_text(text)
    done = run_shim("--", sys.executable, str(tmp_path / "script.py"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "PASS" and sum(line.endswith("equals dense") for line in lines) == 5
    assert done.stderr.count("a shim of torch_npu") == 1


@pytest.mark.nightly
@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="not in a source tree")
def test_the_example_for_npus_runs() -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLES / "npu_moe_layer.py")]
    done = run_shim("--", sys.executable, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.endswith("equal to the reference") for line in lines) == 4
    assert lines[-2:] == [f"rank {rank} on CPU standing in for Ascend910_9391: PASS" for rank in range(2)]


def test_hccl_groups_and_exit_code(tmp_path: Path) -> None:
    script = f"""
import torch_npu
import os, sys, torch, torch.distributed as dist, ascend_moe
from cann_ops_transformer.ops import mega_moe
assert os.path.basename(sys.argv[1]) == "argument" and "shim" in repr(torch.npu)
assert mega_moe is ascend_moe.layer_ops.mega_moe
dist.init_process_group(backend="cpu:gloo,npu:hccl", init_method="file://{tmp_path}/store", rank=0, world_size=1)
options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
options.hccl_config = {{"hccl_buffer_size": 1}}
group = dist.new_group([0], backend="hccl", pg_options=options)
for each in (group, dist.group.WORLD):
    name = each._get_backend(torch.device("npu")).get_hccl_comm_name(0)
    assert name == ascend_moe.comm_name(each)
assert dist.get_backend(group) == "gloo" and dist.is_hccl_available()
stacked, summed = torch.zeros(1, 2, 3), torch.zeros(1, 2, 3)
dist.all_gather_into_tensor(stacked, torch.arange(6.0).view(2, 3), group=group)
dist.reduce_scatter_tensor(summed, input=torch.arange(6.0).view(2, 3), group=group)
assert stacked.flatten().tolist() == summed.flatten().tolist() == list(range(6))
dist.destroy_process_group()
sys.exit(7)
"""
    (tmp_path / "script.py").write_text(script)
    done = run_shim("-q", "--", sys.executable, str(tmp_path / "script.py"), "argument")
    assert done.returncode == 7, done.stderr
    assert "shim" not in done.stderr


def test_command_is_refused_beside_torch_npu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text("raise ImportError\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with pytest.raises(ArgumentError, match=r"has torch_npu.*run `ascend-moe vnpu -- ` instead"):
        launch([sys.executable, "-c", ""])
    with pytest.raises(ArgumentError, match=r"no command of PATH: install it"):
        launch(["/no/such/command"])
    with pytest.raises(ArgumentError, match=r"no command of PATH: write python script.py"):
        launch(["script.py"])
