"""Does the installation work? On the fast engine: library, ops, errors, command line, in seconds."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ascend_moe
from ascend_moe.errors import ArgumentError
from ascend_moe.native import library

WORLD, EXPERTS, TOP_K, HIDDEN, TOKENS = 4, 16, 2, 64, 5


def tokens(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of a rank, and the experts they go to."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    return x, torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices.int()


def rows_of(local_expert: int, rank: int) -> torch.Tensor:
    """What a local expert of a rank must receive: tokens by source rank, in their order there."""
    expert = rank * (EXPERTS // WORLD) + local_expert
    parts = []
    for source in range(WORLD):
        x, ids = tokens(source)
        parts.append(x[(ids == expert).any(dim=1)])
    return torch.cat(parts)


@pytest.fixture(scope="module")
def cluster() -> ascend_moe.LocalCluster:
    with ascend_moe.LocalCluster(WORLD) as opened:
        yield opened


@pytest.mark.asan
def test_the_library_opens_and_is_of_these_sources() -> None:
    root = library.native_source_root()
    command = [sys.executable, str(root / "tools" / "source_hash.py"), str(root)]
    wanted = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert library.lib().am_source_hash().decode() == wanted


def test_tokens_visit_their_experts_and_come_home(cluster: ascend_moe.LocalCluster) -> None:
    def rank_main(rank: int, group: str) -> None:
        x, ids = tokens(rank)
        rows, _, places, counts, received, _, _ = ascend_moe.npu_moe_distribute_dispatch(
            x, ids, group_ep=group, ep_world_size=WORLD, ep_rank_id=rank, moe_expert_num=EXPERTS
        )
        expected = [rows_of(local, rank) for local in range(EXPERTS // WORLD)]
        assert counts.tolist() == [len(part) for part in expected]
        assert torch.equal(rows[: int(counts.sum())], torch.cat(expected))
        weights = torch.full((TOKENS, TOP_K), 1 / TOP_K)
        home = ascend_moe.npu_moe_distribute_combine(
            rows * 2, ids, places, received, weights, group, WORLD, rank, EXPERTS
        )
        assert torch.equal(home, 2 * x)

    cluster.run(rank_main)


def test_a_wrong_argument_is_named(cluster: ascend_moe.LocalCluster) -> None:
    def rank_main(rank: int, group: str) -> str:
        x, ids = tokens(rank)
        with pytest.raises(ArgumentError) as caught:
            ascend_moe.npu_moe_distribute_dispatch(
                x, ids, group_ep=group, ep_world_size=WORLD, ep_rank_id=rank, moe_expert_num=EXPERTS + 1
            )
        return str(caught.value)

    for text in cluster.run(rank_main):
        assert "moe_expert_num" in text and "17" in text


def test_the_command_line_starts() -> None:
    command = shutil.which("ascend-moe", path=str(Path(sys.executable).parent))
    words = [command] if command else [sys.executable, "-m", "ascend_moe"]
    run = subprocess.run([*words, "--help"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    for name in ("run", "doctor", "bench", "validate"):
        assert name in run.stdout
