"""Checks what `ascend-moe` imports before it works: no torch where no tensor is needed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import ascend_moe
from ascend_moe import _autoload, cli

LIGHT = [
    ["--help"],
    ["--version"],
    ["plan"],
    ["plan", "-r", "64", "--json"],
    *([name, "--help"] for name in cli.COMMANDS),
]
# In one process, forked before each command: an interpreter of its own for each would take 0.3 s.
FORKS = """
import os, sys
from ascend_moe.cli import main
for words in eval(sys.argv[-1]):
    if not os.fork():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            main(words)
        except SystemExit as end:
            heavy = [name for name in ("torch", "numpy") if name in sys.modules]
            os._exit(end.code or (9 if heavy else 0))
    _, status = os.wait()
    print(*words, os.waitstatus_to_exitcode(status), flush=True)
"""


def as_command(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The program in a process that the package takes for one of `ascend-moe`."""
    head = f"import sys; sys.orig_argv = ['python', '-m', 'ascend_moe', 'plan']\n{program}"
    words = [sys.executable, "-c", head, *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=120, env={**os.environ})


def test_help_version_and_plan_import_no_torch() -> None:
    said = as_command(FORKS, repr(LIGHT)).stdout.splitlines()
    assert said == [f"{' '.join(words)} 0" for words in LIGHT]


def test_every_public_name_can_be_had_in_a_command() -> None:
    found = as_command(
        "import ascend_moe\n"
        "assert 'torch' not in sys.modules and set(ascend_moe.__all__) <= set(dir(ascend_moe))\n"
        "from ascend_moe import MoELayer, LocalCluster\n"
        "import torch\n"
        "torch.ops.ascend_moe.npu_moe_distribute_dispatch_v2\n"
        "print([name for name in ascend_moe.__all__ if getattr(ascend_moe, name, None) is None])\n"
    )
    assert found.stdout == "[]\n"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ascend_moe.nothing  # noqa: B018


def test_an_import_in_a_program_registers_the_operators() -> None:
    program = "import ascend_moe, torch; print(torch.ops.ascend_moe.npu_moe_distribute_combine_v2)"
    words = [sys.executable, "-c", program, "ascend-moe", "plan"]  # words of a program do not make it the command
    assert "npu_moe_distribute_combine_v2" in subprocess.run(words, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["python", "/usr/bin/ascend-moe", "plan", "-r", "2"], "plan"),
        (["python3.11", "-X", "dev", "-m", "ascend_moe", "doctor"], "doctor"),
        (["python", "-u", "/venv/bin/ascend-moe"], ""),
        (["python", "serve.py", "ascend-moe", "doctor"], None),
        (["python", "-m", "torch.distributed.run", "-m", "ascend_moe"], None),
        (["python", "-c", "import ascend_moe", "ascend_moe", "plan"], None),
        (["python"], None),
    ],
)
def test_the_command_of_a_process(words: list[str], command: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", words)
    assert _autoload.command() == command


def test_words_for_options_are_those_of_the_modules() -> None:
    from ascend_moe import choices, explore, predict
    from ascend_moe.bench import cases
    from ascend_moe.comm import lent
    from ascend_moe.interop.vllm import all2all
    from ascend_moe.native import plans
    from ascend_moe.predict import roundtrip
    from ascend_moe.reference.cases import DTYPES

    assert tuple(all2all.WAYS) == choices.PREPARE_FINALIZE
    assert lent.DTYPES == DTYPES == {name: getattr(torch, full) for name, full in choices.DTYPES.items()}
    assert choices.ALGORITHMS[1:] == plans.ALGORITHMS[1:]
    assert (tuple(cases.SKEWS), tuple(cases.SWEEPS)) == (choices.SKEWS, choices.SWEEPS)
    assert tuple(predict.ALGORITHMS) == choices.PREDICTED and tuple(roundtrip.PICKS) == choices.PICKS
    assert tuple(explore.POLICIES) == choices.POLICIES and str(explore.Program()) == choices.USUAL_CASE
