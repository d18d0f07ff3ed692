"""Unmodified vLLM and vllm-ascend generate on the virtual NPU what transformers generates in fp32, within bf16's error.

`make test-vllm-ascend` runs these in an environment that has both.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from npu_runs import HERE
from vllm_prompts import PROMPTS

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(importlib.util.find_spec("vllm_ascend") is None, reason="make test-vllm-ascend has vllm-ascend"),
]

# bf16 has 8 bits: logits of these models, of size 3, are off by at most this, unless rounding chooses another expert.
LIMIT = 0.15
MARGIN = 0.002  # of router logits of size 0.2


class Row(NamedTuple):
    """What to run, and what its log must show."""

    model: str
    options: dict[str, Any]
    log: tuple[str, ...] = ()
    series: str = "A2"


EAGER = {"enforce_eager": True}
TWO = {**EAGER, "tensor_parallel_size": 2, "enable_expert_parallel": True}
METHOD = r"MoE comm method selected: .*method=MoECommType.{}"
ROWS = {
    "qwen3": Row("Qwen3Moe", EAGER),
    "qwen3-all-gather": Row("Qwen3Moe", TWO, (METHOD.format("ALLGATHER"),)),
    "qwen3-mc2": Row("Qwen3Moe", TWO, (METHOD.format("MC2"), METHOD.format("ALLTOALL")), "A3"),
}


def on_vnpu(*words: str, series: str = "A2", **env: str) -> subprocess.CompletedProcess[str]:
    """A script of this folder on the virtual NPU; imports of torchvision succeed."""
    path = os.pathsep.join([str(HERE / "vllm_site"), os.environ.get("PYTHONPATH", "")])
    script, *arguments = words
    soc = {"A2": "Ascend910B3", "A3": "Ascend910_9391"}[series]
    start = [sys.executable, "-m", "ascend_moe", "vnpu", "--no-verify", "--soc", soc, "--", sys.executable]
    return subprocess.run(
        [*start, str(HERE / script), *arguments],
        capture_output=True,
        text=True,
        timeout=1000,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VNPU_TEST_SERIES": series, **env},
    )


def models(*words: str) -> str:
    done = on_vnpu("vllm_models.py", *words)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def generate(folder: Path, row: Row) -> tuple[list[list[list[int]]], str]:
    """The tokens of both times, and the log.

    They need not be the same: the second time fewer tokens are new, and sums may be rounded otherwise.
    """
    workers = "tensor_parallel_size" in row.options
    env = {
        "ASCEND_MOE_PATCH": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if workers else "0",
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    done = on_vnpu("vllm_generate.py", str(folder), json.dumps(row.options), series=row.series, **env)
    found = [json.loads(text) for text in re.findall(r"^TOKENS (.*)$", done.stdout, re.M)]
    text = done.stdout + done.stderr
    assert done.returncode == 0 and len(found) == 2, text[-8000:]
    return found, text


@pytest.mark.parametrize("name", ROWS)
def test_generated_tokens_are_those_of_transformers(name: str, folders: Path) -> None:
    row = ROWS[name]
    folder = folders / row.model
    if not folder.exists():
        models("write", str(folder), row.model)
    both, log = generate(folder, row)
    for tokens in both:
        assert [len(part) for part in tokens] == [16] * len(PROMPTS)
        found = json.loads(models("gaps", str(folder), json.dumps(tokens)))
        gaps = [gap for gap, margin in found if margin > MARGIN or gap <= LIMIT]
        assert max(gaps) <= LIMIT and sum(gap == 0 for gap in gaps) >= 0.9 * len(found), sorted(found)[-12:]
    for pattern in row.log:
        assert re.search(pattern, log), pattern
