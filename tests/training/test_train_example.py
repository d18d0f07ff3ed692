"""examples/train_moe_lm.py: every way to lay out its ranks trains as one process does, and it learns."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_processes import Ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_moe_lm.py"
pytestmark = pytest.mark.skipif(not EXAMPLE.is_file(), reason="not in a source tree")


def example() -> Any:
    spec = importlib.util.spec_from_file_location("train_moe_lm", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses(ep: int, steps: int, recompute: bool, sharded: bool) -> list[float]:
    """In a rank's process."""
    os.environ["HCCL_BUFFSIZE"] = "16"
    found: list[float] = example().train(ep, steps, recompute, sharded)
    return found


Layouts = dict[int, list[tuple[int, bool, bool]]]  # by ranks: EP, whether activations are computed again, FSDP2
SOME: Layouts = {1: [(1, False, False)], 4: [(4, True, False), (2, False, False), (2, False, True)]}
ALL: Layouts = {
    1: [(1, False, False), (1, True, False)],
    4: [(ep, again, sharded) for ep in (4, 2) for again in (False, True) for sharded in (False, True)],
}


@pytest.mark.parametrize(("steps", "layouts"), [(8, SOME), pytest.param(50, ALL, marks=pytest.mark.nightly)])
def test_every_layout_has_the_losses_of_one_process(steps: int, layouts: Layouts) -> None:
    found = {}
    for world, runs in layouts.items():
        with Ranks(world, timeout_s=60) as ranks:
            for ep, recompute, sharded in runs:
                for rank in range(world):
                    ranks.start(rank, losses, ep, steps, recompute, sharded)
                outcomes = [ranks.wait(rank, 200) for rank in range(world)]
                assert not [outcome.text for outcome in outcomes if outcome.error]
                assert all(outcome.value == outcomes[0].value for outcome in outcomes)
                found[world, ep, recompute, sharded] = outcomes[0].value
    expected = found[1, 1, False, False]
    assert expected[-1] < 0.85 * expected[0]
    for layout, values in found.items():
        assert len(values) == steps and values == pytest.approx(expected, abs=1e-5), layout


@pytest.mark.nightly
@pytest.mark.parametrize(("steps", "learns"), [(3, False), (200, True)])
def test_the_command_draws_the_loss_and_says_whether_it_learnt(steps: int, learns: bool, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--steps", str(steps)]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, timeout=280)
    assert (done.returncode == 0) == learns, done.stdout + done.stderr
    assert done.stdout.splitlines()[0].startswith("EP 4: loss 0: 5.6")
    assert done.stdout.splitlines()[1].startswith("EP 2 x DP 2: loss 0: 5.6")
    assert done.stdout.splitlines()[2].startswith("EP 2 x FSDP 2: loss 0: 5.6")
    assert ("is below" if learns else "is NOT below") in done.stdout.splitlines()[3]
    picture = (tmp_path / "train_moe_lm.svg").read_text()
    assert picture.count("<polyline") == 3 and picture.endswith("</svg>")
