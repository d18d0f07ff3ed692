"""cann_ops_transformer.ops: MegaMoe's pair by CANN's module name, and how the module is installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_processes
from routed_tokens import randn, routed

import ascend_moe
from ascend_moe.errors import AscendMoeError
from ascend_moe.interop import cann_ops_transformer as adapter

H = 64
BF16 = torch.bfloat16


def test_install_and_uninstall() -> None:
    assert importlib.util.find_spec("cann_ops_transformer") is None
    adapter.uninstall()
    whole = adapter.install()
    assert adapter.install() is whole and "ascend_moe" in str(whole.__doc__)
    import cann_ops_transformer.ops as found  # type: ignore[import-not-found]

    assert importlib.util.find_spec("cann_ops_transformer") is not None
    assert found.mega_moe is ascend_moe.layer_ops.mega_moe
    assert found.get_symm_buffer_for_mega_moe is ascend_moe.layer_ops.get_symm_buffer_for_mega_moe
    with pytest.raises(ImportError):
        importlib.import_module("cann_ops_transformer.common")
    adapter.uninstall()
    assert not [name for name in sys.modules if name.startswith("cann_ops_transformer")]
    assert importlib.util.find_spec("cann_ops_transformer") is None


def test_it_stands_in_for_nothing_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cann_ops_transformer").mkdir()
    (tmp_path / "cann_ops_transformer" / "__init__.py").write_text("ops = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        for _ in range(2):  # before it is imported, and after
            with pytest.raises(AscendMoeError, match="cann_ops_transformer is installed"):
                adapter.install()
            real = importlib.import_module("cann_ops_transformer")
            adapter.uninstall()
            assert sys.modules["cann_ops_transformer"] is real
    finally:
        del sys.modules["cann_ops_transformer"]


def in_a_process(rank: int) -> list[torch.Tensor]:
    """vllm-ascend's way: the module by its name, a process group; must be importable by name."""
    adapter.install()
    ops = importlib.import_module("cann_ops_transformer.ops")
    torch.manual_seed(1)
    w1, w2 = [torch.randn(H, 64).to(BF16) for _ in range(2)], [torch.randn(32, H).to(BF16) for _ in range(2)]
    x, ids, probs = randn(6, H, seed=rank).to(BF16), routed(6, 4, 2), torch.full((6, 2), 0.5)
    buffer = ops.get_symm_buffer_for_mega_moe(dist.group.WORLD, 4, 6, 2, hidden=H, intermediate_hidden=64)
    mask = (torch.arange(6) < 5).to(torch.int8)
    y, nums = ops.mega_moe(x, ids, probs, w1, w2, buffer, x_active_mask=mask)
    return [y, nums]


def test_processes_of_a_process_group(tmp_path: Path) -> None:
    results = run_processes(2, in_a_process, tmp_path)
    for y, nums in results:
        assert bool((y[5] == 0).all()) and bool((y[:5] != 0).any()) and nums.dtype == torch.int32
    assert sum(int(nums.sum()) for _, nums in results) == 2 * 5 * 2, "the sixth token of each rank is not active"
