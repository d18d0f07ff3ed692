"""docs/frameworks.md runs block by block; every public name is there with none of the systems installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "frameworks.md"
# Never installed here; an import of one of them shows as an entry of sys.modules or as an ImportError.
SYSTEMS = ("cann_ops_transformer", "deep_ep", "megatron", "mindspeed", "sglang", "torch_npu", "vllm", "vllm_ascend")


def sections() -> dict[str, list[str]]:
    """The Python blocks of the page by heading."""
    text = PAGE.read_text() if PAGE.is_file() else ""
    parts = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)[1:]
    fence = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return {title: fence.findall(body) for title, body in zip(parts[::2], parts[1::2], strict=True)}


BLOCKS = [
    pytest.param(block, id=f"{title}-{number}")
    for title, blocks in sections().items()
    for number, block in enumerate(blocks)
]


def python(code: str) -> str:
    """Returns what a program of its own prints."""
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(not PAGE.is_file(), reason="not in a source tree")
def test_the_page_has_a_block_for_each_system() -> None:
    titles = list(sections())
    assert len(titles) == 8 and [title for title, blocks in sections().items() if not blocks] == titles[-1:]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_of_the_page_runs(block: str) -> None:
    assert python(block).strip(), "it shows nothing"


NAMES = {
    "ascend_moe": "begin_combine begin_dispatch patch_torch_npu set_int8_gradient",
    "ascend_moe.fused": "dispatch_ffn_combine get_symm_buffer_for_mega_moe mega_moe",
    "ascend_moe.interop.cann_ops_transformer": "get_symm_buffer_for_mega_moe install mega_moe",
    "ascend_moe.interop.deep_ep": "Buffer Config EventHandle EventOverlap install uninstall",
    "ascend_moe.interop.fused_moe": (
        "all_reduce_dp all_reduce_tp fused_experts moe_align_block_size moe_sum naive_multicast"
    ),
    "ascend_moe.interop.megatron": (
        "GroupedMLP MC2Manager MoEAllGatherTokenDispatcher MoEAlltoAllTokenDispatcher MoEFlexTokenDispatcher"
        " RankGenerator SharedExpertMLP TokenDispatcher sinkhorn"
    ),
    "ascend_moe.interop.sglang": (
        "EPMoE ExpertPlacement Fp8EPMoEMethod GroupedGemmRunner UnquantizedEPMoEMethod make_expert_params_mapping"
        " post_reorder pre_reorder"
        " run_moe_ep_preproess select_experts silu_and_mul"
    ),
    "ascend_moe.standin.torch_npu": "install uninstall",
    "ascend_moe.interop.vllm": "All2AllManager FusedMoEModularKernel make_experts make_prepare_finalize select",
    "ascend_moe.interop.vllm_ascend": "register",
    "ascend_moe.permute": "moe_align_block_size permute sort_chunks_by_idxs unpermute",
    "ascend_moe.placement": "ExpertPlacement balance rank_groups remap",
    "ascend_moe.routing": (
        "MoEAuxLossAutoScaler apply_router_token_dropping get_capacity get_updated_expert_bias group_limited_topk"
        " switch_load_balancing_loss_func topk_routing_with_score_function z_loss_func"
    ),
}


def test_every_name_is_there_without_the_systems_and_nothing_is_imported_from_them() -> None:
    printed = python(
        f"import importlib, sys\n"
        f"import ascend_moe\n"
        f"print(*[name for name in sys.modules if name.startswith('ascend_moe.interop')])\n"
        f"missing = [f'{{module}}.{{name}}' for module, names in {NAMES!r}.items() for name in names.split()\n"
        f"           if not hasattr(importlib.import_module(module), name)]\n"
        f"print(*missing)\n"
        f"print(*[name for name in sys.modules if name.partition('.')[0] in {SYSTEMS!r}])\n"
    )
    assert printed.split("\n") == ["", "", "", ""]
