"""The plug-ins of vLLM and SGLang: by one variable every process that they start runs this package's operators."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ascend_moe
from ascend_moe import settings
from ascend_moe.doctor import cann
from ascend_moe.errors import ArgumentError, LibraryError
from ascend_moe.interop import sglang_plugin, vllm_plugin
from ascend_moe.native import library

RANKS = 3
VLLM, SGLANG = "vllm.general_plugins", "sglang.srt.plugins"
PYPROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"
# torch_npu as far as it is looked at: its operator says who ran.
TORCH_NPU = """
from types import SimpleNamespace
def npu_moe_distribute_dispatch_v2(*args, **kwargs):
    return "CANN"
npu_moe_distribute_combine_v2 = npu_moe_distribute_dispatch_v2
npu = SimpleNamespace(is_available=lambda: {npus})
"""
# What a process of vLLM does: it loads the plug-ins by their metadata, and then it works.
WORKER = """
import json, os, sys
from importlib.metadata import entry_points
rank, world, group = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
plugins = {entry.name: entry for entry in entry_points(group=group)}
assert plugins
for entry in plugins.values():
    entry.load()()
    entry.load()()  # vLLM may load the plug-ins of a process more than once
untouched = {"vllm", "sglang", "torch_npu"}.isdisjoint(sys.modules)
import torch, torch_npu
import torch.distributed as dist
names = sorted(name for name in dir(torch.ops._C_ascend) if "moe" in name)
found = {"untouched": untouched, "names": names, "ran": torch_npu.npu_moe_distribute_dispatch_v2.__module__}
if found["ran"].startswith("ascend_moe"):
    import ascend_moe
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=world)
    x = torch.arange(2 * 32).reshape(2, 32).bfloat16() + rank
    ids, weights = torch.tensor([[0, 2], [1, 2]], dtype=torch.int32), torch.tensor([[0.5, 0.25], [1.0, 2.0]])
    ep = dict(group_ep=ascend_moe.comm_name(dist.group.WORLD), ep_world_size=world, ep_rank_id=rank, moe_expert_num=3)
    out = torch_npu.npu_moe_distribute_dispatch_v2(x, ids, **ep, global_bs=2 * world)
    y = torch_npu.npu_moe_distribute_combine_v2(out[0], ids, out[2], out[4], weights, **ep, global_bs=2 * world)
    found["right"] = torch.equal(y, (x.float() * weights.sum(1, keepdim=True)).bfloat16())
    dist.destroy_process_group()
print(json.dumps(found))
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with torch_npu, and with what an installation of this package tells of its plug-ins."""
    (tmp_path / "torch_npu.py").write_text(TORCH_NPU.format(npus=False))
    sections = re.findall(r'\[project\.entry-points\."(.*?)"\]\n(.*?)\n\n', PYPROJECT.read_text(), re.DOTALL)
    assert [group for group, _ in sections] == [VLLM, SGLANG]
    lines = "\n".join(f"[{group}]\n{entries.replace(chr(34), '')}" for group, entries in sections)
    about = tmp_path / "ascend_moe_plugin-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ascend_moe_plugin\nVersion: 0\n")
    (about / "entry_points.txt").write_text(f"{lines}\n")
    return tmp_path


def started(
    site: Path, ranks: int = RANKS, group: str = VLLM, **variables: str
) -> Iterator[tuple[dict[str, Any], str]]:
    """What these processes found, and what each logged."""
    package = str(Path(ascend_moe.__file__).parents[1])
    paths = [str(site), package, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {name: value for name, value in os.environ.items() if name != settings.PATCH.name}
    env |= {"PYTHONPATH": os.pathsep.join(paths), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **variables}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(ranks), group],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=site,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        for process in processes:
            output, logged = process.communicate(timeout=60)
            assert process.returncode == 0, logged
            yield json.loads(output), logged
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_every_process_runs_our_operators(site: Path) -> None:
    for found, logged in started(site, ASCEND_MOE_PATCH="1"):
        assert found["ran"].startswith("ascend_moe.ops") and found["right"], found
        assert "moe_gating_top_k" in found["names"]
        (line,) = [line for line in logged.splitlines() if "ASCEND_MOE_PATCH=1" in line]
        assert "npu_moe_distribute_dispatch_v2" in line and "moe_gating_top_k" in line


def test_sglang_plugin_replaces_and_warns(site: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.setenv("ASCEND_MOE_PATCH", "0")
    try:
        sglang_plugin.load()
        assert "torch_npu" not in sys.modules
        monkeypatch.setenv("ASCEND_MOE_PATCH", "1")
        with caplog.at_level("INFO", logger="ascend_moe"):
            sglang_plugin.load()
            sglang_plugin.load()
        assert sys.modules["torch_npu"].npu_moe_distribute_dispatch_v2 is ascend_moe.npu_moe_distribute_dispatch_v2
        first, mode, second, _ = [record.getMessage() for record in caplog.records]
        assert "replaced _npu_distribute_barrier" in first and "replaced nothing" in second and "not ops" in mode
    finally:
        sys.modules.pop("torch_npu", None)  # this file's, not a wheel's


@pytest.mark.parametrize("group", [VLLM, SGLANG])
@pytest.mark.parametrize("ranks", [1, pytest.param(RANKS, marks=pytest.mark.nightly)])
def test_without_the_variable_nothing_is_touched_or_imported(site: Path, ranks: int, group: str) -> None:
    for found, logged in started(site, ranks, group):
        assert found == {"untouched": True, "names": [], "ran": "torch_npu"} and "ascend_moe" not in logged


def test_npus_without_the_operator_package_are_refused(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "torch_npu.py").write_text(TORCH_NPU.format(npus=True))
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.setenv("ASCEND_MOE_PATCH", "1")
    monkeypatch.delenv("ASCEND_OPP_PATH", raising=False)
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", str(tmp_path / "vendor"))
    try:
        with pytest.raises(LibraryError, match=r"no operator package of ascend_moe.*build\.sh.*unset ASCEND_MOE_PATCH"):
            vllm_plugin.load()
    finally:
        sys.modules.pop("torch_npu", None)  # this file's, not a wheel's


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_PATCH", "yes")
    with pytest.raises(ArgumentError, match="ASCEND_MOE_PATCH=yes must be 0 or 1"):
        vllm_plugin.load()


def tree(folder: Path, *ops: str) -> Path:
    """An operator package with kernels of these operators."""
    config = folder / "op_impl/ai_core/tbe/config/ascend910b"
    config.mkdir(parents=True)
    (config / "aic-ascend910b-ops-info.json").write_text(json.dumps({op: {} for op in ops}))
    return folder


def test_of_two_trees_with_one_operator_the_first_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tree(tmp_path / "first", "MoeDistributeDispatch")
    second = tree(tmp_path / "second", "MoeDistributeDispatch", library.OPERATORS[0])
    broken = tree(tmp_path / "broken")
    next(broken.glob("op_impl/ai_core/tbe/config/*/*.json")).write_text("{")
    monkeypatch.delenv("ASCEND_OPP_PATH", raising=False)
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", f"{first}:{tmp_path / 'gone'}:{broken}:{second}")
    assert cann.owners() == {"MoeDistributeDispatch": [first, second], library.OPERATORS[0]: [second]}
