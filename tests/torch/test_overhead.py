"""``python -m ascend_moe._overhead``: what it measures, and what it says where it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ascend_moe import _overhead
from ascend_moe.ops import compiled


def overhead(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ascend_moe._overhead", "--calls", "20", *words]
    return subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("kernels", _overhead.KERNELS)
def test_costs_of_every_op_and_caller(kernels: str) -> None:
    if kernels == "compiled" and compiled.why_not() is not None:
        pytest.skip(str(compiled.why_not()))
    done = overhead("--json", **{compiled.SWITCH: kernels})
    assert done.returncode == 0, done.stderr
    costs = [_overhead.Cost(**one) for one in json.loads(done.stdout)]
    assert {one.kernels for one in costs} == {kernels}
    assert {(one.op, one.caller) for one in costs} == {
        (f"npu_moe_distribute_{op}{version}", caller)
        for op in ("dispatch", "combine")
        for version in ("", "_v2")
        for caller in ("public", "torch.ops")
    }
    assert all(0 < one.am_run[0] <= one.am_run[1] and one.overhead[1] > 0 for one in costs)


# Runs at every start of Python with this folder on its path: no library fits the torch that is there.
NO_LIBRARY_FITS = """
from ascend_moe.ops import compiled
compiled.library_name = lambda: "libascend_moe_torch-0.so"
compiled.why_not.cache_clear()
compiled._open.cache_clear()
"""


def test_without_compiled_kernels_one_line_says_so(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_LIBRARY_FITS)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = overhead(PYTHONPATH=path, **{compiled.SWITCH: "auto"})
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("python -m ascend_moe._overhead: compiled kernels: no libascend_moe_torch")
    assert "build it with" in line
