"""`ascend-moe vnpu` where torch_npu is not as it needs it: what it says, before it builds or starts anything."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import sys
from pathlib import Path

import commands
import pytest

import ascend_vnpu
from ascend_moe.native import library
from ascend_vnpu import PAIRS, launch
from ascendc_twin.soc import SOCS

ROOT = Path(__file__).parents[2]


def python_with(folder: Path, torch: str | None, torch_npu: str | None) -> str:
    """An interpreter that knows these versions, as far as the launcher asks."""
    given = {"torch": torch, "torch_npu": torch_npu}
    found = {name: version and [version, "/wheel", "/wheel"] for name, version in given.items()}
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho '{json.dumps(found)}'\n")
    path.chmod(0o755)
    return str(path)


def said(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """Returns what the command refuses with; it must neither build the libraries nor start the program."""
    monkeypatch.setattr(library, "vnpu_folder", None)
    monkeypatch.setattr(os, "execvpe", None)
    code, out, err = commands.said("vnpu", *arguments)
    assert code == 2 and not out and err.count("\n") == 1, err
    return err


def test_without_torch_npu_it_advises_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The line of docs/vnpu.md: torch_npu beside torch would break every `import torch` of that environment."""
    python = python_with(tmp_path, "2.13.0+cpu", None)
    line = said(monkeypatch, "--", python, "script.py")
    page = (ROOT / "docs" / "vnpu.md").read_text()
    for part in (
        "pip install --no-deps --target build/npu/torch_npu-2.13.0 torch_npu==2.13.0",
        "export PYTHONPATH=$PWD/build/npu/torch_npu-2.13.0",
    ):
        assert part in line and part in page
    assert "--soc" not in line and "soc is 'x'; need one of" in said(monkeypatch, "--soc", "x", "--", python)


def test_no_pair_of_versions_is_answered_with_a_command_that_changes_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The table's releases are told apart, and others: posts of a release, local parts."""
    known = [name for pair in PAIRS for name in (pair.torch, f"{pair.torch}+cpu", pair.torch_npu)]
    versions = [None, *known, "2.10.0.post2", "2.10.1", "2.12.1+cpu", "2.15.0", "3.0"]
    pairs = [pair for pair in itertools.product(versions, versions) if not fit(*pair)]
    for torch, torch_npu in random.Random(3).sample(pairs, 24):
        line = said(monkeypatch, "--", python_with(tmp_path, torch, torch_npu), "x.py")
        assert "the virtual NPU needs torch" in line
        assert all("--target" in command for command in re.findall("pip install[^;&]*", line)), line
        own = [pair for pair in PAIRS if (torch or "").partition("+")[0] == pair.torch]
        assert (f"torch_npu=={own[0].torch_npu} " in line) if own else "environment with torch==" in line


def test_a_later_post_release_of_a_pair_starts_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "verify", lambda wheel: 0)
    monkeypatch.setattr(launch, "environment", lambda soc, devices: {})
    monkeypatch.setattr(os, "execvpe", lambda *words: None)
    for torch_npu, later in (("2.10.0.post7", True), ("2.10.0.post4", False)):
        launch.launch([python_with(tmp_path, "2.10.0+cpu", torch_npu)])
        text = f"warning: torch_npu {torch_npu} is later than 2.10.0.post4 of the pair that is known"
        assert (text in capsys.readouterr().err) == later


def fit(torch: str | None, torch_npu: str | None) -> bool:
    numbers = [(version or "").removesuffix("+cpu") for version in (torch, torch_npu)]
    return any(numbers == [pair.torch, pair.torch_npu] for pair in PAIRS)


def test_the_page_lists_the_pairs() -> None:
    page = (ROOT / "docs" / "vnpu.md").read_text()
    listed = re.findall(r"^\| (\d[\w.]*) \| (\d[\w.]*) \| (yes|no)", page, re.MULTILINE)
    assert listed == [(pair.torch, pair.torch_npu, "yes" if pair.tested else "no") for pair in PAIRS]


# ---- which SoC


def vllm_ascend(folder: Path, build_info: str) -> str:
    """The path of a Python that has a vllm-ascend with this build information, and a pair."""
    package = folder / "vllm_ascend"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('it must not be imported')")
    (package / "_build_info.py").write_text(f"# Auto-generated file\n{build_info}\n")
    for name, version in (("torch", PAIRS[1].torch), ("torch_npu", PAIRS[1].torch_npu), ("vllm_ascend", "0.23.0")):
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return str(folder)


def soc_of(monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    """The SoC that a command starts with."""
    started: list[dict[str, str]] = []
    monkeypatch.setattr(launch, "verify", lambda wheel: 0)
    monkeypatch.setattr(launch, "environment", lambda soc, devices: {"soc": soc})
    monkeypatch.setattr(os, "execvpe", lambda file, args, env: started.append(env))
    code, _, err = commands.said("vnpu", *options, "-q", "--", sys.executable, "x.py")
    assert code == 0 and not err, err
    return started[0]["soc"]


BUILDS = {
    "__device_type__ = 'A2'": "Ascend910B3",
    "__device_type__ = 'A3'": "Ascend910_9391",
    "__soc_version__ = 'ASCEND910B1'\n__sleep_mode_enabled__ = True": "Ascend910B3",
    '__soc_version__ = "ascend910_9391"': "Ascend910_9391",
    "": "Ascend910_9391",
}


@pytest.mark.parametrize(("build", "soc"), BUILDS.items())
def test_the_soc_is_what_vllm_ascend_was_built_for(
    build: str, soc: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", vllm_ascend(tmp_path, build))
    assert soc_of(monkeypatch) == soc


def test_a_programs_own_environment_asks_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch, "library_folder", Path)
    assert ascend_vnpu.environment()["ASCEND_MOE_VNPU_SOC"] == "Ascend910_9391"
    monkeypatch.syspath_prepend(vllm_ascend(tmp_path, "__device_type__ = 'A2'"))
    assert ascend_vnpu.environment()["ASCEND_MOE_VNPU_SOC"] == "Ascend910B3"
    assert ascend_vnpu.environment("Ascend910_9382")["ASCEND_MOE_VNPU_SOC"] == "Ascend910_9382"


def test_another_series_than_vllm_ascends_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", vllm_ascend(tmp_path, "__device_type__ = 'A2'"))
    line = said(monkeypatch, "--soc", "Ascend910_9391", "--", sys.executable, "x.py")
    assert "vllm-ascend 0.23.0" in line and "built for A2" in line and "Ascend910_9391 is A3" in line
    assert "--soc Ascend910B3, or --no-verify" in line
    first, *_, last = (soc for soc in SOCS if SOCS[soc].series == "A2")
    for options in (("--soc", first), ("--soc", last), ("--no-verify", "--soc", "Ascend910_9391")):
        assert soc_of(monkeypatch, *options) == options[-1]


def test_a_series_that_no_virtual_device_has_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", vllm_ascend(tmp_path, "__device_type__ = '_310P'"))
    line = said(monkeypatch, "--", sys.executable, "x.py")
    assert "built for _310P" in line and "no virtual device is one: pass --soc Ascend910_9391 and --no-verify" in line
    assert soc_of(monkeypatch, "--no-verify") == "Ascend910_9391"
