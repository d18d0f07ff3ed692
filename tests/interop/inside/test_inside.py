"""The programs of examples/inside print what docs/inside.md shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[3]
PAGE, EXAMPLES = TREE / "docs" / "inside.md", TREE / "examples" / "inside"
pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="not in a source tree")
FENCE = re.compile(r"^```sh\n(.*?)\n```\n\n```\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def shown() -> list[tuple[str, str]]:
    """The commands of the page and the output below each."""
    return FENCE.findall(PAGE.read_text()) if PAGE.is_file() else []


def test_the_page_shows_every_program() -> None:
    files = [re.search(r"examples/inside/(\w+\.py)$", command) for command, _ in shown()]
    assert sorted(found[1] for found in files if found) == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.nightly
@pytest.mark.parametrize(("command", "output"), shown(), ids=lambda value: value.rsplit("/", 1)[-1][:20])
def test_a_program_prints_what_the_page_shows(command: str, output: str) -> None:
    setting, torchrun, arguments = re.fullmatch(r"(\w+=\w+ )?(torchrun) (.*)", command).groups()  # type: ignore[union-attr]
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= dict([setting.strip().split("=")]) if setting else {}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments.split()]
    done = subprocess.run(launcher, cwd=TREE, env=env, capture_output=True, text=True, timeout=120)
    assert torchrun and done.returncode == 0, done.stderr
    assert done.stdout == output
