"""The files by which people take part say what the project says elsewhere, and refer to commands that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

TREE = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (TREE / ".github").is_dir(), reason="not in a source tree")
DOCKERFILES = sorted(TREE.glob("docker/*.Dockerfile"))
YAML = sorted([*TREE.glob(".github/**/*.yml"), TREE / ".pre-commit-config.yaml", TREE / "CITATION.cff"])


@pytest.mark.parametrize(
    "path", [*YAML, *DOCKERFILES, TREE / ".devcontainer" / "devcontainer.json"], ids=lambda path: path.name
)
def test_every_command_is_a_target_of_make(path: Path) -> None:
    text = path.read_text()
    assert path not in YAML or yaml.safe_load(text)
    targets = set(re.findall(r"^([a-z-]+(?: [a-z-]+)*):", (TREE / "Makefile").read_text(), re.MULTILINE))
    known = {target for line in targets for target in line.split()}
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= known


def test_the_hosted_checks_are_those_of_every_change() -> None:
    """Each step of .ci/run, with torch for CPUs; a token that reads, and no two runs of one branch."""
    workflow = yaml.safe_load((TREE / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    lanes = [name for lane in job["strategy"]["matrix"]["lane"] for name in lane.split()]
    assert sorted(lanes) == sorted(re.findall(r"^step make (\S+)$", (TREE / ".ci" / "run").read_text(), re.MULTILINE))
    assert workflow["env"]["TORCH_INDEX"].endswith("/whl/cpu") and workflow["permissions"] == {"contents": "read"}
    assert {"group", "cancel-in-progress"} <= workflow["concurrency"].keys() and job["timeout-minutes"] <= 90


def test_the_version_stands_in_one_place() -> None:
    """And the section of the changelog that is being written belongs to it."""
    pyproject = (TREE / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.*)"', pyproject, re.MULTILINE)
    assert "version" not in yaml.safe_load((TREE / "CITATION.cff").read_text())
    section = re.search(r"^## (.*?), ", (TREE / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert section is not None and version.startswith(section[1])


def test_the_lines_that_loop_coverage_names_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TREE / "tools")
    from loop_coverage import EDITS, NEVER, all_loops

    assert [line for file, line, _, _ in EDITS if (TREE / file).read_text().count(line) != 1] == []
    assert {(loop.file, loop.text) for loop in all_loops()[1]} >= NEVER.keys()


# ---- containers: make lint has a linter for them ----


def stages(dockerfile: Path) -> list[str]:
    return re.findall(r"^FROM \S+ AS (\S+)$", dockerfile.read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_copies_files_that_exist(path: Path) -> None:
    text = path.read_text()
    copied = re.findall(r"^COPY (?!--from)(\S+) ", text, re.MULTILINE)
    assert copied and all((TREE / name).exists() for name in copied)
    assert set(re.findall(r"^COPY --from=(\S+)", text, re.MULTILINE)) <= set(stages(path))
    assert f"docker build -f docker/{path.name} " in text


def test_the_image_for_npus_pins_a_pair_that_passes() -> None:
    """One that docs/vnpu.md has as tested."""
    text = (TREE / "docker" / "npu.Dockerfile").read_text()
    pinned = re.findall(r" torch==(\S+).* torch_npu==(\S+)", text.replace("\\\n", ""))
    pairs = re.findall(r"^\| (\S+) \| (\S+) \| yes \|", (TREE / "docs" / "vnpu.md").read_text(), re.MULTILINE)
    assert len(pinned) == 1 and pinned[0] in pairs
