"""docs/debugging.md: its program prints what stands below it, on the fast engine and on the checked one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (TREE / "docs").is_dir(), reason="not in a source tree")
PAGE = TREE / "docs" / "debugging.md"
#: What is another one in each run: who finds it first, the group, the time, the file.
OF_A_RUN = [
    (r"found by rank \d", "found by rank N"),
    (r"local_cluster_\d+_\d+", "GROUP"),
    (r"process \d+", "process N"),
    (r"\d\d:\d\d:\d\d\.\d+ call", "TIME call"),
    (r"\d\d\d\d-\d\d-\d\d \d\d:\d\d:\d\d,\d+", "DATE"),
    (r"\d+ µs", "N µs"),
    (r"\S+_calls\.txt", "FILE"),
]


def neutral(text: str) -> list[str]:
    for pattern, name in OF_A_RUN:
        text = re.sub(pattern, name, text)
    return text.splitlines()


@pytest.mark.parametrize("engine", ["fast", pytest.param("checked", marks=pytest.mark.nightly)])
def test_the_program_prints_what_the_page_shows(engine: str, tmp_path: Path) -> None:
    _, program = PAGE.read_text().split("```python\n")
    program, _, rest = program.partition("```\n")
    printed, _, rest = rest.partition("```\n")[2].partition("```\n")
    logged = next(block for block in rest.split("```\n")[1::2] if "INFO" in block)
    settings = {"ASCEND_MOE_TIMEOUT_S": "1", "ASCEND_MOE_LOG": "info", "ASCEND_MOE_ENGINE": engine}
    env = {**os.environ, **settings, "ASCEND_MOE_CALLS": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert neutral(done.stdout) == neutral(printed)
    assert set(neutral(logged)) <= set(neutral(done.stderr))


def test_the_finding_is_that_of_the_example() -> None:
    """test_examples.py runs it."""
    shown = re.findall(r"^rank_race: .*$", PAGE.read_text(), re.MULTILINE)
    assert len(shown) == 1 and shown[0] in (TREE / "examples" / "find_a_race" / "README.md").read_text()
