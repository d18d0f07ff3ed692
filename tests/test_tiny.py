"""Does the installation work? On the fast engine: library, ops, errors, command line, in seconds."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ascend_moe import validate
from ascend_moe.native import library
from ascend_moe.reference.cases import Case


@pytest.mark.asan
def test_the_library_opens_and_is_of_these_sources() -> None:
    root = library.native_source_root()
    command = [sys.executable, str(root / "tools" / "source_hash.py"), str(root)]
    wanted = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert library.lib().am_source_hash().decode() == wanted


def test_tokens_visit_their_experts_and_come_home_and_wrong_calls_raise() -> None:
    outcome = validate.threads(4, [Case("plain", 4, local=4, batch=5), Case("int8", 4, quant_mode=2, contract=2)])
    assert outcome.ok, validate.text(outcome)
    assert {result.op for result in outcome.results} == {"dispatch", "combine", "errors"}


def test_the_command_line_starts() -> None:
    command = shutil.which("ascend-moe", path=str(Path(sys.executable).parent))
    words = [command] if command else [sys.executable, "-m", "ascend_moe"]
    run = subprocess.run([*words, "--help"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    for name in ("run", "doctor", "bench", "validate"):
        assert name in run.stdout
