"""The README's example prints what the README shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from twin_oracle import TWIN, compiler


@pytest.mark.nightly
def test_the_example_of_the_readme(tmp_path: Path) -> None:
    compiler()
    kernel, program, printed = re.findall(r"```(?:cpp|python|)\n(.*?)```", (TWIN / "README.md").read_text(), re.DOTALL)[
        :3
    ]
    (tmp_path / "add.cpp").write_text(kernel)
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    assert done.stdout == printed
    fixed = kernel.replace("    DataCopy(out", "    PipeBarrier<PIPE_ALL>();\n    DataCopy(out")
    (tmp_path / "add.cpp").write_text(fixed)
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    assert "no finding" in done.stdout
