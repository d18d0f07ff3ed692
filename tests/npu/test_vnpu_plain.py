"""`ascend-moe vnpu` where torch_npu is not as it needs it: what it says, before it builds or starts anything."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
from pathlib import Path

import commands
import pytest

from ascend_moe.native import library
from ascend_moe.vnpu import VERSIONS


def python_with(folder: Path, torch: str | None, torch_npu: str | None) -> str:
    """An interpreter that knows these versions, as far as the launcher asks."""
    given = {"torch": torch, "torch_npu": torch_npu}
    found = {name: version and [version, "/wheel", "/wheel"] for name, version in given.items()}
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho '{json.dumps(found)}'\n")
    path.chmod(0o755)
    return str(path)


def said(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """What the command refuses with; it must neither build the libraries nor start the program."""
    monkeypatch.setattr(library, "vnpu_folder", None)
    monkeypatch.setattr(os, "execvpe", None)
    code, out, err = commands.said("vnpu", *arguments)
    assert code == 2 and not out and err.count("\n") == 1, err
    return err


def test_without_torch_npu_it_advises_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The line of docs/vnpu.md: torch_npu beside torch would break every `import torch` of that environment."""
    python = python_with(tmp_path, "2.13.0+cpu", None)
    line = said(monkeypatch, "--", python, "script.py")
    page = (Path(__file__).parents[2] / "docs" / "vnpu.md").read_text()
    for part in (
        "pip install --no-deps --target build/npu/torch_npu-2.13.0 torch_npu==2.13.0",
        "export PYTHONPATH=$PWD/build/npu/torch_npu-2.13.0",
    ):
        assert part in line and part in page
    assert "--soc" not in line and "soc is 'x'" in said(monkeypatch, "--soc", "x", "--", python)


def test_no_pair_of_versions_is_answered_with_a_command_that_changes_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    versions = [None, "2.10.0", "2.12.1+cpu", *VERSIONS, f"{VERSIONS[0]}+cpu", "2.15.0", "3.0"]
    pairs = [pair for pair in itertools.product(versions, versions) if not fit(*pair)]
    for torch, torch_npu in random.Random(3).sample(pairs, 12):
        line = said(monkeypatch, "--", python_with(tmp_path, torch, torch_npu), "x.py")
        assert "the virtual NPU needs torch" in line
        assert all("--target" in command for command in re.findall("pip install[^;&]*", line)), line


def fit(torch: str | None, torch_npu: str | None) -> bool:
    numbers = [(version or "").partition("+")[0] for version in (torch, torch_npu)]
    return numbers[0] == numbers[1] and numbers[0] in VERSIONS
