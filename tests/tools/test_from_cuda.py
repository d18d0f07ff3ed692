"""docs/from_cuda.md: the programs that its tables make of the originals run, and print what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from_cuda.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="not in a source tree")
FENCE = re.compile(r"^```(python)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CPU, NPU = 1, 2  # columns
STAND_IN = "from ascend_moe.standin import torch_npu as standin\nstandin.install()\n"


def section(title: str) -> str:
    return PAGE.read_text().partition(f"## A program of {title}'s\n")[2].partition("\n## ")[0]


def original(title: str) -> str:
    return FENCE.findall(section(title))[0][1]


def program(title: str, column: int) -> str:
    """The original with the lines of the first table replaced by those of a column."""
    text = original(title)
    rows = re.findall(r"^\| `(.*?)` \| (?:`(.*?)`)? ?\| `(.*?)` \|$", section(title), re.MULTILINE)
    assert len(rows) == 4
    for row in rows:
        assert text.count(f"{row[0]}\n") == 1, row[0]
        text = text.replace(f"{row[0]}\n", row[column] + "\n" * bool(row[column]))
    return text


def prints(text: str, tmp_path: Path) -> str:
    """What two processes print."""
    (tmp_path / "program.py").write_text(text)
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "program.py"]
    done = subprocess.run(launcher, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("title", ["DeepEP", "vLLM"])
def test_a_program_has_about_thirty_lines_and_nothing_of_a_gpu_is_left(title: str) -> None:
    assert 25 <= original(title).count("\n") <= 35
    for column in (CPU, NPU):
        text = program(title, column)
        compile(text, title, "exec")
        assert not re.search(r"cuda|nccl|vllm|^import deep_ep", text, re.MULTILINE)


@pytest.mark.nightly
@pytest.mark.parametrize("column", [CPU, NPU])
@pytest.mark.parametrize("title", ["DeepEP", "vLLM"])
def test_a_program_prints_what_the_page_shows(title: str, column: int, tmp_path: Path) -> None:
    text = program(title, column)
    if column == NPU:
        text = text.replace("import torch\n", f"import torch\n{STAND_IN}", 1)
    shown = next(block for language, block in FENCE.findall(section(title)) if not language)
    assert prints(text, tmp_path) == shown


@pytest.mark.nightly
def test_dispatch_and_combine_in_the_place_of_the_all_reduce(tmp_path: Path) -> None:
    lines = FENCE.findall(section("vLLM"))[2][1]
    begin, end = "own = slice", "dist.all_reduce(y)\n"
    text = program("vLLM", CPU)
    text = text[: text.index(begin)] + lines + text[text.index(end) + len(end) :]
    whole = "whole = fused_experts(x, w1, w2, weights, ids.int())"
    text = text.replace(whole, f"{whole}[mine]")
    assert prints(text, tmp_path) == "the ranks' parts add up to the whole: True\n"
