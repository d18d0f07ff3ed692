"""examples/all_ways.py: every way gives the layer, and a way that is broken is seen in its row, and in no other."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from rank_processes import Ranks
from torch import Tensor

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "all_ways.py"
pytestmark = pytest.mark.skipif(not EXAMPLE.is_file(), reason="not in a source tree")

# A function of an adapter -> the rows of the ways that go through it.
ADAPTERS = {
    "dispatchers.collective:AllGatherDispatcher._combine": {
        "all-gather", "modular kernel, all-gather", "Megatron-LM, six phases, allgather"
    },
    "interop.sglang:EPMoE._run_experts": {"EPMoE, all-reduce", "EPMoE, mc2"},
    "interop.deep_ep.buffer:Buffer.low_latency_combine": {"DeepEP, low latency"},
}  # fmt: skip


def example() -> Any:
    spec = importlib.util.spec_from_file_location("all_ways", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["all_ways"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


def broken(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same with a hundredth more in all rows."""

    def more(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value * 1.01 if value.is_floating_point() else value
        return type(value)(map(more, value)) if type(value) in (tuple, list) else value

    def call(*args: Any, **kwargs: Any) -> Any:
        return more(function(*args, **kwargs))

    return call


def rows_that_fail() -> tuple[dict[str, tuple[float, bool]], dict[str, set[str]]]:
    """In a rank's process: the table, and by adapter the rows of the table that fail where it is broken."""
    os.environ["HCCL_BUFFSIZE"] = "16"
    ways = example()
    rank, group = dist.get_rank(), dist.group.WORLD
    whole = ways.compare(rank, group)
    failed = {}
    for adapter in ADAPTERS:
        module, _, path = f"ascend_moe.{adapter}".partition(":")
        holder, _, name = path.rpartition(".")
        target: Any = importlib.import_module(module)
        target = getattr(target, holder) if holder else target
        with mock.patch.object(target, name, broken(getattr(target, name))):
            rows = ways.compare(rank, group)
        failed[adapter] = {row for row, (_, fits) in rows.items() if not fits}
    return whole, failed


def test_every_way_gives_the_layer_and_a_broken_one_is_seen() -> None:
    with Ranks(4, timeout_s=60) as ranks:
        for rank in range(4):
            ranks.start(rank, rows_that_fail)
        outcomes = [ranks.wait(rank, 120) for rank in range(4)]
    assert not [outcome.text for outcome in outcomes if outcome.error]
    text, fits = example().table([outcome.value[0] for outcome in outcomes])
    assert fits, text
    page = (EXAMPLE.parents[1] / "docs" / "frameworks.md").read_text()
    shown = re.findall(r"^(?:way|\w.*  \d).*", page.partition("## All ways")[2], re.MULTILINE)
    # Not the differences: last bits depend on the CPU.
    assert [line[:36] + line[56:] for line in shown] == [line[:36] + line[56:] for line in text.splitlines()]
    for outcome in outcomes:
        assert outcome.value[1] == ADAPTERS
