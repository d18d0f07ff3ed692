"""The parts of `ascend-moe run`: checks that notice, tokens, heat map, presets."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from ascend_moe.checkpoint.config import moe_config
from ascend_moe.checkpoint.presets import PRESETS
from ascend_moe.demo import launch, report
from ascend_moe.demo.check import verify
from ascend_moe.demo.layers import RunSpec, batches_of, default_text, embed
from ascend_moe.demo.rank import RankRecord
from ascend_moe.errors import ArgumentError


def quiet(stage: str, done: int, total: int) -> None:
    """No progress."""


# ---- checks


@pytest.fixture(scope="module")
def finished() -> tuple[RunSpec, list[RankRecord]]:
    """A run of two ranks that is right."""
    batches = (7, 4)
    spec = RunSpec(PRESETS["tiny"].config(), batches, torch.bfloat16, False, default_text(), iterations=1)
    return spec, launch.run_ranks(spec, quiet)


def wrong_row(record: RankRecord) -> None:
    record.dispatched[0].view(torch.int16)[5, 17] ^= 1


def wrong_count(record: RankRecord) -> None:
    record.dispatched[4][3:] += 1


def wrong_sum(record: RankRecord) -> None:
    record.out.view(torch.int16)[2, 0] ^= 1


def wrong_experts(record: RankRecord) -> None:
    record.expert_rows[:] = 0


def lost_bytes(record: RankRecord) -> None:
    record.traffic["combine"]["read_window_data"] -= 32


def unsteady(record: RankRecord) -> None:
    record.steady = False


def off(record: RankRecord) -> None:
    record.out += 1


@pytest.mark.parametrize(
    "fault, caught",
    [
        (None, []),
        (wrong_row, [0]),
        (wrong_count, [0]),
        (wrong_sum, [1]),
        (wrong_experts, [1]),
        (lost_bytes, [2]),
        (unsteady, [3]),
        (off, [1, 4]),
    ],
)
def test_checks_notice(finished: tuple[RunSpec, list[RankRecord]], fault: Any, caught: list[int]) -> None:
    """Every check has faults of one rank that it, and it alone, must notice."""
    spec, records = finished[0], copy.deepcopy(finished[1])
    if fault is not None:
        fault(records[1])
    verdict = verify(spec, records, quiet)
    assert [number for number, check in enumerate(verdict.checks) if not check.ok] == caught
    assert verdict.ok == (not caught)


# ---- tokens, pictures, numbers


def test_batches() -> None:
    assert batches_of("64", 4) == (64, 56, 48, 40)
    assert batches_of("3", 1) == (3,)
    assert batches_of(" 5, 0,9", 3) == (5, 0, 9)
    for text in ("", "4.5", "1,,2", "٣"):
        with pytest.raises(ArgumentError):
            batches_of(text, 3)


def test_same_words_are_the_same_tokens() -> None:
    text = b"the hat, the cat"
    spec = RunSpec(PRESETS["tiny"].config(), (10, 6), torch.float32, False, text)
    x = torch.cat([embed(spec, 0), embed(spec, 1)])
    assert torch.equal(x[11:13], x[2:4])  # "e" and the space of "the "
    assert not torch.equal(x[9], x[0])  # "t" after ", " and at the start
    assert not torch.equal(x[4], x[1])  # "h" of "hat" and of "the"
    torch.testing.assert_close(x.square().mean(1), torch.ones(16))


@pytest.mark.parametrize(
    "world, experts, width", [(4, 256, 100), (4, 256, 80), (16, 1024, 100), (64, 64, 100), (1, 256, 80)]
)
def test_heat_map_fits(world: int, experts: int, width: int) -> None:
    counts = torch.randint(0, 50, (world, experts), generator=torch.Generator().manual_seed(0))
    counts[0, : experts // 2] = 0
    lines = [line.plain for line in report.render(counts, width)]
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if line.startswith("  rank ")]
    assert len(rows) == world
    assert [int(line.split()[-1]) for line in rows] == counts.sum(1).tolist()
    drawn = ["".join(c for c in row[9:-7] if c != "│") for row in rows]
    assert len(set(map(len, drawn))) == 1 and experts % len(drawn[0]) == 0
    assert drawn[0][: len(drawn[0]) // 2].strip() == "" and drawn[0].strip() != ""
    if world > 1:
        assert rows[0].count("│") in (0, world + 1)


def test_heat_map_levels_cover_all_counts() -> None:
    for most in (1, 2, 3, 17, 1000):
        levels = [report._level(value, most) for value in range(most + 1)]
        assert levels[0] == 0 and levels[1] > 0 and levels[-1] == 4 and levels == sorted(levels)


@pytest.mark.parametrize(
    "name, config",
    [("deepseek-v3", "DeepseekV3Config"), ("qwen3-30b", "Qwen3MoeConfig"), ("mixtral", "MixtralConfig")],
)
def test_presets_are_the_models(name: str, config: str) -> None:
    values = getattr(transformers, config)().to_dict()
    if name == "qwen3-30b":
        values["norm_topk_prob"] = True  # as the published model sets it
    assert PRESETS[name].published == moe_config(values)
